"""The target and the drafter that vLLM is told to load, found by the names we use; `vllm_form.py` prepares them."""

import json
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.deploy.vllm import DrafterFacts, Layout
from peagle.errors import CheckpointError, ConfigError
from peagle.targets.catalog import ASSETS, DEFAULT_TARGET, CatalogDrafter, CatalogEntry, check_spelling, find

log = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME = "config.json", "model.safetensors", "model.safetensors.index.json"
CARD_NAME = "drafter_card.json"
HYBRID = ("GptOss", "Gemma")
"""Beginnings of architectures whose layers attend partly to a window and partly to the whole text."""
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
NORMS = ("fc_norm", "norm_output")


@dataclass(frozen=True)
class Models:
    """What is served, as vLLM is told it."""

    target: str
    """a directory or a Hugging Face id"""
    name: str
    directory: Path | None
    """of the target, where it is on this machine"""
    drafter: DrafterFacts | None = None
    drafter_name: str | None = None
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    """what the drafter's card says it was measured at"""
    architecture: str | None = None
    """as the catalog names it"""

    @property
    def config(self) -> dict[str, Any]:
        """The target's own settings, those of its text part; empty where it is not on this machine."""
        if self.directory is None or not (self.directory / CONFIG_NAME).is_file():
            return {}
        values = read_json(self.directory / CONFIG_NAME)
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
    """Find a target and its drafter by a path, a catalog name or a Hugging Face id.

    A GGUF target is converted first, once. `here` fetches a published drafter to look at it; without it such a
    drafter is known by what the catalog says of it, or else by its config.json on the hub.
    """
    name = target or DEFAULT_TARGET
    entry = find(name)
    models = _find_target(name, entry)
    if entry is not None and entry.package is not None and not _is_name(name, entry):
        entry = None  # its drafters were trained on the weights in the package, not on those of the hub
    if not wants_drafter:
        return models
    source = _find_drafter(drafter, entry, max_length)
    if source is None:
        log.info("no drafter is known for %s: plain decoding", models.name)
        return models
    listed = source if isinstance(source, CatalogDrafter) else None
    where = _source_of(listed, models.name) if listed is not None else source
    assert isinstance(where, str)
    path = Path(where).expanduser()
    if listed is not None and listed.where in ("package", "directory") and not path.is_dir():
        raise CheckpointError(
            f"the drafter {listed.variant!r} of {models.name} is not at {path}", hint="give one with --drafter DIR"
        )
    if path.is_dir():
        directory: Path | None = path.resolve()
    elif here:
        from peagle.targets.hub import fetch

        directory = fetch(where, what="drafter")
    else:
        directory = None
    model = str(directory) if path.is_dir() else where
    if directory is not None:
        facts = facts_of(directory, model)
    else:
        facts = DrafterFacts(model, listed.method == "p-eagle") if listed is not None else _published(model)
    if listed is not None:
        trained = facts.trained_draft_tokens or listed.trained_draft_tokens
        facts = replace(facts, trained_draft_tokens=trained, advised_draft_tokens=listed.num_draft_tokens)
    acceptance = card_values(directory).get("acceptance") or {} if directory is not None else {}
    return replace(models, drafter=facts, drafter_name=path.name, acceptance=acceptance)


def _find_target(name: str, entry: CatalogEntry | None) -> Models:
    """The target of a name. The catalog's own name may stand for other weights, an id or a path only for its own."""
    if entry is not None and _is_name(name, entry):
        if entry.package is None and not Path(entry.target).expanduser().is_dir():
            return Models(entry.quantized_target or entry.target, entry.name, None, architecture=entry.architecture)
        return _converted(entry.name, entry.name)
    path = Path(name).expanduser()
    if path.is_dir():
        return Models(str(path.resolve()), path.resolve().name, path.resolve())
    if path.exists():
        return _converted(name, path.stem)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"no target at {name!r}", hint="give a directory, a GGUF file, a catalog name or a hub id")
    if entry is None:
        check_spelling(name)
    return Models(name, name, None, architecture=None if entry is None else entry.architecture)


def _is_name(name: str, entry: CatalogEntry) -> bool:
    """Whether it is the entry's name that was given, not the id of its target or of that one's quantized twin."""
    return name.lower() == entry.name


def _converted(name: str, short: str) -> Models:
    from peagle.targets.load import find_target

    directory = find_target(name).resolve()
    return Models(str(directory), short, directory)


def _find_drafter(
    drafter: str | None, entry: CatalogEntry | None, max_length: int | None
) -> CatalogDrafter | str | None:
    """A drafter of the catalog, or a directory or Hugging Face id; None where none is given and none is known."""
    if drafter is None:
        return entry.drafter(max_length=max_length) if entry is not None and entry.drafters else None
    if Path(drafter).expanduser().is_dir():
        return drafter
    if entry is not None:
        for each in entry.drafters:
            if drafter in (each.variant, each.source):
                return each
    if (ASSETS / drafter).is_dir():
        return str(ASSETS / drafter)
    if drafter.count("/") != 1 or drafter.startswith((".", "/", "~")):
        raise CheckpointError(
            f"no directory {drafter}, and no drafter of that name is known",
            hint="give a drafter's directory, its Hugging Face id or the name of a variant in `peagle catalog`",
        )
    return drafter


def _source_of(drafter: CatalogDrafter, target: str) -> str:
    drafter.check_public(target)
    assert drafter.source is not None
    return str(ASSETS / drafter.source) if drafter.where == "package" else drafter.source


def _published(model_id: str) -> DrafterFacts:
    """What a drafter's small files on the hub say; its kind stays open where they cannot be had."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model_id, allow_patterns=[CONFIG_NAME, CARD_NAME]))
        if not (directory / CONFIG_NAME).is_file():
            raise FileNotFoundError("it is not there")
    except Exception as error:  # no network, offline mode, gated, unknown: whoever says the kind can go on
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("%s: its %s cannot be fetched: %s", model_id, CONFIG_NAME, reason)
        return DrafterFacts(model_id, parallel=None)
    return facts_of(directory, model_id)


def facts_of(directory: Path, model: str | None = None) -> DrafterFacts:
    """What the files of a drafter directory say to vLLM. Only headers are read, no weights."""
    if not (directory / CONFIG_NAME).is_file():
        raise CheckpointError(f"no drafter at {directory}: {CONFIG_NAME} is missing")
    values = read_json(directory / CONFIG_NAME)
    layout: Layout = "vllm"
    trained: int | None = None
    if values.get("speculators_model_type") is not None:
        layout = "speculators"
        methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
        trained = methods[0].get("speculative_tokens")
        values = (values.get("transformer_layer_config") or {}) | values
    values = (values.get("eagle_config") or {}) | values
    names = tensor_types(directory) or {}
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return DrafterFacts(
        model=model or str(directory),
        parallel="mask_hidden" in names or any(values.get(key) is not None for key in MASK_TOKEN_KEYS),
        trained_draft_tokens=card_values(directory).get("num_draft_tokens") or trained,
        max_length=values.get("max_position_embeddings"),
        num_heads=values.get("num_attention_heads"),
        layout=layout,
        norms=tuple(name for name in NORMS if values.get(name)),
        uses_mrope="mrope_section" in rope,
    )


def tensor_types(directory: Path) -> dict[str, str] | None:
    """Names and types (as "BF16") of the directory's tensors, read from headers; None without safetensors."""
    files = [directory / WEIGHTS_NAME]
    if (directory / INDEX_NAME).is_file():
        files = [directory / name for name in sorted(set(read_json(directory / INDEX_NAME)["weight_map"].values()))]
    found: dict[str, str] = {}
    for path in files:
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, 2**27)))
            found |= {name: each["dtype"] for name, each in header.items() if name != "__metadata__"}
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", hint="it is cut short; copy it again") from error
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="it is corrupt; copy it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def card_values(directory: Path) -> dict[str, Any]:
    """What stands on a drafter's card; nothing where it has none."""
    path = directory / CARD_NAME
    return read_json(path) if path.is_file() else {}
