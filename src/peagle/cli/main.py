"""The `peagle` command: finds the subcommand, and turns errors into one paragraph and exit status 2."""

import importlib
import logging
import os
import signal
import sys
from typing import NoReturn

from peagle import __version__
from peagle.errors import PeagleError, nearest

COMMANDS = {
    "generate": "answer one prompt, streaming; --compare shows it beside plain decoding",
    "eval": "decode a prompt file for real and report acceptance, speed and losslessness",
    "bench": "sweep methods, draft lengths and concurrency; `bench serve` loads a server over HTTP",
    "catalog": "list the models known by name, with their drafters, memory and hardware",
    "serve": "answer over HTTP, as OpenAI's and SageMaker's clients expect it",
    "top": "watch a server live: requests, speed, latency, acceptance by position, drift",
    "data": "have the target write or answer training data, and look at it",
    "train": "train a drafter for a target",
    "export": "write a drafter, whoever made it, in the layout of vLLM or speculators",
    "deploy": "to vLLM on many GPUs, or to a SageMaker endpoint",
    "doctor": "report versions, device and choices; with a directory, the gate before serving a drafter",
    "lossless": "prove that answers with drafts are the target's own, in a report to keep",
}

USER_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT
RESUMED = ("data", "train")
"""commands that go on where they were when they are given again"""
BROKEN_PIPE = 128 + signal.SIGPIPE


class TalkHandler(logging.Handler):
    """Writes to the stderr of the moment, which a running progress bar replaces to move out of the way."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def main() -> NoReturn:
    """Run the process's own command line. Being asked to terminate is treated as being interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone. Without this, Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    sys.exit(status)


def run(argv: list[str]) -> int:
    """Run one command line and return its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"peagle {__version__}")
        return 0
    name, *rest = argv
    _show_log()
    try:
        if name not in COMMANDS:
            raise PeagleError(f"no command {name!r}", hint=f"{nearest(name, COMMANDS)} `peagle --help` explains them")
        status: int = importlib.import_module(f"peagle.cli.{name}").main(rest)
        return status
    except PeagleError as error:
        hint = error.hint or f"`peagle {name} --help` lists the options and what they take"
        return _explain(error.message, hint)
    except SystemExit as end:  # options that could not be read, or help that was asked for; explained already
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        kept = "; what is done is kept, and the same command goes on" if name in RESUMED else ""
        print(f"\ninterrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _explain(f"a file cannot be read or written: {what}", "check the path, its permissions and the disk")


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            f"peagle {__version__}: language models that answer faster without changing a word, by P-EAGLE.",
            "",
            "usage: peagle COMMAND [options]",
            "",
            *lines,
            "",
            "`peagle COMMAND --help` lists a command's options. With no --target and no --drafter, every command uses",
            "the embedded default: SmolLM2-135M-Instruct and the drafter that ships with the package.",
        ]
    )


def _explain(message: str, hint: str) -> int:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return USER_ERROR


def _show_log() -> None:
    """Show what peagle's own modules report, the choices behind "auto" for one; other libraries only warn."""
    logger = logging.getLogger("peagle")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, TalkHandler) for handler in logger.handlers):
        logger.addHandler(TalkHandler())
