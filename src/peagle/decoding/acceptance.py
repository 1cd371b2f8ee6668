"""Acceptance counts, with one definition for all reports.

    drafts              verified drafts, one per step
    acceptance length   tokens per forward pass of the target: 1 + accepted / drafts, with the recovered or bonus token
    per position        share of drafts whose token at this position was accepted (unconditional)

The formulas are vLLM's. For the draft in which an answer ends, peagle counts the emitted tokens. vLLM also counts
accepted tokens after the end, so its acceptance length is slightly higher.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


def per_position(num_drafts_by_accepted: Sequence[int]) -> list[int]:
    """The drafts whose token at each position was accepted, from the drafts by their number of accepted tokens.

    Two drafts without an accepted token, three with one, four with two:

    >>> per_position([2, 3, 4])
    [7, 4]
    """
    return list(accumulate(reversed(num_drafts_by_accepted)))[-2::-1]


@dataclass(frozen=True)
class Acceptance:
    """Counts over any number of drafts. They add up with `+`."""

    num_drafts: int
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of(cls, accepted_by_draft: Iterable[int], num_draft_tokens: int) -> "Acceptance":
        """Count drafts by their numbers of accepted tokens."""
        counts = [0] * (num_draft_tokens + 1)
        for accepted in accepted_by_draft:
            counts[accepted] += 1
        return cls(sum(counts), tuple(per_position(counts)))

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
