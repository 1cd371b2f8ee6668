"""Linear layers with weights in few bits: alone, joined, behind a gate, and given back. Triton is interpreted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from peagle.linears import skinny_linear
from peagle.linears.few_bit import FORMS, dequantize
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.linears.joined_linear import JoinedPart, join_linears, part_linears
from peagle.linears.skinny_linear import join_sums
from peagle.targets.fusing import GatedProduct, fuse

pytest.importorskip("triton")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture
def runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linear, "reads_codes", lambda _: True)


def few_bit(size: int, num_outputs: int, form: str, *, bias: bool = False) -> FewBitLinear:
    return FewBitLinear.from_linear(nn.Linear(size, num_outputs, bias=bias), form).requires_grad_(False)


class Block(nn.Module):
    """Attention and a gated MLP, as far as linear layers go."""

    def __init__(self, form: str, *, bias: bool, zero: bool = False) -> None:
        super().__init__()
        for name, size, num_outputs in (
            ("q_proj", 96, 32),
            ("k_proj", 96, 16),
            ("v_proj", 96, 16),
            ("gate_proj", 96, 40),
            ("up_proj", 96, 40),
            ("down_proj", 40, 96),
        ):
            setattr(self, name, few_bit(size, num_outputs, form, bias=bias))
        self.act_fn, self.norm = nn.SiLU(), nn.Parameter(torch.ones(96))
        if zero:
            for part in self.children():
                if isinstance(part, FewBitLinear):
                    part.zero = torch.randint(-3, 4, part.scale.shape, dtype=torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def attended(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_layer_computes_with_the_dequantized_weight(form: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = few_bit(96, 24, form, bias=bias), torch.randn(2, 3, 96)
    expected = functional.linear(x, dequantize(layer.stored), layer.bias)
    assert torch.equal(layer(x), expected), "a CPU computes with the plain weight"
    assert torch.equal(layer.to_linear(torch.float32)(x), expected)
    monkeypatch.setattr(skinny_linear, "reads_codes", lambda _: True)
    torch.testing.assert_close(layer(x), expected, **CLOSE)
    names = {"words", "scale", "bias"} if bias else {"words", "scale"}
    assert set(layer.state_dict()) == names


@pytest.mark.parametrize(
    ("form", "bias", "zero"),
    [
        ("int4", False, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("int8", True, False), ("fp8", False, False))),
    ],
)
@torch.no_grad()
def test_joined_layers_answer_as_separate_ones_and_are_given_back(
    form: str, bias: bool, zero: bool, runs_kernels: None
) -> None:
    block = Block(form, bias=bias, zero=zero)
    x, state = torch.randn(5, 96), {name: tensor.clone() for name, tensor in block.state_dict().items()}
    expected, attended = block(x), block.attended(x)
    assert join_linears(block) == 0 and join_linears(block, few_bit=True) == 2
    undo = fuse(block)
    assert isinstance(block, GatedProduct)
    torch.testing.assert_close(block(x), expected, **CLOSE)
    torch.testing.assert_close(block.attended(x), attended, **CLOSE)
    undo()
    for change, num_parts in ((lambda _: None, 5), (part_linears, 0)):
        change(block)
        assert sum(isinstance(part, JoinedPart) for part in block.modules()) == num_parts
        assert block.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())
    torch.testing.assert_close(block(x), expected, **CLOSE)
    assert block.q_proj.words.untyped_storage().nbytes() == block.q_proj.words.nbytes, "memory of its own"


@pytest.mark.parametrize("num_rows", [3, 70])
@torch.no_grad()
def test_a_gate_takes_any_number_of_rows(num_rows: int, runs_kernels: None) -> None:
    block, x = Block("int8", bias=False), torch.randn(num_rows, 96)
    expected = block(x)
    join_linears(block, few_bit=True)
    fuse(block)
    block.act_fn = None  # no code but ours runs
    torch.testing.assert_close(block(x), expected, **CLOSE)


def test_layers_of_different_forms_are_left_alone() -> None:
    block = Block("int8", bias=False)
    block.up_proj, block.k_proj = few_bit(96, 40, "fp8"), nn.Linear(96, 16, bias=False)
    assert join_linears(block, few_bit=True) == 0


@torch.no_grad()
def test_compiled_code_is_shared_and_takes_sums_into_the_product(runs_kernels: None) -> None:
    blocks, x = [Block("int4", bias=False) for _ in range(2)], torch.randn(3, 96)
    expected = [x + block(x) for block in blocks]
    for block in blocks:
        join_linears(block, few_bit=True)
        fuse(block)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        def forward(traced: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            join_sums(traced.graph)
            traced.recompile()
            graphs.append(traced)
            return traced.forward

        return aot_autograd(fw_compiler=forward)(graph, inputs)

    torch._dynamo.reset()
    run = torch.compile(lambda block, x: x + block(x), dynamic=True, backend=backend)
    for block, wanted in zip(blocks, expected, strict=True):
        torch.testing.assert_close(run(block, x), wanted, **CLOSE)
    run(blocks[0], torch.randn(70, 96))
    (graph,) = graphs
    products = graph.graph.find_nodes(op="call_function", target=torch.ops.peagle.few_bit.default)
    assert [product.args[3] is not None for product in products] == [False, True]
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
