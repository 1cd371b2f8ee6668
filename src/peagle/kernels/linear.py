"""Linear layers that are fast on a CPU for the few rows of a decode step.

`nn.Linear` over 2 to 16 rows repacks its weight inside every call, which costs more than the product itself. Packing
once removes that. Of the packed forms

    mkl          MKL's packed weight: x86-64, float32
    onednn       oneDNN's blocked weight: x86-64 and, through the ARM compute library, ARM; also in bfloat16
    transposed   a contiguous copy of the transposed weight: works everywhere
    plain        what nn.Linear does

the first that this build has is timed against plain, briefly, on weights of each distinct shape, and is used for the
numbers of rows where it wins: nn.Linear may still be the faster one for a single row, and for many. `rows_equal` of a
timing says whether a row's bits depend on how many rows go with it: they do for `plain`, not for `mkl`.

The parameters stay where they were: the drafter shares the target's tables, and fingerprints and state dicts read
them. The price is a second copy of every packed weight, which `PackedReport.extra_bytes` states and `memory_budget`
bounds.

Shapes: N rows, I input width, O output width.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from peagle.errors import ConfigError
from peagle.kernels.linear_kernels import KERNELS, LinearKernel, available_kernels

logger = logging.getLogger(__name__)

NUM_TIMED_MODULES = 4
"""modules of one shape that take part in its timing, so that their weights do not all sit in the nearest cache"""
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_SECONDS = 2, 8, 0.01
"""a row count is timed over at least and at most so many rounds, or until the seconds are over"""
MIN_BYTES = 2**18
"""smaller weights stay plain: their products cost what a call costs"""
NUM_TIMED_OUTPUTS, NUM_CHECKED_OUTPUTS = 8192, 1024
"""rows of a weight that take part in its timing, and in the comparison of a product with plain's"""
NEAR = 0.05
"""within this share of the fastest, the order of KERNELS decides and not the noise; on a busy machine all is noise"""
MOST_ROWS = 256
"""the most rows that a packed form is timed for and runs; prompts are longer, and plain is good at those"""


@dataclass(frozen=True)
class KernelTiming:
    kernel: str
    seconds: dict[int, float]
    """by number of rows: the least time of one product over several rounds"""
    rows_equal: bool
    """whether a row alone and the same row among others gave the same bits"""


@dataclass(frozen=True)
class ShapeChoice:
    """What was chosen for all modules of one shape, and why."""

    out_features: int
    in_features: int
    num_modules: int
    kernel: str
    min_rows: int
    """with fewer rows `plain` runs"""
    max_rows: int | None
    """with more rows `plain` runs; None where it is plain anyway"""
    reason: str
    timings: tuple[KernelTiming, ...]


@dataclass(frozen=True)
class PackedReport:
    """What `pack_linears` did. `extra_bytes` is the second copy that the packed weights hold."""

    choices: tuple[ShapeChoice, ...]
    num_packed: int
    extra_bytes: int
    seconds: float
    skipped: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a log: one line a shape, then the total."""
        shapes = [
            f"{choice.num_modules} x linear {choice.out_features}x{choice.in_features}: "
            f"{choice.kernel}{_for_rows(choice)} ({choice.reason})"
            for choice in self.choices
        ]
        more = f"{self.extra_bytes / 2**20:.0f} MiB more"
        total = f"{self.num_packed} linear layers packed in {self.seconds:.2f} s, {more}"
        return [*shapes, total, *self.skipped]


class PackedLinear(nn.Linear):
    """An nn.Linear with a packed copy of its weight beside the parameter. For inference: it computes no gradients.

    The copy is no parameter and no buffer, so names and contents of the state dict are those of nn.Linear. It is not
    refreshed when the weight is written to or moved: `unpack_linears` first.
    """

    def __init__(self, linear: nn.Linear, kernel: LinearKernel, min_rows: int = 1, max_rows: int | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.kernel, self.min_rows, self.max_rows = kernel, min_rows, max_rows
        self.train(linear.training)
        with torch.no_grad():
            self._packed = kernel.pack(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.in_features
        if num_rows < self.min_rows or (self.max_rows is not None and num_rows > self.max_rows):
            return functional.linear(x, self.weight, self.bias)
        return self.kernel.run(x, self._packed, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kernel={self.kernel.name}, rows={self.min_rows}..{self.max_rows or ''}"


def pack_linears(
    module: nn.Module,
    num_rows: int = 8,
    most_rows: int | None = None,
    *,
    memory_budget: int | None = None,
    kernels: Collection[str] | None = None,
) -> PackedReport:
    """Replace the nn.Linear modules inside `module` by packed ones where that is faster, and log each choice.

    `num_rows` is the usual row count of a step (draft tokens plus one, times requests), `most_rows` that of a full
    batch; a packed form serves as many rows up to there, or `MOST_ROWS`, as it wins with. Packing stops before the
    copies exceed `memory_budget` bytes; by default half of the memory that is free now. Largest weights come first.
    `kernels` names other candidates than the preferred one, all of which are timed; plain always is one. Only exact
    nn.Linear modules on the CPU without hooks and of `MIN_BYTES` or more are touched; `module` itself is not replaced.
    """
    if num_rows < 1:
        raise ConfigError(f"num_rows must be at least 1, got {num_rows}")
    most_rows = MOST_ROWS if most_rows is None else min(most_rows, MOST_ROWS)
    unknown = sorted(set(kernels or ()) - set(KERNELS))
    if unknown:
        raise ConfigError(f"unknown linear kernels {unknown}", hint=f"known: {', '.join(KERNELS)}")
    started = time.perf_counter()
    by_shape, skipped = linears_by_shape(module)
    budget = _free_memory() // 2 if memory_budget is None else memory_budget
    replaced: dict[nn.Module, nn.Module] = {}
    choices, extra_bytes = [], 0
    with torch.no_grad():
        for shape in sorted(by_shape, key=lambda shape: -shape[0] * shape[1]):
            linears = by_shape[shape]
            weight_bytes = linears[0].weight.nbytes
            if weight_bytes < MIN_BYTES:
                continue
            fitting = linears[: (budget - extra_bytes) // weight_bytes]
            if len(fitting) < len(linears):
                skipped.append(
                    f"{len(linears) - len(fitting)} x linear {shape[0]}x{shape[1]} stay plain: packed copies "
                    f"may take {budget / 2**20:.0f} MiB"
                )
            if not fitting:
                continue
            choice = _choose(fitting, _candidates(kernels, linears[0].weight), num_rows, most_rows)
            choices.append(choice)
            if choice.kernel == "plain":
                continue
            extra_bytes += weight_bytes * len(fitting)
            for linear in fitting:
                replaced[linear] = PackedLinear(linear, KERNELS[choice.kernel], choice.min_rows, choice.max_rows)
    replace_modules(module, replaced)
    report = PackedReport(tuple(choices), len(replaced), extra_bytes, time.perf_counter() - started, tuple(skipped))
    *details, summary = report.lines()
    for line in details:
        logger.debug(line)
    logger.info(summary)
    return report


def unpack_linears(module: nn.Module) -> int:
    """Put plain nn.Linear modules back, with the same parameters, and free the copies; returns how many."""
    replaced: dict[nn.Module, nn.Module] = {}
    for packed in module.modules():
        if isinstance(packed, PackedLinear):
            linear = nn.Linear(1, 1, bias=False, device="meta")
            linear.in_features, linear.out_features = packed.in_features, packed.out_features
            linear.weight, linear.bias = packed.weight, packed.bias
            replaced[packed] = linear.train(packed.training)
    replace_modules(module, replaced)
    return len(replaced)


def _candidates(names: Collection[str] | None, weight: Tensor) -> list[LinearKernel]:
    """Plain, and what is to be timed against it: the preferred one that can compute with `weight`, or those named."""
    if names is None:
        *_, preferred = (name for name, reason in available_kernels(weight).items() if reason is None)
        names = (preferred,)
    return [kernel for name, kernel in KERNELS.items() if name in {"plain", *names} and kernel.missing(weight) is None]


def linears_by_shape(module: nn.Module) -> tuple[dict[tuple[int, int, torch.dtype], list[nn.Linear]], list[str]]:
    by_shape: dict[tuple[int, int, torch.dtype], list[nn.Linear]] = defaultdict(list)
    skipped = []
    for name, linear in module.named_modules():
        if type(linear) is not nn.Linear or linear is module:
            continue
        if linear.weight.device.type != "cpu":
            skipped.append(f"{name} stays plain: its weight is on {linear.weight.device}")
        elif linear._forward_hooks or linear._forward_pre_hooks:
            skipped.append(f"{name} stays plain: hooks are registered on it")
        else:
            by_shape[*linear.weight.shape, linear.weight.dtype].append(linear)
    return by_shape, skipped


def replace_modules(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> None:
    """Put `replaced[child]` in the place of each child, wherever in `module` it hangs."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in replaced:
                setattr(parent, name, replaced[child])


def _choose(linears: list[nn.Linear], candidates: list[LinearKernel], num_rows: int, most_rows: int) -> ShapeChoice:
    """Time the candidates on a few of `linears` and choose one for all of them."""
    sample = linears[:: max(1, len(linears) // NUM_TIMED_MODULES)][:NUM_TIMED_MODULES]
    weight = sample[0].weight
    trials = [_Trial(kernel, [linear.weight[:NUM_TIMED_OUTPUTS] for linear in sample]) for kernel in candidates]
    x_NI = trials[0].inputs(max(num_rows, 4))
    expected = _expected(x_NI, weight[:NUM_CHECKED_OUTPUTS])
    plain, *others = trials
    plain.agrees(x_NI, *expected)
    trials = [plain, *(trial for trial in others if trial.agrees(x_NI, *expected))]
    row_counts = sorted({1, num_rows})
    time_in_turn(trials, row_counts)

    def step_seconds(trial: _Trial) -> float:
        """One row by the better of the trial and plain, and a step's rows by the trial."""
        return min(trial.seconds[1], plain.seconds[1]) + trial.seconds[num_rows]

    fastest = min(map(step_seconds, trials))
    chosen = [trial for trial in trials if step_seconds(trial) <= (1 + NEAR) * fastest][-1]
    min_rows, max_rows = 1, None
    if chosen is not plain:
        min_rows = 2 if chosen.seconds[1] > (1 + NEAR) * plain.seconds[1] else 1
        max_rows = num_rows
        while max_rows < most_rows:
            more = min(2 * max_rows, most_rows)
            time_in_turn([plain, chosen], [more])
            x_NI = plain.inputs(more)
            is_right = chosen.agrees(x_NI, *_expected(x_NI, weight[:NUM_CHECKED_OUTPUTS]))
            if not is_right or chosen.seconds[more] > plain.seconds[more]:
                break
            max_rows = more
    timings = tuple(KernelTiming(trial.kernel.name, trial.seconds, trial.rows_equal) for trial in trials)
    shape = (weight.shape[0], weight.shape[1])
    return ShapeChoice(*shape, len(linears), chosen.kernel.name, min_rows, max_rows, _reason(timings), timings)


def _for_rows(choice: ShapeChoice) -> str:
    return "" if choice.kernel == "plain" else f" for {choice.min_rows} to {choice.max_rows} rows"


def _reason(timings: tuple[KernelTiming, ...]) -> str:
    def one(timing: KernelTiming) -> str:
        rows = ", ".join(f"{1e6 * seconds:.0f} us for {rows}" for rows, seconds in timing.seconds.items())
        return f"{timing.kernel} {rows}{', rows equal' if timing.rows_equal else ''}"

    return "; ".join(map(one, timings))


class _Trial:
    """One kernel on the weights of a few modules: whether it is right, and how long it takes."""

    def __init__(self, kernel: LinearKernel, sample: list[Tensor]) -> None:
        self.kernel, self.sample = kernel, sample
        self.packed = [kernel.pack(weight) for weight in sample]
        self.rows_equal = False
        self.seconds: dict[int, float] = {}

    def agrees(self, x_NI: Tensor, expected_NO: Tensor, tolerance_NO: Tensor) -> bool:
        """Whether its results for 1, 2 and all rows are the expected ones; notes whether the number of rows matters."""
        results = {size: self._first(x_NI[:size]) for size in {1, 2, len(x_NI)}}
        together_NO = results[len(x_NI)]
        self.rows_equal = all(torch.equal(result, together_NO[:size]) for size, result in results.items())
        columns = slice(expected_NO.shape[1])
        right = all(
            bool(((result[:, columns] - expected_NO[:size]).abs() <= tolerance_NO[:size]).all())
            for size, result in results.items()
        )
        if not right:
            logger.warning("linear kernel %s computes another product than plain: not used", self.kernel.name)
        return right

    def inputs(self, num_rows: int) -> Tensor:
        weight = self.sample[0]
        generator = torch.Generator().manual_seed(0)
        return torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)

    def run(self, x: Tensor) -> float:
        """Seconds a product, over all sampled modules."""
        started = time.perf_counter()
        for weight, packed in zip(self.sample, self.packed, strict=True):
            self.kernel.run(x, packed, weight, None)
        return (time.perf_counter() - started) / len(self.sample)

    def _first(self, x: Tensor) -> Tensor:
        return self.kernel.run(x, self.packed[0], self.sample[0], None)


class Timed(Protocol):
    """Something that can be run on a number of rows and remembers its least seconds by that number."""

    seconds: dict[int, float]

    def inputs(self, num_rows: int) -> Tensor: ...

    def run(self, x: Tensor) -> float: ...


def time_in_turn(trials: Sequence[Timed], row_counts: list[int]) -> None:
    """The least seconds of each trial; they take turns, so that a busy moment of the machine hits all of them."""
    for num_rows in row_counts:
        x = trials[0].inputs(num_rows)
        started = time.perf_counter()
        for round_index in range(MAX_ROUNDS):
            for trial in trials:
                trial.seconds[num_rows] = min(trial.run(x), trial.seconds.get(num_rows, float("inf")))
            if round_index + 1 >= MIN_ROUNDS and time.perf_counter() - started > ROUNDS_SECONDS:
                break


def _expected(x_NI: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Plain's result, and how far rounding may move it: some units of the sum of the sizes of the products in it.

    Weights with few large entries were seen to need five; a product that is wrong is off by thousands.
    """
    size_NO = functional.linear(x_NI.abs(), weight.abs())
    return functional.linear(x_NI, weight), 64 * torch.finfo(x_NI.dtype).eps * size_NO


def _free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(line for line in file if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
