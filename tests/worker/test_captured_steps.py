"""The bookkeeping of recorded steps, on a CPU: padded sizes, and a second recording for passes that adjust logits.

A recording is played by running its function again, and its results are in the same tensors every time. What it may
not do (touch rows of requests while it is made, read other tensors than those it was made with) is the same as for a
CUDA graph.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.engine_runs import PROMPTS, TREE_NODES, practised_drafter
from harness.model_families import family_target
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.outputs import RequestOutput
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import Grammar, SamplingParams
from peagle.scheduling import config as scheduling_config
from peagle.scheduling import draft_budget
from peagle.scheduling.config import EngineConfig, shared_size
from peagle.scheduling.draft_budget import Choice, DraftBudget, DraftCurve
from peagle.scheduling.plan import Plan
from peagle.targets.hf import HFTarget
from peagle.worker import captured_steps
from peagle.worker.graphs import CaptureError
from peagle.worker.launch import Launch
from peagle.worker.verify_batch import NUM_THRESHOLDS

NUM_DRAFT_TOKENS = 4
SMALL = {"max_batch": 6, "max_length": 100, "prefill_tokens": 32, "page_size": 4, "num_pages": 70}


def wishes(index: int) -> SamplingParams:
    rng = random.Random(index)
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "logit_bias": {50: 3.0}},
        {},
        {"grammar": Grammar("regex", "[a-f]{4,30}(the user)+"), "presence_penalty": 0.4},
        {"prompt_logprobs": 1, "min_tokens": 6},
    ]
    return SamplingParams(
        max_tokens=rng.randrange(8, 20), temperature=(0.0, 0.9)[index % 2], seed=index, **kinds[index % 5]
    )


def answer(target: HFTarget, index: int) -> tuple[int, ...]:
    wish = replace(wishes(index), prompt_logprobs=None)
    return tuple(token for step in decode(target, PROMPTS[index], wish) for token in step.token_ids)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return family_target("llama", seed=3)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return practised_drafter()


@pytest.fixture(
    params=[pytest.param(0, marks=pytest.mark.slow), NUM_DRAFT_TOKENS, pytest.param("tree", marks=pytest.mark.slow)]
)
def engine(request: pytest.FixtureRequest, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    def capture(run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        result = [run() for _ in range(3)][-1]

        def replay() -> Any:
            for old, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
            return result

        return replay

    own = drafter if request.param else None
    num_draft_tokens, tree_nodes = (NUM_DRAFT_TOKENS, TREE_NODES) if request.param == "tree" else (request.param, None)
    config = EngineConfig(tree_nodes=tree_nodes, **SMALL)  # type: ignore[arg-type]
    engine = Engine(family_target("llama", seed=3), own, num_draft_tokens, config)
    monkeypatch.setattr(captured_steps, "capture", capture)
    monkeypatch.setattr(captured_steps, "replay_seconds", lambda *_: 1.0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    engine.runner.capture_steps(lambda *_: None)
    yield engine
    engine.close()


def test_recorded_steps_answer_as_the_reference_decoder_whoever_shares_the_batch(
    engine: Engine, target: HFTarget
) -> None:
    """Requests come and go, so that each size is recorded anew while others are in the middle of their answers."""
    rng = random.Random(0)
    expected = [answer(target, index) for index in range(len(PROMPTS))]
    open_requests: dict[str, int] = {}
    left = [index for index in range(len(PROMPTS)) for _ in range(2)]
    rng.shuffle(left)
    num_done = 0
    while left or engine.has_work:
        for _ in range(min(rng.choice((0, 1, 4)), len(left))):
            index = left.pop()
            open_requests[engine.add(PROMPTS[index], wishes(index))] = index
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            index = open_requests.pop(output.request_id)
            assert output.outputs[0].token_ids == expected[index], wishes(index)
            assert (output.prompt_logprobs is None) == (wishes(index).prompt_logprobs is None)
            num_done += 1
    assert num_done == 2 * len(PROMPTS)
    assert engine.stats().num_pages_used == 0
    assert engine.runner.captured is not None
    captured = engine.runner.captured
    assert any(shape.is_adjusted for shape in captured.prefills)
    assert any(shape.is_adjusted for shape in captured.decodes)


def test_only_the_batches_that_are_asked_for_are_recorded(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "capture", lambda run, pool: run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    config = EngineConfig(**SMALL, captured_batches=(1, 6), verify_tokens=0)  # type: ignore[arg-type]
    engine = Engine(family_target("llama", seed=3), drafter, NUM_DRAFT_TOKENS, config)
    engine.runner.capture_steps(lambda *_: None)
    captured = engine.runner.captured
    assert captured is not None
    assert {(shape.batch, shape.num_tokens) for shape in captured.decodes} == {(1, 1), (1, 5), (6, 6), (6, 30)}
    assert [shape.bucket for shape in captured.prefills] == [(SMALL["prefill_tokens"], 64)]
    engine.close()


@pytest.mark.parametrize("batches", [(1, 2), (2, 1, 4), (0, 4), (4, 4)])
def test_batches_to_record_that_do_not_reach_the_largest_are_refused(batches: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="captured_batches must ascend to max_batch=4"):
        EngineConfig(max_batch=4, captured_batches=batches)


def test_timed_rows_have_different_newest_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are alike choose the same experts."""
    captured = engine.runner.captured
    assert captured is not None
    newest: list[int] = []
    state = captured.step.state

    def time_one(replay: Callable[[], Any], _: int) -> float:
        newest.extend(state.tokens[:4, 0].tolist())
        return 1.0

    monkeypatch.setattr(captured_steps, "replay_seconds", time_one)
    captured.decode_seconds(engine.runner.kv_cache.num_pages)
    assert len(set(newest)) == 4


def test_a_target_that_waits_for_the_device_is_launched_and_it_is_said(
    drafter: Drafter, target: HFTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(run: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        run()
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured_steps, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with LLM(family_target("llama", seed=3), drafter, NUM_DRAFT_TOKENS, **SMALL) as llm:
        llm.engine.runner.capture_steps(lambda *_: None)
        assert llm.engine.runner.captured is None
        assert "LlamaForCausalLM in float32 cannot be captured" in caplog.text
        outputs = llm.generate(PROMPTS[:6], [wishes(index) for index in range(6)])
    for index, output in enumerate(outputs):
        assert tuple(output.outputs[0].token_ids) == answer(target, index)


def test_what_measuring_steps_writes_into_pages_is_not_taken_for_a_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        """The clock of a device that there is not."""

        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: "Event") -> float:
            return 1.0

    def ask(*stop_token_ids: int) -> RequestOutput:
        engine.add(PROMPTS[4], SamplingParams(max_tokens=12, stop_token_ids=stop_token_ids))
        with pytest.raises(RequestError, match="requests are being served"):
            engine.step_times(2)
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs += engine.step()
        return outputs[0]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(engine.runner, "is_asynchronous", True)
    first, second = ask(), ask()
    assert second.metrics.num_cached_tokens > 0
    ask(first.outputs[0].token_ids[4])
    assert engine.has_work, "nobody knew that this step would be the last, so one more is under way"
    captured = engine.runner.captured
    assert captured is not None
    sizes: list[int | None] = []
    num_drafts: list[int] = []
    verify, state = captured.step.verify, captured.step.state
    before = state.max_draft.clone()

    def recorded(rows: torch.Tensor, adjustments: None = None, num_tokens: int | None = None) -> Any:
        sizes.append(num_tokens)
        verified = verify(rows, adjustments, num_tokens)
        num_drafts.append(int(verified.batch.num_drafts_B.min()))
        return verified

    monkeypatch.setattr(captured.step, "verify", recorded)
    monkeypatch.setattr(captured_steps, "replay_seconds", lambda replay, _: float(replay() is not None))
    assert engine.step_times(2) is not None
    assert set(sizes) <= {max(captured.verify_sizes(2))}, "the pass of the step that it is a part of"
    assert state.num_draft_tokens == 0 or num_drafts[-1] > 0, "as expensive as with real requests"
    assert torch.equal(state.max_draft, before)
    third = ask()
    assert third.metrics.num_cached_tokens == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids


def test_requests_that_ask_for_nothing_make_no_second_recording(engine: Engine, target: HFTarget) -> None:
    for index in (0, 2, 5, 7):
        engine.add(PROMPTS[index], wishes(index))
    while engine.has_work:
        engine.step()
    assert engine.runner.captured is not None
    captured = engine.runner.captured
    assert not any(shape.is_adjusted for shape in (*captured.prefills, *captured.decodes))
    assert engine.runner.uploads.adjustments is None


@pytest.mark.slow
def test_the_second_recordings_can_be_made_at_start(engine: Engine) -> None:
    object.__setattr__(engine.runner.config, "capture_adjusted", True)
    engine.runner.capture_steps(lambda *_: None)
    captured = engine.runner.captured
    assert captured is not None
    sizes = {shape for shape in captured.decodes if not shape.is_adjusted}
    adjusted = captured.decodes.keys() - sizes
    assert {shape.batch for shape in adjusted} == set(captured.decode_sizes)
    assert len(adjusted) == len(captured.decode_sizes) * (2 if engine.drafter else 1), "all drafts, and none"
    num_prefills = 2 * len(captured.prefill_sizes) * (2 if engine.drafter else 1)
    assert engine.runner.capture_cost.num_graphs == len(sizes) + len(adjusted) + num_prefills


def test_requests_without_drafts_replay_a_step_without_drafts(
    engine: Engine, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = engine.runner.captured
    assert captured is not None
    serve(engine, range(3))
    if engine.drafter is not None:
        assert captured.step.drafting is not None
        monkeypatch.setattr(captured.step, "decode", None)  # raises if it is called
        monkeypatch.setattr(captured.step.drafting, "after_prefill", None)
        assert (engine.runner.state.confidence[:3] > -math.inf).any(), "earlier requests left drafts in the rows"
    params = SamplingParams(max_tokens=12, num_draft_tokens=0)
    names = [engine.add(prompt, params) for prompt in PROMPTS[:3]]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert (engine.runner.state.confidence[:3] == -math.inf).all(), "the rows are plain"
    for name, prompt in zip(names, PROMPTS, strict=False):
        steps = decode(target, prompt, params)
        assert outputs[name].outputs[0].token_ids == tuple(token for step in steps for token in step.token_ids)


def seconds_of(engine: Engine, cost: Callable[[int, int], float]) -> dict[int, dict[int, float]]:
    """Made-up seconds per step, by requests and tokens of the pass."""
    captured = engine.runner.captured
    assert captured is not None
    return {size: {num: cost(size, num) for num in captured.verify_sizes(size)} for size in captured.decode_sizes}


def serve(engine: Engine, indices: range) -> list[RequestOutput]:
    names = [engine.add(PROMPTS[index], SamplingParams(max_tokens=12, ignore_eos=True)) for index in indices]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    return [outputs[name] for name in names]


@pytest.mark.parametrize("engine", [NUM_DRAFT_TOKENS], indirect=True)
def test_drafts_that_do_not_pay_are_paused(engine: Engine, target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_budget, "WARM_UP", 1)
    engine.runner.budget = DraftBudget(seconds_of(engine, lambda size, num: 1.0 if num == size else 100.0).__getitem__)
    for _ in range(2):
        before = engine.stats().num_drafts
        outputs = serve(engine, range(4))
        for index, output in enumerate(outputs):
            steps = decode(target, PROMPTS[index], SamplingParams(max_tokens=12, ignore_eos=True))
            assert output.outputs[0].token_ids == tuple(token for step in steps for token in step.token_ids)
        assert engine.stats().num_drafts - before <= 2 * 4, "one step with drafts, or two, then none"


@pytest.mark.parametrize("engine", [NUM_DRAFT_TOKENS], indirect=True)
def test_a_pass_that_adjusts_logits_is_as_large_as_the_budget_says(
    engine: Engine, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = engine.runner.captured
    assert captured is not None
    fewest = {size: captured.verify_sizes(size)[1] for size in captured.decode_sizes}
    seconds = seconds_of(engine, lambda size, num: 1.0 if num <= fewest[size] else 100.0)
    budget = engine.runner.budget = DraftBudget(seconds.__getitem__)
    budget.observe(DraftCurve([4.0] * NUM_THRESHOLDS, [2.0] * NUM_THRESHOLDS), 1)
    passes: list[tuple[int, int]] = []
    decode_rows = captured.decode

    def recorded(rows: list[int], adjustments: Any, num_tokens: int) -> Any:
        if adjustments is not None:
            passes.append((captured.size(len(rows)), num_tokens))
        return decode_rows(rows, adjustments, num_tokens)

    monkeypatch.setattr(captured, "decode", recorded)
    names = [engine.add(PROMPTS[index], wishes(index)) for index in range(4)]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    for index, name in enumerate(names):
        assert outputs[name].outputs[0].token_ids == answer(target, index)
    assert (4, fewest[4]) in passes and fewest[4] < 4 * (1 + NUM_DRAFT_TOKENS)
    assert all(num_tokens == fewest[size] for size, num_tokens in passes), passes
    shapes = {(shape.batch, shape.num_tokens) for shape in captured.decodes if shape.is_adjusted}
    assert shapes == set(passes), "a shape is captured when a pass needs it"


@pytest.mark.parametrize("engine", [NUM_DRAFT_TOKENS], indirect=True)
def test_drafts_that_cost_nothing_are_all_verified(engine: Engine) -> None:
    engine.runner.budget = DraftBudget(seconds_of(engine, lambda size, num: 1.0).__getitem__)
    serve(engine, range(4))
    stats = engine.stats()
    assert stats.num_draft_tokens == NUM_DRAFT_TOKENS * stats.num_drafts > 0


@pytest.mark.parametrize("engine", [NUM_DRAFT_TOKENS, "tree"], indirect=True)
def test_the_budget_learns_from_steps_beside_prompts(
    engine: Engine, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch has new prompts in almost every step. The others, when no prompts are left, are no fair sample."""
    monkeypatch.setattr(scheduling_config, "SHARED_BUCKETS", ((16, 3), (32, 5)))
    engine.runner.capture_steps(lambda *_: None)
    engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
    captured = engine.runner.captured
    assert captured is not None and captured.shared
    budget = engine.runner.budget = DraftBudget(seconds_of(engine, lambda size, num: num / size).__getitem__)
    learned: list[Choice] = []
    host_steps: list[int] = []
    monkeypatch.setattr(budget, "observe_accepted", lambda _, choice: learned.append(choice))
    monkeypatch.setattr(budget, "observe_host", lambda _, batch: host_steps.append(batch))
    launches: list[tuple[Plan, Launch]] = []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda plan: launches.append((plan, made := launch(plan))) or made)
    indices, outputs = list(range(12)), {}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    while indices or engine.has_work:
        if indices:
            index = indices.pop(0)
            engine.add(PROMPTS[index], params, request_id=str(index))
        outputs |= {int(output.request_id): output for output in engine.step()}
    for index, output in outputs.items():
        steps = decode(target, PROMPTS[index], params)
        assert output.outputs[0].token_ids == tuple(token for step in steps for token in step.token_ids)
    shared = [each.passes[-1] for _, each in launches if each.is_shared]
    for made in shared:
        size, choice = captured.size(len(made.requests)), made.choice
        assert choice is not None and choice in learned and choice.num_expected is not None
        assert choice.num_tokens == size * choice.seconds == shared_size(captured.verify_sizes(size))
    assert len(shared) > 4
    assert len(host_steps) == sum(each.is_shared or not plan.chunks for plan, each in launches)


@pytest.mark.parametrize("engine", [NUM_DRAFT_TOKENS], indirect=True)
def test_while_drafts_do_not_pay_prompts_have_passes_of_their_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_budget, "WARM_UP", 1)
    monkeypatch.setattr(scheduling_config, "SHARED_BUCKETS", ((16, 3), (32, 5)))
    engine.runner.capture_steps(lambda *_: None)
    engine.scheduler.config = replace(engine.scheduler.config, shares_passes=True)
    engine.runner.budget = DraftBudget(seconds_of(engine, lambda size, num: 1.0 if num == size else 100.0).__getitem__)
    plans: list[Plan] = []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda plan: plans.append(plan) or launch(plan))
    for index in range(5):
        engine.add(PROMPTS[index], SamplingParams(max_tokens=20, ignore_eos=True))
        engine.step()
    while engine.has_work:
        engine.step()
    beside = [plan.shares_pass for plan in plans if plan.chunks and plan.decodes]
    assert beside[1] and not any(beside[-2:]), "until the budget has seen enough"


@pytest.mark.parametrize("engine", [NUM_DRAFT_TOKENS], indirect=True)
def test_the_budget_learns_how_long_the_host_works_on_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = DraftBudget(seconds_of(engine, lambda size, num: 1.0).__getitem__)
    engine.runner.budget = budget
    observed: list[tuple[float, int]] = []
    monkeypatch.setattr(budget, "observe_host", lambda seconds, batch: observed.append((seconds, batch)))
    serve(engine, range(3))
    assert observed and all(seconds > 0 and batch == 4 for seconds, batch in observed[:2]), "three requests run as four"
