"""The blocks of a GGUF file, for kernels that compute from 4 and 8 bits per weight (`peagle.native.products`).

The converted checkpoint defines the target: bfloat16 numbers. A weight's blocks are kept only if they give exactly
these numbers. transformers reorders the rows of some weights, so rows are matched by their content.

Shapes: O outputs, I inputs, G groups of 32 inputs.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.cache import write_atomically
from peagle.native.products import GROUP, BlockWeight

log = logging.getLogger(__name__)

BYTES_PER_BLOCK = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def blocks_path(directory: Path) -> Path:
    """The file with the blocks of a converted checkpoint, beside it."""
    return Path(f"{directory.resolve()}.blocks")


def write_blocks(gguf: Path, directory: Path) -> None:
    """Write the blocks of the weights that the conversion of `gguf` to `directory` holds exactly."""
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
    from safetensors.torch import load_file, save

    reader = GGUFReader(gguf)
    stored = {tensor.name: tensor for tensor in reader.tensors if tensor.tensor_type.name in BYTES_PER_BLOCK}
    architecture = reader.fields["general.architecture"].contents()
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, int(reader.fields[f"{architecture}.block_count"].contents()))
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        for name, weight_OI in load_file(file).items():
            tensor = stored.get(names.get_name(name, try_suffixes=(".weight",)) or "")
            blocks = None if tensor is None else _in_order_of(weight_OI, read_blocks(tensor))
            if blocks is not None:
                found |= {f"{name}:{part}": each for part, each in blocks._asdict().items() if each is not None}
    write_atomically(blocks_path(directory), save(found))
    log.info("kept the blocks of %d weights of %s", sum(name.endswith(":codes_OI") for name in found), gguf.name)


def read_blocks(tensor: Any) -> BlockWeight:
    """The blocks of a tensor of `gguf.GGUFReader`."""
    kind = tensor.tensor_type.name
    raw_OGb = torch.from_numpy(tensor.data.copy()).unflatten(1, (-1, BYTES_PER_BLOCK[kind]))
    scale_OG = raw_OGb[..., :2].contiguous().view(torch.float16)[..., 0]
    if kind == "Q8_0":
        return BlockWeight(raw_OGb[..., 2:].contiguous().view(torch.int8).flatten(1), scale_OG, None)
    bytes_OGb = raw_OGb[..., -GROUP // 2 :]
    codes_OI = torch.cat([bytes_OGb & 15, bytes_OGb >> 4], dim=-1).flatten(1)
    if kind == "Q4_0":
        return BlockWeight(codes_OI, scale_OG, -8 * scale_OG)
    return BlockWeight(codes_OI, scale_OG, raw_OGb[..., 2:4].contiguous().view(torch.float16)[..., 0])


def _in_order_of(weight_OI: Tensor, blocks: BlockWeight) -> BlockWeight | None:
    """The blocks with their rows in the order of the weight's; None if they do not give exactly that weight."""
    own_OI = blocks.weight().to(weight_OI.dtype)
    if own_OI.shape != weight_OI.shape:
        return None
    if not torch.equal(own_OI, weight_OI):
        places = {row: place for place, row in enumerate(_row_bytes(own_OI))}
        order = [places.get(row) for row in _row_bytes(weight_OI)]
        if None in order:
            return None
        place_O = torch.tensor(order)
        blocks = blocks.map(lambda each: each[place_O])
    return blocks.map(Tensor.contiguous)


def _row_bytes(weight_OI: Tensor) -> list[bytes]:
    """Each row's content; -0 is 0."""
    return [row.numpy().tobytes() for row in (weight_OI + 0.0).contiguous().view(torch.int16)]


def attach_blocks(model: nn.Module, directory: Path) -> None:
    """Give the model's parameters their blocks, if there are any, as the attribute `blocks`."""
    from safetensors.torch import load_file

    if not blocks_path(directory).is_file():
        return
    tensors = load_file(blocks_path(directory))
    for name, parameter in model.named_parameters():
        if f"{name}:codes_OI" in tensors:
            codes_OI, scale_OG = tensors[f"{name}:codes_OI"], tensors[f"{name}:scale_OG"]
            blocks = BlockWeight(codes_OI, scale_OG, tensors.get(f"{name}:offset_OG"))
            parameter.blocks = blocks  # type: ignore[attr-defined]
