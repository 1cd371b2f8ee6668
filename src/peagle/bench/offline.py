"""The offline benchmark: sweep method x number of draft tokens x concurrency in one process.

Each cell is a closed loop: `concurrency` requests are in flight, and when one finishes the next prompt starts. Before
the timed run, the same number of short requests warm up the engine and time its steady-state step.
"""

import contextlib
import logging
import operator
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING, Any

from peagle.bench.cells import PLAIN, Answer, Cell, CellResult, StepSplit
from peagle.bench.conversations import Conversations, Following, planned
from peagle.errors import PeagleError
from peagle.sampling_params import SamplingParams
from peagle.targets.catalog import ASSETS, DEFAULT_TARGET, find

if TYPE_CHECKING:
    import torch

    from peagle.drafter.model import Drafter
    from peagle.engine.engine import Engine
    from peagle.engine.llm import LLM
    from peagle.engine.outputs import RequestOutput
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

WARMUP_TOKENS = 64
"""Tokens per warm-up request: about thirty steps at typical acceptance, enough for a median."""
SETTLING_STEPS = 2
"""Steps without prefill before a step counts as steady: the host runs one step behind the device."""

Clock = Callable[[], float]
MakeLLM = Callable[[str, int | None], "LLM"]


@dataclass
class Loop:
    """What happened in a closed loop."""

    outputs: "list[tuple[int, int, RequestOutput]]" = field(default_factory=list)
    """with the index of the prompt and the turn, in the order they finished"""
    seconds: float = 0.0
    steady_tokens_per_second: float | None = None
    walls: list[float] = field(default_factory=list)
    """seconds per steady step, from the end of one step to the end of the next; only with `time_steps`"""
    device: list[float] = field(default_factory=list)
    """seconds the device was busy in those steps; zeros if unknown"""


@dataclass
class _Conversation:
    index: int
    num_left: int
    """turns to ask, the current one included"""
    asked: Sequence[int]
    answers: list[str] = field(default_factory=list)

    def continued(self, output: "RequestOutput", following: Following) -> bool:
        """Take the answer and move to the next turn; False after the last."""
        self.num_left -= 1
        if self.num_left < 1:
            return False
        self.answers.append(output.text)
        asked = following(self.index, self.answers)
        self.asked = asked or ()
        return asked is not None


def closed_loop(
    engine: "Engine",
    prompts: Sequence[Sequence[int]],
    order: Sequence[int],
    params: SamplingParams,
    concurrency: int,
    *,
    num_turns: Sequence[int] = (),
    following: Following = lambda *_: None,
    time_steps: bool = False,
    clock: Clock = time.perf_counter,
) -> Loop:
    """Answer `prompts[i]` for each i in `order`, with up to `concurrency` requests in flight.

    `num_turns` has the turns to ask of each conversation in `order` (default: one). The next turn starts when the one
    before it ends. `time_steps` reads the engine's counters at every step. That costs host time, so use it only in a
    warm-up.
    """
    loop, in_flight = Loop(), dict[str, _Conversation]()
    turns = num_turns or [1] * len(order)
    waiting = deque(_Conversation(index, left, prompts[index]) for index, left in zip(order, turns, strict=True))
    tokens_before, calm, prefilled, busy = engine.stats().num_output_tokens, 0, -1, 0.0
    started = ended = clock()
    while waiting or in_flight:
        while waiting and len(in_flight) < concurrency:
            conversation = waiting.popleft()
            in_flight[engine.add(list(conversation.asked), params)] = conversation
        is_full = len(in_flight) == concurrency
        finished = engine.step()
        before, ended = ended, clock()
        if time_steps:
            stats = engine.stats()
            last, prefilled = prefilled, stats.num_prefill_tokens
            busy_before, busy = busy, stats.device_seconds
            calm = calm + 1 if prefilled == last and is_full and not finished else 0
            if calm > SETTLING_STEPS:
                loop.walls.append(ended - before)
                loop.device.append(busy - busy_before)
        for output in finished:
            conversation = in_flight.pop(output.request_id)
            loop.outputs.append((conversation.index, len(conversation.answers), output))
            if conversation.continued(output, following):
                waiting.appendleft(conversation)
        if is_full and len(waiting) < len(finished) and loop.steady_tokens_per_second is None:
            num_tokens = engine.stats().num_output_tokens - tokens_before
            loop.steady_tokens_per_second = num_tokens / max(ended - started, 1e-9)
    loop.seconds = ended - started
    return loop


def warm_up(
    llm: "LLM", prompts: Sequence[Sequence[int]], params: SamplingParams, concurrency: int, clock: Clock
) -> StepSplit | None:
    """Run short requests and split the time of a steady step; None if no step was steady.

    Without their first token, the prompts share no pages with the real ones, but drafts are accepted as often: the
    engine learns from it how many to verify.
    """
    short = replace(params, max_tokens=min(params.max_tokens, WARMUP_TOKENS), ignore_eos=True)
    own_prompts = [prompt[1:] or prompt for prompt in prompts]
    order = [index % len(prompts) for index in range(concurrency)]
    loop = closed_loop(llm.engine, own_prompts, order, short, concurrency, time_steps=True, clock=clock)
    if not loop.walls:
        return None
    wall, device, times = statistics.mean(loop.walls), statistics.mean(loop.device), llm.step_times(concurrency)
    if times is None or not device:
        return StepSplit(wall)
    # `times` was measured at other sequence lengths, so only the ratio of verify to step is used.
    verify = device * times.verify / times.step
    return StepSplit(wall, device, verify, device - verify)


def run_cell(
    llm: "LLM",
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_requests: int,
    *,
    conversations: Conversations | None = None,
    device: "torch.device | None" = None,
    clock: Clock = time.perf_counter,
) -> CellResult:
    """Warm up, then run `num_requests` requests, cycling through the prompts and the turns of `conversations`."""
    step = warm_up(llm, prompts, params, cell.concurrency, clock)
    reset_peak_memory(device)
    plan = planned([1] * len(prompts) if conversations is None else conversations.num_turns, num_requests)
    turns: dict[str, Any] = {"num_turns": [turns for _, turns in plan]}
    if conversations is not None:
        turns["following"] = conversations.following
    order = [index for index, _ in plan]
    loop = closed_loop(llm.engine, prompts, order, params, cell.concurrency, **turns, clock=clock)
    is_drafted = cell.method != PLAIN
    answers = [answer_of(index, output, turn=turn, is_drafted=is_drafted) for index, turn, output in loop.outputs]
    acceptance = None
    if is_drafted:
        acceptance = reduce(operator.add, (output.metrics.acceptance for _, _, output in loop.outputs))
    return CellResult(
        cell,
        answers=answers,
        seconds=loop.seconds,
        steady_tokens_per_second=loop.steady_tokens_per_second,
        acceptance=acceptance,
        num_verified=sum(output.metrics.num_draft_tokens for _, _, output in loop.outputs),
        step=step,
        memory_bytes=peak_memory(device),
        num_cached_tokens=sum(output.metrics.num_cached_tokens for _, _, output in loop.outputs),
        num_preemptions=sum(output.metrics.num_preemptions for _, _, output in loop.outputs),
    )


def answer_of(prompt: int, output: "RequestOutput", *, turn: int = 0, is_drafted: bool = False) -> Answer:
    """The answer with TTFT and TPOT; TPOT excludes the first token."""
    metrics, token_ids = output.metrics, tuple(output.outputs[0].token_ids)
    first, end, per_token = metrics.first_token_at, metrics.finished_at, None
    if first is not None and end is not None and len(token_ids) > 1:
        per_token = (end - first) / (len(token_ids) - 1)
    return Answer(
        prompt,
        token_ids,
        None if first is None else first - metrics.arrived,
        per_token,
        metrics.acceptance if is_drafted else None,
        turn,
        tuple(output.prompt_token_ids) if turn else None,
        output.verified_drafts,
    )


def cells_of(
    methods: Sequence[str], num_draft_tokens: Mapping[str, Sequence[int | None]], concurrency: Sequence[int]
) -> list[Cell]:
    """All cells in the order to run them: cells that share an engine are adjacent."""
    return [
        Cell(method, depth, places)
        for method in methods
        for depth in ((0,) if method == PLAIN else num_draft_tokens[method])
        for places in sorted(concurrency)
    ]


def depths_of(drafter: "Drafter", wanted: Sequence[int | None]) -> Sequence[int | None]:
    """The numbers of draft tokens to measure: those in `wanted` that the drafter was trained for, at least one.

    None stays and may be the only one: the engine decides, as it does by default.
    """
    config, numbers = drafter.config, [depth for depth in wanted if depth is not None]
    if not numbers:
        return wanted
    if None not in wanted:
        drafter.check_num_draft_tokens(min(numbers))
    depths = config.depths_within(numbers)
    if too_deep := [str(depth) for depth in numbers if depth not in depths]:
        skipped = ", ".join(too_deep)
        log.info("skipping %s at %s draft tokens: trained for %d", config.method, skipped, config.num_draft_tokens)
    return [depth for depth in wanted if depth is None or depth in depths]


def shipped_eagle3_drafter(target: str | None) -> str | None:
    """The EAGLE-3 drafter that ships for a target, if any."""
    entry = find(target or DEFAULT_TARGET)
    for drafter in entry.drafters if entry is not None else ():
        if drafter.method == "eagle3" and drafter.source is not None:
            is_packaged = drafter.where == "package"
            if not is_packaged or (ASSETS / drafter.source).is_dir():
                return str(ASSETS / drafter.source) if is_packaged else drafter.source
    return None


def sweep(
    cells: Sequence[Cell],
    make_llm: MakeLLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    results: list[CellResult],
    *,
    num_requests: Mapping[int, int],
    conversations: Conversations | None = None,
    device: "torch.device | None" = None,
    on_cell: Callable[[CellResult], None] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> None:
    """Run all cells. Cells that differ only in concurrency share an engine.

    `num_requests` maps concurrency to requests. Results are appended as they come, so an interrupted sweep keeps what
    is done. A cell that does not fit on the device is recorded with the reason, and the sweep continues.
    """
    import torch

    for wanted, group in groupby(cells, key=lambda cell: (cell.method, cell.num_draft_tokens)):
        llm = None
        with contextlib.ExitStack() as opened:
            for cell in group:
                try:
                    llm = llm or opened.enter_context(contextlib.closing(make_llm(*wanted)))
                    num = num_requests[cell.concurrency]
                    options: dict[str, Any] = {"conversations": conversations, "device": device, "clock": clock}
                    result = run_cell(llm, cell, prompts, params, num, **options)
                except (PeagleError, MemoryError, torch.OutOfMemoryError) as error:
                    result = CellResult(cell, failure=reason_of(error))
                    opened.close()
                    llm = None  # after running out of memory an engine's state is unknown
                results.append(result)
                on_cell(result)


def reason_of(error: BaseException) -> str:
    """One line for a table."""
    if isinstance(error, PeagleError):
        return error.message.strip().splitlines()[0]
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


def llm_factory(
    target: "HFTarget",
    drafters: Mapping[str, "Drafter"],
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: Sequence[int],
    max_tokens: int,
    longest: int | None = None,
    verifies_all: bool = True,
    **options: Any,
) -> MakeLLM:
    """Engines over one loaded target and its drafters, by method.

    They are just large enough for the workload, so that the reported memory is what it needs. Prefix caching is off:
    prompts repeat, and prefill must be measured. `verifies_all`: a number of draft tokens is verified in full in every
    step; else it is a limit, as in a server, and the engine verifies those that pay. `longest` is the length of the
    longest sequence, if not that of the longest prompt with its answer.
    """
    max_length = min(longest or max(map(len, prompts)) + max_tokens, target.max_length)

    def make(method: str, num_draft_tokens: int | None) -> "LLM":
        from peagle.engine.llm import LLM

        drafter = drafters.get(method)
        if drafter is not None:
            target.tap(drafter.config.aux_layer_ids)
        return LLM(
            target,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens if drafter is not None else None,
            max_batch=max(concurrency),
            max_length=max_length,
            reuse_prefixes=False,
            verify_tokens=0 if verifies_all and num_draft_tokens is not None else None,
            **options,
        )

    return make


def reset_peak_memory(device: "torch.device | None") -> None:
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: "torch.device | None") -> int | None:
    """Bytes: on a GPU the peak allocation since the reset, else the peak of the process."""
    if device is None:
        return None
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
