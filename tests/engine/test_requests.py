"""One request's wishes are its own: sampling, drafts, stops, limits and log-probabilities in a batch of others."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine_runs import NUM_DRAFT_TOKENS, TREE_NODES, drafting, practised_drafter, run, serve, start
from harness.model_families import sequential
from peagle.decoding.reference import Step, decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import Update
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

PROMPTS = [[(7 * index + 3 * place) % 260 + 4 for place in range(1 + 5 * index % 23)] for index in range(32)]
TIGHT = {"page_size": 4, "max_length": 60, "num_pages": 19, "prefill_tokens": 16}


@dataclass(frozen=True)
class Answer:
    """An answer of the reference decoder, or of an engine."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return practised_drafter()


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def expected(target: HFTarget, prompt: list[int], params: SamplingParams, **drafting: Any) -> Answer:
    steps = list(decode(target, prompt, replace(params, num_draft_tokens=None, logprobs=None), **drafting))
    tokens = tuple(token for step in steps for token in step.token_ids)
    return Answer(tokens, "".join(step.text for step in steps), steps[-1].finish_reason)


def answers(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], close: bool = True
) -> list[Answer]:
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    outputs = run(engine)
    if close:
        engine.close()
    found = [outputs[name].outputs[0] for name in ids]
    return [Answer(each.token_ids, each.text, each.finish_reason) for each in found]


@pytest.fixture(scope="module")
def engine(drafter: Drafter) -> Iterator[Engine]:
    engine = start(drafter, page_size=4, max_batch=32)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tree_engine(drafter: Drafter) -> Iterator[Engine]:
    engine = start(drafter, page_size=4, max_batch=32, tree_nodes=TREE_NODES)
    yield engine
    engine.close()


def sampled(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=14,
        temperature=(0.5, 0.8, 1.0, 1.5)[index % 4],
        top_k=(0, 5, 40)[index % 3],
        top_p=(1.0, 0.9)[index % 2],
        min_p=(0.0, 0.02)[index % 5 == 0],
        seed=1000 + index,
    )


@pytest.fixture(scope="module")
def sampled_answers(target: HFTarget) -> list[Answer]:
    found = [expected(target, prompt, sampled(index)) for index, prompt in enumerate(PROMPTS)]
    assert len({answer.token_ids for answer in found}) == len(found), "samples vary"
    return found


@pytest.mark.slow
def test_a_seeded_request_gets_the_same_sample_in_a_batch_of_32(engine: Engine, sampled_answers: list[Answer]) -> None:
    params = [sampled(index) for index in range(32)]
    assert answers(engine, PROMPTS, params, close=False) == sampled_answers
    assert engine.stats().num_drafts > 0


@pytest.mark.parametrize(
    "method", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "eagle3", "p-eagle")), "p-eagle tree"]
)
def test_a_seeded_request_gets_the_same_sample_alone_and_after_a_preemption(
    target: HFTarget, drafter: Drafter, sampled_answers: list[Answer], method: str
) -> None:
    chosen, tree = drafting(method, drafter, target)
    params = [sampled(index) for index in range(20)]
    alone = start(chosen, max_batch=1, max_length=60, **tree)
    assert answers(alone, PROMPTS[:6], params[:6]) == sampled_answers[:6]
    tight = start(chosen, **TIGHT, **tree)
    assert answers(tight, PROMPTS[:20], params) == sampled_answers[:20]
    assert tight.stats().num_preemptions > 0, "the pages are too few for all"


def test_greedy_and_sampled_requests_with_their_own_draft_numbers_share_a_batch(
    target: HFTarget, drafter: Drafter
) -> None:
    wishes = (None, 0, 1, 3)
    params = [
        replace(greedy(12) if index % 3 else replace(sampled(index), max_tokens=12), num_draft_tokens=wishes[index % 4])
        for index in range(16)
    ]
    wanted = [expected(target, prompt, own) for prompt, own in zip(PROMPTS[:16], params, strict=True)]
    for settings in ({"page_size": 4}, TIGHT, {"page_size": 4, "tree_nodes": 9}):
        engine = start(drafter, **settings)
        ids = [engine.add(prompt, own) for prompt, own in zip(PROMPTS[:16], params, strict=True)]
        outputs = run(engine)
        engine.close()
        for name, answer, own in zip(ids, wanted, params, strict=True):
            assert outputs[name].outputs[0].token_ids == answer.token_ids, own
            acceptance = outputs[name].metrics.acceptance
            assert (acceptance.num_drafts == 0) == (own.num_draft_tokens == 0), "0 turns drafts off for it alone"
            limit = NUM_DRAFT_TOKENS if own.num_draft_tokens is None else own.num_draft_tokens
            assert not any(acceptance.accepted_per_position[limit:]), "no more drafts than asked for"


@pytest.mark.slow
def test_pages_of_a_request_without_drafts_do_not_spoil_the_drafts_of_the_next(
    target: HFTarget, drafter: Drafter
) -> None:
    """Texts decoded without drafts, then continued with them: as many are accepted as in a fresh engine.

    Whoever continues them without drafts finds their pages.
    """
    prompts = PROMPTS[:12]
    texts = [[*prompt, *expected(target, prompt, greedy(14)).token_ids] for prompt in prompts]
    found = []
    for is_warm in (False, True):
        engine = start(drafter, page_size=4)
        if is_warm:
            answers(engine, prompts, [greedy(14, num_draft_tokens=0)] * 12, close=False)
            (again, *_) = serve(engine, texts, [greedy(1, num_draft_tokens=0)] * 12)
            assert again.metrics.num_cached_tokens == 11, "three pages, answer included; the last token runs again"
        ids = [engine.add(text, greedy(12)) for text in texts]
        outputs = run(engine)
        found.append([outputs[name].metrics.acceptance for name in ids])
        engine.close()
    assert sum(outputs[name].metrics.num_cached_tokens for name in ids) == 0, "pages without drafter entries"
    assert found[0] == found[1]
    assert sum(sum(acceptance.accepted_per_position) for acceptance in found[0]) > 0, "something was accepted"


def test_several_answers_are_those_of_separate_requests_with_the_seeds_after(engine: Engine, target: HFTarget) -> None:
    params = replace(sampled(2), n=4)
    name = engine.add(PROMPTS[5], params)
    other = engine.add(PROMPTS[6], sampled(3))
    outputs = run(engine)
    for index, completion in enumerate(outputs[name].outputs):
        alone = expected(target, PROMPTS[5], replace(params, n=1, seed=params.seed + index))
        assert (completion.index, completion.token_ids) == (index, alone.token_ids)
    assert outputs[other].outputs[0].token_ids == expected(target, PROMPTS[6], sampled(3)).token_ids
    assert len({completion.token_ids for completion in outputs[name].outputs}) > 1, "answers differ"
    assert outputs[name].metrics.num_cached_tokens <= len(PROMPTS[5]), "the prompt counts once"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("fixture", ["engine", "tree_engine"])
def test_logprobs_are_those_of_the_targets_own_forward(
    request: pytest.FixtureRequest, target: HFTarget, fixture: str, temperature: float
) -> None:
    engine: Engine = request.getfixturevalue(fixture)
    params = SamplingParams(max_tokens=14, temperature=temperature, top_k=9, seed=5, logprobs=3, ignore_eos=True)
    engine.add(PROMPTS[9], sampled(1))
    name = engine.add(PROMPTS[6], params)
    bare = engine.add(PROMPTS[6], replace(params, logprobs=0))
    outputs = run(engine)
    completion = outputs[name].outputs[0]
    text = [*PROMPTS[6], *completion.token_ids]
    logprobs_TV = target.forward(torch.tensor([text])).logits_BTV[0].log_softmax(-1)
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids) == 14
    for place, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        own_V = logprobs_TV[len(PROMPTS[6]) + place - 1]
        assert entry.logprob == pytest.approx(own_V[token].item(), abs=1e-4)
        top = own_V.topk(3)
        assert list(entry.top) == top.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
    assert all(not entry.top for entry in outputs[bare].outputs[0].logprobs or ()), "0 gives only the token's own"
    assert outputs[bare].outputs[0].token_ids == completion.token_ids
    assert outputs[name].metrics.acceptance.num_accepted > 0, "some are those of drafts"


def long_drafts(
    target: HFTarget, drafter: Drafter, tree_nodes: int | None
) -> Iterator[tuple[list[int], list[Step], int]]:
    """Prompts, the reference decoder's steps, and a step of which at least two drafts were accepted."""
    drafts: dict[str, Any] = {"drafter": drafter, "num_draft_tokens": NUM_DRAFT_TOKENS, "tree_nodes": tree_nodes}
    for prompt in PROMPTS[:16]:
        steps = list(decode(target, prompt, greedy(30), **drafts))
        for index, step in enumerate(steps):
            if step.num_accepted >= 2 and len(step.token_ids) >= 3:
                yield prompt, steps, index
                break


@pytest.mark.parametrize(
    ("fixture", "tree_nodes"), [pytest.param("engine", None, marks=pytest.mark.slow), ("tree_engine", TREE_NODES)]
)
def test_an_end_inside_an_accepted_draft_cuts_the_answer_to_the_token(
    request: pytest.FixtureRequest, target: HFTarget, drafter: Drafter, fixture: str, tree_nodes: int | None
) -> None:
    """Stop tokens, stop strings and max_tokens, each at every place of a step that emits several tokens."""
    engine: Engine = request.getfixturevalue(fixture)
    prompts, params = [], []
    for prompt, steps, index in itertools.islice(long_drafts(target, drafter, tree_nodes), 2):
        before = [token for step in steps[:index] for token in step.token_ids]
        whole = "".join(step.text for step in steps)
        for place, token in enumerate(steps[index].token_ids):
            num_tokens = len(before) + place + 1
            params.append(greedy(num_tokens))
            params.append(greedy(30, stop_token_ids=(token,)))
            text = target.tokenizer.decode([token])
            params.append(greedy(30, stop=(text, "never said")))
            params.append(greedy(30, stop=(whole[num_tokens - 1 : num_tokens + 2],)))
            prompts += [prompt] * 4
    params = [own if all(own.stop) else replace(own, stop=()) for own in params]
    assert len(params) >= 18, "enough drafts of which several tokens were accepted"
    wanted = [expected(target, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    assert {answer.finish_reason for answer in wanted} == {"stop", "length"}
    assert answers(engine, prompts, params, close=False) == wanted


def test_listeners_hear_the_whole_answer_in_order(engine: Engine, target: HFTarget) -> None:
    heard: list[Update] = []
    params = replace(greedy(20), stop=("zz",))
    name = engine.add(PROMPTS[4], params, on_update=heard.append)
    completion = run(engine)[name].outputs[0]
    wanted = expected(target, PROMPTS[4], params)
    assert tuple(token for update in heard for token in update.token_ids) == wanted.token_ids == completion.token_ids
    assert "".join(update.text for update in heard) == wanted.text == completion.text
    assert [update.finish_reason for update in heard[:-1]] == [None] * (len(heard) - 1)
    assert heard[-1].finish_reason == wanted.finish_reason
    assert all(len(update.texts) == len(update.token_ids) for update in heard)


@pytest.mark.parametrize("left", [1, 2, 5, 9])
def test_the_answer_ends_where_the_context_does(target: HFTarget, drafter: Drafter, left: int) -> None:
    prompt = [(11 * place) % 250 + 5 for place in range(target.max_length - left)]
    wanted = expected(target, prompt, greedy(50))
    assert len(wanted.token_ids) == left and wanted.finish_reason == "length"
    for method in (None, drafter, sequential(drafter, target)):
        engine = start(method, page_size=16)
        assert answers(engine, [prompt, prompt[:9]], [greedy(50), greedy(5)])[0] == wanted


def test_the_engines_own_length_limit_ends_answers_too(target: HFTarget, drafter: Drafter) -> None:
    engine = start(drafter, max_length=20, page_size=4)
    (found,) = answers(engine, [PROMPTS[2]], [greedy(50)])
    assert len(PROMPTS[2]) + len(found.token_ids) == 20 and found.finish_reason == "length"
    assert found.token_ids == expected(target, PROMPTS[2], greedy(50)).token_ids[: len(found.token_ids)]


@pytest.mark.parametrize("tree", [{}, {"tree_nodes": 6}])
def test_a_request_without_drafts_costs_one_token_per_step(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, tree: dict[str, int]
) -> None:
    engine = start(drafter, page_size=4, **tree)
    num_verified, num_drafted = [], []
    forward, draft = engine.runner.paged_target.forward, engine.runner.step.drafting._run_layers

    def count_target(token_ids_N: Tensor, *arguments: Any, **options: Any) -> Any:
        num_verified.append(len(token_ids_N))
        return forward(token_ids_N, *arguments, **options)

    def count_drafter(batch: Any) -> Any:
        num_drafted.append(len(batch.last_B))
        return draft(batch)

    plain = SamplingParams(max_tokens=6, ignore_eos=True, num_draft_tokens=0)
    serve(engine, PROMPTS[3:5], [greedy(4)] * 2)
    assert (engine.runner.state.confidence[:2] > -math.inf).any(), "earlier requests left drafts in the rows"
    names = [engine.add(PROMPTS[0], plain), engine.add(PROMPTS[1], plain)]
    monkeypatch.setattr(engine.runner.step.drafting, "_run_layers", count_drafter)
    engine.step()
    assert num_drafted == [], "nor does the drafter read their prompts"
    assert (engine.runner.state.confidence[:2] == -math.inf).all()
    monkeypatch.setattr(engine.runner.paged_target, "forward", count_target)
    engine.step()
    assert (num_verified, num_drafted) == ([2], []), "a batch without drafts is plain decoding"
    drafted = engine.add(PROMPTS[2], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    assert num_verified[-1] == 2 + 1 + (tree.get("tree_nodes") or NUM_DRAFT_TOKENS) and num_drafted[-1] == 1
    outputs = run(engine)
    engine.close()
    assert outputs.keys() >= {*names, drafted}
    for name, prompt in zip(names, PROMPTS, strict=False):
        assert outputs[name].outputs[0].token_ids == expected(target, prompt, plain).token_ids
