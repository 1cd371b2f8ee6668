"""The default aux layers, and checks of given ones."""

import pytest

from peagle.errors import ConfigError
from peagle.targets.aux_layers import check_aux_layer_ids, default_aux_layer_ids


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, (0,)),
        (2, (1,)),
        (3, (1, 2)),
        (4, (1, 2, 3)),
        (5, (1, 2, 4)),
        (6, (1, 3, 5)),
        (7, (2, 3, 4)),
        (8, (2, 4, 5)),
        (12, (2, 6, 9)),
        (24, (2, 12, 21)),
        (30, (2, 15, 27)),
        (32, (2, 16, 29)),
    ],
)
def test_default_aux_layers_are_distinct_ascending_and_in_range(num_layers: int, expected: tuple[int, ...]) -> None:
    found = default_aux_layer_ids(num_layers)
    assert found == expected
    check_aux_layer_ids(found, num_layers)


@pytest.mark.parametrize("ids", [(8,), (-1, 2), (4, 2), (2, 2, 4), ()], ids=str)
def test_aux_layers_that_engines_would_read_otherwise_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_aux_layer_ids(ids, 8)
    assert f"distinct, ascending and between 0 and 7, got {list(ids)}" in caught.value.message
    assert "[2, 4, 5]" in str(caught.value.hint)
