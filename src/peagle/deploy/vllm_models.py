"""The target and the drafter that vLLM is told to load: found by the names we use, and put into vLLM's form."""

import hashlib
import json
import logging
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle import __version__
from peagle.deploy.vllm import DrafterFacts, Installed, Layout
from peagle.errors import CheckpointError, ConfigError
from peagle.export.architectures import ARCHITECTURES
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
    acceptance = _card(directory).get("acceptance") or {} if directory is not None else {}
    return replace(models, drafter=facts, drafter_name=path.name, acceptance=acceptance)


def _find_target(name: str, entry: CatalogEntry | None) -> Models:
    if entry is not None and entry.package is None and not Path(entry.target).expanduser().is_dir():
        return Models(entry.quantized_target or entry.target, entry.name, None, architecture=entry.architecture)
    path = Path(name).expanduser()
    if entry is None and not path.exists():
        if name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise ConfigError(
                f"no target at {name!r}", hint="give a directory, a GGUF file, a catalog name or a hub id"
            )
        check_spelling(name)
        return Models(name, name, None)
    if entry is None and path.is_dir():
        return Models(str(path.resolve()), path.resolve().name, path.resolve())
    from peagle.targets.load import find_target

    directory = find_target(entry.name if entry is not None else name).resolve()
    short = entry.name if entry is not None else path.stem if path.is_file() else directory.name
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
        trained_draft_tokens=_card(directory).get("num_draft_tokens") or trained,
        max_length=values.get("max_position_embeddings"),
        num_heads=values.get("num_attention_heads"),
        layout=layout,
        norms=tuple(name for name in NORMS if values.get(name)),
        uses_mrope="mrope_section" in rope,
    )


def reason_to_convert(directory: Path, facts: DrafterFacts, vllm: Installed) -> str | None:
    """Why vLLM cannot load the directory as it is, though the drafter itself would do; None where it can."""
    names = tensor_types(directory)
    values = read_json(directory / CONFIG_NAME)
    if names is None:
        return "its weights are not in safetensors"
    if "mask_embedding" in names:
        return "it is in the compact form, without the embedding table"
    if any(name.startswith(("model.", "draft_model.")) for name in names):
        return "its tensors have prefixed names"
    if facts.parallel and "mask_hidden" not in names:
        return "it names a mask token but has no mask_hidden"
    if facts.layout == "speculators":
        if "fc_norm" in facts.norms and facts.parallel:
            return "vLLM does not read fc_norm from the layout of speculators"
        return None if vllm.has("speculators") else f"vLLM {vllm.version} does not read the layout of speculators"
    if not set(ARCHITECTURES) & set(values.get("architectures") or ()):
        return f"vLLM has no architecture {', '.join(values.get('architectures') or ['(none)'])}"
    if values.get("draft_vocab_size", 0) < values.get("vocab_size", 0) and "d2t" not in names:
        return "it has a smaller vocabulary but no d2t"
    return None


def in_vllm_form(models: Models, vllm: Installed, *, target: str | None, allow_mismatch: bool = False) -> Models:
    """`models` with a drafter that vLLM can load: as it is, or written in vLLM's form into the cache, once.

    Writing loads the target on the CPU, for its embedding table and to compare it with the drafter's card.
    """
    facts = models.drafter
    if facts is None:
        return models
    directory = Path(facts.model)
    if not directory.is_dir():
        from peagle.targets.hub import fetch

        directory = fetch(facts.model, what="drafter")
    reason = reason_to_convert(directory, facts, vllm)
    if reason is None:
        check_texts(directory, models, allow_mismatch)
        return models
    from peagle.targets.load import cache_directory

    destination = cache_directory() / "vllm" / f"{models.drafter_name}-{_digest(directory, models.target)}"
    if not (destination / WEIGHTS_NAME).is_file():
        log.info("writing the drafter in vLLM's form into %s, because %s", destination, reason)
        _write(directory, target, destination, allow_mismatch)
    converted = replace(
        facts_of(destination),
        trained_draft_tokens=facts.trained_draft_tokens,
        advised_draft_tokens=facts.advised_draft_tokens,
    )
    return replace(models, drafter=converted)


def _write(directory: Path, target_name: str | None, destination: Path, allow_mismatch: bool) -> None:
    import torch

    from peagle.drafter.checkpoint import load_drafter
    from peagle.export.card import card_of
    from peagle.export.vllm import write
    from peagle.targets.load import load_target

    is_float32 = "F32" in (tensor_types(directory) or {}).values()
    target = load_target(target_name, dtype="float32" if is_float32 else "bfloat16", device="cpu")
    drafter = load_drafter(directory, target, allow_mismatch=allow_mismatch)
    destination.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=destination.parent, prefix=".writing-"))
    try:
        dtype = torch.float32 if is_float32 else torch.bfloat16
        write(drafter, target, card_of(drafter, target), scratch / "drafter", dtype=dtype)
        try:
            (scratch / "drafter").rename(destination)
        except OSError:
            if not destination.is_dir():  # else another process has written the same meanwhile
                raise
    except OSError as error:
        raise CheckpointError(
            f"cannot keep the drafter in {destination.parent}: {error}",
            hint="set PEAGLE_CACHE to a directory that can be written and has room",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_texts(directory: Path, models: Models, allow_mismatch: bool) -> None:
    """Compare tokenizer and chat template with the card; the weights are not loaded here, `peagle doctor` does."""
    card = _card(directory).get("target") or {}
    if not card or models.directory is None:
        return
    from peagle.targets.load import load_tokenizer
    from peagle.tokenizer import chat_template_hash, tokenizer_hash

    tokenizer = load_tokenizer(models.directory)
    ours = {"tokenizer": tokenizer_hash(tokenizer), "chat template": chat_template_hash(tokenizer)}
    found = [what for what, value in ours.items() if card.get(what.replace(" ", "_")) not in (None, value)]
    if not found:
        return
    message = (
        f"{directory} was trained for target {card.get('name')!r}; the given one has another {' and '.join(found)}"
    )
    if not allow_mismatch:
        raise CheckpointError(message, hint="use the drafter's own target, or pass --allow-mismatch to try it anyway")
    log.warning("%s", message)


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


def _card(directory: Path) -> dict[str, Any]:
    path = directory / CARD_NAME
    return read_json(path) if path.is_file() else {}


def _digest(directory: Path, target: str) -> str:
    """A short key of a drafter's files, of its target and of the version that writes."""
    digest = hashlib.sha256(f"{__version__}:{target}".encode())
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin", ".pt"):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]
