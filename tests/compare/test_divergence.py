"""Answers and acceptance: counts, edges of acceptance, and where answers diverge."""

from types import SimpleNamespace

import pytest
import torch

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.compare.acceptance import measure, mixed_prompts
from peagle.compare.answers import decode_with_reference, render_prompt
from peagle.compare.divergence import Divergence, first_divergence
from peagle.data.prompts import Prompt
from peagle.decoding import reference
from peagle.decoding.acceptance import Acceptance
from peagle.decoding.reference import decode
from peagle.drafter.drafting import Draft, DraftingSession
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.targets.near_tie import NEAR_TIE, near_tie
from peagle.tokenizer import render_chat

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def prompt(text, name="1"):
    return Prompt(name, ({"role": "user", "content": text},), "text")


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

    def draft(self, token_ids, aux_hidden_TA, num_draft_tokens):
        assert len(token_ids) == len(aux_hidden_TA) + 1
        self.num_anchors += len(token_ids) - 1
        start = self.num_anchors + 1 - self._num_prompt_tokens
        right = self._answer[start : start + num_draft_tokens]
        drafts = [
            token if self._num_right is None or index < self._num_right else (token + 1) % 288
            for index, token in enumerate(right)
        ]
        return Draft(tuple(drafts), (0.0,) * len(drafts), torch.empty(0))


@pytest.fixture(autouse=True)
def _known_answer_drafts_for_itself(monkeypatch):
    def session(drafter):
        if not isinstance(drafter, KnownAnswer):
            return DraftingSession(drafter)
        drafter.num_anchors = 0
        return drafter

    monkeypatch.setattr(reference, "DraftingSession", session)


def known_answer(target, text, max_tokens, num_right=None):
    prompt_ids = render_chat(target.tokenizer, prompt(text).messages)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    answer = [token for step in decode(target, prompt_ids, params) for token in step.token_ids]
    return KnownAnswer(answer, len(prompt_ids), num_right)


def answer(target, drafter, prompts, params, num_draft_tokens):
    rendered = [render_prompt(target, each) for each in prompts]
    return decode_with_reference(target, rendered, [params] * len(rendered), drafter, num_draft_tokens)


def is_plain(target, prompts, params, answers):
    rendered = [render_prompt(target, each) for each in prompts]
    return answers == decode_with_reference(target, rendered, [params] * len(rendered))[0]


def test_counts_agree_with_the_steps_of_the_decoder_and_with_the_engine(target, drafter):
    answers, found = answer(target, drafter, PROMPTS, GREEDY, 4)
    accepted, num_tokens = [], 0
    for each in PROMPTS:
        prompt_ids = render_chat(target.tokenizer, each.messages)
        steps = list(decode(target, prompt_ids, GREEDY, drafter=drafter, num_draft_tokens=4))
        accepted += [step.kinds.count("accepted") for step in steps if step.draft_token_ids]
        num_tokens += sum(len(step.token_ids) for step in steps)
    assert found == Acceptance.of(accepted, 4)
    assert sum(map(len, answers)) == num_tokens == 32
    assert is_plain(target, PROMPTS, GREEDY, answers)
    rendered = [render_prompt(target, each) for each in PROMPTS]
    seen = []
    assert measure(target, drafter, rendered, GREEDY, 4, seen.append)[:2] == (found, 32) and seen == [2]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
def test_a_drafter_that_is_always_right_gives_k_plus_one(target, num_draft_tokens):
    length = 1 + 3 * (num_draft_tokens + 1)  # the prompt's token, then three whole drafts with their bonus tokens
    session = known_answer(target, "the user", length + num_draft_tokens + 1)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    answers, found = answer(target, session, PROMPTS[:1], params, num_draft_tokens)
    assert found == Acceptance(3, (3,) * num_draft_tokens)
    assert found.acceptance_length == num_draft_tokens + 1
    assert is_plain(target, PROMPTS[:1], params, answers), "right drafts change nothing but the speed"


@pytest.mark.parametrize("num_left", [1, 2, 4])
def test_draft_tokens_after_the_end_of_an_answer_are_not_counted(target, num_left):
    session = known_answer(target, "the user", 20)
    params = SamplingParams(max_tokens=1 + 5 + num_left, ignore_eos=True)  # a whole draft of four, then part of one
    answers, found = answer(target, session, PROMPTS[:1], params, 4)
    assert found == Acceptance(2, (2,) * num_left + (1,) * (4 - num_left))
    assert len(answers[0]) == params.max_tokens and is_plain(target, PROMPTS[:1], params, answers)


@pytest.mark.parametrize("num_right", [0, 2])
def test_a_drafter_that_is_wrong_from_a_place_on_is_counted_up_to_it(target, num_right):
    session = known_answer(target, "the user", 40, num_right)
    params = SamplingParams(max_tokens=1 + 4 * (num_right + 1), ignore_eos=True)
    answers, found = answer(target, session, PROMPTS[:1], params, 4)
    assert found == Acceptance(4, (4,) * num_right + (0,) * (4 - num_right))
    assert found.acceptance_length == num_right + 1
    assert is_plain(target, PROMPTS[:1], params, answers), "wrong drafts change nothing at all"


def test_a_prompt_that_does_not_fit_is_named(target, drafter):
    with pytest.raises(RequestError, match=r"prompt 'long': the prompt has 6\d\d tokens") as caught:
        render_prompt(target, prompt("x" * 600, "long"))
    assert caught.value.hint == "shorten the prompt"
    with pytest.raises(ConfigError, match="between 1 and 4"):
        measure(target, drafter, [[1, 2, 3]], GREEDY, 5)


def test_mixed_prompts_of_all_kinds_take_turns_and_fit(target):
    longest = mixed_prompts(target, 8)
    assert len(longest) > 20 and all(len(each) <= target.max_length - 8 for each in longest)
    texts = [target.tokenizer.decode(each) for each in longest[:3]]
    assert "meet people" in texts[0] and "Fibonacci" in texts[1] and "12 apples" in texts[2]
    assert len(mixed_prompts(target, target.max_length - 70)) < len(longest)


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
