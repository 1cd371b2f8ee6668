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
from peagle.decoding.verify import Verification, keep_path
from peagle.kernels.candidate_tree import CandidateTree, grow_tree
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


# --- the same through candidate trees, which are a function of the text so far

Keys = Callable[[Tensor], Tensor]
OFFSETS = torch.tensor([sum(V**earlier for earlier in range(depth)) for depth in range(L)])
"""where the rows of each table begin in all of them"""


def trees_after(start: int, num_nodes: int) -> CandidateTree:
    """The tree behind each of the V**start texts. The marginals of deeper depths are those behind tokens 0."""
    num_depths = K - start
    rows = [DRAFT_TABLES[start + depth][:: V**depth].log() for depth in range(num_depths)]
    logprob_BKV = torch.stack(rows, dim=1) if rows else torch.zeros(V**start, 1, V)
    return grow_tree(logprob_BKV, torch.full((V**start,), num_depths), num_nodes)


@cache
def decode_through_trees(num_nodes: int, key_of: Keys) -> tuple[Tensor, Tensor]:
    """Texts [B, L], and the nodes [B, K] that the first step kept. `key_of` turns depths of nodes into their keys."""
    text_BL, length_B = torch.zeros(NUM_SEEDS, L, dtype=torch.int64), torch.zeros(NUM_SEEDS, dtype=torch.int64)
    kept = []
    for start in range(L):
        seed_B = (length_B == start).nonzero()[:, 0]
        prefix_B = prefix_rows(text_BL[seed_B, :start])
        tree = (each[prefix_B] for each in trees_after(start, num_nodes))
        parent_BN, depth_BN, ancestors_BN, choice_BM, score_BM = tree
        num_nodes_B = (score_BM > -torch.inf).sum(1)
        tokens_BN = torch.nn.functional.pad(choice_BM, (1, 0))
        depth_BN = depth_BN * (torch.arange(num_nodes + 1) <= num_nodes_B[:, None])
        row_BN = prefix_B[:, None].repeat(1, num_nodes + 1)
        for node in range(1, num_nodes + 1):
            above_B = row_BN.gather(1, parent_BN[:, node, None])[:, 0]
            row_BN[:, node] = torch.where(depth_BN[:, node] > 0, above_B * V + tokens_BN[:, node], prefix_B)
        probs_BNV = torch.cat(TARGET_TABLES)[OFFSETS[start + depth_BN] + row_BN]
        wanted_BN = draw(probs_BNV, uniform(seed_B[:, None], POSITION + start + key_of(depth_BN), STREAM_DRAW))
        links = (parent_BN, depth_BN, ancestors_BN)
        num_accepted_B, node_BD = keep_path(wanted_BN, tokens_BN, *links, num_nodes_B, K - start)
        text_BL[seed_B, start:] = wanted_BN.gather(1, node_BD)
        length_B[seed_B] += num_accepted_B + 1
        kept.append(node_BD[:, 1:])
    return text_BL, kept[0]


def by_depth(depth_BN: Tensor) -> Tensor:
    return depth_BN


@pytest.mark.parametrize("num_nodes", [2, 8])
def test_texts_decoded_through_trees_follow_the_target_exactly(num_nodes: int) -> None:
    text_BL, kept_BD = decode_through_trees(num_nodes, by_depth)
    assert excess(torch.bincount(prefix_rows(text_BL), minlength=V**L).double(), exact_joint()) < LIMIT
    assert torch.equal(text_BL, plain_text(torch.arange(NUM_SEEDS))), "the text of plain decoding, seed by seed"
    assert len(kept_BD[:, 0].unique()) == min(num_nodes, V) + (num_nodes < V), "several branches are kept, or none"


def test_draws_that_forget_the_depth_are_caught_by_the_distribution_test() -> None:
    text_BL, _ = decode_through_trees(8, torch.zeros_like)
    assert excess(torch.bincount(prefix_rows(text_BL), minlength=V**L).double(), exact_joint()) > 10 * LIMIT


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
