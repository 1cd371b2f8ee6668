"""Words of codes times rows: what the kernels of linear layers and of experts in few bits have in common.

Words are loaded as they lie, and a part of each becomes a bfloat16 number in the registers that feed the matrix units:
two numbers at a time, in two to five instructions, exactly. Scales apply to sums over a group, in float32.

Shapes: M rows, N output columns, K words or inputs, S splits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl

from peagle.linears.few_bit import FORMS

ENDLESS = tl.constexpr(1 << 30)
"""the group of all inputs"""

_SHIFT = "shr.b32 t, $1, {shift}; "
_FINISH = {
    # (128 + code) - 136: bfloat16 holds 128 to 255 exactly, with the code in the lowest bits
    "int4": "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; mov.b32 u, 0xC308C308; mov.b32 o, 0x3F803F80; "
    "fma.rn.bf16x2 $0, t, o, u;",
    # (128 + low 7 bits) - (128 with the highest bit, 256 without)
    "int8": "lop3.b32 u, t, 0x00800080, 0x43004300, 0xAE; lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA; "
    "mov.b32 o, 0xBF80BF80; fma.rn.bf16x2 $0, u, o, t;",
}


def _unpacking(form: str, part: int) -> str:
    """PTX that turns part `part` of two words ($1) into two bfloat16 numbers ($0)."""
    if form in _FINISH:
        body = _SHIFT.format(shift=FORMS[form].bits * part) + _FINISH[form]
    elif form == "fp8":
        # Sign to bit 15, exponent and mantissa to bits 10 to 4: the number times 2^-120.
        first = "shl.b32 u, $1, 8; " if part == 0 else "mov.b32 u, $1; "
        body = (
            first + "shr.b32 t, u, 4; and.b32 t, t, 0x07F007F0; lop3.b32 t, u, 0x80008000, t, 0xEA; "
            "mov.b32 o, 0x7B807B80; mov.b32 u, 0x80008000; fma.rn.bf16x2 $0, t, o, u;"
        )
    else:
        # Sign to bit 15, exponent and mantissa to bits 8 to 6: the number times 2^-126.
        place = 6 - 4 * part
        move = f"shl.b32 t, $1, {place}; " if place > 0 else f"shr.b32 t, $1, {-place}; "
        body = (
            f"shl.b32 u, $1, {12 - 4 * part}; " + move + "and.b32 t, t, 0x01C001C0; "
            "lop3.b32 t, u, 0x80008000, t, 0xEA; mov.b32 o, 0x7E807E80; mov.b32 u, 0x80008000; "
            "fma.rn.bf16x2 $0, t, o, u;"
        )
    return "{ .reg .b32 t, u, o; " + body + " }"


UNPACKING = {form: tuple(_unpacking(form, part) for part in range(4)) for form in FORMS}
"""By form and part; 8-bit forms use the first two."""


@triton.jit
def part_values(words, form: tl.constexpr, part: tl.constexpr):
    """What `UNPACKING` computes, in Triton's own operations: for its interpreter, and where speed does not matter."""
    bits: tl.constexpr = 4 if form == "int4" or form == "mxfp4" else 8
    code = (words.to(tl.int32) >> (bits * part)) & ((1 << bits) - 1)
    if form == "mxfp4":
        size = code & 7
        normal = ((size >> 1) + 126 << 23) | ((size & 1) << 22)
        number = tl.where(size < 2, size.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True))
        return tl.where(code > 7, -number, number)
    elif form == "fp8":
        size = code & 127
        normal = ((size >> 3) + 120 << 23) | ((size & 7) << 20)
        number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))
        return tl.where(code > 127, -number, number)
    else:
        return code.to(tl.float32) - (1 << (bits - 1))


@triton.jit
def unpacked(
    words, form: tl.constexpr, part: tl.constexpr, dtype: tl.constexpr, is_native: tl.constexpr, ptx: tl.constexpr
):
    """Part `part` of the words as bfloat16."""
    if is_native:
        return tl.inline_asm_elementwise(ptx, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return part_values(words, form, part).to(dtype)


@triton.jit
def scale_of(scale, form: tl.constexpr):
    """A stored scale in float32."""
    if form == "mxfp4":
        exponent = scale.to(tl.int32)
        return tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def by_split(values, splits: tl.constexpr):
    """Broadcast [S] over a tile [S, N, K]; with one split tiles are [N, K], and this is a number."""
    return values if splits == 1 else values[:, None, None]


@triton.jit
def by_row(values, splits: tl.constexpr):
    return values[:, None] if splits == 1 else values[None, :, None]


@triton.jit
def by_column(values, splits: tl.constexpr):
    return values[None, :] if splits == 1 else values[None, None, :]


@triton.jit
def load_groups(
    pointers, block, size, is_column, parts: tl.constexpr, span: tl.constexpr, group: tl.constexpr, splits: tl.constexpr
):
    """What a group has one of, [S, N, groups per block], for the block of each split."""
    num_groups: tl.constexpr = 1 if group >= parts * span else parts * span // group
    place = by_split(block * (parts * span) // group, splits) + by_column(tl.arange(0, num_groups), splits)
    is_group = (place * group < size) & by_split(block * (parts * span) < size, splits)
    return tl.load(by_row(pointers, splits) + place, mask=by_row(is_column, splits) & is_group, other=0)


@triton.jit
def group_of(values, index: tl.constexpr, splits: tl.constexpr):
    """One group of a block, [S, N, 1]."""
    last: tl.constexpr = 1 if splits == 1 else 2
    if values.shape[last] == 1:
        return values
    else:
        is_it = by_column(tl.arange(0, values.shape[last]) == index, splits)
        return tl.sum(tl.where(is_it, values, 0.0), last, keep_dims=True)


@triton.jit
def multiply_words(
    words_row,
    inputs,
    scales,
    zeros,
    is_column,
    is_row,
    num_words,
    size,
    form: tl.constexpr,
    parts: tl.constexpr,
    span: tl.constexpr,
    group: tl.constexpr,
    has_zero: tl.constexpr,
    is_even: tl.constexpr,
    splits: tl.constexpr,
    is_native: tl.constexpr,
    one: tl.constexpr,
    two: tl.constexpr,
    three: tl.constexpr,
    four: tl.constexpr,
):
    """weight @ x in float32, [N, M]. `words_row`, `scales` and `zeros` [N] point at what output n has of them first.

    `inputs` [M] point at the rows of x. A group of at least `size` inputs is all of them. Of `splits` blocks of inputs
    per iteration each has its own warps and its own sum; the warps of one split share its columns.
    """
    num_blocks = num_words // span
    is_whole: tl.constexpr = group >= parts * span
    is_scaled: tl.constexpr = group < ENDLESS
    per_group: tl.constexpr = parts if is_whole else group // span
    inner = tl.arange(0, span)
    if splits == 1:
        split = 0
        total = tl.zeros([words_row.shape[0], inputs.shape[0]], tl.float32)
    else:
        split = tl.arange(0, splits)
        total = tl.zeros([splits, words_row.shape[0], inputs.shape[0]], tl.float32)
    scale = load_groups(scales, split, size, is_column, parts, span, group, splits)
    for first in range(0, num_blocks, splits):
        block = first + split
        words_place = by_split(block * span, splits) + by_column(inner, splits)
        is_word = by_row(is_column, splits) & by_split((block < num_blocks) | is_even, splits)
        words = tl.load(by_row(words_row, splits) + words_place, mask=is_word, other=0)
        next_scale = load_groups(scales, block + splits, size, is_column, parts, span, group, splits)
        if has_zero:
            zero = load_groups(zeros, block, size, is_column, parts, span, group, splits).to(tl.float32)
        for begin in tl.static_range(0, parts, per_group):
            sums = tl.zeros(total.shape, tl.float32)
            for part in tl.static_range(begin, begin + per_group):
                place = by_split((block * parts + part) * span, splits) + by_row(inner, splits)
                is_input = by_column(is_row, splits) & ((place < size) | is_even)
                x = tl.load(by_column(inputs, splits) + place, mask=is_input, other=0.0)
                if part == 0:
                    weight = unpacked(words, form, 0, x.dtype, is_native, one)
                elif part == 1:
                    weight = unpacked(words, form, 1, x.dtype, is_native, two)
                elif part == 2:
                    weight = unpacked(words, form, 2, x.dtype, is_native, three)
                else:
                    weight = unpacked(words, form, 3, x.dtype, is_native, four)
                if is_scaled or has_zero:
                    sums = tl.dot(weight, x, sums)
                else:
                    total = tl.dot(weight, x, total)
                if has_zero:
                    part_sum = tl.sum(x.to(tl.float32), 0 if splits == 1 else 1, keep_dims=True)
                    x_sum = part_sum if part == begin else x_sum + part_sum
            if has_zero:
                sums -= group_of(zero, begin // per_group, splits) * x_sum
            if is_scaled:
                sums *= group_of(scale_of(scale, form), begin // per_group, splits)
            if is_scaled or has_zero:
                total += sums
        scale = next_scale
    if splits > 1:
        total = tl.sum(total, 0)
    if is_scaled:
        return total
    else:
        return total * scale_of(tl.load(scales, mask=is_column, other=0), form)[:, None]


@triton.jit
def halves_of(both, columns: tl.constexpr):
    """The first and the last `columns` rows of a tile."""
    return tl.split(tl.permute(tl.reshape(both, [2, columns, both.shape[1]]), (1, 2, 0)))
