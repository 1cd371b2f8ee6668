"""Products of a few rows in integers of 8 bits, for results that need not be exact: those of a drafter.

Each output's weights are rounded to -127 .. 127 times a scale, and so is each row of the input. The CPU adds four
products of bytes per lane and instruction (VNNI on x86-64, sdot on ARM), and reads a byte per weight. The error is
about 1% of the results' standard deviation.

vpdpbusd multiplies unsigned with signed bytes. So on x86-64 the weights are stored with 128 added, and each sum starts
at -128 times the sum of the row.

A packed weight is split into blocks of L outputs. A block has the codes of four inputs of its first output, then those
of the next output, and so on; then those of the next four inputs.

Shapes: O outputs, I inputs, L lanes, B = O / L blocks, Q = I / 4.
"""

import platform
from typing import Any

import torch
from torch import Tensor

from peagle.native.builder import Builder
from peagle.native.jit import has_wide_registers, missing

try:
    import llvmlite.binding as llvm
    from llvmlite import ir
except ImportError:  # an optional dependency
    llvm = ir = None

CODES = 127
"""the largest code"""
MOST_INPUTS = 2**15
"""Each thread keeps a tile of rounded rows on its stack. Twice as many inputs would still not overflow a sum."""
SMALLEST = 1e-30
"""stands for the largest number of a row, or of a weight's output, of zeros"""
IS_X86 = platform.machine() == "x86_64"
UNSIGNED = 128 if IS_X86 else 0
"""added to the codes of weights"""


def missing_integers() -> str | None:
    """Why this machine has no fast products of bytes; None if it has."""
    if (reason := missing()) is not None:
        return reason
    name = "dotprod" if not IS_X86 else "avx512vnni" if has_wide_registers() else "avxvnni"
    return None if llvm.get_host_cpu_features().get(name) else f"the CPU lacks {name}"


def missing_for(weight_OI: Tensor, lanes: int) -> str | None:
    """Why a weight is not rounded; None if it is."""
    if (reason := missing_integers()) is not None:
        return reason
    if weight_OI.dtype != torch.float32 or weight_OI.device.type != "cpu":
        return f"the kernels compute in float32 on a CPU, not in {weight_OI.dtype} on {weight_OI.device}"
    num_outputs, num_inputs = weight_OI.shape
    if num_outputs % lanes or num_inputs % lanes:
        return f"{num_outputs} outputs and {num_inputs} inputs are not both multiples of {lanes}"
    return None if num_inputs <= MOST_INPUTS else f"{num_inputs} inputs are more than {MOST_INPUTS}"


def rounded_codes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of a weight, int8 [O, I], and the scale of each output, float32 [O]."""
    scale_O = weight_OI.abs().amax(1).clamp_min(SMALLEST) / CODES
    return (weight_OI / scale_O[:, None]).round().to(torch.int8), scale_O


def in_quads(codes_OI: Tensor, lanes: int) -> Tensor:
    """The codes in the layout of the kernel, [B, Q, L, 4]."""
    codes_BLQ4 = (codes_OI.to(torch.int16) + UNSIGNED).to(torch.uint8).view(-1, lanes, codes_OI.shape[1] // 4, 4)
    return codes_BLQ4.transpose(1, 2).contiguous()


def write_integer_product(b: Builder, tile: int, step: int, is_added: bool) -> None:
    """Each thread rounds the rows, and takes some blocks. Arguments and tiles are those of the other products."""
    x, codes, scales, y, added = (b.address(index) for index in range(5))
    inputs, outputs, rows, added_stride = (b.number(index) for index in range(5, 9))
    width, num_quads = b.lanes, b.ir.udiv(inputs, b.integer(4))
    first, end = b.share(b.ir.udiv(outputs, b.integer(width * step)))
    last_row = b.ir.sub(rows, b.integer(tile))
    row_codes = b.scratch(b.ir.mul(inputs, b.integer(tile)))
    row_scales, row_starts = (b.scratch(b.integer(4 * tile)) for _ in range(2))
    sums = [[b.variable(b.ints, b.splat(0)) for _ in range(tile)] for _ in range(step)]
    with b.loop(b.integer(0), rows, tile) as wanted_row:
        row = b.smaller_integer(wanted_row, last_row)
        with b.loop(b.integer(0), b.integer(tile)) as each:
            source = b.place(x, b.ir.mul(b.ir.add(row, each), inputs), b.float)
            scale, start = _round_row(b, source, b.place(row_codes, b.ir.mul(inputs, each), b.i8), inputs)
            b.ir.store(scale, b.place(row_scales, each, b.float))
            b.ir.store(start, b.place(row_starts, each, b.i32))
        own_codes = [b.place(row_codes, b.ir.mul(inputs, b.integer(each)), b.i8) for each in range(tile)]
        with b.loop(first, end) as unit:
            blocks = [b.ir.add(b.ir.mul(unit, b.integer(step)), b.integer(each)) for each in range(step)]
            starts = [b.place(codes, b.ir.mul(b.ir.mul(block, inputs), b.integer(width)), b.i8) for block in blocks]
            for own in sums:
                for each, total in enumerate(own):
                    b.set(total, b.spread(b.load(row_starts, b.integer(each), b.i32)))
            with b.loop(b.integer(0), num_quads) as quad:
                weights = [b.load_vector(start, b.ir.mul(quad, b.integer(width)), b.i32) for start in starts]
                for each, four_codes in enumerate(own_codes):
                    four = b.spread(b.load(four_codes, quad, b.i32))
                    for own, weight in zip(sums, weights, strict=True):
                        b.set(own[each], _dot(b, b.get(own[each]), weight, four))
            for own, block in zip(sums, blocks, strict=True):
                column = b.ir.mul(block, b.integer(width))
                output_scales = b.load_vector(scales, column, b.float)
                for each, total in enumerate(own):
                    place = b.ir.add(row, b.integer(each))
                    factor = b.ir.fmul(output_scales, b.spread(b.load(row_scales, b.integer(each), b.float)))
                    value = b.ir.fmul(b.ir.sitofp(b.get(total), b.floats), factor)
                    if is_added:
                        added_place = b.ir.add(b.ir.mul(place, added_stride), column)
                        value = b.ir.fadd(value, b.load_vector(added, added_place, b.float))
                    b.store_vector(value, y, b.ir.add(b.ir.mul(place, outputs), column))


def _round_row(b: Builder, source: Any, codes: Any, width: Any) -> tuple[Any, Any]:
    """Write the codes of a row of the input. Gives its scale, and what each sum starts at."""
    fabs, rint = (b.external(f"llvm.{name}.v{b.lanes}f32", b.floats, b.floats) for name in ("fabs", "rint"))
    part = b.variable(b.floats, b.splat(SMALLEST))
    with b.loop(b.integer(0), width, b.lanes) as column:
        b.set(part, b.larger(b.ir.call(fabs, [b.load_vector(source, column, b.float)]), b.get(part)))
    most = b.max(b.get(part))
    factor = b.spread(b.ir.fdiv(b.constant(float(CODES)), most))
    b.set(part, b.splat(0.0))
    with b.loop(b.integer(0), width, b.lanes) as column:
        code = b.ir.call(rint, [b.ir.fmul(b.load_vector(source, column, b.float), factor)])
        b.set(part, b.ir.fadd(b.get(part), code))
        bytes_ = b.ir.trunc(b.ir.fptosi(code, b.ints), b.vector(b.i8))
        b.ir.store(bytes_, b.place(codes, column, b.i8), align=1)
    total = b.ir.fptosi(b.sum(b.get(part)), b.i32)
    return b.ir.fmul(most, b.constant(1 / CODES)), b.ir.mul(total, ir.Constant(b.i32, -UNSIGNED))


def _dot(b: Builder, total: Any, weights: Any, row: Any) -> Any:
    """Add the products of four bytes to each lane."""
    if IS_X86:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * b.lanes}"
        return b.ir.call(b.external(name, b.ints, b.ints, b.ints, b.ints), [total, weights, row])
    four, bytes_ = ir.VectorType(b.i32, 4), ir.VectorType(b.i8, 16)
    dot = b.external("llvm.aarch64.neon.sdot.v4i32.v16i8", four, four, bytes_, bytes_)
    halves = []
    for first in (0, 4):
        lanes = ir.Constant(four, list(range(first, first + 4)))
        parts = [b.ir.shuffle_vector(each, each, lanes) for each in (total, weights, row)]
        halves.append(b.ir.call(dot, [parts[0], *(b.ir.bitcast(each, bytes_) for each in parts[1:])]))
    return b.ir.shuffle_vector(*halves, ir.Constant(b.ints, list(range(8))))
