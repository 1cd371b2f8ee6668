"""Report versions, device and automatic choices: the start of every bug report.

With a drafter directory it is the gate before serving: it reads the files as the engine does and compares config,
tensors, logits and acceptance with the card. Exit status 0: PASS. 1: FAIL, with the first difference and its likely
cause.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from peagle.bench.report import make_table
from peagle.console.arguments import ServedModelArguments, parse, with_positional
from peagle.console.facts import describe_drafter, describe_shipped, describe_target, machine
from peagle.console.progress import progress_bar, working
from peagle.data.prompts import read_prompts
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.compare.gate import Verdict
    from peagle.targets.hf import HFTarget

FAILED = 1
MAX_PROMPTS = 16
STYLES = {"pass": "green", "FAIL": "bold red", "warning": "yellow"}


@dataclass(frozen=True)
class Arguments(ServedModelArguments):
    directory: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[DRAFTER]")] = None
    """a drafter directory to check against the target; the same as --drafter"""
    engine: Literal["native", "vllm"] = "native"
    """the engine that will serve it; vllm also runs vLLM if it is installed here or PEAGLE_VLLM_PYTHON names one"""
    record: bool = False
    """you know that the drafter is good: write evidence for later checks to its card"""
    prompts: Path | None = None
    """measure acceptance on the first 16 prompts of this file instead of the gate's, for which the card has figures"""
    json: bool = False
    """print one JSON document instead of tables"""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "doctor", argv)
    options = with_positional(arguments.drafter, "drafter", arguments.directory)
    given = options.drafter
    if given is None:
        for name, default in (("prompts", None), ("record", False), ("engine", "native")):
            if getattr(arguments, name) != default:
                raise ConfigError(f"--{name} needs a drafter", hint="give its directory: peagle doctor DRAFTER")
    arguments.target.refuse_quantize("--record", arguments.record)
    arguments.target.refuse_quantize("--engine vllm", arguments.engine == "vllm")
    if arguments.prompts is not None:
        read_prompts(arguments.prompts, limit=1)
    if given is not None:  # what a directory lacks is the gate's finding
        find = options.target_for if Path(given).expanduser().is_dir() else options.pair
        arguments = replace(arguments, target=find(arguments.target))
    elif arguments.target.target is not None:
        arguments.target.check()
    document: dict[str, Any] = {"machine": machine(arguments.target)}
    verdict = None
    if given is not None:
        target, verdict = examine(given, arguments)
        document |= {"target": describe_target(target), "gate": verdict.to_json()}
        if verdict.passed:
            document["drafter"] = describe_drafter(target, given, allow_mismatch=True)  # the gate has judged it
    elif arguments.target.target is not None:
        target = arguments.target.load()
        document |= {"target": describe_target(target)} | describe_shipped(target, arguments.drafter.allow_mismatch)
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document, verdict)
    return 0 if verdict is None or verdict.passed else FAILED


def examine(given: str, arguments: Arguments) -> "tuple[HFTarget, Verdict]":
    """Load the target and put the drafter through the gate."""
    from peagle.checkpoint.native import drafter_directory
    from peagle.checkpoint.reading import find_directory
    from peagle.compare.answers import render_prompt
    from peagle.compare.evidence import record_evidence
    from peagle.compare.gate import Gate
    from peagle.compare.vllm_parity import find_vllm_python

    options, prompts = arguments.target, None
    vllm_python = find_vllm_python() if arguments.engine == "vllm" else None
    if vllm_python is not None and options.dtype == "auto":
        options = replace(options, dtype="float32")  # tokens are compared, and rounding would make them diverge
    target = options.load()
    if arguments.record:
        with working("recording evidence"):
            record_evidence(drafter_directory(given, target), target)
    if arguments.prompts is not None:
        prompts = [render_prompt(target, each) for each in read_prompts(arguments.prompts, limit=MAX_PROMPTS)]
    gate = Gate(
        find_directory(given, target),
        target,
        arguments.engine,
        prompts=prompts,
        vllm_python=vllm_python,
        allow_mismatch=arguments.drafter.allow_mismatch,
    )
    with progress_bar() as progress:
        task = progress.add_task("checking", total=None)
        return target, gate.run(lambda name: progress.update(task, description=f"checking {name}"))


def show(document: dict[str, Any], verdict: "Verdict | None") -> None:
    console = Console()
    for line in conclusion(verdict) if verdict is not None else [document["machine"]["verdict"]]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for title, facts in document.items():
        if title != "gate":
            rows = [
                (name.replace("_", " "), "unknown" if value is None else str(value)) for name, value in facts.items()
            ]
            console.print(make_table(title, ("", ""), rows, num_right=0, show_header=False))
    if verdict is None:
        return
    checks = [
        (check.name, f"[{STYLES.get(check.status, 'dim')}]{check.status}[/]", escape(check.found))
        for check in verdict.checks
    ]
    title = f"gate for the {verdict.engine} engine"
    console.print(make_table(title, ("check", "result", "found"), checks, num_right=0))


def conclusion(verdict: "Verdict") -> list[str]:
    """PASS and what could not be checked; or FAIL, the first difference and its likely cause."""
    failure = verdict.failure
    if failure is not None:
        cause = [f"likely cause: {failure.cause}"] if failure.cause else []
        return [f"FAIL: {failure.name}: {failure.found}", *cause]
    unchecked = verdict.unchecked
    return [f"PASS for {verdict.engine}" + (f"; not checked: {', '.join(unchecked)}" if unchecked else "")]
