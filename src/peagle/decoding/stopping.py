"""Decide where an answer ends: end tokens, stop strings, token limit, exact to the token even inside a draft."""

from typing import Literal

from peagle.sampling_params import SamplingParams
from peagle.tokenizer import IncrementalDetokenizer

FinishReason = Literal["stop", "length"]


class StopCheck:
    """Follows one answer token by token. Holds back text that may become a stop string.

    `max_length` limits the whole sequence, of which `num_prompt_tokens` are the prompt.
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        eos_token_ids: frozenset[int],
        num_prompt_tokens: int,
        max_length: int,
    ) -> None:
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._stop = params.stop
        self._num_left = min(params.max_tokens, max_length - num_prompt_tokens)
        self._num_protected_tokens = params.min_tokens
        self._detokenizer = detokenizer
        self._held = ""
        self._num_protected = 0
        """Characters of the held text in which no stop string may end."""

    def add(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text to emit after this token, and the finish reason if the answer ends here.

        Neither a stop string nor an end token is part of the text.
        """
        self._num_left -= 1
        is_stop_token = token_id in self._stop_ids
        is_last = is_stop_token or self._num_left == 0
        if not is_stop_token:
            self._held += self._detokenizer.add([token_id])
        if is_last:
            self._held += self._detokenizer.finish()
        if self._num_protected_tokens:
            self._num_protected_tokens -= 1
            self._num_protected = len(self._held)
        found = [index for stop in self._stop if (index := self._find(stop)) >= 0]
        if found:
            return self._held[: min(found)], "stop"
        if is_last:
            return self._held, "stop" if is_stop_token else "length"
        num_certain = len(self._held) - self._num_undecided()
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        self._num_protected = max(0, self._num_protected - num_certain)
        return certain, None

    def _find(self, stop: str) -> int:
        return self._held.find(stop, max(0, self._num_protected - len(stop) + 1))

    def _num_undecided(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
