"""Which target a drafter belongs to, and whether their sizes fit, from small files alone. Does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.checkpoint.card import CARD_NAME
from peagle.checkpoint.config_json import AUX_KEY, read_object, read_values
from peagle.checkpoint.layouts import CONFIG_NAME, WEIGHTS_NAME, complete_directory, weights_files
from peagle.errors import CheckpointError, nearest
from peagle.targets import hub
from peagle.targets.catalog import ASSETS, CatalogEntry, entries, find

HOLDS = f"a drafter directory holds {CONFIG_NAME} and {WEIGHTS_NAME}, or shards of it with their index"


def target_of(drafter: str) -> str | None:
    """The target that a drafter was trained for, as `load_target` takes it; None if nothing says which.

    `drafter` is a directory, a shipped name or a Hugging Face id. The catalog knows some by name; otherwise the card
    or a config.json of speculators names the target. A path on the card that no longer exists is an error.
    """
    path = Path(drafter).expanduser()
    if not path.is_dir():
        for entry in entries():
            if any(drafter == each.source for each in entry.drafters):
                return entry.name
    directory = _small_files(drafter)
    if directory is None:
        return None
    identity = card_target(directory)
    name, source = identity.get("name"), identity.get("source") or _verifier(directory)
    if source is None:  # an older card has only the name
        entry_of_name = find(str(name))
        return None if entry_of_name is None else entry_of_name.name
    if find(source) is None and not hub.looks_like_an_id(source) and not Path(source).expanduser().exists():
        raise CheckpointError(
            f"{directory} was trained for target {name or Path(source).name!r} at {source}, which does not exist",
            hint="pass --target with its directory on this machine",
        )
    return str(source)


def _small_files(drafter: str) -> Path | None:
    """A directory with a drafter's config.json and card; None if it cannot be had. Fetches no weights."""
    path = Path(drafter).expanduser()
    if path.is_dir():
        return complete_directory(path)
    if (shipped := in_package(path)) is not None:
        return shipped
    if not _is_id(drafter):
        return None
    return hub.cached(drafter, "drafter") or hub.published(drafter, CONFIG_NAME, CARD_NAME)


def in_package(drafter: Path) -> Path | None:
    """The directory of the drafter that ships under this name; None if there is none."""
    directory = ASSETS / drafter
    return directory if len(drafter.parts) == 1 and (directory / CONFIG_NAME).is_file() else None


def _is_id(drafter: str) -> bool:
    return drafter.count("/") == 1 and hub.looks_like_an_id(drafter)


def _verifier(directory: Path) -> str | None:
    """The target that a directory in the layout of speculators names."""
    if not (directory / CONFIG_NAME).is_file():
        return None
    found: Any = read_object(directory / CONFIG_NAME)
    for key in ("speculators_config", "verifier", "name_or_path"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def card_values(directory: Path) -> dict[str, Any]:
    """The drafter's card as written; empty if it has none."""
    path = directory / CARD_NAME
    return read_object(path) if path.is_file() else {}


def card_target(directory: Path) -> dict[str, Any]:
    """The target's identity on the card as written; empty if there is none."""
    found = card_values(directory).get("target")
    return found if isinstance(found, dict) else {}


def check_drafter(drafter: str, entry: CatalogEntry | None) -> None:
    """Refuse a drafter that is not there: neither a directory, nor in the target's entry, nor on the hub."""
    path = Path(drafter).expanduser()
    if path.is_dir():
        check_complete(complete_directory(path))
        return
    variants = [] if entry is None else [each.variant for each in entry.drafters]
    sources = [] if entry is None else [each.source for each in entry.drafters]
    if drafter in (*variants, *sources):
        return
    if _is_id(drafter):
        if hub.cached(drafter, "drafter") is None:
            hub.check_published(drafter, "drafter")
        return
    if entry is None and in_package(path) is not None:  # for a fine-tune of its target
        return
    if entry is None or len(path.parts) != 1:
        raise CheckpointError(f"no directory {path}", hint=HOLDS)
    message = f"no directory {path}, and the catalog has no drafter of that name for {entry.name}"
    raise CheckpointError(message, hint=nearest(drafter, variants))


def check_complete(directory: Path) -> None:
    """Refuse a directory without a config or without weights."""
    missing = [] if (directory / CONFIG_NAME).is_file() else [CONFIG_NAME]
    missing += [] if weights_files(directory) else [WEIGHTS_NAME]
    for name in missing:
        raise CheckpointError(f"no drafter at {directory}: {name} is missing", hint=HOLDS)


def check_config(directory: Path, target: Mapping[str, Any], name: str) -> None:
    """Compare the sizes in a drafter's config.json with the target's, as far as both name them."""
    values = read_values(directory / CONFIG_NAME)
    width = values.get("target_hidden_size", values.get("hidden_size"))
    sizes = {
        "vocab_size": (values.get("vocab_size"), target.get("vocab_size")),
        "target_hidden_size": (width, target.get("hidden_size")),
    }
    aux: Any = values.get(AUX_KEY)
    num_layers: Any = target.get("num_hidden_layers")
    is_known = isinstance(aux, list) and all(type(index) is int for index in aux) and type(num_layers) is int
    check_sizes(directory, name, sizes, aux if is_known else (), num_layers if is_known else 0)


def check_sizes(
    directory: Path, name: str, sizes: Mapping[str, tuple[Any, Any]], aux_layer_ids: Sequence[int], num_layers: int
) -> None:
    """Refuse a drafter that cannot work with the target `name`. `sizes` are pairs, the drafter's first."""
    trained = card_target(directory).get("name")
    hint = "the drafter belongs to another target" + (f", {trained!r}: pass it as the target" if trained else "")
    for key, (ours, theirs) in sizes.items():
        if type(ours) is type(theirs) is int and ours != theirs:
            raise CheckpointError(
                f"{directory / CONFIG_NAME}: {key} is {ours}, but target {name!r} has {theirs}", hint=hint
            )
    if aux_layer_ids and (max(aux_layer_ids) >= num_layers or min(aux_layer_ids) < 0):
        raise CheckpointError(
            f"{directory / CONFIG_NAME}: the drafter reads layers {list(aux_layer_ids)}, "
            f"but those of target {name!r} are 0 to {num_layers - 1}",
            hint=f"{hint}, or its ids count from 1",
        )
