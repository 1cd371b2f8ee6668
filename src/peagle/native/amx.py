"""Products on the tile registers of Intel's CPUs (AMX), which multiply bfloat16 numbers and add in float32.

An instruction multiplies a tile of a weight, 16 outputs x 32 inputs, with 32 inputs of 16 columns: as many products as
256 vector instructions. Weights are bfloat16 numbers anyway. A float32 input is exactly the sum of three of them:

    high = bfloat16(x), middle = bfloat16(x - high), low = x - high - middle

So each row fills three columns, and its result is the sum of theirs. Results differ from those of float32 products only
by the order of the sum, which is the same for any number of rows.

Shapes: N rows, O outputs, I inputs, G = I / 32 groups of inputs, B = O / 16 blocks of outputs.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from peagle.native import jit
from peagle.native.builder import Builder
from peagle.native.jit import Call, call, compile_kernel

try:
    import llvmlite.binding as llvm
    from llvmlite import ir
except ImportError:  # an optional dependency
    llvm = ir = None

SIDE, INPUTS = 16, 32
"""outputs of a weight's tile, or columns of the rows' tile; and their inputs"""
TILE_BYTES = 1024
PAIR = 2
"""groups that are unpacked together"""
ROWS_OF_TILES = {1: 5, 2: 10, 3: 16}
"""by number of column tiles: the rows they hold"""
MOST_TILES = max(ROWS_OF_TILES)
MOST_INPUTS = 2**14
"""Each thread keeps the unpacked weights of 32 outputs on its stack: 1 MiB for this many inputs, of 2 at least."""
PREFETCHED = 16
"""pairs of groups between the codes that are unpacked and those that are fetched"""
FEATURES = ("amx-tile", "amx-bf16", "avx512bw", "avx512bf16")


@cache
def missing() -> str | None:
    """Why this machine cannot multiply with tiles; None if it can."""
    if (reason := jit.missing()) is not None:
        return reason
    features = llvm.get_host_cpu_features()
    if lacking := [name for name in FEATURES if not features.get(name)]:
        return f"the CPU lacks {', '.join(lacking)}"
    # Linux lends tile registers to processes that ask for them.
    is_lent = hasattr(torch.cpu, "_init_amx") and torch.cpu._init_amx()
    return None if is_lent else "the operating system does not lend tile registers"


def takes(num_outputs: int, num_inputs: int) -> bool:
    """Whether the tiles of a weight of this size are computed with on this machine."""
    is_even = num_outputs % SIDE == 0 and num_inputs % (PAIR * INPUTS) == 0
    return is_even and num_inputs <= MOST_INPUTS and missing() is None


def in_tiles(values_OI: Tensor) -> Tensor:
    """[O, I] as [B, G, 16, 32]."""
    return values_OI.unflatten(1, (-1, INPUTS)).unflatten(0, (-1, SIDE)).transpose(1, 2).contiguous()


def in_nibbles(codes_OI: Tensor) -> Tensor:
    """4-bit codes in tiles: a byte has the codes of the same input of two groups. uint8 [B, G / 2, 16, 32]."""
    pairs_BPp = in_tiles(codes_OI).unflatten(1, (-1, PAIR))
    return pairs_BPp[:, :, 0] | pairs_BPp[:, :, 1] << 4


def num_column_tiles(num_rows: int) -> int:
    """Column tiles that share a pass over the weight."""
    return next((tiles for tiles, rows in ROWS_OF_TILES.items() if num_rows <= rows), MOST_TILES)


def scratch_size(num_rows: int, num_inputs: int) -> int:
    """Bytes of the parts of some rows."""
    tiles = num_column_tiles(num_rows)
    return -(-num_rows // ROWS_OF_TILES[tiles]) * num_inputs // INPUTS * tiles * TILE_BYTES


def product_calls(
    x_NI: Tensor, scratch: Tensor, form: str, codes: Tensor, scales: Tensor, y_NO: Tensor, added: Tensor | None
) -> tuple[Call, Call]:
    """Calls that split the rows into their parts, and write their products, plus a bias or a residual, to `y_NO`."""
    (num_rows, num_inputs), num_outputs = x_NI.shape, y_NO.shape[1]
    tiles, added_stride = num_column_tiles(num_rows), 0 if added is None or added.dim() == 1 else num_outputs
    kernel = _product_kernel(form, tiles, _blocks_per_step(num_outputs), added is not None)
    tensors = scratch, codes, scales, y_NO, scratch if added is None else added
    split = call(_split_kernel(tiles), x_NI, scratch, num_inputs, num_rows)
    return split, call(kernel, *tensors, num_inputs, num_outputs, num_rows, added_stride)


def compile_kernels(form: str, num_outputs: int, is_added: bool) -> None:
    """Compile the kernels for any number of rows now, so that no step waits for them."""
    for tiles in ROWS_OF_TILES:
        _split_kernel(tiles)
        _product_kernel(form, tiles, _blocks_per_step(num_outputs), is_added)


def _blocks_per_step(num_outputs: int) -> int:
    """Blocks computed at once: the sums of one alone would wait for each other."""
    return 2 if num_outputs % (2 * SIDE) == 0 else 1


# Rows -----------------------------------------------------------------------------------------------------------------


@cache
def _split_kernel(tiles: int) -> int:
    return compile_kernel(f"amx-split-{tiles}", lambda b: _write_split(b, tiles), SIDE)


def _write_split(b: Builder, tiles: int) -> None:
    """Write the parts of all rows. Each thread takes some groups of inputs.

    With tiles for R rows, part p of a row r is column p R + r. A line of a tile has two inputs of each column.
    """
    x, scratch, inputs, rows = b.address(0), b.address(1), b.number(2), b.number(3)
    most, groups = ROWS_OF_TILES[tiles], b.ir.udiv(inputs, b.integer(INPUTS))
    first, end = b.share(groups)
    last_row = b.ir.sub(rows, b.integer(1))
    with b.loop(b.integer(0), rows, most) as row, b.loop(first, end) as group:
        parts: list[list[Any]] = [[], [], []]
        for each in range(most):
            own_row = b.smaller_integer(b.ir.add(row, b.integer(each)), last_row)
            place = b.ir.add(b.ir.mul(own_row, inputs), b.ir.mul(group, b.integer(INPUTS)))
            rest = [b.load_vector(x, b.ir.add(place, b.integer(start)), b.float) for start in (0, SIDE)]
            for own in parts:
                rounded = _to_bfloat16(b, *rest)
                own.append(b.ir.bitcast(rounded, b.ints))
                rest = [b.ir.fsub(*pair) for pair in zip(rest, _to_float(b, rounded), strict=True)]
        columns = [column for own in parts for column in own]
        columns += [b.splat(0)] * (tiles * SIDE - len(columns))
        place = b.ir.mul(_first_tile(b, row, group, tiles, groups), b.integer(TILE_BYTES // 4))
        for start in range(0, tiles * SIDE, SIDE):
            for line, value in enumerate(_transposed(b, columns[start : start + SIDE])):
                offset = b.integer((start + line) * SIDE)
                b.ir.store(value, b.place(scratch, b.ir.add(place, offset), b.i32), align=4)


def _first_tile(b: Builder, row: Any, group: Any, tiles: int, groups: Any) -> Any:
    """The first column tile of some rows and a group."""
    passed = b.ir.mul(b.ir.udiv(row, b.integer(ROWS_OF_TILES[tiles])), groups)
    return b.ir.mul(b.ir.add(passed, group), b.integer(tiles))


# Products -------------------------------------------------------------------------------------------------------------


class _Registers:
    """Tile registers: the sums of each block and column tile, one for a weight, and one or more for columns."""

    def __init__(self, b: Builder, num_blocks: int, tiles: int) -> None:
        self._b, self._tiles = b, tiles
        self._sums = [range(block * tiles, (block + 1) * tiles) for block in range(num_blocks)]
        self._weight = num_blocks * tiles
        # Palette 1: the registers that are used have 16 lines of 64 bytes.
        words = {0: 1, 16: 0x0040004000400040, 24: 0x0040004000400040, 48: 0x1010101010101010}
        configuration = b.scratch(b.integer(64))
        for offset in range(0, 64, 8):
            b.ir.store(b.integer(words.get(offset, 0)), b.place(configuration, b.integer(offset), b.i8))
        self._run("ldtilecfg", configuration)

    def _run(self, name: str, *arguments: Any) -> None:
        values = [ir.Constant(self._b.i8, each) if isinstance(each, int) else each for each in arguments]
        function = self._b.external(f"llvm.x86.{name}", ir.VoidType(), *(value.type for value in values))
        self._b.ir.call(function, values)

    def clear(self) -> None:
        for total in (each for own in self._sums for each in own):
            self._run("tilezero", total)

    def multiply(self, weights: Sequence[Any], columns: Sequence[Any]) -> None:
        """Add the products of each block's tile with all column tiles. They are given by address."""
        is_kept = self._weight + 1 + self._tiles <= 8
        register = [self._weight + 1 + (index if is_kept else 0) for index in range(self._tiles)]
        for block, (weight, own) in enumerate(zip(weights, self._sums, strict=True)):
            self._run("tileloadd64", self._weight, weight, self._b.integer(64))
            for total, column, place in zip(own, register, columns, strict=True):
                if block == 0 or not is_kept:
                    self._run("tileloadd64", column, place, self._b.integer(64))
                self._run("tdpbf16ps", total, self._weight, column)

    def store(self, block: int, place: Any) -> None:
        """Write a block's sums: a line of all columns per output."""
        for index, total in enumerate(self._sums[block]):
            start = self._b.place(place, self._b.integer(index * 64), self._b.i8)
            self._run("tilestored64", total, start, self._b.integer(64 * self._tiles))

    def release(self) -> None:
        self._run("tilerelease")


@cache
def _product_kernel(form: str, tiles: int, step: int, is_added: bool) -> int:
    name = f"amx-{form}-{tiles}-{step}{'-plus' * is_added}"
    return compile_kernel(name, lambda b: _write_product(b, form, tiles, step, is_added), SIDE)


def _write_product(b: Builder, form: str, tiles: int, step: int, is_added: bool) -> None:
    """Each thread takes some steps of blocks. It unpacks a block once, for all rows."""
    scratch, codes, scales, y, added = (b.address(index) for index in range(5))
    inputs, outputs, rows, added_stride = (b.number(index) for index in range(5, 9))
    most, groups = ROWS_OF_TILES[tiles], b.ir.udiv(inputs, b.integer(INPUTS))
    # Few rows read a weight once: the next one takes its place.
    is_kept = b.ir.icmp_signed(">", rows, b.integer(most))
    kept = b.ir.select(is_kept, groups, b.integer(PAIR))
    unpacked = b.scratch(b.ir.mul(kept, b.integer(step * TILE_BYTES)))
    factors, sums, results = (b.scratch(b.integer(each * TILE_BYTES)) for each in (1, tiles + 1, 1))
    registers = _Registers(b, step, tiles)
    first, end = b.share(b.ir.udiv(outputs, b.integer(SIDE * step)))
    with b.loop(first, end) as unit, b.loop(b.integer(0), rows, most) as row:
        blocks = [b.ir.add(b.ir.mul(unit, b.integer(step)), b.integer(each)) for each in range(step)]
        registers.clear()
        with b.loop(b.integer(0), groups, PAIR) as group:
            places = [b.ir.add(b.ir.mul(block, groups), group) for block in blocks]
            if form == "bfloat16":
                weights = [b.place(codes, b.ir.mul(place, b.integer(TILE_BYTES)), b.i8) for place in places]
            else:
                own_place = b.ir.mul(b.ir.select(is_kept, group, b.integer(0)), b.integer(step * TILE_BYTES))
                own = b.place(unpacked, own_place, b.i8)
                weights = [b.place(own, b.integer(each * PAIR * TILE_BYTES), b.i8) for each in range(step)]
                with b.ir.if_then(b.ir.icmp_signed("==", row, b.integer(0))):
                    for weight, place in zip(weights, places, strict=True):
                        _unpack(b, form, codes, scales, place, weight, factors)
            for each in range(PAIR):
                tile = _first_tile(b, row, b.ir.add(group, b.integer(each)), tiles, groups)
                column = b.place(scratch, b.ir.mul(tile, b.integer(TILE_BYTES)), b.i8)
                columns = [b.place(column, b.integer(index * TILE_BYTES), b.i8) for index in range(tiles)]
                offset = b.integer(each * TILE_BYTES)
                registers.multiply([b.place(weight, offset, b.i8) for weight in weights], columns)
        num_rows = b.smaller_integer(b.ir.sub(rows, row), b.integer(most))
        for index, block in enumerate(blocks):
            registers.store(index, sums)
            by_output = [_sum_of_parts(b, sums, tiles, output) for output in range(SIDE)]
            for each, value in enumerate(_transposed(b, by_output)[:most]):
                b.store_vector(value, results, b.integer(each * SIDE))
            column = b.ir.mul(block, b.integer(SIDE))
            with b.loop(b.integer(0), num_rows) as each:
                own_row = b.ir.add(row, each)
                value = b.load_vector(results, b.ir.mul(each, b.integer(SIDE)), b.float)
                if is_added:
                    added_place = b.ir.add(b.ir.mul(own_row, added_stride), column)
                    value = b.ir.fadd(value, b.load_vector(added, added_place, b.float))
                b.store_vector(value, y, b.ir.add(b.ir.mul(own_row, outputs), column))
    registers.release()


def _sum_of_parts(b: Builder, sums: Any, tiles: int, output: int) -> Any:
    """The results of one output, a lane per row."""
    starts = (output * tiles * SIDE + part * ROWS_OF_TILES[tiles] for part in range(3))
    high, middle, low = (b.load_vector(sums, b.integer(start), b.float) for start in starts)
    return b.ir.fadd(b.ir.fadd(high, middle), low)


# Weights --------------------------------------------------------------------------------------------------------------


def _unpack(b: Builder, form: str, codes: Any, scales: Any, place: Any, unpacked: Any, factors: Any) -> None:
    """Write the numbers of a block's pair of tiles, the first of which is `place`."""
    num_factors, num_bytes = (2, SIDE * INPUTS // 2) if form == "4-bit" else (1, SIDE * INPUTS)
    num_vectors = PAIR * num_factors
    own_codes = b.place(codes, b.ir.mul(place, b.integer(num_bytes)), b.i8)
    own_scales = b.place(scales, b.ir.mul(place, b.integer(num_factors * SIDE)), b.half)
    _prefetch(b, own_codes, PAIR * num_bytes)
    _prefetch(b, own_scales, num_vectors * SIDE * 2)
    for start in range(0, num_vectors * SIDE, SIDE):
        numbers = b.load_vector(own_scales, b.integer(start), b.half)
        b.store_vector(b.ir.fpext(numbers, b.floats), factors, b.integer(start))
    write = _from_nibbles if form == "4-bit" else _from_bytes
    for output in range(SIDE):
        places = (b.integer(start + output) for start in range(0, num_vectors * SIDE, SIDE))
        own_factors = [b.spread(b.load(factors, place, b.float)) for place in places]
        for each, line in enumerate(write(b, own_codes, output, own_factors)):
            offset = b.integer(each * TILE_BYTES + output * 2 * INPUTS)
            b.ir.store(line, b.place(unpacked, offset, b.i8), align=64)


def _prefetch(b: Builder, place: Any, num_bytes: int) -> None:
    """Fetch what is `PREFETCHED` pairs later: reading by tiles hides little latency."""
    fetch = b.external("llvm.prefetch.p0", ir.VoidType(), b.pointer, b.i32, b.i32, b.i32)
    for_reading_from_all_caches = [ir.Constant(b.i32, number) for number in (0, 3, 1)]
    for line in range(0, num_bytes, 64):
        offset = b.integer(PREFETCHED * num_bytes + line)
        b.ir.call(fetch, [b.place(place, offset, b.i8), *for_reading_from_all_caches])


def _from_nibbles(b: Builder, codes: Any, output: int, factors: list[Any]) -> list[Any]:
    """An output's line in both tiles. Each looks up a table of the 16 numbers that it may have."""
    shorts = ir.VectorType(b.i16, INPUTS)
    place = b.place(codes, b.integer(output * INPUTS), b.i8)
    stored = b.ir.zext(b.ir.load(place, typ=ir.VectorType(b.i8, INPUTS), align=1), shorts)
    steps = ir.Constant(b.floats, [float(code) for code in range(16)])
    table = _to_bfloat16(b, *(b.fma(steps, factors[start], factors[start + 1]) for start in (0, PAIR)))
    four, low, high = (ir.Constant(shorts, [number] * INPUTS) for number in (4, 15, 16))
    lookup = b.external("llvm.x86.avx512.permvar.hi.512", shorts, shorts, shorts)
    indices = b.ir.and_(stored, low), b.ir.or_(b.ir.lshr(stored, four), high)
    return [b.ir.call(lookup, [table, index]) for index in indices]


def _from_bytes(b: Builder, codes: Any, output: int, factors: list[Any]) -> list[Any]:
    """An output's line in both tiles."""
    lines = []
    for each, factor in enumerate(factors):
        starts = ((each * SIDE + output) * INPUTS + half for half in (0, SIDE))
        stored = [b.ir.sext(b.load_vector(codes, b.integer(start), b.i8), b.ints) for start in starts]
        lines.append(_to_bfloat16(b, *(b.ir.fmul(b.ir.sitofp(codes, b.floats), factor) for codes in stored)))
    return lines


# Vectors --------------------------------------------------------------------------------------------------------------


class _BFloat16(ir.Type if ir else object):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"


def _to_bfloat16(b: Builder, first: Any, second: Any) -> Any:
    """Two vectors of floats rounded to one of bfloat16 numbers, as 16-bit integers."""
    name, numbers = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(_BFloat16(), INPUTS)
    rounded = b.ir.call(b.external(name, numbers, b.floats, b.floats), [second, first])
    return b.ir.bitcast(rounded, ir.VectorType(b.i16, INPUTS))


def _to_float(b: Builder, numbers: Any) -> list[Any]:
    """The two vectors of floats of a vector of bfloat16 numbers."""
    halves = (ir.Constant(b.ints, list(range(start, start + SIDE))) for start in (0, SIDE))
    bits = [b.ir.zext(b.ir.shuffle_vector(numbers, numbers, half), b.ints) for half in halves]
    return [b.ir.bitcast(b.ir.shl(each, b.splat(16)), b.floats) for each in bits]


def _transposed(b: Builder, lines: Sequence[Any]) -> list[Any]:
    """The columns of 16 vectors of 16 elements."""
    vectors = list(lines)
    halves = [
        ir.Constant(b.ints, [lane for each in range(start, start + SIDE // 2) for lane in (each, each + SIDE)])
        for start in (0, SIDE // 2)
    ]
    for _ in range(4):  # interleaving the first half of the vectors with the second, four times, transposes
        pairs = zip(vectors[: SIDE // 2], vectors[SIDE // 2 :], strict=True)
        vectors = [b.ir.shuffle_vector(one, other, half) for one, other in pairs for half in halves]
    return vectors
