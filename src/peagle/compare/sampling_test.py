"""Do sampled answers have the target's distribution? Pearson's chi-square test against exact probabilities.

Many seeds answer one prompt with three tokens. The target's probability of each opening is computed exactly, so counts
are compared with the truth and not with another sample.

A cell is an opening of one to three tokens and counts the draws that start with it and belong to no longer cell. Each
cell is expected at least five times: rarer openings count for their shorter beginning, or for the rest.

Drafts take part from the second token on: the first follows the prompt directly.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

LENGTH = 3
"""Tokens of an opening: one from the prefill, two from verified drafts."""
BRANCHES = 4
"""Most likely tokens that are followed after each token."""
LEAST_EXPECTED = 5.0

Opening = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """Observed and expected counts per cell. The last cell is the rest."""

    openings: tuple[Opening, ...]
    observed: tuple[int, ...]
    expected: tuple[float, ...]

    @property
    def statistic(self) -> float:
        pairs = zip(self.observed, self.expected, strict=True)
        return sum((ours - theirs) ** 2 / theirs for ours, theirs in pairs if theirs > 0)

    @property
    def degrees_of_freedom(self) -> int:
        return sum(each > 0 for each in self.expected) - 1

    @property
    def p_value(self) -> float:
        """Chance that samples of the target are at least this far off; 0 if something impossible was drawn."""
        if any(ours and not theirs for ours, theirs in zip(self.observed, self.expected, strict=True)):
            return 0.0
        return chi_square_tail(self.statistic, self.degrees_of_freedom)

    def report(self) -> dict[str, Any]:
        return {
            "num_samples": sum(self.observed),
            "num_cells": len(self.observed),
            "degrees_of_freedom": self.degrees_of_freedom,
            "statistic": round(self.statistic, 4),
            "p_value": self.p_value,
            "openings": [list(opening) for opening in self.openings],
            "observed": list(self.observed),
            "expected": [round(each, 2) for each in self.expected],
        }


def chi_square_tail(statistic: float, degrees_of_freedom: int) -> float:
    """Probability that a chi-square variable exceeds `statistic`.

    >>> round(chi_square_tail(11.0705, 5), 4), chi_square_tail(0.0, 3)
    (0.05, 1.0)
    """
    import torch

    if degrees_of_freedom < 1 or statistic <= 0:
        return 1.0
    half = torch.tensor([degrees_of_freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def opening_probs(
    target: "HFTarget", prompt_ids: Sequence[int], temperature: float, followed: Sequence[Opening] | None = None
) -> dict[Opening, float]:
    """Exact probabilities of the most likely openings, or of `followed` and their beginnings."""
    import torch

    from peagle.kernels.choose import target_probs

    known: dict[Opening, float] = {}
    ends: dict[Opening, float] = {(): 1.0}
    for length in range(LENGTH):
        rows = torch.tensor([[*prompt_ids, *prefix] for prefix in ends], device=target.device)
        logits_BV = torch.cat([target.forward(part).logits_BTV[:, -1] for part in rows.split(16)])
        probs_BV = target_probs(logits_BV, temperature, 0, 1.0, 0.0).double().cpu()
        longer: dict[Opening, float] = {}
        for (prefix, prob), probs_V in zip(ends.items(), probs_BV, strict=True):
            if followed is None:
                tokens = probs_V.topk(min(BRANCHES, len(probs_V))).indices.tolist()
            else:
                tokens = sorted({each[length] for each in followed if each[:length] == prefix and len(each) > length})
            longer |= {(*prefix, token): prob * float(probs_V[token]) for token in tokens}
        known |= longer
        ends = longer
        if not ends:
            break
    return known


def fit(drawn: Sequence[Opening], probs: dict[Opening, float]) -> Fit:
    """Sort draws into cells, most likely first, and compare with `probs` of all openings and their beginnings."""
    num_drawn, least = len(drawn), LEAST_EXPECTED / len(drawn)
    chosen: list[Opening] = []
    for opening in sorted(probs, key=len, reverse=True):
        if cell_probs([*chosen, opening], probs)[-1] >= least:
            chosen.append(opening)
    shares = dict(zip(chosen, cell_probs(chosen, probs), strict=True))
    chosen.sort(key=lambda each: -shares[each])
    if chosen and 1 - sum(shares.values()) < least:  # too small for a cell: merge it with the least likely one
        chosen.remove(next(each for each in reversed(chosen) if _cell_of(each[:-1], set(chosen)) is None))
    cells = set(chosen)
    counts = Counter(_cell_of(opening, cells) for opening in drawn)
    return fit_cells(chosen, [counts[cell] for cell in chosen], num_drawn, probs)


def fit_cells(cells: Sequence[Opening], observed: Sequence[int], num_drawn: int, probs: dict[Opening, float]) -> Fit:
    """Observed counts of given cells beside the counts that `probs` predict; the last cell is the rest."""
    expected = [prob * num_drawn for prob in cell_probs(cells, probs)]
    rest = max(0.0, num_drawn - math.fsum(expected))
    return Fit(tuple(cells), (*observed, num_drawn - sum(observed)), (*expected, rest))


def cell_probs(cells: Sequence[Opening], probs: dict[Opening, float]) -> list[float]:
    """Probability of each cell: of its opening, minus that of longer cells that start with it.

    >>> cell_probs([(1, 2), (1,)], {(1,): 0.5, (1, 2): 0.25})
    [0.25, 0.25]
    """
    own: dict[Opening, float] = {}
    for cell in sorted(cells, key=len, reverse=True):
        longer = (prob for other, prob in own.items() if len(other) > len(cell) and other[: len(cell)] == cell)
        own[cell] = max(0.0, probs[cell] - sum(longer))
    return [own[cell] for cell in cells]


def _cell_of(opening: Opening, cells: set[Opening]) -> Opening | None:
    """The longest cell that an opening starts with."""
    return next((opening[:length] for length in range(len(opening), 0, -1) if opening[:length] in cells), None)
