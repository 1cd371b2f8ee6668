"""Operators inside compiled code: one compilation serves every batch size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.candidate_tree import grow_tree_on_gpu
from peagle.kernels.choose import choose_tokens
from peagle.kernels.likeliest import likeliest, likeliest_tokens


def choose(logits_NV: Tensor) -> Tensor:
    zero_N, one_N = torch.zeros_like(logits_NV[:, 0]), torch.ones_like(logits_NV[:, 0])
    number_N = zero_N.long()
    return choose_tokens(logits_NV, zero_N, number_N.int(), one_N, zero_N, number_N, number_N, 0)


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "choose_tokens": choose,
    "likeliest": likeliest,
    "likeliest_tokens": lambda logits_NV: likeliest_tokens(logits_NV, 4),
    "grow_tree": lambda logits_NV: grow_tree_on_gpu(logits_NV.log_softmax(-1).view(-1, 2, 4), 5),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_compiled_once_for_all_batch_sizes(name: str) -> None:
    if name == "grow_tree":
        pytest.importorskip("triton")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(OPERATORS[name], dynamic=True, backend=backend)
    for num_rows in (3, 6, 5):
        run(torch.randn(num_rows, 8))
    assert len(graphs) == 1
