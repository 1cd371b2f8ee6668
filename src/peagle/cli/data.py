"""Make training data with the target itself, and look at it.

Everything is written in shards and may be stopped at any moment: the same command goes on where it was.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from peagle.bench.workloads import read_dialogs
from peagle.cli.arguments import TargetArguments, TargetOptions, accelerator, parse
from peagle.cli.inspection import show
from peagle.cli.progress import progress_bar
from peagle.errors import PeagleError, nearest
from peagle.training.generation import Dialog, RegenerationConfig, SynthesisConfig, Until, describe_file

if TYPE_CHECKING:
    from peagle.engine.feed import Feed
    from peagle.targets.hf import HFTarget
    from peagle.training.shard_writer import ShardWriter

log = logging.getLogger(__name__)

HELD_OUT_NAME = "held_out"
SECONDS_BETWEEN_LOOKS = 0.1  # of the progress bar

SYNTHESIZE = """Have the target write questions and answer them: training data from nothing but its chat template.

Started at the beginning of a user turn, an instruction-tuned target invents what a user would ask."""
REGENERATE = """Have the target answer the prompts of files, turn by turn; answers that are there are replaced.

Files are recognized by their keys: OpenAI messages, ShareGPT conversations, MT-Bench turns, {"prompt": ...} and more;
JSON, JSONL or text with one prompt a line, gzipped or not."""
INSPECT = """Show what training data consists of: counts, lengths, tokens, and examples with the trained part coloured.

Takes a directory that `peagle data` has written, or a file of conversations."""


@dataclass(frozen=True)
class Synthesize:
    output: Path
    """directory of the shards"""
    until: Annotated[Until, tyro.conf.OmitArgPrefixes]
    given: tuple[Path, ...] = ()
    """prompt files to answer as well"""
    max_batch: int | None = None
    """requests that run at the same time; by default 1024 on a GPU, 16 on a CPU"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of a table"""
    synthesis: Annotated[SynthesisConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=SynthesisConfig)
    target: TargetOptions = field(default_factory=TargetArguments)


@dataclass(frozen=True)
class Regenerate:
    prompts: tuple[Path, ...]
    """prompt files"""
    output: Path
    """directory of the shards"""
    limit: int | None = None
    """use only the first so many prompts of each file"""
    max_batch: int | None = None
    """requests that run at the same time; by default 1024 on a GPU, 16 on a CPU"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of a table"""
    regeneration: Annotated[RegenerationConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=RegenerationConfig)
    target: TargetOptions = field(default_factory=TargetArguments)


@dataclass(frozen=True)
class Inspect:
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """directory of shards, or file of conversations"""
    num_examples: int = 3
    """conversations to show"""
    rows: tuple[int, ...] = ()
    """show these instead, by number: lines of a file or rows of the shards, as `peagle train` names them"""
    num_top_tokens: int = 20
    """of the most frequent trained tokens, how many to show"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of tables"""
    target: str | None = None
    """the target whose tokenizer reads the data; by default the embedded one"""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = argv
    if name not in ACTIONS:
        raise PeagleError(f"no command 'data {name}'", hint=f"{nearest(name, ACTIONS)} `peagle data --help` explains")
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
    arguments = parse(Synthesize, "data synthesize", argv, description=SYNTHESIZE)
    config, until = arguments.synthesis, arguments.until
    given = [dialog for path in arguments.given for dialog in read_dialogs(path)]
    settings = dataclasses.asdict(config) | {"given": [describe_file(path) for path in arguments.given]}
    target = arguments.target.load()

    from peagle.training import synthesis

    synthesis.check(target, config)
    check_room(arguments.output, synthesis.estimated_tokens(target, config, until, written_counts(arguments.output)))
    with contextlib.ExitStack() as stack:
        open_writer = writer_factory(target, "synthesize", settings)
        writer = stack.enter_context(open_writer(arguments.output))
        held_out = stack.enter_context(open_writer(arguments.output / HELD_OUT_NAME)) if config.num_held_out else None
        counts = synthesis.counts_of(writer, held_out)
        report = Report(until, counts["num_answer_tokens"])
        if not until.is_reached(counts):
            with report.running(target, config.max_length, arguments.max_batch) as feed:
                counts = synthesis.synthesize(feed, writer, held_out, config, until, given, report.update)
        for one in (writer, held_out):
            if one is not None:
                one.finish()
    show_counts(arguments.output, counts, report, arguments.json)
    return 0


def regenerate(argv: list[str]) -> int:
    arguments = parse(Regenerate, "data regenerate", argv, description=REGENERATE)
    dialogs = [dialog for path in arguments.prompts for dialog in read_dialogs(path, limit=arguments.limit)]
    config, output = arguments.regeneration, arguments.output
    settings = config.described(*arguments.prompts, limit=arguments.limit)
    target = arguments.target.load()
    counts, report = answer_dialogs(target, dialogs, settings, output, config, arguments.max_batch)
    show_counts(output, counts, report, arguments.json)
    return 0


def inspect(argv: list[str]) -> int:
    arguments = parse(Inspect, "data inspect", argv, description=INSPECT)

    from peagle.targets.load import load_tokenizer
    from peagle.training.inspection import inspect as inspect_data

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


def answer_prompts(target: "HFTarget", prompts: Path, output: Path, config: RegenerationConfig) -> None:
    """Have the target answer a prompt file into a directory of shards."""
    answer_dialogs(target, read_dialogs(prompts), config.described(prompts), output, config, max_batch=None)


def answer_dialogs(
    target: "HFTarget",
    dialogs: Sequence[Dialog],
    settings: dict[str, Any],
    output: Path,
    config: RegenerationConfig,
    max_batch: int | None,
) -> tuple[dict[str, Any], "Report"]:
    from peagle.training import regeneration

    regeneration.check(target, dialogs, config)
    num_written = written_counts(output)["num_tokens"]
    check_room(output, max(regeneration.estimated_tokens(dialogs, config) - num_written, 0))
    with writer_factory(target, "regenerate", settings)(output) as writer:
        report = Report(Until(num_answers=len(dialogs)), writer.counts["num_answer_tokens"])
        counts = writer.counts
        if len(writer.keys) < len(dialogs):
            with report.running(target, config.max_length, max_batch) as feed:
                # A prompt that was dropped is done, too.
                counts = regeneration.regenerate(
                    feed, writer, dialogs, config, lambda counts: report.update(counts, len(writer.keys))
                )
        writer.finish()
    return counts, report


class Report:
    """The progress bar of a run that writes shards, and its rate."""

    def __init__(self, until: Until, num_tokens: int) -> None:
        self._until, self._first_tokens, self._last_tokens = until, num_tokens, num_tokens
        self._progress = progress_bar()
        self._feed: Feed | None = None
        self._started = self._shown = time.monotonic()
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self, target: "HFTarget", max_length: int, max_batch: int | None) -> "Iterator[Feed]":
        """Show the bar, start an engine under it, and close both."""
        from peagle.engine.feed import Feed

        total = self._until.num_answers or self._until.num_tokens or self._until.seconds
        with self._progress:
            self._task = self._progress.add_task("starting the engine", total=total)
            with Feed(target, max_length=max_length, max_batch=max_batch, progress=self._starting) as feed:
                self._feed, self._started = feed, time.monotonic()
                yield feed

    def _starting(self, what: str, num_done: int, num_parts: int) -> None:
        self._progress.update(self._task, description=f"starting the engine: {what} ({num_done} of {num_parts})")

    def update(self, counts: dict[str, Any], num_done: int | None = None) -> None:
        """Show counts; `num_done` is how far the bar is, by default what `until` says of them."""
        now = time.monotonic()
        self.seconds, self._last_tokens = now - self._started, counts["num_answer_tokens"]
        if self._feed is None or now - self._shown < SECONDS_BETWEEN_LOOKS:
            return
        self._shown = now
        done: float = self.seconds
        if num_done is not None:
            done = num_done
        elif self._until.num_answers is not None:
            done = counts["num_rows"]
        elif self._until.num_tokens is not None:
            done = counts["num_answer_tokens"]
        stats = self._feed.engine.stats()
        what = (
            f"{counts['num_rows']:,} answers, {sum(counts['dropped'].values()):,} dropped, "
            f"{stats.num_running + stats.num_waiting:,} running, {stats.num_output_tokens / self.seconds:,.0f} tokens/s"
        )
        self._progress.update(self._task, completed=done, description=what)

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens of this run that were kept."""
        return (self._last_tokens - self._first_tokens) / self.seconds if self.seconds else 0.0


def writer_factory(target: "HFTarget", kind: str, settings: dict[str, Any]) -> "Callable[[Path], ShardWriter]":
    """Opens writers for a target. Its identity is taken now, because an engine changes the model it runs."""
    from peagle.drafter.card import TargetIdentity
    from peagle.training.shard_writer import ShardWriter

    identity = TargetIdentity.of(target)
    return lambda directory: ShardWriter(directory, kind, identity, settings, accelerator=accelerator(target))


def written_counts(output: Path) -> dict[str, Any]:
    """The counts of what earlier runs have left in an output, what is set apart included."""
    from peagle.training.shards import is_shard_directory, open_shards, total

    directories = filter(is_shard_directory, (output, output / HELD_OUT_NAME))
    return total(open_shards(directory).counts() for directory in directories)


def check_room(output: Path, num_tokens: int) -> None:
    """Say what so many more tokens will take, by an estimate, and refuse a disk that has less."""
    from peagle.training.shards import check_disk

    log.info("disk: %s", check_disk(output, num_tokens))


def show_counts(output: Path, counts: dict[str, Any], report: Report, as_json: bool) -> None:
    speed = {"seconds": round(report.seconds, 2), "tokens_per_second": round(report.tokens_per_second, 1)}
    if as_json:
        print(json.dumps({"output": str(output)} | counts | speed))
        return
    table = Table(title=str(output))
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("conversations", f"{counts['num_rows']:,}")
    table.add_row("tokens", f"{counts['num_tokens']:,}")
    table.add_row("answer tokens", f"{counts['num_answer_tokens']:,}")
    for reason, number in counts["dropped"].items():
        table.add_row(f"dropped, {reason}", f"{number:,}")
    if report.seconds:
        table.add_row("answer tokens/s kept, this run", f"{report.tokens_per_second:,.1f}")
    Console().print(table)


ACTIONS: dict[str, Callable[[list[str]], int]] = {
    "synthesize": synthesize,
    "regenerate": regenerate,
    "inspect": inspect,
}
DESCRIPTIONS = {"synthesize": SYNTHESIZE, "regenerate": REGENERATE, "inspect": INSPECT}
