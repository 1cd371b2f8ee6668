"""All errors that a user can cause.

The message names the problem, the value and the limit. The hint names the fix. The command line prints both and exits
with status 2.
"""

import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import metadata


class PeagleError(Exception):
    """Base class. `str()` is the message and the hint, as shown to the user."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(PeagleError, ValueError):
    """An invalid setting, flag or config key."""


class TargetError(PeagleError):
    """A target that cannot be found, loaded or used."""


class CheckpointError(PeagleError):
    """Model files that are missing, damaged, or that do not match the target."""


class DataError(PeagleError):
    """An invalid prompt, conversation or training-data file."""


class RequestError(PeagleError, ValueError):
    """An invalid request: its prompt or its sampling parameters."""


class CapacityError(PeagleError):
    """More than the machine, the engine or the model's context can hold."""


class QueueFullError(CapacityError):
    """The queue is full. The request is valid; retry later."""


class ServerError(PeagleError):
    """A server that cannot be reached, or that sends an invalid response."""


class DeployError(PeagleError):
    """A cloud call that was refused, or a deployment that failed."""


class EngineDeadError(PeagleError):
    """The engine was closed, or stopped by an internal error, which is the cause."""


class MissingExtraError(PeagleError, ImportError):
    """Optional packages are not installed. Names all that the extra lacks, and the command that installs them."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        absent = sorted({package, *missing_packages(extra)})
        what = (
            f"the package {package!r}, which is" if len(absent) == 1 else f"the packages {', '.join(absent)}, which are"
        )
        super().__init__(f"{purpose} needs {what} not installed", hint=f"pip install 'peagle[{extra}]'")


def missing_packages(extra: str) -> list[str]:
    """The packages of one of our extras that cannot be imported. Their import names are their own names."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(line) for line in metadata.requires("peagle") or ()]
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return []
    own = [each for each in required if each.marker is not None and not each.marker.evaluate({"extra": ""})]
    names = [each.name for each in own if each.marker is not None and each.marker.evaluate({"extra": extra})]
    return [name for name in names if not _is_importable(name)]


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class Terminated(KeyboardInterrupt):
    """SIGTERM. Handled like Ctrl-C, except that the process exits with 143 instead of 130."""


def interrupt_behind(error: BaseException) -> BaseException:
    """The Ctrl-C or SIGTERM that an error hides, else the error: an interrupted capture of CUDA graphs fails to end."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__context__
    return found or error


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint with the closest known name, or with all of them if none is close."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
