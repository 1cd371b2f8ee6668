"""How many drafts to verify: those that bring more tokens per second than they cost.

A step emits one token per request, plus the accepted drafts. Verifying the likeliest drafts is expected to accept the
sum of their probabilities, corrected by recent acceptance. Measured step times say what a pass of that size costs. The
best size has the most tokens per second; without drafts the drafter does not run at all.

On a GPU the host prepares the next step while the device runs this one. With large batches of small models the host is
the bottleneck. The time per step is then the host's, and drafts that fit into it are free.

On a GPU the host chooses before it has seen the drafts, so it takes their average. On a CPU it knows them. Then a pass
verifies more drafts where the drafter is sure, and fewer where it is not: a further draft must bring tokens faster than
an average step does.

Whether drafting pays depends on the text. A large batch mixes many texts, so one verdict serves all of them; if it is
no, a few steps now and then probe again. A CPU serves few requests. There each request first drafts for `trial_steps`,
which the requests of a batch share, and the verdict follows the last few steps. If many in a row do not gain, some do
not try (`draft_trials`).

Four requests. Verifying 8 tokens, one draft each, takes 10% longer than plain decoding, 16 tokens take 50% longer. If
the first drafts are accepted with probability 0.6, and the others hardly ever, 8 tokens are best:

>>> budget = DraftBudget({4: {4: 1.0, 8: 1.1, 16: 1.5}}.__getitem__)
>>> for _ in range(64):
...     budget.observe(DraftCurve((4, 12), (0.6 * 4, 0.6 * 4 + 0.05 * 8)), num_requests=4)
>>> choice = budget.choose(batch=4, num_requests=4, num_drafting=4)
>>> choice.num_tokens, round(choice.num_expected, 2)
(8, 2.4)

In this step the drafter is sure of all of them:

>>> budget.choose(batch=4, num_requests=4, num_drafting=4, drafts=DraftCurve((4, 12), (4 * 0.9, 12 * 0.9))).num_tokens
16

They are accepted far less often than the drafter says, so plain decoding is best:

>>> for _ in range(1000):
...     budget.observe_accepted(0, choice)
>>> budget.choose(batch=4, num_requests=4, num_drafting=4).num_tokens
4
"""

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

log = logging.getLogger(__name__)

MEMORY = 0.998
"""weight of the past per request and step, in the averages of probabilities and of accepted drafts"""
INDEPENDENT = 8
"""most requests that one step counts as: the answers of a burst all begin together, and their first tokens are hard to
draft"""
PRIOR = 8.0
"""drafts assumed to be accepted as expected, before the first step"""
WARM_UP = 256
"""requests to observe, over all steps, before drafting may stop; 32 steps of a large batch"""
HOST_WEIGHT = 0.1
"""weight of the newest step in the host's time per step"""
STOPS_BELOW = 0.95
"""expected tokens per second with drafts, as a share of those without, at which a large batch stops drafting. A stop
costs the running requests their drafts for good, and the estimate errs by a few percent: the last requests of a burst,
for example, accept the fewest drafts"""
PROBE_EVERY, PROBE_STEPS = 512, 32
"""while drafting does not pay, 32 of 512 steps verify drafts, to see whether they pay now. Only requests that arrive in
these steps draft, and the first tokens of answers are hard to draft, so a few steps would not show it"""
PROBE_WEIGHT = PROBE_EVERY // PROBE_STEPS
"""weight of an observation then: few drafts are seen, and the traffic may have changed"""
TRIAL_STEPS = 16
"""steps that each request drafts on a CPU; a fresh prompt says more about its answer than the answers before it"""
HOLD_SECONDS = 60.0
"""least time between two verdicts in the log and the metrics; near break-even they alternate from step to step"""


class DraftCurve(NamedTuple):
    """The drafts of a batch by probability: how many exceed each falling threshold, and their probabilities' sum."""

    counts: Sequence[float]
    sums: Sequence[float]

    def expected(self, num_drafts: float) -> float:
        """Accepted drafts if the `num_drafts` likeliest are verified, by linear interpolation."""
        index = bisect_left(self.counts, num_drafts)
        if index == len(self.counts):
            return self.sums[-1]
        below_count, below_sum = (self.counts[index - 1], self.sums[index - 1]) if index else (0.0, 0.0)
        width = self.counts[index] - below_count
        share = (num_drafts - below_count) / width if width else 0.0
        return below_sum + share * (self.sums[index] - below_sum)

    def scaled(self, factor: float) -> "DraftCurve":
        return DraftCurve([factor * count for count in self.counts], [factor * total for total in self.sums])

    def mixed(self, other: "DraftCurve", weight: float) -> "DraftCurve":
        """The average with `other`, which has this weight."""
        pairs = zip(self.scaled(1 - weight), other.scaled(weight), strict=True)
        return DraftCurve(*([one + two for one, two in zip(*pair, strict=True)] for pair in pairs))


class Choice(NamedTuple):
    """The size of a verification pass."""

    num_tokens: int
    num_drafting: int = 0
    """requests with drafts"""
    num_expected: float | None = None
    """accepted drafts to expect by the drafter's probabilities; None if these did not decide the size"""
    pays: bool = True
    """whether requests whose trial is over still draft"""
    seconds: float = 0.0
    """expected time of the pass"""
    plain_seconds: float = 0.0
    """expected time of a plain decoding step"""


class DraftBudget:
    """Chooses the tokens of each verification pass.

    `seconds` gives the time per step of a batch size by tokens of the verification pass. As many tokens as requests
    mean plain decoding, without the drafter. With `trial_steps` each request drafts for that many steps, whatever the
    verdict, which then follows the last few steps; there are no probes.
    """

    def __init__(self, seconds: Callable[[int], Mapping[int, float]], trial_steps: int = 0) -> None:
        self._seconds, self.trial_steps = seconds, trial_steps
        self._memory = 0.5 ** (1 / trial_steps) if trial_steps else MEMORY
        self._host_seconds: dict[int, float] = {}
        """time per step that the host needs, by batch size"""
        self.num_pauses = 0
        """how often drafting stopped paying"""
        self.seconds = self.plain_seconds = 0.0
        """time of the passes so far by measured step times, and what their tokens would take without drafts"""
        self.reset()

    def reset(self) -> None:
        """Forget what was observed, because the drafter changed."""
        self._average: DraftCurve | None = None
        """of one request's drafts"""
        self._num_observed = 0
        self._num_stopped = 0
        """steps of the current round of `PROBE_EVERY`: plain ones, then those that probe"""
        self._num_expected = self._num_accepted = PRIOR
        self.is_stopped = False
        """whether the last verdict on a large batch was that drafts do not pay; then some steps probe"""
        self.pays = True
        """whether drafting pays, as last logged"""
        self._changed_at = -math.inf
        self.gain: float | None = None
        """expected tokens per second with drafts, as a multiple of those without, at the last choice"""

    @property
    def calibration(self) -> float:
        """Accepted drafts per expected one, recently."""
        return self._num_accepted / self._num_expected

    def observe(self, curve: DraftCurve, num_requests: int) -> None:
        """Take the drafts of `num_requests` requests into account."""
        own, weight = curve.scaled(1 / num_requests), self._memory ** self._num_independent(num_requests)
        self._average = own if self._average is None else own.mixed(self._average, weight)
        self._num_observed += min(num_requests, INDEPENDENT)

    def observe_accepted(self, num_accepted: int, choice: Choice) -> None:
        """Take the accepted drafts of a pass into account."""
        if choice.num_expected is not None:
            num_independent = self._num_independent(choice.num_drafting)
            weight, share = MEMORY**num_independent, num_independent / choice.num_drafting
            self._num_expected = weight * self._num_expected + share * choice.num_expected
            self._num_accepted = weight * self._num_accepted + share * num_accepted

    def observe_time(self, choice: Choice, tokens_per_request: float) -> None:
        """Add the time of a pass, and of the plain decoding steps that emit as many tokens per request."""
        self.seconds += choice.seconds
        self.plain_seconds += choice.plain_seconds * tokens_per_request
        if self.is_stopped and not choice.num_drafting and self._num_stopped < PROBE_EVERY - PROBE_STEPS:
            self._num_stopped += 1

    def observe_host(self, seconds: float, batch: int) -> None:
        """Take the host's time for a decode step into account. A single slow step says little."""
        before = self._host_seconds.setdefault(batch, seconds)
        self._host_seconds[batch] = before + HOST_WEIGHT * (min(seconds, 2 * before) - before)

    def choose(
        self,
        batch: int,
        num_requests: int,
        num_drafting: int,
        num_paused: int = 0,
        drafts: DraftCurve | None = None,
        num_on_trial: int = 0,
    ) -> Choice:
        """The best size of the next pass of `num_requests` requests, of which `num_drafting` have drafts.

        `batch` is the captured batch size that they run in. `drafts` are those of the pass, if they are known. Whether
        drafting pays is judged as if the `num_paused` requests drafted too: new requests will take their places, and a
        few of these alone would never pay. If it does not pay, the pass still has drafts if `num_on_trial` requests
        have not drafted for `trial_steps` yet.
        """
        seconds = self._step_seconds(batch)
        choice = self._choose(seconds, batch, num_requests, num_drafting, num_paused, drafts, num_on_trial)
        return choice._replace(seconds=seconds[choice.num_tokens], plain_seconds=seconds[batch])

    def resized(self, choice: Choice, batch: int, num_tokens: int) -> Choice:
        """What to expect of a pass with `num_tokens` tokens instead of those chosen."""
        expected = None
        if self._average is not None:
            expected = self._average.scaled(choice.num_drafting).expected(num_tokens - batch)
        seconds = self._step_seconds(batch)[num_tokens]
        return choice._replace(num_tokens=num_tokens, num_expected=expected, seconds=seconds)

    def _step_seconds(self, batch: int) -> dict[int, float]:
        """Seconds per step by size, of the device or of the host."""
        host_seconds = self._host_seconds.get(batch, 0.0)
        return {size: max(each, host_seconds) for size, each in self._seconds(batch).items()}

    def _choose(
        self,
        seconds: Mapping[int, float],
        batch: int,
        num_requests: int,
        num_drafting: int,
        num_paused: int,
        drafts: DraftCurve | None,
        num_on_trial: int,
    ) -> Choice:
        average = drafts if self._average is None else self._average.scaled(num_drafting)
        if average is None:
            return Choice(max(seconds), num_drafting)
        # Each drafting request has its first draft verified.
        sizes = [size for size in seconds if size - batch >= num_drafting]

        def rate_of(size: int, curve: DraftCurve) -> float:
            return (num_requests + self.calibration * curve.expected(size - batch)) / seconds[size]

        size = max(sizes, key=lambda size: rate_of(size, average))
        if drafts is not None:
            own, average_rate = drafts, rate_of(size, average)
            size = max(
                sizes, key=lambda size: self.calibration * own.expected(size - batch) - average_rate * seconds[size]
            )
        best = Choice(size, num_drafting, (drafts or average).expected(size - batch))
        everyone = average.scaled((num_drafting + num_paused) / num_drafting)
        rate = max(rate_of(size, everyone) for size in sizes)
        plain_rate = num_requests / seconds[batch]
        self.gain = rate / plain_rate
        is_burst = num_drafting > max(num_paused, INDEPENDENT)
        if self.is_stopped and is_burst and self._num_stopped >= 2 * PROBE_STEPS:
            self._begin_again()
        if self._num_observed < (self.trial_steps or WARM_UP):
            return best
        pays = rate > plain_rate * (1.0 if self.is_stopped or self.trial_steps else STOPS_BELOW)
        self._judge(pays, num_requests, rate, plain_rate)
        if pays:
            if self.is_stopped:
                self._begin_again()
            return best
        if self.trial_steps:
            return best._replace(pays=False) if num_on_trial else Choice(batch, pays=False)
        self.is_stopped = True
        if self._num_stopped < PROBE_EVERY - PROBE_STEPS:
            return Choice(batch, pays=False)
        self._num_stopped = (self._num_stopped + 1) % PROBE_EVERY
        return best

    def _begin_again(self) -> None:
        """Draft, and see enough of it before the next stop."""
        self.is_stopped, self._num_stopped, self._num_observed = False, 0, 0

    def _judge(self, pays: bool, num_requests: int, rate: float, plain_rate: float) -> None:
        """Say when drafting stops paying, and when it pays again."""
        now = time.monotonic()
        if pays == self.pays or now < self._changed_at + HOLD_SECONDS:
            return
        self.pays, self._changed_at = pays, now
        self.num_pauses += not pays
        again = "new requests try it again" if self.trial_steps else "it is tried again from time to time"
        log.log(
            logging.INFO if pays else logging.WARNING,
            "drafting %s at batch size %d (%.1f tokens/s expected, %.1f without drafts; drafts are accepted %.2f times "
            "as often as the drafter expects)%s",
            "pays again" if pays else "does not pay",
            num_requests,
            rate,
            plain_rate,
            self.calibration,
            "" if pays else f"; {again}",
        )

    def _num_independent(self, num_requests: int) -> int:
        """How many observations the step of `num_requests` requests counts for."""
        return PROBE_WEIGHT if self.is_stopped else min(num_requests, INDEPENDENT)
