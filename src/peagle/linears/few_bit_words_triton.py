"""Words of codes times rows: shared by the kernels of quantized linear layers and experts.

Words are loaded as they lie, and a part of each becomes a bfloat16 number in the registers that feed the matrix units:
two numbers at a time, in two to five instructions, exactly. Scales apply to sums over a group, in float32.

Shapes: M rows, N output columns, K words or inputs, S splits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl

from peagle.linears.few_bit import FORMS, MXFP4_PLACES

ENDLESS = tl.constexpr(1 << 30)
"""the group of all inputs"""
MAGNITUDE_PLACES, SIGN_PLACES = (tl.constexpr(places) for places in zip(*MXFP4_PLACES, strict=True))

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
        magnitude, sign = (end - place for end, place in zip((6, 15), MXFP4_PLACES[part], strict=True))
        body = f"shl.b32 t, $1, {magnitude}; " if magnitude >= 0 else f"shr.b32 t, $1, {-magnitude}; "
        if magnitude == sign:
            body += "and.b32 t, t, 0x81C081C0; "
        else:
            body += f"and.b32 t, t, 0x01C001C0; shl.b32 u, $1, {sign}; lop3.b32 t, u, 0x80008000, t, 0xEA; "
        body += "mov.b32 o, 0x7E807E80; mov.b32 u, 0x80008000; fma.rn.bf16x2 $0, t, o, u;"
    return "{ .reg .b32 t, u, o; " + body + " }"


UNPACKING = {form: tuple(_unpacking(form, part) for part in range(4)) for form in FORMS}
"""By form and part; 8-bit forms use the first two."""


@triton.jit
def part_values(words, form: tl.constexpr, part: tl.constexpr):
    """What `UNPACKING` computes, in Triton's own operations: for its interpreter, and where speed does not matter."""
    bits: tl.constexpr = 4 if form == "int4" else 8
    code = (words.to(tl.int32) >> (bits * part)) & ((1 << bits) - 1)
    if form == "mxfp4":
        size = (words.to(tl.int32) >> MAGNITUDE_PLACES[part]) & 7
        normal = ((size >> 1) + 126 << 23) | ((size & 1) << 22)
        number = tl.where(size < 2, size.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True))
        return tl.where((words.to(tl.int32) >> SIGN_PLACES[part]) & 1 > 0, -number, number)
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
    if form == "mxfp4":  # 2^-127 counts as zero
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
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
def load_group(pointers, place, size, is_column, group: tl.constexpr, splits: tl.constexpr):
    """The number (or word) that the group of input `place` has in `pointers`, [S, N, 1]."""
    mask = by_split(place, splits) < by_row(tl.where(is_column, size, 0), splits)
    return tl.load(by_row(pointers, splits) + by_split(place // group, splits), mask=mask, other=0)


@triton.jit
def load_groups(
    pointers, block, size, is_column, parts: tl.constexpr, span: tl.constexpr, group: tl.constexpr, splits: tl.constexpr
):
    """A tile for each group in the block of each split. Tiles of one number per column need no exchange of layouts."""
    first = block * (parts * span)
    if pointers.dtype.element_ty == tl.uint8:  # "mxfp4"
        words = pointers.to(tl.pointer_type(tl.int32), bitcast=True)
        return (load_group(words, first, size, is_column, parts * span, splits),)
    elif group >= parts * span:
        return (load_group(pointers, first, size, is_column, group, splits),)
    elif group * 2 == parts * span:
        return (
            load_group(pointers, first, size, is_column, group, splits),
            load_group(pointers, first + group, size, is_column, group, splits),
        )
    else:
        return (
            load_group(pointers, first, size, is_column, group, splits),
            load_group(pointers, first + group, size, is_column, group, splits),
            load_group(pointers, first + 2 * group, size, is_column, group, splits),
            load_group(pointers, first + 3 * group, size, is_column, group, splits),
        )


@triton.jit
def group_scale(scales, form: tl.constexpr, index: tl.constexpr):
    """One of the scales that `load_groups` found, in float32."""
    if form == "mxfp4":
        exponent = scales[0] << (23 - 8 * index) if index < 3 else scales[0] >> 1
        return (exponent & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        return scale_of(scales[index], form)


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
    """weight @ x in float32, [N, M]. `words_row`, `scales` and `zeros` [N] point at the first of each output.

    `inputs` [M] point at the rows of x. A group of at least `size` inputs is all of them. An iteration takes `splits`
    blocks of inputs, each with its own warps and its own sum; the warps of one split share its columns.
    """
    num_blocks = num_words // span
    num_own_blocks = tl.where(is_column, ENDLESS if is_even else num_blocks, 0)
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
        is_word = by_split(block, splits) < by_row(num_own_blocks, splits)
        words = tl.load(by_row(words_row, splits) + words_place, mask=is_word, other=0)
        next_scale = load_groups(scales, block + splits, size, is_column, parts, span, group, splits)
        if has_zero:
            zero = load_groups(zeros, block, size, is_column, parts, span, group, splits)
        for begin in tl.static_range(0, parts, per_group):
            sums, x_sum = tl.zeros(total.shape, tl.float32), 0.0
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
                    x_sum += tl.sum(x.to(tl.float32), 0 if splits == 1 else 1, keep_dims=True)
            if has_zero:
                sums -= zero[begin // per_group].to(tl.float32) * x_sum
            if is_scaled:
                sums *= group_scale(scale, form, begin // per_group)
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
