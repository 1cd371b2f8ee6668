"""Whether a target's weights fit the device, told from numbers before anything is downloaded or loaded."""

import json
import os
import platform
import struct
from math import prod
from pathlib import Path

import torch

from peagle.errors import CapacityError
from peagle.targets.catalog import GB, CatalogEntry

HEADER_LIMIT = 1 << 28
"""bytes; no header of a safetensors file is longer"""


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def count_parameters(directory: Path) -> int:
    """How many numbers the directory's weights hold, by the heads of its files; 0 where there are none to read.

    Four-bit numbers lie two in a byte, as `..._blocks`; the factors of quantized weights are not counted.
    """
    total = 0
    for path in _weights_files(directory):
        for name, entry in _header(path).items():
            if name == "__metadata__" or name.endswith(("_scales", "_scale_inv")):
                continue
            total += prod(entry["shape"]) * (2 if name.endswith("_blocks") and entry["dtype"] == "U8" else 1)
    return total


def check_fits(
    name: str, num_parameters: int, dtype: torch.dtype, device: torch.device, entry: CatalogEntry | None = None
) -> None:
    """Refuse weights that are larger than the device's free memory. The text's own memory comes on top of them."""
    needed = num_parameters * dtype.itemsize
    if device.type == "cuda":
        room, where = torch.cuda.mem_get_info(device)[0], f"{torch.cuda.get_device_name(device)} has {{}} GB free"
    else:
        room, where = memory_bytes(), f"this {platform.machine()} machine has {{}} GB of memory"
    if needed <= room:
        return
    kind = str(dtype).removeprefix("torch.")
    numbers = f"{num_parameters / GB:.1f} billion parameters of {dtype.itemsize} bytes ({kind})"
    hint = "use a device with more memory"
    if dtype.itemsize > 2:
        hint += ", or --dtype bfloat16"
    is_smaller = entry is not None and (entry.quantized_target is not None or entry.weights in ("mxfp4", "fp8"))
    if entry is not None and "vllm" in entry.engines and is_smaller:
        hint += (
            f"; vLLM runs its quantized weights, {entry.vllm_gb():.1f} GB: `peagle serve {entry.name} --engine vllm`"
        )
    elif entry is not None and "vllm" in entry.engines:
        hint += f"; vLLM spreads it over several GPUs: `peagle serve {entry.name} --engine vllm`"
    raise CapacityError(
        f"{name} does not fit: {numbers} take {needed / GB:.1f} GB, but {where.format(f'{room / GB:.1f}')}", hint=hint
    )


def _weights_files(directory: Path) -> list[Path]:
    """The files that make up the model, those of its index where it has one: some makers put a second copy beside."""
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return [directory / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = directory / "model.safetensors"
        return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _header(path: Path) -> dict[str, dict]:
    """Names, shapes and types of a safetensors file; empty where it cannot be read: loading it says why."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(length)) if length < HEADER_LIMIT else {}
            return found if isinstance(found, dict) else {}
    except (OSError, ValueError, struct.error):
        return {}
