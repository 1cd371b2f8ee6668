"""Prompts that run in the pass of a decode step get the answers and drafts that they get in passes of their own."""

from dataclasses import replace

import pytest

from harness.model_families import family_target, sequential, trained_drafter
from peagle.decoding.reference import Step, decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget
from peagle.worker.launch import Launch

PROMPTS = [[1, *range(20 + index, 20 + index + 11 * index + 2)] for index in range(8)]
PARAMS = [SamplingParams(max_tokens=20, temperature=float(index % 2), seed=index) for index in range(len(PROMPTS))]
METHODS = {"none": (0, None), "eagle3": (3, None), "p-eagle": (4, None), "p-eagle tree": (4, 9)}


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def models(request: pytest.FixtureRequest) -> tuple[HFTarget, HFTarget, Drafter]:
    """A target for the reference decoder, the same for the engine, and a drafter that is right about some tokens."""
    target = family_target(request.param)
    texts = [prompt + tokens(list(decode(target, prompt, PARAMS[0]))) for prompt in PROMPTS]
    return target, family_target(request.param), trained_drafter(target, texts)


def tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


@pytest.mark.parametrize(
    "method", ["p-eagle tree", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "eagle3", "p-eagle"))]
)
def test_answers_and_drafts_are_those_of_separate_passes(
    models: tuple[HFTarget, HFTarget, Drafter], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, served, drafter = models
    num_drafts, nodes = METHODS[method]
    own = None if method == "none" else sequential(drafter, target) if method == "eagle3" else drafter
    settings = {"drafter": own, "num_draft_tokens": num_drafts, "tree_nodes": nodes}
    expected = [list(decode(target, prompt, each, **settings)) for prompt, each in zip(PROMPTS, PARAMS, strict=True)]
    config = EngineConfig(page_size=4, max_batch=6, max_length=160, verify_tokens=0, tree_nodes=nodes)
    engine = Engine(served, own, num_drafts, config)
    engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
    launches: list[Launch] = []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda plan: launches.append(made := launch(plan)) or made)

    for _ in range(2):  # the second time from the prefix cache
        outputs, waiting = {}, list(range(len(PROMPTS)))
        while waiting or engine.has_work:
            if waiting:
                index = waiting.pop(0)
                engine.add(PROMPTS[index], PARAMS[index], request_id=str(index))
            outputs |= {int(output.request_id): output for output in engine.step()}
            engine.check_integrity()
        for index, steps in enumerate(expected):
            output = outputs[index]
            assert list(output.outputs[0].token_ids) == tokens(steps)
            accepted = [step.num_accepted_emitted for step in steps if step.draft_token_ids]
            assert list(output.metrics.accepted_by_draft) == accepted
    engine.close()
    assert sum(each.is_shared for each in launches) > 6, "most prompts arrive while others decode"
    assert engine.stats().num_pages_used == 0


def test_passes_that_adjust_or_score_logits_are_not_shared(models: tuple[HFTarget, HFTarget, Drafter]) -> None:
    _, served, drafter = models
    engine = Engine(served, drafter, 4, EngineConfig(page_size=4, max_batch=6, max_length=160, verify_tokens=0))
    engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=8))
    engine.step()
    for params, shares_pass in (
        (SamplingParams(max_tokens=8), True),
        (SamplingParams(max_tokens=8, prompt_logprobs=1), False),
        (SamplingParams(max_tokens=8, presence_penalty=0.5), False),
    ):
        engine.add(PROMPTS[2], params)
        plan = engine.scheduler.plan()
        assert plan.chunks and plan.shares_pass == shares_pass
        engine.runner.launch(plan).collect()
        engine.reset()
        engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
        engine.add(PROMPTS[0], SamplingParams(max_tokens=8))
        engine.step()
    engine.close()


def test_plain_steps_of_an_engine_with_a_drafter_are_not_shared(models: tuple[HFTarget, HFTarget, Drafter]) -> None:
    _, served, drafter = models
    config = EngineConfig(page_size=4, max_batch=6, max_length=160, verify_tokens=0, prefill_tokens=128)
    engine = Engine(served, drafter, 4, config)
    engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
    shared = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: shared.append(plan.shares_pass) or launch(plan)  # type: ignore[method-assign]
    long = [*PROMPTS[0], *PROMPTS[7], *PROMPTS[7][:60]]
    for first, second, prompt, expected in (
        (0, 0, PROMPTS[2], [False, False, False]),
        (4, 4, PROMPTS[2], [False, True, False]),
        (0, 4, long, [False, False, False]),
    ):
        for text, num_draft_tokens in ((PROMPTS[0], first), (prompt, second)):
            engine.add(text, SamplingParams(max_tokens=8, ignore_eos=True, num_draft_tokens=num_draft_tokens))
            engine.step()
        engine.step()
        assert shared == expected
        engine.reset()
        engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
        shared.clear()
    engine.close()


def test_a_shared_pass_keeps_to_the_limit_of_a_verification_pass(models: tuple[HFTarget, HFTarget, Drafter]) -> None:
    _, served, drafter = models
    config = EngineConfig(page_size=4, max_batch=6, max_length=160, verify_tokens=3, tree_nodes=9)
    engine = Engine(served, drafter, 4, config)
    engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=8))
    engine.step()
    engine.add(PROMPTS[2], SamplingParams(max_tokens=8))
    launch = engine.runner.launch(engine.scheduler.plan())
    engine.close()
    assert launch.is_shared and launch.passes[1].emitted[0, 1] == 2
