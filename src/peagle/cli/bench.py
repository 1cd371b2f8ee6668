"""Sweep methods, numbers of draft tokens and concurrency over a prompt file, in one process and one run.

Reports throughput, latency, acceptance, where the time of a step goes, memory, and how many answers differ from plain
decoding's; with --anchors beside transformers itself, with --dummy against the limit of the memory's bandwidth.
`peagle bench serve` measures a server over HTTP instead.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.acceptance import render_prompt
from peagle.bench.anchors import ANCHORS, run_anchors
from peagle.bench.cells import PLAIN, CellResult, compare_with_plain
from peagle.bench.offline import cells_of, default_num_requests, llm_factory, sweep
from peagle.bench.report import check_plot, document_of, plot, print_report, tables
from peagle.bench.workloads import read_prompts, workload_name
from peagle.cli.arguments import (
    DrafterArguments,
    DrafterOptions,
    TargetArguments,
    TargetOptions,
    accelerator,
    parse,
)
from peagle.cli.lists import Files, Names, Numbers
from peagle.cli.progress import progress_bar
from peagle.errors import CheckpointError, ConfigError, nearest
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams
from peagle.targets.catalog import ASSETS, DEFAULT_TARGET, find

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

METHODS = (PLAIN, "eagle3", "p-eagle")
DEFAULT_METHODS = (PLAIN, "p-eagle")
TABLE_WIDTH = 200
"""columns of a table that goes to a file or a pipe"""

OnCell = Callable[[CellResult], None]
OnStart = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Arguments:
    prompts: Files | None = None
    """prompt files, separated by commas"""
    limit: int | None = None
    """use only the first so many prompts of each file"""
    methods: Names = DEFAULT_METHODS
    """among none (plain decoding), eagle3 and p-eagle"""
    num_draft_tokens: Numbers | None = None
    """draft tokens a step, as far as the method's drafter was trained for them; by default 7, or fewer where it was
    trained for fewer"""
    concurrency: Numbers = (1, 8, 32)
    """requests in flight"""
    num_requests: int | None = None
    """requests a cell; by default each prompt once, and at least eight times a concurrency above 1"""
    max_tokens: int = 256
    """tokens to answer each prompt with, at most"""
    temperature: float = 0.0
    """0 takes the most likely token; 1 samples the target's own distribution"""
    seed: int = 0
    """with the position in the text it fixes every random draw"""
    anchors: bool = False
    """also measure transformers: eager, static compiled and continuous batching"""
    anchor_methods: Names = ANCHORS
    """which of these, by name: eager, static, continuous"""
    dummy: str | None = None
    """instead of prompts and target: plain decoding with random weights of a shape (llama-8b) or a config.json"""
    eagle3_drafter: str | None = None
    """drafter directory of the method eagle3; by default the one that ships for the target"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of tables"""
    plot: Path | None = None
    """draw throughput against concurrency into this file (.png, .svg or .pdf)"""
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)


def main(argv: list[str]) -> int:
    if argv[:1] == ["serve"]:
        from peagle.cli import bench_serve

        return bench_serve.main(argv[1:])
    arguments = parse(Arguments, "bench", argv)
    check(arguments)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    results: list[CellResult] = []
    run = run_dummy if arguments.dummy is not None else run_workload
    facts, is_interrupted = run(arguments, results)
    document = document_of(results, **facts, is_interrupted=is_interrupted)
    print_report(document, arguments.json, tables, TABLE_WIDTH)
    if arguments.plot is not None and any(result.answers for result in results):
        plot(document, arguments.plot)
    if is_interrupted:
        raise KeyboardInterrupt
    return 1 if any(result.failure and result.cell.method in METHODS for result in results) else 0


def check(arguments: Arguments) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    for method in arguments.methods:
        if method not in METHODS:
            raise ConfigError(f"no method {method!r}", hint=nearest(method, METHODS))
    for name, numbers in (
        ("--concurrency", arguments.concurrency),
        ("--num-draft-tokens", arguments.num_draft_tokens or ()),
        ("--num-requests", (1 if arguments.num_requests is None else arguments.num_requests,)),
    ):
        if min(numbers, default=1) < 1:
            raise ConfigError(f"{name} must be at least 1, got {min(numbers)}")
    for name in arguments.anchor_methods:
        if name not in ANCHORS:
            raise ConfigError(f"no anchor {name!r}", hint=nearest(name, ANCHORS))
    if arguments.anchor_methods != ANCHORS and not arguments.anchors:
        raise ConfigError("--anchor-methods is given without --anchors", hint="add --anchors, or leave it out")
    _check_dummy(arguments)
    drafted = [method for method in arguments.methods if method != PLAIN]
    if arguments.num_draft_tokens is not None and not drafted:
        raise ConfigError(
            "--num-draft-tokens needs a method that drafts, but --methods is none", hint="add p-eagle or eagle3"
        )
    if "eagle3" in drafted and eagle3_drafter(arguments) is None:
        raise ConfigError(
            "the method eagle3 needs a drafter that was trained for it, and none ships for this target in this "
            "version: the weights of a P-EAGLE drafter, run one token at a time, would make a control that loses by "
            "its training",
            hint="train one with `peagle train --method eagle3` and give it with --eagle3-drafter, or leave eagle3 out",
        )
    if arguments.eagle3_drafter is not None and "eagle3" not in drafted:
        raise ConfigError("--eagle3-drafter is given, but --methods leaves eagle3 out", hint="add eagle3, or drop it")
    if arguments.drafter.drafter is not None and "p-eagle" not in drafted:
        raise ConfigError("--drafter is given, but --methods leaves p-eagle out", hint="add p-eagle, or drop it")
    if arguments.anchors and arguments.temperature > 0:
        raise ConfigError(
            "--anchors are greedy, but --temperature is "
            f"{arguments.temperature}: the answers would differ in length, and the rates in meaning",
            hint="drop one of the two",
        )


def _check_dummy(arguments: Arguments) -> None:
    if arguments.dummy is None:
        if arguments.prompts is None:
            raise ConfigError("nothing to run", hint="give prompt files with --prompts, or a shape with --dummy")
        return
    others = {
        "--prompts": arguments.prompts,
        "--limit": arguments.limit,
        "--num-draft-tokens": arguments.num_draft_tokens,
        "--anchors": arguments.anchors,
        "--target": arguments.target.target,
        "--drafter": arguments.drafter.drafter,
        "--eagle3-drafter": arguments.eagle3_drafter,
        "--methods": arguments.methods if arguments.methods not in (DEFAULT_METHODS, (PLAIN,)) else None,
    }
    for name, value in others.items():
        if value:
            raise ConfigError(
                f"--dummy runs plain decoding over random weights and prompts, which contradicts {name}",
                hint="drop one of the two",
            )


def run_workload(arguments: Arguments, results: list[CellResult]) -> tuple[dict[str, Any], bool]:
    """Sweep the prompt files; append to `results`; return facts of the run and whether it was interrupted."""
    assert arguments.prompts is not None
    params = sampling_params(arguments)
    prompts = [prompt for path in arguments.prompts for prompt in read_prompts(path, limit=arguments.limit)]
    if "p-eagle" in arguments.methods:
        arguments.drafter.check(arguments.target)
    target = arguments.target.load()
    drafters = load_drafters(arguments, target)
    prompt_ids = [render_prompt(target, prompt) for prompt in prompts]
    depths = {method: depths_of(drafter, arguments.num_draft_tokens) for method, drafter in drafters.items()}
    cells = cells_of(arguments.methods, depths, arguments.concurrency)
    num_anchors = len(arguments.anchor_methods) * len(arguments.concurrency) if arguments.anchors else 0

    def num_requests(concurrency: int) -> int:
        return arguments.num_requests or default_num_requests(concurrency, len(prompts))

    def measure(on_cell: OnCell, on_start: OnStart) -> None:
        factory = make_llm(arguments, target, drafters, prompt_ids, on_start)
        options: dict[str, Any] = {"num_requests": num_requests, "on_cell": on_cell}
        sweep(cells, factory, prompt_ids, params, results, device=target.device, **options)
        if arguments.anchors:
            options["names"] = arguments.anchor_methods
            run_anchors(target, prompt_ids, arguments.concurrency, arguments.max_tokens, results, **options)

    is_interrupted = with_progress(measure, len(cells) + num_anchors)
    if not is_interrupted:
        compare_with_plain(target, prompt_ids, results, params)
    workload = "+".join(workload_name(path) for path in arguments.prompts)
    return facts_of(arguments, target, workload, len(prompts)), is_interrupted


def run_dummy(arguments: Arguments, results: list[CellResult]) -> tuple[dict[str, Any], bool]:
    """Plain decoding with random weights; as `run_workload`, with the bandwidth among the facts."""
    from peagle.bench.bandwidth import bandwidth_report, dummy_target, measure_bandwidth, random_prompts

    assert arguments.dummy is not None
    params = replace(sampling_params(arguments), ignore_eos=True)
    target = dummy_target(arguments.dummy, dtype=arguments.target.dtype, device=arguments.target.device)
    prompt_ids = random_prompts(target.vocab_size, max(arguments.concurrency))
    bandwidth = measure_bandwidth(target.device)
    cells = cells_of((PLAIN,), {}, arguments.concurrency)

    def measure(on_cell: OnCell, on_start: OnStart) -> None:
        sweep(
            cells,
            make_llm(arguments, target, {}, prompt_ids, on_start),
            prompt_ids,
            params,
            results,
            num_requests=lambda concurrency: arguments.num_requests or concurrency,
            device=target.device,
            on_cell=on_cell,
        )

    is_interrupted = with_progress(measure, len(cells))
    facts = facts_of(arguments, target, "random tokens", len(prompt_ids))
    return facts | {"bandwidth": bandwidth_report(target, bandwidth, results)}, is_interrupted


def eagle3_drafter(arguments: Arguments) -> str | None:
    """The drafter of the method eagle3: the given one, or the one that ships for the target, if there is one."""
    entry = find(arguments.target.target or DEFAULT_TARGET)
    if arguments.eagle3_drafter is not None or entry is None:
        return arguments.eagle3_drafter
    for drafter in entry.drafters:
        if drafter.method == "eagle3" and drafter.source is not None:
            shipped = ASSETS / drafter.source
            if drafter.where != "package" or shipped.is_dir():
                return str(shipped) if drafter.where == "package" else drafter.source
    return None


def depths_of(drafter: "Drafter", wanted: Numbers | None) -> Numbers:
    """The numbers of draft tokens to measure a drafter with: those of `wanted` that it was trained for.

    Drafters of one sweep may be trained to different depths; one that reaches none of them is refused.
    """
    if wanted is None:
        return (drafter.config.usual_num_draft_tokens,)
    drafter.check_num_draft_tokens(min(wanted))
    depths = drafter.config.depths_within(wanted)
    too_deep = [str(depth) for depth in wanted if depth not in depths]
    if too_deep:
        log.info(
            "%s is left out at %s draft tokens: its drafter was trained for %d",
            drafter.config.method,
            ", ".join(too_deep),
            drafter.config.num_draft_tokens,
        )
    return depths


def load_drafters(arguments: Arguments, target: "HFTarget") -> dict[str, "Drafter"]:
    """The drafter of each method that drafts; one of the other kind is refused."""
    drafters = {}
    for method in arguments.methods:
        if method == PLAIN:
            continue
        options = arguments.drafter
        if method == "eagle3":
            options = replace(options, drafter=eagle3_drafter(arguments))
        drafter = options.load(target)
        if drafter.config.method != method:
            flag = "--eagle3-drafter" if method == "eagle3" else "--drafter"
            raise CheckpointError(
                f"{flag} {options.drafter} is a drafter for {drafter.config.method}, but the method is {method}",
                hint="--drafter takes the P-EAGLE drafter, --eagle3-drafter the EAGLE-3 one",
            )
        drafters[method] = drafter
    return drafters


def make_llm(
    arguments: Arguments,
    target: "HFTarget",
    drafters: dict[str, "Drafter"],
    prompt_ids: list[list[int]],
    on_start: OnStart,
) -> Any:
    """Engines just large enough for the workload, so that memory says what it needs."""
    longest = max(map(len, prompt_ids)) + arguments.max_tokens
    return llm_factory(
        target,
        drafters,
        max_batch=max(arguments.concurrency),
        max_length=min(longest, target.max_length),
        reuse_prefixes=False,
        progress=on_start,
    )


def sampling_params(arguments: Arguments) -> SamplingParams:
    return SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed)


def with_progress(measure: Callable[[OnCell, OnStart], None], num_cells: int) -> bool:
    """Run `measure` under a progress bar; True where the user interrupted it."""
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=num_cells)

        def on_cell(result: CellResult) -> None:
            speed = "failed" if result.failure else f"{result.tokens_per_second or 0:,.0f} tokens/s"
            what = f"{result.cell.label} at {result.cell.concurrency}: {speed}"
            progress.update(task, advance=1, description=what)

        def on_start(what: str, num_done: int, num_parts: int) -> None:
            progress.update(task, description=f"starting an engine: {what} ({num_done} of {num_parts})")

        try:
            measure(on_cell, on_start)
        except KeyboardInterrupt:
            return True
    return False


def facts_of(arguments: Arguments, target: "HFTarget", workload: str, num_prompts: int) -> dict[str, Any]:
    return {
        "workload": workload,
        "num_prompts": num_prompts,
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "provenance": provenance(accelerator(target)),
    }
