"""Check that a target's weights fit the device, from numbers alone, before anything is downloaded or loaded."""

import platform
from math import prod
from pathlib import Path

import torch

from peagle.errors import CapacityError
from peagle.host_memory import available_bytes
from peagle.quantized.formats import quantization_config
from peagle.quantized.headers import read_few_bit
from peagle.quantized.keep import kept_bytes
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
    """Whether weights that are stored in few bits stay so: our kernels need a GPU and bfloat16."""
    return device.type == "cuda" and dtype == torch.bfloat16


def _stored_bytes(name: str, dtype: torch.dtype, entry: CatalogEntry | None, directory: Path | None) -> int | None:
    """Bytes of weights that are kept in few bits as they are stored; None if they are plain."""
    if directory is not None:
        checkpoint = keepable(directory) if quantization_config(directory) else None
        return None if checkpoint is None else kept_bytes(checkpoint, dtype.itemsize)
    if entry is None:
        return hub.few_bit_bytes(name)
    if entry.stored_gb is None or not (entry.weights in FEW_BITS or name == entry.quantized_target):
        return None
    return round(entry.stored_gb * GB)


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
    kind = f"of {dtype.itemsize} bytes ({str(dtype).removeprefix('torch.')}) take"
    if quantize is not None:
        needed, kind = quantized_bytes(num_parameters, quantize), f"in {quantize} take about"
    elif keeps_few_bits(device, dtype):
        needed = min(plain, _stored_bytes(name, dtype, entry, directory) or plain)
    is_kept = quantize is None and needed < plain
    if is_kept:
        kind = "in few bits, as they are stored, take"
    if device.type == "cuda":
        room, where = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    else:
        room, where = available_bytes(), f"this {platform.machine()} machine"
    if needed <= room:
        if quantize is not None and plain > max(room, available_bytes()):
            raise CapacityError(
                f"{name} cannot be rounded to {quantize} here: its plain weights, {plain / GB:.1f} GB, fit neither "
                f"{where} nor the {available_bytes() / GB:.1f} GB of free host memory",
                hint="use a machine with more memory",
            )
        return
    hint = "use a device with more memory"
    if dtype.itemsize > 2:
        hint += ", or --dtype bfloat16"
    is_stored = directory is not None and bool(quantization_config(directory))
    if device.type == "cuda" and not is_stored and not is_kept and (entry is None or entry.weights not in FEW_BITS):
        sizes = {form: quantized_bytes(num_parameters, form) for form in SUGGESTED}
        fitting = [f", or --quantize {form} (about {size / GB:.1f} GB)" for form, size in sizes.items() if size <= room]
        hint += "".join(fitting[:1])
    if entry is not None and "vllm" in entry.engines:
        is_smaller = not is_kept and (entry.quantized_target is not None or entry.weights in FEW_BITS)
        way = f"runs its quantized weights, {entry.vllm_gb():.1f} GB" if is_smaller else "spreads it over several GPUs"
        hint += f"; vLLM {way}: `peagle serve {entry.name} --engine vllm`"
    elif is_stored and not is_kept:
        hint += f"; vLLM runs its quantized weights as they are: `peagle serve {directory} --engine vllm`"
    raise CapacityError(
        f"{name} does not fit: {num_parameters / GB:.1f} billion parameters {kind} {needed / GB:.1f} GB, but {where} "
        f"has {room / GB:.1f} GB free",
        hint=hint,
    )
