"""Time paged attention by tiling, to choose the entries of kernels/tilings.py. Needs a GPU.

    python benchmarks/attention.py [--batches 64x8 64x14 8x8 ...] [--heads 9/3x64] [--context 300] [--keep 3] [--steps]

A batch is requests x new tokens per request; heads are query heads / key-value heads x width. Each time is per layer,
in a CUDA graph of so many layers that their keys and values do not fit into the L2 cache. The first line of a batch is
the tiling that the engine uses now. A tiling that wins alone may lose next to other kernels: `--steps` times the same
tilings in whole verification passes of the embedded target, with one draft per token after the first.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from peagle.engine.llm import LLM
from peagle.kernels import tilings
from peagle.kernels.attention import PagedRows, paged_attention
from peagle.kernels.attention_triton import gpu_of
from peagle.kernels.tilings import NUM_COUNTERS, AttentionTiling, Gpu
from peagle.targets.load import load_target
from peagle.worker.graphs import capture, replay_seconds

CACHE_BYTES = 200 << 20  # keys and values per graph: four times the L2 cache of an H200
PAGE_SIZE = 32
NUM_WARPS = {16: (2, 4), 32: (2, 4), 64: (4, 8)}
NUM_REPLAYS = 10
NUM_TRIES = 5


class Heads(NamedTuple):
    num_heads: int
    num_groups: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "Heads":
        match = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 9/3x64")
        return cls(*map(int, match.groups()))


class Batch(NamedTuple):
    num_requests: int
    num_rows: int

    @classmethod
    def parse(cls, text: str) -> "Batch":
        match = re.fullmatch(r"(\d+)x(\d+)", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 64x8")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.num_requests}x{self.num_rows}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    batches = [Batch(64, 1), Batch(64, 5), Batch(64, 8), Batch(32, 8), Batch(8, 8), Batch(1, 8)]
    parser.add_argument("--batches", nargs="+", type=Batch.parse, default=batches, help=" ".join(map(str, batches)))
    parser.add_argument("--heads", type=Heads.parse, help="default: 9/3x64, those of SmolLM2")
    parser.add_argument("--context", type=int, default=300, help="keys per request")
    parser.add_argument("--keep", type=int, default=3, help="tilings to print per batch, the fastest first")
    parser.add_argument("--steps", action="store_true", help="measure verification passes of the embedded target")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    if arguments.steps and arguments.heads:
        parser.error("--steps measures the embedded target: omit --heads")
    print(f"{'batch':>8} {'us':>8}  tiling", flush=True)
    if arguments.steps:
        compare_passes(arguments.batches, arguments.context, arguments.keep)
        return
    heads = arguments.heads or Heads(9, 3, 64)
    for batch in arguments.batches:
        run = layers(batch, heads, arguments.context)
        show(batch, compare(batch, heads, partial(seconds_per_layer, run)), arguments.keep)


def show(batch: Batch, found: list[tuple[float, AttentionTiling]], keep: int) -> None:
    for seconds, tiling in found[: 1 + keep]:
        print(f"{batch!s:>8} {seconds * 1e6:>8.2f}  {tiling}", flush=True)


def compare(batch: Batch, heads: Heads, measure: Callable[[], float]) -> list[tuple[float, AttentionTiling]]:
    """Seconds with the current tiling, then with the others, the fastest first."""
    usual_tiling, usual_arguments = tilings.attention_tiling, tiling_arguments(batch, heads)
    found = []
    try:
        for tiling in (usual_tiling(*usual_arguments), *candidates(batch, heads)):
            tilings.attention_tiling = lambda *given, tiling=tiling: (
                tiling if given == usual_arguments else usual_tiling(*given)
            )
            try:
                found.append((measure(), tiling))
            except Exception as error:  # a tiling that does not fit this GPU
                print(f"{tiling}: {str(error).splitlines()[0]}", flush=True)
    finally:
        tilings.attention_tiling = usual_tiling
    return [found[0], *sorted(found[1:])]


def compare_passes(batches: Sequence[Batch], context: int, keep: int) -> None:
    """Time verification passes of the embedded target."""
    target = load_target(None)
    config = target.model.config
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    for num_rows in sorted({batch.num_rows for batch in batches}):
        own = [batch for batch in batches if batch.num_rows == num_rows]
        most = max(batch.num_requests for batch in own)
        with LLM(
            target, "auto", num_rows - 1, max_batch=most, max_length=2048, prefill_tokens=128, verify_tokens=0
        ) as llm:
            runner = llm.engine.runner
            assert runner.captured is not None, "on a GPU"
            measure = partial(runner.captured.verify_seconds, num_pages=runner.kv_cache.num_pages, length=context)
            for batch in own:
                show(batch, compare(batch, heads, partial(measure, batch.num_requests)), keep)


def tiling_arguments(batch: Batch, heads: Heads) -> tuple[int, int, int, int, int, int, torch.dtype, Gpu]:
    group_size = heads.num_heads // heads.num_groups
    width = max(16, 1 << (heads.width - 1).bit_length())
    gpu = gpu_of(torch.device("cuda"))
    sizes = (batch.num_requests * batch.num_rows, batch.num_rows, batch.num_requests, heads.num_groups, group_size)
    return *sizes, width, torch.bfloat16, gpu


def candidates(batch: Batch, heads: Heads) -> Iterator[AttentionTiling]:
    """Tilings with a third to eight CTAs per SM."""
    _, num_rows, num_requests, num_groups, group_size, _, _, gpu = tiling_arguments(batch, heads)
    for tile, step, num_splits in itertools.product((16, 32, 64), (32, 64, 128), (1, 2, 3, 4, 6, 8, 11, 16, 32)):
        num_programs = -(-num_rows * group_size // tile) * num_requests * num_groups * num_splits
        if num_programs > NUM_COUNTERS or not gpu.num_sms / 3 <= num_programs <= 8 * gpu.num_sms:
            continue
        for num_warps, num_stages in itertools.product(NUM_WARPS[tile], (2, 5, 7)):
            yield AttentionTiling(tile, step, num_splits, num_warps, num_stages)


def layers(batch: Batch, heads: Heads, context: int) -> list[Callable[[], object]]:
    """Attention of enough layers to exceed the L2 cache, each over its own pages."""
    num_requests, num_rows = batch
    num_pages = -(-(context + num_rows) // PAGE_SIZE)
    shape = (num_requests * num_pages + 1, PAGE_SIZE, heads.num_groups, heads.width)
    num_layers = max(4, CACHE_BYTES // (4 * torch.Size(shape).numel()))
    with torch.device("cuda"):
        table = 1 + torch.randperm(num_requests * num_pages).view(num_requests, num_pages)
        index = context + torch.arange(num_rows)
        rows = PagedRows(
            table.to(torch.int32),
            num_rows * torch.arange(num_requests + 1),
            torch.full((num_requests,), context),
            (table[:, index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE).flatten(),
            torch.empty(num_rows, 0),
        )
        query = torch.randn(num_requests * num_rows, heads.num_heads, heads.width, dtype=torch.bfloat16)
        new = torch.randn(num_requests * num_rows, heads.num_groups, heads.width, dtype=torch.bfloat16)
        pages = torch.randn(num_layers, 2, *shape, dtype=torch.bfloat16)
    scale = heads.width**-0.5
    return [partial(paged_attention, query, new, new, keys, values, rows, scale=scale) for keys, values in pages]


def seconds_per_layer(run: list[Callable[[], object]]) -> float:
    """Seconds per layer, in the fastest of some replays."""
    replay = capture(lambda: [layer() for layer in run], torch.cuda.graph_pool_handle())
    return min(replay_seconds(replay, NUM_REPLAYS) for _ in range(NUM_TRIES)) / len(run)


if __name__ == "__main__":
    main()
