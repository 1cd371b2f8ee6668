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

from peagle.bench.report import make_table, print_document
from peagle.checkpoint.pairing import check_drafter
from peagle.console.arguments import TargetArguments, check_directory, parse
from peagle.console.inspection import show
from peagle.console.progress import progress_bar
from peagle.console.recipe import parse_with_recipe
from peagle.data.config import (
    NO_DRAFTER,
    RegenerationConfig,
    RegenerationSettings,
    SynthesisConfig,
    SynthesisSettings,
    Until,
)
from peagle.data.documents import read_documents
from peagle.data.progress import RunProgress, drops
from peagle.data.prompts import read_dialogs
from peagle.rows import read_lines
from peagle.targets.catalog import DEFAULT_TARGET, find


@dataclass(frozen=True, kw_only=True)
class Run:
    output: Path
    """shard directory"""
    drafter: str | None = None
    """drafter that speeds up generation, answers unchanged; none: plain decoding; default: the target's own, if any"""
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
    actions = {"synthesize": synthesize, "regenerate": regenerate, "inspect": inspect}
    return actions[argv[0]](argv[1:])


def synthesize(argv: list[str]) -> int:
    """Generate training data from nothing: the target writes questions and answers them.

    Prompted with an empty user turn, an instruction-tuned target writes what a user would ask. A base model writes
    texts. More settings: recipe file (docs/guides/data.md).
    """
    arguments, config = parse_with_recipe(Synthesize, "data synthesize", argv, SynthesisConfig, synthesize.__doc__)
    given = [dialog for path in arguments.given for dialog in read_dialogs(path)]
    read_documents(config.documents)
    check(arguments)
    target = arguments.target.load()
    if not target.tokenizer.chat_template:
        config = config.for_base_model()

    from peagle.data.generation import drafter_for
    from peagle.data.synthesis import write_synthesis

    options = (arguments.output, config, arguments.until, given, config.described(*arguments.given))
    drafter = drafter_for(target, arguments.drafter, config.max_length)
    return _generate(arguments, lambda **run: write_synthesis(target, *options, drafter=drafter, **run))


def regenerate(argv: list[str]) -> int:
    """Generate training data from prompt files: the target answers them turn by turn.

    Answers in the files are replaced. Formats are recognized by their keys: OpenAI messages, ShareGPT conversations,
    MT-Bench turns, {"prompt": ...} and more; JSON, JSONL or text with one prompt per line, plain or gzipped.
    """
    arguments, config = parse_with_recipe(Regenerate, "data regenerate", argv, RegenerationConfig, regenerate.__doc__)
    dialogs = [dialog for path in arguments.prompts for dialog in read_dialogs(path, limit=arguments.limit)]
    check(arguments)
    target = arguments.target.load()

    from peagle.data.generation import drafter_for
    from peagle.data.regeneration import answer_dialogs

    options = (dialogs, arguments.output, config, config.described(*arguments.prompts, limit=arguments.limit))
    drafter = drafter_for(target, arguments.drafter, config.max_length)
    return _generate(arguments, lambda **run: answer_dialogs(target, *options, drafter=drafter, **run))


def check(arguments: Run) -> None:
    """Refuse a target, a drafter or an output that cannot be used, before torch is imported."""
    arguments.target.check()
    if arguments.drafter not in (None, NO_DRAFTER):
        check_drafter(str(arguments.drafter), find(arguments.target.target or DEFAULT_TARGET))
    check_directory(arguments.output)


def inspect(argv: list[str]) -> int:
    """Show statistics of training data: counts, lengths, tokens, and examples with the trained part colored.

    Takes a directory written by `peagle data`, or a file of conversations.
    """
    arguments = parse(Inspect, "data inspect", argv, description=inspect.__doc__)
    if not arguments.data.is_dir():
        next(read_lines(arguments.data), None)
    TargetArguments(arguments.target).check()

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


def _generate(arguments: Run, write: Callable[..., dict[str, Any]]) -> int:
    """Run a generation under a progress bar and print its counts."""
    progress = Bar()
    try:
        counts = write(max_batch=arguments.max_batch, progress=progress)
    finally:
        progress.bar.stop()
    speed = {"seconds": round(progress.seconds, 2), "tokens_per_second": round(progress.tokens_per_second, 1)}
    rows = {
        "conversations": f"{counts['num_rows']:,}",
        "tokens": f"{counts['num_tokens']:,}",
        "answer tokens": f"{counts['num_answer_tokens']:,}",
    } | {f"dropped, {reason}": f"{number:,}" for reason, number in counts["dropped"].items()}
    if progress.seconds:
        rows["answer tokens/s kept, this run"] = f"{progress.tokens_per_second:,.1f}"
    table = make_table(str(arguments.output), ("measure", "value"), rows.items())
    verdict = f"{counts['num_rows']:,} kept, {drops(counts['dropped'])}" if counts["dropped"] else None
    print_document({"output": str(arguments.output)} | counts | speed, arguments.json, table, verdict=verdict)
    return 0
