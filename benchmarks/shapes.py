"""Time per decode step of large models with random weights, and its share of the memory-bandwidth limit.

    python benchmarks/shapes.py [llama-8b llama-8b:fp8 ...] [--batches 1 8 64] [--json FILE]
        [--drafts] [--drafter-layers 4 2] [--draft-vocab 0 32000] [--draft-batches 1 32]

SHAPE[:FORM] is a shape of `peagle bench --dummy` and a form of `--quantize`. The limit is the time to read what a step
must read: the weights, of the experts those that it chose, and the KV cache. Engines start with the few graphs that
are measured. --drafts adds P-EAGLE steps (K = 7), as multiples of plain ones.
"""

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.bench.bandwidth import experts_read, measure_bandwidth, random_prompts, weight_bytes_per_step
from peagle.bench.cells import PLAIN, Cell
from peagle.bench.dummy import NUM_LAYERS, USUAL_DEPTH, drafter_bytes, dummy_drafter, published_drafter
from peagle.bench.offline import WARMUP_TOKENS, llm_factory, reason_of, warm_up
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.errors import PeagleError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.targets.load import choose_device
from peagle.targets.shapes import dummy_target

SHAPES = (
    *("llama-8b", "llama-8b:fp8", "llama-8b:int8", "llama-8b:int4", "gpt-oss-20b:mxfp4", "qwen3-30b-a3b"),
    *("qwen3-30b-a3b:fp8", "gemma-4-31b", "gpt-oss-120b:mxfp4"),
)
ACCEPTANCE = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35)
"""Shares of the steps, by position: a step's cost depends little on them."""
PROMPT = 32
PARAMS = SamplingParams(max_tokens=WARMUP_TOKENS, ignore_eos=True)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="requests of plain steps")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--draft-batches", type=int, nargs="+", default=[1, 32], help="requests of P-EAGLE steps")
    parser.add_argument("--drafter-layers", type=int, nargs="+", default=[NUM_LAYERS])
    parser.add_argument("--draft-vocab", type=int, nargs="+", default=[0], help="0: the target's")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    drafters = [(layers, vocab) for layers in options.drafter_layers for vocab in options.draft_vocab]
    draft_batches = options.draft_batches if options.drafts else []
    bandwidth = measure_bandwidth(choose_device("auto"))["bytes_per_second"]
    print(f"memory bandwidth: {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows: list[Row] = []
    for name in options.shapes:
        started = time.perf_counter()
        try:
            for row in measure(name, bandwidth, options.batches, draft_batches, drafters):
                rows.append(row)
                print(line(row), flush=True)
        except (PeagleError, MemoryError, RuntimeError) as error:
            rows.append({"shape": name, "failure": reason_of(error)})
            print(f"{name}: failed: {reason_of(error)}", flush=True)
        free()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"bytes_per_second": bandwidth, "rows": rows}, indent=1))


def measure(
    name: str,
    bandwidth: int,
    batches: Sequence[int],
    draft_batches: Sequence[int],
    drafters: Sequence[tuple[int, int]],
) -> Iterator[Row]:
    """The cells of one shape, as they are measured."""
    shape, _, form = name.partition(":")
    target = dummy_target(shape, quantize=form or None)
    plain: dict[int, float] = {}
    for row in steps(target, None, sorted({*batches, *draft_batches}), bandwidth):
        plain[row["batch"]] = row["step_ms"]
        yield {"shape": name, **row}
    for num_layers, vocab in drafters if draft_batches else ():
        size = num_layers, min(vocab, target.vocab_size) or None, published_drafter(shape)
        drafter = dummy_drafter(target, USUAL_DEPTH, *size)
        for row in steps(target, drafter, sorted(draft_batches), bandwidth):
            layers = {"drafter_layers": num_layers, "draft_vocab": drafter.config.draft_vocab_size}
            yield {"shape": name, **row, **layers, "plain_steps": round(row["step_ms"] / plain[row["batch"]], 3)}


def steps(target: HFTarget, drafter: Drafter | None, batches: Sequence[int], bandwidth: int) -> Iterator[Row]:
    """Measure one engine at some batch sizes."""
    method, depth = (PLAIN, 0) if drafter is None else ("p-eagle", USUAL_DEPTH)
    cells = [Cell(method, depth, batch) for batch in batches]
    prompts = random_prompts(target.vocab_size, max(batches), PROMPT)
    drafters = {} if drafter is None else {method: drafter}
    shares = experts_read(target, drafters, cells, prompts, ACCEPTANCE)
    quick: dict[str, Any] = {"captured_batches": tuple(batches), "prefill_tokens": 512}
    room: dict[str, Any] = {"concurrency": batches, "max_tokens": WARMUP_TOKENS, "assumed_acceptance": ACCEPTANCE}
    make = llm_factory(target, drafters, prompts, **room, **quick)
    started = time.perf_counter()
    with contextlib.closing(make(method, depth)) as llm:
        start_seconds = time.perf_counter() - started
        for cell in cells:
            split = warm_up(llm, prompts, PARAMS, cell.concurrency, time.perf_counter)
            assert split is not None, "the answers are long enough for steady steps"
            seconds = split.device or split.wall
            own = 0 if drafter is None else drafter_bytes(drafter)
            weights = weight_bytes_per_step(target.model, shares[cell])
            kv = kv_bytes(llm, cell.concurrency, PROMPT + WARMUP_TOKENS // 2)
            yield {
                "batch": cell.concurrency,
                "step_ms": round(1e3 * seconds, 4),
                "wall_ms": round(1e3 * split.wall, 4),
                "verify_ms": None if split.verify is None else round(1e3 * split.verify, 4),
                "draft_ms": None if drafter is None or split.draft is None else round(1e3 * split.draft, 4),
                "weight_bytes": weights,
                "kv_bytes": kv,
                "drafter_bytes": own,
                "expert_share": round(shares[cell], 4),
                "share_of_limit": round((weights + kv + own) / bandwidth / seconds, 4),
                "share_of_weight_limit": round((weights + own) / bandwidth / seconds, 4),
                "drafter_limit_ms": round(1e3 * own / bandwidth, 4),
                "start_seconds": round(start_seconds, 1),
            }
    free()


def kv_bytes(llm: LLM, batch: int, length: int) -> int:
    """Bytes of the target's KV cache that a step of texts of this length reads."""
    paged, itemsize = llm.engine.runner.paged_target, llm.target.dtype.itemsize
    layers = zip(paged.layers, paged.windows, strict=True)
    return (
        sum(2 * batch * min(length, window or length) * own.num_groups * own.width for own, window in layers) * itemsize
    )


def free() -> None:
    """Give back the memory of closed engines and dropped models, and forget what was compiled for them."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def line(row: Row) -> str:
    many = f"{row['batch']} request{'s' if row['batch'] > 1 else ''}"
    start = f"{row['shape']:20} {many:>12}  {row['step_ms']:7.3f} ms"
    share = f"{row['share_of_limit']:.0%} of the limit ({row['share_of_weight_limit']:.0%} by weights alone)"
    experts = f", {row['expert_share']:.0%} of the experts" if row["expert_share"] < 1 else ""
    if "plain_steps" in row:
        parts = "" if row["draft_ms"] is None else f", verify {row['verify_ms']:.3f} + draft {row['draft_ms']:.3f} ms"
        own = f"{row['drafter_bytes'] / 1e9:.2f} GB = {row['drafter_limit_ms']:.3f} ms at the limit"
        kind = f"{row['drafter_layers']} layers, {row['draft_vocab']:,} drafts"
        return f"{start} = {row['plain_steps']:.2f} plain steps{parts}; drafter ({kind}) {own}; {share}{experts}"
    sizes = f"{row['weight_bytes'] / 1e9:.2f} GB of weights, {row['kv_bytes'] / 1e9:.2f} GB of KV cache"
    return f"{start}  {share}; {sizes}{experts}; started in {row['start_seconds']:.0f} s"


if __name__ == "__main__":
    main()
