"""The numbers that few-bit weights stand for: (code - zero) * scale, exact in float32.

Scales of 16 bits and codes of at most 8 give products that float32 holds exactly, so the target's dtype rounds once.

O outputs, I inputs, G scales over the inputs, R scales over the outputs, W words of 32 bits.
"""

import torch
from torch import Tensor

from peagle.quantized.headers import StoredWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs is at each place of a word, lowest bits first."""


def dequantize(weight: StoredWeight, tensors: dict[str, Tensor]) -> Tensor:
    """The weight in float32, [O, I], from its tensors by part."""
    bits, layout, (num_outputs, num_inputs) = weight.scheme.bits, weight.scheme.layout, weight.shape
    zero_RG: Tensor | float | None = None
    order_I = tensors.get("g_idx", tensors.get("weight_g_idx"))
    if layout == "awq":
        codes_OI = _awq_codes(tensors["qweight"])
        scale_RG, zero_RG = tensors["scales"].T, _awq_codes(tensors["qzeros"])
    elif layout == "gptq":
        codes_OI = codes_in_words(tensors["qweight"].T, bits)
        scale_RG = tensors["scales"].T
        zero_RG = codes_in_words(tensors["qzeros"], bits).T[:num_outputs].float() + weight.scheme.zero_offset
    else:
        packed = layout == "packed"
        codes_OI = codes_in_words(tensors["weight_packed"], bits)[:, :num_inputs] if packed else tensors["weight"]
        scale_RG = tensors["weight_scale"]
        zero_RG = tensors.get("weight_zero_point")
        middle = 2 ** (bits - 1)  # packed numbers have a sign, and their codes do not
        if zero_RG is not None and zero_RG.dtype == torch.int32:
            zero_RG = codes_in_words(zero_RG.T, bits).T[:num_outputs]
        elif packed:
            zero_RG = float(middle) if zero_RG is None else zero_RG.float() + middle
    result_OI = codes_OI.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if isinstance(zero_RG, Tensor):
        zero_RG = _spread(zero_RG, weight, order_I)
    if zero_RG is not None:
        result_OI -= zero_RG
    result_OI *= _spread(scale_RG, weight, order_I)
    return result_OI


def codes_in_words(words_RW: Tensor, bits: int) -> Tensor:
    """The codes of 4 or 8 bits in int32, lowest bits first, along the last dimension, as bytes."""
    bytes_RB = words_RW.contiguous().view(torch.uint8)
    return bytes_RB if bits == 8 else torch.stack([bytes_RB & 15, bytes_RB >> 4], dim=-1).flatten(-2)


def _awq_codes(words_XW: Tensor) -> Tensor:
    """The codes of outputs in AutoAWQ's order, [O, X]; X is an input or a group."""
    words_WX = words_XW.T.contiguous()
    codes_W8X = words_WX.new_empty((len(words_WX), 8, words_WX.shape[1]), dtype=torch.uint8)
    for place, output in enumerate(AWQ_ORDER):
        codes_W8X[:, output] = (words_WX >> (4 * place)) & 15
    return codes_W8X.flatten(0, 1)


def _spread(each_RG: Tensor, weight: StoredWeight, order_I: Tensor | None) -> Tensor:
    """One value per scale as something that broadcasts to [O, I]."""
    (num_outputs, num_inputs), (rows, columns) = weight.shape, weight.block
    each_RG = each_RG.float().reshape(-(-num_outputs // rows), -(-num_inputs // columns))
    if 1 < rows < num_outputs:
        each_RG = each_RG.repeat_interleave(rows, dim=0)[:num_outputs]
    if each_RG.shape[1] == 1:
        return each_RG
    if order_I is not None and not (order_I < 0).any():  # -1: compressed-tensors did not order the inputs
        return each_RG.index_select(1, order_I)
    return each_RG.repeat_interleave(columns, dim=1)[:, :num_inputs]
