"""What a request's penalties and biases make of the target's logits, in the plainest form: one token at a time.

`peagle.kernels.adjust` does the same for batches; this is what it is compared with.
"""

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
    """Float32 logits [V] for the token after `prompt_ids` and `answer_ids`; `end_ids` are the tokens that end it."""
    logits_V = logits_V.to(torch.float32, copy=True)
    for token, bias in params.logit_bias.items():
        logits_V[token] += bias
    if len(answer_ids) < params.min_tokens:
        for token in end_ids:
            if token < len(logits_V):
                logits_V[token] = float("-inf")
    # Tensors: dividing by a number is multiplying by its inverse on some devices, and Python's floats are longer.
    repetition, frequency = logits_V.new_tensor([params.repetition_penalty, params.frequency_penalty])
    for token in {*prompt_ids, *answer_ids} if repetition != 1 else ():
        logit = logits_V[token]
        logits_V[token] = logit / repetition if logit > 0 else logit * repetition
    for token, count in Counter(answer_ids).items():
        logits_V[token] -= frequency * count
        logits_V[token] -= params.presence_penalty
    return logits_V


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse biases of tokens that the target does not have."""
    for token in params.logit_bias:
        if token >= vocab_size:
            raise RequestError(f"logit_bias token ids must lie between 0 and {vocab_size - 1}, got {token}")
