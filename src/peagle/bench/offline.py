"""The offline benchmark: a sweep of method x number of draft tokens x concurrency in one process.

Each cell is a closed loop: `concurrency` requests are in flight, and the next prompt starts when one ends. Before it
is timed, the same number of short requests warm the engine up and give the time of an undisturbed step.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from peagle.bench.cells import PLAIN, Answer, Cell, CellResult, StepSplit
from peagle.decoding.acceptance import Acceptance
from peagle.errors import PeagleError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

WARMUP_TOKENS = 64
"""Answer length of a warm-up request: some thirty steps at usual acceptance, enough for a median."""
SETTLING_STEPS = 2
"""Steps without prefill after which a step counts as undisturbed: the host is a step behind the device."""

Clock = Callable[[], float]


class Completion(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...


class Metrics(Protocol):
    """Times are those of `time.perf_counter`."""

    @property
    def arrived(self) -> float: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def finished_at(self) -> float | None: ...
    @property
    def acceptance(self) -> Acceptance: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


class Output(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def outputs(self) -> Sequence[Completion]: ...
    @property
    def metrics(self) -> Metrics: ...


class Stats(Protocol):
    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def device_seconds(self) -> float: ...


class Times(Protocol):
    """Seconds on the device."""

    @property
    def step(self) -> float: ...
    @property
    def verify(self) -> float | None: ...
    @property
    def draft(self) -> float | None: ...


class Engine(Protocol):
    """Requests in, finished requests out."""

    def add(self, prompt_ids: list[int], params: SamplingParams) -> str:
        """Queue a request and return its id."""

    def step(self) -> Sequence[Output]:
        """Run one step; return the requests that it finished."""

    def stats(self) -> Stats:
        """Counts since the engine was made."""


class OfflineLLM(Protocol):
    """What a sweep needs of `peagle.LLM`."""

    @property
    def engine(self) -> Engine: ...

    def step_times(self, batch: int) -> Times | None:
        """The captured step's own time at a batch size; None where nothing is captured."""

    def close(self) -> None:
        """Give back the memory of caches and graphs."""


MakeLLM = Callable[[str, int], OfflineLLM]


@dataclass
class Loop:
    """What happened in a closed loop. `walls` are seconds from one step's end to the next one's."""

    outputs: list[tuple[int, Output]] = field(default_factory=list)
    """with the index of the prompt, in the order they finished"""
    seconds: float = 0.0
    steady_tokens_per_second: float | None = None
    walls: list[float] = field(default_factory=list)
    """of undisturbed steps, where they were asked for"""
    device: list[float] = field(default_factory=list)
    """seconds the device was busy in those steps; zeros where that is not known"""


def closed_loop(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    order: Sequence[int],
    params: SamplingParams,
    concurrency: int,
    *,
    time_steps: bool = False,
    clock: Clock = time.perf_counter,
) -> Loop:
    """Answer `prompts[i]` for each i of `order`, with `concurrency` requests in flight while there are enough.

    `time_steps` also asks the engine for its counts at every step, which costs the host time; it belongs in a warm-up.
    """
    loop, waiting, prompt_of = Loop(), deque(order), dict[str, int]()
    tokens_before, calm, prefilled, busy = engine.stats().num_output_tokens, 0, -1, 0.0
    started = ended = clock()
    while waiting or prompt_of:
        while waiting and len(prompt_of) < concurrency:
            index = waiting.popleft()
            prompt_of[engine.add(list(prompts[index]), params)] = index
        is_full = len(prompt_of) == concurrency
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
        if is_full and len(waiting) < len(finished) and loop.steady_tokens_per_second is None:
            num_tokens = engine.stats().num_output_tokens - tokens_before
            loop.steady_tokens_per_second = num_tokens / max(ended - started, 1e-9)
        loop.outputs += [(prompt_of.pop(output.request_id), output) for output in finished]
    loop.seconds = ended - started
    return loop


def warm_up(
    llm: OfflineLLM, prompts: Sequence[Sequence[int]], params: SamplingParams, concurrency: int, clock: Clock
) -> StepSplit | None:
    """Run short requests at a concurrency, and say where the time of an undisturbed step goes.

    The prompts are read backwards: as long as the real ones, but sharing no beginning with them, so that nothing the
    timed requests need is cached. None where no step was undisturbed.
    """
    short = replace(params, max_tokens=min(params.max_tokens, WARMUP_TOKENS), ignore_eos=True)
    backwards = [prompt[::-1] for prompt in prompts]
    order = [index % len(prompts) for index in range(concurrency)]
    loop = closed_loop(llm.engine, backwards, order, short, concurrency, time_steps=True, clock=clock)
    if not loop.walls:
        return None
    wall, device, times = statistics.mean(loop.walls), statistics.mean(loop.device), llm.step_times(concurrency)
    if times is None or not device:
        return StepSplit(wall)
    # The texts of the measured steps have other lengths than those the halves are timed at; their shares are taken.
    verify = device * times.verify / times.step if times.verify is not None else None
    return StepSplit(wall, device, verify, None if verify is None else device - verify)


def run_cell(
    llm: OfflineLLM,
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_requests: int,
    *,
    device: "torch.device | None" = None,
    clock: Clock = time.perf_counter,
) -> CellResult:
    """Warm up, then answer `num_requests` requests, the prompts in turn from the first."""
    step = warm_up(llm, prompts, params, cell.concurrency, clock)
    reset_peak_memory(device)
    order = [index % len(prompts) for index in range(num_requests)]
    loop = closed_loop(llm.engine, prompts, order, params, cell.concurrency, clock=clock)
    acceptance = None
    if cell.method != PLAIN:
        acceptance = Acceptance(0, (0,) * cell.num_draft_tokens)
        for _, output in loop.outputs:
            acceptance += output.metrics.acceptance
    return CellResult(
        cell,
        answers=[answer_of(index, output) for index, output in loop.outputs],
        seconds=loop.seconds,
        steady_tokens_per_second=loop.steady_tokens_per_second,
        acceptance=acceptance,
        step=step,
        memory_bytes=peak_memory(device),
        num_cached_tokens=sum(output.metrics.num_cached_tokens for _, output in loop.outputs),
        num_preemptions=sum(output.metrics.num_preemptions for _, output in loop.outputs),
    )


def answer_of(prompt: int, output: Output) -> Answer:
    """The answer with its two latencies, by the usual definitions: time per token leaves the first token out."""
    metrics, token_ids = output.metrics, tuple(output.outputs[0].token_ids)
    ttft = per_token = None
    if metrics.first_token_at is not None:
        ttft = metrics.first_token_at - metrics.arrived
        if metrics.finished_at is not None and len(token_ids) > 1:
            per_token = (metrics.finished_at - metrics.first_token_at) / (len(token_ids) - 1)
    return Answer(prompt, token_ids, ttft, per_token)


def default_num_requests(concurrency: int, num_prompts: int) -> int:
    """Every prompt once, and each of several places in the batch taken at least eight times.

    The last requests run in a batch that empties; with fewer of them it would weigh too much.
    """
    return num_prompts if concurrency == 1 else max(8 * concurrency, num_prompts)


def cells_of(
    methods: Sequence[str], num_draft_tokens: Mapping[str, Sequence[int]], concurrency: Sequence[int]
) -> list[Cell]:
    """All cells, in the order they are run: those that share an engine follow each other."""
    return [
        Cell(method, depth, places)
        for method in methods
        for depth in ((0,) if method == PLAIN else num_draft_tokens[method])
        for places in sorted(concurrency)
    ]


def sweep(
    cells: Sequence[Cell],
    make_llm: MakeLLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    results: list[CellResult],
    *,
    num_requests: Callable[[int], int],
    device: "torch.device | None" = None,
    on_cell: Callable[[CellResult], None] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> None:
    """Run all cells, one engine for each run of cells that differ in concurrency alone.

    `num_requests` gives the requests of a cell by its concurrency. Results are appended as they come, so that an
    interrupted sweep leaves what was finished. A cell that does not fit the device is recorded with the reason, and
    the others go on.
    """
    llm, made_for = None, None
    try:
        for cell in cells:
            wanted = (cell.method, cell.num_draft_tokens)
            try:
                if made_for != wanted:
                    if llm is not None:
                        llm.close()
                    llm, made_for = None, None  # if the next one cannot be made, the old one must not be used
                    llm, made_for = make_llm(*wanted), wanted
                assert llm is not None
                num = num_requests(cell.concurrency)
                result = run_cell(llm, cell, prompts, params, num, device=device, clock=clock)
            except Exception as error:
                if not is_capacity(error):
                    raise
                result = CellResult(cell, failure=reason_of(error))
                if llm is not None:
                    llm.close()
                llm, made_for = None, None  # what an engine holds after running out of memory is not known
            results.append(result)
            on_cell(result)
    finally:
        if llm is not None:
            llm.close()


def is_capacity(error: Exception) -> bool:
    """Whether the machine was too small, which says nothing about the other cells."""
    import torch

    return isinstance(error, PeagleError | MemoryError | torch.OutOfMemoryError)


def reason_of(error: BaseException) -> str:
    """One line for a table."""
    text = error.message if isinstance(error, PeagleError) else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    name = type(error).__name__
    return first if isinstance(error, PeagleError) else f"{name}: {first}" if first else name


def llm_factory(
    target: "HFTarget", drafters: Mapping[str, "Drafter"], *, max_batch: int, max_length: int, **options: Any
) -> MakeLLM:
    """Engines over one loaded target and its drafters, by method; `options` are the engine's own.

    Prompts come round again within a cell and in the next one, so an engine that reuses prefixes would be measured
    without its prefill: turn that off. `CellResult.num_cached_tokens` shows whether it was.
    """

    def make(method: str, num_draft_tokens: int) -> OfflineLLM:
        from peagle.engine.llm import LLM

        drafter = drafters.get(method)
        if drafter is not None:
            target.tap(drafter.config.aux_layer_ids)
        llm: OfflineLLM = LLM(
            target,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens if drafter is not None else None,
            max_batch=max_batch,
            max_length=max_length,
            **options,
        )
        return llm

    return make


def reset_peak_memory(device: "torch.device | None") -> None:
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: "torch.device | None") -> int | None:
    """Bytes: on a GPU the most that was allocated since the reset, elsewhere the most the process ever held."""
    if device is None:
        return None
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
