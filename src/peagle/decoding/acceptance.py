"""Acceptance counts, with one definition for all reports.

    drafts              verified drafts, one per step
    acceptance length   tokens per forward pass of the target: 1 + accepted / drafts, with the recovered or bonus token
    per position        share of drafts whose token at this position was accepted (unconditional)

The formulas are vLLM's. For the draft in which an answer ends, peagle counts the emitted tokens. vLLM also counts
accepted tokens after the end, so its acceptance length is slightly higher.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

LENGTHS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens that ranges of lengths begin with."""


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


class VerifiedDraft(NamedTuple):
    """One draft of an answer, and where in the text it was made."""

    prompt_length: int
    """tokens before the answer"""
    position: int
    """tokens of the answer before the draft"""
    num_accepted: int


def acceptance_by_length(drafts: Iterable[VerifiedDraft]) -> dict[str, dict[str, dict[str, Any]]]:
    """The acceptance length by tokens of the prompt, of the answer so far, and of both (text), in ranges.

    >>> acceptance_by_length([VerifiedDraft(100, 1, 3), VerifiedDraft(100, 30, 1)])["text"]
    {'0-127': {'acceptance_length': 4.0, 'num_drafts': 1}, '128-255': {'acceptance_length': 2.0, 'num_drafts': 1}}
    """
    counts: dict[str, dict[int, list[int]]] = {
        name: defaultdict(lambda: [0, 0]) for name in ("prompt", "answer", "text")
    }
    for draft in drafts:
        lengths = (draft.prompt_length, draft.position, draft.prompt_length + draft.position)
        for ranges, length in zip(counts.values(), lengths, strict=True):
            found = ranges[bisect_right(LENGTHS, length) - 1]
            found[0] += 1
            found[1] += draft.num_accepted
    return {
        name: {
            _range(index): {"acceptance_length": round(1 + accepted / number, 4), "num_drafts": number}
            for index, (number, accepted) in sorted(ranges.items())
        }
        for name, ranges in counts.items()
    }


def length_rows(by_length: dict[str, dict[str, dict[str, Any]]]) -> dict[str, str]:
    """Lines of a table for what `acceptance_by_length` found.

    >>> length_rows({"prompt": {"0-127": {"acceptance_length": 4.0, "num_drafts": 1}}})
    {'acceptance length, by tokens of the prompt': '0-127: 4.00'}
    """
    return {
        f"acceptance length, by tokens of the {name}": ", ".join(
            f"{length}: {found['acceptance_length']:.2f}" for length, found in ranges.items()
        )
        for name, ranges in by_length.items()
    }


def _range(index: int) -> str:
    first, following = LENGTHS[index], LENGTHS[index + 1 : index + 2]
    return f"{first}-{following[0] - 1}" if following else f"{first}-"
