"""Log-probabilities of emitted tokens and of prompts, for the requests that ask for them.

Each pass computes its own right after it ran, because the next pass may overwrite its logits. The launch then copies
all of them to the host at once, without waiting for the device.

Shapes: S tokens, M most likely tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.scheduling.plan import Chunk, Plan
from peagle.scheduling.request import TokenLogprobs
from peagle.worker.transfers import Transfers


class LaunchLogprobs:
    """All log-probabilities of one launch, as one flat tensor of float32."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._size = 0
        self.host: Tensor | None = None

    def add(self, logits_SV: Tensor, token_ids_S: Tensor, num_top: int) -> "LogprobSpan":
        """Compute the log-probabilities of some tokens and of the `num_top` most likely ones at each place."""
        logprobs_SV = logits_SV.float().log_softmax(-1)
        top = logprobs_SV.topk(num_top, dim=-1)
        chosen_S1 = logprobs_SV.gather(1, token_ids_S[:, None])
        # Token ids are exact in float32: no vocabulary reaches 2**24.
        part = torch.cat([chosen_S1, top.values, top.indices.float()], dim=1)
        span = LogprobSpan(self, self._size, len(part), num_top)
        self._parts.append(part.flatten())
        self._size += part.numel()
        return span

    def fetch(self, transfers: Transfers) -> None:
        """Start the copy to the host."""
        if self._parts:
            self.host = transfers.fetch(torch.cat(self._parts))
            self._parts = []


class LogprobSpan(NamedTuple):
    """Log-probabilities of consecutive tokens of one request, within those of a launch."""

    launch: LaunchLogprobs
    start: int
    num_tokens: int
    num_top: int

    def to_list(self) -> list[TokenLogprobs]:
        """Read them on the host. The launch must be done."""
        assert self.launch.host is not None, "fetched at the end of the launch"
        width = 1 + 2 * self.num_top
        lines = self.launch.host[self.start : self.start + self.num_tokens * width].view(-1, width).tolist()
        return [
            TokenLogprobs(chosen, dict(zip(map(int, top[self.num_top :]), top[: self.num_top], strict=True)))
            for chosen, *top in lines
        ]


def scored_tokens(plan: Plan) -> list[tuple[Chunk, range]]:
    """Chunks that need prompt log-probabilities, and the tokens of the pass, by place, whose logits give them."""
    scored, used = [], 0
    for chunk in plan.chunks:
        num_scored = min(chunk.end, chunk.request.prompt_length - 1) - chunk.start
        if chunk.request.wants_scores and num_scored > 0:
            scored.append((chunk, range(used, used + num_scored)))
        used += chunk.end - chunk.start
    return scored
