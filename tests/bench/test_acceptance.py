"""Evaluating on prompts: counts, edges of acceptance, and what is said when answers differ."""

from types import SimpleNamespace

import pytest
import torch

from peagle.bench.acceptance import NEAR_TIE, Divergence, Evaluation, evaluate, first_divergence, near_tie
from peagle.bench.workloads import Prompt
from peagle.decoding.acceptance import Acceptance
from peagle.decoding.reference import decode
from peagle.drafter.drafting import Draft
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.tokenizer import render_chat
from tiny import tiny_drafter, tiny_target

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def prompt(text, name="1"):
    return Prompt(name, ({"role": "user", "content": text},), None, "text")


PROMPTS = [prompt("the user", "a"), prompt("another question", "b")]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


class KnownAnswer:
    """A drafter that has read the answer, or that is told to be wrong from some token of each draft on."""

    def __init__(self, answer, num_prompt_tokens, num_right=None):
        self._answer, self._num_prompt_tokens, self._num_right = answer, num_prompt_tokens, num_right
        self.num_anchors = 0

    def check_num_draft_tokens(self, num_draft_tokens):
        pass

    def new_session(self):
        self.num_anchors = 0
        return self

    def draft(self, token_ids, aux_hidden_TA, num_draft_tokens):
        assert len(token_ids) == len(aux_hidden_TA) + 1
        self.num_anchors += len(token_ids) - 1
        start = self.num_anchors + 1 - self._num_prompt_tokens
        right = self._answer[start : start + num_draft_tokens]
        drafts = [
            token if self._num_right is None or index < self._num_right else (token + 1) % 288
            for index, token in enumerate(right)
        ]
        return Draft(tuple(drafts), (0.0,) * len(drafts), None)


def known_answer(target, text, max_tokens, num_right=None):
    prompt_ids = render_chat(target.tokenizer, prompt(text).messages)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    answer = [token for step in decode(target, prompt_ids, params) for token in step.token_ids]
    return KnownAnswer(answer, len(prompt_ids), num_right)


def test_counts_agree_with_the_steps_of_the_decoder(target, drafter):
    totals = evaluate(target, drafter, PROMPTS, GREEDY, 4)
    accepted, num_tokens = [], 0
    for each in PROMPTS:
        prompt_ids = render_chat(target.tokenizer, each.messages)
        steps = list(decode(target, prompt_ids, GREEDY, drafter=drafter, num_draft_tokens=4))
        accepted += [step.kinds.count("accepted") for step in steps if step.draft_token_ids]
        num_tokens += sum(len(step.token_ids) for step in steps)
    assert totals.acceptance == Acceptance.of(accepted, 4)
    assert totals.num_tokens == totals.plain_tokens == num_tokens == 32
    assert totals.num_prompts == totals.num_compared == totals.num_identical == 2
    assert totals.report()["identical_to_plain"] is True


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
def test_a_drafter_that_is_always_right_gives_k_plus_one(target, num_draft_tokens):
    length = 1 + 3 * (num_draft_tokens + 1)  # the prompt's token, then three whole drafts with their bonus tokens
    session = known_answer(target, "the user", length + num_draft_tokens + 1)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    totals = evaluate(target, session, [prompt("the user")], params, num_draft_tokens)
    assert totals.acceptance == Acceptance(3, (3,) * num_draft_tokens)
    assert totals.acceptance.acceptance_length == num_draft_tokens + 1
    assert totals.num_identical == 1, "right drafts change nothing but the speed"


@pytest.mark.parametrize("num_left", [1, 2, 4])
def test_draft_tokens_after_the_end_of_an_answer_are_not_counted(target, num_left):
    session = known_answer(target, "the user", 20)
    params = SamplingParams(max_tokens=1 + 5 + num_left, ignore_eos=True)  # a whole draft of four, then part of one
    totals = evaluate(target, session, [prompt("the user")], params, 4)
    assert totals.acceptance == Acceptance(2, (2,) * num_left + (1,) * (4 - num_left))
    assert totals.num_tokens == params.max_tokens and totals.num_identical == 1


@pytest.mark.parametrize("num_right", [0, 2])
def test_a_drafter_that_is_wrong_from_a_place_on_is_counted_up_to_it(target, num_right):
    session = known_answer(target, "the user", 40, num_right)
    params = SamplingParams(max_tokens=1 + 4 * (num_right + 1), ignore_eos=True)
    totals = evaluate(target, session, [prompt("the user")], params, 4)
    assert totals.acceptance == Acceptance(4, (4,) * num_right + (0,) * (4 - num_right))
    assert totals.acceptance.acceptance_length == num_right + 1
    assert totals.num_identical == 1, "wrong drafts change nothing at all"


def test_without_comparison_plain_decoding_is_not_run(target, drafter, monkeypatch):
    totals = evaluate(target, drafter, PROMPTS, GREEDY, 2, compare=False)
    report = totals.report()
    assert totals.plain_seconds == 0 and totals.num_compared == 0
    assert report["identical_to_plain"] is None and report["speedup"] is None


@pytest.mark.parametrize("compare", [True, False])
def test_both_ways_are_warmed_up_and_take_turns_in_going_first(target, drafter, monkeypatch, compare):
    import peagle.decoding.reference as reference

    asked, now = [], 0.0

    def slow_at_first(target, prompt_ids, params, *, drafter=None, **options):
        nonlocal now
        kind = "plain" if drafter is None else "drafts"
        now += 1.0 if kind in [each for each, _ in asked] else 100.0
        asked.append((kind, params.max_tokens))
        return decode(target, prompt_ids, params, drafter=drafter, **options)

    monkeypatch.setattr(reference, "decode", slow_at_first)
    monkeypatch.setattr("peagle.bench.acceptance.time", SimpleNamespace(perf_counter=lambda: now))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    totals = evaluate(target, drafter, [*PROMPTS, *PROMPTS], params, 2, compare=compare)
    kinds = ("drafts", "plain", "plain", "drafts") * 2 if compare else ("drafts",) * 4
    assert asked == [*((kind, 16) for kind in kinds[: 1 + compare]), *((kind, 20) for kind in kinds)]
    assert (totals.seconds, totals.plain_seconds) == (4.0, 4.0 * compare), "no first use is measured"
    assert totals.num_tokens == 80 and totals.num_prompts == 4


def test_progress_is_told_after_each_prompt(target, drafter):
    seen = []
    evaluate(target, drafter, PROMPTS, GREEDY, 2, on_prompt=lambda totals: seen.append(totals.num_prompts))
    assert seen == [1, 2]


def test_all_prompts_are_checked_before_any_is_decoded(target, drafter):
    seen = []
    prompts = [*PROMPTS, prompt("x" * 600, "long")]
    with pytest.raises(RequestError, match=r"prompt 'long': the prompt has 6\d\d tokens") as caught:
        evaluate(target, drafter, prompts, GREEDY, 2, on_prompt=seen.append)
    assert caught.value.hint == "shorten the prompt" and seen == []
    with pytest.raises(ConfigError, match="between 1 and 4"):
        evaluate(target, drafter, PROMPTS, GREEDY, 5)


def test_the_first_differing_token_is_found_with_its_distance_from_the_targets_best(target):
    prompt_ids = render_chat(target.tokenizer, PROMPTS[0].messages)
    logits_V = target.forward(torch.tensor([[*prompt_ids, 10, 11]])).logits_BTV[0, -1]
    best, second, *_, last = logits_V.argsort(descending=True).tolist()
    for one, other, worse in ((best, second, second), (last, best, last), (second, last, last)):
        found = first_divergence(target, prompt_ids, [10, 11, one, 13], [10, 11, other, 13], GREEDY)
        assert found == Divergence(2, pytest.approx(float(logits_V[best] - logits_V[worse])), False)
        assert found.target_gap > NEAR_TIE
    assert first_divergence(target, prompt_ids, [10, 11], [10, 11], GREEDY) is None


def certain_of(target, monkeypatch, logits):
    """Let the target have these logits after any text; those of all other tokens are far below."""

    def forward(token_ids_BT, cache=None):
        logits_BTV = torch.full((*token_ids_BT.shape, target.vocab_size), -9.0)
        logits_BTV[..., list(logits)] = torch.tensor(list(logits.values()))
        return SimpleNamespace(logits_BTV=logits_BTV)

    monkeypatch.setattr(target, "forward", forward)


def test_a_token_that_is_not_among_the_tied_ones_is_not_forgiven(target, monkeypatch):
    certain_of(target, monkeypatch, {10: 5.0, 11: 5.0 - NEAR_TIE / 4, 12: 5.0 - NEAR_TIE / 2, 99: 1.0})
    assert first_divergence(target, [1], [10], [11], GREEDY).is_near_tie
    assert first_divergence(target, [1], [11], [12], GREEDY).is_near_tie, "neither is the best, but all three are close"
    for plain, drafted in (([10], [99]), ([99], [10]), ([99], [98])):
        found = first_divergence(target, [1], plain, drafted, GREEDY)
        assert found.target_gap >= 4.0 and not found.is_near_tie, "the target's two best are tied, this one is not"


def test_an_answer_that_is_the_beginning_of_the_other_differs_at_its_end_and_is_no_tie(target, monkeypatch):
    certain_of(target, monkeypatch, {10: 5.0, 11: 5.0})
    for plain, drafted in (([10, 11], [10]), ([10], [10, 11])):
        assert first_divergence(target, [1], plain, drafted, GREEDY) == Divergence(1, 0.0, False)


def test_no_gap_is_claimed_where_tokens_were_sampled(target):
    sampled = SamplingParams(temperature=1.0)
    found = first_divergence(target, [1], [10], [11], sampled)
    assert found == Divergence(0, None, False)


def test_a_near_tie_is_judged_by_the_precision_the_target_runs_in(target, monkeypatch):
    assert near_tie(target) == NEAR_TIE
    low = tiny_target(num_layers=2)
    low.model.to(torch.bfloat16)
    assert near_tie(low) == 0.25
    low.model.to(torch.float16)
    assert near_tie(low) == 0.03125
    certain_of(low, monkeypatch, {10: 0.03125, 11: 0.0})
    found = first_divergence(low, [1], [10], [11], GREEDY)
    assert found == Divergence(0, 0.03125, True), "in float32 it would not be one"


def test_the_report_lists_divergences_and_counts_near_ties_among_them():
    divergences = [
        ("q", Divergence(3, 0.0002, True)),
        ("q", Divergence(1, 0.5, False)),
        ("r", Divergence(0, None, False)),
    ]
    report = Evaluation(2, Acceptance.of([1], 2), num_prompts=4, num_compared=4, divergences=divergences).report()
    assert report["num_identical"] == 1 and report["identical_to_plain"] is False
    assert report["num_divergences_at_near_ties"] == 1
    assert report["divergences"][1] == {"prompt": "q", "token": 1, "target_gap": 0.5, "is_near_tie": False}


def test_an_answer_with_drafts_that_differs_is_recorded(target, drafter, monkeypatch):
    import peagle.decoding.reference as reference

    def tampered(target, prompt_ids, params, *, drafter=None, **options):
        steps = list(decode(target, prompt_ids, params, drafter=drafter, **options))
        if drafter is not None:
            object.__setattr__(steps[0], "token_ids", (7,))
        return iter(steps)

    monkeypatch.setattr(reference, "decode", tampered)
    totals = evaluate(target, drafter, PROMPTS, GREEDY, 2)
    assert [(name, each.token) for name, each in totals.divergences] == [("a", 0), ("b", 0)]
    assert totals.num_identical == 0
