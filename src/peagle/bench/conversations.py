"""Conversations of a benchmark: which turns are asked, and the prompt of a turn after the model's own answers."""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from peagle.compare.answers import render_prompt
from peagle.data.prompts import Prompt

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

TURN_SLACK = 16
"""Tokens by which the text of an answer may be longer when it is tokenized again as part of a prompt."""

Following = Callable[[int, Sequence[str]], "list[int] | None"]
"""Token ids of the next turn, given the index of the conversation and the answers so far; None after the last."""


def planned(num_turns: Sequence[int], num_requests: int) -> list[tuple[int, int]]:
    """The conversations of a measurement, as (index, turns to ask): repeated until they have `num_requests` turns.

    >>> planned([1, 3], 6)
    [(0, 1), (1, 3), (0, 1), (1, 1)]
    """
    plan, left = [], num_requests
    for index, turns in cycle(enumerate(num_turns)):
        if left <= 0:
            break
        plan.append((index, min(turns, left)))
        left -= turns
    return plan


class Conversations:
    """Prompts as token ids, and the prompts of their later turns."""

    def __init__(self, target: "HFTarget", prompts: Sequence[Prompt], first: Sequence[list[int]] | None = None) -> None:
        """`first` has the token ids of the first turns, if they are known."""
        self._target, self._prompts = target, prompts
        self.first = [render_prompt(target, prompt) for prompt in prompts] if first is None else list(first)

    @property
    def num_turns(self) -> list[int]:
        return [prompt.num_turns for prompt in self._prompts]

    def following(self, index: int, answers: Sequence[str]) -> list[int] | None:
        prompt: Prompt | None = self._prompts[index]
        for answer in answers:
            prompt = None if prompt is None else prompt.following(answer)
        return None if prompt is None else render_prompt(self._target, prompt)

    def max_length(self, max_tokens: int) -> int:
        """Tokens of the longest conversation if every answer has `max_tokens`."""
        longest = max(map(len, self.first)) + max_tokens
        for index, turns in enumerate(self.num_turns):
            if turns > 1:
                empty = self.following(index, [""] * (turns - 1)) or []
                longest = max(longest, len(empty) + turns * max_tokens + (turns - 1) * TURN_SLACK)
        return longest
