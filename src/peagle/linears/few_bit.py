"""Weights that stay in 4 or 8 bits on a GPU: how they are packed.

A weight is `(code - zero) * scale`. Codes are packed into 16-bit words, so that a word turns into bfloat16 numbers with
few instructions: a block of inputs has `span` words per output, and part p of word w is the code of input
p * span + w of the block. The parts of a word follow each other, but for "mxfp4": `MXFP4_PLACES`.

N outputs, K inputs, G groups of inputs that share a scale, W words per output.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Form(NamedTuple):
    """How a number is coded."""

    bits: int
    span: int
    """Words per output and block."""

    @property
    def num_parts(self) -> int:
        return 16 // self.bits

    @property
    def block(self) -> int:
        """Inputs per block."""
        return self.span * self.num_parts


FORMS = {"int4": Form(4, 64), "int8": Form(8, 64), "fp8": Form(8, 64), "mxfp4": Form(4, 32)}
"""Integers have their zero at the middle code; "fp8" is e4m3; "mxfp4" is e2m1 with a power of two per 32 inputs."""
MXFP4_GROUP = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_PLACES = ((6, 15), (3, 12), (0, 14), (9, 13))
"""Of each part, the lowest bit of its magnitude and the bit of its sign. The first part lies where bfloat16 has sign,
exponent and mantissa; a shift of the whole word puts the second part there."""
INT4_GROUP = 128


class FewBitWeight(NamedTuple):
    """One weight; or a stack of them, with a leading dimension in every tensor."""

    form: str
    size: int
    """Inputs."""
    group: int
    """Inputs per scale: a multiple of the form's span that divides its block, a multiple of the block, or at least
    `size`."""
    words: Tensor
    """[N, W], int16."""
    scale: Tensor
    """[N, G]; of "mxfp4" the exponents plus 127, in bytes, for whole blocks."""
    zero: Tensor | None = None
    """[N, G], added to the form's own zero; int8."""

    @property
    def num_outputs(self) -> int:
        return self.words.shape[-2]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.words, self.scale, self.zero) if tensor is not None)


def group_limit(form: str, size: int) -> int:
    """The group that stands for all inputs."""
    block = FORMS[form].block
    return -(-size // block) * block


def pack_codes(codes_NK: Tensor, form: str) -> Tensor:
    """The words of codes (bytes), [..., N, W]; inputs are padded to whole blocks."""
    bits, span = FORMS[form]
    size, block = codes_NK.shape[-1], FORMS[form].block
    padded = functional.pad(codes_NK, (0, -size % block))
    parts = padded.unflatten(-1, (-1, FORMS[form].num_parts, span)).to(torch.int32)
    words = torch.zeros_like(parts[..., 0, :])
    for part in range(FORMS[form].num_parts):
        codes = parts[..., part, :]
        if form == "mxfp4":
            magnitude, sign = MXFP4_PLACES[part]
            words |= (codes & 7) << magnitude | codes >> 3 << sign
        else:
            words |= codes << (bits * part)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).flatten(-2).contiguous()


def pack_exponents(scale_NG: Tensor) -> Tensor:
    """The scales of "mxfp4", padded to whole blocks: four in 32 bits."""
    return functional.pad(scale_NG, (0, -scale_NG.shape[-1] % (FORMS["mxfp4"].block // MXFP4_GROUP))).contiguous()


def unpack_words(words_NW: Tensor, form: str, size: int) -> Tensor:
    """The codes as bytes, [..., N, K]."""
    bits, span = FORMS[form]
    words = words_NW.unflatten(-1, (-1, 1, span)).to(torch.int32) & 0xFFFF
    if form == "mxfp4":
        magnitude, sign = torch.tensor(MXFP4_PLACES, device=words.device, dtype=torch.int32).T[:, :, None]
        return ((words >> magnitude) & 7 | (words >> sign & 1) << 3).to(torch.uint8).flatten(-3)[..., :size]
    shifts = torch.arange(FORMS[form].num_parts, device=words.device, dtype=torch.int32)[:, None] * bits
    return ((words >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-3)[..., :size]


def code_values(codes: Tensor, form: str) -> Tensor:
    """The numbers that codes stand for, before zeros and scales, in float32."""
    if form == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if form == "mxfp4":
        return torch.tensor(MXFP4_VALUES, device=codes.device)[codes.int()]
    return codes.float() - (1 << (FORMS[form].bits - 1))


def scale_values(weight: FewBitWeight) -> Tensor:
    """Scales in float32, [..., N, G]."""
    if weight.form == "mxfp4":
        return torch.exp2(weight.scale.float() - 127)
    return weight.scale.float()


def dequantize(weight: FewBitWeight) -> Tensor:
    """The weight in float32, [..., N, K]: the definition that the kernels are tested against."""
    values = code_values(unpack_words(weight.words, weight.form, weight.size), weight.form)
    index = torch.arange(weight.size, device=values.device) // weight.group
    if weight.zero is not None:
        values = values - weight.zero.float()[..., index]
    return values * scale_values(weight)[..., index]


def quantize(weight_NK: Tensor, form: str) -> FewBitWeight:
    """The weight, or stack of weights, rounded to a form, with the largest number of a group at the form's limit."""
    size = weight_NK.shape[-1]
    group = {"int4": INT4_GROUP, "mxfp4": MXFP4_GROUP}.get(form, group_limit(form, size))
    grouped = functional.pad(weight_NK.float(), (0, -size % group)).unflatten(-1, (-1, group))
    largest = grouped.abs().amax(-1).clamp(min=1e-12)
    if form == "mxfp4":
        exponent = (largest.log2().floor() - 2).clamp(-127, 127)
        scale, stored = torch.exp2(exponent), pack_exponents((exponent + 127).to(torch.uint8))
    else:
        limit = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[form]
        stored = scale = (largest / limit).to(torch.bfloat16)
    values = (grouped / scale.float()[..., None]).flatten(-2)[..., :size]
    return FewBitWeight(form, size, group, pack_codes(_nearest(values, form), form), stored.contiguous())


def _nearest(values: Tensor, form: str) -> Tensor:
    if form == "fp8":
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if form == "mxfp4":
        middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
        return (torch.bucketize(values.abs(), middles) + 8 * (values < 0)).to(torch.uint8)
    middle = 1 << (FORMS[form].bits - 1)
    return (values.round().clamp(-middle, middle - 1) + middle).to(torch.uint8)
