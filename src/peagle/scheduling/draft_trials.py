"""Which new requests try drafting on a CPU, where every request has a trial of its own (`draft_budget`).

A trial costs several plain steps, and the drafter reads the prompt first. So if drafts did not pay for many requests in
a row, only every second new request tries them, then every fourth, and so on. As soon as drafts pay, all try again.

>>> trials = DraftTrials()
>>> def admit(num_requests: int) -> str:
...     tried = ""
...     for _ in range(num_requests):
...         skips = trials.skips_next
...         trials.admit(skips)
...         trials.observe(pays=False, num_begun=not skips)
...         tried += "-" if skips else "x"
...     return tried
>>> admit(14)
'xxxx-x-x-x-x--'
>>> trials.observe(pays=True, num_begun=0)
>>> admit(4)
'xxxx'
"""

PATIENCE = 4
"""trials without success before new requests skip theirs"""
MOST_SKIPPED = 15
"""requests in a row without a trial"""


class DraftTrials:
    """Counts trials without success."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all trials, because the drafter changed."""
        self._num_failed = self._num_skipped = 0

    @property
    def skips_next(self) -> bool:
        """Whether the next new request decodes without drafts from the start."""
        if self._num_failed < PATIENCE:
            return False
        num_doublings = (self._num_failed // PATIENCE).bit_length()
        return self._num_skipped < min(2**num_doublings - 1, MOST_SKIPPED)

    def admit(self, skips: bool) -> None:
        """Count a new request."""
        self._num_skipped = self._num_skipped + 1 if skips else 0

    def observe(self, pays: bool, num_begun: int) -> None:
        """Update the counts after a step in which `num_begun` requests began their trial."""
        self._num_failed = 0 if pays else self._num_failed + num_begun
