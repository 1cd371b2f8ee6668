"""Build a drafter for a target: text, training, evaluation, gate, comparison with plain decoding, and a report.

It measures the machine, shows the plan (text, time, memory, disk, price) and then runs it. Each stage is a command of
peagle that can be run alone. Rerun an interrupted build and it resumes; OUTPUT/build.json has its state.
"""

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from peagle.bench.plot import check_plot_library
from peagle.building.config import STAGES, Budget, BuildSettings, Stage, option_words
from peagle.building.shape import check_recipe
from peagle.console.arguments import TargetArguments, parse, with_positional
from peagle.console.progress import working
from peagle.data.prompts import read_dialogs, read_prompts
from peagle.errors import ConfigError
from peagle.host_memory import free_models
from peagle.targets.prices import price_of


@dataclass(frozen=True, kw_only=True)
class Arguments:
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """the target; the same as --target"""
    settings: BuildSettings
    dry_run: bool = False
    """measure the machine, print the plan with the command and the state of every stage, and stop"""
    from_stage: Stage | None = None
    """run this stage and those after it again; what they wrote is deleted, except text, which only grows"""
    to_stage: Stage = "report"
    """stop after this stage"""
    price_per_hour: float | None = None
    """price of this machine in US dollars; default: that of the instance in peagle's dated list"""
    instance: str | None = None
    """instance type that this machine is, for example ml.p5.4xlarge: its price per GPU is used, as a build needs one"""
    target: TargetArguments = field(default_factory=TargetArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "build", argv)
    settings, options = arguments.settings, with_positional(arguments.target, "target", arguments.name)
    check(arguments)
    options.check()
    price = price_of(arguments.instance, arguments.price_per_hour)
    if settings.budget is not None:
        Budget.parse(settings.budget).at(price)
    given = {"target": options.target, "dtype": options.dtype, "device": options.device}
    costs = {"instance": arguments.instance, "price_per_hour": arguments.price_per_hour}
    described = settings.described(**given, **costs)

    from peagle.building.run import Build
    from peagle.building.shown import plan_lines, verdict_lines
    from peagle.building.state import only_build

    with contextlib.nullcontext() if arguments.dry_run else only_build(settings.output):
        words, cost = option_words(**given), option_words(**costs)
        build = Build(settings, words, described, options.load, call, say, price, cost)
        with working("measuring this machine"):
            measured, plan = build.prepare(arguments.from_stage, is_kept=not arguments.dry_run)
        if price is not None:
            price.check(measured.accelerator)
        commands = build.commands(measured, plan) if arguments.dry_run else {}
        state = build.state_before(measured, plan, arguments.from_stage)
        print("\n".join(plan_lines(settings, measured, plan, state, commands, price)), flush=True)
        if arguments.dry_run:
            return 0
        build.run(measured, plan, arguments.from_stage, arguments.to_stage)
        if all(build.state.is_finished(stage) for stage in STAGES):
            print("\n" + "\n".join(verdict_lines(build, measured)))
            print(f"report: {settings.output / 'report.html'}")
    return 0


def check(arguments: Arguments) -> None:
    """Refuse wrong files and contradicting options before anything is loaded."""
    settings, first, last = arguments.settings, arguments.from_stage, arguments.to_stage
    if settings.data is not None:
        read_dialogs(settings.data, limit=1)
    if settings.prompts is not None:
        read_prompts(settings.prompts, limit=1)
    check_recipe(settings)
    if first is not None and STAGES.index(first) > STAGES.index(last):
        raise ConfigError(f"--from-stage {first} comes after --to-stage {last}", hint=f"stages: {', '.join(STAGES)}")
    check_plot_library("the report")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def call(words: list[str]) -> tuple[int, str]:
    """Run one command of peagle in this process; returns its status and what it printed."""
    module = importlib.import_module(f"peagle.cli.{words[0]}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _named(words):
        status = module.main(words[1:])
    free_models()
    return status, printed.getvalue()


@contextlib.contextmanager
def _named(words: list[str]) -> Iterator[None]:
    """The provenance of what is written names the command of the stage."""
    before, sys.argv = sys.argv, ["peagle", *words]
    try:
        yield
    finally:
        sys.argv = before
