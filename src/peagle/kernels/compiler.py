"""The one door to torch's compiler."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

NOTES = (
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    "Online softmax is disabled on the fly",
)
"""beginnings of what torch's compiler tells users of a GPU and they can do nothing about"""
MOST_VARIANTS = 64
"""shapes and kinds of layers for which one function is compiled; torch would give up after 8, and run it as it is"""


def compiled(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    """`function`, compiled at its first call: for any batch size at once where `dynamic`, else for each shape.

    The compiler advises to let float32 products round to 10 bits, but float32 is what answers are compared in here; and
    it says which softmax it splits, of the experts' routers. Neither is passed on.
    """
    for note in NOTES:
        warnings.filterwarnings("ignore", message=rf"\s*{note}", category=UserWarning)
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, MOST_VARIANTS)
    return torch.compile(function, dynamic=dynamic)
