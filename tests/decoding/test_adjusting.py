"""Penalties and biases by hand: a vocabulary of five tokens."""

import pytest
import torch

from peagle.decoding.adjusting import adjusted_logits
from peagle.sampling_params import SamplingParams

LOGITS_V = torch.tensor([2.0, -1.0, 0.5, 0.0, 4.0])


def adjust(prompt=(0,), answer=(1, 2, 2), **settings):
    return adjusted_logits(LOGITS_V, SamplingParams(**settings), {4, 99}, prompt, answer).tolist()


def test_settings_that_ask_for_nothing_change_nothing():
    assert adjust() == LOGITS_V.tolist()
    assert not SamplingParams().adjusts_logits


def test_repetition_draws_logits_of_prompt_and_answer_towards_what_is_less_likely():
    assert adjust(repetition_penalty=2.0) == [1.0, -2.0, 0.25, 0.0, 4.0]


def test_frequency_and_presence_are_about_the_answer_alone():
    assert adjust(frequency_penalty=0.5) == [2.0, -1.5, -0.5, 0.0, 4.0]
    assert adjust(presence_penalty=0.5) == [2.0, -1.5, 0.0, 0.0, 4.0]


def test_biases_come_before_penalties():
    assert adjust(logit_bias={1: 3.0, 3: -100.0}, repetition_penalty=2.0) == [1.0, 1.0, 0.25, -100.0, 4.0]


@pytest.mark.parametrize(("min_tokens", "is_banned"), [(3, False), (4, True)])
def test_end_tokens_are_banned_until_there_are_enough_tokens(min_tokens, is_banned):
    assert adjust(min_tokens=min_tokens)[4] == (float("-inf") if is_banned else 4.0)


def test_the_given_logits_are_left_alone_and_low_precision_is_not_carried_on():
    logits_V = LOGITS_V.to(torch.bfloat16)
    adjusted_V = adjusted_logits(logits_V, SamplingParams(presence_penalty=0.001), (), [0], [4])
    assert adjusted_V.dtype == torch.float32 and adjusted_V[4].item() == pytest.approx(3.999)
    assert logits_V[4] == 4
