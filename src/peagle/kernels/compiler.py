"""The single use of torch.compile, with its settings."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

NOTES = (
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    "Online softmax is disabled on the fly",
)
"""Prefixes of compiler warnings that users cannot act on."""
MAX_VARIANTS = 64
"""Variants (shapes, layer types) per compiled function. torch would fall back to eager after 8."""

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a faster function with the same results; the identity without a compiler."""


def compiled(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    """`function`, compiled at its first call: once for all batch sizes if `dynamic`, else per shape.

    Hides two warnings: the advice to use TensorFloat32, since exact comparisons need float32, and a note on the softmax
    of expert routers.
    """
    for note in NOTES:
        warnings.filterwarnings("ignore", message=rf"\s*{note}", category=UserWarning)
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, MAX_VARIANTS)
    return torch.compile(function, dynamic=dynamic)
