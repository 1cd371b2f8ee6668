"""Find the target and the drafter that vLLM should load. `form.py` converts the drafter if needed."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.checkpoint.card import CARD_NAME
from peagle.checkpoint.config_json import is_parallel, read_object, read_values, trained_draft_tokens
from peagle.checkpoint.layouts import CONFIG_NAME, complete_directory, tensor_types, vllm_name
from peagle.checkpoint.pairing import card_values, check_config, target_of
from peagle.errors import CheckpointError, ConfigError
from peagle.targets.catalog import ASSETS, DEFAULT_TARGET, CatalogDrafter, CatalogEntry, check_spelling, find
from peagle.targets.hub import published
from peagle.vllm.command import DrafterFacts, Layout

log = logging.getLogger(__name__)

HYBRID = ("GptOss", "Gemma")
"""Prefixes of architectures that mix sliding-window and full attention."""
NORMS = ("fc_norm", "norm_output")


@dataclass(frozen=True)
class Models:
    """A target and its drafter."""

    target: str
    """a directory or a Hugging Face id"""
    name: str
    directory: Path | None
    """of the target; None if it is not on this machine"""
    drafter: DrafterFacts | None = None
    drafter_name: str | None = None
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    """the measurements on the drafter's card"""
    architecture: str | None = None
    """from the catalog"""
    asked: str | None = None
    """what the user calls the target; `target` may be a quantized copy of it"""

    @property
    def config(self) -> dict[str, Any]:
        """The target's config.json, with its text_config merged in; empty if it is not on this machine."""
        if self.directory is None or not (self.directory / CONFIG_NAME).is_file():
            return {}
        values = read_object(self.directory / CONFIG_NAME)
        return values | (values.get("text_config") or {})

    @property
    def max_length(self) -> int | None:
        return self.config.get("max_position_embeddings")

    @property
    def is_hybrid(self) -> bool:
        if self.directory is None:
            return (self.architecture or "").startswith(HYBRID)
        return len(set(self.config.get("layer_types") or ())) > 1


def find_models(
    target: str | None,
    drafter: str | None,
    *,
    wants_drafter: bool = True,
    max_length: int | None = None,
    here: bool = True,
) -> Models:
    """Find a target and its drafter by path, catalog name or Hugging Face id.

    A drafter without a target means the target on its card. A GGUF target is converted first, once. With `here` a
    drafter on the hub is fetched to read its files; without it, the catalog or the drafter's config.json on the hub has
    to do. Sizes that do not fit are refused.
    """
    if target is None and drafter is not None and wants_drafter:
        target = target_of(drafter)
    name = target or DEFAULT_TARGET
    entry = find(name)
    # A catalog name may mean a quantized copy; an id or a path means exactly itself.
    is_name = entry is not None and name.lower() == entry.name
    own = entry
    if entry is not None and entry.package is not None and not is_name:
        own = None  # its drafters fit the weights in the package, not those on the hub
    source = _find_drafter(drafter, own, max_length) if wants_drafter else None
    models = replace(_find_target(name, entry, is_name=is_name), asked=name)
    if not wants_drafter:
        return models
    if source is None:
        log.info("no known drafter for %s: plain decoding", models.name)
        return models
    listed = None if isinstance(source, str) else source
    where = source if isinstance(source, str) else _source_of(source, models.name)
    path = Path(where).expanduser()
    directory: Path | None = None
    if path.is_dir():
        directory = complete_directory(path.resolve())
        facts = facts_of(directory)
    elif listed is not None and listed.where in ("package", "directory"):
        what = f"the drafter {listed.variant!r} of {models.name}"
        raise CheckpointError(f"{what} is not at {path}", hint="pass --drafter DIR")
    elif here:
        from peagle.targets.hub import fetch

        directory = fetch(where, what="drafter")
        facts = facts_of(directory, where)
    elif listed is not None:
        facts = DrafterFacts(where, listed.method == "p-eagle")
    else:
        directory = published(where, CONFIG_NAME, CARD_NAME)
        facts = DrafterFacts(where, parallel=None) if directory is None else facts_of(directory, where)
    if directory is not None and listed is None:
        check_config(directory, models.config or _published_config(models.target), models.name)
    if listed is not None:
        trained = facts.trained_draft_tokens or listed.trained_draft_tokens
        facts = replace(facts, trained_draft_tokens=trained, advised_draft_tokens=listed.num_draft_tokens)
    acceptance = card_values(directory).get("acceptance") or {} if directory is not None else {}
    return replace(models, drafter=facts, drafter_name=path.name, acceptance=acceptance)


def known_drafter(drafter: str | None, target: str | None, max_length: int | None) -> DrafterFacts | None:
    """What is known of a drafter before anything is loaded or fetched: by its directory or the catalog."""
    source = _find_drafter(drafter, find(target or DEFAULT_TARGET), max_length)
    if isinstance(source, CatalogDrafter):
        return DrafterFacts(source.name, source.method == "p-eagle")
    path = Path(source or "").expanduser()
    return facts_of(complete_directory(path.resolve()), source) if source is not None and path.is_dir() else None


def _find_target(name: str, entry: CatalogEntry | None, *, is_name: bool) -> Models:
    architecture = None if entry is None else entry.architecture
    if entry is not None and is_name and entry.package is None and not Path(entry.target).expanduser().is_dir():
        return Models(entry.quantized_target or entry.target, entry.name, None, architecture=architecture)
    path = Path(name).expanduser()
    if path.is_dir() and not is_name:
        return Models(str(path.resolve()), path.resolve().name, path.resolve())
    if is_name or path.exists():
        from peagle.targets.load import find_target

        directory = find_target(name).resolve()
        return Models(str(directory), name.lower() if is_name else path.stem, directory)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"no target at {name!r}", hint="give a directory, a GGUF file, a catalog name or a hub id")
    if entry is None:
        check_spelling(name)
    return Models(name, name, None, architecture=architecture)


def _find_drafter(
    drafter: str | None, entry: CatalogEntry | None, max_length: int | None
) -> CatalogDrafter | str | None:
    """A catalog drafter, a directory or a Hugging Face id; None if none is given and none is known."""
    if drafter is None:
        return entry.drafter(max_length=max_length) if entry is not None and entry.drafters else None
    if Path(drafter).expanduser().is_dir():
        return drafter
    for each in entry.drafters if entry is not None else ():
        if drafter in (each.variant, each.source):
            return each
    if (ASSETS / drafter).is_dir():
        return str(ASSETS / drafter)
    if drafter.count("/") != 1 or drafter.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{drafter} is neither a directory nor a known drafter",
            hint="pass a drafter's directory, its Hugging Face id or a variant in `peagle catalog`",
        )
    return drafter


def _source_of(drafter: CatalogDrafter, target: str) -> str:
    drafter.check_public(target)
    assert drafter.source is not None
    return str(ASSETS / drafter.source) if drafter.where == "package" else drafter.source


def _published_config(model_id: str) -> dict[str, Any]:
    directory = published(model_id, CONFIG_NAME)
    return {} if directory is None else Models(model_id, model_id, directory).config


def facts_of(directory: Path, model: str | None = None) -> DrafterFacts:
    """Facts from the files of a drafter directory. Reads headers, no weights."""
    values = read_values(directory / CONFIG_NAME)
    layout: Layout = "vllm" if values.get("speculators_model_type") is None else "speculators"
    names = {vllm_name(name) for name in tensor_types(directory) or ()}
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return DrafterFacts(
        model=model or str(directory),
        parallel=is_parallel(values, names),
        trained_draft_tokens=card_values(directory).get("num_draft_tokens") or trained_draft_tokens(values),
        max_length=values.get("max_position_embeddings"),
        num_heads=values.get("num_attention_heads"),
        layout=layout,
        norms=tuple(name for name in NORMS if values.get(name)),
        uses_mrope="mrope_section" in rope,
    )
