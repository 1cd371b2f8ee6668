"""What a decoder layer does besides products: norm, rotary embedding, attention over pages, and gate.

All are in float32. A pass has N rows of some requests, described by `RowTable`.

Shapes: N rows, D model width, H query and G key-value heads, E head width, F MLP width, P pages per request.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor

from peagle.native.builder import Builder
from peagle.native.jit import Call, call, compile_kernel, has_wide_registers

LANES = 8
MAX_LANES = 16
MAX_SUMS = 16
"""vectors of sums that a kernel keeps in registers where these are wide and many, else half of them"""
MAX_ROWS = 512
"""rows of a pass; for longer prompts torch's attention is faster"""


# Norm -----------------------------------------------------------------------------------------------------------------


def norm_call(x_ND: Tensor, weight_D: Tensor, y_ND: Tensor, epsilon: float) -> Call:
    """A call that writes the RMS norm of each row, times the weight."""
    return call(_norm_kernel(), x_ND, weight_D, y_ND, len(x_ND), x_ND.shape[1], epsilon)


@cache
def _norm_kernel() -> int:
    def write(b: Builder) -> None:
        x, weight, y = (b.address(index) for index in range(3))
        rows, width, epsilon = b.number(3), b.number(4), b.floating(5)
        first, end = b.share(rows)
        with b.loop(first, end) as row:
            start = b.ir.mul(row, width)
            factor = _norm_factor(b, b.place(x, start, b.float), width, epsilon)
            with b.loop(b.integer(0), width, LANES) as column:
                place = b.ir.add(start, column)
                value = b.ir.fmul(b.load_vector(x, place, b.float), factor)
                b.store_vector(b.ir.fmul(value, b.load_vector(weight, column, b.float)), y, place)

    return compile_kernel("norm", write, LANES)


def _norm_factor(b: Builder, x: Any, width: Any, epsilon: Any) -> Any:
    """1 / sqrt(mean(x^2) + epsilon) in every lane."""
    squares = b.variable(b.floats, b.splat(0.0))
    b.set(squares, b.splat(0.0))
    with b.loop(b.integer(0), width, LANES) as column:
        value = b.load_vector(x, column, b.float)
        b.set(squares, b.fma(value, value, b.get(squares)))
    mean = b.ir.fdiv(b.sum(b.get(squares)), b.ir.sitofp(width, b.float))
    root = b.ir.call(b.external("llvm.sqrt.f32", b.float, b.float), [b.ir.fadd(mean, epsilon)])
    return b.spread(b.ir.fdiv(b.constant(1.0), root))


# Rotary embedding -----------------------------------------------------------------------------------------------------


def rotary_call(
    qkv: Tensor,
    num_rows: int,
    head_norms: tuple[Tensor, Tensor, float] | None,
    *,
    num_heads: int,
    num_groups: int,
    width: int,
) -> Call:
    """A call that rotates queries in place, and stores rotated keys, and values, in the cells of their rows.

    Rows of `qkv` are queries, keys, values. `head_norms` are the norms of each query and key head before the rotation.
    Arguments 1 to 5 are left for the caller: cos and sin [N, E], keys and values of all cells, int64 cells [N].
    """
    q_norm, k_norm, epsilon = head_norms or (qkv, qkv, 0.0)
    kernel = _rotary_kernel(num_heads, num_groups, width, head_norms is not None)
    return call(kernel, qkv, 0, 0, 0, 0, 0, q_norm, k_norm, num_rows, epsilon)


@cache
def _rotary_kernel(num_heads: int, num_groups: int, width: int, has_norms: bool) -> int:
    def write(b: Builder) -> None:
        qkv, cos, sin, keys, values, cell_table, q_norm, k_norm = (b.address(index) for index in range(8))
        rows, epsilon = b.number(8), b.floating(9)
        num_parts = num_heads + num_groups
        first, end = b.share(b.ir.mul(rows, b.integer(num_parts)))
        with b.loop(first, end) as unit:
            row, head = b.ir.udiv(unit, b.integer(num_parts)), b.ir.urem(unit, b.integer(num_parts))
            row_start = b.ir.mul(row, b.integer((num_parts + num_groups) * width))
            source = b.place(qkv, b.ir.add(row_start, b.ir.mul(head, b.integer(width))), b.float)
            group = b.ir.sub(head, b.integer(num_heads))
            is_key = b.ir.icmp_signed(">=", group, b.integer(0))
            cell = b.ir.mul(b.load(cell_table, row, b.i64), b.integer(num_groups * width))
            kept = b.ir.add(cell, b.ir.mul(b.ir.select(is_key, group, b.integer(0)), b.integer(width)))
            destination = b.ir.select(is_key, b.place(keys, kept, b.float), source)
            norm = b.ir.select(is_key, k_norm, q_norm)
            factor = _norm_factor(b, source, b.integer(width), epsilon) if has_norms else None
            angle = b.ir.mul(row, b.integer(width))

            def part(column: Any) -> Any:
                value = b.load_vector(source, column, b.float)
                if factor is None:
                    return value
                return b.ir.fmul(b.ir.fmul(value, factor), b.load_vector(norm, column, b.float))

            with b.loop(b.integer(0), b.integer(width // 2), LANES) as low:
                high = b.ir.add(low, b.integer(width // 2))
                a, c = part(low), part(high)
                cos_low, cos_high, sin_low, sin_high = (
                    b.load_vector(table, b.ir.add(angle, column), b.float)
                    for table in (cos, sin)
                    for column in (low, high)
                )
                b.store_vector(b.fma(a, cos_low, b.ir.fneg(b.ir.fmul(c, sin_low))), destination, low)
                b.store_vector(b.fma(c, cos_high, b.ir.fmul(a, sin_high)), destination, high)
            with b.ir.if_then(is_key), b.loop(b.integer(0), b.integer(width), LANES) as column:
                value_start = b.ir.add(row_start, b.ir.mul(b.ir.add(head, b.integer(num_groups)), b.integer(width)))
                value = b.load_vector(qkv, b.ir.add(value_start, column), b.float)
                b.store_vector(value, values, b.ir.add(kept, column))

    return compile_kernel(f"rotary-{num_heads}-{num_groups}-{width}{'-normed' * has_norms}", write, LANES)


# Attention ------------------------------------------------------------------------------------------------------------


def attention_call(
    qkv: Tensor,
    attended: Tensor,
    num_rows: int,
    *,
    num_heads: int,
    num_groups: int,
    width: int,
    scale: float,
    window: int,
    first_key: int,
    num_together: int = 1,
) -> Call:
    """A call that attends from the queries of each row to its request's sequence in the pages.

    A thread computes `num_together` heads of a row at once (`heads_together`). Arguments 1 to 8 are left for the
    caller: keys and values of all cells, the int32 page table, the table of the rows (`RowsOnHost.for_kernels`),
    scratch memory [threads * num_together, keys] for scores and its width, the width of the page table, and the page
    size.
    """
    kernel = _attention_kernel(num_heads, num_groups, width, num_together)
    return call(kernel, qkv, 0, 0, 0, 0, 0, 0, 0, 0, attended, num_rows, window, first_key, scale)


def heads_together(num_rows: int, num_heads: int, num_groups: int, width: int, num_threads: int) -> int:
    """Heads that a thread computes at once: they share the keys and values that they read from memory.

    As many of a group as registers hold the sums of, but one where there is too little work for all threads.
    """
    group_size = num_heads // num_groups
    num_sums = MAX_SUMS if has_wide_registers() else MAX_SUMS // 2
    most = max(1, num_sums * _attention_lanes(width) // width)
    number = max(each for each in range(1, group_size + 1) if group_size % each == 0 and each <= most)
    return number if num_rows * num_heads // number >= 2 * num_threads else 1


def _attention_lanes(width: int) -> int:
    return MAX_LANES if has_wide_registers() and width % MAX_LANES == 0 else LANES


@cache
def _attention_kernel(num_heads: int, num_groups: int, width: int, num_together: int) -> int:
    group_size, cell_width, lanes = num_heads // num_groups, num_groups * width, _attention_lanes(width)
    heads, columns = range(num_together), range(0, width, lanes)

    def write(b: Builder) -> None:
        qkv, keys, values, table, row_table, all_scores = (b.address(index) for index in range(6))
        scores_width, table_width, page_size = (b.number(index) for index in range(6, 9))
        attended, rows, window, first_key = b.address(9), b.number(10), b.number(11), b.number(12)
        scale = b.floating(13)
        own_scores = b.ir.mul(b.ir.mul(b.thread(), b.integer(num_together)), scores_width)
        scores = [
            b.place(all_scores, b.ir.add(own_scores, b.ir.mul(b.integer(head), scores_width)), b.float)
            for head in heads
        ]
        sums = [[b.variable(b.floats, b.splat(0.0)) for _ in columns] for _ in heads]
        units_per_row = num_heads // num_together
        # Threads take turns: the later rows of a prompt have more keys.
        with b.loop(b.thread(), b.ir.mul(rows, b.integer(units_per_row)), b.num_threads()) as unit:
            row, part = b.ir.udiv(unit, b.integer(units_per_row)), b.ir.urem(unit, b.integer(units_per_row))
            first_head = b.ir.mul(part, b.integer(num_together))
            line, context, index, seen, depth = (
                b.load(row_table, b.ir.add(b.ir.mul(row, b.integer(5)), b.integer(each)), b.i64) for each in range(5)
            )
            num_keys = b.ir.add(b.ir.add(context, index), b.integer(1))
            past = b.ir.add(b.ir.sub(b.ir.add(context, depth), window), b.integer(1))
            is_windowed = b.ir.icmp_signed(">", window, b.integer(0))
            is_limited = b.ir.and_(is_windowed, b.ir.icmp_signed(">", past, first_key))
            start = b.ir.select(is_limited, past, first_key)
            group_place = b.ir.mul(b.ir.udiv(first_head, b.integer(group_size)), b.integer(width))
            queries = b.ir.add(
                b.ir.mul(row, b.integer((num_heads + 2 * num_groups) * width)), b.ir.mul(first_head, b.integer(width))
            )
            pages = _Pages(table, b.ir.mul(line, table_width), page_size)
            # Scores of the keys before the pass, `lanes` at a time, then of the others; -inf for new rows that this row
            # does not see. A key has the same score both ways.
            with _each_page(b, pages, start, num_keys) as (first_key_of_page, last_key, offset):
                num_past = b.ir.sub(b.smaller_integer(context, last_key), first_key_of_page)
                num_blocks = b.ir.sdiv(num_past, b.integer(lanes))
                num_in_blocks = b.ir.mul(b.larger_integer(num_blocks, b.integer(0)), b.integer(lanes))
                rest = b.ir.add(first_key_of_page, num_in_blocks)
                for head in heads:
                    query_place = b.ir.add(queries, b.integer(head * width))
                    query = [b.load_vector(qkv, b.ir.add(query_place, b.integer(each)), b.float) for each in columns]
                    products = partial(_products, b, query, keys, group_place, cell_width)
                    with b.loop(first_key_of_page, rest, lanes) as key:
                        cells = [b.ir.add(b.ir.add(key, offset), b.integer(each)) for each in range(lanes)]
                        block = b.ir.fmul(b.sums([partial(products, cell) for cell in cells]), b.spread(scale))
                        b.store_vector(block, scores[head], b.ir.sub(key, start))
                    with b.loop(rest, last_key) as key:
                        score = b.ir.fmul(b.sum_as_in_sums(products(b.ir.add(key, offset))), scale)
                        new = b.ir.sub(key, context)
                        bit = b.ir.and_(b.ir.lshr(seen, b.ir.and_(new, b.integer(63))), b.integer(1))
                        is_past = b.ir.icmp_signed("<", new, b.integer(0))
                        is_seen = b.ir.or_(is_past, b.ir.icmp_signed("==", bit, b.integer(1)))
                        score = b.ir.select(is_seen, score, b.constant(-math.inf))
                        b.ir.store(score, b.place(scores[head], b.ir.sub(key, start), b.float))
            totals = [_softmax(b, scores[head], b.ir.sub(num_keys, start)) for head in heads]
            # The weighted sums of the values.
            for each in sums:
                for own in each:
                    b.set(own, b.splat(0.0))
            with _each_page(b, pages, start, num_keys) as (first_key_of_page, last_key, offset):
                with b.loop(first_key_of_page, last_key) as key:
                    place = b.ir.add(b.ir.mul(b.ir.add(key, offset), b.integer(cell_width)), group_place)
                    value = [b.load_vector(values, b.ir.add(place, b.integer(each)), b.float) for each in columns]
                    for head in heads:
                        weight = b.spread(b.load(scores[head], b.ir.sub(key, start), b.float))
                        for part, own in zip(value, sums[head], strict=True):
                            b.set(own, b.fma(weight, part, b.get(own)))
            out = b.ir.add(b.ir.mul(row, b.integer(num_heads * width)), b.ir.mul(first_head, b.integer(width)))
            for head in heads:
                for column, own in zip(columns, sums[head], strict=True):
                    place = b.ir.add(out, b.integer(head * width + column))
                    b.store_vector(b.ir.fdiv(b.get(own), totals[head]), attended, place)

    name = f"attention-{num_heads}-{num_groups}-{width}{f'-{num_together}' if num_together > 1 else ''}"
    return compile_kernel(name, write, lanes)


def _products(b: Builder, query: list[Any], keys: Any, group_place: Any, cell_width: int, cell: Any) -> Any:
    """Query times key, to be summed over the lanes."""
    place, product = b.ir.add(b.ir.mul(cell, b.integer(cell_width)), group_place), b.splat(0.0)
    for index, part in enumerate(query):
        column = b.integer(index * b.lanes)
        product = b.fma(part, b.load_vector(keys, b.ir.add(place, column), b.float), product)
    return product


def _softmax(b: Builder, scores: Any, num_scores: Any) -> Any:
    """Replace the scores by the numerators of their softmax; returns the denominator in every lane."""
    largest, total = b.variable(b.floats, b.splat(0.0)), b.variable(b.floats, b.splat(0.0))
    b.store_vector(b.splat(-math.inf), scores, num_scores)
    b.set(largest, b.splat(-math.inf))
    with b.loop(b.integer(0), num_scores, b.lanes) as place:
        b.set(largest, b.larger(b.load_vector(scores, place, b.float), b.get(largest)))
    most = b.spread(b.max(b.get(largest)))
    b.set(total, b.splat(0.0))
    with b.loop(b.integer(0), num_scores, b.lanes) as place:
        weight = exponential(b, b.ir.fsub(b.load_vector(scores, place, b.float), most))
        b.set(total, b.ir.fadd(b.get(total), weight))
        b.store_vector(weight, scores, place)
    return b.spread(b.sum(b.get(total)))


class _Pages(NamedTuple):
    """The pages of a sequence: `table` from `line` on."""

    table: Any
    line: Any
    page_size: Any


@contextmanager
def _each_page(b: Builder, pages: _Pages, start: Any, end: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Loop over the pages of the keys from `start` to `end`: the first key, the last, and what makes a key a cell."""
    page_size = pages.page_size
    last_page = b.ir.udiv(b.ir.sub(end, b.integer(1)), page_size)
    with b.loop(b.ir.udiv(start, page_size), b.ir.add(last_page, b.integer(1))) as page:
        page_start = b.ir.mul(page, page_size)
        first = b.larger_integer(start, page_start)
        last = b.smaller_integer(end, b.ir.add(page_start, page_size))
        number = b.ir.sext(b.load(pages.table, b.ir.add(pages.line, page), b.i32), b.i64)
        yield first, last, b.ir.sub(b.ir.mul(number, page_size), page_start)


def exponential(b: Builder, x: Any) -> Any:
    """e^x to about 1e-7 of its value; 1e-38 for all x below -87, and 1e38 for all above 88."""
    x = b.larger(x, b.splat(-87.3))
    x = b.ir.fneg(b.larger(b.ir.fneg(x), b.splat(-88.0)))
    rint = b.external(f"llvm.rint.v{b.lanes}f32", b.floats, b.floats)
    power = b.ir.call(rint, [b.ir.fmul(x, b.splat(math.log2(math.e)))])
    # x - power * ln 2, with ln 2 in two parts.
    rest = b.fma(power, b.splat(-0.693359375), x)
    rest = b.fma(power, b.splat(2.12194440e-4), rest)
    value = b.splat(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = b.fma(value, rest, b.splat(coefficient))
    value = b.ir.fadd(b.fma(value, b.ir.fmul(rest, rest), rest), b.splat(1.0))
    exponent = b.ir.shl(b.ir.add(b.ir.fptosi(power, b.ints), b.splat(127)), b.splat(23))
    return b.ir.fmul(value, b.ir.bitcast(exponent, b.floats))


# Gate -----------------------------------------------------------------------------------------------------------------


def gate_call(gate_up: Tensor, y_NF: Tensor, activation: str) -> Call:
    """A call that writes activation(gate) * up. Rows of `gate_up` are the gate, then up."""
    return call(_gate_kernel(activation), gate_up, y_NF, len(y_NF), y_NF.shape[1])


@cache
def _gate_kernel(activation: str) -> int:
    def write(b: Builder) -> None:
        gate_up, y, rows, width = b.address(0), b.address(1), b.number(2), b.number(3)
        num_vectors = b.ir.udiv(width, b.integer(LANES))
        first, end = b.share(b.ir.mul(rows, num_vectors))
        with b.loop(first, end) as unit:
            row, column = b.ir.udiv(unit, num_vectors), b.ir.mul(b.ir.urem(unit, num_vectors), b.integer(LANES))
            place = b.ir.add(b.ir.mul(row, b.ir.mul(width, b.integer(2))), column)
            gate, up = (b.load_vector(gate_up, each, b.float) for each in (place, b.ir.add(place, width)))
            steep = gate
            if activation == "gelu_tanh":
                inner = b.fma(b.ir.fmul(gate, gate), b.ir.fmul(gate, b.splat(0.044715)), gate)
                steep = b.ir.fmul(inner, b.splat(2 * math.sqrt(2 / math.pi)))
            divisor = b.ir.fadd(exponential(b, b.ir.fneg(steep)), b.splat(1.0))
            value = b.ir.fmul(b.ir.fdiv(gate, divisor), up)
            b.store_vector(value, y, b.ir.add(b.ir.mul(row, width), column))

    return compile_kernel(f"gate-{activation}", write, LANES)
