"""Generate training data with the target, and inspect it.

Data is written in shards. Rerun an interrupted command and it resumes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from peagle.cli.arguments import TargetArguments, parse
from peagle.cli.inspection import show
from peagle.cli.progress import progress_bar
from peagle.cli.recipe import merged, part, recipe_path, recipe_settings, reject_recipe_only
from peagle.data.config import (
    RegenerationConfig,
    RegenerationSettings,
    SynthesisConfig,
    SynthesisSettings,
    Until,
)
from peagle.data.progress import RunProgress
from peagle.data.prompts import read_dialogs
from peagle.errors import PeagleError, nearest

SYNTHESIZE = """Generate training data from nothing: the target writes questions and answers them.

Prompted with an empty user turn, an instruction-tuned target writes what a user would ask. More settings: recipe file
(docs/guides/data.md)."""
REGENERATE = """Generate training data from prompt files: the target answers them turn by turn.

Answers in the files are replaced. Formats are recognized by their keys: OpenAI messages, ShareGPT conversations,
MT-Bench turns, {"prompt": ...} and more; JSON, JSONL or text with one prompt per line, plain or gzipped."""
INSPECT = """Show statistics of training data: counts, lengths, tokens, and examples with the trained part colored.

Takes a directory written by `peagle data`, or a file of conversations."""


@dataclass(frozen=True, kw_only=True)
class Run:
    output: Path
    """shard directory"""
    max_batch: int | None = None
    """concurrent requests (default: 1024 on a GPU, 16 on a CPU)"""
    recipe: Path | None = None
    """TOML file with more settings; options override it"""
    json: bool = False
    """print one JSON document instead of a table"""
    target: TargetArguments = field(default_factory=TargetArguments)


@dataclass(frozen=True, kw_only=True)
class Synthesize(Run):
    given: tuple[Path, ...] = ()
    """prompt files to answer as well"""
    until: Until
    answers: SynthesisSettings


@dataclass(frozen=True, kw_only=True)
class Regenerate(Run):
    prompts: tuple[Path, ...]
    """prompt files"""
    limit: int | None = None
    """use only the first N prompts of each file"""
    answers: RegenerationSettings


@dataclass(frozen=True)
class Inspect:
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """shard directory, or file of conversations"""
    num_examples: int = 3
    """conversations to show"""
    rows: tuple[int, ...] = ()
    """show these rows instead: lines of a file or rows of the shards, as `peagle train` numbers them"""
    num_top_tokens: int = 20
    """most frequent trained tokens to show"""
    json: bool = False
    """print one JSON document instead of tables"""
    target: str | None = None
    """target whose tokenizer reads the data (default: the embedded one)"""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = argv
    if name not in ACTIONS:
        raise PeagleError(f"no command 'data {name}'", hint=f"{nearest(name, ACTIONS)} See `peagle data --help`")
    return ACTIONS[name](rest)


def overview() -> str:
    lines = [f"  {name:<10}  {text.splitlines()[0]}" for name, text in DESCRIPTIONS.items()]
    return "\n".join(
        [
            f"usage: peagle data [-h] {{{','.join(DESCRIPTIONS)}}} [OPTIONS]",
            "",
            *(__doc__ or "").strip().splitlines(),
            "",
            *lines,
            "",
            "`peagle data COMMAND --help` lists a command's options.",
        ]
    )


def synthesize(argv: list[str]) -> int:
    reject_recipe_only(SynthesisConfig, (SynthesisSettings,), argv)
    base = recipe_settings(SynthesisConfig, argv)
    answers = part(SynthesisSettings, base)
    defaults = Synthesize(output=tyro.MISSING, until=tyro.MISSING_NONPROP, answers=answers, recipe=recipe_path(argv))
    arguments = parse(Synthesize, "data synthesize", argv, description=SYNTHESIZE, default=defaults)
    config = merged(base, arguments.answers)
    given = [dialog for path in arguments.given for dialog in read_dialogs(path)]
    target = arguments.target.load()

    from peagle.data.synthesis import write_synthesis

    settings = config.described(*arguments.given)
    options = (arguments.output, config, arguments.until, given, settings)
    return _generate(
        arguments.output,
        arguments.json,
        lambda bar: write_synthesis(target, *options, max_batch=arguments.max_batch, progress=bar),
    )


def regenerate(argv: list[str]) -> int:
    reject_recipe_only(RegenerationConfig, (RegenerationSettings,), argv)
    base = recipe_settings(RegenerationConfig, argv)
    answers = part(RegenerationSettings, base)
    defaults = Regenerate(prompts=tyro.MISSING, output=tyro.MISSING, answers=answers, recipe=recipe_path(argv))
    arguments = parse(Regenerate, "data regenerate", argv, description=REGENERATE, default=defaults)
    config = merged(base, arguments.answers)
    dialogs = [dialog for path in arguments.prompts for dialog in read_dialogs(path, limit=arguments.limit)]
    target = arguments.target.load()

    from peagle.data.regeneration import answer_dialogs

    settings = config.described(*arguments.prompts, limit=arguments.limit)
    return _generate(
        arguments.output,
        arguments.json,
        lambda bar: answer_dialogs(
            target, dialogs, arguments.output, config, settings, max_batch=arguments.max_batch, progress=bar
        ),
    )


def inspect(argv: list[str]) -> int:
    arguments = parse(Inspect, "data inspect", argv, description=INSPECT)

    from peagle.data.inspection import inspect as inspect_data
    from peagle.targets.load import load_tokenizer

    document = inspect_data(
        arguments.data,
        load_tokenizer(arguments.target),
        num_examples=arguments.num_examples,
        num_top_tokens=arguments.num_top_tokens,
        rows_shown=arguments.rows,
    )
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document, Console(highlight=False))
    return 0


class Bar(RunProgress):
    """A progress bar, which appears when the engine starts."""

    seconds_between = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.bar = progress_bar()
        self._task = self.bar.add_task("starting the engine", total=None)

    def engine_starting(self, what: str, num_done: int, num_parts: int) -> None:
        self.bar.start()
        self.bar.update(self._task, description=f"starting the engine: {what} ({num_done}/{num_parts})")

    def begin(self, num_answer_tokens: int) -> None:
        super().begin(num_answer_tokens)
        self.bar.start()

    def show(self, line: str, done: float, total: float) -> None:
        self.bar.update(self._task, description=line, completed=done, total=total)


def _generate(output: Path, as_json: bool, run: Callable[[RunProgress], dict[str, Any]]) -> int:
    """Run a generation under a progress bar and print its counts."""
    progress = Bar()
    try:
        counts = run(progress)
    finally:
        progress.bar.stop()
    speed = {"seconds": round(progress.seconds, 2), "tokens_per_second": round(progress.tokens_per_second, 1)}
    if as_json:
        print(json.dumps({"output": str(output)} | counts | speed))
        return 0
    table = Table(title=str(output))
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("conversations", f"{counts['num_rows']:,}")
    table.add_row("tokens", f"{counts['num_tokens']:,}")
    table.add_row("answer tokens", f"{counts['num_answer_tokens']:,}")
    for reason, number in counts["dropped"].items():
        table.add_row(f"dropped, {reason}", f"{number:,}")
    if progress.seconds:
        table.add_row("answer tokens/s kept, this run", f"{progress.tokens_per_second:,.1f}")
    Console().print(table)
    return 0


ACTIONS: dict[str, Callable[[list[str]], int]] = {
    "synthesize": synthesize,
    "regenerate": regenerate,
    "inspect": inspect,
}
DESCRIPTIONS = {"synthesize": SYNTHESIZE, "regenerate": REGENERATE, "inspect": INSPECT}
