"""Linear layers whose results need not be exact, as products of integers (`peagle.native.integers`)."""

import torch
from torch import nn

from peagle.host_memory import available_bytes
from peagle.native.integers import missing_for
from peagle.native.linear_kernels import LinearKernel, run_stored
from peagle.native.packed_linear import PackedLinear, replace_modules
from peagle.native.products import lanes, pack_integers

ROUNDED = LinearKernel(
    "integers",
    lambda weight, _: pack_integers(weight),
    run_stored,
    lambda weight, _: missing_for(weight, lanes()),
    size=0.25,
)


@torch.no_grad()
def round_linears(module: nn.Module) -> str | None:
    """Let all linear layers inside `module` round their weights and inputs; or say why they cannot.

    Weights, scales and state dict stay as they are; `unpack_linears` undoes it.
    """
    linears = [each for each in module.modules() if type(each) is nn.Linear]
    reasons = [reason for each in linears if (reason := missing_for(each.weight, lanes()))]
    num_bytes = sum(each.weight.numel() for each in linears)  # one per weight
    if num_bytes > available_bytes() // 2:
        reasons.append(f"{num_bytes / 2**20:.0f} MiB of copies are more than half of the available memory")
    if not reasons:
        replace_modules(module, {each: PackedLinear(each, ROUNDED) for each in linears})
    return reasons[0] if reasons else None
