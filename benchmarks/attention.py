"""Our paged attention by how the kernel is cut: what kernels/attention_triton.py may take.

    python benchmarks/attention.py [--batches 64x8 64x14 8x8 ...] [--heads 9/3x64] [--context 300] [--keep 3]

A batch is requests x new rows of each; heads are query heads / key-value heads x width. Each time is that of one layer
in a chain, recorded as a CUDA graph, of as many layers as no cache holds; the first line of a batch is what the engine
takes now. Wants a GPU.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from peagle.engine.graphs import record, replay_seconds
from peagle.kernels import attention
from peagle.kernels.attention import NUM_COUNTERS, Cut, PagedRows, Processors, paged_attention

CACHE_BYTES = 200 << 20  # of keys and values in a chain: four times what an H200 keeps
PAGE_SIZE = 32
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
    batches = [Batch(64, 1), Batch(64, 5), Batch(64, 8), Batch(64, 14), Batch(8, 8), Batch(1, 8)]
    parser.add_argument("--batches", nargs="+", type=Batch.parse, default=batches, help=" ".join(map(str, batches)))
    parser.add_argument("--heads", type=Heads.parse, default=Heads(9, 3, 64), help="9/3x64")
    parser.add_argument("--context", type=int, default=300, help="keys of each request")
    parser.add_argument("--keep", type=int, default=3, help="cuts to print for each, the fastest first")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it measures a GPU, and there is none")
    print(f"{'batch':>8} {'us':>7}  cut", flush=True)
    for batch in arguments.batches:
        for seconds, cut in compare(batch, arguments.heads, arguments.context, arguments.keep):
            print(f"{batch!s:>8} {seconds * 1e6:>7.2f}  {cut}", flush=True)


def compare(batch: Batch, heads: Heads, context: int, keep: int) -> list[tuple[float, Cut]]:
    """Seconds of a layer, first by the usual cut, then by the fastest ones."""
    run = layers(batch, heads, context)
    usual_cut = attention.cut
    usual = usual_cut(*cut_arguments(batch, heads))
    found = []
    try:
        for cut in (usual, *candidates(batch, heads)):
            attention.cut = lambda *_, cut=cut: cut
            try:
                found.append((seconds_a_layer(run), cut))
            except Exception as error:  # a cut that does not fit this GPU
                print(f"{cut}: {str(error).splitlines()[0]}", flush=True)
    finally:
        attention.cut = usual_cut
    return [found[0], *sorted(found[1:])[:keep]]


def cut_arguments(batch: Batch, heads: Heads) -> tuple[int, int, int, torch.dtype, Processors]:
    num_entries = batch.num_rows * heads.num_heads // heads.num_groups
    width = max(16, 1 << (heads.width - 1).bit_length())
    properties = torch.cuda.get_device_properties("cuda")
    processors = Processors(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
    return num_entries, batch.num_requests * heads.num_groups, width, torch.bfloat16, processors


def candidates(batch: Batch, heads: Heads) -> Iterator[Cut]:
    """Cuts whose programs use the GPU's width without drowning it."""
    num_entries, num_teams, _, _, processors = cut_arguments(batch, heads)
    for tile, step, num_splits in itertools.product((16, 32, 64), (32, 64, 128), (1, 2, 3, 4, 6, 8, 11, 16, 32)):
        num_programs = -(-num_entries // tile) * num_teams * num_splits
        if num_programs > NUM_COUNTERS or not processors.number / 3 <= num_programs <= 8 * processors.number:
            continue
        for num_warps, num_stages in itertools.product((1, 2, 4, 8), (2, 3, 5, 7)):
            if tile // 32 <= num_warps <= tile // 4:
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
