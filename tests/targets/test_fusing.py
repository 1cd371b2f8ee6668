"""Norms and gates that join the products beside them: where that is right, where it is not, and back again.

The joined products are for GPUs; here the interpreter runs their kernel, told that every pass is of few rows.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from families import FAMILIES, family_target
from peagle.kernels import joined_linear
from peagle.kernels.joined_linear import join_linears, joined_groups, part_linears
from peagle.targets import fusing
from peagle.targets.fusing import GatedProduct, LeftToProduct, fuse
from tiny import tiny_drafter, tiny_target

pytest.importorskip("triton")

TOKENS = torch.arange(1, 6)[None]


@pytest.fixture(autouse=True)
def _all_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joined_linear, fusing):
        monkeypatch.setattr(module, "is_few", lambda x: True)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def test_a_llama_leaves_all_its_layer_norms_and_gates_to_products() -> None:
    model = tiny_target(num_layers=2).model
    expected, state = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    join_linears(model)
    undo = fuse(model, lambda: logits(model))
    assert sum(isinstance(module, LeftToProduct) for module in model.modules()) == 4, "two in each layer"
    assert sum(isinstance(module, GatedProduct) for module in model.modules()) == 2
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert list(model.state_dict()) == list(state)
    undo()
    part_linears(model)
    assert not any(isinstance(module, LeftToProduct | GatedProduct) for module in model.modules())
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_with_what_could_be_joined(family: str) -> None:
    model = family_target(family).model
    expected = logits(model)
    join_linears(model)
    fuse(model, lambda: logits(model))
    torch.testing.assert_close(logits(model), expected, atol=2e-3, rtol=2e-3)


def test_a_drafter_leaves_its_norms_to_products_where_one_input_is_read() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)

    def run() -> Tensor:
        with torch.no_grad():
            fused = torch.linspace(-1, 1, drafter.config.hidden_size).expand(1, 5, -1)
            return drafter(TOKENS, fused, torch.arange(5)[None], torch.ones(1, 5, 5).tril().bool()).normed_BSD

    expected = run()
    join_linears(drafter)
    undo = fuse(drafter, run)
    assert not isinstance(drafter.layers[0].input_layernorm, LeftToProduct), "the first layer concatenates two norms"
    assert isinstance(drafter.layers[1].input_layernorm, LeftToProduct)
    torch.testing.assert_close(run(), expected, atol=1e-4, rtol=1e-4)
    undo()
    torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-5)


def test_a_norm_that_somebody_else_reads_too_is_left_alone() -> None:
    class ReadsTwice(nn.Module):
        """Adds the normed rows themselves to the projections: they must stay normed."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = copy.deepcopy(tiny_target(num_layers=1).model.model.norm)
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            rows = self.norm(x)
            return rows + self.q_proj(rows) + self.k_proj(rows) + self.v_proj(rows)

    module, x = ReadsTwice(), 5 * torch.randn(2, 64)
    with torch.no_grad():
        expected = module(x)
        join_linears(module)
        fuse(module, lambda: module(x))
        assert not isinstance(module.norm, LeftToProduct)
        assert joined_groups(module)[0].norm is None
        torch.testing.assert_close(module(x), expected)


def test_large_passes_run_the_models_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target(num_layers=2).model
    expected = logits(model)
    join_linears(model)
    fuse(model, lambda: logits(model))
    for module in (joined_linear, fusing):
        monkeypatch.setattr(module, "is_few", lambda x: False)
    monkeypatch.setattr(joined_linear, "normed_linear", lambda *_: pytest.fail("not for many rows"))
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
