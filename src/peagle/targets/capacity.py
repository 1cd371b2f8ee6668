"""Check that a target's weights fit the device, from numbers alone, before anything is downloaded or loaded."""

import platform
from math import prod
from pathlib import Path

import torch

from peagle.errors import CapacityError
from peagle.host_memory import available_bytes
from peagle.quantized.formats import quantization_config
from peagle.quantized.headers import read_few_bit
from peagle.quantized.keep import TABLES, kept_bytes
from peagle.quantized.load import keepable
from peagle.safetensors_header import read_header, weight_files
from peagle.targets import hub
from peagle.targets.catalog import FEW_BITS, GB, CatalogEntry
from peagle.targets.few_bit import quantized_bytes

SUGGESTED = ("fp8", "int4")
"""Forms of weights for `--quantize`, the more exact one first."""


def count_parameters(directory: Path) -> int:
    """The number of parameters in the directory's safetensors files, read from their headers; 0 without such files.

    Few-bit weights count as the plain weights that loading makes of them: MXFP4 stores two per byte, as `..._blocks`.
    Scales are not counted. Refuses few-bit weights that cannot be read.
    """
    if (few_bit := read_few_bit(directory)) is not None:
        return few_bit.num_parameters
    total = 0
    for path in weight_files(directory):
        for name, info in read_header(path).items():
            if not name.endswith(("_scales", "_scale_inv")):
                total += prod(info.shape) * (2 if name.endswith("_blocks") and info.dtype == "U8" else 1)
    return total


def keeps_few_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether quantized weights are kept: our kernels need a GPU and bfloat16."""
    return device.type == "cuda" and dtype == torch.bfloat16


def check_fits(
    name: str,
    num_parameters: int,
    dtype: torch.dtype,
    device: torch.device,
    entry: CatalogEntry | None = None,
    directory: Path | None = None,
    quantize: str | None = None,
) -> None:
    """Refuse weights that exceed the device's free memory. The KV cache comes on top.

    Weights that are rounded to the form `quantize` while loading must fit the host if they do not fit the GPU.
    """
    plain = needed = num_parameters * dtype.itemsize
    kind, is_kept = f"of {dtype.itemsize} bytes ({str(dtype).removeprefix('torch.')}) take", False
    if quantize is not None:
        needed, kind = quantized_bytes(num_parameters, quantize, _num_plain(directory)), f"in {quantize} take about"
    elif keeps_few_bits(device, dtype) and (stored := _stored_bytes(name, dtype, entry, directory) or plain) < plain:
        needed, kind, is_kept = stored, "in their quantized form take", True
    if device.type == "cuda":
        room, where = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    else:
        room, where = available_bytes(), f"this {platform.machine()} machine"
    if needed > room:
        ways = [_device(dtype), _rounding(num_parameters, device, room, entry, directory, is_kept)]
        raise CapacityError(
            f"{name} does not fit: {num_parameters / GB:.1f} billion parameters {kind} {needed / GB:.1f} GB, but "
            f"{where} has {room / GB:.1f} GB free",
            hint="".join([*ways, _vllm(entry, directory, is_kept)]),
        )
    if quantize is not None and plain > max(room, available_bytes()):
        raise CapacityError(
            f"{name} cannot be rounded to {quantize} here: its plain weights, {plain / GB:.1f} GB, fit neither "
            f"{where} nor the {available_bytes() / GB:.1f} GB of free host memory",
            hint="use a machine with more memory",
        )


def _stored_bytes(name: str, dtype: torch.dtype, entry: CatalogEntry | None, directory: Path | None) -> int | None:
    """Bytes of weights that are kept quantized as stored; None if they are plain."""
    if directory is not None:
        checkpoint = keepable(directory) if quantization_config(directory) else None
        return None if checkpoint is None else kept_bytes(checkpoint, dtype.itemsize)
    if entry is None:
        return hub.few_bit_bytes(name)
    if entry.stored_gb is None or not (entry.keeps_few_bits or name.lower() == (entry.quantized_target or "").lower()):
        return None
    return round(entry.stored_gb * GB)


def _num_plain(directory: Path | None) -> int | None:
    """The parameters of a directory's embedding and head, which `--quantize` leaves plain."""
    if directory is None:
        return None
    infos = [info for path in weight_files(directory) for info in read_header(path).items()]
    return sum(prod(info.shape) for name, info in infos if name.split(".")[-2:-1] in ([table] for table in TABLES))


def _device(dtype: torch.dtype) -> str:
    return "use a device with more memory" + (", or --dtype bfloat16" if dtype.itemsize > 2 else "")


def _rounding(
    num_parameters: int,
    device: torch.device,
    room: int,
    entry: CatalogEntry | None,
    directory: Path | None,
    is_kept: bool,
) -> str:
    """The most exact form of `--quantize` that fits; empty if none does, or the weights are already quantized."""
    is_few_bit = is_kept or _is_stored(directory) or (entry is not None and entry.weights in FEW_BITS)
    if device.type != "cuda" or is_few_bit:
        return ""
    num_plain = _num_plain(directory)
    sizes = {form: quantized_bytes(num_parameters, form, num_plain) for form in SUGGESTED}
    ways = (f", or --quantize {form} (about {size / GB:.1f} GB)" for form, size in sizes.items() if size <= room)
    return next(ways, "")


def _vllm(entry: CatalogEntry | None, directory: Path | None, is_kept: bool) -> str:
    """What vLLM does better, if anything."""
    if entry is not None and "vllm" in entry.engines:
        is_smaller = not is_kept and (entry.quantized_target is not None or entry.weights in FEW_BITS)
        way = f"runs its quantized weights, {entry.vllm_gb():.1f} GB" if is_smaller else "spreads it over several GPUs"
        return f"; vLLM {way}: `peagle serve {entry.name} --engine vllm`"
    if _is_stored(directory) and not is_kept:
        return f"; vLLM runs its quantized weights as they are: `peagle serve {directory} --engine vllm`"
    return ""


def _is_stored(directory: Path | None) -> bool:
    return directory is not None and bool(quantization_config(directory))
