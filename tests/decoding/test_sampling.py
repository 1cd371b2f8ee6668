"""Random numbers keyed by position, the target's sampling distribution, and drawing from it.

Legend: B requests, L rows per request, V vocabulary.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from peagle.kernels.choose import draw, target_probs
from peagle.kernels.random_numbers import STREAM_DRAW, uniform

OTHER_STREAM = 1
STREAMS = (STREAM_DRAW, OTHER_STREAM, 2, 3)
LARGEST_UNIFORM = 1 - 2.0**-53
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1


def splitmix_finalizer(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)


def python_uniform(seed: int, position: int, stream: int) -> float:
    state = 0
    for key in (seed, position, stream):
        state = splitmix_finalizer(((state ^ key) + GOLDEN_GAMMA) & MASK_64)
    return (state >> 11) / 2**53


def chi_square_is_plausible(counts: Tensor) -> bool:
    """Equal expected counts; the limit is five standard deviations of the chi-square above its mean."""
    expected = counts.sum() / counts.numel()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    return statistic < freedom + 5 * (2 * freedom) ** 0.5


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# --- uniform


def test_the_python_mixer_is_the_published_splitmix64() -> None:
    assert splitmix_finalizer(GOLDEN_GAMMA) == 0xE220A8397B1DCDAF, "first output of splitmix64 for state 0"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40), stream=st.sampled_from(STREAMS))
def test_uniform_equals_the_big_integer_version_bit_for_bit(seed: int, position: int, stream: int) -> None:
    assert uniform(int64(seed), int64(position), stream).item() == python_uniform(seed, position, stream)


def test_uniform_values_are_frozen_so_that_seeded_answers_survive_upgrades() -> None:
    values = uniform(int64(0, 0, 42, 2**63 - 1), int64(0, 1, 7, 1000), STREAM_DRAW).tolist()
    assert values == [0.13870941014555427, 0.2691303195904541, 0.33493855816005447, 0.7261365723923966]


def test_uniform_broadcasts_and_accepts_narrow_integers() -> None:
    wide = uniform(int64(3, 4).unsqueeze(1), int64(5, 6, 7), OTHER_STREAM)
    assert wide.shape == (2, 3) and wide.dtype == torch.float64
    assert wide[1, 2].item() == python_uniform(4, 7, OTHER_STREAM)
    narrow = uniform(int64(3, 4).unsqueeze(1).int(), int64(5, 6, 7).int(), OTHER_STREAM)
    assert torch.equal(wide, narrow)
    assert uniform(torch.empty(0, 4, dtype=torch.int64), int64(1), STREAM_DRAW).shape == (0, 4)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniform_fills_the_unit_interval_evenly(stream: int, along: str) -> None:
    counter, fixed = torch.arange(200_000), int64(11)
    values = uniform(counter, fixed, stream) if along == "seeds" else uniform(fixed, counter, stream)
    assert values.min() >= 0 and values.max() < 1
    assert chi_square_is_plausible(torch.histc(values, bins=256, min=0, max=1))


@cache
def neighbor_pairs() -> dict[str, tuple[Tensor, Tensor]]:
    counter = torch.arange(200_000)
    base = uniform(int64(5), counter, STREAM_DRAW)
    pairs = {
        "next position": (base, uniform(int64(5), counter + 1, STREAM_DRAW)),
        "next seed": (base, uniform(int64(6), counter, STREAM_DRAW)),
        "seed and position swapped": (uniform(counter, counter + 1, 0), uniform(counter + 1, counter, 0)),
    }
    return pairs | {f"stream {stream}": (base, uniform(int64(5), counter, stream)) for stream in STREAMS[1:]}


@pytest.mark.parametrize(
    "name", ["next position", "next seed", "seed and position swapped", "stream 1", "stream 2", "stream 3"]
)
def test_neighboring_keys_give_unrelated_numbers(name: str) -> None:
    first, second = neighbor_pairs()[name]
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].abs().item()
    assert correlation < 5 / len(first) ** 0.5, f"{name}: correlation {correlation}"
    cells = (first * 16).long() * 16 + (second * 16).long()
    assert chi_square_is_plausible(torch.bincount(cells, minlength=256).double()), name


# --- target_probs


def warped_by_transformers(logits_BV: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        logits_BV = warper(None, logits_BV)
    return logits_BV.softmax(dim=-1)


WARPS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 5000, 1.0, 0.0),
    (1.5, 0, 0.9, 0.0),
    (1.0, 0, 0.01, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.8, 50, 0.8, 0.0),
    (1.3, 40, 0.95, 0.05),
    (0.6, 1, 0.5, 0.5),
]


@pytest.mark.parametrize("warp", WARPS)
def test_target_probs_equal_the_logits_warpers_of_transformers(warp: tuple[float, int, float, float]) -> None:
    logits_BV = 3 * torch.randn(32, 1000, generator=torch.Generator().manual_seed(0))
    expected_BV = warped_by_transformers(logits_BV, *warp)
    actual_BV = target_probs(logits_BV, *warp)
    assert torch.equal(actual_BV > 0, expected_BV > 0), "the same tokens are kept"
    torch.testing.assert_close(actual_BV, expected_BV, atol=1e-6, rtol=1e-5)


def test_each_request_has_its_own_settings_along_the_leading_dimension() -> None:
    logits_BLV = 2 * torch.randn(len(WARPS), 3, 100, generator=torch.Generator().manual_seed(1))
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*WARPS, strict=True))
    actual_BLV = target_probs(logits_BLV, temperature, top_k, top_p, min_p)
    for row, warp in enumerate(WARPS):
        assert torch.equal(actual_BLV[row], target_probs(logits_BLV[row], *warp)), "tensors and scalars agree exactly"
    per_row_BL = temperature.unsqueeze(1).expand(-1, 3)
    assert torch.equal(target_probs(logits_BLV, per_row_BL, top_k, top_p, min_p), actual_BLV)


def test_temperature_zero_is_the_one_hot_of_the_first_maximum() -> None:
    logits_BV = torch.tensor([[1.0, 7.0, 7.0], [-1e30, -1e30, 5.0], [0.0, float("-inf"), -1.0]])
    expected_BV = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert torch.equal(target_probs(logits_BV, 0.0, 0, 1.0, 0.0), expected_BV)
    assert torch.equal(target_probs(logits_BV, torch.zeros(3), int64(2, 2, 2), torch.full((3,), 0.1), 0.5), expected_BV)


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    actual_BV = target_probs(logits_BV, torch.tensor([0.0, 1.0]), 0, 1.0, 0.0)
    assert actual_BV[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(actual_BV[1], logits_BV[1].softmax(-1))


def test_a_tiny_temperature_does_not_overflow() -> None:
    actual_BV = target_probs(torch.tensor([[3e4, 1e4, -3e4]]), 1e-37, 0, 0.9, 0.1)
    assert actual_BV.tolist() == [[1.0, 0.0, 0.0]]


def test_tokens_tied_at_the_top_k_border_are_all_kept() -> None:
    actual_BV = target_probs(torch.tensor([[5.0, 3.0, 3.0, 1.0]]), 1.0, 2, 1.0, 0.0)
    assert (actual_BV > 0).tolist() == [[True, True, True, False]]
    assert actual_BV[0, 1] == actual_BV[0, 2]


def test_tokens_tied_at_the_top_p_border_are_all_kept() -> None:
    probs_BV = target_probs(torch.tensor([[0.0, 0.0, 0.0, -5.0]]), 1.0, 0, 0.4, 0.0)
    torch.testing.assert_close(probs_BV, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))


def test_top_p_is_measured_on_what_top_k_left() -> None:
    logits_BV = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = target_probs(logits_BV, 1.0, 2, 0.55, 0.0) > 0
    assert kept.tolist() == [[True, False, False, False]], "0.4 is 0.571 of the 0.7 left by top-k"
    assert (target_probs(logits_BV, 1.0, 0, 0.55, 0.0) > 0).tolist() == [[True, True, False, False]]


def test_an_unrestricted_request_keeps_tokens_too_rare_to_move_the_cumulative_sum() -> None:
    logits_BV = torch.tensor([[0.0, -45.0]])
    unrestricted = target_probs(logits_BV, torch.ones(1), int64(0), torch.ones(1), torch.zeros(1))
    assert unrestricted[0, 1] > 0, "exp(-45) is far below the spacing of float64 at 1"


def test_tokens_masked_with_minus_infinity_stay_at_zero() -> None:
    logits_BV = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]])
    assert target_probs(logits_BV, 1.0, 3, 0.99, 0.01).tolist() == [[0.0, 0.5, 0.0, 0.5]]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=12),
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 5)),
    top_k=st.integers(0, 15),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
)
def test_target_probs_are_a_distribution_that_holds_the_most_likely_token(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits_V = torch.tensor(logits)
    probs_V = target_probs(logits_V, temperature, top_k, top_p, min_p)
    assert probs_V.dtype == torch.float32 and bool((probs_V >= 0).all())
    assert abs(probs_V.sum().item() - 1) < 1e-5
    assert probs_V[logits_V.argmax()] > 0, "neither mask may remove the most likely token"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_warped_in_float32(dtype: torch.dtype) -> None:
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(target_probs(logits_BV, 0.7, 9, 0.9, 0.0), target_probs(logits_BV.float(), 0.7, 9, 0.9, 0.0))


# --- draw


def test_draw_inverts_the_cumulative_distribution() -> None:
    probs_V = torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LARGEST_UNIFORM], dtype=torch.float64)
    assert draw(probs_V.expand(6, 4), uniforms).tolist() == [0, 0, 2, 2, 3, 3]


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(2.0**-126, 1, width=32)), min_size=1, max_size=20).filter(any),
    value=st.one_of(st.sampled_from([0.0, 0.5, LARGEST_UNIFORM]), st.floats(0, LARGEST_UNIFORM)),
)
def test_draw_never_returns_a_token_of_probability_zero(weights: list[float], value: float) -> None:
    probs_V = torch.tensor(weights)
    token = draw(probs_V, torch.tensor(value, dtype=torch.float64))
    assert token.dtype == torch.int64 and probs_V[token] > 0


@pytest.mark.parametrize("value", [0.0, LARGEST_UNIFORM])
def test_draw_stays_inside_a_large_vocabulary_padded_with_zeros(value: float) -> None:
    probs_V = torch.rand(150_000, generator=torch.Generator().manual_seed(3))
    probs_V[:100] = probs_V[-100:] = 0
    token = draw(probs_V / probs_V.sum(), torch.tensor(value, dtype=torch.float64))
    assert token.item() == (100 if value == 0 else 149_899)


def test_draw_follows_the_distribution() -> None:
    probs_V = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4])
    tokens = draw(probs_V.expand(200_000, 5), uniform(torch.arange(200_000), int64(9), STREAM_DRAW))
    frequencies_V = torch.bincount(tokens, minlength=5) / 200_000
    assert (frequencies_V - probs_V).abs().max() < 0.0055, "five standard deviations of a share of 0.4 are 0.0055"
    assert frequencies_V[1] == 0


def test_draw_of_an_empty_row_gives_token_zero_instead_of_failing() -> None:
    assert draw(torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64)).tolist() == [0, 0]


# --- where it runs


def test_sampling_never_looks_at_a_value_on_the_host() -> None:
    """Tensors on the meta device have no values: reading one, or a shape that depends on one, raises."""
    logits_BLV = torch.empty(4, 3, 50, device="meta")
    per_request = [torch.empty(4, device="meta") for _ in range(4)]
    positions = torch.empty(4, 3, dtype=torch.int64, device="meta")
    tokens_BL = draw(target_probs(logits_BLV, *per_request), uniform(positions, positions, STREAM_DRAW))
    assert tokens_BL.shape == (4, 3) and tokens_BL.is_meta
    assert target_probs(logits_BLV, 0.5, 3, 0.9, 0.1).is_meta


@pytest.mark.gpu
def test_uniform_is_bit_identical_on_cpu_and_gpu() -> None:
    seeds, positions = torch.randint(0, 2**63 - 1, (1000, 1)), torch.arange(100)
    for stream in STREAMS:
        on_gpu = uniform(seeds.cuda(), positions.cuda(), stream)
        assert torch.equal(on_gpu.cpu(), uniform(seeds, positions, stream))


@pytest.mark.gpu
@pytest.mark.parametrize("settings_are", ["tensors", "numbers"])
def test_warping_and_drawing_are_captured_in_a_cuda_graph_and_equal_the_cpu(settings_are: str) -> None:
    logits_BV = 3 * torch.randn(len(WARPS), 50_000, generator=torch.Generator().manual_seed(4))
    warp = [torch.tensor(column) for column in zip(*WARPS, strict=True)]
    seed_B = torch.arange(len(WARPS))

    def sample(logits: Tensor, seed: Tensor, *warp: Tensor) -> Tensor:
        probs = target_probs(logits, *warp) if settings_are == "tensors" else target_probs(logits, 0.7, 50, 0.9, 0.01)
        return draw(probs, uniform(seed, seed, STREAM_DRAW))

    on_gpu = [part.cuda() for part in (logits_BV, seed_B, *warp)]
    with torch.cuda.stream(torch.cuda.Stream()):
        sample(*on_gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(*on_gpu)
    graph.replay()
    assert captured.tolist() == sample(logits_BV, seed_B, *warp).tolist()
