"""A drafter in the form that vLLM loads: why it must be written anew, where that is kept, what is checked before."""

import hashlib
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from peagle import __version__
from peagle.deploy.vllm import DrafterFacts, Installed
from peagle.deploy.vllm_models import CONFIG_NAME, WEIGHTS_NAME, Models, card_values, facts_of, read_json, tensor_types
from peagle.errors import CheckpointError
from peagle.export.architectures import ARCHITECTURES
from peagle.targets.catalog import DEFAULT_TARGET

log = logging.getLogger(__name__)

UNCHECKED = "-mismatch-allowed"
"""End of the names of drafters in the cache that were written whether or not they fit their target."""
TARGET_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt")


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
    vocab_size = values.get("vocab_size") or 0
    if (values.get("draft_vocab_size") or vocab_size) < vocab_size and "d2t" not in names:
        return "it has a smaller vocabulary but no d2t"
    return None


def in_vllm_form(models: Models, vllm: Installed, *, target: str | None, allow_mismatch: bool = False) -> Models:
    """`models` with a drafter that vLLM can load: as it is, or written in vLLM's form into the cache, once.

    Writing loads the target on the CPU, for its embedding table and to compare it with the drafter's card. What is
    found in the cache was written for the same files of both, so that comparison holds.
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
    destination = _place(directory, models, target, allow_mismatch)
    if (destination / WEIGHTS_NAME).is_file():
        check_texts(directory, models, allow_mismatch)
        if destination.name.endswith(UNCHECKED):
            log.warning("%s was written under --allow-mismatch, for whatever target was given", destination)
    else:
        log.info("writing the drafter in vLLM's form into %s, because %s", destination, reason)
        _write(directory, target, destination, allow_mismatch)
    converted = replace(
        facts_of(destination),
        trained_draft_tokens=facts.trained_draft_tokens,
        advised_draft_tokens=facts.advised_draft_tokens,
    )
    return replace(models, drafter=converted)


def _place(directory: Path, models: Models, target: str | None, allow_mismatch: bool) -> Path:
    """Where the cache has, or is to get, this drafter for this target.

    What was written although it might not fit has a place of its own: only who allows that again may use it.
    """
    from peagle.targets.load import cache_directory, find_target

    target_directory = models.directory or find_target(target or DEFAULT_TARGET)
    key = _digest(directory, models.target, target_directory)
    compared = cache_directory() / "vllm" / f"{models.drafter_name}-{key}"
    if not allow_mismatch or (compared / WEIGHTS_NAME).is_file():
        return compared
    return compared.with_name(compared.name + UNCHECKED)


def _digest(directory: Path, target: str, target_directory: Path) -> str:
    """A short key of a drafter's files, of its target and of the version that writes.

    Of the target, whose files may be large, name, size and time of each: a target that is trained on in place differs.
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
    card = card_values(directory).get("target") or {}
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
