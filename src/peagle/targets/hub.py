"""Models on the Hugging Face Hub: look in the local cache first, then download, with clear errors.

`huggingface_hub` handles the cache (HF_HOME, HF_HUB_CACHE), offline mode (HF_HUB_OFFLINE) and tokens (HF_TOKEN).
"""

import logging
from pathlib import Path
from typing import Any, Literal

from peagle.errors import CheckpointError, TargetError, first_line
from peagle.targets.safetensors_header import read_index

log = logging.getLogger(__name__)

What = Literal["target", "tokenizer", "drafter"]

KNOWN = "`peagle catalog` lists known models"
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# Repositories may hold copies of the weights in other formats: in folders (`original/`, `metal/`) or as extra files.
WANTED: dict[What, dict[str, Any]] = {
    "target": {"allow_patterns": [*TOKENIZER_FILES, "*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]},
    "tokenizer": {"allow_patterns": TOKENIZER_FILES, "ignore_patterns": ["*/*", "*.index.json"]},
    "drafter": {"allow_patterns": ["*.json", "*.safetensors", "*.bin"], "ignore_patterns": ["*/*"]},
}


def looks_like_an_id(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~"))


def fetch(model_id: str, what: What) -> Path:
    """The local directory of a model id's files, downloaded unless the cache has them all."""
    return cached(model_id, what) or download(model_id, what)


def download(model_id: str, what: What) -> Path:
    """Download the missing files of a model id to the local cache and return their directory."""
    from huggingface_hub import constants, errors, snapshot_download

    log.info("downloading the %s %s", what, model_id)
    problem = CheckpointError if what == "drafter" else TargetError
    try:
        directory = Path(snapshot_download(model_id, local_files_only=False, **WANTED[what]))
    except errors.GatedRepoError as error:
        raise problem(
            f"{model_id!r} is gated: you must accept its license first",
            hint=f"accept it on https://huggingface.co/{model_id}, then run `hf auth login` or set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise problem(
            f"no {what} at {model_id!r}: not a directory, and the Hugging Face Hub has no such model, or it is private",
            hint=f"check the name ({KNOWN}); for a private model run `hf auth login` or set HF_TOKEN",
        ) from error
    except Exception as error:  # no network, offline mode, hub errors, full disk: from several libraries
        reason, advice = _why_unreachable(error)
        raise problem(
            f"no {what} at {model_id!r}: not a directory, not in the local cache ({constants.HF_HUB_CACHE}), "
            f"and {reason}",
            hint=f"check the name ({KNOWN}){advice}, or copy the files (`hf download {model_id}`)",
        ) from error
    try:
        _check_complete(directory, what)
    except CheckpointError as error:
        message = f"{model_id!r} is not a complete {what}: {error.message}"
        raise problem(message, hint=f"check the repository ({KNOWN})") from error
    return directory


def cached(model_id: str, what: What) -> Path | None:
    """The directory in the local cache if it is complete; never contacts the hub."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model_id, local_files_only=True, **WANTED[what]))
        _check_complete(directory, what)
    except Exception:  # not downloaded, partly downloaded, or not a valid id
        return None
    return directory


def count_parameters(model_id: str) -> int | None:
    """The number of parameters according to the hub; None if unknown or unreachable."""
    from huggingface_hub import HfApi

    try:
        held: Any = HfApi().model_info(model_id, expand=["safetensors"], timeout=10).safetensors
        # A byte holds two 4-bit weights.
        return sum(count * (2 if dtype == "U8" else 1) for dtype, count in held.parameters.items())
    except Exception:  # the download reports the problem
        return None


def _check_complete(directory: Path, what: What) -> None:
    """Refuse a snapshot that lacks files: a download can be interrupted."""
    if what == "tokenizer":
        if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise CheckpointError(f"{directory} has no tokenizer.json")
        return
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json")
    for kind in ("safetensors", "bin"):  # a second form of the weights may be there with nothing but its index
        shards = [path for index in sorted(directory.glob(f"*.{kind}.index.json")) for path in read_index(index)]
        if shards or any(path.is_file() for path in directory.glob(f"*.{kind}")):
            return
    raise CheckpointError(f"{directory} has no weights")


def _why_unreachable(error: BaseException) -> tuple[str, str]:
    """The reason that the hub has no answer, and what to do about it."""
    from huggingface_hub import constants, errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    if constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set", ", unset HF_HUB_OFFLINE"
    return f"the Hugging Face Hub cannot be reached ({first_line(error)})", " and the network"
