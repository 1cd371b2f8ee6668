"""The k largest of few columns, as the routers of experts choose.

`torch.topk` selects by radix and then sorts, in several kernels that torch.compile keeps. For one row of 128 scores
they take as long as the experts themselves.
"""

from typing import Any

import torch
from torch import Tensor, fx

MOST_COLUMNS = 1024
MOST_CHOSEN = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("peagle::top_k", mutates_args=())
def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` over the last dimension: values and indices, the largest first, the lowest index among equals.

    Up to `MOST_COLUMNS` columns and `MOST_CHOSEN` of them. With NaN the indices are arbitrary, but exist.
    """
    from peagle.experts.top_k_triton import top_k_triton

    return top_k_triton(x, k)


@top_k.register_fake
def _(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = x.new_empty(*x.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)


def use_top_k(graph: fx.Graph) -> None:
    """In a compiled graph for a GPU, replace `torch.topk` where `top_k` does the same."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
        names = ("self", "k", "dim", "largest", "sorted")
        given = {"dim": -1, "largest": True, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        if given["largest"] is True and _is_small(given["self"].meta.get("val"), given["k"], given["dim"]):
            with graph.inserting_before(node):
                chosen = graph.call_function(torch.ops.peagle.top_k.default, (given["self"], given["k"]))
            chosen.meta.update(node.meta)
            node.replace_all_uses_with(chosen)
            graph.erase_node(node)


def _is_small(x: Any, k: Any, dim: Any) -> bool:
    """Whether the kernel takes these arguments, whose sizes are symbols where they are not known."""
    if not isinstance(x, Tensor) or not x.is_cuda or x.dtype not in DTYPES:
        return False
    if x.ndim == 0 or dim not in (-1, x.ndim - 1):
        return False
    sizes: tuple[Any, Any] = (x.shape[-1], k)
    return all(isinstance(size, int) for size in sizes) and sizes[0] <= MOST_COLUMNS and 0 < sizes[1] <= MOST_CHOSEN
