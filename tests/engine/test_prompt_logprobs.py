"""Log-probabilities of prompts: those of the target's own forward, in pieces, beside others, and after a preemption."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.engine_runs import answer, run, start
from harness.model_families import trained_drafter
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import Update
from peagle.errors import RequestError
from peagle.sampling_params import Grammar, SamplingParams
from peagle.scheduling import scheduler as scheduler_module
from peagle.scheduling.request import TokenLogprobs
from peagle.targets.hf import HFTarget

PROMPTS = [[(7 * index + 3 * place) % 260 + 4 for place in range(1 + 5 * index % 31)] for index in range(16)]
for index in (9, 11, 13):
    PROMPTS[index][:12] = PROMPTS[8][:12]
PLAIN = SamplingParams(max_tokens=10, ignore_eos=True)
ROOMY = ({"page_size": 4}, {"page_size": 4, "prefill_tokens": 5})
TIGHT = {"page_size": 4, "max_length": 60, "num_pages": 21, "prefill_tokens": 12}


@pytest.fixture(scope="module")
def expected(target: HFTarget) -> list[tuple[int, ...]]:
    return [answer(target, prompt, PLAIN) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafter(target: HFTarget, expected: list[tuple[int, ...]]) -> Drafter:
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    return trained_drafter(target, [text for text in texts if len(text) > 14], num_steps=80)


def check(found: tuple[TokenLogprobs | None, ...] | None, target: HFTarget, prompt: list[int], num_top: int) -> None:
    own_TV = target.forward(torch.tensor([prompt])).logits_BTV[0].log_softmax(-1)
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for place, entry in enumerate(found[1:], start=1):
        assert entry is not None
        assert entry.logprob == pytest.approx(own_TV[place - 1, prompt[place]].item(), abs=1e-4)
        top = own_TV[place - 1].topk(num_top)
        assert list(entry.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
        assert list(entry.top) == top.indices.tolist()


@pytest.mark.parametrize("has_drafter", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "settings",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ROOMY), TIGHT],
)
def test_prompts_are_scored_as_by_the_targets_own_forward_whatever_runs_beside_them(
    target: HFTarget,
    drafter: Drafter,
    expected: list[tuple[int, ...]],
    settings: dict[str, Any],
    has_drafter: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every second request asks; prompts begin alike, so that pages could have been taken over."""
    monkeypatch.setattr(scheduler_module, "SCORED_TOKENS", 7)
    engine = start(drafter if has_drafter else None, **settings)
    for _ in range(2):
        ids = [
            engine.add(prompt, replace(PLAIN, prompt_logprobs=3 if index % 2 else None))
            for index, prompt in enumerate(PROMPTS)
        ]
        outputs = run(engine)
        for index, (name, prompt) in enumerate(zip(ids, PROMPTS, strict=True)):
            assert outputs[name].outputs[0].token_ids == expected[index]
            if index % 2:
                check(outputs[name].prompt_logprobs, target, prompt, 3)
                assert outputs[name].metrics.num_cached_tokens == 0, "all of the prompt had to be run"
            else:
                assert outputs[name].prompt_logprobs is None
    stats = engine.stats()
    engine.close()
    if settings is TIGHT:
        assert stats.num_preemptions > 0, "the pages are too few for all"
    else:
        assert stats.num_cached_tokens > 0, "the others reuse pages all the same"


def test_a_plan_scores_no_more_tokens_than_it_has_room_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SCORED_TOKENS", 6)
    scored: list[int] = []
    plan = engine.scheduler.plan

    def watched(*arguments: Any) -> Any:
        made = plan(*arguments)
        scored.append(sum(chunk.end - chunk.start for chunk in made.chunks if chunk.request.wants_scores))
        return made

    monkeypatch.setattr(engine.scheduler, "plan", watched)
    for prompt in PROMPTS[5:9]:
        engine.add(prompt, replace(PLAIN, prompt_logprobs=0))
    run(engine)
    assert max(scored) == 6


def test_listeners_get_them_with_the_first_update_of_the_first_answer(engine: Engine, target: HFTarget) -> None:
    heard: list[Update] = []
    params = SamplingParams(max_tokens=12, temperature=0.9, n=3, prompt_logprobs=1, logprobs=1)
    name = engine.add(PROMPTS[5], params, on_update=heard.append)
    output = run(engine)[name]
    own = [update for update in heard if update.index == 0]
    check(own[0].prompt_logprobs, target, PROMPTS[5], 1)
    assert own[0].prompt_logprobs == output.prompt_logprobs
    assert [update for update in heard if update.prompt_logprobs is not None] == own[:1]


def test_they_go_together_with_penalties_and_grammars(engine: Engine, target: HFTarget) -> None:
    params = SamplingParams(
        max_tokens=30, prompt_logprobs=2, repetition_penalty=1.4, grammar=Grammar("regex", "[a-z]{3,9}")
    )
    name = engine.add(PROMPTS[7], params)
    output = run(engine)[name]
    check(output.prompt_logprobs, target, PROMPTS[7], 2)
    assert output.outputs[0].token_ids == answer(target, PROMPTS[7], replace(params, prompt_logprobs=None))


def test_a_prompt_of_one_token_has_nothing_to_score(engine: Engine) -> None:
    name = engine.add([7], replace(PLAIN, prompt_logprobs=2))
    assert run(engine)[name].prompt_logprobs == (None,)


def test_numbers_out_of_range_and_the_reference_decoder_refuse(target: HFTarget) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs must be between 0 and 20, or None, got 21"):
        SamplingParams(prompt_logprobs=21)
    with pytest.raises(RequestError, match="does not report log-probabilities, got prompt_logprobs=1"):
        decode(target, [5], SamplingParams(prompt_logprobs=1))
