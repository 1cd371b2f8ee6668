"""Sweep methods, numbers of draft tokens and concurrency over a prompt file, in one process.

Reports throughput, latency, acceptance, time per step by phase, memory, and answers that differ from plain decoding.
--anchors adds transformers and llama.cpp, --dummy measures against memory bandwidth. `peagle bench serve` load-tests a
server.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.anchors import SHORT_NAMES, anchors_of, run_anchors
from peagle.bench.cells import PLAIN, Cell, CellResult, compare_cells
from peagle.bench.conversations import Conversations
from peagle.bench.dummy import assumption
from peagle.bench.offline import cells_of, depths_of, llm_factory, shipped_eagle3_drafter, sweep
from peagle.bench.plot import check_plot, plot
from peagle.bench.report import cell_line, document_of, facts_of, print_document, tables
from peagle.bench.verdict import best_by_concurrency, sweep_verdict
from peagle.console.arguments import (
    Anchors,
    Names,
    Numbers,
    NumbersOrAuto,
    ServedModelArguments,
    ServedTargetArguments,
    WorkloadArguments,
    accelerator,
    parse,
)
from peagle.console.progress import progress_bar
from peagle.console.random_weights import RandomWeights
from peagle.cost import MeasuredCost, cost_lines
from peagle.data.prompts import Prompt
from peagle.errors import CheckpointError, ConfigError, interrupt_behind, nearest
from peagle.report.build import check_report, write_report
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

METHODS = (PLAIN, "eagle3", "p-eagle")
DEFAULT_METHODS = (PLAIN, "p-eagle")
AUTO = (None,)


@dataclass(frozen=True)
class Arguments(ServedModelArguments):
    methods: Names = DEFAULT_METHODS
    """any of none (plain decoding), eagle3, p-eagle"""
    num_draft_tokens: NumbersOrAuto = AUTO
    """verify this many draft tokens in every step, skipping what the drafter was not trained for; auto: the engine
    decides in each step"""
    concurrency: Numbers = (1, 8, 32)
    """requests in flight"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of tables"""
    plot: Path | None = None
    """plot throughput against concurrency into this file (.png, .svg or .pdf)"""
    report: Path | None = None
    """write a report with charts into this file (.html or .md)"""
    anchors: Anchors | None = None
    """also measure transformers (eager, static compiled, continuous batching) and llama.cpp, which needs xllamacpp and
    a GGUF file on a CPU: those named, or without a name all that can run"""
    eagle3_drafter: str | None = None
    """drafter directory for eagle3; default: the one that ships for the target"""
    random_weights: RandomWeights = field(default_factory=RandomWeights)
    workload: WorkloadArguments = field(default_factory=WorkloadArguments)
    cost: MeasuredCost = field(default_factory=MeasuredCost)


def main(argv: list[str]) -> int:
    if argv[:1] == ["serve"]:
        from peagle.cli import bench_serve

        return bench_serve.main(argv[1:])
    arguments = checked(parse(Arguments, "bench", argv))
    results: list[CellResult] = []
    run = run_dummy if arguments.random_weights.dummy is not None else run_workload
    facts, stop = run(arguments, results)
    if stop is not None and not results:
        raise stop
    document = document_of(results, **facts, is_interrupted=stop is not None)
    document |= {"verdict": sweep_verdict(document["cells"]), "recommended": best_by_concurrency(document["cells"])}
    if stop is not None and not document["recommended"]:
        document["verdict"] = None  # plain decoding may only not have been measured yet
    document = arguments.cost.added_to(document)
    lines = assumption(document), document["verdict"], *cost_lines(document["cost"] or {})
    verdict = [each for each in lines if each]
    print_document(document, arguments.json, *tables(document), verdict="\n".join(verdict) or None)
    if arguments.plot is not None and any(result.answers for result in results):
        plot(document, arguments.plot)
    if arguments.report is not None and any(result.answers for result in results):
        write_report([document], arguments.report)
    if stop is not None:
        raise stop
    return 1 if any(result.failure and result.cell.method in METHODS for result in results) else 0


def checked(arguments: Arguments, *, has_prompts: bool = False) -> Arguments:
    """Refuse invalid and contradictory options before anything is loaded; fill in the drafter's target."""
    if arguments.plot is not None:
        check_plot(arguments.plot)
    if arguments.report is not None:
        check_report("--report", arguments.report)
    for method in arguments.methods:
        if method not in METHODS:
            raise ConfigError(f"no method {method!r}", hint=nearest(method, METHODS))
    for name, least in (
        ("--concurrency", min(arguments.concurrency)),
        ("--num-draft-tokens", min(each for each in (*arguments.num_draft_tokens, 1) if each is not None)),
    ):
        if least < 1:
            raise ConfigError(f"{name} must be at least 1, got {least}")
    if not has_prompts:
        _check_dummy(arguments)
    arguments.cost.price(arguments.cost.instance)
    drafted = [method for method in arguments.methods if method != PLAIN]
    if arguments.num_draft_tokens != AUTO and not drafted:
        raise ConfigError("--num-draft-tokens needs a method that drafts", hint="add p-eagle or eagle3 to --methods")
    if arguments.random_weights.dummy is None:
        arguments = replace(arguments, target=_target(arguments, drafted))
    if "eagle3" in drafted and (arguments.eagle3_drafter or shipped_eagle3_drafter(arguments.target.target)) is None:
        raise ConfigError(
            "the method eagle3 needs an EAGLE-3 drafter, and none ships for this target",
            hint="train one with `peagle train --method eagle3` and pass it as --eagle3-drafter, or drop eagle3",
        )
    for flag, value, method in (
        ("--eagle3-drafter", arguments.eagle3_drafter, "eagle3"),
        ("--drafter", arguments.drafter.drafter, "p-eagle"),
    ):
        if value is not None and method not in drafted:
            raise ConfigError(f"{flag} needs {method} in --methods", hint=f"add {method}, or drop {flag}")
    arguments.target.refuse_quantize("--anchors", arguments.anchors is not None)
    for name in arguments.anchors or ():
        if name not in SHORT_NAMES:
            raise ConfigError(f"no anchor {name!r}", hint=nearest(name, SHORT_NAMES))
    temperature = arguments.workload.temperature
    if arguments.anchors is not None and temperature > 0:
        raise ConfigError(
            f"--anchors decode greedily, but --temperature is {temperature}: rates would not be comparable",
            hint="drop one of the two",
        )
    return arguments


def _target(arguments: Arguments, drafted: Sequence[str]) -> ServedTargetArguments:
    """The target of the first drafter in use."""
    target = arguments.target
    if "p-eagle" in drafted:
        target = arguments.drafter.pair(target)
    if "eagle3" in drafted and arguments.eagle3_drafter is not None:
        target = replace(arguments.drafter, drafter=arguments.eagle3_drafter).pair(target)
    target.check()
    return target


def _check_dummy(arguments: Arguments) -> None:
    if arguments.random_weights.dummy is None and arguments.workload.prompts is None:
        raise ConfigError("nothing to run", hint="pass prompt files with --prompts, or a shape with --dummy")
    others: dict[str, Any] = {
        "--prompts": arguments.workload.prompts,
        "--limit": arguments.workload.limit,
        "--categories": arguments.workload.categories,
        "--max-turns": arguments.workload.max_turns,
        "--anchors": arguments.anchors is not None,
        "--target": arguments.target.target,
        "--drafter": arguments.drafter.drafter,
        "--eagle3-drafter": arguments.eagle3_drafter,
        "--methods": arguments.methods if arguments.methods not in (DEFAULT_METHODS, (PLAIN,)) else None,
    }
    arguments.random_weights.check(arguments.num_draft_tokens, others)


def run_workload(
    arguments: Arguments,
    results: list[CellResult],
    recorded: Sequence[list[int]] | None = None,
    *,
    verifies_all: bool = True,
) -> tuple[dict[str, Any], BaseException | None]:
    """Sweep the prompt files and append to `results`; return facts of the run and what ended it early.

    `recorded` has token ids of prompts to use instead of files. `verifies_all`: see `llm_factory`.
    """
    params, prompts = arguments.workload.params, arguments.workload.read()
    prompts = prompts or [
        Prompt(str(number), (), "recorded", category="recorded") for number in range(len(recorded or ()))
    ]
    if arguments.anchors is not None and any(prompt.later for prompt in prompts):
        raise ConfigError("--anchors answer one turn of each prompt, but some have several", hint="add --max-turns 1")
    target = arguments.target.load()
    drafters = load_drafters(arguments, target)
    conversations = Conversations(target, prompts, recorded)
    arguments, num_turns = replace(arguments, concurrency=filled(arguments, len(prompts))), sum(conversations.num_turns)
    num_requests = {places: arguments.workload.requests(places, num_turns) for places in arguments.concurrency}
    depths = {method: depths_of(drafter, arguments.num_draft_tokens) for method, drafter in drafters.items()}
    cells = cells_of(arguments.methods, depths, arguments.concurrency)
    stop = measure(
        arguments,
        cells,
        target,
        drafters,
        conversations.first,
        params,
        num_requests,
        results,
        conversations,
        verifies_all=verifies_all,
    )
    stop = compare_cells(target, conversations.first, results, params, stop)
    names = {method: drafter_name(arguments, method, target) for method in drafters}
    facts = facts_of(
        target, params, accelerator(target), arguments.workload.name or "recording", len(prompts), drafters=names
    )
    facts |= {"num_planned_cells": num_planned(arguments, cells, target), "num_turns": num_turns}
    facts["has_chat_template"] = bool(target.tokenizer.chat_template)
    return facts | {"categories": [prompt.category for prompt in prompts]}, stop


def filled(arguments: Arguments, num_prompts: int) -> tuple[int, ...]:
    """The concurrency to measure, without batches that --limit leaves too few prompts for."""
    concurrency, workload = arguments.concurrency, arguments.workload
    if workload.limit is None or workload.num_requests is not None or max(concurrency) <= num_prompts:
        return concurrency
    kept = tuple(places for places in concurrency if places <= num_prompts) or (num_prompts,)
    log.warning(
        "concurrency %s instead of %s: --limit leaves %d requests; --num-requests sets another number",
        ",".join(map(str, kept)),
        ",".join(map(str, concurrency)),
        num_prompts,
    )
    return kept


def run_dummy(arguments: Arguments, results: list[CellResult]) -> tuple[dict[str, Any], BaseException | None]:
    """Like `run_workload`, with random weights: plain, and with --assume-acceptance with drafts. Adds the bandwidth."""
    from peagle.bench.bandwidth import bandwidth_report, experts_read, measure_bandwidth, random_prompts

    chosen = arguments.random_weights
    assert chosen.dummy is not None
    params = replace(arguments.workload.params, ignore_eos=True)
    target = arguments.target.create(chosen.dummy)
    depths = chosen.depths(arguments.num_draft_tokens)
    shares, drafters = chosen.shares(max(depths)), chosen.drafters(target, max(depths))
    prompt_ids = random_prompts(target.vocab_size, max(arguments.concurrency))
    cells = cells_of((PLAIN, *drafters), {"p-eagle": depths}, arguments.concurrency)
    num_requests = {places: arguments.workload.num_requests or places for places in arguments.concurrency}
    options: dict[str, Any] = {"assumed_acceptance": shares}
    stop = measure(arguments, cells, target, drafters, prompt_ids, params, num_requests, results, **options)
    read = {} if stop is not None else experts_read(target, drafters, cells, prompt_ids, shares)
    facts = facts_of(target, params, accelerator(target), "random tokens", len(prompt_ids))
    report = bandwidth_report(target, measure_bandwidth(target.device), results, read, drafters.get("p-eagle"))
    facts |= {"bandwidth": report, "num_planned_cells": len(cells)}
    return facts | ({"assumed_acceptance": shares} if shares else {}), stop


def drafter_name(arguments: Arguments, method: str, target: "HFTarget") -> str:
    """Name of a method's drafter: its directory, repository or variant."""
    given = arguments.drafter.drafter
    if method == "eagle3":
        given = arguments.eagle3_drafter or shipped_eagle3_drafter(arguments.target.target)
    return (Path(given).name or given) if given else target.shipped_drafter_name or method


def load_drafters(arguments: Arguments, target: "HFTarget") -> dict[str, "Drafter"]:
    """The drafter of each method that drafts; refuses one of the wrong kind."""
    drafters = {}
    for method in arguments.methods:
        if method == PLAIN:
            continue
        flag, options = "--drafter", arguments.drafter
        if method == "eagle3":
            given = arguments.eagle3_drafter or shipped_eagle3_drafter(arguments.target.target)
            flag, options = "--eagle3-drafter", replace(options, drafter=given)
        drafter = options.load(target)
        if drafter.config.method != method:
            raise CheckpointError(
                f"{flag} {options.drafter} is a drafter for {drafter.config.method}, but the method is {method}",
                hint="pass the P-EAGLE drafter as --drafter and the EAGLE-3 drafter as --eagle3-drafter",
            )
        drafters[method] = drafter
    return drafters


def measure(
    arguments: Arguments,
    cells: Sequence[Cell],
    target: "HFTarget",
    drafters: Mapping[str, "Drafter"],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_requests: Mapping[int, int],
    results: list[CellResult],
    conversations: Conversations | None = None,
    **engine: Any,
) -> BaseException | None:
    """Run the cells and the anchors under a progress bar; return what ended it early: Ctrl-C, SIGTERM or an error.

    `engine`: options of `llm_factory`.
    """
    arguments.cost.check(accelerator(target))
    concurrency, max_tokens = arguments.concurrency, params.max_tokens
    total = num_planned(arguments, cells, target)
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=total)

        def on_cell(result: CellResult) -> None:
            progress.print_line(cell_line(result, results))
            progress.update(task, advance=1, description="measuring")

        def on_start(what: str, num_done: int, num_parts: int) -> None:
            progress.update(task, description=f"starting the engine: {what} ({num_done} of {num_parts})")

        longest = None if conversations is None else conversations.max_length(max_tokens)
        sizes: dict[str, Any] = {"concurrency": concurrency, "max_tokens": max_tokens, "longest": longest}
        factory = llm_factory(target, drafters, prompts, **sizes, progress=on_start, **engine)
        options: dict[str, Any] = {"num_requests": num_requests, "on_cell": on_cell}
        turns: dict[str, Any] = {"conversations": conversations, "device": target.device}
        try:
            sweep(cells, factory, prompts, params, results, **turns, **options)
            if arguments.anchors is not None:
                run_anchors(target, prompts, concurrency, max_tokens, results, chosen=arguments.anchors, **options)
        except (Exception, KeyboardInterrupt) as error:
            log.warning("stopped: %d of %d cells finished", len(results), total)
            return interrupt_behind(error)
    return None


def num_planned(arguments: Arguments, cells: Sequence[Cell], target: "HFTarget") -> int:
    """The number of cells with those of the anchors."""
    anchors = () if arguments.anchors is None else anchors_of(target, arguments.anchors)
    return len(cells) + len(anchors) * len(arguments.concurrency)
