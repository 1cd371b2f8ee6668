"""Time per decode step on a CPU, by tokens of its verification pass: measured at start, over empty sequences.

A further token of a pass costs little while the weights are read from memory anyway, and as much as a token of plain
decoding once the cores are busy. Where that happens depends on the machine, so `draft_budget` gets the measured costs.

A pass over 1, 8 and 32 tokens takes 60, 70 and 94 ms, a draft 20 ms per request. One request with at most 31 drafts:

>>> costs = StepCosts({1: 0.060, 8: 0.070, 32: 0.094}, {1: 0.020, 4: 0.080})
>>> seconds = costs.by_size(batch=1, num_drafts=31)
>>> [(size, round(1e3 * seconds[size])) for size in (1, 2, 8, 17, 32)]
[(1, 60), (2, 81), (8, 90), (17, 99), (32, 114)]

Two requests; beyond 32 tokens the costs keep rising as they did before:

>>> seconds = costs.by_size(batch=2, num_drafts=31)
>>> [(size, round(1e3 * seconds[size])) for size in (2, 4, 64)]
[(2, 61), (4, 104), (64, 166)]
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from peagle.worker.row_state import RowState
from peagle.worker.step import Step, Verified

log = logging.getLogger(__name__)

PASS_SIZES = (1, 4, 8, 16, 64)
"""most tokens of a timed pass; costs rise slowly up to about 8, then in proportion"""
BATCHES = (1, 4)
"""requests of the drafts that are timed"""
LENGTH, NUM_ACCEPTED = 128, 2
"""tokens of the sequences, and accepted drafts per step, in the timed steps"""
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_SECONDS = 2, 5, 1.0
"""how often each size is timed; fewer times once the seconds are over"""
DRAFTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 62)
"""drafts per request, on average, that a pass may have"""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a verification pass by tokens, and of a draft by requests."""

    verify: Mapping[int, float]
    draft: Mapping[int, float]

    def by_size(self, batch: int, num_drafts: int) -> dict[int, float]:
        """Seconds per step of `batch` requests, by tokens of the pass. The first size is plain decoding."""
        most = batch * (num_drafts + 1)
        sizes = sorted({*(batch * (number + 1) for number in DRAFTS if number < num_drafts), most} - {batch})
        draft = _at(self.draft, batch) if sizes else 0.0
        return {batch: _at(self.verify, batch)} | {size: _at(self.verify, size) + draft for size in sizes}


def _at(seconds: Mapping[int, float], number: int) -> float:
    """Seconds for `number`: linear between and beyond the measured ones."""
    known = sorted(seconds)
    if number in seconds or len(known) == 1:
        return seconds[min(number, known[-1])]
    index = min(max(bisect_left(known, number), 1), len(known) - 1)
    below, above = known[index - 1], known[index]
    return seconds[below] + (number - below) / (above - below) * (seconds[above] - seconds[below])


@torch.inference_mode()
def measure_step_costs(step: Step, plain_step: Step, num_pages: int) -> StepCosts:
    """Time passes and drafts. Only while no request runs: the pages are overwritten."""
    started = time.perf_counter()
    num_rows, num_places = len(step.state.length) - 1, step.state.tokens.shape[1]
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}
    with _sequences(step.state, num_pages, step.page_size) as length:
        for round_index in range(MAX_ROUNDS):
            # Take turns, so that a busy moment of the machine does not slow one size alone.
            for size in sorted({min(size, num_rows * num_places) for size in PASS_SIZES}):
                run, batch = plain_step if size == 1 else step, -(-size // num_places)
                _keep_least(verify, size, partial(_verify, run, length, batch, size))
            for batch in {min(each, num_rows) for each in BATCHES}:
                verified = _verify(step, length, batch, 2 * batch)
                accepted = verified.accepted
                num_accepted_B = torch.full_like(accepted.num_accepted_B, min(NUM_ACCEPTED, num_places - 1))
                verified = verified._replace(accepted=accepted._replace(num_accepted_B=num_accepted_B))
                _keep_least(draft, batch, partial(step.draft, torch.arange(batch), verified))
            if round_index + 1 >= MIN_ROUNDS and time.perf_counter() - started > ROUNDS_SECONDS:
                break
    verify, draft = _rising(verify), _rising(draft)
    passes = ", ".join(f"{size}: {1e3 * seconds:.1f}" for size, seconds in verify.items())
    log.info(
        "milliseconds per verification pass, by tokens: %s; per draft: %.1f; measured in %.1f s",
        passes,
        1e3 * draft[1],
        time.perf_counter() - started,
    )
    return StepCosts(verify, draft)


def _rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """More work is never faster. Where it seems so, the smaller one was timed in a busy moment."""
    return {size: min(other for number, other in seconds.items() if number >= size) for size in seconds}


def _verify(step: Step, length: int, batch: int, size: int) -> Verified:
    step.state.length[:batch] = length
    return step.verify(torch.arange(batch), None, size)


def _keep_least(seconds: dict[int, float], key: int, run: Callable[[], object]) -> None:
    started = time.perf_counter()
    run()
    seconds[key] = min(time.perf_counter() - started, seconds.get(key, float("inf")))


@contextmanager
def _sequences(state: RowState, num_pages: int, page_size: int) -> Iterator[int]:
    """Give every row a sequence in pages of its own, as far as there are enough; yields the length."""
    tables: dict[str, Tensor] = {name: each for name, each in vars(state).items() if isinstance(each, Tensor)}
    saved = {name: each.clone() for name, each in tables.items()}
    num_columns = state.page_table.shape[1] - 1
    pages = torch.arange(state.page_table[:, :num_columns].numel(), dtype=torch.int32) % (num_pages - 1) + 1
    state.page_table[:, :num_columns] = pages.view(-1, num_columns)
    state.max_draft.fill_(state.num_draft_tokens)
    try:
        yield max(1, min(LENGTH, num_columns * page_size - 2 * state.tokens.shape[1]))
    finally:
        for name, each in tables.items():
            each.copy_(saved[name])
