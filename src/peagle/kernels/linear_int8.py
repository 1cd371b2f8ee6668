"""Linear layers with 8-bit weights for CPUs: a quarter of the memory traffic, an offered option and never a default.

The quantized model is another target than the float one: lossless then means equal to the quantized model. So a row
must give the same result whatever rows go with it, and a difference in the last bit of an input must stay one. Torch's
own dynamic quantization has neither property: it takes the input's scale from the whole batch and keeps 8 bits of it,
and a flipped rounding then grows to whole logits. Here only the weight is rounded; the input is split, exactly to
float32 rounding, into three 8-bit digits of base 254, which run as three rows of one integer product:

    weight  q[o, i] = round(w[o, i] / s[o])                               s[o] = max |w[o, :]| / 127
    input   x[n, i] = a[n] * (d0 + d1 / 254 + d2 / 254^2)[n, i]           a[n] = max |x[n, :]| / 127
    result  y[n, o] = a[n] * s[o] * sum over p of (dp[n, :] . q[o, :]) / 254^p + bias[o]

The sums are exact in 32-bit integers, so every implementation gives the same result. Worked example, one input of
x = 0.3 in a row whose largest is 1.27, so a = 0.01: 0.3 / a = 30 = 30 + 0 / 254 + 0 / 254^2; and for x = 0.305:
30.5 = 30 + 127 / 254 + 0 / 254^2 (30.5 rounds to the even 30, the rest of 0.5 is the digit 127).

    fbgemm   x86-64; exact only where 8-bit dot products do not saturate, which is checked
    onednn   x86-64 and ARM
    int_mm   torch's plain integer product: everywhere

Shapes: N rows, P digits, R = P * N rows of digits, I input width, O output width.
"""

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import ConfigError
from peagle.kernels.linear import linears_by_shape, replace_modules, time_in_turn

logger = logging.getLogger(__name__)

LARGEST = 127
BASE = 2 * LARGEST
NUM_DIGITS = 3
NUM_TIMED_MODULES = 4


@dataclass(frozen=True)
class Int8Kernel:
    """`pack(q_OI, scale_O)` once; `run(digits_RI, packed)` gives (digits . q) * scale.

    The digits are whole numbers of float32 where `takes_float`, else int8.
    """

    name: str
    pack: Callable[[Tensor, Tensor], Any]
    run: Callable[[Tensor, Any], Tensor]
    takes_float: bool
    missing: Callable[[], str | None]


@dataclass(frozen=True)
class QuantizedReport:
    """What `quantize_linears` did: the kernel of each shape with its reason, and the bytes of weights it freed."""

    choices: tuple[str, ...]
    num_quantized: int
    freed_bytes: int
    seconds: float
    skipped: tuple[str, ...]

    def lines(self) -> list[str]:
        total = f"{self.num_quantized} quantized in {self.seconds:.2f} s, {self.freed_bytes / 2**20:.0f} MiB freed"
        return [*self.choices, total, *self.skipped]


class Int8Linear(nn.Module):
    """A linear layer with an 8-bit weight. `weight` is the float one where somebody else uses it too, else None.

    The 8-bit weight is no parameter and no buffer; it follows neither `.to` nor `.load_state_dict`.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, kernel: Int8Kernel, keep_weight: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight if keep_weight else None
        self.bias = linear.bias
        self.kernel = kernel
        q_OI, scale_O = quantize_weight(linear.weight.detach())
        self._packed = kernel.pack(q_OI, scale_O)

    def forward(self, x: Tensor) -> Tensor:
        y = multiply(x.reshape(-1, self.in_features), self.kernel, self._packed)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kernel={self.kernel.name}"


def quantize_linears(
    module: nn.Module, num_rows: int = 8, *, keep_weights: bool = False, kernel: str | None = None
) -> QuantizedReport:
    """Replace the nn.Linear modules inside `module` by 8-bit ones, in place, and free their float weights.

    Weights that a module outside also uses, such as an embedding tied to the head, stay; `keep_weights` keeps all.
    There is no way back without them. A fingerprint of the parameters is another one afterwards, so check a drafter's
    card first. `kernel` forces an implementation; by default the fastest of those that compute exactly is taken.
    """
    if kernel is not None and kernel not in KERNELS:
        raise ConfigError(f"unknown 8-bit kernel {kernel!r}", hint=f"known: {', '.join(KERNELS)}")
    started = time.perf_counter()
    by_shape, skipped = linears_by_shape(module)
    uses: dict[Tensor, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            uses[parameter] = uses.get(parameter, 0) + 1
    replaced: dict[nn.Module, nn.Module] = {}
    choices, freed_bytes = [], 0
    with torch.no_grad():
        for (num_outputs, num_inputs, _), linears in by_shape.items():
            chosen, reason = _choose(linears, num_rows, kernel)
            choices.append(f"{len(linears)} x linear {num_outputs}x{num_inputs}: int8 by {chosen.name} ({reason})")
            for linear in linears:
                keep = keep_weights or uses[linear.weight] > 1
                freed_bytes += 0 if keep else linear.weight.nbytes - linear.weight.numel()
                replaced[linear] = Int8Linear(linear, chosen, keep).train(linear.training)
    replace_modules(module, replaced)
    report = QuantizedReport(tuple(choices), len(replaced), freed_bytes, time.perf_counter() - started, tuple(skipped))
    for line in report.lines():
        logger.info(line)
    return report


def quantize_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weight and the scale of each output row; a row of zeros gets scale 1."""
    weight_OI = weight_OI.float()
    scale_O = weight_OI.abs().amax(1) / LARGEST
    scale_O = torch.where(scale_O == 0, 1.0, scale_O)
    return (weight_OI / scale_O[:, None]).round_().to(torch.int8), scale_O


def multiply(x_NI: Tensor, kernel: Int8Kernel, packed: Any) -> Tensor:
    """The product of the module's docstring, without the bias, in the dtype of x."""
    x_float_NI = x_NI.float()
    # The tiny floor keeps a row of zeros from dividing zero by zero.
    scale_N1 = torch.linalg.vector_norm(x_float_NI, float("inf"), -1, keepdim=True).mul_(1 / LARGEST).clamp_min_(1e-30)
    rounded_PNI = ((x_float_NI / scale_N1) * _fineness()).round_()
    # What each rounding adds to the coarser one before it is a digit of at most 127.
    finer_PNI = torch.sub(rounded_PNI[1:], rounded_PNI[:-1], alpha=BASE)
    digits_RI = torch.cat((rounded_PNI[:1], finer_PNI)).flatten(0, 1)
    products_PNO = kernel.run(digits_RI if kernel.takes_float else digits_RI.to(torch.int8), packed).unflatten(
        0, (NUM_DIGITS, -1)
    )
    y_NO = products_PNO[-1]
    for product_NO in reversed(products_PNO[:-1].unbind()):
        y_NO = torch.add(product_NO, y_NO, alpha=1 / BASE)
    return (y_NO * scale_N1).to(x_NI.dtype)


@cache
def _fineness() -> Tensor:
    return torch.tensor([float(BASE) ** index for index in range(NUM_DIGITS)]).view(-1, 1, 1)


def available_kernels() -> dict[str, str | None]:
    """Every implementation's name with None where it computes exactly here, else with the reason."""
    return {name: kernel.missing() or _inexact(kernel) for name, kernel in KERNELS.items()}


def _choose(linears: list[nn.Linear], num_rows: int, name: str | None) -> tuple[Int8Kernel, str]:
    missing = available_kernels()
    usable = [kernel for kernel in KERNELS.values() if missing[kernel.name] is None]
    if name is not None:
        if missing[name] is not None:
            raise ConfigError(f"the 8-bit kernel {name!r} cannot be used: {missing[name]}")
        return KERNELS[name], "asked for"
    trials = [_Trial(kernel, linears[:NUM_TIMED_MODULES]) for kernel in usable]
    time_in_turn(trials, sorted({1, num_rows}))
    fastest = min(trials, key=lambda trial: sum(trial.seconds.values()))
    reason = "; ".join(
        f"{trial.kernel.name} " + ", ".join(f"{1e6 * seconds:.0f} us for {n}" for n, seconds in trial.seconds.items())
        for trial in trials
    )
    return fastest.kernel, reason


class _Trial:
    """One implementation on the weights of a few modules, to be timed."""

    def __init__(self, kernel: Int8Kernel, sample: list[nn.Linear]) -> None:
        self.kernel = kernel
        self.num_inputs = sample[0].in_features
        self.packed = [kernel.pack(*quantize_weight(linear.weight.detach())) for linear in sample]
        self.seconds: dict[int, float] = {}

    def inputs(self, num_rows: int) -> Tensor:
        return torch.randn(num_rows, self.num_inputs, generator=torch.Generator().manual_seed(0))

    def run(self, x: Tensor) -> float:
        started = time.perf_counter()
        for packed in self.packed:
            multiply(x, self.kernel, packed)
        return (time.perf_counter() - started) / len(self.packed)


def _inexact(kernel: Int8Kernel) -> str | None:
    """Why an implementation is not exact on this processor; some saturate sums of large products to 16 bits."""
    q_OI = torch.full((32, 64), LARGEST, dtype=torch.int8)
    q_OI[1::2] = -LARGEST
    q_OI[2] = torch.arange(64).to(torch.int8) - 32
    digits_RI = torch.full((3, 64), float(LARGEST))
    digits_RI[1] = -LARGEST
    digits_RI[2] = torch.arange(64) * 2.0 - 64
    expected_NO = (digits_RI.double() @ q_OI.double().t()).float()
    packed = kernel.pack(q_OI, torch.ones(32))
    try:
        result_NO = kernel.run(digits_RI if kernel.takes_float else digits_RI.to(torch.int8), packed)
    except (RuntimeError, NotImplementedError) as error:
        return f"it fails here: {str(error).splitlines()[0]}"
    return None if torch.equal(result_NO, expected_NO) else "its sums saturate on this processor"


def _pack_fbgemm(q_OI: Tensor, scale_O: Tensor) -> Any:
    zero_points_O = torch.zeros(len(scale_O), dtype=torch.long)
    with warnings.catch_warnings():
        # torch announces the end of its quantized tensors; this one only carries the weight into the packed form.
        warnings.simplefilter("ignore")
        quantized = torch._make_per_channel_quantized_tensor(q_OI, scale_O.double(), zero_points_O, 0)
        return torch.ops.quantized.linear_prepack(quantized, None)


def _run_fbgemm(digits_RI: Tensor, packed: Any) -> Tensor:
    # It converts its input itself and wants it unsigned: digit + 128.
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits_RI, 1.0, LARGEST + 1, packed)


def _pack_onednn(q_OI: Tensor, scale_O: Tensor) -> Any:
    return torch.ops.onednn.qlinear_prepack(q_OI, None), scale_O, torch.zeros(len(scale_O), dtype=torch.int32)


def _run_onednn(digits_RI: Tensor, packed: Any) -> Tensor:
    q, scale_O, zero_points_O = packed
    return torch.ops.onednn.qlinear_pointwise(
        digits_RI, 1.0, 0, q, scale_O, zero_points_O, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _run_int_mm(digits_RI: Tensor, packed: Any) -> Tensor:
    q_IO, scale_O = packed
    return torch._int_mm(digits_RI, q_IO).float().mul_(scale_O)


def _missing_fbgemm() -> str | None:
    engines = torch.backends.quantized.supported_engines
    has = hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")
    return None if has and {"fbgemm", "x86"} & set(engines) else "this build of torch has no FBGEMM"


def _missing_onednn() -> str | None:
    has = hasattr(torch.ops.onednn, "qlinear_pointwise") and "onednn" in torch.backends.quantized.supported_engines
    return None if has else "this build of torch has no oneDNN for 8-bit integers"


KERNELS: dict[str, Int8Kernel] = {
    kernel.name: kernel
    for kernel in (
        Int8Kernel("fbgemm", _pack_fbgemm, _run_fbgemm, True, _missing_fbgemm),
        Int8Kernel("onednn", _pack_onednn, _run_onednn, False, _missing_onednn),
        Int8Kernel("int_mm", lambda q_OI, scale_O: (q_OI.t(), scale_O), _run_int_mm, False, lambda: None),
    )
}
"""by name"""
