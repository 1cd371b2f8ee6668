"""Time paged attention by tiling, to choose the entries of kernels/tilings.py. Needs a GPU.

    python benchmarks/attention.py [--batches 64x8 8x8 64x8t 64x8t+128 ...] [--heads 9/3x64] [--context 300] [--keep 3]
        [--steps]

A batch is requests x new tokens per request; t: trees of up to 32 tokens, and that many on average, over contexts of
different lengths; +128: beside a prompt of 128 tokens. Heads are query heads / key-value heads x width. Each time is
per layer with a product behind it, in a CUDA graph of so many layers that their keys and values do not fit into the L2
cache. The first line of a batch is the tiling that the engine uses now. A tiling that wins alone may lose next to
other kernels: `--steps` times the tilings of chains in whole verification passes of the embedded target, with one draft
per token after the first. Kernels are compiled in many processes first.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.llm import LLM
from peagle.kernels import tilings
from peagle.kernels.attention import PagedRows, RowTree, joined, paged_attention
from peagle.kernels.attention_triton import gpu_of
from peagle.kernels.tilings import MOST_DECODE_ROWS, NUM_COUNTERS, AttentionTiling, Gpu
from peagle.targets.load import load_target
from peagle.worker.graphs import capture, replay_seconds

CACHE_BYTES = 200 << 20  # keys and values per graph: four times the L2 cache of an H200
PAGE_SIZE = 32
NUM_WARPS = {16: (2, 4), 32: (2, 4), 64: (4, 8)}
NUM_REPLAYS = 10
NUM_TRIES = 5
MOST_TREE_ROWS, NUM_CHUNKS = 32, 8
NUM_PARTS = 5
"""Processes that compile the tilings of one batch."""


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
    has_trees: bool = False
    num_prompt_tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> "Batch":
        match = re.fullmatch(r"(\d+)x(\d+)(t?)(?:\+(\d+))?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 64x8, 64x8t or 64x8t+128")
        return cls(int(match[1]), int(match[2]), bool(match[3]), int(match[4] or 0))

    def __str__(self) -> str:
        tree, prompt = "t" * self.has_trees, f"+{self.num_prompt_tokens}" if self.num_prompt_tokens else ""
        return f"{self.num_requests}x{self.num_rows}{tree}{prompt}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """All rows, the most of one request as the kernel sees it, and requests."""
        most = MOST_DECODE_ROWS if self.num_prompt_tokens else MOST_TREE_ROWS if self.has_trees else self.num_rows
        num_requests = self.num_requests + (NUM_CHUNKS if self.num_prompt_tokens else 0)
        return self.num_requests * self.num_rows + self.num_prompt_tokens, most, num_requests


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
    if arguments.steps and (arguments.heads or any(batch.has_trees for batch in arguments.batches)):
        parser.error("--steps measures chains of the embedded target: omit --heads and trees")
    print(f"{'batch':>8} {'us':>8}  tiling", flush=True)
    if arguments.steps:
        compare_passes(arguments.batches, arguments.context, arguments.keep)
        return
    heads = arguments.heads or Heads(9, 3, 64)
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        work = [(batch, heads, part) for batch in arguments.batches for part in range(NUM_PARTS)]
        pool.map(compile_tilings, work, chunksize=1)
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


def compile_tilings(work: tuple[Batch, Heads, int]) -> None:
    """Compile a part of the tilings of a batch."""
    batch, heads, part = work
    [run] = layers(batch, heads, context=PAGE_SIZE, num_layers=1)
    usual = tilings.attention_tiling
    for tiling in itertools.islice(candidates(batch, heads), part, None, NUM_PARTS):
        tilings.attention_tiling = lambda *_, tiling=tiling: tiling
        with contextlib.suppress(Exception):  # is reported when it is timed
            run()
    tilings.attention_tiling = usual
    torch.cuda.synchronize()


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
    return *batch.shape, heads.num_groups, group_size, width, torch.bfloat16, gpu_of(torch.device("cuda"))


def candidates(batch: Batch, heads: Heads) -> Iterator[AttentionTiling]:
    """Tilings with a third to eight CTAs per SM."""
    total, _, num_requests, num_groups, group_size, _, _, gpu = tiling_arguments(batch, heads)
    for tile, step, num_splits in itertools.product((16, 32, 64), (32, 64, 128), (1, 2, 3, 4, 6, 8, 11, 16, 32)):
        num_programs = (-(-total * group_size // tile) + num_requests * batch.has_trees) * num_groups * num_splits
        if num_programs > NUM_COUNTERS or not gpu.num_sms / 3 <= num_programs <= 8 * gpu.num_sms:
            continue
        for num_warps, num_stages in itertools.product(NUM_WARPS[tile], (2, 5, 7)):
            yield AttentionTiling(tile, step, num_splits, num_warps, num_stages)


def layers(batch: Batch, heads: Heads, context: int, num_layers: int | None = None) -> list[Callable[[], object]]:
    """Attention of enough layers to exceed the L2 cache, each over its own pages."""
    rows, num_pages = rows_of(batch, context)
    shape = (num_pages, PAGE_SIZE, heads.num_groups, heads.width)
    num_layers = num_layers or max(4, CACHE_BYTES // (4 * torch.Size(shape).numel()))
    num_rows, hidden = batch.shape[0], heads.num_heads * heads.width
    with torch.device("cuda"):
        query = torch.randn(num_rows, heads.num_heads, heads.width, dtype=torch.bfloat16)
        new = torch.randn(num_rows, heads.num_groups, heads.width, dtype=torch.bfloat16)
        pages = torch.randn(num_layers, 2, *shape, dtype=torch.bfloat16)
        weight = torch.randn(hidden, hidden, dtype=torch.bfloat16)
    scale = heads.width**-0.5

    def layer(keys: Tensor, values: Tensor) -> Tensor:
        return paged_attention(query, new, new, keys, values, rows, scale=scale).flatten(1) @ weight

    return [partial(layer, keys, values) for keys, values in pages]


def rows_of(batch: Batch, context: int) -> tuple[PagedRows, int]:
    """Where the new rows belong, and the pages that they need."""
    draw = torch.Generator().manual_seed(0)
    num_requests, num_rows = batch.num_requests, batch.num_rows
    count_B, context_B = torch.full((num_requests,), num_rows), torch.full((num_requests,), context)
    if batch.has_trees:
        count_B = torch.ones(num_requests, dtype=torch.long)
        context_B = (context * (0.3 + 1.4 * torch.rand(num_requests, generator=draw))).long()
        while (missing := num_requests * num_rows - int(count_B.sum())) > 0:
            likely_B = torch.rand(num_requests, generator=draw) ** 2 * (count_B < MOST_TREE_ROWS)
            count_B[likely_B.topk(min(missing, num_requests // 4 + 1)).indices] += 1
    num_pages = (int(context_B.max()) + MOST_DECODE_ROWS) // PAGE_SIZE + 2
    table_BP = 1 + torch.randperm(num_requests * num_pages, generator=draw).view(num_requests, num_pages)
    first_B1 = torch.cat([torch.zeros(1, dtype=torch.long), count_B.cumsum(0)])
    request_N = torch.repeat_interleave(torch.arange(num_requests), count_B)
    index_N = context_B[request_N] + torch.arange(len(request_N)) - first_B1[request_N]
    cell_N = table_BP[request_N, index_N // PAGE_SIZE] * PAGE_SIZE + index_N % PAGE_SIZE
    tree = random_trees(count_B.tolist(), draw) if batch.has_trees else None
    rows = on_gpu(PagedRows(table_BP.int(), first_B1, context_B, cell_N, torch.empty(batch.shape[1], 0), tree))
    if batch.num_prompt_tokens:
        prompt = torch.arange(batch.num_prompt_tokens)
        end_C1 = torch.tensor([0] + [len(prompt)] * NUM_CHUNKS)
        no_pages = torch.zeros(NUM_CHUNKS, num_pages, dtype=torch.int32)
        none = torch.zeros(NUM_CHUNKS, dtype=torch.long)
        chunks = on_gpu(PagedRows(no_pages, end_C1, none, prompt % PAGE_SIZE, torch.empty(len(prompt), 0)))
        rows = joined(rows, chunks, prompt.cuda())
    return rows, num_requests * num_pages + 1


def random_trees(counts: list[int], draw: torch.Generator) -> RowTree:
    """Each row hangs below one of the three rows before it."""
    ancestors, depth = list[int](), list[int]()
    for count in counts:
        first = len(ancestors)
        for row in range(count):
            above = first + max(0, row - 1 - int(torch.randint(3, (), generator=draw)))
            ancestors.append((ancestors[above] if row else 0) | 1 << row)
            depth.append(depth[above] + 1 if row else 0)
    return RowTree(torch.tensor(ancestors), torch.tensor(depth))


def on_gpu(rows: PagedRows) -> PagedRows:
    tree = None if rows.tree is None else RowTree(*(each.cuda() for each in rows.tree))
    return PagedRows(*(each.cuda() for each in rows[:5]), tree)


def seconds_per_layer(run: list[Callable[[], object]]) -> float:
    """Seconds per layer, in the fastest of some replays."""
    replay = capture(lambda: [layer() for layer in run], torch.cuda.graph_pool_handle())
    return min(replay_seconds(replay, NUM_REPLAYS) for _ in range(NUM_TRIES)) / len(run)


if __name__ == "__main__":
    main()
