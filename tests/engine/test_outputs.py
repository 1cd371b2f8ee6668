"""What an engine tells about its answers: how each token came about, when things happened, and who was refused."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, islice

import pytest

from harness.engine_runs import PROMPTS as MORE_PROMPTS
from harness.engine_runs import practised_drafter
from harness.model_families import family_target
from peagle.decoding.acceptance import Acceptance, VerifiedDraft
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.async_engine import AsyncEngine
from peagle.engine.engine import Engine
from peagle.engine.outputs import RequestOutput, Update
from peagle.errors import CapacityError, ConfigError, QueueFullError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

NUM_DRAFT_TOKENS = 4
PROMPTS = MORE_PROMPTS[:12]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return family_target("llama", seed=3)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return practised_drafter()


@pytest.fixture
def small(drafter: Drafter) -> Iterator[Engine]:
    """Two rows, and room for three that wait."""
    config = EngineConfig(max_batch=2, max_waiting=3, page_size=4, max_length=60, verify_tokens=0)
    engine = Engine(family_target("llama", seed=3), drafter, NUM_DRAFT_TOKENS, config)
    yield engine
    engine.close()


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@pytest.mark.parametrize(
    ("num_draft_tokens", "tree_nodes"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, None), (NUM_DRAFT_TOKENS, None))), (2, 9)],
)
def test_every_token_has_the_kind_that_the_reference_decoder_gives_it(
    target: HFTarget, drafter: Drafter, num_draft_tokens: int, tree_nodes: int | None
) -> None:
    own = drafter if num_draft_tokens else None
    config = EngineConfig(page_size=4, max_length=80, verify_tokens=0, tree_nodes=tree_nodes)
    engine = Engine(family_target("llama", seed=3), own, num_draft_tokens, config)
    heard: dict[int, list[Update]] = {index: [] for index in range(len(PROMPTS))}
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, replace(PARAMS, max_tokens=20 + index % 4), on_update=heard[index].append)
    run(engine)
    engine.close()
    found: Counter[str] = Counter()
    for index, prompt in enumerate(PROMPTS):
        params = replace(PARAMS, max_tokens=20 + index % 4)
        drafts = {"drafter": own, "num_draft_tokens": num_draft_tokens, "tree_nodes": tree_nodes}
        steps = list(decode(target, prompt, params, **drafts))
        assert [update.token_ids for update in heard[index]] == [step.token_ids for step in steps]
        assert [update.kinds for update in heard[index]] == [step.kinds for step in steps]
        assert [update.num_drafts for update in heard[index]] == [len(step.draft_token_ids) for step in steps]
        found.update(kind for update in heard[index] for kind in update.kinds)
    wanted = {"prefill", "accepted", "recovered", "bonus"} if num_draft_tokens else {"prefill", "plain"}
    assert set(found) == wanted, found


def test_the_last_update_of_a_request_carries_what_its_output_says(small: Engine) -> None:
    heard: list[Update] = []
    name = small.add(PROMPTS[3], replace(PARAMS, n=2, temperature=0.9), on_update=heard.append)
    late: list[Update] = []
    small.add(PROMPTS[4], PARAMS, on_update=late.append)
    output = run(small)[name]
    metrics = output.metrics
    places: list[VerifiedDraft] = []
    for index in (0, 1):
        own = [update for update in heard if update.index == index]
        before = accumulate((len(update.token_ids) for update in own), initial=0)
        pairs = [(place, update) for place, update in zip(before, own, strict=False) if update.num_drafts]
        places += [VerifiedDraft(len(PROMPTS[3]), place, update.num_accepted) for place, update in pairs]
    assert output.verified_drafts == places
    assert [update.metrics for update in heard[:-1]] == [None] * (len(heard) - 1)
    assert heard[-1].metrics == metrics
    num_drafts = sum(update.num_drafts > 0 for update in heard)
    assert metrics.acceptance.num_drafts == num_drafts
    assert metrics.num_draft_tokens == NUM_DRAFT_TOKENS * num_drafts == sum(update.num_drafts for update in heard)
    assert metrics.acceptance.num_accepted == sum(update.num_accepted for update in heard)
    assert metrics.started_at is not None and metrics.first_token_at is not None and metrics.finished_at is not None
    assert metrics.arrived <= metrics.started_at <= metrics.first_token_at <= metrics.finished_at
    assert metrics.queue_seconds == metrics.started_at - metrics.arrived
    second = late[-1].metrics
    assert second is not None and second.started_at is not None
    assert second.started_at > metrics.started_at, "it waited for a row"
    stats = small.stats()
    assert stats.num_draft_tokens == metrics.num_draft_tokens + second.num_draft_tokens
    assert stats.num_prompt_tokens == len(PROMPTS[3]) + len(PROMPTS[4])


def cut_inside_a_draft(target: HFTarget, drafter: Drafter) -> Iterator[tuple[list[int], SamplingParams, Acceptance]]:
    """Prompts, params that end the answer at the first of several accepted tokens, and what the reference counts."""
    for prompt in PROMPTS:
        num_tokens = 0
        for step in decode(target, prompt, PARAMS, drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS):
            if step.num_accepted > 1:
                params = replace(PARAMS, max_tokens=num_tokens + 1)
                steps = list(decode(target, prompt, params, drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS))
                assert steps[-1].num_accepted > steps[-1].num_accepted_emitted == 1
                accepted = [step.num_accepted_emitted for step in steps if step.draft_token_ids]
                yield prompt, params, Acceptance.of(accepted, NUM_DRAFT_TOKENS)
                break
            num_tokens += len(step.token_ids)


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_accepted_tokens_after_the_end_of_an_answer_are_not_counted(
    target: HFTarget, drafter: Drafter, small: Engine, number: int
) -> None:
    prompt, params, expected = next(islice(cut_inside_a_draft(target, drafter), number, None))
    heard: list[Update] = []
    name = small.add(prompt, params, on_update=heard.append)
    assert run(small)[name].metrics.acceptance == expected
    assert sum(update.num_accepted for update in heard) == expected.num_accepted
    assert tuple(small.stats().accepted_per_position) == expected.accepted_per_position


def test_an_aborted_request_tells_how_far_it_came(small: Engine) -> None:
    heard: list[Update] = []
    name = small.add(PROMPTS[3], PARAMS, on_update=heard.append)
    for _ in range(4):
        small.step()
    small.abort(name)
    assert heard[-1].finish_reason == "abort" and heard[-1].kinds == ()
    assert heard[-1].metrics is not None
    assert heard[-1].metrics.acceptance.num_drafts == sum(update.num_drafts > 0 for update in heard)


def test_one_request_more_than_may_wait_is_refused_until_another_has_gone(small: Engine) -> None:
    names = [small.add(prompt, PARAMS) for prompt in PROMPTS[:5]]
    with pytest.raises(QueueFullError, match=r"the queue is full \(5 waiting, max_waiting=3\)") as caught:
        small.add(PROMPTS[5], PARAMS)
    assert isinstance(caught.value, CapacityError) and caught.value.hint is not None
    small.step()
    assert (small.stats().num_running, small.stats().num_waiting) == (2, 3)
    with pytest.raises(QueueFullError, match=r"the queue is full \(3 waiting"):
        small.add(PROMPTS[5], PARAMS)
    small.abort(names[4])
    with pytest.raises(QueueFullError):
        small.add(PROMPTS[5], replace(PARAMS, n=2))
    names[4] = small.add(PROMPTS[5], PARAMS)
    with pytest.raises(CapacityError, match=r"n=6 exceeds capacity \(batch \+ queue = 5\)"):
        small.add(PROMPTS[6], replace(PARAMS, n=6))
    assert set(run(small)) == set(names), "nobody who was let in is lost"
    assert small.stats().num_refused == 3
    assert small.stats().num_pages_used == 0


def test_a_full_queue_reaches_the_stream_that_met_it(small: Engine) -> None:
    async def use() -> list[object]:
        async def one(prompt: list[int]) -> object:
            try:
                return [update async for update in engine.stream(prompt, PARAMS)][-1].finish_reason
            except QueueFullError as error:
                return error

        async with AsyncEngine(small) as engine, asyncio.timeout(60):
            return list(await asyncio.gather(*(one(prompt) for prompt in PROMPTS * 2)))

    ends = asyncio.run(use())
    refused = [end for end in ends if isinstance(end, QueueFullError)]
    assert refused, "24 at once are too many"
    assert ends.count("length") + len(refused) == len(ends) and ends.count("length") >= 5


def test_a_queue_of_negative_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_waiting must be at least 0, got -1"):
        EngineConfig(max_waiting=-1)
