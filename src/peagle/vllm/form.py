"""Convert a drafter to the layout that vLLM loads, if needed, and cache the result."""

import hashlib
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from peagle import __version__
from peagle.cache import cache_directory
from peagle.checkpoint.config_json import VLLM_ARCHITECTURES, read_object, vllm_mask_token_id
from peagle.checkpoint.layouts import CONFIG_NAME, PAIR_HEAD_NAME, WEIGHTS_NAME, tensor_types
from peagle.checkpoint.pairing import card_target
from peagle.errors import CapacityError, CheckpointError
from peagle.vllm.command import DrafterFacts, Installed, VllmSettings, check_combination
from peagle.vllm.models import Models, facts_of

log = logging.getLogger(__name__)

UNCHECKED = "-mismatch-allowed"
"""Suffix of cached drafters that were converted under --allow-mismatch."""
TARGET_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt")


def reason_to_convert(directory: Path, facts: DrafterFacts, vllm: Installed) -> str | None:
    """Why the drafter must be converted before vLLM can load it; None if it need not be."""
    names = tensor_types(directory)
    values = read_object(directory / CONFIG_NAME)
    if names is None:
        return "its weights are not in safetensors"
    if (directory / PAIR_HEAD_NAME).is_file():
        return "it has a pair head, and vLLM reads every safetensors file of a directory"
    if "mask_embedding" in names:
        return "it is in the compact form, without the embedding table"
    if any(name.startswith(("model.", "draft_model.")) for name in names):
        return "its tensors have prefixed names"
    if facts.parallel and "mask_hidden" not in names:
        return "it names a mask token but has no mask_hidden"
    if facts.parallel and vllm_mask_token_id(values) is None:
        return "vLLM does not read the key of its mask token"
    if facts.layout == "speculators":
        if "fc_norm" in facts.norms and facts.parallel:
            return "vLLM does not read fc_norm from the layout of speculators"
        return None if vllm.has("speculators") else f"vLLM {vllm.version} does not read the layout of speculators"
    if not set(VLLM_ARCHITECTURES) & set(values.get("architectures") or ()):
        return f"vLLM has no architecture {', '.join(values.get('architectures') or ['(none)'])}"
    vocab_size = values.get("vocab_size") or 0
    if (values.get("draft_vocab_size") or vocab_size) < vocab_size and "d2t" not in names:
        return "it has a smaller vocabulary but no d2t"
    return None


def in_vllm_form(
    models: Models, vllm: Installed, *, allow_mismatch: bool = False, compare_weights: bool = False
) -> Models:
    """`models` with a drafter that vLLM can load: unchanged, or converted into the cache, once.

    Converting loads the target on the CPU, for its embedding table and to compare it with the drafter's card. The
    cache key covers the files of both, so a cached drafter has passed that check. `compare_weights` loads the target
    for a drafter that needs no conversion, too.
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
        check_target(directory, models, allow_mismatch, with_weights=compare_weights)
        return models
    destination = _place(directory, models, allow_mismatch)
    if (destination / WEIGHTS_NAME).is_file():
        check_target(directory, models, allow_mismatch)
        if destination.name.endswith(UNCHECKED):
            log.warning("%s was converted under --allow-mismatch: it may not fit the target", destination)
    else:
        log.info("converting the drafter for vLLM into %s: %s", destination, reason)
        _write(directory, models, destination, allow_mismatch)
    converted = replace(
        facts_of(destination),
        trained_draft_tokens=facts.trained_draft_tokens,
        advised_draft_tokens=facts.advised_draft_tokens,
    )
    return replace(models, drafter=converted)


def prepare(
    models: Models, settings: VllmSettings, vllm: Installed, *, allow_mismatch: bool, here: bool = True
) -> VllmSettings:
    """`settings` with a drafter that vLLM can load. Refuses what cannot work before it converts the drafter.

    If vLLM does not run `here`, a drafter on the hub is not fetched to be checked.
    """
    check_combination(settings, vllm, os.environ if here else {})
    if settings.drafter is None or not (here or Path(settings.drafter.model).is_dir()):
        return settings
    drafter = in_vllm_form(models, vllm, allow_mismatch=allow_mismatch, compare_weights=not here).drafter
    assert drafter is not None
    return replace(settings, drafter=replace(drafter, parallel=settings.drafter.parallel))


def _place(directory: Path, models: Models, allow_mismatch: bool) -> Path:
    """The cache directory for this drafter and target.

    One converted under --allow-mismatch has another name, so that it is used only with that option.
    """
    from peagle.targets.load import find_target

    target_directory = models.directory or find_target(models.asked or models.target)
    key = _digest(directory, models.target, target_directory)
    compared = cache_directory() / "vllm" / f"{models.drafter_name}-{key}"
    if not allow_mismatch or (compared / WEIGHTS_NAME).is_file():
        return compared
    return compared.with_name(compared.name + UNCHECKED)


def _digest(directory: Path, target: str, target_directory: Path) -> str:
    """A short key of the drafter's files, the target's files and our version.

    The target's files may be large, so only their names, sizes and modification times count.
    """
    digest = hashlib.sha256(f"{__version__}:{target}".encode())
    for path in sorted(target_directory.iterdir()):
        if path.is_file() and path.suffix in TARGET_SUFFIXES:
            facts = path.stat()
            digest.update(f"{path.name}:{facts.st_size}:{facts.st_mtime_ns};".encode())
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin", ".pt"):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def _write(directory: Path, models: Models, destination: Path, allow_mismatch: bool) -> None:
    import torch

    from peagle.checkpoint.card import card_of
    from peagle.checkpoint.native import load_drafter
    from peagle.checkpoint.vllm import write
    from peagle.targets.load import load_target

    is_float32 = "F32" in (tensor_types(directory) or {}).values()
    target = load_target(models.asked, dtype="float32" if is_float32 else "bfloat16", device="cpu")
    drafter = load_drafter(directory, target, allow_mismatch=allow_mismatch)
    dtype, place = torch.float32 if is_float32 else torch.bfloat16, destination.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".writing-", ignore_cleanup_errors=True) as scratch:
            write(drafter, target, card_of(drafter, target), Path(scratch) / "drafter", dtype=dtype)
            (Path(scratch) / "drafter").rename(destination)
    except OSError as error:
        if not destination.is_dir():  # otherwise another process has just converted it
            raise CheckpointError(
                f"cannot write the drafter to {place}: {error}",
                hint="set PEAGLE_CACHE to a writable directory with enough space",
            ) from error


def check_target(directory: Path, models: Models, allow_mismatch: bool, *, with_weights: bool = False) -> None:
    """Compare tokenizer, chat template and, optionally, weights with the card, if the target is on this machine."""
    card = card_target(directory)
    if not card or models.directory is None:
        return
    from peagle.targets.load import load_tokenizer
    from peagle.tokenizer import chat_template_hash, tokenizer_hash

    tokenizer = load_tokenizer(models.directory)
    ours = {"tokenizer": tokenizer_hash(tokenizer), "chat template": chat_template_hash(tokenizer)}
    found = [f"another {what}" for what, value in ours.items() if card.get(what.replace(" ", "_")) not in (None, value)]
    if with_weights and card.get("weights") is not None and _fingerprint(models) not in (None, card["weights"]):
        found.append("other weights")
    if not found:
        return
    message = f"{directory} was trained for target {card.get('name')!r}; this target has {' and '.join(found)}"
    if not allow_mismatch:
        raise CheckpointError(message, hint="use the drafter's own target, or pass --allow-mismatch to try it anyway")
    log.warning("%s", message)


def _fingerprint(models: Models) -> str | None:
    """The fingerprint of the target's weights; None if they exceed this machine's memory."""
    from peagle.targets.load import load_target

    log.info("comparing the weights of %s with the drafter's card", models.name)
    try:
        return load_target(models.directory, dtype="bfloat16", device="cpu").fingerprint()
    except CapacityError as error:
        log.warning("the weights are not compared with the drafter's card: %s", error.message)
        return None
