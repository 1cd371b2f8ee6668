"""Which rows a verification pass has, and that leaving drafts out changes how fast answers come and nothing else."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine_runs import NUM_DRAFT_TOKENS, answer, run, start
from harness.model_families import sequential, trained_drafter
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import Update
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import decode_buckets, prefill_buckets, verify_sizes
from peagle.scheduling.draft_budget import DraftCurve
from peagle.targets.hf import HFTarget
from peagle.worker.row_state import RowState
from peagle.worker.verify_batch import all_drafts, draft_curve, likeliest_counts, likeliest_drafts

PAGE_SIZE = 4
MAX_POSITION = 60
MAX_TOKENS = 24


def make_state(num_rows: int, num_drafts: int, seed: int = 0) -> RowState:
    """Rows of different texts, each with pages of its own, and drafts that grow less likely."""
    torch.manual_seed(seed)
    state = RowState.empty(num_rows, 16, num_drafts, torch.device("cpu"))
    state.page_table[:num_rows, :16] = 1 + torch.randperm(num_rows * 16).view(num_rows, 16).int()
    state.length[:num_rows] = torch.randint(1, 50, (num_rows,))
    state.tokens[:num_rows] = torch.randint(0, 1000, (num_rows, num_drafts + 1))
    state.confidence[:num_rows] = torch.rand(num_rows, num_drafts).log().cumsum(1)
    return state


def falling(num_requests: int, num_drafts: int) -> st.SearchStrategy[list[list[float]]]:
    """Confidences of drafts: each row falls; with ties, certainty and impossibility."""
    one = st.sampled_from([0.0, -0.5, -1.0, -2.0, float("-inf")])
    row = st.lists(one, min_size=num_drafts, max_size=num_drafts).map(lambda row: sorted(row, reverse=True))
    return st.lists(row, min_size=num_requests, max_size=num_requests)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_as_many_drafts_are_chosen_as_there_is_room_for_and_none_left_out_is_likelier(data: st.DataObject) -> None:
    num_requests, num_drafts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    confidence = data.draw(falling(num_requests, num_drafts))
    room = data.draw(st.integers(0, num_requests * num_drafts))
    counts = likeliest_counts(torch.tensor(confidence), room).tolist()
    assert sum(counts) == room
    chosen = [value for row, count in zip(confidence, counts, strict=True) for value in row[:count]]
    left = [value for row, count in zip(confidence, counts, strict=True) for value in row[count:]]
    assert not chosen or not left or min(chosen) >= max(left)


def test_drafts_of_a_drafter_that_gave_no_number_come_last() -> None:
    confidence = torch.tensor([[float("nan"), float("nan")], [-9.0, -10.0]])
    assert likeliest_counts(confidence, 2).tolist() == [0, 2]
    assert likeliest_counts(confidence, 3).tolist() == [1, 2]


@pytest.mark.parametrize("num_rows", [14, 15, 20, 34])
def test_the_rows_of_a_request_are_the_first_of_all_its_rows(num_rows: int) -> None:
    state, rows_B = make_state(8, 4), torch.tensor([3, 0, 7, 5, 1, 2, 6])
    whole = all_drafts(state, rows_B, PAGE_SIZE, MAX_POSITION)
    some = likeliest_drafts(state, rows_B, num_rows, PAGE_SIZE, MAX_POSITION)
    confidence_BK = state.confidence[rows_B]
    confidence_BK[:, 0] = float("inf")  # the first draft of each comes before all others
    counts = likeliest_counts(confidence_BK, num_rows - len(rows_B))
    assert len(some.token_ids_N) == num_rows
    bounds = some.paged_rows.first_row_B1.tolist()
    assert bounds[0] == 0 and bounds[-1] == num_rows
    for request, count in enumerate(counts.tolist()):
        own, ours = slice(bounds[request], bounds[request + 1]), slice(5 * request, 5 * request + count + 1)
        for name in ("token_ids_N", "position_N", "row_N"):
            assert getattr(some, name)[own].tolist() == getattr(whole, name)[ours].tolist(), name
        assert some.paged_rows.cell_N[own].tolist() == whole.paged_rows.cell_N[ours].tolist()
        places = some.place_BL[request].tolist()
        assert places == [bounds[request] + min(offset, count) for offset in range(5)]
    assert some.num_drafts_B.tolist() == counts.tolist()
    assert torch.equal(some.paged_rows.page_table_BP, whole.paged_rows.page_table_BP)
    assert torch.equal(some.paged_rows.context_B, whole.paged_rows.context_B)
    assert len(some.paged_rows.span_L0) == len(whole.paged_rows.span_L0) == 5


def test_a_tree_is_stored_in_order_and_has_the_positions_of_its_depths() -> None:
    state = make_state(2, 3)
    state = replace(state, is_tree=True)
    state.depth[1], state.ancestors[1] = torch.tensor([0, 1, 1, 2]), torch.tensor([0b0001, 0b0011, 0b0101, 0b1011])
    rows_B = torch.tensor([0, 1])
    whole = all_drafts(state, rows_B, PAGE_SIZE, MAX_POSITION)
    some = likeliest_drafts(state, rows_B, 7, PAGE_SIZE, MAX_POSITION)
    lengths = state.length.tolist()
    assert whole.position_N.tolist() == [lengths[0] + depth for depth in range(4)] + [
        lengths[1] + depth for depth in (0, 1, 1, 2)
    ]
    table = state.page_table[1].tolist()
    cells = [table[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE for index in range(lengths[1], lengths[1] + 4)]
    assert whole.paged_rows.cell_N[4:].tolist() == cells
    for rows in (whole, some):
        assert rows.paged_rows.tree is not None
        first, end = rows.paged_rows.first_row_B1[1:].tolist()
        assert rows.paged_rows.tree.ancestors_N[first:end].tolist() == state.ancestors[1, : end - first].tolist()
        assert rows.paged_rows.tree.depth_N[first:end].tolist() == state.depth[1, : end - first].tolist()


def test_requests_that_want_fewer_drafts_and_rows_that_are_nobodys_leave_room_for_others() -> None:
    state = make_state(3, 4)
    state.confidence[0] = torch.tensor([0.0, *[-float("inf")] * 3])  # sure of the one that the request wants
    rows_B = torch.tensor([0, 1, 2, state.padding_row, state.padding_row])
    rows = likeliest_drafts(state, rows_B, 5 + 9, PAGE_SIZE, MAX_POSITION)
    assert rows.num_drafts_B.tolist() == [1, 4, 4, 0, 0]


def test_rows_are_shared_only_beyond_the_limit() -> None:
    assert verify_sizes(5, 7, 0) == (5, 40)
    assert verify_sizes(5, 7, 40) == (5, 40)
    assert verify_sizes(6, 7, 40) == (6, 40)
    assert verify_sizes(30, 7, 40) == (30, 60), "the first draft of each, whatever the limit"
    assert verify_sizes(30, 0, 40) == (30,), "plain decoding has nothing to leave out"


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(1, 256), num_drafts=st.integers(0, 62))
def test_sizes_to_choose_from_have_room_for_a_draft_each_for_some_or_for_none(batch: int, num_drafts: int) -> None:
    plain, *others = verify_sizes(batch, num_drafts)
    few = [size for size in others if size < 2 * batch]
    assert plain == batch and all(plain < size <= batch * (num_drafts + 1) for size in others)
    assert len(few) == (batch >= 32 and num_drafts > 0) and (len(others) > len(few)) == bool(num_drafts)


@pytest.mark.parametrize("num_drafts", [7, 31])
def test_a_pass_for_few_drafting_requests_needs_few_more_graphs(num_drafts: int) -> None:
    sizes = [verify_sizes(batch, num_drafts) for batch in decode_buckets(256)]
    num_few = sum(batch < size < 2 * batch for batch, *others in sizes for size in others)
    num_prefills = 2 * len(prefill_buckets(2048))
    assert 0 < num_few <= 0.1 * (sum(map(len, sizes)) - num_few + num_prefills)


def test_a_curve_tells_what_the_likeliest_drafts_bring() -> None:
    torch.manual_seed(0)
    confidence_RM = (torch.rand(9, 6) * 0.9 + 0.05).log().cumsum(1)
    confidence_RM[3] = float("-inf")
    rows_B = torch.tensor([0, 3, 5, 8])
    curve = DraftCurve(*draft_curve(confidence_RM, rows_B).tolist())
    sorted_N = confidence_RM[rows_B].flatten().exp().sort(descending=True).values
    for num_drafts in range(1, 18):
        assert curve.expected(num_drafts) == pytest.approx(float(sorted_N[:num_drafts].sum()), abs=0.12)
    assert curve.expected(0) == 0 and curve.expected(99) == pytest.approx(float(sorted_N.sum()), abs=0.02)


# In an engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 268) for _ in range(rng.randrange(4, 30))] for _ in range(12)]


@pytest.fixture(scope="module")
def parallel(target: HFTarget, prompts: list[list[int]]) -> Drafter:
    params = SamplingParams(max_tokens=MAX_TOKENS)
    return trained_drafter(target, [[*prompt, *answer(target, prompt, params)] for prompt in prompts])


@pytest.fixture(scope="module", params=["p-eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def drafter(request: pytest.FixtureRequest, parallel: Drafter, target: HFTarget) -> Drafter:
    return parallel if request.param == "p-eagle" else sequential(parallel, target)


def served(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[Any], list[Update]]:
    heard: list[Update] = []
    ids = [engine.add(prompt, own, on_update=heard.append) for prompt, own in zip(prompts, params, strict=True)]
    outputs = run(engine)
    return [outputs[name] for name in ids], heard


def test_greedy_and_sampled_answers_are_those_of_the_reference_decoder(
    drafter: Drafter, target: HFTarget, prompts: list[list[int]]
) -> None:
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8 * (index % 2), seed=index, logprobs=2)
        for index in range(len(prompts))
    ]
    engine, whole = start(drafter, page_size=4, verify_tokens=30), start(drafter, page_size=4)
    try:
        outputs, heard = served(engine, prompts, params)
        expected, _ = served(whole, prompts, params)
    finally:
        engine.close()
        whole.close()
    for output, theirs, prompt, own in zip(outputs, expected, prompts, params, strict=True):
        assert output.outputs[0].token_ids == answer(target, prompt, replace(own, logprobs=None))
        ours = [each.logprob for each in output.outputs[0].logprobs]
        assert ours == pytest.approx([each.logprob for each in theirs.outputs[0].logprobs], abs=1e-4)
    checked = [update.num_drafts for update in heard if not update.is_prefill]
    assert {1, NUM_DRAFT_TOKENS} < set(checked), "some requests have one of their drafts verified, some all"
    assert all(update.num_accepted <= update.num_drafts for update in heard)
    assert min(checked) == 1, "never none, so a step with drafts is known by them"
    bonus = [update for update in heard if "bonus" in update.kinds]
    assert any(update.num_drafts < NUM_DRAFT_TOKENS for update in bonus), "a draft that was cut short and kept whole"


def test_counts_are_of_the_drafts_that_were_verified(parallel: Drafter, prompts: list[list[int]]) -> None:
    engine = start(parallel, page_size=4, verify_tokens=30)
    try:
        outputs, heard = served(engine, prompts, [SamplingParams(max_tokens=MAX_TOKENS)] * len(prompts))
        stats = engine.stats()
    finally:
        engine.close()
    steps = [update for update in heard if not update.is_prefill]
    assert stats.num_drafts == len(steps)
    assert stats.num_draft_tokens == sum(update.num_drafts for update in steps)
    assert stats.num_draft_tokens == sum(output.metrics.num_draft_tokens for output in outputs)
    assert sum(stats.accepted_per_position) == sum(update.num_accepted for update in steps)


def test_a_request_that_adjusts_its_logits_shares_the_limit_of_its_batch(
    parallel: Drafter, target: HFTarget, prompts: list[list[int]]
) -> None:
    """Whoever opted out has one token, as in any other batch."""
    wishes = ({"frequency_penalty": 0.5}, {"num_draft_tokens": 0}, {})
    params = [SamplingParams(max_tokens=MAX_TOKENS, **wishes[min(index, 2)]) for index in range(len(prompts))]
    engine, sizes = start(parallel, page_size=4, verify_tokens=30), list[tuple[int, int]]()
    forward = engine.runner.step.target.forward

    def recorded(
        token_ids_N: torch.Tensor, position_N: torch.Tensor, memory: Any, rows: Any, *rest: Any, **has: Any
    ) -> Any:
        sizes.append((len(rows.context_B), len(token_ids_N)))
        return forward(token_ids_N, position_N, memory, rows, *rest, **has)

    engine.runner.step.target.forward = recorded  # type: ignore[method-assign]
    outputs, heard = served(engine, prompts, params)
    engine.close()
    for output, prompt, own in zip(outputs, prompts, params, strict=True):
        assert output.outputs[0].token_ids == answer(target, prompt, replace(own, num_draft_tokens=None))
    own = {
        update.num_drafts for update in heard if update.request_id == outputs[0].request_id and not update.is_prefill
    }
    assert own and max(own) <= NUM_DRAFT_TOKENS and min(own) < NUM_DRAFT_TOKENS, "some of its drafts are left out"
    full = [size for num_requests, size in sizes[1:] if num_requests == len(prompts)]
    assert full and max(full) <= 30, sizes


def test_the_likeliest_drafts_bring_more_than_the_same_number_of_each_request(
    parallel: Drafter, prompts: list[list[int]]
) -> None:
    """What sharing is for: of 12 requests with 4 drafts each, 24 are verified."""
    accepted = {}
    for name, own, limit in (("shared", None, 36), ("two each", 2, None)):
        engine = start(parallel, page_size=4, verify_tokens=limit)
        try:
            served(engine, prompts, [SamplingParams(max_tokens=MAX_TOKENS, num_draft_tokens=own)] * len(prompts))
            stats = engine.stats()
            accepted[name] = sum(stats.accepted_per_position) / stats.num_drafts
        finally:
            engine.close()
    assert accepted["shared"] > accepted["two each"]


def test_without_a_limit_every_draft_is_verified(parallel: Drafter, prompts: list[list[int]]) -> None:
    engine = start(parallel, page_size=4, verify_tokens=0)
    try:
        served(engine, prompts, [SamplingParams(max_tokens=MAX_TOKENS)] * len(prompts))
        stats = engine.stats()
    finally:
        engine.close()
    assert stats.num_draft_tokens == NUM_DRAFT_TOKENS * stats.num_drafts


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="verify_tokens must be at least 0"):
        start(None, verify_tokens=-1)
