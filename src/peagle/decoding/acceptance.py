"""Acceptance counts, with one definition for all reports.

    drafts              verified drafts, one per step
    acceptance length   tokens per forward pass of the target: 1 + accepted / drafts, with the recovered or bonus token
    per position        share of drafts whose token at this position was accepted (unconditional)

The formulas are vLLM's. For the draft in which an answer ends, peagle counts the emitted tokens. vLLM also counts
accepted tokens after the end, so its acceptance length is slightly higher.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Counts over any number of drafts. They add up with `+`."""

    num_drafts: int
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of(cls, accepted_by_draft: Iterable[int], num_draft_tokens: int) -> "Acceptance":
        """Count drafts by their numbers of accepted tokens."""
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
