"""Which target layers a drafter reads. Id i means the residual stream ENTERING layer i."""

from peagle.errors import ConfigError


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Layers 2, L/2 and L-3, the usual choice. For L < 7 these collide: layers 1, L/2 and L-1, without duplicates."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))


def check_aux_layer_ids(aux_layer_ids: tuple[int, ...], num_layers: int) -> None:
    in_order = tuple(sorted(set(aux_layer_ids))) == tuple(aux_layer_ids)
    if not aux_layer_ids or not in_order or not all(0 <= index < num_layers for index in aux_layer_ids):
        raise ConfigError(
            f"aux_layer_ids must be distinct, ascending and between 0 and {num_layers - 1}, got {list(aux_layer_ids)}",
            hint=f"the default for this target is {list(default_aux_layer_ids(num_layers))}",
        )
