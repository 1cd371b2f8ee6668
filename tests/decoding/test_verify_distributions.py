"""Verification: exact distributions on a vocabulary of five tokens, and what keys by position buy.

Legend: B requests, K draft tokens, L = K + 1, V vocabulary.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.tiny_vocabulary import K, L, V, as_lists, random_probs, verify_sampled
from peagle.decoding.verify import Verification
from peagle.kernels.choose import draw
from peagle.kernels.random_numbers import STREAM_DRAW, uniform

STREAM_DRAFT = STREAM_DRAW + 1
NUM_SEEDS = 100_000

# --- exact distributions. The target is a table: one distribution for each prefix of 0..K tokens.

TARGET_TABLES = [random_probs(V**depth, V, seed=depth, sharpness=0.3) for depth in range(L)]
DRAFT_TABLES = [random_probs(V**depth, V, seed=100 + depth, sharpness=1.0) for depth in range(K)]
POSITION = 17
LIMIT = 5.0

Verifier = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verification]
Choose = Callable[[Tensor, Tensor], Tensor]


def prefix_rows(tokens_BN: Tensor) -> Tensor:
    """Row of each prefix in its table: the tokens read as digits in base V."""
    row_B = torch.zeros(tokens_BN.shape[0], dtype=torch.int64)
    for column in tokens_BN.unbind(1):
        row_B = row_B * V + column
    return row_B


def along(tables: list[Tensor], tokens_BN: Tensor) -> Tensor:
    """The distributions met while walking down the tokens: [B, len(tables), V]."""
    return torch.stack([table[prefix_rows(tokens_BN[:, :depth])] for depth, table in enumerate(tables)], dim=1)


def extend(tables: list[Tensor], text_BN: Tensor, choose: Choose) -> Tensor:
    """The text filled up to one token for each table; `choose` takes probabilities [B, V] and a position [1]."""
    for depth in range(text_BN.shape[1], len(tables)):
        token_B = choose(tables[depth][prefix_rows(text_BN)], torch.tensor([POSITION + depth]))
        text_BN = torch.cat([text_BN, token_B.unsqueeze(1)], dim=1)
    return text_BN


def sample_from(seed_B: Tensor, stream: int) -> Choose:
    return lambda probs_BV, position_1: draw(probs_BV, uniform(seed_B, position_1, stream))


def most_likely(probs_BV: Tensor, _: Tensor) -> Tensor:
    return probs_BV.argmax(-1)


def exact_joint() -> Tensor:
    """Probability [V**L] of each text of L tokens under the target alone."""
    joint = torch.ones(1, dtype=torch.float64)
    for table in TARGET_TABLES:
        joint = (joint.unsqueeze(-1) * table.double()).flatten()
    return joint / joint.sum()


@cache
def decode_texts(verifier: Verifier, draft: str) -> tuple[Tensor, Tensor]:
    """Texts [B, L], and how many draft tokens [B] their first step accepted.

    Every step drafts all that is left to L - 1 tokens, so random numbers of cut positions are used a second time.
    """
    seed_B = torch.arange(NUM_SEEDS)
    choose = sample_from(seed_B, STREAM_DRAFT) if draft == "sampled" else most_likely
    text_BL = torch.zeros(NUM_SEEDS, L, dtype=torch.int64)
    length_B = torch.zeros_like(seed_B)
    num_accepted_by_start = []
    for start in range(L):
        drafted_BK = extend(DRAFT_TABLES, text_BL[:, :start], choose)
        num_accepted_B, next_token_B = verifier(
            along(TARGET_TABLES, drafted_BK)[:, start:],
            drafted_BK[:, start:],
            torch.full_like(seed_B, K - start),
            seed_B,
            torch.full_like(seed_B, POSITION + start),
        )
        end_B = start + num_accepted_B
        longer_BL = torch.nn.functional.pad(drafted_BK, (0, 1))
        longer_BL = longer_BL.scatter(1, end_B.unsqueeze(1), next_token_B.unsqueeze(1))
        is_here_B = length_B == start
        text_BL = torch.where(is_here_B.unsqueeze(1), longer_BL, text_BL)
        length_B = torch.where(is_here_B, end_B + 1, length_B)
        num_accepted_by_start.append(num_accepted_B)
    return text_BL, num_accepted_by_start[0]


def excess(observed: Tensor, exact: Tensor) -> float:
    """How many standard deviations the chi-square statistic of the counts lies above its mean. LIMIT passes."""
    expected = exact * observed.sum()
    assert expected.min() >= 5, "the chi-square statistic needs five expected counts in every cell"
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(exact) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def text_excess(verifier: Verifier, draft: str) -> float:
    text_BL, _ = decode_texts(verifier, draft)
    return excess(torch.bincount(prefix_rows(text_BL), minlength=V**L).double(), exact_joint())


# Drafts that were sampled are verified exactly as well: they are only accepted less often than they could be.
@pytest.mark.parametrize("draft", ["most likely", "sampled"])
def test_texts_decoded_with_drafts_follow_the_target_exactly(draft: str) -> None:
    assert text_excess(verify_sampled, draft) < LIMIT


def acceptance_tail() -> list[float]:
    """Exact probability that at least 1, 2, .. K of the most likely draft tokens are accepted."""
    drafts_BK = extend(DRAFT_TABLES, torch.empty(1, 0, dtype=torch.int64), most_likely)
    kept_BK = along(TARGET_TABLES[:K], drafts_BK).double().gather(2, drafts_BK.unsqueeze(2)).squeeze(2)
    return kept_BK.cumprod(1)[0].tolist()


def test_the_number_of_accepted_draft_tokens_follows_its_exact_distribution() -> None:
    _, num_accepted_B = decode_texts(verify_sampled, "most likely")
    tail = torch.tensor([1.0, *acceptance_tail(), 0.0], dtype=torch.float64)
    assert excess(torch.bincount(num_accepted_B, minlength=L).double(), tail[:-1] - tail[1:]) < LIMIT


# --- the same yardstick must refuse verifiers that are wrong


def without_subtraction(target_BLV: Tensor, *rest: Tensor) -> Verification:
    """Recovers from the whole target distribution, as if the rejected token had not had its chance."""
    num_accepted_B, next_token_B = verify_sampled(target_BLV, *rest)
    _, num_draft_B, seed_B, position_B = rest
    row_BV = target_BLV[torch.arange(len(seed_B)), num_accepted_B]
    again_B = draw(row_BV, uniform(seed_B, position_B + num_accepted_B + 999, STREAM_DRAW))
    return Verification(num_accepted_B, torch.where(num_accepted_B < num_draft_B, again_B, next_token_B))


def accept_everything(target_BLV: Tensor, *rest: Tensor) -> Verification:
    _, num_draft_B, seed_B, position_B = rest
    return Verification(num_draft_B, draw(target_BLV[:, -1], uniform(seed_B, position_B, STREAM_DRAW)))


def judge_by_the_next_row(target_BLV: Tensor, *rest: Tensor) -> Verification:
    return verify_sampled(target_BLV.roll(-1, dims=1), *rest)


@pytest.mark.parametrize(
    ("verifier", "draft"),
    [
        (without_subtraction, "most likely"),
        (accept_everything, "sampled"),
        (judge_by_the_next_row, "sampled"),
    ],
    ids=["point mass not removed", "all accepted", "row off by one"],
)
def test_wrong_verifiers_are_caught_by_the_distribution_test(verifier: Verifier, draft: str) -> None:
    assert text_excess(verifier, draft) > 10 * LIMIT, "far beyond chance"


# --- what keys by position buy


def plain_text(seed_B: Tensor) -> Tensor:
    nothing = torch.empty(len(seed_B), 0, dtype=torch.int64)
    return extend(TARGET_TABLES, nothing, sample_from(seed_B, STREAM_DRAW))


@settings(max_examples=30, deadline=None)
@given(num_columns=st.integers(0, K), drafter_seed=st.integers(0, 1000), first_seed=st.integers(0, 2**62))
def test_seeded_text_is_the_plain_one_for_any_drafts_and_any_k(
    num_columns: int, drafter_seed: int, first_seed: int
) -> None:
    seed_B = first_seed + torch.arange(64)
    generator = torch.Generator().manual_seed(drafter_seed)
    plain_BL = plain_text(seed_B)
    drafted_BK = torch.randint(0, V, (64, num_columns), generator=generator)
    is_helped_BK = torch.rand(64, num_columns, generator=generator) < 0.7
    drafted_BK = torch.where(is_helped_BK, plain_BL[:, :num_columns], drafted_BK)
    num_draft_B = torch.randint(0, num_columns + 1, (64,), generator=generator)
    target_BLV = along(TARGET_TABLES[: num_columns + 1], drafted_BK)
    position_B = torch.full_like(seed_B, POSITION)
    result = verify_sampled(target_BLV, drafted_BK, num_draft_B, seed_B, position_B)
    for row, (num_accepted, next_token) in enumerate(zip(*as_lists(result), strict=True)):
        emitted = [*drafted_BK[row, :num_accepted].tolist(), next_token]
        assert emitted == plain_BL[row, : num_accepted + 1].tolist()


@pytest.mark.parametrize("num_columns", range(K + 1))
def test_a_bonus_token_is_the_plain_draw_of_its_position(num_columns: int) -> None:
    seed_B = torch.arange(500)
    plain_BL = plain_text(seed_B)
    drafted_BK = plain_BL[:, :num_columns]
    target_BLV = along(TARGET_TABLES[: num_columns + 1], drafted_BK)
    for num_draft in range(num_columns + 1):
        arguments = (drafted_BK, torch.full_like(seed_B, num_draft), seed_B, torch.full_like(seed_B, POSITION))
        num_accepted_B, bonus_B = verify_sampled(target_BLV, *arguments)
        assert num_accepted_B.unique().tolist() == [num_draft]
        assert torch.equal(bonus_B, plain_BL[:, num_draft])
