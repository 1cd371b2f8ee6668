"""Packed linear layers for the few rows of a decode step on a CPU.

`nn.Linear` with 2 to 16 rows repacks its weight in every call, which costs more than the product. Packing once avoids
that, in one of the forms of `peagle.native.linear_kernels`. The best form that this build of torch supports is timed
against plain for each weight shape, and used for the row counts where it wins: nn.Linear may still win for one row, and
for many.

The parameters stay in place: the drafter shares the target's tables, and fingerprints and state dicts read them. So
every packed weight is a second copy; `PackedReport.extra_bytes` reports their size and `memory_budget` bounds it.

Shapes: N rows, I input width, O output width.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from peagle.errors import ConfigError
from peagle.host_memory import available_bytes
from peagle.native.linear_kernels import KERNELS, LinearKernel, available_kernels, blocks_of
from peagle.native.products import PackedWeight, compile_products

logger = logging.getLogger(__name__)

NUM_TIMED_MODULES = 4
"""Modules timed per shape: several, so that their weights do not all fit the nearest cache."""
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_SECONDS = 2, 8, 0.01
"""Rounds per timing: at least the first, at most the second, until the seconds are over."""
MIN_BYTES = 2**18
"""Smaller weights stay plain: call overhead dominates."""
NUM_TIMED_OUTPUTS, NUM_CHECKED_OUTPUTS = 8192, 1024
"""Output rows of a weight that are timed, and that are compared with plain's result."""
NEAR = 0.05
"""Kernels within this share of the fastest count as equal; the order of KERNELS then decides."""
MOST_ROWS = 256
"""The most rows that a packed form handles; plain is good at longer prompts."""


@dataclass(frozen=True)
class ShapeChoice:
    """The kernel for all modules of one shape, with the measured times."""

    out_features: int
    in_features: int
    num_modules: int
    kernel: str
    min_rows: int
    """With fewer rows `plain` runs."""
    max_rows: int | None
    """With more rows `plain` runs; None: the kernel runs for any number."""
    seconds: dict[str, dict[int, float]]
    """By kernel and row count: the shortest time of one product over several rounds."""

    def __str__(self) -> str:
        rows = f" for {self.min_rows} to {self.max_rows} rows" if self.max_rows else ""
        timings = (
            f"{kernel} {', '.join(f'{1e6 * seconds:.0f} us for {rows}' for rows, seconds in timing.items())}"
            for kernel, timing in self.seconds.items()
        )
        shape = f"{self.num_modules} x linear {self.out_features}x{self.in_features}"
        return f"{shape}: {self.kernel}{rows} ({'; '.join(timings)})"


@dataclass(frozen=True)
class PackedReport:
    """The result of `pack_linears`."""

    choices: tuple[ShapeChoice, ...]
    num_packed: int
    extra_bytes: int
    """size of the packed copies"""
    seconds: float
    skipped: tuple[str, ...]

    def lines(self) -> list[str]:
        """Log lines: one per shape, the layers that were skipped, then the total."""
        size = f"{self.extra_bytes / 2**20:.0f} MiB"
        total = f"packed {self.num_packed} linear layers in {self.seconds:.2f} s, {size} of copies"
        return [*map(str, self.choices), *self.skipped, total]


class PackedLinear(nn.Linear):
    """An nn.Linear with a packed copy of its weight, for inference only.

    The copy is neither a parameter nor a buffer, so the state dict is that of nn.Linear. It does not follow changes of
    the weight: call `repack` afterwards.
    """

    def __init__(self, linear: nn.Linear, kernel: LinearKernel, min_rows: int = 1, max_rows: int | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.kernel, self.min_rows, self.max_rows = kernel, min_rows, max_rows
        self.train(linear.training)
        self.repack()

    @torch.no_grad()
    def repack(self) -> None:
        """Pack the weight as it is now. One that the kernel does not support stays plain."""
        weight, blocks = self.weight.detach(), blocks_of(self.weight)
        is_supported = self.kernel.missing(weight, blocks) is None
        self.packed: Any = self.kernel.pack(weight, blocks) if is_supported else None
        """the copy; None if the kernel does not support the weight"""
        if isinstance(self.packed, PackedWeight):
            compile_products(self.packed, self.bias is not None)

    @property
    def extra_bytes(self) -> int:
        """Size of the copy. Stored forms may have fewer bits than the kernel's usual size says."""
        if isinstance(self.packed, PackedWeight):
            return self.packed.num_bytes
        return round(self.weight.nbytes * self.kernel.size)

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.in_features
        is_few = self.max_rows is None or num_rows <= self.max_rows
        if self.packed is None or num_rows < self.min_rows or not is_few:
            return functional.linear(x, self.weight, self.bias)
        return self.kernel.run(x, self.packed, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kernel={self.kernel.name}, rows={self.min_rows}..{self.max_rows or ''}"


@torch.no_grad()
def pack_linears(
    module: nn.Module,
    num_rows: int = 8,
    most_rows: int | None = None,
    *,
    memory_budget: int | None = None,
    kernels: Collection[str] | None = None,
) -> PackedReport:
    """Replace nn.Linear modules inside `module` by packed ones if that is faster, and log each choice.

    `num_rows` is the usual row count of a step: (draft tokens + 1) x requests. `most_rows` is that of a full batch.
    Packing stops before the copies exceed `memory_budget` bytes, by default half of the available memory; the largest
    weights come first. `kernels` names the candidates to time instead of the preferred one; plain always takes part.
    Only plain nn.Linear modules on the CPU, without hooks and of at least `MIN_BYTES`, are replaced.
    """
    if num_rows < 1:
        raise ConfigError(f"num_rows must be at least 1, got {num_rows}")
    if unknown := sorted(set(kernels or ()) - set(KERNELS)):
        raise ConfigError(f"unknown linear kernels {unknown}", hint=f"known: {', '.join(KERNELS)}")
    most_rows = min(most_rows or MOST_ROWS, MOST_ROWS)
    started = time.perf_counter()
    by_shape, skipped = _linears_by_shape(module)
    budget = available_bytes() // 2 if memory_budget is None else memory_budget
    replaced: dict[nn.Module, nn.Module] = {}
    choices, extra_bytes = [], 0
    for shape in sorted(by_shape, key=lambda shape: -shape.out_features * shape.in_features):
        linears, candidates = by_shape[shape], _candidates(kernels, shape.kernels)
        if len(candidates) == 1:
            continue
        weight_bytes = linears[0].weight.nbytes
        fitting = linears[: int((budget - extra_bytes) / weight_bytes / max(kernel.size for kernel in candidates[1:]))]
        if len(fitting) < len(linears):
            skipped.append(
                f"{len(linears) - len(fitting)} x linear {shape.out_features}x{shape.in_features} stay plain: the "
                f"budget for packed copies is {budget / 2**20:.0f} MiB"
            )
        if not fitting:
            continue
        choice = _choose(fitting, candidates, num_rows, most_rows)
        choices.append(choice)
        if choice.kernel != "plain":
            for linear in fitting:
                packed = PackedLinear(linear, KERNELS[choice.kernel], choice.min_rows, choice.max_rows)
                extra_bytes += packed.extra_bytes
                replaced[linear] = packed
    replace_modules(module, replaced)
    report = PackedReport(tuple(choices), len(replaced), extra_bytes, time.perf_counter() - started, tuple(skipped))
    *details, summary = report.lines()
    for line in details:
        logger.debug(line)
    logger.info(summary)
    return report


def unpack_linears(module: nn.Module) -> int:
    """Restore plain nn.Linear modules with the same parameters and free the copies. Returns their number."""
    replaced: dict[nn.Module, nn.Module] = {}
    for packed in module.modules():
        if isinstance(packed, PackedLinear):
            linear = nn.Linear(1, 1, bias=False, device="meta")
            linear.in_features, linear.out_features = packed.in_features, packed.out_features
            linear.weight, linear.bias = packed.weight, packed.bias
            replaced[packed] = linear.train(packed.training)
    replace_modules(module, replaced)
    return len(replaced)


def _candidates(names: Collection[str] | None, supported: Sequence[str]) -> list[LinearKernel]:
    """Plain, and the kernels to time against it: the preferred one of those supported, or those named."""
    plain, *others = (KERNELS[name] for name in supported)
    return [plain, *(others[-1:] if names is None else (kernel for kernel in others if kernel.name in names))]


class _Shape(NamedTuple):
    """What the linear layers that share a choice have in common."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    kernels: tuple[str, ...]
    """those that support the weight"""


def _linears_by_shape(module: nn.Module) -> tuple[dict[_Shape, list[nn.Linear]], list[str]]:
    by_shape: dict[_Shape, list[nn.Linear]] = defaultdict(list)
    skipped = []
    for name, linear in module.named_modules():
        if type(linear) is not nn.Linear or linear is module or linear.weight.nbytes < MIN_BYTES:
            continue
        if linear.weight.device.type != "cpu":
            skipped.append(f"{name} stays plain: its weight is on {linear.weight.device}")
        elif linear._forward_hooks or linear._forward_pre_hooks:
            skipped.append(f"{name} stays plain: hooks are registered on it")
        else:
            kernels = tuple(kernel for kernel, reason in available_kernels(linear.weight).items() if reason is None)
            shape = _Shape(linear.out_features, linear.in_features, linear.weight.dtype, kernels)
            by_shape[shape].append(linear)
    return by_shape, skipped


def replace_modules(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> None:
    """Replace each child of `module`, at any depth, by `replaced[child]`."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in replaced:
                setattr(parent, name, replaced[child])


def _choose(linears: list[nn.Linear], candidates: list[LinearKernel], num_rows: int, most_rows: int) -> ShapeChoice:
    """Time the candidates on some of `linears` and choose one for all."""
    sample = linears[:: max(1, len(linears) // NUM_TIMED_MODULES)][:NUM_TIMED_MODULES]
    plain, *others = (_Trial(kernel, sample) for kernel in candidates)
    trials = [plain, *(trial for trial in others if trial.is_right(max(num_rows, 4)))]
    time_in_turn(trials, sorted({1, num_rows}))

    def step_seconds(trial: _Trial) -> float:
        """One row with the better of the trial and plain, plus a step's rows with the trial."""
        return min(trial.seconds[1], plain.seconds[1]) + trial.seconds[num_rows]

    fastest = min(map(step_seconds, trials))
    chosen = [trial for trial in trials if step_seconds(trial) <= (1 + NEAR) * fastest or trial.kernel.is_best][-1]
    min_rows, max_rows = 1, None
    if chosen is not plain and not chosen.is_for_prompts:
        is_slow = chosen.seconds[1] > (1 + NEAR) * plain.seconds[1] and not chosen.kernel.is_best
        min_rows = 2 if is_slow else 1
        max_rows = num_rows
        while max_rows < most_rows:
            more = min(2 * max_rows, most_rows)
            time_in_turn([plain, chosen], [more])
            if not chosen.is_right(more) or chosen.seconds[more] > plain.seconds[more]:
                break
            max_rows = more
    shape = (linears[0].out_features, linears[0].in_features)
    seconds = {trial.kernel.name: trial.seconds for trial in trials}
    return ShapeChoice(*shape, len(linears), chosen.kernel.name, min_rows, max_rows, seconds)


class _Trial:
    """One kernel on the weights of a few modules: is it correct, and how fast."""

    def __init__(self, kernel: LinearKernel, sample: Sequence[nn.Linear]) -> None:
        self.kernel = kernel
        self.sample = []
        for linear in sample:
            weight, blocks = linear.weight.detach()[:NUM_TIMED_OUTPUTS], blocks_of(linear.weight)
            self.sample.append((kernel.pack(weight, blocks and blocks.rows(len(weight))), weight))
        self.seconds: dict[int, float] = {}

    @property
    def is_for_prompts(self) -> bool:
        """Whether it is fast for any number of rows."""
        packed, _ = self.sample[0]
        return isinstance(packed, PackedWeight) and packed.is_for_prompts

    def inputs(self, num_rows: int) -> Tensor:
        _, weight = self.sample[0]
        return torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)

    def is_right(self, num_rows: int) -> bool:
        """Whether its results for 1, 2 and `num_rows` rows equal plain's up to rounding.

        The tolerance is 64 units of the sum of absolute products. Weights with few large entries need about five; wrong
        results are off by thousands.
        """
        packed, weight = self.sample[0]
        x_NI, checked_OI = self.inputs(num_rows), weight[:NUM_CHECKED_OUTPUTS]
        expected_NO = functional.linear(x_NI, checked_OI)
        tolerance_NO = 64 * torch.finfo(x_NI.dtype).eps * functional.linear(x_NI.abs(), checked_OI.abs())
        for size in {1, 2, num_rows}:
            found_NO = self.kernel.run(x_NI[:size], packed, weight, None)[:, : len(checked_OI)]
            if not ((found_NO - expected_NO[:size]).abs() <= tolerance_NO[:size]).all():
                logger.warning("linear kernel %s gives wrong results: not used", self.kernel.name)
                return False
        return True

    def run(self, x: Tensor) -> float:
        """Seconds per product, over all sampled modules."""
        started = time.perf_counter()
        for packed, weight in self.sample:
            self.kernel.run(x, packed, weight, None)
        return (time.perf_counter() - started) / len(self.sample)


def time_in_turn(trials: Sequence[_Trial], row_counts: list[int]) -> None:
    """Record the shortest time of each trial. Trials alternate, so that other load affects all of them."""
    for num_rows in row_counts:
        x = trials[0].inputs(num_rows)
        started = time.perf_counter()
        for round_index in range(MAX_ROUNDS):
            for trial in trials:
                trial.seconds[num_rows] = min(trial.run(x), trial.seconds.get(num_rows, float("inf")))
            if round_index + 1 >= MIN_ROUNDS and time.perf_counter() - started > ROUNDS_SECONDS:
                break
