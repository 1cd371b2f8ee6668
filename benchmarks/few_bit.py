"""Time products with weights in 4 or 8 bits, of linear layers and of experts, against bfloat16. Needs a GPU.

    python benchmarks/few_bit.py [--weights 4096x4096 28672x4096g] [--experts gpt-oss] [--rows 1 8 64] [--tilings]

A weight is output columns x input columns; g gates its halves. Each time is microseconds per product, in a CUDA graph
of so many weights that they do not fit into the L2 cache, with the share of the bandwidth limit of the bytes read.
`--tilings` tries other tilings and prints the fastest three of each. Kernels are compiled in many processes first.
"""

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peagle.bench.bandwidth import measure_bandwidth
from peagle.experts.few_bit_triton import FewBitExpertTiling, few_bit_expert_products_triton
from peagle.experts.product_triton import expert_products_triton
from peagle.linears.few_bit import FewBitWeight, quantize
from peagle.linears.few_bit_triton import FewBitTiling, few_bit_product_triton, few_bit_tiling
from peagle.linears.skinny_linear_triton import skinny_linear_triton
from peagle.linears.tilings import linear_tiling
from peagle.worker.graphs import capture, replay_seconds

CACHE_BYTES = 200 << 20
NUM_REPLAYS, NUM_TRIES = 5, 3
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="*", default=WEIGHTS)
    parser.add_argument("--experts", nargs="*", default=list(EXPERTS), choices=EXPERTS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--tilings", action="store_true")
    arguments = parser.parse_args(argv)
    cases = [
        *(Case(*each) for each in itertools.product(arguments.weights, ("bfloat16", *LINEAR_FORMS), arguments.rows)),
        *(
            Case(name, form, num_rows)
            for name in arguments.experts
            for form, num_rows in itertools.product(("bfloat16", *EXPERTS[name].forms), arguments.rows)
        ),
    ]
    few_bit = [case for case in cases if case.form != "bfloat16"]
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(compile_case, [(case, arguments.tilings) for case in few_bit], chunksize=1)
    bandwidth = measure_bandwidth(torch.device("cuda"))["bytes_per_second"]
    print(f"{'weight':>14} {'form':>9} {'rows':>5} {'us':>8} {'limit':>6}  tiling", flush=True)
    for case in cases:
        found = []
        for tiling in tilings(case, arguments.tilings):
            try:
                found.append(measured(case, tiling))
            except Exception as error:  # a tiling that does not fit this GPU
                print(f"{case} {tiling}: {str(error).splitlines()[0]}", flush=True)
        first = found[0]
        for seconds, num_bytes, tiling in [first, *sorted(found[1:], key=lambda each: each[0])[:3]]:
            share = num_bytes / bandwidth / seconds
            where = "" if tiling is None else f"{tuple(tiling)}{' as used' if tiling is first[2] else ''}"
            print(
                f"{case.name:>14} {case.form:>9} {case.num_rows:>5} {seconds * 1e6:>8.2f} {share:>6.0%}  {where}",
                flush=True,
            )


def tilings(case: Case, is_wide: bool) -> Iterator[Any]:
    """The tiling that is used, then others."""
    if case.form == "bfloat16":
        yield None
    elif case.name in EXPERTS:
        yield None  # as used: one for each product
        if is_wide:
            for columns, num_warps, num_stages, rows in itertools.product((16, 32), (4, 8), (2, 3), (8, 16)):
                if rows <= max(8, case.num_rows // 2):
                    yield FewBitExpertTiling(columns, num_warps, num_stages, rows)
    else:
        _, _, is_gated = shape_of(case.name)
        yield few_bit_tiling(case.num_rows, is_gated)
        if is_wide:
            tiles = (8,) if case.num_rows <= 8 else (32, min(64, 2 ** (case.num_rows - 1).bit_length()))
            for columns, num_warps, num_stages, rows in itertools.product((16, 32), (4, 8), (2, 3), tiles):
                yield FewBitTiling(columns, num_warps, num_stages, rows)


def compile_case(work: tuple[Case, bool]) -> None:
    case, is_wide = work
    for tiling in tilings(case, is_wide):
        try:
            products(case, tiling, num_sets=1)[0][0]()
        except Exception:  # is reported when it is timed
            continue
    torch.cuda.synchronize()


def shape_of(name: str) -> tuple[int, int, bool]:
    columns, size = name.rstrip("g").split("x")
    return int(columns), int(size), name.endswith("g")


def measured(case: Case, tiling: Any) -> tuple[float, float, Any]:
    """Seconds of one product, the bytes that it must read, and the tiling."""
    runs, num_bytes = products(case, tiling)
    replay = capture(lambda: [run() for run in runs], torch.cuda.graph_pool_handle())
    return min(replay_seconds(replay, NUM_REPLAYS) for _ in range(NUM_TRIES)) / len(runs), num_bytes, tiling


def random_weight(shape: tuple[int, ...], form: str) -> Any:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
    return weight if form == "bfloat16" else quantize(weight, form)


def copy_of(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.clone()
    return weight._replace(words=weight.words.clone(), scale=weight.scale.clone())


def size_of(weight: Any) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


def products(case: Case, tiling: Any, num_sets: int | None = None) -> tuple[list[Callable[[], Tensor]], float]:
    """One call per set of weights, and the bytes of weights that each reads."""
    if case.name in EXPERTS:
        return expert_calls(case, tiling, num_sets or 4)
    num_columns, size, is_gated = shape_of(case.name)
    one, activation = random_weight((num_columns, size), case.form), "silu" if is_gated else None
    weights = [one, *(copy_of(one) for _ in range((num_sets or max(4, CACHE_BYTES // size_of(one))) - 1))]
    x = torch.randn(case.num_rows, size, device="cuda", dtype=torch.bfloat16)

    def call(weight: Any) -> Tensor:
        if isinstance(weight, FewBitWeight):
            return few_bit_product_triton(x, weight, None, None, activation, tiling)
        if case.num_rows <= 16:
            usual = linear_tiling(num_columns, size, case.num_rows)
            return skinny_linear_triton(x, weight, None, None, activation, usual)
        return functional.linear(x, weight)

    return [partial(call, weight) for weight in weights], size_of(one)


def expert_calls(case: Case, tiling: Any, num_sets: int) -> tuple[list[Callable[[], Tensor]], float]:
    experts, num_read = EXPERTS[case.name], 0
    calls: list[Callable[[], Tensor]] = []
    is_plain = case.form == "bfloat16"
    is_transposed = experts.gate == "clamped" and is_plain
    shapes = (2 * experts.inner, experts.width), (experts.width, experts.inner)
    gate_up, down = (random_weight((experts.num_experts, *shape), case.form) for shape in shapes)
    if is_transposed:
        gate_up, down = (each.transpose(1, 2).contiguous() for each in (gate_up, down))
    per_expert = (size_of(gate_up) + size_of(down)) / experts.num_experts
    weights = gate_up, None, down, None
    more = (is_transposed, experts.gate, 1.7, 7.0) if is_plain else (experts.gate, 1.7, 7.0, tiling)
    product: Callable[..., Tensor] = expert_products_triton if is_plain else few_bit_expert_products_triton
    for seed in range(num_sets):
        draw = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(case.num_rows, experts.width, generator=draw, device="cuda").bfloat16()
        order = torch.rand(case.num_rows, experts.num_experts, generator=draw, device="cuda").argsort(1)
        if case.num_rows == 1:
            order = (torch.arange(len(order[0]), device="cuda") + seed * experts.num_chosen)[None] % len(order[0])
        index = order[:, : experts.num_chosen].contiguous()
        num_read += len(index.unique())
        chosen = x, index, torch.rand(index.shape, generator=draw, device="cuda").bfloat16()
        calls.append(partial(product, *chosen, *weights, *more))
    return calls, per_expert * num_read / num_sets


if __name__ == "__main__":
    main()
