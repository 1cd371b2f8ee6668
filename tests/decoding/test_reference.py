"""The reference decoder: equal to transformers, whatever the drafter says, and exact where answers end."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.decoding import reference
from peagle.decoding.reference import Step, decode
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.drafting import Draft, DraftingSession
from peagle.drafter.model import Drafter
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

PROMPTS = [[5, 6, 7], list(range(20, 60)), [100], [9] * 30, [3, 200, 41, 17, 88, 250, 11]]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(num_layers=3)


@pytest.fixture(scope="module")
def drafter(target: HFTarget) -> Drafter:
    return tiny_drafter(target, num_draft_tokens=6)


def sequential(drafter: Drafter, target: HFTarget) -> Drafter:
    """The same weights drafting one token at a time, as EAGLE-3 does."""
    config = replace(drafter.config, parallel=False, mask_token_id=None)
    twin = Drafter(config, target.embedding_VD, target.head_VD).to(target.device, target.dtype)
    twin.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("mask_")})
    return twin.eval()


@functools.cache
def generated(target: HFTarget, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    output = target.model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


@functools.cache
def unscripted(target: HFTarget, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """So many tokens of plain decoding, whatever they are."""
    return tokens(decode(target, list(prompt), SamplingParams(max_tokens=num_tokens, ignore_eos=True)))


def tokens(steps: Iterator[Step] | list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_greedy_decoding_equals_transformers_generate(target: HFTarget, prompt: list[int]) -> None:
    assert tokens(decode(target, prompt, SamplingParams(max_tokens=24))) == generated(target, tuple(prompt), 24)


@pytest.mark.parametrize(
    "num_draft_tokens",
    [number if number == 4 else pytest.param(number, marks=pytest.mark.slow) for number in range(1, 7)],
)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_greedy_decoding_with_drafts_equals_transformers_generate(
    target: HFTarget, drafter: Drafter, method: str, num_draft_tokens: int
) -> None:
    chosen = drafter if method == "p-eagle" else sequential(drafter, target)
    for prompt in PROMPTS:
        steps = list(
            decode(target, prompt, SamplingParams(max_tokens=24), drafter=chosen, num_draft_tokens=num_draft_tokens)
        )
        assert tokens(steps) == generated(target, tuple(prompt), 24)
        assert all(len(step.draft_token_ids) == num_draft_tokens for step in steps[1:])


@dataclass
class ScriptedSession:
    """Drafts a given continuation of the text; tokens from `right_up_to` on are wrong by one."""

    text: list[int]
    vocab_size: int
    right_up_to: int
    num_anchors: int = 0

    def draft(self, token_ids: list[int], aux_hidden_TA: Tensor, num_draft_tokens: int) -> Draft:
        assert len(aux_hidden_TA) == len(token_ids) - 1, "every new token but the newest comes with its state"
        self.num_anchors += len(token_ids) - 1
        start = self.num_anchors + 1
        following = (self.text[start:] + [0] * num_draft_tokens)[:num_draft_tokens]
        drafts = [
            token if index < self.right_up_to else (token + 1) % self.vocab_size
            for index, token in enumerate(following)
        ]
        return Draft(tuple(drafts), (1.0,) * num_draft_tokens, torch.empty(0))


@dataclass
class ScriptedDrafter:
    text: list[int]
    vocab_size: int
    right_up_to: int

    def check_num_draft_tokens(self, num_draft_tokens: int) -> None:
        pass

    def new_session(self) -> ScriptedSession:
        return ScriptedSession(self.text, self.vocab_size, self.right_up_to)


@pytest.fixture(autouse=True)
def _scripted_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(drafter: Drafter | ScriptedDrafter) -> DraftingSession | ScriptedSession:
        return drafter.new_session() if isinstance(drafter, ScriptedDrafter) else DraftingSession(drafter)

    monkeypatch.setattr(reference, "DraftingSession", session)


@pytest.mark.parametrize("right_up_to", [0, 1, 3, 4])
def test_scripted_drafters_hit_every_edge_of_acceptance(target: HFTarget, right_up_to: int) -> None:
    prompt = PROMPTS[1]
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    longer = unscripted(target, tuple(prompt), 60)
    drafter = ScriptedDrafter(prompt + longer, target.vocab_size, right_up_to)
    steps = list(decode(target, prompt, params, drafter=drafter, num_draft_tokens=4))
    assert tokens(steps) == longer[:41]
    assert {step.num_accepted for step in steps[1:]} == {right_up_to}
    assert len(steps) == 1 + 40 // (right_up_to + 1)
    assert {step.kinds[-1] for step in steps[1:]} == {"bonus" if right_up_to == 4 else "recovered"}


def test_the_drafters_cache_never_keeps_placeholders_or_guesses(target: HFTarget, drafter: Drafter) -> None:
    """Drafting step by step with a cache equals drafting from scratch at every step."""
    for method in (drafter, sequential(drafter, target)):
        prompt = PROMPTS[4]
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        steps = list(decode(target, prompt, params, drafter=method, num_draft_tokens=5))
        text = list(prompt)
        for previous, step in itertools.pairwise(steps):
            text += previous.token_ids
            aux_hidden = target.forward(torch.tensor([text])).aux_hidden_BTA[0, :-1]
            fresh = DraftingSession(method).draft(text, aux_hidden, 5)
            assert fresh.token_ids == step.draft_token_ids


def test_sampled_answers_with_a_seed_do_not_depend_on_the_drafter_or_its_depth(
    target: HFTarget, drafter: Drafter
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, top_k=50, seed=11)
    plain = tokens(decode(target, PROMPTS[0], params))
    for num_draft_tokens in (1, 3, 6):
        drafted = decode(target, PROMPTS[0], params, drafter=drafter, num_draft_tokens=num_draft_tokens)
        assert tokens(drafted) == plain
    assert tokens(decode(target, PROMPTS[0], replace(params, seed=12))) != plain


def test_sampled_answers_follow_the_targets_distribution() -> None:
    """Two-token texts over an 8-token vocabulary, against the target's exact joint distribution (chi-square)."""
    target = tiny_target(num_layers=1, vocab_size=8, initializer_range=0.4)
    config = config_for_target(target, num_layers=1, num_draft_tokens=3, mask_token_id=7)
    drafter = create_drafter(target, config, "random", seed=0).eval()
    prompt, temperature, num_draws = [5, 6, 4], 1.3, 500
    logits = target.forward(torch.tensor([[*prompt, token] for token in range(8)])).logits_BTV.double() / temperature
    probs = torch.softmax(logits, -1)
    joint = probs[0, -2][:, None] * probs[:, -1]  # the first token's probability times the second's after it
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(num_draws):
        params = SamplingParams(max_tokens=3, temperature=temperature, seed=seed, ignore_eos=True)
        steps = decode(target, prompt, params, drafter=drafter, num_draft_tokens=3)
        first, second = next(steps), next(steps)
        accepted += second.num_accepted
        counts[(first.token_ids[0], second.token_ids[0])] += 1
    expected = joint.flatten() * num_draws
    observed = torch.tensor([counts[(a, b)] for a in range(8) for b in range(8)], dtype=torch.float64)
    is_common = expected > 5
    chi_square = ((observed - expected)[is_common] ** 2 / expected[is_common]).sum()
    num_cells = int(is_common.sum())
    # Five standard deviations above the mean of a chi-square: a right decoder fails once in millions of seeds.
    assert chi_square < num_cells + 5 * (2 * num_cells) ** 0.5
    assert accepted > 0, "a test in which nothing is accepted proves little"


def test_an_end_token_inside_an_accepted_draft_cuts_the_answer_there(target: HFTarget) -> None:
    prompt = PROMPTS[1]
    text = unscripted(target, tuple(prompt), 30)
    end = next(index for index, token in enumerate(text) if index >= 6 and text.index(token) == index)
    drafter = ScriptedDrafter(prompt + text + [0] * 9, target.vocab_size, 9)
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(text[end],))
    steps = list(decode(target, prompt, params, drafter=drafter, num_draft_tokens=8))
    assert tokens(steps) == text[: end + 1]
    assert steps[-1].finish_reason == "stop"
    assert all(step.finish_reason is None for step in steps[:-1])


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_inside_an_accepted_draft_cuts_exactly_there(target: HFTarget, max_tokens: int) -> None:
    prompt = PROMPTS[1]
    text = unscripted(target, tuple(prompt), 30)
    drafter = ScriptedDrafter(prompt + text, target.vocab_size, 9)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    steps = list(decode(target, prompt, params, drafter=drafter, num_draft_tokens=5))
    assert tokens(steps) == text[:max_tokens]
    assert steps[-1].finish_reason == "length"


def test_a_stop_string_inside_an_accepted_draft_ends_the_text_before_it(target: HFTarget) -> None:
    prompt = PROMPTS[2]
    plain = list(decode(target, prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
    whole = "".join(step.text for step in plain)
    stop = whole[7:9]
    drafter = ScriptedDrafter(prompt + tokens(plain), target.vocab_size, 9)
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
    drafted = list(decode(target, prompt, params, drafter=drafter, num_draft_tokens=6))
    assert "".join(step.text for step in drafted) == whole[: whole.index(stop)]
    assert drafted[-1].finish_reason == "stop"
    assert tokens(drafted) == tokens(decode(target, prompt, params))


def test_the_answer_ends_where_the_context_does(target: HFTarget, drafter: Drafter) -> None:
    prompt = [7] * (target.max_length - 5)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    drafted = list(decode(target, prompt, params, drafter=drafter, num_draft_tokens=6))
    assert len(tokens(drafted)) == 5
    assert drafted[-1].finish_reason == "length"
    assert tokens(drafted) == tokens(decode(target, prompt, params))


def test_depth_beyond_training_is_refused_with_a_hint(target: HFTarget, drafter: Drafter) -> None:
    with pytest.raises(ConfigError, match="between 1 and 6, the depth it was trained for, got 7") as caught:
        decode(target, [5], SamplingParams(), drafter=drafter, num_draft_tokens=7)
    assert "train one" in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1] * 512, "512 tokens"), ([288], "between 0 and 287"), ([-1], "between 0 and 287")],
)
def test_impossible_prompts_are_refused_before_anything_runs(target: HFTarget, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode(target, prompt, SamplingParams())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=2), "peagle.decode gives one answer, got n=2"),
        (SamplingParams(logprobs=0), "peagle.decode does not report log-probabilities, got logprobs=0"),
    ],
)
def test_what_only_the_engine_gives_is_refused_by_name(target: HFTarget, params: SamplingParams, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        decode(target, [5], params)
    assert "peagle.LLM" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "given", "num_drafts"), [(None, 5, 5), (2, 5, 2), (0, 5, 0), (5, 5, 5), (4, 0, 4), (None, 0, 0)]
)
def test_a_number_of_draft_tokens_in_the_parameters_takes_the_place_of_the_other(
    target: HFTarget, drafter: Drafter, asked: int | None, given: int, num_drafts: int
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, num_draft_tokens=asked)
    steps = list(decode(target, PROMPTS[0], params, drafter=drafter, num_draft_tokens=given))
    assert {len(step.draft_token_ids) for step in steps[1:]} == {num_drafts}


def test_more_draft_tokens_than_there_can_be_are_refused(target: HFTarget, drafter: Drafter) -> None:
    params = SamplingParams(num_draft_tokens=4)
    with pytest.raises(RequestError, match="num_draft_tokens=4 needs a drafter"):
        decode(target, [5], params)
    with pytest.raises(RequestError, match="at most 3, got 4"):
        decode(target, [5], params, drafter=drafter, num_draft_tokens=3)
    with pytest.raises(ConfigError, match="between 1 and 6, the depth it was trained for, got 7"):
        decode(target, [5], replace(params, num_draft_tokens=7), drafter=drafter)
