"""Every error a user can cause, and how it reads.

    PeagleError
    |-- ConfigError         a setting, flag or config key
    |-- TargetError         a target that cannot be found, read or used
    |-- CheckpointError     a drafter directory that cannot be trusted
    |-- DataError           a prompt or conversation file
    |-- RequestError        one request: its prompt or its sampling parameters
    |-- CapacityError       more than the machine or the model can hold
    |   `-- QueueFullError  too many requests wait already; a later try may succeed
    |-- ServerError         a server that cannot be reached, or that answers what cannot be understood
    |-- DeployError         a cloud that refuses a call, or a deployment that failed there
    |-- EngineDeadError     an engine that was closed, or that an error of its own has ended
    `-- MissingExtraError   an optional dependency that is not installed

The message says what is wrong, the value, and what is allowed; the hint says the remedy. The command line prints
both and exits with status 2.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PeagleError(Exception):
    """A mistake the user can mend. `str()` is the whole paragraph shown to them."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(PeagleError, ValueError):
    pass


class TargetError(PeagleError):
    pass


class CheckpointError(PeagleError):
    pass


class DataError(PeagleError):
    pass


class RequestError(PeagleError, ValueError):
    pass


class CapacityError(PeagleError):
    pass


class QueueFullError(CapacityError):
    """As many requests wait as may; nothing is wrong with this one, and it may be tried again."""


class ServerError(PeagleError):
    pass


class DeployError(PeagleError):
    pass


class EngineDeadError(PeagleError):
    """The engine serves nobody any more. If it was not closed, what ended it is the cause."""


class MissingExtraError(PeagleError, ImportError):
    """Raised where an optional package is first needed; names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed",
            hint=f"pip install 'peagle[{extra}]'",
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names the closest known word, or lists all of them when none is close."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
