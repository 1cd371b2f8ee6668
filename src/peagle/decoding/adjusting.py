"""Apply penalties and biases to logits, one token at a time: the reference for `peagle.kernels.adjust`."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams


def adjusted_logits(
    logits_V: Tensor,
    params: SamplingParams,
    end_ids: Collection[int],
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
) -> Tensor:
    """Float32 logits [V] of the token after `prompt_ids` and `answer_ids`. `end_ids` end the answer."""
    logits_V = logits_V.to(torch.float32, copy=True)
    for token, bias in params.logit_bias.items():
        logits_V[token] += bias
    if len(answer_ids) < params.min_tokens:
        for token in end_ids:
            if token < len(logits_V):
                logits_V[token] = float("-inf")
    # Tensors: with a Python number, some devices multiply by the inverse, and floats have more bits.
    repetition, frequency = logits_V.new_tensor([params.repetition_penalty, params.frequency_penalty])
    for token in {*prompt_ids, *answer_ids} if repetition != 1 else ():
        logit = logits_V[token]
        logits_V[token] = logit / repetition if logit > 0 else logit * repetition
    for token, count in Counter(answer_ids).items():
        logits_V[token] -= frequency * count
        logits_V[token] -= params.presence_penalty
    return logits_V


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse biases of token ids outside the vocabulary."""
    for token in params.logit_bias:
        if token >= vocab_size:
            raise RequestError(f"logit_bias token ids must lie between 0 and {vocab_size - 1}, got {token}")
