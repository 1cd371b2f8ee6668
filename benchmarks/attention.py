"""Our paged attention by how the kernel is cut: what kernels/attention_triton.py may take.

    python benchmarks/attention.py [--batches 64x8 64x14 8x8 ...] [--heads 9/3x64] [--context 300] [--keep 3] [--steps]

A batch is requests x new rows of each; heads are query heads / key-value heads x width. Each time is that of one layer
in a chain, recorded as a CUDA graph, of as many layers as no cache holds; the first line of a batch is what the engine
takes now. What wins alone may lose among its neighbors: `--steps` measures the same cuts where they are to work, in
whole verification passes of the embedded target, with as many drafts as a batch has rows behind the first. Wants a GPU.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from peagle.engine.graphs import record, replay_seconds
from peagle.engine.llm import LLM
from peagle.kernels import attention
from peagle.kernels.attention import NUM_COUNTERS, Cut, PagedRows, Processors, paged_attention
from peagle.kernels.attention_triton import processors_of
from peagle.targets.load import load_target

CACHE_BYTES = 200 << 20  # of keys and values in a chain: four times what an H200 keeps
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
    parser.add_argument("--heads", type=Heads.parse, help="9/3x64, SmolLM2's")
    parser.add_argument("--context", type=int, default=300, help="keys of each request")
    parser.add_argument("--keep", type=int, default=3, help="cuts to print for each, the fastest first")
    parser.add_argument("--steps", action="store_true", help="measure verification passes of the embedded target")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it measures a GPU, and there is none")
    if arguments.steps and arguments.heads:
        parser.error("--steps measures the embedded target, which has heads of its own: leave --heads out")
    print(f"{'batch':>8} {'us':>8}  cut", flush=True)
    if arguments.steps:
        compare_passes(arguments.batches, arguments.context, arguments.keep)
        return
    heads = arguments.heads or Heads(9, 3, 64)
    for batch in arguments.batches:
        run = layers(batch, heads, arguments.context)
        show(batch, compare(batch, heads, partial(seconds_a_layer, run)), arguments.keep)


def show(batch: Batch, found: list[tuple[float, Cut]], keep: int) -> None:
    for seconds, cut in found[: 1 + keep]:
        print(f"{batch!s:>8} {seconds * 1e6:>8.2f}  {cut}", flush=True)


def compare(batch: Batch, heads: Heads, measure: Callable[[], float]) -> list[tuple[float, Cut]]:
    """Seconds by the usual cut, then by the fastest ones."""
    usual_cut, usual_arguments = attention.cut, cut_arguments(batch, heads)
    found = []
    try:
        for cut in (usual_cut(*usual_arguments), *candidates(batch, heads)):
            attention.cut = lambda *given, cut=cut: cut if given == usual_arguments else usual_cut(*given)
            try:
                found.append((measure(), cut))
            except Exception as error:  # a cut that does not fit this GPU
                print(f"{cut}: {str(error).splitlines()[0]}", flush=True)
    finally:
        attention.cut = usual_cut
    return [found[0], *sorted(found[1:])]


def compare_passes(batches: Sequence[Batch], context: int, keep: int) -> None:
    """The same in the engine."""
    target = load_target(None)
    config = target.model.config
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    for num_rows in sorted({batch.num_rows for batch in batches}):
        own = [batch for batch in batches if batch.num_rows == num_rows]
        most = max(batch.num_requests for batch in own)
        with LLM(
            target, "auto", num_rows - 1, max_batch=most, max_length=2048, prefill_tokens=128, verify_rows=0
        ) as llm:
            runner = llm.engine.runner
            assert runner.recorded is not None, "on a GPU"
            measure = partial(runner.recorded.verify_seconds, num_pages=runner.kv_cache.num_pages, length=context)
            for batch in own:
                show(batch, compare(batch, heads, partial(measure, batch.num_requests)), keep)


def cut_arguments(batch: Batch, heads: Heads) -> tuple[int, int, int, torch.dtype, Processors]:
    num_entries = batch.num_rows * heads.num_heads // heads.num_groups
    width = max(16, 1 << (heads.width - 1).bit_length())
    processors = processors_of(torch.device("cuda"))
    return num_entries, batch.num_requests * heads.num_groups, width, torch.bfloat16, processors


def candidates(batch: Batch, heads: Heads) -> Iterator[Cut]:
    """Cuts whose programs use the GPU's width without drowning it."""
    num_entries, num_teams, _, _, processors = cut_arguments(batch, heads)
    for tile, step, num_splits in itertools.product((16, 32, 64), (32, 64, 128), (1, 2, 3, 4, 6, 8, 11, 16, 32)):
        num_programs = -(-num_entries // tile) * num_teams * num_splits
        if num_programs > NUM_COUNTERS or not processors.number / 3 <= num_programs <= 8 * processors.number:
            continue
        for num_warps, num_stages in itertools.product(NUM_WARPS[tile], (2, 5, 7)):
            yield Cut(tile, step, num_splits, num_warps, num_stages)


def layers(batch: Batch, heads: Heads, context: int) -> list[Callable[[], object]]:
    """Attention of enough layers, each over pages of its own."""
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


def seconds_a_layer(run: list[Callable[[], object]]) -> float:
    """Of the fastest replay of some."""
    replay = record(lambda: [layer() for layer in run], torch.cuda.graph_pool_handle())
    return min(replay_seconds(replay, NUM_REPLAYS) for _ in range(NUM_TRIES)) / len(run)


if __name__ == "__main__":
    main()
