"""Load a target from a name or a path: find it, convert it, choose its device and dtype."""

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peagle.cache import cache_directory
from peagle.errors import CheckpointError, TargetError, first_line
from peagle.experts.few_bit import set_experts
from peagle.experts.fused import gate_of
from peagle.host_memory import total_bytes
from peagle.native.gguf_blocks import attach_blocks, blocks_path, write_blocks
from peagle.quantized.formats import quantization_config
from peagle.quantized.keep import Keep
from peagle.quantized.load import forget_quantization, load_model
from peagle.safetensors_header import check_whole, weight_files
from peagle.targets import few_bit, hub
from peagle.targets.capacity import check_fits, count_parameters, keeps_few_bits
from peagle.targets.catalog import DEFAULT_TARGET, CatalogEntry, check_spelling, find
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
    quantize: str | None = None,
    aux_layer_ids: tuple[int, ...] | None = None,
) -> HFTarget:
    """Load a target from a directory, a GGUF file, a catalog name, or a Hugging Face model id.

    None loads the embedded default. A GGUF file is converted once, to safetensors in the cache directory
    (`PEAGLE_CACHE`, else ~/.cache/peagle). The choice behind "auto" is logged with its reason.

    quantize: keep the weights of the decoder layers in "int4", "int8" or "fp8", or those of experts in "mxfp4". Needs a
    GPU and bfloat16. The fingerprint stays that of the weights before.
    """
    name = DEFAULT_TARGET if target is None else os.fspath(target)
    entry = find(name)
    chosen_device = choose_device(device)
    directory = local_target(name, entry)
    num_parameters = _num_parameters(name, entry, directory)
    chosen_dtype = choose_dtype(dtype, chosen_device, 4 * num_parameters)
    if quantize is not None:
        few_bit.check_quantize(quantize, chosen_device, chosen_dtype)
    _check(name, entry, directory, num_parameters, chosen_dtype, chosen_device, quantize)
    if directory is None:
        directory = hub.download(_model_id(name, entry), "target")
        num_parameters = _num_parameters(name, entry, directory)  # the hub does not know it of few-bit weights
        _check(name, entry, directory, num_parameters, chosen_dtype, chosen_device, quantize)
    placement = _placement(chosen_device, num_parameters * chosen_dtype.itemsize, quantize)
    model, tokenizer = _read(directory, chosen_dtype, chosen_device, placement)
    found = HFTarget(
        model if quantize is not None else model.to(chosen_device),
        tokenizer,
        name=_short_name(name, entry),
        source=_source(name, entry),
        directory=directory,
        entry=None if entry is None or (entry.package is not None and not _is_name(name, entry)) else entry,
        aux_layer_ids=aux_layer_ids,
    )
    if quantize is not None or any(few_bit.few_bit_modules(model)):
        found.keep_fingerprint()  # drafters are made for the weights before rounding; an engine joins rounded ones
    if quantize is not None:
        few_bit.quantize_model(model, quantize, chosen_device)
        found.rounded_to = quantize
        log.info("the layers' weights are kept in %s: %.1f GB in all", quantize, few_bit.num_bytes(model) / 1e9)
    return found


def load_tokenizer(target: str | os.PathLike[str] | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a target, without its weights."""
    from transformers import AutoTokenizer

    directory = find_target(DEFAULT_TARGET if target is None else os.fspath(target), "tokenizer")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # transformers and tokenizers raise many types
        raise TargetError(
            f"cannot load a tokenizer from {directory}: {first_line(error)}",
            hint="it needs tokenizer.json, or files that transformers can convert to one",
        ) from error
    return tokenizer


def find_target(name: str, what: hub.What = "target") -> Path:
    """The safetensors directory of a name or path; converts GGUF and downloads if necessary."""
    entry = find(name)
    return local_target(name, entry, what) or hub.download(_model_id(name, entry), what)


def local_target(name: str, entry: CatalogEntry | None, what: hub.What = "target") -> Path | None:
    """The local directory of a name or path; converts GGUF. None for a model id that must be downloaded.

    A catalog name takes precedence over a directory of the same name.
    """
    if entry is not None and _is_name(name, entry):
        if Path(name).exists():
            log.info("%s is a catalog name; for the directory, pass ./%s", name, name)
        if entry.package is not None:
            return convert_gguf(entry.package.path(entry.name), entry.name)
        name = entry.target
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    hub.check_path(name)
    if path.is_file():
        return convert_gguf(path, path.stem)
    if (directory := hub.cached(name, what)) is None:
        check_spelling(name)
    return directory


def _check(
    name: str,
    entry: CatalogEntry | None,
    directory: Path | None,
    num_parameters: int,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str | None,
) -> None:
    """Refuse weights that do not fit, and --quantize for weights that are already quantized."""
    if directory is not None:
        method = quantization_config(directory).get("quant_method")
    else:
        method = entry.weights if entry is not None and entry.keeps_few_bits else None
    if quantize is not None and method:
        raise TargetError(
            f"{name} is already quantized ({method}), and --quantize would round it twice",
            hint="load it without --quantize, or quantize the original model",
        )
    check_fits(_short_name(name, entry), num_parameters, dtype, device, entry, directory, quantize)


def _read(
    directory: Path, dtype: torch.dtype, device: torch.device, placement: dict[str, Any]
) -> "tuple[Any, PreTrainedTokenizerBase]":
    """The model and the tokenizer of a directory, complete."""
    from transformers import AutoTokenizer

    keep = Keep(_numbered(device), gate_of, set_experts) if keeps_few_bits(device, dtype) else None
    try:
        model, report = load_model(directory, dtype, keep, **placement)
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # transformers, safetensors and tokenizers raise many types
        raise TargetError(
            f"cannot load a causal LM from {directory}: {first_line(error)}",
            hint="it needs config.json, tokenizer.json and safetensors weights of one model",
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise TargetError(
            f"{directory} lacks {len(missing)} of the model's tensors, the first of them {missing[0]!r}",
            hint="the weights are incomplete; copy or download them again",
        )
    if unlike := sorted(report["mismatched_keys"]):
        name, stored, wanted = unlike[0]
        raise TargetError(
            f"{directory}: {name!r} is stored as {list(stored)}, but config.json makes it {list(wanted)}",
            hint="config.json and the weights belong to different models; copy or download both again",
        )
    if device.type == "cpu" and dtype == torch.float32:
        attach_blocks(model, directory)
    return model, tokenizer


def _placement(device: torch.device, num_bytes: int, quantize: str | None = None) -> dict[str, Any]:
    """Options that load large weights directly to the GPU, because they might not fit in host memory."""
    if device.type != "cuda" or num_bytes <= total_bytes() // 2:
        return {}
    if quantize is not None and num_bytes > torch.cuda.mem_get_info(device)[0]:
        return {}  # layer by layer
    return {"device_map": {"": _numbered(device)}}


def _numbered(device: torch.device) -> torch.device:
    """The device with its number: "cuda" is the current one, and threads that load weights have one of their own."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _num_parameters(name: str, entry: CatalogEntry | None, directory: Path | None) -> int:
    """The number of parameters: from local files, else from the catalog or the hub."""
    if directory is not None:
        try:
            for path in weight_files(directory):
                check_whole(path)
            return count_parameters(directory)
        except CheckpointError as error:
            raise TargetError(f"cannot load a causal LM from {directory}: {error.message}", hint=error.hint) from error
    if entry is not None:
        return entry.num_parameters
    return hub.count_parameters(name) or 0


def _model_id(name: str, entry: CatalogEntry | None) -> str:
    return entry.target if entry is not None and _is_name(name, entry) else name


def _is_name(name: str, entry: CatalogEntry) -> bool:
    """Whether `name` is the entry's name, rather than the id of its target or quantized target."""
    return name.lower() == entry.name


def _short_name(name: str, entry: CatalogEntry | None) -> str:
    """The display name of a target: its catalog name, model id, or the last part of its path."""
    if entry is not None and _is_name(name, entry):
        return entry.name
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.stem if path.is_file() else path.resolve().name


def _source(name: str, entry: CatalogEntry | None) -> str:
    """What finds the target again from any working directory: its catalog name, model id, or absolute path."""
    if entry is not None and _is_name(name, entry):
        return entry.name
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


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
            raise TargetError(f"device {device} is not available: torch sees no GPU", hint="use --device cpu")
        if (chosen.index or 0) >= num_gpus:
            raise TargetError(
                f"device {device} is not available: there are {num_gpus} GPUs", hint="they start at cuda:0"
            )
    return chosen


def choose_dtype(dtype: str, device: torch.device, float32_bytes: int = 0) -> torch.dtype:
    """The dtype of a name. "auto" is bfloat16 on a GPU that supports it, and on a CPU the most exact one that fits.

    On a CPU, verifying several tokens rounds differently from decoding one, so only float32 answers are equal with and
    without drafts to the last token. If the weights, `float32_bytes`, exceed half of the memory, "auto" is bfloat16,
    but only on a CPU with bfloat16 instructions: without them products are 10 to 100 times slower.
    """
    processor = f"this {platform.machine()} CPU {'has' if has_native_bfloat16() else 'lacks'} bfloat16 instructions"
    if dtype != "auto":
        if dtype not in DTYPES:
            raise TargetError(f"unknown dtype {dtype!r}", hint=f"use auto, {', '.join(DTYPES)}")
        if dtype == "bfloat16" and device.type == "cpu" and not has_native_bfloat16():
            log.warning("dtype bfloat16: %s; --dtype float32 is exact, and 10 to 100 times faster here", processor)
            # torch says the same, with a C++ stack trace.
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
        return DTYPES[dtype]
    if device.type == "cuda":
        is_low, reason = torch.cuda.is_bf16_supported(), torch.cuda.get_device_name(device)
    elif float32_bytes <= total_bytes() // 2:
        is_low, reason = False, f"exact, and the weights fit ({processor})"
    else:
        size = f"{float32_bytes / 2**30:.0f} of {total_bytes() / 2**30:.0f} GiB of memory"
        is_low, reason = has_native_bfloat16(), f"float32 weights would take {size}; {processor}"
    chosen = torch.bfloat16 if is_low else torch.float32
    log.info("dtype %s: %s", str(chosen).removeprefix("torch."), reason)
    return chosen


def has_native_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions."""
    flags = _cpu_flags()
    return bool(flags & {"amx_bf16", "avx512_bf16"}) or (platform.machine() == "aarch64" and "bf16" in flags)


def _cpu_flags() -> set[str]:
    """The words of /proc/cpuinfo, instruction flags among them; empty if there is no such file."""
    with contextlib.suppress(OSError):
        return set(Path("/proc/cpuinfo").read_text().split())
    return set()


def convert_gguf(path: Path, name: str) -> Path:
    """Dequantize a GGUF file to a bfloat16 safetensors directory in the cache, once, and return the directory.

    The rounded weights define the target, whatever dtype it runs in.
    """
    destination = cache_directory() / "targets" / f"{name}-{_gguf_digest(path)}"
    if not destination.is_dir():
        _convert_gguf(path, destination)
    if not blocks_path(destination).is_file():
        try:
            write_blocks(path, destination)
        except OSError as error:  # blocks make a CPU faster; without them the engine computes the same
            log.info("the blocks of %s are not kept: %s", path.name, error)
    return destination


def _convert_gguf(path: Path, destination: Path) -> None:
    log.info("converting %s once, into %s", path.name, destination)
    model, tokenizer = _read_gguf(path)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Renaming a finished directory is atomic.
        with tempfile.TemporaryDirectory(
            dir=destination.parent, prefix=".converting-", ignore_cleanup_errors=True
        ) as scratch:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            Path(scratch).rename(destination)
    except OSError as error:
        if not destination.is_dir():  # otherwise another process finished the same conversion first
            raise TargetError(
                f"cannot write the converted weights to {destination.parent}: {error}",
                hint="set PEAGLE_CACHE to a writable directory with enough space",
            ) from error


def _read_gguf(path: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    except Exception as error:  # gguf, numpy, struct and transformers raise many types
        raise TargetError(
            f"{path} cannot be read as a GGUF model: {first_line(error)}",
            hint="it is truncated, or transformers cannot convert its architecture",
        ) from error
    config = model.config
    forget_quantization(model)
    tokenizer.clean_up_tokenization_spaces = False  # it removes spaces of byte-level text
    # Some files give the tokenizer a wrong end token; the model's metadata has the right one.
    if config.eos_token_id is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
            config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        )
    return model, tokenizer


def _gguf_digest(path: Path) -> str:
    """A hash of a GGUF file's size and of 128 pieces of 16 KiB spread over it, including the first and the last.

    Metadata is not enough: two trainings of one model can have the same.
    """
    size, piece, num_pieces = path.stat().st_size, 1 << 14, 128
    digest = hashlib.sha256(f"{size}:".encode())
    with path.open("rb") as file:
        for index in range(num_pieces):
            file.seek(max(size - piece, 0) * index // (num_pieces - 1))
            digest.update(file.read(piece))
    return digest.hexdigest()[:12]
