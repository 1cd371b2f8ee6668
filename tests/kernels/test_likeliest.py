"""The most likely tokens and their log-probabilities: PyTorch's by hand, and the Triton kernels against them.

Without a GPU the kernels run in Triton's interpreter. Legend: N rows, V vocabulary, W tokens per row.
"""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle.kernels.likeliest import likeliest, likeliest_tokens, likeliest_tokens_torch, likeliest_torch

pytest.importorskip("triton")

from peagle.kernels.likeliest_triton import CHUNK, LARGEST_BLOCK, likeliest_tokens_triton, likeliest_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INFINITY = float("inf")
NAN = float("nan")

Function = Callable[[Tensor], tuple[Tensor, Tensor]]
TokensFunction = Callable[[Tensor, int], tuple[Tensor, Tensor]]
both = pytest.mark.parametrize("function", [likeliest_torch, likeliest_triton])
both_of_tokens = pytest.mark.parametrize("function", [likeliest_tokens_torch, likeliest_tokens_triton])


def by_triton(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    return on_cpu(likeliest_triton(logits_NV.to(DEVICE)))


def on_cpu(parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return parts[0].cpu(), parts[1].cpu()


def assert_alike(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (token_N, logprob_N), (expected_token_N, expected_logprob_N) = found, expected
    assert token_N.dtype == torch.int64 and logprob_N.dtype == torch.float32
    assert torch.equal(token_N, expected_token_N)
    torch.testing.assert_close(logprob_N, expected_logprob_N, rtol=1e-5, atol=1e-5, equal_nan=True)


def by_sorting(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A stable sort of whole rows: the definition of `likeliest_tokens`."""
    values_NV, ids_NV = logits_NV.cpu().float().sort(dim=-1, descending=True, stable=True)
    return ids_NV[:, :width], (values_NV - values_NV.logsumexp(-1, keepdim=True))[:, :width]


# --- what it means


@both
def test_an_example_by_hand(function: Function) -> None:
    logits_NV = torch.tensor([[0.0, math.log(3)], [math.log(8), math.log(2)], [5.0, -INFINITY]], device=DEVICE)
    token_N, logprob_N = function(logits_NV)
    assert token_N.tolist() == [1, 0, 0]
    assert logprob_N.tolist() == pytest.approx([math.log(0.75), math.log(0.8), 0.0], abs=1e-6)


@both
def test_the_lowest_id_wins_among_equal_logits_in_and_across_blocks(function: Function) -> None:
    block = LARGEST_BLOCK
    logits_NV = torch.zeros(4, 2 * block + 5, device=DEVICE)
    for row, ids in enumerate([[block + 9, block + 7, 2 * block + 1], [2 * block + 4], [block - 1, block]]):
        logits_NV[row, ids] = 1.0
    token_N, _ = function(logits_NV)
    assert token_N.tolist() == [block + 7, 2 * block + 4, block - 1, 0]


@both
def test_no_rows_give_nothing(function: Function) -> None:
    token_N, logprob_N = function(torch.empty(0, 9, device=DEVICE))
    assert token_N.shape == logprob_N.shape == (0,)
    assert token_N.dtype == torch.int64 and logprob_N.dtype == torch.float32


@both
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, from the interpreter
def test_logits_without_an_answer_give_some_token_and_no_number(function: Function) -> None:
    rows = [[NAN] * 5, [0.0, NAN, 1.0, 2.0, 3.0], [-INFINITY] * 5, [INFINITY, 0.0, INFINITY, 1.0, NAN]]
    token_N, logprob_N = function(torch.tensor(rows, device=DEVICE))
    assert bool(((token_N >= 0) & (token_N < 5)).all()), token_N
    assert bool(logprob_N.isnan().all()), logprob_N


def test_the_operator_keeps_the_rules_of_torch_library_and_compiles_in_one_graph() -> None:
    logits_NV = torch.randn(3, 60, device=DEVICE)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.peagle.likeliest.default, (logits_NV,), test_utils=tests)

    def step(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        token_N, logprob_N = likeliest(2 * logits_NV)
        return token_N + 1, logprob_N.exp()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_alike(compiled(logits_NV), step(logits_NV))


@pytest.mark.slow
def test_a_cpu_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from peagle.kernels.likeliest import likeliest\n"
        "print([part.tolist() for part in likeliest(torch.tensor([[0.0, 99.0]]))])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[[1], [0.0]]\n", done.stderr


# --- the Triton kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [1, 100, 128, 513, LARGEST_BLOCK, 9000, 5 * LARGEST_BLOCK + 1])
def test_triton_finds_what_pytorch_finds(vocab_size: int, dtype: torch.dtype) -> None:
    logits_NV = (4 * torch.randn(3, vocab_size)).to(dtype)
    logits_NV[0, -1] = 40  # a row read to its end
    logits_NV[1] = 0
    assert_alike(by_triton(logits_NV), likeliest_torch(logits_NV))


@pytest.mark.parametrize("level", [torch.finfo(torch.float32).min, -1e4, 1e4, torch.finfo(torch.float32).max])
def test_triton_holds_logits_of_any_size(level: float) -> None:
    logits_NV = torch.full((2, 2 * LARGEST_BLOCK), level)
    logits_NV[1, :LARGEST_BLOCK] = -INFINITY
    token_N, logprob_N = by_triton(logits_NV)
    assert token_N.tolist() == [0, LARGEST_BLOCK]
    assert logprob_N.tolist() == pytest.approx([-math.log(2 * LARGEST_BLOCK), -math.log(LARGEST_BLOCK)], rel=1e-5)
    tokens_NW, logprob_NW = on_cpu(likeliest_tokens_triton(logits_NV.to(DEVICE), 2))
    assert tokens_NW.tolist() == [[0, 1], [LARGEST_BLOCK, LARGEST_BLOCK + 1]]
    assert torch.equal(logprob_NW, logprob_NW[:, :1].expand(2, 2))
    torch.testing.assert_close(logprob_NW[:, 0], logprob_N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_that_cannot_be_have_no_weight(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(4, 2 * LARGEST_BLOCK + 100).to(dtype)
    logits_NV[0, :LARGEST_BLOCK] = -INFINITY
    logits_NV[1, LARGEST_BLOCK:] = -INFINITY
    logits_NV[2, :-3] = -INFINITY
    logits_NV[3] = -INFINITY
    logits_NV[3, [17, 17 + LARGEST_BLOCK]] = torch.tensor(-5.0, dtype=dtype)
    found = by_triton(logits_NV)
    assert_alike(found, likeliest_torch(logits_NV))
    assert found[0][3] == 17 and found[1][3].item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_triton_reads_rows_that_are_part_of_a_wider_tensor() -> None:
    wide_NV = torch.randn(4, 150)
    for logits_NV in (wide_NV[:, 20:70], wide_NV[::2, :50], wide_NV[:, ::3], torch.randn(50, 4).T):
        on_device_NV = torch.empty_strided(logits_NV.shape, logits_NV.stride(), device=DEVICE).copy_(logits_NV)
        assert_alike(likeliest_triton(on_device_NV), likeliest_torch(logits_NV.to(DEVICE)))


# --- several tokens per row


@both_of_tokens
def test_several_tokens_by_hand(function: TokensFunction) -> None:
    logits_NV = torch.tensor([[0.0, math.log(3), 0.0, math.log(4)], [7.0, -INFINITY, -INFINITY, 7.0]], device=DEVICE)
    tokens_NW, logprob_NW = function(logits_NV, 3)
    assert tokens_NW.tolist() == [[3, 1, 0], [0, 3, 1]]
    assert logprob_NW.exp().flatten().tolist() == pytest.approx([4 / 9, 3 / 9, 1 / 9, 0.5, 0.5, 0.0], abs=1e-6)


@both_of_tokens
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32])
@pytest.mark.parametrize(
    "vocab_size", [1, 5, CHUNK + 1, 16 * CHUNK, pytest.param(2 * LARGEST_BLOCK + 7, marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # NumPy's, from the interpreter
def test_several_tokens_are_those_of_a_stable_sort(
    function: TokensFunction, vocab_size: int, dtype: torch.dtype
) -> None:
    logits_NV = (4 * torch.randn(6, vocab_size)).to(dtype)
    logits_NV[1] = logits_NV[1].sort().values  # the likeliest are all in the last chunk
    logits_NV[2] = logits_NV[2].round()
    logits_NV[3] = torch.where(torch.rand(vocab_size) < 0.5, -0.0, 0.0)
    logits_NV[4, :-1] = -INFINITY
    logits_NV[5] = -INFINITY
    width = min(16, vocab_size)
    assert_alike(on_cpu(function(logits_NV.to(DEVICE), width)), by_sorting(logits_NV, width))


@both_of_tokens
@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # NumPy's, from the interpreter
def test_several_tokens_of_logits_without_an_answer_are_of_the_vocabulary(function: TokensFunction) -> None:
    vocab_size = 32 * CHUNK + 5
    logits_NV = torch.zeros(5, vocab_size)
    logits_NV[0] = NAN
    logits_NV[1] = -torch.tensor(NAN)
    logits_NV[2, ::2] = NAN
    logits_NV[3, CHUNK] = -torch.tensor(NAN)
    logits_NV[4, 7] = INFINITY
    tokens_NW, logprob_NW = function(logits_NV.to(DEVICE), 16)
    assert bool(((tokens_NW >= 0) & (tokens_NW < vocab_size)).all()), tokens_NW
    assert bool((logprob_NW.isnan() | (logprob_NW == -INFINITY)).all()), logprob_NW


@both_of_tokens
def test_several_tokens_of_rows_that_are_part_of_a_wider_tensor(function: TokensFunction) -> None:
    wide_NV = torch.randn(4, 450)
    for logits_NV in (wide_NV[:, 20:370], wide_NV[::2, :50], wide_NV[:, ::3], torch.randn(50, 4).T, wide_NV[:0]):
        on_device_NV = torch.empty_strided(logits_NV.shape, logits_NV.stride(), device=DEVICE).copy_(logits_NV)
        assert_alike(on_cpu(function(on_device_NV, 7)), by_sorting(logits_NV, 7))


def test_more_tokens_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match="width=6 exceeds the vocabulary of 5 tokens"):
        likeliest_tokens(torch.zeros(2, 5, device=DEVICE), 6)


def test_the_operator_of_several_tokens_keeps_the_rules_of_torch_library_and_compiles_in_one_graph() -> None:
    logits_NV = torch.randn(3, 100, device=DEVICE)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.peagle.likeliest_tokens.default, (logits_NV, 4), test_utils=tests)

    def step(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        tokens_NW, logprob_NW = likeliest_tokens(2 * logits_NV, 4)
        return tokens_NW + 1, logprob_NW.exp()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_alike(compiled(logits_NV), step(logits_NV))


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_finds_what_pytorch_finds_for_many_rows(dtype: torch.dtype) -> None:
    logits_NV = (3 * torch.randn(448, 49_152, device="cuda")).to(dtype)
    # The CPU's argmax is the one that promises the lowest id; 16-bit logits tie often.
    assert_alike(on_cpu(likeliest(logits_NV)), likeliest_torch(logits_NV.cpu()))


@pytest.mark.gpu
def test_it_is_captured_in_a_cuda_graph_that_follows_its_input() -> None:
    logits_NV = (3 * torch.randn(448, 49_152, device="cuda")).bfloat16()
    with torch.cuda.stream(torch.cuda.Stream()):
        likeliest(logits_NV)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = likeliest(logits_NV)
    for shift in (1, 5):
        logits_NV.copy_(logits_NV.roll(shift, 0).roll(shift, 1))
        graph.replay()
        assert_alike(on_cpu(captured), likeliest_torch(logits_NV.cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [49_152, 201_088])
@pytest.mark.parametrize("num_rows", [7, 448])
def test_several_tokens_are_captured_in_a_cuda_graph_that_follows_its_input(num_rows: int, vocab_size: int) -> None:
    logits_NV = (3 * torch.randn(num_rows, vocab_size, device="cuda")).bfloat16()
    with torch.cuda.stream(torch.cuda.Stream()):
        likeliest_tokens(logits_NV, 16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = likeliest_tokens(logits_NV, 16)
    for shift in (1, 5):
        logits_NV.copy_(logits_NV.roll(shift, 0).roll(shift, 1))
        graph.replay()
        assert_alike(on_cpu(captured), likeliest_tokens_torch(logits_NV.cpu(), 16))
