"""The k largest of few columns: the kernel against torch.topk, and where compiled graphs use it.

Without a GPU the kernel runs in Triton's interpreter.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from peagle.experts.top_k import DTYPES, MOST_CHOSEN, MOST_COLUMNS, top_k, use_top_k

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL_DYNAMIC = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
INFINITY, NAN = float("inf"), float("nan")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def assert_right(x: Tensor, k: int) -> None:
    """A stable sort is the definition. torch.topk has the same values, but any of the equal indices."""
    values, index = (found.cpu() for found in top_k(x, k))
    x = x.cpu()
    in_order = x.sort(dim=-1, descending=True, stable=True)
    assert values.dtype == x.dtype and index.dtype == torch.int64
    assert torch.equal(values, x.topk(k).values)
    assert torch.equal(index, in_order.indices[..., :k])
    assert torch.equal(values, x.gather(-1, index))


@every_dtype
@pytest.mark.parametrize(
    ("num_columns", "k"), [(1, 1), (8, 2), (32, 4), (33, 16), (100, 3), (128, 8), (257, 5), (MOST_COLUMNS, MOST_CHOSEN)]
)
def test_the_largest_are_those_of_torch(num_columns: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, num_columns)
    x[1] = x[1].sort().values
    x[2] = x[2].sort(descending=True).values
    x[3] = x[3].round()
    x[4] = 0.0
    x[5] = torch.where(torch.rand(num_columns) < 0.5, -0.0, 0.0)
    x[6, num_columns // 2 :] = -INFINITY
    assert_right(x.to(DEVICE, dtype), k)


@every_dtype
def test_extreme_values_keep_their_order(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    x = torch.tensor([-INFINITY, limits.min, -limits.tiny, 0.0, limits.tiny, limits.max, INFINITY], dtype=dtype)
    assert_right(torch.stack([x, x.flip(0), torch.full_like(x, -INFINITY)]).to(DEVICE), 7)


@pytest.mark.parametrize("num_rows", [0, 1, 30])
def test_any_number_of_rows(num_rows: int) -> None:
    assert_right(torch.randn(num_rows, 40, device=DEVICE), 1)


def test_rows_that_lie_apart_and_further_dimensions() -> None:
    wide = torch.randn(6, 90)
    for x in (wide[:, 20:70], wide[::2, :50], wide[:, ::3], wide.T[:, :5], wide.view(2, 3, 90)[:, 1:], wide[0]):
        assert_right(torch.empty_strided(x.shape, x.stride(), device=DEVICE).copy_(x), 4)


@every_dtype
def test_rows_with_nan_give_columns_that_exist(dtype: torch.dtype) -> None:
    x = torch.randn(4, 20)
    x[0], x[1], x[2, ::2], x[3, 5] = NAN, -torch.tensor(NAN), NAN, -torch.tensor(NAN)
    _, index = top_k(x.to(DEVICE, dtype), 16)
    assert bool(((index >= 0) & (index < 20)).all()), index
    assert all(len(set(row)) == 16 for row in index.tolist())


def test_the_operator_keeps_the_rules_of_torch_library() -> None:
    x = torch.randn(2, 3, 10, device=DEVICE)
    torch.library.opcheck(torch.ops.peagle.top_k.default, (x, 2), test_utils=("test_schema", "test_faketensor"))


# --- compiled graphs


def on_a_gpu(function: Callable[[Tensor], object], shape: tuple[int, ...], dtype: torch.dtype) -> torch.fx.GraphModule:
    """What the compiler's passes see of a function on a GPU, here or not, and what ours make of it."""
    with FakeTensorMode():
        module = make_fx(function)(torch.empty(shape, dtype=dtype, device="cuda"))
    use_top_k(module.graph)
    module.recompile()
    return module


def num_left(module: torch.fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default))


@every_dtype
def test_compiled_routers_use_the_kernel(dtype: torch.dtype) -> None:
    routers: list[Callable[[Tensor], tuple[Tensor, ...]]] = [
        lambda x: x.topk(4),
        lambda x: torch.topk(x.softmax(-1), k=4, dim=1, sorted=False),
        lambda x: (x.view(-1, 4, 8).topk(2, dim=-1)[0].sum(-1).topk(2, dim=-1).indices,),
    ]
    x = torch.randn(5, 32, device=DEVICE).to(dtype)
    for router in routers:
        module = on_a_gpu(router, (5, 32), dtype)
        assert num_left(module) == 0
        for found, expected in zip(module(x), router(x), strict=True):
            torch.testing.assert_close(found.sort().values, expected.sort().values)


def test_other_calls_of_topk_stay() -> None:
    others: list[tuple[Callable[[Tensor], object], tuple[int, ...], torch.dtype]] = [
        (lambda x: x.topk(4, largest=False), (5, 32), torch.float32),
        (lambda x: x.topk(4, -1, False), (5, 32), torch.float32),
        (lambda x: x.topk(4, dim=0), (5, 32), torch.float32),
        (lambda x: x.topk(MOST_CHOSEN + 1), (5, 32), torch.float32),
        (lambda x: x.topk(4), (5, MOST_COLUMNS + 1), torch.float32),
        (lambda x: x.topk(4), (5, 32), torch.float64),
        (lambda x: x.topk(4), (5, 32), torch.int64),
        (lambda x: x.cpu().topk(4), (5, 32), torch.float32),
    ]
    for number, (function, shape, dtype) in enumerate(others):
        assert num_left(on_a_gpu(function, shape, dtype)) == 1, number


@pytest.mark.parametrize("is_known", [False, True])
def test_the_number_of_rows_may_be_unknown_but_not_of_columns(is_known: bool) -> None:
    sizes = torch.empty(5, 32)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        num_rows, num_columns = mode.from_tensor(sizes, symbolic_context=ALL_DYNAMIC).shape
        assert not isinstance(num_columns, int)
        x = torch.empty(num_rows, 32 if is_known else num_columns, device="cuda")
        module = make_fx(lambda x: x.topk(4))(x)
    use_top_k(module.graph)
    assert num_left(module) == (0 if is_known else 1)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(("num_columns", "k"), [(128, 8), (32, 4), (512, 10), (1000, 16)])
def test_a_captured_kernel_follows_its_input(num_columns: int, k: int, dtype: torch.dtype) -> None:
    for num_rows in (1, 8, 3000):
        x = torch.randn(num_rows, num_columns, device="cuda").to(dtype)
        with torch.cuda.stream(torch.cuda.Stream()):
            top_k(x, k)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values, index = top_k(x, k)
        x.copy_(x.roll(3, -1))
        graph.replay()
        in_order = x.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(index, in_order.indices[:, :k]) and torch.equal(values, in_order.values[:, :k])
