"""The parity comparison itself: it must see what it is there to see, and forgive only ties."""

import pytest

from parity.compare_speculators import Agreement as TrainingAgreement
from parity.compare_speculators import DepthRow
from peagle.compare.vllm_parity import Agreement, VerifiedStep, check_is_alive, compare_outputs, compare_steps

WIDE = (1.0, 1.0, 1.0)
OURS = [VerifiedStep((5, 6, 7), 2, WIDE), VerifiedStep((8, 9, 1), 0, WIDE)]


def never_tied(index: int) -> float:
    return 1.0


def always_tied(index: int) -> float:
    return 1e-4


def compare(ours: list[VerifiedStep], theirs: list[VerifiedStep], target_gap=never_tied) -> Agreement:
    agreement = Agreement(num_draft_tokens=3)
    compare_steps(agreement, "prompt 0", ours, theirs, target_gap)
    return agreement


def test_equal_steps_agree_and_are_counted_per_position() -> None:
    agreement = compare(OURS, OURS)
    assert agreement.faults == [] and agreement.ties == []
    assert agreement.ours_per_position == agreement.theirs_per_position == [1, 1, 0]
    assert agreement.num_steps == 2 and agreement.num_compared_drafts == 6


def test_a_differing_draft_token_is_a_fault_although_acceptance_is_equal() -> None:
    agreement = compare(OURS, [VerifiedStep((5, 6, 70), 2), OURS[1]])
    assert agreement.ours_per_position == agreement.theirs_per_position
    assert agreement.faults == ["prompt 0 step 0 position 2: draft 7 here, 70 in vLLM, our gap 1.0e+00"]


def test_a_differing_draft_token_at_our_own_tie_is_forgiven_and_printed() -> None:
    ours = [VerifiedStep((5, 6, 7), 2, (1.0, 1.0, 5e-4)), OURS[1]]
    agreement = compare(ours, [VerifiedStep((5, 6, 70), 2), OURS[1]])
    assert agreement.faults == [] and agreement.num_draft_ties == 1
    assert "draft 7 here, 70 in vLLM, our gap 5.0e-04" in agreement.ties[0]
    assert agreement.num_steps == 2, "acceptance is equal, so the comparison goes on"


def test_other_acceptance_of_equal_drafts_is_a_fault_unless_the_target_is_tied() -> None:
    theirs = [VerifiedStep((5, 6, 7), 1), OURS[1]]
    assert "the drafts agree" in compare(OURS, theirs).faults[0]
    forgiven = compare(OURS, theirs, always_tied)
    assert forgiven.faults == [] and forgiven.num_steps == 1, "after a tie the two texts may differ"


def test_other_acceptance_is_explained_by_a_draft_tie_only_where_the_drafts_differ() -> None:
    ours = [VerifiedStep((5, 6, 7), 2, (1.0, 5e-4, 1.0))]
    assert compare(ours, [VerifiedStep((5, 60, 7), 1)]).faults == []
    assert compare(ours, [VerifiedStep((5, 60, 7), 0)]).faults != []


def test_missing_steps_and_drafts_of_another_length_are_faults() -> None:
    assert compare(OURS[:1], OURS).faults == ["prompt 0: 1 steps here, 2 in vLLM"]
    assert compare(OURS, [VerifiedStep((5, 6), 2)]).faults[0] == "prompt 0 step 0: 3 draft tokens here, 2 in vLLM"


@pytest.mark.parametrize(("target_gap", "num_faults"), [(never_tied, 1), (always_tied, 0)])
def test_a_diverging_output_is_forgiven_only_at_a_target_tie(target_gap, num_faults: int) -> None:
    agreement = Agreement(num_draft_tokens=3)
    assert not compare_outputs(agreement, "prompt 0", [1, 2, 3], [1, 2, 4], target_gap)
    assert agreement.num_output_tokens == 2
    assert len(agreement.faults) == num_faults and agreement.num_output_ties == 1 - num_faults


def test_a_drafter_that_is_never_right_does_not_pass() -> None:
    agreement = compare([VerifiedStep((5, 6, 7), 0, WIDE)], [VerifiedStep((5, 6, 7), 0)])
    check_is_alive(agreement)
    assert agreement.faults == ["no draft token was ever accepted at position 0 (here 0, vLLM 0)"]


def test_training_agreement_names_mask_logits_and_loss() -> None:
    good = TrainingAgreement(4, 0, [DepthRow(0, 4, 5e-5, 0)], 1.0, 1.00001)
    assert good.faults == []
    bad = TrainingAgreement(4, 1, [DepthRow(0, 2, 5e-5, 0), DepthRow(1, 2, 3e-4, 1)], 1.0, 1.1)
    assert bad.faults == [
        "1 of 16 attention mask entries differ",
        "depth 1: logits differ by up to 3.0e-04 (allowed 0.0001), the top token in 1 of 2 slots",
        "the KL loss is 1.000000 here and 1.100000 in speculators",
    ]
