"""Swaps the drafter while many streams are in flight: does one fail, or an answer change?

    python benchmarks/swap_in_flight.py --prompts question.jsonl [--streams 256] [--swap DIR] [--eager]

The same prompts are streamed twice by one engine: undisturbed, and with other weights put in the place of the drafter
when half of the tokens are there. Without --swap these are the drafter's own with half of a projection, so drafts get
worse. An answer has changed if it differs and the target does not see a near tie where it begins to. The exit status is
1 if a stream failed or an answer has changed.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from peagle import LLM, SamplingParams
from peagle.checkpoint.layouts import WEIGHTS_NAME
from peagle.checkpoint.native import drafter_directory
from peagle.compare.answers import render_prompt
from peagle.compare.divergence import first_divergence, measured_near_tie
from peagle.data.prompts import read_prompts
from peagle.engine.async_engine import AsyncEngine
from peagle.errors import PeagleError
from peagle.targets.load import load_target

NUM_MEASURED = 4  # answers that the rounding of near ties is measured on
Answers = list[tuple[int, ...] | None]
"""None for a stream that failed."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, help="prompt files; repeated until there are enough")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--target", default=None)
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--swap", type=Path, default=None, help="drafter directory of the same shape")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args(argv)
    target = load_target(options.target)
    rows = [render_prompt(target, prompt) for file in options.prompts for prompt in read_prompts(file)]
    prompts = [rows[index % len(rows)] for index in range(options.streams)]
    params = SamplingParams(max_tokens=options.max_tokens)
    directory = drafter_directory(options.drafter, target)
    settings = {"max_batch": options.streams, "reuse_prefixes": False, "eager": options.eager}
    with tempfile.TemporaryDirectory() as scratch:
        swap = options.swap or worse(directory, Path(scratch) / "worse")
        llm = LLM(target, directory, **settings)
        undisturbed, swapped = asyncio.run(both(AsyncEngine(llm.engine), prompts, params, swap))
    num_failed = sum(answer is None for answer in [*undisturbed, *swapped])
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, undisturbed, strict=True) if answer]
    limit = measured_near_tie(target, texts[:NUM_MEASURED])
    found = [
        first_divergence(target, prompt, before, after, params, limit)
        for prompt, before, after in zip(prompts, undisturbed, swapped, strict=True)
        if before is not None and after is not None
    ]
    differing = [each for each in found if each is not None]
    num_changed = sum(not each.is_near_tie for each in differing)
    print(
        f"{options.streams} streams, one swap: {num_failed} failed, {num_changed} changed, "
        f"{len(differing) - num_changed} differ at a near tie"
    )
    return int(bool(num_failed or num_changed))


def worse(directory: Path, output: Path) -> Path:
    """The drafter with half of a projection."""
    shutil.copytree(directory, output)
    tensors = load_file(output / WEIGHTS_NAME)
    tensors["fc.weight"] /= 2
    save_file(tensors, output / WEIGHTS_NAME)
    return output


async def both(
    engine: AsyncEngine, prompts: Sequence[list[int]], params: SamplingParams, swap: Path
) -> tuple[Answers, Answers]:
    """The answers of both rounds. Prints what drafts do in each."""
    async with engine:
        undisturbed = await answers(engine, prompts, params)
        before = (await engine.stats()).acceptance
        half = sum(len(answer or ()) for answer in undisturbed) // 2
        swapped = await answers(engine, prompts, params, half, swap)
        after = (await engine.stats()).acceptance
    accepted = (after.num_accepted - before.num_accepted) / max(1, after.num_drafts - before.num_drafts)
    print(f"acceptance length {before.acceptance_length:.2f}, with the swap {1 + accepted:.2f}", flush=True)
    return undisturbed, swapped


async def answers(
    engine: AsyncEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    swap_after: int | None = None,
    swap: Path | None = None,
) -> Answers:
    """The answers of all prompts at once; the drafter is swapped after so many tokens."""
    num_tokens, is_due = 0, asyncio.Event()

    async def stream(prompt_ids: list[int]) -> tuple[int, ...] | None:
        nonlocal num_tokens
        token_ids: list[int] = []
        try:
            async for update in engine.stream(prompt_ids, params):
                token_ids += update.token_ids
                num_tokens += len(update.token_ids)
                if swap_after is not None and num_tokens >= swap_after:
                    is_due.set()
        except PeagleError as error:
            print(f"a stream failed: {error}", file=sys.stderr)
            is_due.set()
            return None
        return tuple(token_ids)

    async def swap_when_due() -> None:
        if swap is not None:
            await is_due.wait()
            await engine.swap_drafter(swap)
            stats = await engine.stats()
            print(f"swapped with {stats.num_running} streams in flight", flush=True)

    found, _ = await asyncio.gather(asyncio.gather(*map(stream, prompts)), swap_when_due())
    return list(found)


if __name__ == "__main__":
    sys.exit(main())
