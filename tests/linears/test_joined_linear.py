"""Projections joined into one product: the same names, values and results, and taken apart again."""

import pytest
import torch
from torch import nn

from harness.model_families import FAMILIES, family_target
from peagle.linears.joined_linear import JoinedPart, join_linears, part_linears


class Block(nn.Module):
    def __init__(self, *, bias: bool = False, other_size: int = 8) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(other_size, 4, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_joining_and_parting_keep_the_state_dict_and_the_results(bias: bool) -> None:
    block = Block(bias=bias)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    parameters = dict(block.named_parameters())
    inputs = [torch.randn(3, 8), torch.randn(1, 5, 8)]
    wanted = [block(x) for x in inputs]
    for change, num_parts in ((join_linears, 3), (part_linears, 0)):
        change(block)
        assert sum(isinstance(part, JoinedPart) for part in block.modules()) == num_parts
        assert block.state_dict().keys() == before.keys()
        assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
        for x, result in zip(inputs, wanted, strict=True):
            assert torch.allclose(block(x), result, atol=1e-6)
    assert type(block.q_proj) is nn.Linear
    assert all(parameter is parameters[name] for name, parameter in block.named_parameters()), "an optimizer has them"
    assert all(parameter.requires_grad for parameter in block.parameters())
    assert block.q_proj.weight.untyped_storage().nbytes() == 12 * 8 * 4, "memory of its own, not a view"


@torch.no_grad()
def test_a_part_asked_alone_or_out_of_order_answers_for_the_input_it_is_given() -> None:
    block = Block()
    first, second = torch.randn(2, 8), torch.randn(2, 8)
    wanted = [(block.q_proj(x), block.v_proj(x)) for x in (first, second)]
    assert join_linears(block) == 1
    assert torch.allclose(block.q_proj(first), wanted[0][0], atol=1e-6)
    assert torch.allclose(block.v_proj(second), wanted[1][1], atol=1e-6), "the product of another input is not used"
    assert torch.allclose(block.q_proj(second), wanted[1][0], atol=1e-6)
    assert torch.allclose(block.v_proj(first), wanted[0][1], atol=1e-6)


def test_layers_of_different_inputs_are_left_alone() -> None:
    assert join_linears(Block(other_size=6)) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_joined_and_parted(family: str) -> None:
    target = family_target(family)
    token_ids = torch.arange(5, 25)[None]
    before = target.forward(token_ids).logits_BTV
    keys = list(target.model.state_dict())
    assert join_linears(target.model) > 0, "there is something to join"
    assert torch.allclose(target.forward(token_ids).logits_BTV, before, atol=2e-4)
    part_linears(target.model)
    assert torch.allclose(target.forward(token_ids).logits_BTV, before, atol=1e-5)
    assert list(target.model.state_dict()) == keys
