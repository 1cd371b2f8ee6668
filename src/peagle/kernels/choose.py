"""Choose a token from logits: `choose_tokens` for batches with per-request settings, and the functions that define it.

On a CPU `choose_tokens` runs PyTorch, on a GPU one Triton kernel. `target_probs` and `draw` are its definition. They
are batched and never read a value on the host, so a CUDA graph can capture them. (`torch.where` with a Python number
would copy it from the host; `masked_fill` does not.)

Legend: B requests, L rows per request, N = B * L rows, V vocabulary; `...` any leading dimensions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.random_numbers import uniform


def choose_tokens_torch(
    logits_NV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    stream: int,
) -> Tensor:
    """`choose_tokens` on a CPU, and the reference for the kernel. Only sampled rows have their distribution computed.

    The token [N], int64, for each row of logits: the most likely one at temperature 0, else a draw. Equals
    `draw(target_probs(...), uniform(...))` up to summation order. N is a multiple of B: each request has N / B
    consecutive rows with its settings, and its row j decides position_B + j. Settings are as in `target_probs`.
    """
    num_rows = rows_per_request(logits_NV, temperature_B)
    tokens_N = _argmax(logits_NV)
    sampled_N = temperature_B.repeat_interleave(num_rows).nonzero().squeeze(1)
    if len(sampled_N) == 0:
        return tokens_N
    request_N = sampled_N // num_rows
    top_k: Tensor | int = top_k_B[request_N]
    top_p: Tensor | float = top_p_B[request_N]
    if bool(((top_k_B[request_N] <= 0) & (top_p_B[request_N] >= 1)).all()):
        top_k, top_p = 0, 1.0  # no restriction: avoids sorting the vocabulary
    probs_NV = target_probs(logits_NV[sampled_N], temperature_B[request_N], top_k, top_p, min_p_B[request_N])
    uniform_N = uniform(seed_B[request_N], position_B[request_N] + sampled_N % num_rows, stream)
    tokens_N[sampled_N] = draw(probs_NV, uniform_N)
    return tokens_N


def _argmax(logits_NV: Tensor) -> Tensor:
    """The most likely token of each row. numpy finds it ten times as fast as torch on a CPU."""
    if logits_NV.is_cuda or logits_NV.dtype != torch.float32:
        return logits_NV.argmax(-1)
    return torch.from_numpy(logits_NV.numpy(force=True).argmax(-1))


def rows_per_request(logits_NV: Tensor, setting_B: Tensor) -> int:
    """L of a call to `choose_tokens`."""
    num_rows, num_requests = logits_NV.shape[0], setting_B.shape[0]
    if num_requests == 0 or num_rows % num_requests:
        if num_rows == num_requests == 0:
            return 1
        raise ValueError(f"{num_rows} rows of logits do not divide evenly among {num_requests} requests")
    return num_rows // num_requests


def choose_tokens_triton(logits_NV: Tensor, temperature_B: Tensor, *settings: Any) -> Tensor:
    # Imported lazily: triton may not be installed.
    from peagle.kernels.choose_triton import launch

    return launch(rows_per_request(logits_NV, temperature_B), logits_NV, temperature_B, *settings)


# A custom op, so that torch.compile does not trace into the kernel.
_op = torch.library.custom_op("peagle::choose_tokens", choose_tokens_torch, mutates_args=(), device_types="cpu")
_op.register_kernel("cuda", choose_tokens_triton)
_op.register_fake(lambda logits_NV, *_: logits_NV.new_empty(logits_NV.shape[0], dtype=torch.int64))
choose_tokens: Callable[..., Tensor] = _op
"""On a GPU one launch without a synchronization. It can be captured in a CUDA graph and compiled with `fullgraph`. Only
rows that use top-k, top-p or sampling pay for them. A row without a finite logit, or with a NaN, yields an arbitrary
id of the vocabulary."""


def _per_row(value: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A setting as a tensor that lines up with the FIRST dimensions of `like`: [B] becomes [B, 1, 1] for [B, L, V]."""
    if not isinstance(value, Tensor):
        return torch.full((1,) * like.ndim, value, dtype=dtype, device=like.device)
    return value.to(dtype).reshape(value.shape + (1,) * (like.ndim - value.ndim))


def _keep_top(scaled_V: Tensor, top_k: Tensor | int, top_p: Tensor | float) -> Tensor:
    """Mask of the tokens that top-k and then top-p keep. `scaled_V` are logits whose maximum is 0."""
    vocab_size = scaled_V.shape[-1]
    sorted_V = scaled_V.sort(dim=-1, descending=True).values

    def value_at_rank(rank_1: Tensor) -> Tensor:
        return sorted_V.gather(-1, rank_1.expand(*sorted_V.shape[:-1], 1))

    k_1 = _per_row(top_k, scaled_V, torch.int64)
    k_1 = k_1.masked_fill(k_1 <= 0, vocab_size).clamp(max=vocab_size)
    smallest_of_top_k_1 = value_at_rank(k_1 - 1)

    p_1 = _per_row(top_p, scaled_V, torch.float32).to(torch.float64)
    weights_V = sorted_V.exp().masked_fill(sorted_V < smallest_of_top_k_1, 0)
    mass_V = weights_V.cumsum(-1, dtype=torch.float64)
    mass_before_V = mass_V - weights_V
    # p = 1 is tested explicitly: rounding in the sum must not drop the tail of an unrestricted request.
    in_nucleus_V = (mass_before_V < p_1 * mass_V[..., -1:]) | (p_1 >= 1)
    last_rank_1 = (in_nucleus_V.sum(-1, keepdim=True) - 1).clamp(min=0)
    return scaled_V >= torch.maximum(smallest_of_top_k_1, value_at_rank(last_rank_1))


def target_probs(
    logits_V: Tensor,
    temperature: Tensor | float,
    top_k: Tensor | int,
    top_p: Tensor | float,
    min_p: Tensor | float,
) -> Tensor:
    """The float32 distribution [..., V] that a request samples from, given the target's logits [..., V].

    Each setting is a number or a tensor over the first dimensions of the logits ([B] or [B, L] for [B, L, V]).
    Order: temperature, top-k, top-p over the tokens that top-k kept, min-p relative to the most likely token, then
    renormalize. transformers uses this order. vLLM applies min-p before top-p, which differs only if both are set.

    - temperature 0: all probability on the most likely token, the lowest id among equals; other settings are ignored.
    - top_k 0, or at least V: no restriction. Tokens tied with the k-th are all kept (as in transformers and vLLM).
    - top_p: the most likely tokens up to and including the one that reaches the mass `top_p`, so at least one; 1 is
      no restriction. Tokens tied with the last are all kept, so the sort order decides nothing.
    - min_p: drops tokens less likely than `min_p` times the most likely; 0 is no restriction.

    If `top_k` and `top_p` are Python numbers that restrict nothing, the vocabulary is not sorted.
    """
    logits_V = logits_V.to(torch.float32)
    temperature_1 = _per_row(temperature, logits_V, torch.float32)
    is_greedy_1 = temperature_1 == 0
    # Subtract the maximum first, so that a tiny temperature gives 0 and -inf instead of inf - inf.
    scaled_V = (logits_V - logits_V.amax(-1, keepdim=True)) / temperature_1.masked_fill(is_greedy_1, 1.0)
    weights_V = scaled_V.exp()
    if isinstance(top_k, Tensor) or isinstance(top_p, Tensor) or top_k > 0 or top_p < 1:
        weights_V = weights_V.masked_fill(~_keep_top(scaled_V, top_k, top_p), 0)
    if isinstance(min_p, Tensor) or min_p > 0:
        # The most likely token has weight exactly 1, so weights are already relative to it.
        weights_V = weights_V.masked_fill(weights_V < _per_row(min_p, logits_V, torch.float32), 0)
    probs_V = weights_V / weights_V.sum(-1, keepdim=True)
    token_ids_V = torch.arange(logits_V.shape[-1], device=logits_V.device)
    one_hot_V = (token_ids_V == logits_V.argmax(-1, keepdim=True)).to(torch.float32)
    return torch.where(is_greedy_1, one_hot_V, probs_V)


def draw(probs_V: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [...] from weights [..., V]: inverts the cumulative distribution at float64 `uniforms` [...] < 1.

    The weights need not sum to 1. A token of weight 0 is never returned; a row without any weight gives token 0.
    """
    mass_V = probs_V.cumsum(-1, dtype=torch.float64)
    # A parallel scan may round each entry differently, so a token of weight 0 can seem to hold mass: zero its entry.
    # The total is then the entry of a token that can be drawn.
    mass_V = mass_V.masked_fill(probs_V <= 0, 0)
    threshold_1 = uniforms.unsqueeze(-1) * mass_V.amax(-1, keepdim=True)
    # argmax of 0/1 is the first token past the threshold.
    return (mass_V > threshold_1).to(torch.uint8).argmax(-1)
