"""Gates that join the products before them: where that is right, where it is not, and back again.

The joined products are for GPUs; here the interpreter runs their kernel, told that every pass is of few rows.
"""

import pytest
import torch
from torch import Tensor, nn

from harness.model_families import FAMILIES, family_target
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.linears.joined_linear import join_linears, part_linears
from peagle.targets import fusing
from peagle.targets.fusing import GatedProduct, fuse

pytest.importorskip("triton")

TOKENS = torch.arange(1, 6)[None]


@pytest.fixture(autouse=True)
def _all_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "is_few", lambda *_, **__: True)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def test_a_llama_leaves_its_gates_to_products_and_takes_them_back() -> None:
    model = tiny_target(num_layers=2).model
    expected, state = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    join_linears(model)
    undo = fuse(model)
    assert sum(isinstance(module, GatedProduct) for module in model.modules()) == 2
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert list(model.state_dict()) == list(state)
    undo()
    part_linears(model)
    assert not any(isinstance(module, GatedProduct) for module in model.modules())
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_with_what_could_be_joined(family: str) -> None:
    model = family_target(family).model
    expected = logits(model)
    join_linears(model)
    fuse(model)
    torch.testing.assert_close(logits(model), expected, atol=2e-3, rtol=2e-3)


def test_a_drafter_leaves_its_gates_to_products() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)

    def run() -> Tensor:
        with torch.no_grad():
            fused = torch.linspace(-1, 1, drafter.config.hidden_size).expand(1, 5, -1)
            return drafter(TOKENS, fused, torch.arange(5)[None], torch.ones(1, 5, 5).tril().bool()).normed_BSD

    expected = run()
    join_linears(drafter)
    undo = fuse(drafter)
    assert all(isinstance(layer.mlp, GatedProduct) for layer in drafter.layers)
    torch.testing.assert_close(run(), expected, atol=1e-4, rtol=1e-4)
    undo()
    torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-5)


def test_an_mlp_that_does_more_than_its_parts_say_is_left_alone() -> None:
    class Doubled(nn.Module):
        """Has the parts of a gated MLP and does something else with them."""

        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
            self.down_proj, self.act_fn = nn.Linear(16, 8, bias=False), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    module, x = nn.Sequential(Doubled()), torch.randn(2, 8)
    with torch.no_grad():
        expected = module(x)
        join_linears(module)
        fuse(module)
        assert not isinstance(module[0], GatedProduct)
        torch.testing.assert_close(module(x), expected)


def test_large_passes_run_the_models_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target(num_layers=2).model
    expected = logits(model)
    join_linears(model)
    fuse(model)
    monkeypatch.setattr(fusing, "is_few", lambda *_, **__: False)
    monkeypatch.setattr(fusing, "gated_linear", lambda *_: pytest.fail("not for many rows"))
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
