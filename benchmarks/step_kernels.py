"""Which kernels the device time of decode steps goes to, on real text. Needs a GPU.

    python benchmarks/step_kernels.py --prompts question.jsonl,HumanEval.jsonl.gz [--batches 1 8 64]
        [--drafts none chain:7 tree:31] [--steps 30] [--top 20]

Runs that many requests, waits until all of them decode, and profiles the next steps, without prefill. Kernels overlap
(programmatic dependent launch), so their times add up to more than the step.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from peagle import LLM, SamplingParams
from peagle.checkpoint.native import load_drafter
from peagle.data.prompts import read_prompts
from peagle.engine.engine import Engine
from peagle.scheduling.config import TREE_DEPTH
from peagle.targets.load import load_target
from peagle.tokenizer import prompt_ids

STEPS_BEFORE = 40
"""decode steps before the profile begins"""
NAME_LENGTH = 90


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="prompt files, comma-separated")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--drafts", nargs="+", default=["none", "chain:7", "tree:31"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--top", type=int, default=20)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("steps are profiled as CUDA graphs, and there is no GPU here")
    target = load_target(None)
    chats = [list(prompt.messages) for file in options.prompts.split(",") for prompt in read_prompts(file)]
    prompts = [prompt_ids(target.tokenizer, chat) for chat in chats]
    batches = tuple(sorted({*options.batches}))
    for drafts in options.drafts:
        kind, _, number = drafts.partition(":")
        drafter = None if kind == "none" else load_drafter(target.shipped_drafter, target)
        depth = 0 if drafter is None else TREE_DEPTH if kind == "tree" else int(number)
        nodes = int(number) if kind == "tree" else None
        sizes = {"max_batch": batches[-1], "captured_batches": batches, "tree_nodes": nodes}
        with LLM(target, drafter, depth, **sizes) as llm:
            for batch in batches:
                print(f"\n{drafts}, {batch} requests", flush=True)
                profile_steps(llm.engine, prompts, batch, options.steps, options.top)


def profile_steps(engine: Engine, prompts: Sequence[list[int]], batch: int, num_steps: int, num_shown: int) -> None:
    """Profile steps of `batch` requests that all decode, and print the kernels with the most time."""
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    names = [engine.add(prompts[7 * index % len(prompts)], params) for index in range(batch)]
    for _ in range(STEPS_BEFORE):
        engine.step()
    before = engine.stats()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    after = engine.stats()
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    seconds, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in recorded.events():
        name = re.sub(r"_[0-9]+$", "", event.name)[:NAME_LENGTH]
        seconds[name] += event.time_range.elapsed_us()
        counts[name] += 1
    device = (after.device_seconds - before.device_seconds) / num_steps
    num_drafts = max(after.num_drafts - before.num_drafts, 1)
    print(
        f"{1e3 * device:.3f} ms per step on the device (profiled); "
        f"{(after.num_output_tokens - before.num_output_tokens) / num_steps / batch:.2f} tokens and "
        f"{(after.num_draft_tokens - before.num_draft_tokens) / num_drafts:.1f} drafts per request and step; "
        f"kernels {sum(seconds.values()) / num_steps / 1e3:.3f} ms, {sum(counts.values()) / num_steps:.0f} launches"
    )
    for name in sorted(seconds, key=lambda name: -seconds[name])[:num_shown]:
        per_step, each = counts[name] / num_steps, seconds[name] / counts[name]
        print(f"  {seconds[name] / num_steps:8.1f} us  {per_step:6.1f} x {each:7.2f} us  {name}", flush=True)


if __name__ == "__main__":
    main()
