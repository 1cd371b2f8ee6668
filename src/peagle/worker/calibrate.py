"""Chooses the number of draft tokens on a CPU, where each further token of a pass costs time.

At start-up a few steps run over an empty KV cache. Their times and the acceptance rates on the drafter's card give the
expected throughput of each number of draft tokens (`draft_cost`). The best one is chosen.
"""

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.scheduling.draft_cost import StepCosts, choose_num_draft_tokens, known_acceptance, speed_table
from peagle.targets.paged import LayerShape, Memory, PagedTarget
from peagle.worker.drafting import Drafting
from peagle.worker.row_state import RowState
from peagle.worker.step import Step, run_eagerly

log = logging.getLogger(__name__)

CONTEXT = 128
"""sequence length of the timed steps"""
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_SECONDS = 2, 5, 0.5
"""each number of draft tokens is timed this often, fewer times once the seconds are over"""


def calibrate(target: PagedTarget, drafter: Drafter, page_size: int) -> int:
    """The number of draft tokens with the highest expected throughput for one request; 0 if none pays."""
    limit = drafter.config.usual_num_draft_tokens
    acceptance = None if drafter.card is None else known_acceptance(drafter.card)
    if acceptance is None:
        log.info("num_draft_tokens=%d: the drafter's card has no acceptance rates to calibrate with", limit)
        return limit
    acceptance = acceptance[:limit]
    started = time.perf_counter()
    costs = measure_costs(target, drafter, acceptance, page_size)
    table = speed_table(costs, acceptance)
    chosen = choose_num_draft_tokens(costs, acceptance)
    for row in table:
        log.debug("%s", row)
    reason = "drafting does not pay on this machine" if chosen == 0 else "the fastest expected"
    speeds = ", ".join(f"{row.num_draft_tokens}: {row.speed_up:.2f}x" for row in table[1:])
    log.info("num_draft_tokens=%d: %s (%s), measured in %.2f s", chosen, reason, speeds, time.perf_counter() - started)
    return chosen


@torch.no_grad()
def measure_costs(target: PagedTarget, drafter: Drafter, acceptance: Sequence[float], page_size: int) -> StepCosts:
    """Minimum seconds of the two halves of a step, for some numbers of draft tokens up to len(acceptance).

    The drafter also reads the accepted tokens, so it is timed with as many as are accepted on average.
    """
    limit = len(acceptance)
    context = min(CONTEXT, target.target.max_length // 2)
    num_pages = -(-(context + 2 * limit + 2) // page_size)
    layer = LayerShape(drafter.config.num_kv_heads, drafter.config.head_dim)
    target_memory = target.new_memory(num_pages + 1, page_size)
    device = target.target.device
    drafter_memory = Memory((layer,) * drafter.config.num_layers, num_pages + 1, page_size, target.target.dtype, device)
    steps = {}
    for num_drafts in sorted({0, 1, limit // 2, limit}):
        state = RowState.empty(1, num_pages, num_drafts, device)
        state.page_table[0, :num_pages] = torch.arange(1, num_pages + 1)
        max_position = target.target.max_length - 1
        drafting = None
        if num_drafts:
            drafting = Drafting(drafter, state, drafter_memory, max_position, run_eagerly, False)
        steps[num_drafts] = Step(target, drafting, state, target_memory, max_position)
    row_B = torch.zeros(1, dtype=torch.long, device=device)
    verify_seconds: dict[int, float] = {}
    draft_seconds: dict[int, float] = {}
    started = time.perf_counter()
    for round_index in range(MAX_ROUNDS):
        # Take turns, so that a busy moment of the machine does not slow one number alone.
        for num_drafts, step in steps.items():
            step.state.length[0] = context
            verify, draft = _time_step(step, row_B, round(sum(acceptance[:num_drafts])))
            verify_seconds[num_drafts + 1] = min(verify, verify_seconds.get(num_drafts + 1, verify))
            if num_drafts:
                draft_seconds[num_drafts] = min(draft, draft_seconds.get(num_drafts, draft))
        if round_index + 1 >= MIN_ROUNDS and time.perf_counter() - started > ROUNDS_SECONDS:
            break
    return StepCosts(verify_seconds, draft_seconds)


def _time_step(step: Step, row_B: Tensor, num_accepted: int) -> tuple[float, float]:
    """Seconds of the two halves of a step, with a given number of accepted drafts."""
    started = time.perf_counter()
    verified = step.verify(row_B)
    verified_at = time.perf_counter()
    num_accepted_B = torch.full_like(verified.accepted.num_accepted_B, num_accepted)
    accepted = verified.accepted._replace(num_accepted_B=num_accepted_B)
    step.draft(row_B, verified._replace(accepted=accepted))
    return verified_at - started, time.perf_counter() - verified_at
