"""The numbers that quantized weights stand for, (code - zero) * scale: as plain weights, or packed for our kernels.

Scales of 16 bits and codes of at most 8 give products that float32 holds exactly, so the target's dtype rounds once.

E experts, O outputs, I inputs, G scales over the inputs, R scales over the outputs, B bytes, W words of 32 bits.
"""

import torch
from torch import Tensor

from peagle.linears.few_bit import FORMS, MXFP4_GROUP, FewBitWeight, group_limit, pack_codes, pack_exponents
from peagle.quantized.headers import SCALES, StoredWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs is at each place of a word, lowest bits first."""


def dequantize(weight: StoredWeight, tensors: dict[str, Tensor]) -> Tensor:
    """The weight in float32, [O, I], from its tensors by part."""
    codes_OI, scale_RG, zero_RG = _read(weight, tensors)
    order_I = _order(tensors)
    result_OI = codes_OI.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if isinstance(zero_RG, Tensor):
        zero_RG = _spread(zero_RG, weight, order_I)
    if zero_RG is not None:
        result_OI -= zero_RG
    result_OI *= _spread(scale_RG, weight, order_I)
    return result_OI


def fits_kernels(weight: StoredWeight) -> bool:
    """Whether our kernels can read the weight's groups, as far as its scheme tells."""
    if weight.scheme.has_order:
        return False
    columns, form = weight.block[1], FORMS["mxfp4" if weight.scheme.layout == "mxfp4" else f"int{weight.scheme.bits}"]
    is_part = columns % form.span == 0 and form.block % columns == 0
    return is_part or columns % form.block == 0 or columns >= weight.shape[-1]


def keep(weight: StoredWeight, tensors: dict[str, Tensor]) -> FewBitWeight | None:
    """The weight for our kernels, packed anew: the same numbers. None if they cannot read its groups or zeros."""
    if not fits_kernels(weight):
        return None
    if weight.scheme.layout == "mxfp4":
        return _keep_stack(*(tensors[part] for part in weight.parts))
    (num_outputs, num_inputs), columns = weight.shape, weight.block[1]
    codes_OI, scale_RG, zero_RG = _read(weight, tensors)
    order_I = _order(tensors)
    if order_I is not None and columns < num_inputs:
        in_order = torch.arange(num_inputs, device=order_I.device) // columns
        if not (order_I < 0).any() and not torch.equal(order_I, in_order.to(order_I.dtype)):
            return None
    form = "fp8" if codes_OI.dtype == torch.float8_e4m3fn else f"int{weight.scheme.bits}"
    zero = None
    if isinstance(zero_RG, Tensor):
        middle = 0 if weight.scheme.layout == "codes" else 2 ** (weight.scheme.bits - 1)
        zero = _each_output(zero_RG.float() - middle, weight)
        if not zero.any():
            zero = None
        elif form == "fp8" or zero.min() < -128 or zero.max() > 127:
            return None
    bytes_OI = codes_OI.contiguous().view(torch.uint8)
    return FewBitWeight(
        form,
        num_inputs,
        columns if columns < num_inputs else group_limit(form, num_inputs),
        pack_codes(bytes_OI ^ 128 if codes_OI.dtype == torch.int8 else bytes_OI, form),
        _each_output(scale_RG, weight).expand(num_outputs, -1).contiguous(),
        None if zero is None else zero.expand(num_outputs, -1).to(torch.int8).contiguous(),
    )


def _keep_stack(blocks_EOGB: Tensor, scale_EOG: Tensor) -> FewBitWeight:
    """MXFP4, one expert at a time: packing takes many times the memory of the codes."""
    words = [pack_codes(codes_in_words(blocks_OGB, 4).flatten(-2), "mxfp4") for blocks_OGB in blocks_EOGB]
    return FewBitWeight("mxfp4", 32 * scale_EOG.shape[2], MXFP4_GROUP, torch.stack(words), pack_exponents(scale_EOG))


def _read(weight: StoredWeight, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | float | None]:
    """Codes, scales and zeros: codes of 4 or 8 bits as bytes, or 8-bit numbers as they are."""
    bits, layout, (num_outputs, num_inputs) = weight.scheme.bits, weight.scheme.layout, weight.shape
    if layout == "awq":
        return _awq_codes(tensors["qweight"]), tensors["scales"].T, _awq_codes(tensors["qzeros"])
    if layout == "gptq":
        zero_RG = codes_in_words(tensors["qzeros"], bits).T[:num_outputs].float() + weight.scheme.zero_offset
        return codes_in_words(tensors["qweight"].T, bits), tensors["scales"].T, zero_RG
    scale_RG, zero = next(tensors[name] for name in SCALES if name in tensors), tensors.get("weight_zero_point")
    if layout == "codes":
        return tensors["weight"], scale_RG, zero
    middle = 2 ** (bits - 1)  # packed numbers have a sign, and their codes do not
    codes_OI = codes_in_words(tensors["weight_packed"], bits)[:, :num_inputs]
    if zero is None:
        return codes_OI, scale_RG, float(middle)
    if zero.dtype == torch.int32:
        return codes_OI, scale_RG, codes_in_words(zero.T, bits).T[:num_outputs]
    return codes_OI, scale_RG, zero.float() + middle


def _order(tensors: dict[str, Tensor]) -> Tensor | None:
    """The group of each input, if a tensor gives it."""
    return tensors.get("g_idx", tensors.get("weight_g_idx"))


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
    num_inputs, columns = weight.shape[1], weight.block[1]
    each_OG = _each_output(each_RG.float(), weight)
    if each_OG.shape[1] == 1:
        return each_OG
    if order_I is not None and not (order_I < 0).any():  # -1: compressed-tensors did not order the inputs
        return each_OG.index_select(1, order_I)
    return each_OG.repeat_interleave(columns, dim=1)[:, :num_inputs]


def _each_output(each_RG: Tensor, weight: StoredWeight) -> Tensor:
    """One value per scale as something that broadcasts to [O, G]."""
    (num_outputs, num_inputs), (rows, columns) = weight.shape, weight.block
    each_RG = each_RG.reshape(-(-num_outputs // rows), -(-num_inputs // columns))
    return each_RG.repeat_interleave(rows, dim=0)[:num_outputs] if 1 < rows < num_outputs else each_RG
