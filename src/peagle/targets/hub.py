"""Models on the Hugging Face hub: the local cache first, then the hub, and in plain words what went wrong.

Downloading, the cache and its place (HF_HOME, HF_HUB_CACHE), offline mode (HF_HUB_OFFLINE) and tokens (HF_TOKEN) are
`huggingface_hub`'s own.
"""

import json
import logging
from pathlib import Path
from typing import Any, Literal

from peagle.errors import CheckpointError, PeagleError, TargetError

log = logging.getLogger(__name__)

What = Literal["target", "tokenizer", "drafter"]

KNOWN = "`peagle catalog` lists those it knows"
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# Makers keep copies of the weights in other forms beside them: in folders (`original/`, `metal/`), or as one file more.
WANTED: dict[What, dict[str, Any]] = {
    "target": {"allow_patterns": [*TOKENIZER_FILES, "*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]},
    "tokenizer": {"allow_patterns": TOKENIZER_FILES, "ignore_patterns": ["*/*", "*.index.json"]},
    "drafter": {"allow_patterns": ["*.json", "*.safetensors", "*.bin"], "ignore_patterns": ["*/*"]},
}


def looks_like_an_id(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~"))


def fetch(model_id: str, what: What) -> Path:
    """The directory of a model id's files: the local cache's, where they are complete, else downloaded into it."""
    return cached(model_id, what) or download(model_id, what)


def download(model_id: str, what: What) -> Path:
    """Bring a model id's files into the local cache, as far as they are not there; the directory they are in."""
    from huggingface_hub import errors, snapshot_download

    log.info("downloading the %s %s", what, model_id)
    try:
        directory = Path(snapshot_download(model_id, local_files_only=False, **WANTED[what]))
    except errors.GatedRepoError as error:
        raise _error(
            what,
            f"{model_id!r} is gated: its makers ask for their license to be accepted first",
            f"accept it on https://huggingface.co/{model_id}, then log in with `hf auth login` or set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _error(
            what,
            f"no {what} at {model_id!r}: not a directory, and the Hugging Face hub has no such model, or it is private",
            f"check the name ({KNOWN}); for a private one log in with `hf auth login` or set HF_TOKEN",
        ) from error
    except Exception as error:  # no network, offline mode, the hub's own trouble, no room: each of another library
        raise _unreachable(model_id, what, error) from error
    if not _is_complete(directory, what):
        raise _error(
            what,
            f"{model_id!r} has no {'tokenizer' if what == 'tokenizer' else 'config.json with weights beside it'}",
            "it is not a model of transformers' form; give one that is",
        )
    return directory


def cached(model_id: str, what: What) -> Path | None:
    """The directory in the local cache, if it holds all that is wanted; nothing is asked of the hub."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model_id, local_files_only=True, **WANTED[what]))
    except Exception:  # absent, cut off in the middle of a download, or not even a possible id
        return None
    return directory if _is_complete(directory, what) else None


def count_parameters(model_id: str) -> int | None:
    """How many numbers the hub says the model's weights hold; None where it does not say or cannot be asked."""
    from huggingface_hub import HfApi

    try:
        held: Any = HfApi().model_info(model_id, expand=["safetensors"], timeout=10).safetensors
        # A byte holds two numbers of four bits.
        return sum(count * (2 if dtype == "U8" else 1) for dtype, count in held.parameters.items())
    except Exception:  # the download that follows says what is wrong
        return None


def _is_complete(directory: Path, what: What) -> bool:
    """Whether nothing is missing that every model has; a download can have been cut off."""
    if what == "tokenizer":
        return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not (directory / "config.json").is_file():
        return False
    for kind in ("safetensors", "bin"):  # the first form that is there; of a second one only the index may be fetched
        try:
            indices = [json.loads(index.read_text()) for index in directory.glob(f"*.{kind}.index.json")]
            shards = {shard for index in indices for shard in index["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if shards or any(path.is_file() for path in directory.glob(f"*.{kind}")):
            return all((directory / shard).is_file() for shard in shards)
    return False


def _unreachable(model_id: str, what: What, error: Exception) -> PeagleError:
    from huggingface_hub import constants, errors

    cause: BaseException = error
    while isinstance(cause, errors.LocalEntryNotFoundError) and cause.__cause__ is not None:
        cause = cause.__cause__
    place = f"not a directory, not in the local cache ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE or isinstance(cause, errors.OfflineModeIsEnabled):
        return _error(
            what,
            f"no {what} at {model_id!r}: {place}, and HF_HUB_OFFLINE forbids to ask the hub",
            f"check the name ({KNOWN}), unset HF_HUB_OFFLINE, or bring the files here (`hf download {model_id}`)",
        )
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return _error(
        what,
        f"no {what} at {model_id!r}: {place}, and the Hugging Face hub cannot be reached ({reason})",
        f"check the name ({KNOWN}) and the network, or bring the files here (`hf download {model_id}`)",
    )


def _error(what: What, message: str, hint: str) -> PeagleError:
    return (CheckpointError if what == "drafter" else TargetError)(message, hint=hint)
