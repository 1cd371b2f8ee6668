"""The outcome of an adaptation: acceptance before and after on both texts, and whether the drafter is kept.

>>> before, better = Measured(2.0, 3.0), Measured(2.5, 2.97)
>>> judge(before, better)
(True, 'acceptance length on held-out traffic +25.0%, on old text -1.0%')
>>> judge(before, Measured(2.5, 2.7))
(False, 'acceptance length on old text -10.0%, more than the 2% that an adaptation may cost')
>>> judge(before, Measured(2.0, 3.1))
(False, 'acceptance length on held-out traffic does not rise (2.000 before, 2.000 after)')
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.adaptation.config import MOST_LOSS
from peagle.config import from_mapping
from peagle.errors import ConfigError

OUTCOME_NAME = "adaptation.json"


@dataclass(frozen=True)
class Measured:
    """Acceptance lengths, replayed on held-out greedy answers."""

    traffic: float
    old: float


@dataclass(frozen=True)
class Outcome:
    """Written to OUTPUT/adaptation.json when an adaptation ends."""

    is_kept: bool
    why: str
    before: Measured
    after: Measured
    num_draft_tokens: int
    num_steps: int
    seconds: float
    """of the whole run, or of its last part if it was resumed"""
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def judge(before: Measured, after: Measured) -> tuple[bool, str]:
    """Whether to keep a drafter, and why: it must gain on traffic, and lose at most 2% on old text."""
    gain, change = after.traffic / before.traffic - 1, after.old / before.old - 1
    if gain <= 0:
        lengths = f"({before.traffic:.3f} before, {after.traffic:.3f} after)"
        return False, f"acceptance length on held-out traffic does not rise {lengths}"
    if change < -MOST_LOSS:
        return False, f"acceptance length on old text {change:+.1%}, more than the 2% that an adaptation may cost"
    return True, f"acceptance length on held-out traffic {gain:+.1%}, on old text {change:+.1%}"


def read_outcome(directory: Path) -> Outcome | None:
    """The outcome of a finished adaptation; None if there is none."""
    path = directory / OUTCOME_NAME
    if not path.exists():
        return None
    try:
        return from_mapping(Outcome, json.loads(path.read_text(encoding="utf-8")), OUTCOME_NAME)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="delete it, or pass a new --output") from error
