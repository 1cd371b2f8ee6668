"""The `peagle` command: finds the subcommand, and turns errors into one paragraph and exit status 2."""

import importlib
import logging
import signal
import sys
from typing import NoReturn

from peagle import __version__
from peagle.errors import PeagleError, nearest

COMMANDS = {
    "generate": "answer one prompt, streaming; --compare shows it beside plain decoding",
    "eval": "decode a prompt file for real and report acceptance, speed and losslessness",
    "train": "train a drafter for a target",
    "export": "write a drafter as the full directory that vLLM loads",
    "doctor": "report versions, device and choices; with a directory, check a drafter",
}

INTERRUPTED = 130


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"peagle {__version__}")
        return 0
    name, *rest = argv
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel("WARNING")
    try:
        if name not in COMMANDS:
            raise PeagleError(f"no command {name!r}", hint=nearest(name, COMMANDS))
        status: int = importlib.import_module(f"peagle.cli.{name}").main(rest)
        return status
    except PeagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return INTERRUPTED


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
