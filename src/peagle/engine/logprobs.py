"""Log-probabilities of what a pass emitted and of the prompts it read, for the requests that ask for them.

Shapes: S tokens, V vocabulary.
"""

import torch
from torch import Tensor

from peagle.engine.launch import Logprobs, Pass, Scores
from peagle.engine.row_state import Decoded
from peagle.engine.scheduler import Chunk, Plan


def add_logprobs(result: Pass, decoded: Decoded, places: list[int]) -> None:
    """For requests that ask for them: log-probabilities of what was emitted and of the likeliest tokens."""
    for index, (request, place) in enumerate(zip(result.requests, places, strict=True)):
        if request.params.logprobs is None:
            continue
        logits_LV = decoded.logits_NV[decoded.place_BL[place]]
        result.logprobs[index] = _logprobs(logits_LV, decoded.emitted_BE[place, 2:], request.params.logprobs)


def add_scores(result: Pass, decoded: Decoded, scored: list[tuple[Chunk, range]]) -> None:
    """For chunks that ask for them: log-probabilities of their prompts' tokens."""
    num_done = 0
    for chunk, places in scored:
        assert decoded.scored_logits_SV is not None and chunk.request.params.prompt_logprobs is not None
        first = chunk.start + 1
        token_ids_S = torch.tensor(
            chunk.request.token_ids[first : first + len(places)], device=decoded.emitted_BE.device
        )
        logits_SV = decoded.scored_logits_SV[num_done : num_done + len(places)]
        logprobs = _logprobs(logits_SV, token_ids_S, chunk.request.params.prompt_logprobs)
        result.scores.append(Scores(chunk.request, chunk.request.epoch, first, logprobs))
        num_done += len(places)


def scored_tokens(plan: Plan) -> list[tuple[Chunk, range]]:
    """Chunks whose prompts are to be scored, and the places in their pass of the tokens that predict another."""
    scored, used = [], 0
    for chunk in plan.chunks:
        num_scored = min(chunk.end, chunk.request.prompt_length - 1) - chunk.start
        if chunk.request.wants_scores and num_scored > 0:
            scored.append((chunk, range(used, used + num_scored)))
        used += chunk.end - chunk.start
    return scored


def _logprobs(logits_SV: Tensor, token_ids_S: Tensor, num_top: int) -> Logprobs:
    logprobs_SV = logits_SV.float().log_softmax(-1)
    top = logprobs_SV.topk(num_top, dim=-1)
    chosen_S = logprobs_SV.gather(1, token_ids_S[:, None])[:, 0]
    return Logprobs(chosen_S.to("cpu"), top.values.to("cpu"), top.indices.to("cpu"))
