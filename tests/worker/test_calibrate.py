"""Choosing the number of draft tokens at start-up, and the linear layers of an engine on a CPU."""

import dataclasses
import logging
from collections.abc import Iterator

import pytest
from torch import nn

from harness.drafter_passes import card_for
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.card import Evidence, GateAcceptance
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.kernels.joined_linear import JoinedPart
from peagle.kernels.linear import PackedLinear
from peagle.sampling_params import SamplingParams
from peagle.scheduling.draft_cost import StepCosts, acceptance_from_card, known_acceptance
from peagle.targets.hf import HFTarget
from peagle.targets.paged import PagedTarget
from peagle.worker import calibrate as calibration
from peagle.worker.calibrate import calibrate, measure_costs

K = 4
PROMPTS = [[1, 117, 115, 200, 17, 9, 33], [5, 6, 7, 8, 9, 10, 11, 12, 13]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def target() -> HFTarget:
    return tiny_target(num_layers=4)


@pytest.fixture
def drafter(target: HFTarget) -> Drafter:
    return with_acceptance(target, tiny_drafter(target, num_draft_tokens=K), [0.8, 0.6, 0.4, 0.2])


@pytest.fixture
def paged(target: HFTarget, drafter: Drafter) -> Iterator[PagedTarget]:
    """After the drafter, which is made from the target before that is lent out."""
    made = PagedTarget(target)
    yield made
    made.close()


@pytest.fixture
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are packed too, whatever a clock says."""

    def pretend(trials: list, row_counts: list[int]) -> None:
        for trial in trials:
            trial.seconds |= dict.fromkeys(row_counts, 1.0)

    monkeypatch.setattr("peagle.kernels.linear.MIN_BYTES", 1)
    monkeypatch.setattr("peagle.kernels.linear.time_in_turn", pretend)


def with_acceptance(target: HFTarget, drafter: Drafter, per_position: list[float]) -> Drafter:
    acceptance = {"prompts": {"per_position": per_position, "num_draft_tokens": len(per_position)}}
    drafter.card = dataclasses.replace(card_for(target, drafter), acceptance=acceptance)
    return drafter


def costs_of(monkeypatch: pytest.MonkeyPatch, verify: list[float], draft: float) -> None:
    """Let the measurement say what a pass over 1, 2, ... rows and a draft take."""
    costs = StepCosts(dict(enumerate(verify, start=1)), dict.fromkeys(range(1, len(verify)), draft))
    monkeypatch.setattr(calibration, "measure_costs", lambda *_: costs)


def reference(target: HFTarget, prompt: list[int]) -> list[int]:
    return [token for step in decode(target, prompt, PARAMS) for token in step.token_ids]


@pytest.mark.parametrize("parallel", [True, False])
def test_both_halves_of_a_step_are_measured_up_to_the_limit(target: HFTarget, parallel: bool) -> None:
    drafter = tiny_drafter(target, num_draft_tokens=K, parallel=parallel)
    paged = PagedTarget(target)
    try:
        costs = measure_costs(paged, drafter, [0.9, 0.8, 0.7, 0.6], page_size=8)
    finally:
        paged.close()
    assert set(costs.target_seconds) == {1, 2, 3, 5} and set(costs.draft_seconds) == {1, 2, 4}
    assert costs.max_draft_tokens == K


def test_number_with_the_most_expected_tokens_a_second_is_chosen_and_the_table_logged(
    paged: PagedTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    costs_of(monkeypatch, [1.0, 1.1, 1.2, 2.5, 2.6], 0.2)
    with caplog.at_level(logging.DEBUG, logger="peagle"):
        assert calibrate(paged, drafter, page_size=8) == 2
    assert "K 2: acceptance length 2.40" in caplog.text
    assert "num_draft_tokens=2: the fastest expected (1: " in caplog.text


def test_engine_is_built_for_the_chosen_number_and_its_answers_are_the_targets(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [reference(target, prompt) for prompt in PROMPTS]
    costs_of(monkeypatch, [1.0, 1.1, 1.2, 2.5, 2.6], 0.2)
    with LLM(target, drafter, page_size=8) as llm:
        assert llm.engine.num_draft_tokens == 2
        assert [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)] == expected


def test_where_no_draft_pays_the_engine_decodes_plainly_and_says_so(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [reference(target, prompt) for prompt in PROMPTS]
    costs_of(monkeypatch, [1.0, 2.0, 3.0, 4.0, 5.0], 1.0)
    with caplog.at_level(logging.INFO, logger="peagle"), LLM(target, drafter, page_size=8) as llm:
        assert llm.engine.num_draft_tokens == 0 and llm.engine.drafter is None
        assert [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert "num_draft_tokens=0: drafting does not pay on this machine" in caplog.text


def test_explicit_number_is_obeyed_without_measuring(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs_of(monkeypatch, [1.0, 2.0, 3.0, 4.0, 5.0], 1.0)
    with LLM(target, drafter, 3, page_size=8) as llm:
        assert llm.engine.num_draft_tokens == 3


def test_drafter_without_figures_gets_the_usual_number(
    paged: PagedTarget, drafter: Drafter, caplog: pytest.LogCaptureFixture
) -> None:
    drafter.card = None
    with caplog.at_level(logging.INFO, logger="peagle"):
        assert calibrate(paged, drafter, page_size=8) == K
    assert "no acceptance rates" in caplog.text


def test_a_card_without_measurements_still_tells_what_the_gate_recorded(drafter: Drafter) -> None:
    assert drafter.card is not None
    recorded = GateAcceptance("hash", 32, 40, (30, 10, 2, 0))
    card = dataclasses.replace(drafter.card, evidence=Evidence({}, {}, "float32", acceptance=recorded))
    assert known_acceptance(card) == acceptance_from_card(card.acceptance), "what was measured goes first"
    assert known_acceptance(dataclasses.replace(card, acceptance={})) == (0.75, 0.25, 0.05, 0.0)
    assert known_acceptance(dataclasses.replace(card, acceptance={}, evidence=None)) is None


@pytest.mark.usefixtures("packs_all")
@pytest.mark.parametrize("switches", [{}, {"parallel": False}, {"head": "own"}, {"draft_vocab_size": 200}])
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


def test_without_a_drafter_there_is_nothing_to_calibrate(target: HFTarget) -> None:
    engine = Engine(target, None, None)
    assert engine.num_draft_tokens == 0
    engine.close()
