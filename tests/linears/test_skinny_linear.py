"""Products of a few rows: our kernel against torch's, and the layers that use it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from peagle.linears.skinny_linear import (
    ACTIVATIONS,
    MANY_ROWS,
    MORE_ROWS,
    SkinnyLinear,
    gated_linear,
    is_few,
    join_sums,
    most_rows,
    skinny_linear,
    use_plain_linears,
    use_skinny_linears,
    use_skinny_products,
)
from peagle.linears.tilings import FEW_ROWS, LinearTiling

triton = pytest.importorskip("triton")
CUT = LinearTiling(columns=16, step=32, num_warps=4, num_stages=2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("num_rows", [1, 5, FEW_ROWS, 39])
@pytest.mark.parametrize(("num_columns", "size"), [(48, 64), (50, 72), (16, 40)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernel_equals_torch(num_rows: int, num_columns: int, size: int, has_bias: bool) -> None:
    from peagle.linears.skinny_linear_triton import skinny_linear_triton

    x = torch.randn(num_rows, size, device=DEVICE)
    weight = torch.randn(num_columns, size, device=DEVICE)
    bias = torch.randn(num_columns, device=DEVICE) if has_bias else None
    found = skinny_linear_triton(x, weight, bias, None, None, CUT)
    torch.testing.assert_close(found, nn.functional.linear(x, weight, bias), atol=2e-5, rtol=2e-5)


def test_kernel_takes_rows_that_lie_apart() -> None:
    from peagle.linears.skinny_linear_triton import skinny_linear_triton

    wide, weight = torch.randn(4, 96, device=DEVICE), torch.randn(20, 32, device=DEVICE)
    found = skinny_linear_triton(wide[:, 32:64], weight, None, None, None, CUT)
    torch.testing.assert_close(found, wide[:, 32:64] @ weight.T, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [5, 33])
def test_sum_with_the_residual_joins_the_product_before_it(has_bias: bool, num_rows: int) -> None:
    from peagle.linears.skinny_linear_triton import skinny_linear_triton

    x, weight = torch.randn(num_rows, 72, device=DEVICE), torch.randn(50, 72, device=DEVICE)
    bias = torch.randn(50, device=DEVICE) if has_bias else None
    residual = torch.randn(num_rows, 100, device=DEVICE)[:, 50:]
    found = skinny_linear_triton(x, weight, bias, residual, None, CUT)
    torch.testing.assert_close(found, residual + nn.functional.linear(x, weight, bias), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_gate_joins_the_two_products_before_it(activation: str, has_bias: bool, num_rows: int) -> None:
    from peagle.linears.skinny_linear_triton import skinny_linear_triton

    x, weight = torch.randn(num_rows, 72, device=DEVICE), torch.randn(2 * 50, 72, device=DEVICE) * 0.2
    bias = torch.randn(2 * 50, device=DEVICE) if has_bias else None
    found = skinny_linear_triton(x, weight, bias, None, activation, CUT._replace(rows=32))
    gate, up = nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
    torch.testing.assert_close(found, ACTIVATIONS[activation](gate) * up, atol=5e-5, rtol=5e-5)


def traced(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """What the compiler's passes see of a function."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def num_sums(module: torch.fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_compiled_sum_is_left_to_the_product_before_it(is_first: bool) -> None:
    x, weight, residual = (torch.randn(*shape, device=DEVICE) for shape in ((1, 5, 72), (50, 72), (1, 5, 50)))

    def layer(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        product = torch.ops.peagle.skinny(x, weight, None, None, None)
        return (product + residual if is_first else residual + product).relu()

    module = traced(layer, x, weight, residual)
    join_sums(module.graph)
    module.recompile()
    assert num_sums(module) == 0
    expected = (residual + x @ weight.T).relu()
    torch.testing.assert_close(module(x, weight, residual), expected, atol=5e-5, rtol=5e-5)


def test_a_sum_stays_where_the_product_is_read_again_or_the_shapes_differ() -> None:
    x, weight = torch.randn(1, 5, 72), torch.randn(50, 72)

    def read_twice(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        product = torch.ops.peagle.skinny(x, weight, None, None, None)
        return (residual + product) * product

    def spread(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.ops.peagle.skinny(x, weight, None, None, None) + residual

    def doubled(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        product = torch.ops.peagle.skinny(x, weight, None, None, None)
        return torch.add(residual, product, alpha=2)

    whole, one_row = torch.randn(1, 5, 50), torch.randn(50)
    for function, residual in ((read_twice, whole), (spread, one_row), (doubled, whole)):
        module = traced(function, x, weight, residual)
        join_sums(module.graph)
        assert num_sums(module) == 1, function.__name__


def num_skinny(module: nn.Module, x: torch.Tensor) -> int:
    """Products of our kernel in a module compiled for any number of rows. Its output is checked as well."""
    found: list[int] = []

    def with_products(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        use_skinny_products(module.graph)
        module.graph.lint()
        module.recompile()
        found.append(len(module.graph.find_nodes(op="call_function", target=torch.ops.peagle.skinny.default)))
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(
            module, dynamic=True, backend=aot_autograd(fw_compiler=with_products, decompositions=select_decomp_table())
        )
        torch.testing.assert_close(compiled(x), module(x), atol=5e-5, rtol=5e-5)
    return sum(found)


class Router(nn.Module):
    """A linear layer by hand, after layers that ask for the number of rows."""

    def __init__(self, linear: Callable[..., torch.Tensor], is_guarded: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24, 32)), nn.Parameter(torch.randn(24))
        self.norm = nn.RMSNorm(32)
        self.linear, self.is_guarded = linear, is_guarded
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.is_guarded and is_few_here(x, torch.empty(48, 32)):
            x = x + 1
        return self.linear(x.view(-1, 32), self.weight, self.bias)


def is_few_here(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.numel() <= 4 * weight.shape[1]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_a_router_uses_our_kernel_if_its_rows_are_known_to_be_few(
    num_rows: int, is_guarded: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.linears.skinny_linear.is_few", is_few_here)
    router = Router(lambda x, weight, bias: nn.functional.linear(x, weight, bias if has_bias else None), is_guarded)
    is_known = num_rows == 1 or (num_rows == 3 and is_guarded)
    assert num_skinny(router, torch.randn(1, num_rows, 32, device=DEVICE)) == is_known


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight, bias: nn.functional.linear(x, weight.relu()),
        lambda x, weight, bias: weight @ x.T,
        lambda x, weight, bias: torch.addmm(bias, x, weight.T, beta=2),
        lambda x, weight, bias: torch.addmm(x[:, :1], x, weight.T),
    ],
)
def test_other_products_stay(product: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.linears.skinny_linear.is_few", is_few_here)
    assert num_skinny(Router(product), torch.randn(1, 3, 32, device=DEVICE)) == 0


def test_few_rows_are_few_rows_of_half_precision_on_a_gpu() -> None:
    assert most_rows(8192, 4096) == FEW_ROWS and most_rows(49152, 576) == 0
    assert most_rows(49152, 576, is_gated=True) == FEW_ROWS
    assert most_rows(960, 576) == MORE_ROWS and most_rows(3072, 576, is_gated=True) == MANY_ROWS
    weight = torch.zeros(4, 8, device=DEVICE)
    assert not is_few(torch.zeros(1, 2, 8), weight), "not on a CPU"
    if DEVICE == "cuda":
        few = torch.zeros(1, MORE_ROWS, 8, device=DEVICE, dtype=torch.bfloat16)
        assert is_few(few, weight)
        assert not is_few(few.float(), weight)
        assert not is_few(few.repeat(1, 2, 1), weight)
        assert is_few(few.repeat(1, 2, 1), weight, is_gated=True)


def test_layers_become_skinny_in_place_and_back() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    x = torch.randn(3, 6)
    expected, names = module(x), list(module.state_dict())
    use_skinny_linears(module)
    assert isinstance(module[0], SkinnyLinear)
    assert list(module.state_dict()) == names
    assert torch.equal(module(x), expected)
    use_plain_linears(module)
    assert type(module[0]) is nn.Linear


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (4096, 4096), (28672, 4096)])
def test_products_on_a_gpu_equal_torch_to_rounding(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
    for num_rows in (1, 8, 16, 17, 40, 64, 65):
        x = torch.randn(1, num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
        plain = nn.functional.linear(x, weight)
        torch.testing.assert_close(skinny_linear(x, weight, None), plain, atol=2e-2, rtol=2e-2)
    for num_rows in (8, 20, 200, 512):
        x = torch.randn(1, num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
        gate, up = nn.functional.linear(x.float(), weight.float()).chunk(2, dim=-1)
        found = gated_linear(x, weight, None, "silu").float()
        torch.testing.assert_close(found, nn.functional.silu(gate) * up, atol=5e-2, rtol=5e-2)
