"""Check that a target's weights fit the device, from numbers alone, before anything is downloaded or loaded."""

import platform
from math import prod
from pathlib import Path

import torch

from peagle.errors import CapacityError
from peagle.host_memory import available_bytes
from peagle.targets.catalog import GB, CatalogEntry
from peagle.targets.safetensors_header import read_header, weight_files


def count_parameters(directory: Path) -> int:
    """The number of parameters in the directory's safetensors files, read from their headers; 0 without such files.

    4-bit weights are stored two per byte, as `..._blocks`. The scales of quantized weights are not counted.
    """
    total = 0
    for path in weight_files(directory):
        for name, info in read_header(path).items():
            if not name.endswith(("_scales", "_scale_inv")):
                total += prod(info.shape) * (2 if name.endswith("_blocks") and info.dtype == "U8" else 1)
    return total


def check_fits(
    name: str, num_parameters: int, dtype: torch.dtype, device: torch.device, entry: CatalogEntry | None = None
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
    kind = str(dtype).removeprefix("torch.")
    raise CapacityError(
        f"{name} does not fit: {num_parameters / GB:.1f} billion parameters of {dtype.itemsize} bytes ({kind}) take "
        f"{needed / GB:.1f} GB, but {where} has {room / GB:.1f} GB free",
        hint=hint,
    )
