"""Check that a target's weights fit the device, from numbers alone, before anything is downloaded or loaded."""

import platform
from math import prod
from pathlib import Path

import torch

from peagle.errors import CapacityError
from peagle.host_memory import available_bytes
from peagle.quantized.formats import quantization_config
from peagle.quantized.headers import read_few_bit
from peagle.safetensors_header import read_header, weight_files
from peagle.targets.catalog import GB, CatalogEntry


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


def check_fits(
    name: str,
    num_parameters: int,
    dtype: torch.dtype,
    device: torch.device,
    entry: CatalogEntry | None = None,
    directory: Path | None = None,
) -> None:
    """Refuse weights that exceed the device's free memory. The KV cache comes on top."""
    needed = num_parameters * dtype.itemsize
    if device.type == "cuda":
        room, where = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    else:
        room, where = available_bytes(), f"this {platform.machine()} machine"
    if needed <= room:
        return
    hint = "use a device with more memory"
    if dtype.itemsize > 2:
        hint += ", or --dtype bfloat16"
    if entry is not None and "vllm" in entry.engines:
        is_smaller = entry.quantized_target is not None or entry.weights in ("mxfp4", "fp8")
        way = f"runs its quantized weights, {entry.vllm_gb():.1f} GB" if is_smaller else "spreads it over several GPUs"
        hint += f"; vLLM {way}: `peagle serve {entry.name} --engine vllm`"
    elif directory is not None and quantization_config(directory):
        hint += f"; vLLM runs its quantized weights as they are: `peagle serve {directory} --engine vllm`"
    kind = str(dtype).removeprefix("torch.")
    raise CapacityError(
        f"{name} does not fit: {num_parameters / GB:.1f} billion parameters of {dtype.itemsize} bytes ({kind}) take "
        f"{needed / GB:.1f} GB, but {where} has {room / GB:.1f} GB free",
        hint=hint,
    )
