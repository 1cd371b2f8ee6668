"""Choosing a token from logits: random numbers keyed by position, the distribution sampled from, and drawing from it.

    choose_tokens   the three in one call, for rows that may differ in their settings: PyTorch on a CPU, one Triton
                    kernel on a GPU
    uniform, target_probs, draw
                    what that call means, in PyTorch on any device

Legend: B requests, L rows per request, N = B * L rows, V vocabulary; `...` any leading dimensions.

`uniform`, `target_probs` and `draw` are batched and read no value on the host, so they can be recorded in a CUDA graph:
shapes depend on shapes only, and scalar settings become tensors by a fill on the device. For the same reason no Python
number is given to `torch.where`, which would copy it from the host; `masked_fill` does not.

Random numbers have no state. The number for (seed, position, stream) is a hash of the three, so what a request draws
depends neither on its neighbors in the batch, nor on how many draft tokens were tried, nor on a preemption. `position`
is the index in the text of the token being decided. Different uses at one position take different streams.
"""

from typing import Any

import torch
from torch import Tensor


def choose_tokens(
    logits_NV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    stream: int,
) -> Tensor:
    """The token [N], int64, that each row of logits leads to: the most likely one at temperature 0, else a draw.

    It is `draw(target_probs(...), uniform(...))`, but for what the order of a sum leaves in the last bits of the
    masses. N is a multiple of B, often B itself: each request has N / B consecutive rows, all of which follow the
    request's settings, and its row j decides position_B + j. Settings are as in `target_probs`.

    On a GPU this is one launch. It does not wait, can be recorded in a CUDA graph and compiled with `fullgraph`. A
    row pays for top-k, top-p and a draw only where it asks for them. A row without any finite logit, or with a NaN,
    has no right answer and gives some id of the vocabulary.
    """
    settings = (temperature_B, top_k_B, top_p_B, min_p_B, seed_B, position_B, stream)
    return _choose_tokens(logits_NV, *settings)


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
    """The oracle, and what runs on a CPU: only rows that sample have their distribution computed."""
    num_rows = rows_per_request(logits_NV, temperature_B)
    tokens_N = logits_NV.argmax(-1)
    sampled_N = temperature_B.repeat_interleave(num_rows).nonzero().squeeze(1)
    if len(sampled_N) == 0:
        return tokens_N
    request_N = sampled_N // num_rows
    top_k: Tensor | int = top_k_B[request_N]
    top_p: Tensor | float = top_p_B[request_N]
    if bool(((top_k_B[request_N] <= 0) & (top_p_B[request_N] >= 1)).all()):
        # Numbers that restrict nothing spare the sort of the vocabulary.
        top_k, top_p = 0, 1.0
    probs_NV = target_probs(logits_NV[sampled_N], temperature_B[request_N], top_k, top_p, min_p_B[request_N])
    uniform_N = uniform(seed_B[request_N], position_B[request_N] + sampled_N % num_rows, stream)
    tokens_N[sampled_N] = draw(probs_NV, uniform_N)
    return tokens_N


def rows_per_request(logits_NV: Tensor, setting_B: Tensor) -> int:
    """L of a call to `choose_tokens`."""
    num_rows, num_requests = logits_NV.shape[0], setting_B.shape[0]
    if num_requests == 0 or num_rows % num_requests:
        if num_rows == num_requests == 0:
            return 1
        raise ValueError(f"{num_rows} rows of logits cannot be shared out evenly among {num_requests} requests")
    return num_rows // num_requests


def _choose_tokens_on_gpu(*arguments: Any) -> Tensor:
    # Imported where it is needed: the package must work where triton is not installed.
    from peagle.kernels.choose_triton import choose_tokens_triton

    return choose_tokens_triton(*arguments)


def _one_token_a_row(logits_NV: Tensor, *_settings: Any) -> Tensor:
    return logits_NV.new_empty(logits_NV.shape[0], dtype=torch.int64)


# An operator of its own, so that a compiler takes the call as it stands and does not look into the kernel.
_choose_tokens = torch.library.custom_op(
    "peagle::choose_tokens", choose_tokens_torch, mutates_args=(), device_types="cpu"
)
_choose_tokens.register_kernel("cuda", _choose_tokens_on_gpu)
_choose_tokens.register_fake(_one_token_a_row)


def _signed(value: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit constant."""
    return value - 2**64 if value >= 2**63 else value


# Constants of splitmix64: the step of its counter and the two multipliers of its finalizer.
SPLITMIX_STEP = _signed(0x9E3779B97F4A7C15)
SPLITMIX_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
SPLITMIX_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copies of the sign bit are masked away."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """One step of splitmix64 from the state `bits`; int64 sums and products wrap, on CPU and GPU alike."""
    bits = bits + SPLITMIX_STEP
    bits = (bits ^ _shift_right(bits, 30)) * SPLITMIX_MULTIPLIER_1
    bits = (bits ^ _shift_right(bits, 27)) * SPLITMIX_MULTIPLIER_2
    return bits ^ _shift_right(bits, 31)


def uniform(seed_B: Tensor, position_B: Tensor, stream: int) -> Tensor:
    """Float64 numbers in [0, 1), multiples of 2**-53; the same bits on every device.

    Integer tensors of any shapes that broadcast. For one seed and stream, no two positions share a hash, because each
    mixing step is a bijection of 64 bits.
    """
    bits = _mix(seed_B.to(torch.int64))
    bits = _mix(bits ^ position_B.to(torch.int64))
    bits = _mix(bits ^ stream)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _per_row(value: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A setting as a tensor that lines up with the FIRST dimensions of `like`: [B] becomes [B, 1, 1] for [B, L, V]."""
    if not isinstance(value, Tensor):
        return torch.full((1,) * like.ndim, value, dtype=dtype, device=like.device)
    return value.to(dtype).reshape(value.shape + (1,) * (like.ndim - value.ndim))


def _keep_top(scaled_V: Tensor, top_k: Tensor | int, top_p: Tensor | float) -> Tensor:
    """Mask of the tokens that top-k and then top-p keep. `scaled_V` are logits whose largest is 0."""
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
    # The explicit test of 1 matters: rounding in the sum must not cost the tail of an unrestricted request.
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
    """The float32 distribution [..., V] a request samples from, given the target's logits [..., V].

    Each setting is a number or a tensor over the first dimensions of the logits ([B] or [B, L] for [B, L, V]).
    Order: temperature, top-k, top-p over what top-k left, min-p relative to the most likely token; what remains is
    renormalized. That is the order of transformers. vLLM applies min-p before top-p; the two differ only for requests
    that set both.

    - temperature 0: all probability on the most likely token, the lowest id among equals, whatever the other settings.
    - top_k 0, or at least V: no restriction. Tokens tied with the k-th are all kept (as transformers and vLLM do).
    - top_p: the most likely tokens up to and including the one that reaches the mass `top_p`, hence at least one; 1 is
      no restriction. Tokens tied with the last are all kept, so that the order of a sort decides nothing.
    - min_p: tokens less likely than `min_p` times the most likely are dropped; 0 is no restriction.

    When `top_k` and `top_p` are plain numbers that restrict nothing, the sort over the vocabulary is left out.
    """
    logits_V = logits_V.to(torch.float32)
    temperature_1 = _per_row(temperature, logits_V, torch.float32)
    is_greedy_1 = temperature_1 == 0
    # The maximum goes first, so that a tiny temperature gives 0 and -inf and not inf - inf.
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
    """Token ids [...] from weights [..., V] by inverting the cumulative distribution at float64 `uniforms` [...] < 1.

    The weights need not sum to 1. A token of weight 0 is never returned, whatever the number; only a row without any
    weight, which has no right answer, gives token 0.
    """
    mass_V = probs_V.cumsum(-1, dtype=torch.float64)
    # A parallel sum may round differently from one entry to the next, so that a token of weight 0 seems to hold mass:
    # it is taken out, of the total too, which keeps the total at the mass of a token that can be drawn.
    mass_V = mass_V.masked_fill(probs_V <= 0, 0)
    threshold_1 = uniforms.unsqueeze(-1) * mass_V.amax(-1, keepdim=True)
    # argmax of 0/1 is the first token past the threshold.
    return (mass_V > threshold_1).to(torch.uint8).argmax(-1)
