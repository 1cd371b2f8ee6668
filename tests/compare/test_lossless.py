"""The distribution test and the accounting of near ties: they must see what they are there to see."""

import dataclasses

import pytest
import torch

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.compare.lossless import Comparison, Difference, Distribution, Findings, Settings, _compare_greedy, examine
from peagle.compare.lossless_report import document_of, markdown_of
from peagle.compare.sampling_test import LENGTH, Fit, chi_square_tail, fit, opening_probs
from peagle.decoding.acceptance import Acceptance
from peagle.decoding.reference import decode
from peagle.sampling_params import SamplingParams

PROMPT = [1, 117, 115, 200, 17]


@pytest.mark.parametrize(
    ("statistic", "degrees", "expected"), [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (29.588298, 10, 0.001)]
)
def test_tail_of_chi_square_is_that_of_the_tables(statistic, degrees, expected):
    assert chi_square_tail(statistic, degrees) == pytest.approx(expected, rel=1e-5)


def test_probabilities_of_openings_are_products_of_the_targets_own():
    target = tiny_target(num_layers=2)
    probs = opening_probs(target, PROMPT, temperature=0.7)
    opening = max((each for each in probs if len(each) == LENGTH), key=lambda each: probs[each])
    product, text = 1.0, list(PROMPT)
    for length, token in enumerate(opening, start=1):
        logits_V = target.forward(torch.tensor([text])).logits_BTV[0, -1]
        product *= float((logits_V.double() / 0.7).softmax(-1)[token])
        text.append(token)
        assert probs[opening[:length]] == pytest.approx(product, rel=1e-4)
    assert sum(prob for each, prob in probs.items() if len(each) == 1) <= 1 + 1e-6
    again = opening_probs(target, PROMPT, 0.7, followed=[opening, opening[:1]])
    assert again == {opening[:length]: pytest.approx(probs[opening[:length]]) for length in (1, 2, 3)}


PROBS = {(1,): 0.6, (1, 1): 0.54, (1, 1, 1): 0.4, (1, 1, 2): 0.02, (2,): 0.3, (2, 2): 0.04, (2, 2, 2): 0.04}


def test_rare_openings_are_counted_with_their_beginnings_and_counts_add_up():
    drawn = (
        [(1, 1, 1)] * 45 + [(1, 1, 2)] * 3 + [(1, 1, 9)] * 10 + [(2, 2, 2)] * 5 + [(2, 9, 9)] * 27 + [(3, 3, 3)] * 10
    )
    found = fit(drawn, PROBS)
    assert found.openings == ((1, 1, 1), (2,), (1, 1), (1,)) and found.observed == (45, 32, 13, 0, 10)
    assert found.expected == pytest.approx((40, 30, 14, 6, 10)) and found.degrees_of_freedom == 4
    assert found.statistic == pytest.approx(25 / 40 + 4 / 30 + 1 / 14 + 6)


def test_a_rest_too_small_for_a_cell_joins_the_least_likely_one():
    found = fit([(1, 1, 1)] * 70 + [(2, 2, 2)] * 30, {(1,): 0.7, (2,): 0.29})
    assert found.observed == (70, 30) and found.expected == pytest.approx((70, 30))


def test_what_cannot_happen_fails_whatever_the_statistic():
    assert Fit(((1, 1, 1),), (99, 1), (100.0, 0.0)).p_value == 0.0


def test_draws_of_the_target_fit_and_those_at_another_temperature_do_not():
    target = tiny_target(num_layers=2)
    probs = opening_probs(target, PROMPT, temperature=0.35)
    drawn = {temperature: draws(target, temperature, 60) for temperature in (0.35, 0.9)}
    assert fit(drawn[0.35], probs).p_value > 1e-3
    assert fit(drawn[0.9], probs).p_value < 1e-6


def draws(target, temperature, count):
    found = []
    for seed in range(count):
        params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=seed, ignore_eos=True)
        found.append(tuple(token for step in decode(target, PROMPT, params) for token in step.token_ids))
    return found


def test_in_bfloat16_differences_are_forgiven_at_near_ties_only(monkeypatch):
    target = tiny_target(num_layers=2)
    target.model.to(torch.bfloat16)
    drafter = tiny_drafter(target).to(torch.bfloat16)
    settings = Settings(num_draft_tokens=4, max_tokens=6, num_seeds=1, num_samples=50, num_sampled_prompts=1)

    def answer(target, drafter, num_draft_tokens, prompts, params, **settings):
        answers = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            own = dataclasses.replace(own, num_draft_tokens=None)
            answer = tuple(token for step in decode(target, prompt, own) for token in step.token_ids)
            is_wrong = own.is_greedy and index == 1
            answers.append((*answer[:2], (answer[2] + 1) % 200, *answer[3:]) if is_wrong else answer)
        return answers, [Acceptance(1, (1, 0, 0, 0))] * len(answers)

    monkeypatch.setattr("peagle.compare.lossless.answer_with_engine", answer)
    findings = examine(target, drafter, [PROMPT, PROMPT[:4]], settings)
    served = findings.comparisons[1]
    assert served.limit is not None and served.limit >= 1e-3
    (difference,) = (each for each in served.differences if each.prompt == 1)
    assert difference.token == 2 and difference.is_near_tie == (difference.gap <= served.limit)
    assert not findings.is_lossless or difference.is_near_tie
    assert findings.comparisons[3].limit is not None, "sampled answers have a limit of their own"


def tokens_by_logit(target) -> tuple[torch.Tensor, list[int]]:
    logits_V = target.forward(torch.tensor([PROMPT])).logits_BTV[0, -1].float()
    return logits_V, logits_V.argsort(descending=True).tolist()


def test_a_tie_is_judged_by_the_tokens_that_were_emitted():
    target = tiny_target(num_layers=2)
    logits_V, (best, second, *_, worst) = tokens_by_logit(target)
    limit = float(logits_V[best] - logits_V[second]) + 1e-3
    for one, other in ((best, second), (second, best)):
        compared = _compare_greedy(target, "x", [PROMPT], [(one,)], [(other,)], limit)
        assert compared.holds and compared.differences[0].gap == pytest.approx(limit - 1e-3)
    for one, other in ((best, worst), (worst, best), (second, worst)):
        compared = _compare_greedy(target, "x", [PROMPT], [(one,)], [(other,)], limit)
        assert not compared.holds, "a token far below the best is not excused by what the second best is worth"
        assert compared.differences[0].gap == pytest.approx(float(logits_V[best] - logits_V[worst]))


def test_an_answer_that_ends_before_the_other_is_never_a_tie():
    target = tiny_target(num_layers=2)
    _, (best, *_) = tokens_by_logit(target)
    for ours, theirs in (((), (best,)), ((best,), ())):
        compared = _compare_greedy(target, "x", [PROMPT], [ours], [theirs], 100.0)
        assert not compared.holds and compared.differences[0].token == 0


def findings_with(differences=(), p_counts=(50, 50), accepted=3) -> Findings:
    comparison = Comparison("engine with drafts, plain decoding", 4, 80, 0.25, differences)
    distribution = Distribution(0, Fit(((1, 2, 3),), p_counts, (50.0, 50.0)), 1e-9, 1e-3)
    return Findings((comparison,), (distribution,), Acceptance(10, (accepted,)))


def test_the_verdict_needs_every_part_and_a_drafter_that_is_sometimes_right():
    tie, fault = Difference(0, None, 3, 0.1, True), Difference(1, 7, 5, 2.0, False)
    assert findings_with().is_lossless and findings_with((tie,)).is_lossless
    assert not findings_with((tie, fault)).is_lossless
    assert not findings_with(p_counts=(90, 10)).is_lossless
    assert not findings_with(accepted=0).is_lossless


def test_the_report_lists_differences_by_gap_and_escapes_what_a_table_cannot_hold():
    tie, fault = Difference(0, None, 3, 0.1, True), Difference(1, 7, 5, 2.0, False)
    facts = {
        "settings": dataclasses.asdict(Settings(7)),
        "target": dict.fromkeys(("name", "weights", "tokenizer", "chat_template", "device"), "x")
        | {"dtype": "bfloat16"},
        "drafter": dict.fromkeys(("name", "method", "tensors"), "y"),
        "num_prompts": 4,
        "prompts": "ours",
        "prompts_hash": "z",
        "provenance": {
            "command": "peagle lossless",
            "created": "now",
            "commit": None,
            "python": "3.11",
            "versions": {"torch": "2"},
            "hardware": {"accelerator": None, "processor": "cpu", "num_cores": 2},
        },
    }
    document = document_of(findings_with((tie, fault)), **facts)
    text = markdown_of(document, lambda ids: "a|b\n`")
    assert "**NOT LOSSLESS.**" in text and "In bfloat16 answers may diverge only" in text
    assert text.index("| 2, seed 7 | 5 | 2 | **difference** |") < text.index("| 1 | 3 | 0.1 | near tie |")
    assert "`` a\\|b\\n` ``" in text, "a cell stays one cell"
    assert "NOT SHOWN" in markdown_of(document_of(findings_with(accepted=0), **facts), str)
