"""The one door to torch's compiler."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

ADVICE = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled"


def compiled(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    """`function`, compiled at its first call: for any batch size at once where `dynamic`, else for each shape.

    The compiler advises every user of a GPU to let float32 products round to 10 bits. Here float32 is what answers are
    compared in, so the advice is not passed on.
    """
    warnings.filterwarnings("ignore", message=ADVICE, category=UserWarning)
    return torch.compile(function, dynamic=dynamic)
