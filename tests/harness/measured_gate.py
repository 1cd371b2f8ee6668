"""A gate whose acceptance is given by the test instead of measured."""

from typing import Any

from peagle.compare.evidence import MAX_TOKENS
from peagle.compare.gate import Gate
from peagle.decoding.acceptance import Acceptance


class MeasuredGate(Gate):
    """`measure(drafter, prompts, num_draft_tokens, max_tokens)` replaces decoding; None decodes for real."""

    def __init__(self, *arguments: Any, measure: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._given = measure

    def _measure(self, depth: int) -> Acceptance:
        if self._given is None:
            return super()._measure(depth)
        found: Acceptance = self._given(self.drafter, self.prompts, depth, MAX_TOKENS)
        return found
