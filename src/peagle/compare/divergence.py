"""Where two answers to one prompt diverge, and whether rounding explains it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peagle.sampling_params import SamplingParams
from peagle.targets.near_tie import NEAR_TIE, near_tie

if TYPE_CHECKING:
    from torch import Tensor

    from peagle.targets.hf import HFTarget

PIECE = 8
"""Tokens per piece when rounding is measured: about the rows of one verification."""


@dataclass(frozen=True)
class Divergence:
    """Where two answers to one prompt diverge."""

    token: int
    """index of the first answer token that differs"""
    target_gap: float | None
    """logit gap from the target's best token to the worse of the two; None for sampled answers"""
    is_near_tie: bool
    """whether rounding explains it"""

    def explain(self, dtype: str) -> str:
        """Where the answers diverge and, if greedy, how close the target's decision was."""
        where = f"They diverge at token {self.token}"
        if self.target_gap is None:
            return f"{where}. Sampled answers diverge if rounding moves a draw."
        apart = f"{where}: the worse token's logit is {self.target_gap:.4f} below the target's best"
        if not self.is_near_tie:
            return f"{apart}, too far for rounding in {dtype}. Please report this."
        advice = "" if dtype == "float32" else " With --dtype float32 the answers are identical."
        return f"{apart}. In {dtype} the order of summation decides such a near tie.{advice}"


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, or the length of the shorter answer; None if they are equal."""
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def first_divergence(
    target: "HFTarget",
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    drafted: Sequence[int],
    params: SamplingParams,
    limit: float | None = None,
) -> Divergence | None:
    """Where the drafted answer leaves the plain one; None if they are equal.

    Rounding explains a greedy divergence only at a near tie: both tokens within `limit` (default `near_tie`) of the
    target's best logit. An answer that continues after the other's end is not a tie.
    """
    token = first_difference(plain, drafted)
    if token is None:
        return None
    if not params.is_greedy:
        return Divergence(token, None, False)
    emitted = [answer[token] for answer in (plain, drafted) if token < len(answer)]
    gap = gap_to_best(target, [*prompt_ids, *plain[:token]], emitted)
    return Divergence(token, gap, len(emitted) == 2 and gap <= (near_tie(target) if limit is None else limit))


def gap_to_best(target: "HFTarget", text: Sequence[int], token_ids: Sequence[int]) -> float:
    """Logit gap from the target's best token after `text` to the worst of `token_ids`."""
    import torch

    logits_V = target.forward(torch.tensor([list(text)], device=target.device)).logits_BTV[0, -1].float()
    return float(logits_V.max() - logits_V[list(token_ids)].min())


def measured_near_tie(target: "HFTarget", texts: Sequence[Sequence[int]]) -> float:
    """The same, measured: what rounding changes of the top-two gap."""

    def top_two_gap(logits_TV: "Tensor") -> "Tensor":
        top_T2 = logits_TV.float().topk(2).values
        return top_T2[:, 0] - top_T2[:, 1]

    return max(NEAR_TIE, measured_rounding(target, texts, top_two_gap))


def measured_rounding(
    target: "HFTarget", texts: Sequence[Sequence[int]], decision: Callable[["Tensor"], "Tensor"]
) -> float:
    """Twice the largest change of `decision(logits)` between a whole pass and short pieces of the same text.

    Twice, because the decision and the gap that judges it both carry the error.
    """
    import torch

    largest = 0.0
    for text in texts:
        token_ids_1T = torch.tensor([list(text)], device=target.device)
        whole = decision(target.forward(token_ids_1T).logits_BTV[0])
        cache = target.new_cache()
        for piece, expected in zip(token_ids_1T.split(PIECE, dim=1), whole.split(PIECE), strict=True):
            found = decision(target.forward(piece, cache).logits_BTV[0])
            largest = max(largest, float((expected - found).abs().max()))
    return 2 * largest
