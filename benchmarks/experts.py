"""Compare ways to compute a layer's experts, in a CUDA graph, against the bandwidth limit of the chosen experts.

    python benchmarks/experts.py qwen3-30b-a3b gpt-oss-20b --rows 1 8 64 256

Weights are random, and so is the choice of experts. Each graph has four calls with other rows and other experts, so
that no expert is read from the L2 cache. `eager` waits for the host and is timed without a graph.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from peagle.bench.bandwidth import measure_bandwidth
from peagle.experts.fused import fuse_experts
from peagle.targets.shapes import dummy_target

NUM_SETS, NUM_REPLAYS = 4, 20
MOST_COPIED = 6e9
"""Bytes of weights that batched_mm may copy."""


def experts_of(shape: str) -> tuple[nn.Module, int]:
    """The experts of one layer, and how many of them a row chooses."""
    target = dummy_target(shape, dtype="bfloat16", device="cuda", num_hidden_layers=1, layer_types=["full_attention"])
    block = next(module for module in target.model.modules() if hasattr(module, "_apply_gate"))
    return block, target.model.config.num_experts_per_tok


def batch(block: nn.Module, num_rows: int, num_chosen: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    num_experts, width = len(block.down_proj), block.down_proj.shape[2 if block.is_transposed else 1]
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_rows, width, generator=draw, device="cuda").bfloat16()
    order = torch.rand(num_rows, num_experts, generator=draw, device="cuda").argsort(1)
    if num_rows == 1:
        order = (torch.arange(num_experts, device="cuda") + seed * num_chosen)[None] % num_experts
    weight = torch.rand(num_rows, num_chosen, generator=draw, device="cuda").bfloat16()
    return x, order[:, :num_chosen].contiguous(), weight


def microseconds(run: Callable[..., Tensor], batches: list[tuple[Tensor, ...]]) -> float:
    run(*batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(*each) for each in batches]
    best = float("inf")
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(NUM_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / NUM_REPLAYS / len(batches))
    del kept
    return best


def without_graph(run: Callable[..., Tensor], batches: list[tuple[Tensor, ...]]) -> float:
    run(*batches[0])
    torch.cuda.synchronize()
    started = time.perf_counter()
    for each in batches:
        run(*each)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / len(batches) * 1e6


@torch.no_grad()
def compare(shape: str, rows: list[int], bandwidth: float) -> None:
    block, num_chosen = experts_of(shape)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in block.parameters())
    expert_bytes = num_bytes / len(block.down_proj)
    restore = fuse_experts(block)
    ways: dict[str, tuple[Callable[..., float], Any]] = {
        "ours": (microseconds, block.few_rows),
        "grouped_mm": (microseconds, lambda *each: moe.grouped_mm_experts_forward(block, *each)),
        "batched_mm": (microseconds, lambda *each: moe.batched_mm_experts_forward(block, *each)),
        "eager": (without_graph, lambda *each: type(block).__mro__[2].forward.__wrapped__(block, *each)),
    }
    for num_rows in rows:
        batches = [batch(block, num_rows, num_chosen, seed) for seed in range(NUM_SETS)]
        num_read = sum(len(index.unique()) for _, index, _ in batches) / NUM_SETS
        limit = num_read * expert_bytes / bandwidth * 1e6
        cells = [f"limit {limit:.1f} us ({num_read:.0f} experts)"]
        for name, (timed, run) in ways.items():
            if name == "batched_mm" and num_rows * num_chosen * expert_bytes > MOST_COPIED:
                continue
            found = timed(run, batches)
            cells.append(f"{name} {found:.1f} ({limit / found:.0%})")
        print(f"{shape}, {num_rows} rows:", " | ".join(cells), flush=True)
    restore()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    bandwidth = measure_bandwidth(torch.device("cuda"))["bytes_per_second"]
    print(f"reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    for shape in arguments.shapes:
        compare(shape, arguments.rows, bandwidth)


if __name__ == "__main__":
    main()
