"""Prompt tokens per step on a CPU, where a long prompt would stall the running streams.

A GPU prefills 2,048 tokens in milliseconds; a CPU takes seconds. There, while other requests run or wait, a step
prefills as many tokens as fit into `STEP_SECONDS` at the speed of the last prefill passes:

>>> pace = PrefillPace()
>>> pace.num_tokens  # nothing measured yet
64
>>> pace.observe(1000, 2.0)
>>> pace.num_tokens
200
>>> pace.observe(200, 1.0)  # it got slower: 1,000 / 2 + 200 tokens in 2 / 2 + 1 seconds
>>> pace.num_tokens
140
"""

STEP_SECONDS = 0.4
"""Prefill time per step. With the decode step a stream waits about half a second."""
FIRST_TOKENS = 64
"""Prompt tokens per step until a prefill pass was timed."""
MIN_TOKENS = 32
"""Fewer tokens are no faster: a pass reads all weights."""
KEPT = 0.5
"""Weight of the passes before the newest one. Passes count by their tokens, as short ones say little about speed."""


class PrefillPace:
    """The speed of prefill passes, averaged over the last few of them."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt tokens to prefill in the next step."""
        if not self._seconds:
            return FIRST_TOKENS
        return max(int(STEP_SECONDS * self._tokens / self._seconds), MIN_TOKENS)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Count a prefill pass."""
        self._tokens = KEPT * self._tokens + num_tokens
        self._seconds = KEPT * self._seconds + seconds
