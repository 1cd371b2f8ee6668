"""The `peagle` command: dispatches to a subcommand and turns errors into one paragraph and an exit status."""

import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from peagle import __version__
from peagle.console.termination import Termination
from peagle.errors import PeagleError, Terminated, nearest

GROUPS = {
    "use": {
        "generate": "answer one prompt; --compare shows speculative and plain decoding side by side",
        "serve": "serve an OpenAI-compatible HTTP API",
        "catalog": "list the models known by name: drafter, memory, hardware",
    },
    "measure": {
        "bench": "sweep methods, draft lengths and concurrency; `bench serve` load-tests a server",
        "tune": "measure a load and recommend method, draft tokens and batch limit, as a settings file",
        "top": "live view of a running server: throughput, latency, acceptance, drift",
        "eval": "acceptance length and per-position acceptance rates on a prompt file",
        "lossless": "prove that speculative output equals the target's own, and write a report",
        "report": "one HTML or Markdown file from the JSON of bench, bench serve, lossless and eval",
        "doctor": "show versions, device and automatic choices; with a drafter, check it before serving",
    },
    "train": {
        "build": "the whole way in one command: text, training, gate, comparison and report, within a budget",
        "data": "generate training data with the target, and inspect it",
        "train": "train a drafter for a target",
        "adapt": "adapt a drafter to what is served, in minutes, and swap it into a running server",
    },
    "ship": {
        "export": "convert a drafter to the layout of vLLM or speculators",
        "publish": "publish a drafter on the Hugging Face Hub, with a model card",
        "deploy": "deploy to vLLM on any number of GPUs, or to a SageMaker endpoint",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
SUBCOMMANDS = {
    "data": {
        "synthesize": "generate training data from nothing: the target writes questions and answers them",
        "regenerate": "generate training data from prompt files: the target answers them turn by turn",
        "inspect": "show statistics: counts, lengths, tokens, and examples with the trained part colored",
    },
    "deploy": {
        "vllm": "write a vLLM command, a Docker Compose file and a Kubernetes manifest",
        "sagemaker": "create, update, inspect, call and delete a SageMaker endpoint",
    },
}
PURPOSES = {
    "data": "Generate training data in shards, and inspect it. Rerun an interrupted command and it resumes.",
    "deploy": "Deploy a target and its drafter. The same drafter directory works in every place.",
}
ABOUT = f"peagle {__version__}: P-EAGLE speculative decoding. Faster generation, identical output."
COMPLETION = Path(__file__).parents[1] / "assets" / "completion.bash"
RESUMABLE = ("build", "data", "train", "adapt")

USER_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
BROKEN_PIPE = 128 + signal.SIGPIPE


class StderrHandler(logging.Handler):
    """Logs to the current `sys.stderr`, which a progress bar replaces while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    signal.signal(signal.SIGTERM, Termination())
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output is gone. Point stdout at /dev/null so that Python does not complain on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    sys.exit(status)


def run(argv: list[str]) -> int:
    """Run one command line and return its exit status."""
    if not argv:
        print(short_help())
        return 0
    if argv[0] in ("-h", "--help", "--help-all", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"peagle {__version__}")
        return 0
    if argv[0] == "--completion":
        print(COMPLETION.read_text(encoding="utf-8"), end="")
        return 0
    name, *rest = argv
    command = " ".join(argv[: 1 + (name in SUBCOMMANDS or argv[:2] == ["bench", "serve"])])
    _show_log()
    try:
        if name not in COMMANDS:
            raise PeagleError(f"no command {name!r}", hint=f"{nearest(name, COMMANDS)} `peagle --help` lists them")
        if known := SUBCOMMANDS.get(name):
            if not rest or rest[0] in ("-h", "--help", "--help-all"):
                print(group_overview(name))
                return 0
            if rest[0] not in known:
                hint = f"{nearest(rest[0], known)} `peagle {name} --help` lists them"
                raise PeagleError(f"no command '{name} {rest[0]}'", hint=hint)
        status: int = importlib.import_module(f"peagle.cli.{name}").main(rest)
        return status
    except PeagleError as error:
        return _explain(error.message, error.hint or f"`peagle {command} --help` lists the options")
    except SystemExit as end:  # tyro printed help, or explained a bad option
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt as signaled:
        resume = "; progress is saved, rerun the command to resume" if name in RESUMABLE else ""
        is_terminated = isinstance(signaled, Terminated)
        print(f"\n{'terminated' if is_terminated else 'interrupted'}{resume}", file=sys.stderr)
        return TERMINATED if is_terminated else INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _explain(f"cannot read or write a file: {what}", "check the path, its permissions and free disk space")


def short_help() -> str:
    return f"""{ABOUT}

  peagle generate "Explain speculative decoding in one sentence."

commands: {", ".join(COMMANDS)}
`peagle --help` describes them."""


def overview() -> str:
    groups = "\n\n".join(f"{group}:\n{_listed(commands)}" for group, commands in GROUPS.items())
    return f"""{ABOUT}

usage: peagle COMMAND [OPTIONS]

{groups}

`peagle COMMAND --help` lists the options, `--help-all` the rare ones too. `peagle --completion` prints a completion
script for bash. Without --target and --drafter, a command uses the built-in default: SmolLM2-135M-Instruct and the
drafter that ships with peagle."""


def group_overview(name: str) -> str:
    commands = SUBCOMMANDS[name]
    return f"""usage: peagle {name} [-h] {{{",".join(commands)}}} [OPTIONS]

{PURPOSES[name]}

{_listed(commands)}

`peagle {name} COMMAND --help` lists a command's options."""


def _listed(commands: dict[str, str]) -> str:
    return "\n".join(f"  {name:<10}  {summary}" for name, summary in commands.items())


def _explain(message: str, hint: str) -> int:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return USER_ERROR


def _show_log() -> None:
    """Print the log of peagle's own modules (for example what "auto" chose); other libraries only warn."""
    logger = logging.getLogger("peagle")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())
