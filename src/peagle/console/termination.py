"""SIGTERM as an exception, once."""

import math
import time

from peagle.errors import Terminated

REPEATED_SECONDS = 1.0


class Termination:
    """Raises `Terminated` on SIGTERM, but not if it is repeated at once, while the command ends.

    `timeout` sends the signal to its child and then to the group of both.
    """

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, number: int, frame: object) -> None:
        last, self._last = self._last, time.monotonic()
        if self._last - last > REPEATED_SECONDS:
            raise Terminated
