"""Models on the Hugging Face Hub: look in the local cache first, then download, with clear errors.

`huggingface_hub` handles the cache (HF_HOME, HF_HUB_CACHE), offline mode (HF_HUB_OFFLINE) and tokens (HF_TOKEN).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from peagle.errors import CheckpointError, TargetError, first_line
from peagle.safetensors_header import read_index
from peagle.targets.catalog import check_spelling, entries, find

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


def check_source(name: str) -> None:
    """Refuse a target that is not there: a path, a model id, or the package of a catalog name. Downloads nothing."""
    entry = find(name)
    if entry is not None and name.lower() == entry.name and entry.package is not None:
        entry.package.path(entry.name)
        return
    if entry is not None and not Path(name).expanduser().exists():
        return  # the catalog knows more than the hub: sizes, and heads that nobody can have
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise TargetError(
            f"cannot load a causal LM from {path}: config.json is missing",
            hint="it needs config.json, tokenizer.json and safetensors weights of one model",
        )
    check_path(name)
    if not path.exists() and cached(name, "target") is None:
        check_spelling(name)
        check_published(name, "target")


def check_path(name: str) -> None:
    """Refuse a file that is not GGUF, and a path that is neither there nor a model id."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise TargetError(
            f"{path} is a file, but not a GGUF file",
            hint="pass a directory with config.json and safetensors, or a .gguf file",
        )
    if not path.exists() and not looks_like_an_id(name):
        raise TargetError(
            f"no target at {name!r}: not a directory, and not a GGUF file",
            hint=f"check the path; catalog names: {', '.join(each.name for each in entries())}",
        )


def check_published(model_id: str, what: What) -> None:
    """Refuse a model id that the hub does not have, or cannot be asked for."""
    from huggingface_hub import HfApi

    with _explained(model_id, what):
        HfApi().model_info(model_id, timeout=10)


def download(model_id: str, what: What) -> Path:
    """Download the missing files of a model id to the local cache and return their directory."""
    from huggingface_hub import snapshot_download

    log.info("downloading the %s %s", what, model_id)
    with _explained(model_id, what):
        directory = Path(snapshot_download(model_id, local_files_only=False, **WANTED[what]))
    try:
        _check_complete(directory, what)
    except CheckpointError as error:
        message = f"{model_id!r} is not a complete {what}: {error.message}"
        raise _problem(what)(message, hint=f"check the repository ({KNOWN})") from error
    return directory


@contextmanager
def _explained(model_id: str, what: What) -> Iterator[None]:
    """Turn errors of the hub into ours."""
    from huggingface_hub import constants, errors

    problem = _problem(what)
    try:
        yield
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


def _problem(what: What) -> type[CheckpointError | TargetError]:
    return CheckpointError if what == "drafter" else TargetError


def cached(model_id: str, what: What) -> Path | None:
    """The directory in the local cache if it is complete; never contacts the hub."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model_id, local_files_only=True, **WANTED[what]))
        _check_complete(directory, what)
    except Exception:  # not downloaded, partly downloaded, or not a valid id
        return None
    return directory


def published(model_id: str, *names: str) -> Path | None:
    """A directory with the named small files of a model on the hub; None if its config.json cannot be fetched."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model_id, allow_patterns=list(names)))
        if not (directory / "config.json").is_file():
            raise FileNotFoundError("no such file")
    except Exception as error:  # no network, offline, gated or unknown
        log.warning("%s: cannot fetch its config.json: %s", model_id, first_line(error))
        return None
    return directory


def count_parameters(model_id: str) -> int | None:
    """The number of parameters according to the hub, at least; None if unknown or unreachable."""
    counts, quantization = _stored(model_id)
    # A byte holds two 4-bit weights, an int32 as many as the config says, or at least four.
    held = {"U8": 2, "I32": 32 // quantization.get("bits", 8)}
    return sum(count * held.get(dtype, 1) for dtype, count in counts.items()) if counts else None


def few_bit_bytes(model_id: str) -> int | None:
    """Bytes of quantized weights, according to the hub; None if they are plain, or unknown."""
    counts, quantization = _stored(model_id)
    bytes_each = {"U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4}  # others are loaded in 2 bytes
    return sum(count * bytes_each.get(dtype, 2) for dtype, count in counts.items()) if quantization else None


def _stored(model_id: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The numbers of each dtype that the hub counts in the files, and the quantization_config; empty if unknown."""
    from huggingface_hub import HfApi

    try:
        about: Any = HfApi().model_info(model_id, expand=["safetensors", "config"], timeout=10)
        return dict(about.safetensors.parameters), (about.config or {}).get("quantization_config") or {}
    except Exception:  # the download reports the problem
        return {}, {}


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
