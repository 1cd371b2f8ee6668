"""Time our skinny matrix product against torch's, to choose the entries of linears/tilings.py. Needs a GPU.

    python benchmarks/products.py [--weights 960x576 576x576+ 3072x576g ...] [--rows 8 64 256 512] [--keep 3]
    python benchmarks/products.py --steps 8 32 64 [--num-draft-tokens 7]

A weight is output columns x input columns; + adds a residual to the product, g gates its halves, as in a decoder layer.
Each time is per product, in a CUDA graph of so many weights that they do not fit into the L2 cache. Torch's gate is
compiled and timed; its residual sum is not, because the norm behind it does the sum. A tiling that wins alone may lose
next to other kernels: `--steps` times whole decode steps of the embedded target and its drafter, without and with the
fastest tilings.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peagle.engine.llm import LLM
from peagle.linears import skinny_linear, skinny_linear_triton
from peagle.linears.tilings import FEW_ROWS
from peagle.linears.tilings import LinearTiling as Tiling
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.worker.graphs import capture, replay_seconds

CACHE_BYTES = 200 << 20  # weights per graph: four times the L2 cache of an H200
SHARED_BYTES = 200 << 10  # shared memory per CTA for its pipeline stages
USUAL_WEIGHTS = ("960x576", "576x576+", "3072x576g", "576x1536+", "960x1152")  # of SmolLM2 and its drafter
NUM_REPLAYS = 10
NUM_TRIES = 5


class Weight(NamedTuple):
    num_columns: int
    size: int
    kind: str
    """"+": adds a residual; "g": gated; else empty"""

    @classmethod
    def parse(cls, text: str) -> "Weight":
        match = re.fullmatch(r"(\d+)x(\d+)([+g]?)", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 960x576, 576x576+ or 3072x576g")
        return cls(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.num_columns}x{self.size}{self.kind}"

    @property
    def num_outputs(self) -> int:
        return self.num_columns // 2 if self.kind == "g" else self.num_columns


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    weights = [Weight.parse(text) for text in USUAL_WEIGHTS]
    parser.add_argument("--weights", nargs="+", type=Weight.parse, default=weights, help=" ".join(USUAL_WEIGHTS))
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 256, 512])
    parser.add_argument("--keep", type=int, default=3, help="tilings to print per weight, the fastest first")
    parser.add_argument("--steps", nargs="*", type=int, default=[], metavar="BATCH", help="also measure whole steps")
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    fastest: dict[tuple[int, int], dict[int, Tiling]] = {}
    print(f"{'weight':>12} {'rows':>5} {'torch us':>9} {'ours us':>8}  tiling", flush=True)
    for weight, num_rows in itertools.product(arguments.weights, arguments.rows):
        theirs, ours = compare(weight, num_rows)
        for seconds, tiling in ours[: arguments.keep]:
            print(f"{weight!s:>12} {num_rows:>5} {theirs * 1e6:>9.2f} {seconds * 1e6:>8.2f}  {tiling}", flush=True)
        if ours and ours[0][0] < theirs:
            fastest.setdefault(weight[:2], {})[num_rows] = ours[0][1]
    if arguments.steps:
        compare_steps(arguments.steps, arguments.num_draft_tokens, fastest)


def compare(weight: Weight, num_rows: int) -> tuple[float, list[tuple[float, Tiling]]]:
    """Seconds of torch's product, and of ours per tiling, the fastest first."""
    num_weights = max(4, CACHE_BYTES // (2 * weight.num_columns * weight.size))
    shape = (num_weights, weight.num_columns, weight.size)
    chain = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / weight.size**0.5
    x = torch.randn(num_rows, weight.size, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(num_rows, weight.num_outputs, device="cuda", dtype=torch.bfloat16)
    finish = _gate if weight.kind == "g" else lambda y: y
    theirs = seconds_each(lambda: [finish(functional.linear(x, one)) for one in chain]) / num_weights
    ours = []
    for tiling in candidates(weight, num_rows):

        def product(one: Tensor, tiling: Tiling = tiling) -> Tensor:
            added, activation = (residual if weight.kind == "+" else None), ("silu" if weight.kind == "g" else None)
            return skinny_linear_triton.skinny_linear_triton(x, one, None, added, activation, tiling)

        try:
            ours.append((seconds_each(lambda product=product: [product(one) for one in chain]) / num_weights, tiling))  # type: ignore[misc]
        except Exception as error:  # a tiling that does not fit this GPU
            print(f"{tiling}: {str(error).splitlines()[0]}", flush=True)
    return theirs, sorted(ours)


@torch.compile
def _gate(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return functional.silu(gate) * up


def candidates(weight: Weight, num_rows: int) -> Iterator[Tiling]:
    """Tilings with a fifth to eight CTAs per SM, and at least two pipeline stages."""
    width = torch.cuda.get_device_properties("cuda").multi_processor_count
    num_halves = 2 if weight.kind == "g" else 1
    for rows, columns, step, num_warps in itertools.product((16, 32, 64, 128), (16, 32, 64), (64, 128), (4, 8)):
        if rows > max(FEW_ROWS, 2 * num_rows) or (rows == FEW_ROWS and num_rows > 32) or weight.size % step:
            continue
        if (num_warps == 8) != (rows * columns >= 128 * 64):
            continue
        num_programs = -(-weight.num_outputs // columns) * -(-num_rows // rows)
        num_stages = min(4, SHARED_BYTES // (2 * step * (rows + num_halves * columns)))
        if width / 5 <= num_programs <= 8 * width and num_stages >= 2:
            yield Tiling(columns, step, num_warps, num_stages, ahead=256, rows=rows)


def seconds_each(run: Callable[[], object]) -> float:
    """Seconds per replay, the fastest of some."""
    replay = capture(run, torch.cuda.graph_pool_handle())
    return min(replay_seconds(replay, NUM_REPLAYS) for _ in range(NUM_TRIES))


def compare_steps(batches: list[int], num_draft_tokens: int, fastest: dict[tuple[int, int], dict[int, Tiling]]) -> None:
    """Print milliseconds per decode step, and of its halves, with the current tilings and with `fastest`."""
    target = load_target(None)
    print(f"\n{'':>10} {'requests':>8} {'step ms':>8} {'verify':>7} {'draft':>6}", flush=True)
    measure_steps("current", target, batches, num_draft_tokens)
    usual_product, usual_rows = skinny_linear_triton.skinny_linear_triton, skinny_linear.most_rows

    def product(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str | None,
        usual: Tiling,
    ) -> Tensor:
        measured = fastest.get((weight.shape[0], weight.shape[1]), {})
        enough = [rows for rows in measured if rows >= len(x) > FEW_ROWS]
        return usual_product(x, weight, bias, residual, activation, measured[min(enough)] if enough else usual)

    def most_rows(num_columns: int, size: int, *, is_gated: bool = False) -> int:
        most = max(fastest.get((num_columns, size), {}), default=0)
        return max(most, usual_rows(num_columns, size, is_gated=is_gated))

    skinny_linear_triton.skinny_linear_triton = product  # type: ignore[assignment]  # its parameters have other names
    skinny_linear.most_rows = most_rows
    torch._dynamo.reset()  # compiled code has the old limits baked in
    try:
        measure_steps("fastest", target, batches, num_draft_tokens)
    finally:
        skinny_linear_triton.skinny_linear_triton, skinny_linear.most_rows = usual_product, usual_rows


def measure_steps(name: str, target: HFTarget, batches: list[int], num_draft_tokens: int) -> None:
    with LLM(target, "auto", num_draft_tokens, max_batch=max(batches), max_length=1024, prefill_tokens=256) as llm:
        for batch in batches:
            times = llm.engine.step_times(batch)
            assert times is not None, "this runs on a GPU"
            step, verify, draft = (1000 * seconds for seconds in times)
            print(f"{name:>10} {batch:>8} {step:>8.3f} {verify:>7.3f} {draft:>6.3f}", flush=True)


if __name__ == "__main__":
    main()
