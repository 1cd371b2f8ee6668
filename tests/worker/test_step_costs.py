"""Time per step on a CPU, the draft budget that follows from it, and the linear layers of an engine there."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.linears.joined_linear import JoinedPart
from peagle.native.packed_linear import PackedLinear
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import TREE_NODES
from peagle.scheduling.draft_budget import DraftBudget
from peagle.targets.hf import HFTarget
from peagle.worker.step_costs import StepCosts, measure_step_costs

K = 4
SMALLER: dict[str, object] = {"draft_vocab_size": 200}
PROMPTS = [[1, 117, 115, 200, 17, 9, 33], [5, 6, 7, 8, 9, 10, 11, 12, 13]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def target() -> HFTarget:
    return tiny_target(num_layers=4)


@pytest.fixture
def drafter(target: HFTarget) -> Drafter:
    return tiny_drafter(target, num_draft_tokens=K)


@pytest.fixture
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are packed too, whatever a clock says."""

    def pretend(trials: list, row_counts: list[int]) -> None:
        for trial in trials:
            trial.seconds |= dict.fromkeys(row_counts, 1.0)

    monkeypatch.setattr("peagle.native.packed_linear.MIN_BYTES", 1)
    monkeypatch.setattr("peagle.native.packed_linear.time_in_turn", pretend)


def reference(target: HFTarget, prompt: list[int]) -> list[int]:
    return [token for step in decode(target, prompt, PARAMS) for token in step.token_ids]


def costs_of(monkeypatch: pytest.MonkeyPatch, verify: dict[int, float], draft: float) -> None:
    """Let the measurement say what a pass of so many tokens and a draft cost."""
    costs = StepCosts(verify, {1: draft})
    monkeypatch.setattr("peagle.worker.runner.measure_step_costs", lambda *_: costs)


@pytest.mark.parametrize("parallel", [True, False])
def test_passes_and_drafts_are_timed_and_leave_no_trace(
    target: HFTarget, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = tiny_drafter(target, num_draft_tokens=K, parallel=parallel)
    calls: list[int] = []
    forward = type(drafter).run_layers
    monkeypatch.setattr(type(drafter), "run_layers", lambda *args: calls.append(1) or forward(*args))
    with LLM(target, drafter, K, page_size=8, max_batch=4, max_length=64, verify_tokens=0) as llm:
        runner = llm.engine.runner
        before = [each.clone() for each in vars(runner.state).values() if isinstance(each, Tensor)]
        calls.clear()
        costs = measure_step_costs(runner.step, runner.plain_step, runner.kv_cache.num_pages)
        after = [each for each in vars(runner.state).values() if isinstance(each, Tensor)]
    assert list(costs.verify) == [1, 4, 8, 16, 20] and set(costs.draft) == {1, 4}
    assert len(calls) >= 4, "the drafter ran for both batch sizes, at least twice"
    assert all(map(torch.equal, before, after))


def test_a_larger_pass_never_costs_less(target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100, -0.01)  # each timed call seems to take -0.01 s more than none
    with LLM(target, drafter, K, page_size=8, max_batch=4, max_length=64, verify_tokens=0) as llm:
        runner = llm.engine.runner
        monkeypatch.setattr("peagle.worker.step_costs.time.perf_counter", lambda: next(clock) ** 2)
        costs = measure_step_costs(runner.step, runner.plain_step, runner.kv_cache.num_pages)
    assert list(costs.verify.values()) == sorted(costs.verify.values())
    assert costs.draft[1] <= costs.draft[4], "else drafts of more requests would seem to cost nothing"


def test_without_a_number_a_parallel_drafter_drafts_trees(target: HFTarget, drafter: Drafter) -> None:
    with LLM(target, drafter, page_size=8, max_batch=2) as llm:
        assert llm.engine.runner.state.tokens.shape[1] == TREE_NODES + 1
        assert llm.engine.num_draft_tokens == K, "the drafter was trained for no more"
    chain = tiny_drafter(target, num_draft_tokens=K, parallel=False)
    with LLM(target, chain, page_size=8, max_batch=2) as llm:
        assert llm.engine.runner.state.tokens.shape[1] == chain.config.usual_num_draft_tokens + 1


@pytest.mark.parametrize(("verify", "most"), [({1: 1.0, 64: 1.0}, K), ({1: 1.0, 2: 1.0, 3: 9.0}, 1)])
def test_steps_verify_the_drafts_that_pay_and_answers_are_the_targets(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, verify: dict[int, float], most: int
) -> None:
    """All drafts if further ones cost nothing, the first alone if the others cost nine plain steps."""
    expected = [reference(target, prompt) for prompt in PROMPTS]
    costs_of(monkeypatch, verify, draft=0.0)
    with LLM(target, drafter, K, page_size=8) as llm:
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert list(llm.generate(prompt, PARAMS)[0].outputs[0].token_ids) == answer
        stats = llm.engine.stats()
    assert 0 < stats.num_draft_tokens <= most * stats.num_drafts
    assert most == 1 or stats.num_draft_tokens > 2 * stats.num_drafts
    num_tokens = sum(map(len, expected)) - len(PROMPTS)  # prefill emits the first of each
    assert stats.plain_decode_seconds == num_tokens
    assert stats.decode_seconds == num_tokens - stats.acceptance.num_accepted, "each step takes 1 s"


def test_where_no_draft_pays_the_engine_stops_drafting(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reference(target, PROMPTS[0])
    costs_of(monkeypatch, {1: 1.0, 2: 2.0}, draft=9.0)
    monkeypatch.setattr("peagle.worker.runner.TRIAL_STEPS", 4)
    with caplog.at_level("INFO", logger="peagle"), LLM(target, drafter, page_size=8) as llm:
        assert list(llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].token_ids) == expected
        stats = llm.engine.stats()
    assert 4 <= stats.num_drafts <= 6, "a few steps, to learn that it does not pay"
    assert stats.drafting_pays is False and stats.drafting_gain < 1 and stats.num_draft_pauses == 1
    assert stats.decode_seconds > stats.plain_decode_seconds
    assert caplog.text.count("drafting does not pay at batch size 1") == 1


def test_requests_of_a_batch_share_the_steps_of_a_trial(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of one request slow down all: four trials in a row would cost the batch four times as much."""
    costs_of(monkeypatch, {1: 1.0, 2: 2.0}, draft=9.0)
    monkeypatch.setattr("peagle.worker.runner.TRIAL_STEPS", 8)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    num_drafts = []
    for number in (1, 4):
        with LLM(target, drafter, page_size=8, max_batch=4) as llm:
            llm.generate([PROMPTS[0]] * number, params)
            num_drafts.append(llm.engine.stats().num_drafts / number)
    assert 8 <= num_drafts[0] <= 10 and 2 <= num_drafts[1] <= 4


def test_where_no_draft_pays_most_new_requests_do_not_try(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [reference(target, prompt) for prompt in PROMPTS]
    costs_of(monkeypatch, {1: 1.0, 2: 2.0}, draft=9.0)
    monkeypatch.setattr("peagle.worker.runner.TRIAL_STEPS", 2)
    with LLM(target, drafter, page_size=4, max_batch=2) as llm:
        drafts: list[int] = []
        for index in range(12):
            before = llm.engine.stats().num_drafts
            prompt = index % len(PROMPTS)  # the same prompts again, so prefixes are reused with and without drafts
            assert list(llm.generate(PROMPTS[prompt], PARAMS)[0].outputs[0].token_ids) == expected[prompt]
            llm.engine.check_integrity()
            drafts.append(llm.engine.stats().num_drafts - before)
        assert [number > 0 for number in drafts] == [True] * 5 + [False, True] * 3 + [False]
        llm.engine.runner.budget = DraftBudget({1: {1: 1.0, 1 + TREE_NODES: 1.0}}.__getitem__, trial_steps=2)
        for _ in range(4):
            before = llm.engine.stats().num_drafts
            llm.generate(PROMPTS[0], PARAMS)
        assert llm.engine.stats().num_drafts > before, "drafts pay now, so new requests try them again"


def test_a_request_whose_drafts_do_not_pay_leaves_no_drafts_beside_one_that_still_tries(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request comes when the first is paused; its budget must not see the first one's last drafts."""
    costs_of(monkeypatch, {1: 1.0, 2: 2.0}, draft=9.0)
    monkeypatch.setattr("peagle.worker.runner.TRIAL_STEPS", 6)
    with LLM(target, drafter, page_size=8, max_batch=2) as llm:
        engine, runner = llm.engine, llm.engine.runner
        engine.add(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
        while not (paused := [request for request in engine.scheduler.running if request.is_paused]):
            engine.step()
        engine.add(PROMPTS[1], PARAMS)
        seen: list[tuple[float, int]] = []
        observe = runner.budget.observe
        monkeypatch.setattr(
            runner.budget,
            "observe",
            lambda curve, num_requests: (seen.append((curve.counts[-1], num_requests)), observe(curve, num_requests)),
        )
        for _ in range(4):
            engine.step()
        assert not torch.isfinite(runner.state.confidence[paused[0].row]).any(), "no draft is left"
        while engine.has_work:
            engine.step()
    assert seen and all(number == 1 and count <= TREE_NODES for count, number in seen)


@pytest.mark.usefixtures("packs_all")
@pytest.mark.parametrize(
    "switches",
    [{}, {"parallel": False}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"head": "own"}, SMALLER))],
)
def test_packed_engine_gives_the_reference_decoders_tokens_and_the_models_back(switches: dict[str, object]) -> None:
    target = tiny_target(num_layers=4)
    drafter = tiny_drafter(target, num_draft_tokens=K, **switches)
    expected = [reference(target, prompt) for prompt in PROMPTS]
    names, fingerprint = list(target.model.state_dict()), target.fingerprint()
    drafter_names = list(drafter.state_dict())
    for own, number in ((drafter, K), (None, None)):
        with LLM(target, own, number, page_size=8, max_batch=2) as llm:
            packed = [module for module in target.model.modules() if isinstance(module, PackedLinear | JoinedPart)]
            assert len(packed) == 4 * 7 + 1, "every linear layer is packed, most of them joined before"
            assert list(drafter.state_dict()) == drafter_names, "the head that serves is no part of the drafter"
            assert [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)] == expected
    left = [module for module in (*target.model.modules(), *drafter.modules()) if isinstance(module, nn.Linear)]
    assert left and all(type(module) is nn.Linear for module in left)
    assert list(target.model.state_dict()) == names and target.fingerprint() == fingerprint
    assert reference(target, PROMPTS[0]) == expected[0]


def test_packing_is_off_by_default_in_bfloat16() -> None:
    target = tiny_target(num_layers=3)
    target.model.bfloat16()
    with LLM(target, None):
        assert not any(isinstance(module, JoinedPart) for module in target.model.modules())


def test_without_a_drafter_nothing_is_measured(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("peagle.worker.runner.measure_step_costs")
    engine = Engine(target, None, None)
    assert engine.num_draft_tokens == 0
    engine.close()
