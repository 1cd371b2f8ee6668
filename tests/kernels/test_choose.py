"""Choosing tokens: the PyTorch implementation against its definition, and the Triton kernel against PyTorch.

Without a GPU the kernel runs in Triton's interpreter. Legend: B requests, L rows per request, N rows, V vocabulary.
"""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle.kernels.choose import choose_tokens, choose_tokens_torch, choose_tokens_triton, draw, target_probs
from peagle.kernels.random_numbers import uniform

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from peagle.kernels import choose_triton  # noqa: E402 (after the check that triton is there)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAM = 2
INFINITY = float("inf")
NAN = float("nan")

WARPS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "greedy, whatever else is set": (0.0, 5, 0.5, 0.5),
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (100.0, 0, 1.0, 0.0),
    "cold": (0.01, 0, 1.0, 0.0),
    "all but frozen": (1e-37, 20, 0.9, 0.1),
    "top-k 1": (1.0, 1, 1.0, 0.0),
    "top-k": (1.5, 5, 1.0, 0.0),
    "top-k of everything": (1.0, 50_000_000, 1.0, 0.0),
    "tiny top-p": (1.0, 0, 1e-6, 0.0),
    "top-p": (1.2, 0, 0.5, 0.0),
    "top-p of almost everything": (1.0, 0, 0.9999, 0.0),
    "min-p": (1.0, 0, 1.0, 0.1),
    "min-p 1": (1.0, 0, 1.0, 1.0),
    "top-k and top-p": (2.0, 50, 0.8, 0.0),
    "all three": (3.0, 40, 0.95, 0.05),
}


def columns(warps: list[tuple[float, int, float, float]]) -> tuple[Tensor, ...]:
    temperature, top_k, top_p, min_p = zip(*warps, strict=True)
    return torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p)


def keys(num_requests: int) -> tuple[Tensor, Tensor]:
    seed_B = torch.randint(0, 2**63 - 1, (num_requests,), generator=torch.Generator().manual_seed(7))
    return seed_B, 1000 + torch.arange(num_requests)


def by_triton(logits_NV: Tensor, *settings_B: Tensor) -> Tensor:
    moved = [part.to(DEVICE) for part in (logits_NV, *settings_B)]
    return choose_tokens_triton(*moved, STREAM).cpu()


def assert_right(tokens_N: Tensor, logits_NV: Tensor, *settings: Tensor) -> None:
    """Rows that sample must hit a kept token whose share of the cumulative mass holds the number, but for rounding."""
    *warp_N, seed_N, position_N = settings
    probs_NV = target_probs(logits_NV, *warp_N)
    token_N1 = tokens_N.unsqueeze(1)
    assert bool((probs_NV.gather(1, token_N1) > 0).all()), "a token was chosen that is not kept"
    mass_NV = probs_NV.cumsum(1, dtype=torch.float64)
    number_N1 = uniform(seed_N, position_N, STREAM).unsqueeze(1) * mass_NV[:, -1:]
    end_N1 = mass_NV.gather(1, token_N1)
    begin_N1 = end_N1 - probs_NV.gather(1, token_N1)
    off_N1 = torch.maximum(begin_N1 - number_N1, number_N1 - end_N1)
    assert off_N1.max() < 1e-5, f"row {off_N1.argmax()} is off by a mass of {off_N1.max()}"


# --- the PyTorch implementation and the dispatch


def test_choosing_on_a_cpu_is_a_draw_from_the_target_probs() -> None:
    logits_NV = 4 * torch.randn(len(WARPS), 300)
    warp, key = columns(list(WARPS.values())), keys(len(WARPS))
    expected_N = draw(target_probs(logits_NV, *warp), uniform(*key, STREAM))
    found_N = choose_tokens(logits_NV, *warp, *key, STREAM)
    assert found_N.dtype == torch.int64 and torch.equal(found_N, expected_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_on_a_cpu_take_the_lowest_of_the_most_likely_tokens(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(6, 300).to(dtype)
    logits_NV[0, [7, 250]] = 9.0
    logits_NV[1] = -INFINITY
    logits_NV[2] = 0.0
    logits_NV[3, :299] = -INFINITY
    logits_NV[4, [20, 40]] = NAN
    logits_NV[5, [9, 8]] = INFINITY
    settings = (*columns([WARPS["greedy"]] * 6), *keys(6))
    for logits in (logits_NV, logits_NV.t().contiguous().t()):
        found_N = choose_tokens(logits, *settings, STREAM)
        assert found_N.dtype == torch.int64 and found_N.tolist() == [7, 0, 0, 299, 20, 8]


@pytest.mark.parametrize("name", ["greedy", "plain", "min-p"])
def test_rows_that_all_need_little_are_chosen_alike(name: str) -> None:
    logits_NV = 4 * torch.randn(6, 300)
    warp, key = columns([WARPS[name]] * 6), keys(6)
    expected_N = draw(target_probs(logits_NV, *warp), uniform(*key, STREAM))
    assert torch.equal(choose_tokens(logits_NV, *warp, *key, STREAM), expected_N)


@pytest.mark.parametrize("function", [choose_tokens_torch, choose_tokens_triton])
def test_rows_of_one_request_share_its_settings_and_decide_one_position_after_the_other(
    function: Callable[..., Tensor],
) -> None:
    logits_NV = torch.randn(6, 50).to(DEVICE)
    names = ("plain", "greedy", "top-k")
    settings_B = [part.to(DEVICE) for part in (*columns([WARPS[name] for name in names]), *keys(3))]
    settings_N = [part.repeat_interleave(2) for part in settings_B]
    settings_N[-1] = settings_N[-1] + torch.tensor([0, 1] * 3, device=DEVICE)
    assert torch.equal(function(logits_NV, *settings_B, STREAM), function(logits_NV, *settings_N, STREAM))


@pytest.mark.parametrize("function", [choose_tokens_torch, choose_tokens_triton])
def test_no_rows_give_no_tokens_and_uneven_rows_are_refused(function: Callable[..., Tensor]) -> None:
    settings = [part.to(DEVICE) for part in (*columns([WARPS["plain"]] * 2), *keys(2))]
    none = function(torch.empty(0, 9, device=DEVICE), *(part[:0] for part in settings), STREAM)
    assert none.shape == (0,) and none.dtype == torch.int64
    with pytest.raises(ValueError, match="3 rows of logits do not divide evenly among 2 requests"):
        function(torch.zeros(3, 9, device=DEVICE), *settings, STREAM)


def test_the_operator_keeps_the_rules_of_torch_library_and_compiles_in_one_graph() -> None:
    logits_NV = torch.randn(len(WARPS), 60, device=DEVICE)
    settings = [part.to(DEVICE) for part in (*columns(list(WARPS.values())), *keys(len(WARPS)))]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.peagle.choose_tokens.default, (logits_NV, *settings, STREAM), test_utils=tests)

    def step(logits_NV: Tensor, *settings: Tensor) -> Tensor:
        return choose_tokens(2 * logits_NV, *settings, STREAM) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits_NV, *settings), step(logits_NV, *settings))


@pytest.mark.slow
def test_choosing_on_a_cpu_works_where_triton_is_not_installed() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from peagle.kernels.choose import choose_tokens\n"
        "one = torch.ones(1); zero = torch.zeros(1, dtype=torch.int64)\n"
        "print(choose_tokens(torch.tensor([[0.0, 9.0]]), 0 * one, zero, one, 0 * one, zero, zero, 0).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[1]\n", done.stderr


# --- the Triton kernel


@triton.jit
def _store_uniform(numbers_ptr, seed_ptr, position_ptr, stream: tl.constexpr):
    row = tl.program_id(0)
    number = choose_triton._uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row), stream)
    tl.store(numbers_ptr + row, number)


def test_the_numbers_of_the_kernel_are_those_of_pytorch_to_the_bit() -> None:
    seed_N, position_N = keys(32)
    seed_N[:2] = torch.tensor([0, 2**63 - 1])
    numbers_N = torch.empty(32, dtype=torch.float64, device=DEVICE)
    _store_uniform[(32,)](numbers_N, seed_N.to(DEVICE), position_N.to(DEVICE), STREAM)
    assert numbers_N.tolist() == uniform(seed_N, position_N, STREAM).tolist()


@pytest.mark.parametrize(
    ("dtype", "vocab_size"),
    [
        *((torch.bfloat16, 300), (torch.float32, 5)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((torch.float16, 256), (torch.float64, 700))),
    ],
)
def test_triton_chooses_what_pytorch_chooses(dtype: torch.dtype, vocab_size: int) -> None:
    logits_NV = (4 * torch.randn(len(WARPS), vocab_size)).to(dtype)
    settings = (*columns(list(WARPS.values())), *keys(len(WARPS)))
    found_N = by_triton(logits_NV, *settings)
    assert found_N.dtype == torch.int64
    assert_right(found_N, logits_NV, *settings)
    different = [
        name
        for name, is_equal in zip(WARPS, found_N == choose_tokens_torch(logits_NV, *settings, STREAM), strict=True)
        if not is_equal
    ]
    assert not different, different


def drawn(logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, num_draws: int) -> set[int]:
    """What the kernel draws, at many positions; checked against PyTorch on the way."""
    logits_NV = logits_V.expand(num_draws, -1)
    settings = (*columns([(temperature, top_k, top_p, min_p)] * num_draws), *keys(num_draws))
    found_N = by_triton(logits_NV, *settings)
    assert_right(found_N, logits_NV, *settings)
    return set(found_N.tolist())


def test_the_lowest_id_wins_among_equal_logits_in_and_across_tiles() -> None:
    logits_NV = torch.zeros(4, 3 * choose_triton.LARGEST_TILE + 5)
    tile = choose_triton.LARGEST_TILE
    for row, ids in enumerate([[tile + 9, 7 + 2 * tile], [3 * tile + 4], [tile - 1, tile], []]):
        logits_NV[row, ids] = 1.0
    settings = (*columns([WARPS["greedy"]] * 4), *keys(4))
    assert by_triton(logits_NV, *settings).tolist() == [tile + 9, 3 * tile + 4, tile - 1, 0]


@pytest.mark.slow
def test_triton_keeps_tokens_tied_at_the_borders_of_top_k_and_top_p() -> None:
    logits_V = torch.tensor([0.0, 3.0, -0.0, 1.0, 3.0, 1.0, -2.0, -2.0]).bfloat16()
    assert drawn(logits_V, 2.0, 3, 1.0, 0.0, 5) <= {1, 3, 4, 5}
    assert drawn(logits_V, 2.0, 0, 0.7, 0.0, 5) <= {1, 3, 4, 5}
    assert drawn(torch.tensor([0.0, -0.0, -1.0]), 1.0, 1, 1.0, 0.0, 8) == {0, 1}, "zero has two bit patterns"
    assert drawn(torch.tensor([-5.0, 0.0, -0.0, 0.0]), 1.0, 0, 0.1, 0.0, 8) == {1, 2, 3}


@pytest.mark.slow
def test_logits_that_scaling_makes_equal_are_tied_for_triton_too() -> None:
    logits_V = torch.tensor([2.0, 1e-9, 2e-9, -9.0])
    assert target_probs(logits_V, 4.0, 2, 1.0, 0.0).count_nonzero() == 3, "the largest swallows the difference"
    assert drawn(logits_V, 4.0, 2, 1.0, 0.0, 8) == {0, 1, 2}
    assert drawn(logits_V, 4.0, 0, 0.6, 0.0, 8) == {0, 1, 2}


@pytest.mark.slow
def test_triton_never_draws_a_token_masked_with_minus_infinity() -> None:
    logits_V = torch.full((40,), -INFINITY).bfloat16()
    logits_V[[3, 17, 39]] = torch.tensor([1.0, 0.0, 0.5]).bfloat16()
    for warp in [(1.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.999, 0.0), (1.0, 30, 0.999, 0.01)]:
        assert drawn(logits_V, *warp, 4) <= {3, 17, 39}


@pytest.mark.slow
def test_top_p_of_triton_is_measured_on_what_top_k_left() -> None:
    logits_V = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    assert drawn(logits_V, 1.0, 2, 0.55, 0.0, 6) == {1}
    assert drawn(logits_V, 1.0, 0, 0.55, 0.0, 6) == {1, 3}


@pytest.mark.parametrize(
    "vocab_size", [49_152, *(pytest.param(size, marks=pytest.mark.slow) for size in (128_256, 201_088))]
)
def test_triton_reads_large_vocabularies_to_the_end(vocab_size: int) -> None:
    logits_NV = torch.randn(4, vocab_size).bfloat16()
    logits_NV[0, -1] = 30
    logits_NV[1, :-3] = -INFINITY
    settings = (*columns([WARPS[name] for name in ("greedy", "plain", "plain", "min-p")]), *keys(4))
    found_N = by_triton(logits_NV, *settings)
    assert found_N[0] == vocab_size - 1 and found_N[1] >= vocab_size - 3
    assert_right(found_N, logits_NV, *settings)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize("warp", ["greedy", "plain", "all three"])
def test_logits_without_an_answer_give_some_token_and_do_not_hang(warp: str) -> None:
    rows = [[NAN] * 5, [0.0, NAN, 1.0, 2.0, 3.0], [-INFINITY] * 5, [INFINITY, 0.0, INFINITY, 1.0, NAN]]
    logits_NV = torch.tensor(rows)
    found_N = by_triton(logits_NV, *columns([WARPS[warp]] * 4), *keys(4))
    assert bool(((found_N >= 0) & (found_N < 5)).all()), found_N


def test_triton_reads_rows_that_are_part_of_a_wider_tensor() -> None:
    wide_NV = torch.randn(4, 150)
    settings = (*columns([WARPS[name] for name in ("greedy", "plain", "hot", "min-p")]), *keys(4))
    for logits_NV in (wide_NV[:, 20:70], wide_NV[:, ::3], torch.randn(50, 4).T):
        assert torch.equal(by_triton(logits_NV, *settings), by_triton(logits_NV.contiguous(), *settings))


# --- on a GPU


def many_rows(dtype: torch.dtype) -> tuple[Tensor, ...]:
    logits_NV = (3 * torch.randn(1024, 49_152, device="cuda")).to(dtype)
    warp_N = columns(list(WARPS.values()) * (1024 // len(WARPS)))
    return (logits_NV, *(part.cuda() for part in (*warp_N, *keys(1024))))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_chooses_what_pytorch_chooses_for_a_thousand_rows(dtype: torch.dtype) -> None:
    arguments = many_rows(dtype)
    found_N = choose_tokens(*arguments, STREAM)
    assert_right(found_N, *arguments)
    assert (found_N == choose_tokens_torch(*arguments, STREAM)).double().mean() > 0.99, "rounding parts only a few"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_choosing_is_captured_in_a_cuda_graph_that_follows_its_inputs(dtype: torch.dtype) -> None:
    arguments = many_rows(dtype)
    with torch.cuda.stream(torch.cuda.Stream()):
        choose_tokens(*arguments, STREAM)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_N = choose_tokens(*arguments, STREAM)
    for shift in (1, 5):
        for part in arguments:
            part.copy_(part.roll(shift, 0))
        arguments[-1].add_(shift)
        graph.replay()
        assert_right(captured_N, *arguments)
        assert torch.equal(captured_N, choose_tokens(*arguments, STREAM))


@pytest.mark.gpu
def test_a_row_is_chosen_alike_alone_and_in_company() -> None:
    arguments = many_rows(torch.bfloat16)
    together_N = choose_tokens(*arguments, STREAM)
    for row in range(len(WARPS)):
        assert choose_tokens(*(part[row : row + 1] for part in arguments), STREAM) == together_N[row]
