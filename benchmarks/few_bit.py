"""Time products with weights in 4 or 8 bits, of linear layers and of experts, against bfloat16. Needs a GPU.

    python benchmarks/few_bit.py [--weights 4096x4096 28672x4096g] [--experts gpt-oss] [--forms int4] [--rows 1 8 64]
        [--tilings] [--seconds 300]

A weight is output columns x input columns; g gates its halves. Each time is microseconds per product, in a CUDA graph
of so many weights that they do not fit into the L2 cache, with the share of the bandwidth limit of the bytes read.
Torch's own products follow, without gate and routing. `--tilings` searches other tilings instead, one property after
the other, and ends with a table of the fastest, also after `--seconds`, on Ctrl-C or SIGTERM. Kernels are compiled in
many processes first.
"""

import argparse
import itertools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from multiprocessing.pool import Pool
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peagle.bench.bandwidth import measure_bandwidth
from peagle.experts.few_bit_triton import (
    FewBitExpertTiling,
    few_bit_expert_products_triton,
    few_bit_expert_tiling,
)
from peagle.experts.product_triton import expert_products_triton
from peagle.linears.few_bit import FORMS, INT4_GROUP, FewBitWeight, quantize
from peagle.linears.few_bit_triton import FewBitTiling, few_bit_product_triton, few_bit_tiling, most_stages
from peagle.linears.skinny_linear_triton import skinny_linear_triton
from peagle.linears.tilings import linear_tiling
from peagle.worker.graphs import capture, replay_seconds

CACHE_BYTES = 200 << 20
NUM_REPLAYS, NUM_TRIES = 5, 3
HOPELESS = 1.3
"""A tiling that takes this much longer than the fastest so far is timed once."""
LAYOUTS = (
    *((tile, warps, warps) for tile in (16, 32) for warps in (2, 4, 8)),
    *((tile, 1, tile // 16) for tile in (32, 64, 128)),
    (128, 1, 4),
)
"""Columns of a tile (of both halves of a gate), splits, warps"""
STAGES = (2, 3, 4, 5)
AHEAD = (0, 256, 1024)
NUM_ROUNDS = 4
HEADER = f"{'weight':>14} {'form':>9} {'rows':>5} {'us':>8} {'limit':>6}"
AT_A_TIME = 128
"""Kernels to compile before they are timed."""
WEIGHTS = ("6144x4096", "4096x4096", "28672x4096g", "4096x14336")  # Llama 8B
LINEAR_FORMS = ("int4", "int8", "fp8")


class Experts(NamedTuple):
    num_experts: int
    num_chosen: int
    width: int
    inner: int
    gate: str
    forms: tuple[str, ...]


EXPERTS = {
    "gpt-oss": Experts(32, 4, 2880, 2880, "clamped", ("mxfp4",)),
    "qwen3-30b-a3b": Experts(128, 8, 2048, 768, "silu", ("fp8", "int4")),
}


class Case(NamedTuple):
    """A product to time. `form` "bfloat16" is the kernel for plain weights."""

    name: str
    form: str
    num_rows: int


class Timing(NamedTuple):
    seconds: float
    num_bytes: float
    tiling: Any


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="*", default=WEIGHTS)
    parser.add_argument("--experts", nargs="*", default=list(EXPERTS), choices=EXPERTS)
    parser.add_argument("--forms", nargs="+", default=["bfloat16", *FORMS], choices=["bfloat16", *FORMS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--tilings", action="store_true")
    parser.add_argument("--seconds", type=int, default=0, help="to stop after (0: never)")
    arguments = parser.parse_args(argv)
    is_over = threading.Event()
    for signal_number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: is_over.set())
    signal.alarm(arguments.seconds)
    cases = in_turn(
        [
            Case(name, form, num_rows)
            for name, forms in every
            for form, num_rows in itertools.product(forms, arguments.rows)
            if form in arguments.forms
        ]
        for every in (
            [(name, ("bfloat16", *LINEAR_FORMS)) for name in arguments.weights],
            [(name, ("bfloat16", *EXPERTS[name].forms)) for name in arguments.experts],
        )
    )
    bandwidth = measure_bandwidth(torch.device("cuda"))["bytes_per_second"]
    found: dict[Case, list[Timing]] = {case: [] for case in cases}
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        time_tilings(found, {case: [used_tiling(case)] for case in cases}, pool, is_over)
        used = {case: times[0].seconds for case, times in found.items() if times}
        print(HEADER, flush=True)
        for case in sorted(cases):
            for timing in found[case]:
                print(line(case, timing, bandwidth), flush=True)
            if not (arguments.tilings or is_over.is_set()):
                time_torch(case, bandwidth)
        if not arguments.tilings:
            return
        searched = [case for case in cases if case.form != "bfloat16"]
        for number in range(NUM_ROUNDS):
            wanted = {case: list(others(case, fastest_of(case, found).tiling, number)) for case in searched}
            time_tilings(found, wanted, pool, is_over)
    print(f"{HEADER}  as used  fastest tiling", flush=True)
    for case in sorted(case for case in searched if found[case]):
        fastest = min(found[case])
        text = " ".join(str(tuple(own)) for own in (fastest.tiling if case.name in EXPERTS else [fastest.tiling]))
        print(f"{line(case, fastest, bandwidth)} {used.get(case, math.inf) * 1e6:>8.2f}  {text}", flush=True)


def in_turn(lists: Iterator[list[Case]]) -> list[Case]:
    """All cases, so that the first part of the whole has the same part of each list."""
    places = [((place + 0.5) / len(cases), case) for cases in lists for place, case in enumerate(cases)]
    return [case for _, case in sorted(places)]


def fastest_of(case: Case, found: dict[Case, list[Timing]]) -> Timing:
    return min(found[case], default=Timing(math.inf, 0, used_tiling(case)))


def time_torch(case: Case, bandwidth: float) -> None:
    for name, torch_products in torch_ways(case):
        try:
            calls, num_bytes = torch_products(case)
            timing = Timing(seconds_of(calls, math.inf), num_bytes, None)
            print(f"{line(case, timing, bandwidth)}  {name}", flush=True)
        except Exception as error:  # not in this torch, or not for this GPU
            print(f"{case} {name}: {str(error).splitlines()[0]}", flush=True)


def line(case: Case, timing: Timing, bandwidth: float) -> str:
    share = timing.num_bytes / bandwidth / timing.seconds
    return f"{case.name:>14} {case.form:>9} {case.num_rows:>5} {timing.seconds * 1e6:>8.2f} {share:>6.0%}"


def used_tiling(case: Case) -> Any:
    """For experts, the tilings of both products."""
    if case.form == "bfloat16":
        return None
    if case.name in EXPERTS:
        experts = EXPERTS[case.name]
        num_pairs = case.num_rows * experts.num_chosen
        sizes = (experts.width, True), (experts.inner, False)
        return tuple(few_bit_expert_tiling(num_pairs, experts.num_experts, *own) for own in sizes)
    num_outputs, size, is_gated = shape_of(case.name)
    return few_bit_tiling(case.form, num_outputs, size, case.num_rows, is_gated)


def others(case: Case, best: Any, number: int) -> Iterator[Any]:
    """Tilings to try in a round: layouts, then stages, then words to prefetch; for experts, layouts of each product,
    then stages of each. Without those that need more shared memory than an SM has."""
    is_few = case.num_rows <= 8
    if case.name in EXPERTS:
        which = number % 2
        tilings = [best[which]._replace(num_stages=num_stages) for num_stages in STAGES]
        if number < 2:
            layouts = itertools.product(LAYOUTS, (8,) if is_few else (8, 16))
            tilings = [
                FewBitExpertTiling(tile // (2 - which), splits, num_warps, 3, rows)
                for (tile, splits, num_warps), rows in layouts
            ]
        fitting = [own for own in tilings if fits(own, case.form, which == 0)]
        yield from ((own, best[1]) if which == 0 else (best[0], own) for own in fitting)
        return
    is_gated, tilings = shape_of(case.name)[2], []
    if number == 0:
        layouts = itertools.product(LAYOUTS, (8,) if is_few else (32, 64))
        tilings = [
            FewBitTiling(tile // (1 + is_gated), splits, num_warps, 3, rows)
            for (tile, splits, num_warps), rows in layouts
        ]
    elif number == 1:
        tilings = [best._replace(num_stages=num_stages) for num_stages in STAGES]
    elif number == 2:
        tilings = [best._replace(ahead=ahead) for ahead in AHEAD]
    yield from (own for own in tilings if fits(own, case.form, is_gated))


def fits(tiling: Any, form: str, is_gated: bool) -> bool:
    shared_bytes = torch.cuda.get_device_properties("cuda").shared_memory_per_multiprocessor
    return bool(tiling.num_stages <= most_stages(tiling, form, is_gated, shared_bytes))


def time_tilings(
    found: dict[Case, list[Timing]], wanted: dict[Case, list[Any]], pool: Pool, is_over: threading.Event
) -> None:
    """Add a timing of each case with each of its tilings that is new and fits the GPU."""
    new = [(case, tiling) for case in wanted for tiling in wanted[case] if all(tiling != own[2] for own in found[case])]
    for first in range(0, len(new), AT_A_TIME):
        some = new[first : first + AT_A_TIME]
        compiled = pool.map_async(compile_product, {small(case, tiling) for case, tiling in some}, chunksize=1)
        while not (compiled.ready() or is_over.is_set()):
            compiled.wait(0.1)
        for case, tiling in some:
            if is_over.is_set():
                return
            try:
                calls, num_bytes = products(case, tiling)
                found[case].append(Timing(seconds_of(calls, fastest_of(case, found).seconds), num_bytes, tiling))
            except Exception as error:
                print(f"{case} {tiling}: {str(error).splitlines()[0]}", flush=True)


def seconds_of(calls: Sequence[Callable[[], Any]], best: float) -> float:
    """Seconds per call."""
    replay = capture(lambda: [call() for call in calls], torch.cuda.graph_pool_handle())
    replay_seconds(replay, 1)
    seconds = replay_seconds(replay, 1) / len(calls)
    if seconds > HOPELESS * best:
        return seconds
    return min(replay_seconds(replay, NUM_REPLAYS) for _ in range(NUM_TRIES)) / len(calls)


def small(case: Case, tiling: Any) -> tuple[Case, Any]:
    """A smaller case that compiles the same kernel."""
    if case.name in EXPERTS or case.form == "bfloat16":
        return case, tiling
    _, size, is_gated = shape_of(case.name)
    size = 2048 if size % 2048 == 0 else size
    return Case(f"256x{size}{'g' * is_gated}", case.form, min(case.num_rows, 2)), tiling


def compile_product(work: tuple[Case, Any]) -> None:
    try:
        products(*work, is_small=True)[0][0]()
        torch.cuda.synchronize()
    except Exception:  # is reported when it is timed
        return


def shape_of(name: str) -> tuple[int, int, bool]:
    columns, size = name.rstrip("g").split("x")
    return int(columns), int(size), name.endswith("g")


@lru_cache(maxsize=4)
def weights_of(shapes: tuple[tuple[int, ...], ...], form: str, num_sets: int | None = None) -> list[tuple[Any, ...]]:
    """Sets of weights, by default so many that they do not fit into the L2 cache."""
    one = tuple(random_weight(shape, form) for shape in shapes)
    num_sets = num_sets or max(4, CACHE_BYTES // sum(map(size_of, one)))
    return [one, *(tuple(map(copy_of, one)) for _ in range(num_sets - 1))]


def random_weight(shape: tuple[int, ...], form: str) -> Any:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
    return weight if form == "bfloat16" else quantize(weight, form)


def copy_of(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.clone()
    return weight._replace(words=weight.words.clone(), scale=weight.scale.clone())


def size_of(weight: Any) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


def products(case: Case, tiling: Any, is_small: bool = False) -> tuple[list[Callable[[], Tensor]], float]:
    """One call per set of weights, and the bytes of weights that each reads."""
    if case.name in EXPERTS:
        return expert_calls(case, tiling, is_small)
    num_columns, size, is_gated = shape_of(case.name)
    activation = "silu" if is_gated else None
    sets = weights_of(((num_columns, size),), case.form, 1 if is_small else None)
    x = torch.randn(case.num_rows, size, device="cuda", dtype=torch.bfloat16)

    def call(weight: Any) -> Tensor:
        if isinstance(weight, FewBitWeight):
            return few_bit_product_triton(x, weight, None, None, activation, tiling)
        if case.num_rows <= 16:
            usual = linear_tiling(num_columns, size, case.num_rows)
            return skinny_linear_triton(x, weight, None, None, activation, usual)
        return functional.linear(x, weight)

    return [partial(call, weight) for (weight,) in sets], size_of(sets[0][0])


def expert_calls(case: Case, tiling: Any, is_small: bool) -> tuple[list[Callable[[], Tensor]], float]:
    experts, num_read, num_sets = EXPERTS[case.name], 0, 1 if is_small else 4
    num_experts = experts.num_chosen if is_small else experts.num_experts
    calls: list[Callable[[], Tensor]] = []
    is_plain = case.form == "bfloat16"
    is_transposed = experts.gate == "clamped" and is_plain
    ((gate_up, down),) = weights_of(stacks(experts, num_experts), case.form, 1)
    if is_transposed:
        gate_up, down = (each.transpose(1, 2).contiguous() for each in (gate_up, down))
    per_expert = (size_of(gate_up) + size_of(down)) / num_experts
    weights = gate_up, None, down, None
    more = (is_transposed, experts.gate, 1.7, 7.0) if is_plain else (experts.gate, 1.7, 7.0, tiling)
    product: Callable[..., Tensor] = expert_products_triton if is_plain else few_bit_expert_products_triton
    for seed in range(num_sets):
        x, index, factor = chosen_rows(case, num_experts, seed)
        num_read += len(index.unique())
        calls.append(partial(product, x, index, factor, *weights, *more))
    return calls, per_expert * num_read / num_sets


def stacks(experts: Experts, num_experts: int) -> tuple[tuple[int, ...], ...]:
    return (num_experts, 2 * experts.inner, experts.width), (num_experts, experts.width, experts.inner)


def chosen_rows(case: Case, num_experts: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their experts and weights."""
    experts, draw = EXPERTS[case.name], torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(case.num_rows, experts.width, generator=draw, device="cuda").bfloat16()
    order = torch.rand(case.num_rows, num_experts, generator=draw, device="cuda").argsort(1)
    if case.num_rows == 1:
        order = (torch.arange(num_experts, device="cuda") + seed * experts.num_chosen)[None] % num_experts
    index = order[:, : experts.num_chosen].contiguous()
    return x, index, torch.rand(index.shape, generator=draw, device="cuda").bfloat16()


def torch_ways(case: Case) -> list[tuple[str, Callable[[Case], tuple[list[Callable[[], Any]], float]]]]:
    """Torch's own products for a form. Those in fp8 also round x to fp8, which is not in their time."""
    if case.name in EXPERTS:
        names = {"bfloat16": "_grouped_mm", "fp8": "_scaled_grouped_mm, x in fp8"}
        return [(names[case.form], torch_experts)] if case.form in names else []
    names = {"int4": "_weight_int4pack_mm", "int8": "_weight_int8pack_mm", "fp8": "_scaled_mm, x in fp8"}
    return [(names[case.form], torch_linear)] if case.form in names else []


def torch_linear(case: Case) -> tuple[list[Callable[[], Any]], float]:
    num_columns, size, _ = shape_of(case.name)
    x = torch.randn(case.num_rows, size, device="cuda", dtype=torch.bfloat16)
    codes = torch.randint(0, 120, (num_columns, size), device="cuda", dtype=torch.uint8)
    more: dict[str, Any] = {}
    if case.form == "int4":
        weight = torch._convert_weight_to_int4pack(codes[:, : size // 2].contiguous(), 8)
        scale = torch.rand(size // INT4_GROUP, num_columns, 2, device="cuda").bfloat16()
    elif case.form == "int8":
        weight, scale = codes.view(torch.int8), torch.rand(num_columns, device="cuda").bfloat16()
    else:
        x, weight = x.to(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn)
        scale = torch.rand(1, num_columns, device="cuda")
        more = {"scale_a": torch.rand(case.num_rows, 1, device="cuda"), "scale_b": scale, "out_dtype": torch.bfloat16}

    def call(own: Tensor) -> Tensor:
        if case.form == "int4":
            return torch._weight_int4pack_mm(x, own, INT4_GROUP, scale)
        if case.form == "int8":
            return torch._weight_int8pack_mm(x, own, scale)
        return torch._scaled_mm(x, own.t(), use_fast_accum=True, **more)

    num_sets = max(4, CACHE_BYTES // weight.nbytes)
    return [partial(call, weight.clone()) for _ in range(num_sets)], weight.nbytes + scale.nbytes


def torch_experts(case: Case) -> tuple[list[Callable[[], Any]], float]:
    """Both products for rows that are sorted already."""
    experts, num_read = EXPERTS[case.name], 0
    calls: list[Callable[[], Any]] = []
    is_fp8 = case.form == "fp8"
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    shapes = stacks(experts, experts.num_experts)
    weights = [random_weight(shape, "bfloat16").to(dtype) for shape in shapes]
    num_pairs = case.num_rows * experts.num_chosen
    inputs = [torch.randn(num_pairs, shape[-1], device="cuda").to(dtype) for shape in shapes]
    row_scale = torch.rand(num_pairs, device="cuda")
    scales = [torch.rand(shape[:2], device="cuda") for shape in shapes]

    def call(ends_E: Tensor) -> None:
        for x, weight, scale in zip(inputs, weights, scales, strict=True):
            if is_fp8:
                torch._scaled_grouped_mm(
                    x, weight.mT, row_scale, scale, offs=ends_E, out_dtype=torch.bfloat16, use_fast_accum=True
                )
            else:
                torch._grouped_mm(x, weight.mT, offs=ends_E)

    for seed in range(4):
        _, index, _ = chosen_rows(case, experts.num_experts, seed)
        num_read += len(index.unique())
        counts_E = index.flatten().bincount(minlength=experts.num_experts)
        calls.append(partial(call, counts_E.cumsum(0).to(torch.int32)))
    return calls, sum(weight.nbytes for weight in weights) / experts.num_experts * num_read / 4


if __name__ == "__main__":
    main()
