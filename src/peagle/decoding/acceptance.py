"""Counting what became of draft tokens, in the one definition used everywhere.

    drafts              verified draft sequences (one a step)
    acceptance length   tokens emitted a target forward: 1 + accepted / drafts, the recovered or bonus token included
    per position        share of drafts whose token at that position was accepted (not conditioned on the earlier ones)

The formulas are vLLM's. Of the draft in which an answer ends, `peagle` counts what was emitted; vLLM also counts the
accepted tokens beyond the end, so that its acceptance length is higher by a trifle.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Counts over any number of drafts; they add up with `+`."""

    num_drafts: int
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of(cls, accepted_by_draft: Iterable[int], num_draft_tokens: int) -> "Acceptance":
        """Count drafts of which the first n tokens were accepted, for each n given."""
        counts, num_drafts = [0] * num_draft_tokens, 0
        for accepted in accepted_by_draft:
            num_drafts += 1
            for position in range(accepted):
                counts[position] += 1
        return cls(num_drafts, tuple(counts))

    def __add__(self, other: "Acceptance") -> "Acceptance":
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return Acceptance(self.num_drafts + other.num_drafts, tuple(ours + theirs for ours, theirs in pairs))

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / max(1, self.num_drafts)

    @property
    def per_position(self) -> list[float]:
        return [count / max(1, self.num_drafts) for count in self.accepted_per_position]
