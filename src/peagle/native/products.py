"""Products of a few rows with weights as they are stored: in bfloat16, or in blocks of 4 or 8 bits.

A target read from a GGUF file has weights bfloat16(scale * code + offset), with a scale and an offset per 32 inputs.
`BlockWeight` keeps codes, scales and offsets; the kernel computes the same bfloat16 numbers in registers, and
multiplies in float32. So results differ from those of the float32 weight only by the order of the sum, which is the
same for any number of rows.

A packed weight is split into blocks of `lanes()` outputs. For each input of a block, the codes of its outputs lie side
by side; 4-bit codes of two inputs share their bytes. CPUs with tile registers have tiles instead (`peagle.native.amx`).

Shapes: N rows, I inputs, O outputs, G groups of 32 inputs, L lanes, B = O / L blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from peagle.native import amx, jit
from peagle.native.builder import Builder
from peagle.native.integers import in_quads, rounded_codes, write_integer_product
from peagle.native.jit import Call, Calls, call, compile_kernel

Form = Literal["bfloat16", "4-bit", "8-bit", "integers"]

GROUP = 32
"""inputs that share a scale and an offset"""
NO_ROWS = torch.empty(0)
KEPT_ROWS = 64
"""most rows whose calls are kept for the next product: prompts have too many lengths"""
MAX_TILE = 16
"""rows that share a pass over the weight, at most; each number has a kernel of its own"""
UNPACKING = 6
"""work to unpack a weight, as a multiple of the work to multiply it with one row"""


class BlockWeight(NamedTuple):
    """A weight in blocks of 32 inputs: bfloat16(scale * code + offset), computed in float32."""

    codes_OI: Tensor
    """uint8 below 16, or int8"""
    scale_OG: Tensor
    """float16"""
    offset_OG: Tensor | None
    """float16; None: zero, which 8-bit codes have"""

    @property
    def form(self) -> Form:
        """The form of the packed weight."""
        return "8-bit" if self.offset_OG is None else "4-bit"

    def rows(self, num_rows: int) -> "BlockWeight":
        """The first `num_rows` outputs."""
        return self.map(lambda each: each[:num_rows])

    @staticmethod
    def joined(parts: "Sequence[BlockWeight]") -> "BlockWeight":
        """One weight with the outputs of all parts, which have the same form."""
        offsets = [each.offset_OG for each in parts if each.offset_OG is not None]
        codes_OI, scale_OG = torch.cat([each.codes_OI for each in parts]), torch.cat([each.scale_OG for each in parts])
        return BlockWeight(codes_OI, scale_OG, torch.cat(offsets) if offsets else None)

    def map(self, function: Callable[[Tensor], Tensor]) -> "BlockWeight":
        """Every tensor mapped."""
        offset_OG = None if self.offset_OG is None else function(self.offset_OG)
        return BlockWeight(function(self.codes_OI), function(self.scale_OG), offset_OG)

    def weight(self) -> Tensor:
        """The weight itself, float32 [O, I]."""
        grouped_OGg = self.codes_OI.float().unflatten(1, (-1, GROUP)) * self.scale_OG.float()[..., None]
        if self.offset_OG is not None:
            grouped_OGg += self.offset_OG.float()[..., None]
        return grouped_OGg.flatten(1).bfloat16().float()


@dataclass(eq=False)
class PackedWeight:
    """A weight in the layout of the kernels."""

    form: Form
    num_outputs: int
    num_inputs: int
    codes: Tensor
    scales: Tensor
    """float16 [B, G, scale and offset, L]; empty in bfloat16; of integers float32 [O]"""
    is_tiled: bool = False
    """whether the codes are in tiles"""
    _products: dict[tuple[int, int], "tuple[Product, Calls]"] = field(default_factory=dict)
    """by number of rows, and dimensions of what is added"""

    @property
    def is_for_prompts(self) -> bool:
        """Whether products of many rows are faster than torch's, too."""
        return self.is_tiled or self.form == "integers"

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def missing(weight_OI: Tensor, blocks: BlockWeight | None = None) -> str | None:
    """Why the kernels cannot compute with a weight; None if they can."""
    if (reason := jit.missing()) is not None:
        return reason
    if weight_OI.dtype != torch.float32 or weight_OI.device.type != "cpu":
        return f"the kernels compute in float32 on a CPU, not in {weight_OI.dtype} on {weight_OI.device}"
    if weight_OI.shape[0] % lanes():
        return f"{weight_OI.shape[0]} outputs are no multiple of {lanes()}"
    if blocks is not None and weight_OI.shape[1] % GROUP == 0:
        return None
    is_exact = torch.equal(weight_OI.bfloat16().float(), weight_OI)
    return None if is_exact else "bfloat16 does not hold the weight exactly"


def pack(weight_OI: Tensor, blocks: BlockWeight | None = None) -> PackedWeight:
    """Pack a weight that is not `missing`: its blocks if it has any, else its bfloat16 numbers."""
    num_outputs, num_inputs = weight_OI.shape
    is_tiled = amx.takes(num_outputs, num_inputs)
    in_order, in_nibbles = (amx.in_tiles, amx.in_nibbles) if is_tiled else (_side_by_side, _nibbles_side_by_side)
    if blocks is None or num_inputs % GROUP:
        bits_OI = weight_OI.bfloat16().view(torch.int16)
        return PackedWeight("bfloat16", num_outputs, num_inputs, in_order(bits_OI), bits_OI.new_empty(0), is_tiled)
    if blocks.offset_OG is None:
        codes, scales = in_order(blocks.codes_OI), _side_by_side(blocks.scale_OG)
    else:
        both = [_side_by_side(each) for each in (blocks.scale_OG, blocks.offset_OG)]
        codes, scales = in_nibbles(blocks.codes_OI), torch.stack(both, dim=2)
    return PackedWeight(blocks.form, num_outputs, num_inputs, codes, scales, is_tiled)


def pack_integers(weight_OI: Tensor) -> PackedWeight:
    """Pack a weight for products that round it, and their inputs, to 8 bits (`peagle.native.integers`)."""
    num_outputs, num_inputs = weight_OI.shape
    codes_OI, scale_O = rounded_codes(weight_OI)
    return PackedWeight("integers", num_outputs, num_inputs, in_quads(codes_OI, lanes()), scale_O)


def _side_by_side(values_OX: Tensor) -> Tensor:
    """[O, X] as [B, X, L]."""
    return values_OX.unflatten(0, (-1, lanes())).transpose(1, 2).contiguous()


def _nibbles_side_by_side(codes_OI: Tensor) -> Tensor:
    pairs_BPpL = _side_by_side(codes_OI).unflatten(1, (-1, 2))
    return pairs_BPpL[:, :, 0] | pairs_BPpL[:, :, 1] << 4


def lanes() -> int:
    """Outputs per block."""
    return 16 if jit.has_wide_registers() else 8


class Product(NamedTuple):
    """The calls of a product. Its tensors may be replaced by others of the same shape, by address."""

    calls: tuple[Call, ...]

    def read(self, x: int) -> None:
        self.calls[0].arguments[0] = x

    def write(self, y: int) -> None:
        self.calls[-1].arguments[3] = y

    def add(self, added: int) -> None:
        self.calls[-1].arguments[4] = added

    def use_scratch(self, scratch: int) -> None:
        """Only for tiles."""
        self.calls[0].arguments[1] = self.calls[1].arguments[0] = scratch


def product(x_NI: Tensor, weight: PackedWeight, added: Tensor | None = None) -> Tensor:
    """x_NI @ weight.T, plus a bias [O] or a residual [N, O]. All are contiguous float32."""
    y_NO, key = x_NI.new_empty(len(x_NI), weight.num_outputs), (len(x_NI), 0 if added is None else added.dim())
    scratch = new_scratch(weight, len(x_NI))
    own, calls = weight._products.get(key) or _with_calls(make_product(x_NI, weight, y_NO, added, scratch))
    if len(x_NI) <= KEPT_ROWS:
        weight._products[key] = own, calls
    own.read(x_NI.data_ptr())
    own.write(y_NO.data_ptr())
    if added is not None:
        own.add(added.data_ptr())
    if weight.is_tiled:
        own.use_scratch(scratch.data_ptr())
    calls.run()
    return y_NO


def _with_calls(product: Product) -> tuple[Product, Calls]:
    return product, Calls(product.calls)


def new_scratch(weight: PackedWeight, num_rows: int) -> Tensor:
    """Memory that a product of some rows writes to; it keeps nothing there."""
    return torch.empty(amx.scratch_size(num_rows, weight.num_inputs) if weight.is_tiled else 0, dtype=torch.uint8)


def make_product(x_NI: Tensor, weight: PackedWeight, y_NO: Tensor, added: Tensor | None, scratch: Tensor) -> Product:
    """A product that writes x_NI @ weight.T, plus a bias [O] or a residual [N, O], to y_NO."""
    if weight.is_tiled:
        return Product(amx.product_calls(x_NI, scratch, weight.form, weight.codes, weight.scales, y_NO, added))
    num_rows, num_blocks = len(x_NI), weight.num_outputs // lanes()
    tile = _tile(num_rows)
    kernel = _kernel(weight.form, tile, _blocks_per_step(tile, num_blocks), added is not None)
    tensors = (x_NI, weight.codes, weight.scales, y_NO, NO_ROWS if added is None else added)
    added_stride = 0 if added is None or added.dim() == 1 else weight.num_outputs
    return Product((call(kernel, *tensors, weight.num_inputs, weight.num_outputs, num_rows, added_stride),))


def compile_products(weight: PackedWeight, is_added: bool) -> None:
    """Compile the kernels for any number of rows now, so that no step waits for them."""
    if weight.is_tiled:
        amx.compile_kernels(weight.form, weight.num_outputs, is_added)
        return
    for tile in range(1, _most_rows() + 1):
        _kernel(weight.form, tile, _blocks_per_step(tile, weight.num_outputs // lanes()), is_added)


def _most_rows() -> int:
    """The largest tile."""
    return MAX_TILE if jit.has_wide_registers() else MAX_TILE // 2


def _tile(num_rows: int) -> int:
    """Rows per tile: those with the least work, and the larger tile if two are equal."""
    return min(range(min(num_rows, _most_rows()), 0, -1), key=lambda tile: -(-num_rows // tile) * (tile + UNPACKING))


def _blocks_per_step(tile: int, num_blocks: int) -> int:
    """Blocks computed at once: several for few rows, whose sums alone would wait for each other."""
    num_sums = 16 if jit.has_wide_registers() else 8
    return max(
        number for number in (1, 2, 4) if number == 1 or (number * tile <= num_sums and num_blocks % number == 0)
    )


@cache
def _kernel(form: Form, tile: int, step: int, is_added: bool) -> int:
    name = f"product-{form}-{tile}-{step}{'-plus' * is_added}"
    if form == "integers":
        return compile_kernel(name, lambda b: write_integer_product(b, tile, step, is_added), lanes())
    return compile_kernel(name, lambda b: _write_product(b, form, tile, step, is_added), lanes())


def _write_product(b: Builder, form: Form, tile: int, step: int, is_added: bool) -> None:
    """Each thread takes some blocks. The last tile overlaps the one before it if `tile` does not divide the rows."""
    x, codes, scales, y, added = (b.address(index) for index in range(5))
    inputs, outputs, rows, added_stride = (b.number(index) for index in range(5, 9))
    width = b.lanes
    first, end = b.share(b.ir.udiv(outputs, b.integer(width * step)))
    last_row = b.ir.sub(rows, b.integer(tile))
    zero = b.splat(0.0)
    sums = [[b.variable(b.floats, zero) for _ in range(tile)] for _ in range(step)]
    with b.loop(first, end) as unit, b.loop(b.integer(0), rows, tile) as wanted_row:
        row = b.ir.select(b.ir.icmp_signed("<", wanted_row, last_row), wanted_row, last_row)
        x_rows = [b.place(x, b.ir.mul(b.ir.add(row, b.integer(each)), inputs), b.float) for each in range(tile)]
        blocks = [b.ir.add(b.ir.mul(unit, b.integer(step)), b.integer(each)) for each in range(step)]
        for own in sums:
            for total in own:
                b.set(total, zero)

        def add(own: list[Any], weight: Any, index: Any, x_rows: list[Any] = x_rows) -> None:
            for total, x_row in zip(own, x_rows, strict=True):
                b.set(total, b.fma(weight, b.spread(b.load(x_row, index, b.float)), b.get(total)))

        if form == "bfloat16":
            with b.loop(b.integer(0), inputs) as index:
                for own, block in zip(sums, blocks, strict=True):
                    bits = b.load_vector(codes, _offset(b, block, inputs, index), b.i16)
                    wide = b.ir.shl(b.ir.zext(bits, b.ints), b.splat(16))
                    add(own, b.ir.bitcast(wide, b.floats), index)
        else:
            _write_groups(b, form, codes, scales, inputs, blocks, sums, add)
        for own, block in zip(sums, blocks, strict=True):
            for each, total in enumerate(own):
                own_row, column = b.ir.add(row, b.integer(each)), b.ir.mul(block, b.integer(width))
                value = b.get(total)
                if is_added:
                    added_place = b.ir.add(b.ir.mul(own_row, added_stride), column)
                    value = b.ir.fadd(value, b.load_vector(added, added_place, b.float))
                b.store_vector(value, y, b.ir.add(b.ir.mul(own_row, outputs), column))


def _write_groups(
    b: Builder, form: Form, codes: Any, scales: Any, inputs: Any, blocks: list[Any], sums: list[Any], add: Any
) -> None:
    per_byte, num_scales = (2, 2) if form == "4-bit" else (1, 1)
    num_groups, num_columns = b.ir.udiv(inputs, b.integer(GROUP)), b.ir.udiv(inputs, b.integer(per_byte))
    with b.loop(b.integer(0), num_groups) as group:
        factors = []
        for block in blocks:
            place = b.ir.mul(_offset(b, block, num_groups, group), b.integer(num_scales))
            numbers = [
                b.load_vector(scales, b.ir.add(place, b.integer(k * b.lanes)), b.half) for k in range(num_scales)
            ]
            factors.append([b.ir.fpext(each, b.floats) for each in numbers])
        with b.loop(b.integer(0), b.integer(GROUP // per_byte)) as place_in_group:
            column = b.ir.add(b.ir.mul(group, b.integer(GROUP // per_byte)), place_in_group)
            index = b.ir.mul(column, b.integer(per_byte))
            for own, block, factor in zip(sums, blocks, factors, strict=True):
                stored = b.load_vector(codes, _offset(b, block, num_columns, column), b.i8)
                if form == "8-bit":
                    code = b.ir.sitofp(b.ir.sext(stored, b.ints), b.floats)
                    add(own, _to_bfloat16(b, b.ir.fmul(code, factor[0])), index)
                    continue
                both = b.ir.zext(stored, b.ints)
                for each, code in enumerate((b.ir.and_(both, b.splat(15)), b.ir.lshr(both, b.splat(4)))):
                    weight = _to_bfloat16(b, b.fma(b.ir.sitofp(code, b.floats), *factor))
                    add(own, weight, b.ir.add(index, b.integer(each)))


def _offset(b: Builder, block: Any, num_columns: Any, column: Any) -> Any:
    """The first element of a column of a block."""
    return b.ir.mul(b.ir.add(b.ir.mul(block, num_columns), column), b.integer(b.lanes))


def _to_bfloat16(b: Builder, value: Any) -> Any:
    """Round to the nearest bfloat16, ties to even.

    (2^16 - 1) x is rounded in the last place of the bfloat16 number; 2^16 x minus that is the number, exactly. Tested
    for every significand.
    """
    below = b.fma(value, b.splat(65536.0), b.ir.fneg(value))
    return b.fma(value, b.splat(65536.0), b.ir.fneg(below))
