"""Load-test an OpenAI-compatible server, peagle's or vLLM's, and measure what clients see.

Sweeps concurrency and request rates; reports throughput, goodput, TTFT, TPOT, ITL, latency, failures, and acceptance
from the server's /metrics. Ctrl-C stops and reports what was measured.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from peagle.bench.client import Outcome, Question, root_of
from peagle.bench.online import Load, Result, measure, read_goals
from peagle.bench.online_report import document_of, plot, tables
from peagle.bench.plot import check_plot
from peagle.bench.report import print_document
from peagle.config import json_object
from peagle.console.arguments import (
    DEFAULT_URL,
    KeyArguments,
    Numbers,
    WorkloadArguments,
    check_directory,
    comma_list,
    parse,
)
from peagle.console.progress import progress_bar
from peagle.cost import MeasuredCost, cost_lines
from peagle.data.config import require_at_least
from peagle.data.prompts import Prompt
from peagle.errors import ConfigError
from peagle.report.build import check_report, write_report
from peagle.report.exports import write_exports

DEFAULT_CONCURRENCY = (1, 8, 32)


def read_rate(word: str) -> float:
    rate = float(word)
    if not rate > 0:
        raise ConfigError(f"--request-rate must be above 0, got {word}", hint="inf sets no limit")
    return rate


Rates = Annotated[tuple[float, ...], comma_list(read_rate, "RATE[,RATE...]")]


@dataclass(frozen=True)
class Arguments:
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[URL]")] = DEFAULT_URL
    """server address, with or without /v1"""
    concurrency: Numbers | None = None
    """most requests in flight; default: 1,8,32, or unlimited with --request-rate"""
    request_rate: Rates = (math.inf,)
    """requests per second (Poisson arrivals); inf: send as soon as --concurrency allows"""
    ignore_eos: bool = False
    """generate exactly --max-tokens tokens (vLLM and peagle support this)"""
    goodput: str | None = None
    """latency goals in ms for goodput, of ttft, tpot, e2el: ttft:200,tpot:20"""
    model: str | None = None
    """model name; default: the first one the server lists"""
    endpoint: Literal["chat", "completions"] = "chat"
    """/v1/chat/completions, or /v1/completions without a chat template"""
    extra_body: str | None = None
    """JSON object added to every request, for example {"speculation": {"enabled": false}}"""
    ready_seconds: float = 0.0
    """how long to wait for a server that is still loading"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of tables"""
    detailed: bool = False
    """with --json: include times, lengths and text of every request"""
    plot: Path | None = None
    """plot throughput and TPOT into this file (.png, .svg or .pdf)"""
    report: Path | None = None
    """write a report with charts into this file (.html or .md)"""
    export: Path | None = None
    """write each load to a directory in this one, as the files of `vllm bench serve` and of AIPerf"""
    workload: WorkloadArguments = field(default_factory=WorkloadArguments)
    key: KeyArguments = field(default_factory=KeyArguments)
    cost: MeasuredCost = field(default_factory=MeasuredCost)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "bench serve", argv)
    more = check(arguments)
    goals = None if arguments.goodput is None else read_goals(arguments.goodput)
    root, results = root_of(arguments.url), list[Result]()
    workload = arguments.workload
    prompts = workload.read()
    question = Question(
        arguments.model or "",
        arguments.endpoint == "chat",
        workload.max_tokens,
        workload.temperature,
        arguments.ignore_eos,
        workload.seed,
        more=more,
    )
    model, interrupt = run(arguments, root, question, prompts, results)
    if interrupt is not None and not results:
        raise interrupt
    facts: dict[str, Any] = {
        "base_url": root,
        "workload": workload.name,
        "num_different_prompts": len(prompts),
        "num_turns": sum(prompt.num_turns for prompt in prompts),
        "is_interrupted": interrupt is not None,
    }
    question = replace(question, model=model)
    document = document_of(results, question, goals=goals, is_detailed=arguments.detailed, **facts)
    document = arguments.cost.added_to(document)
    shown = "\n".join(cost_lines(document["cost"] or {})) or None
    print_document(document, arguments.json, *tables(document), verdict=shown)
    if arguments.export is not None:
        write_exports(results, document, arguments.export)
    if arguments.plot is not None and any(row["output_throughput"] for row in document["results"]):
        plot(document, arguments.plot)
    if arguments.report is not None and any(row["output_throughput"] for row in document["results"]):
        write_report([document], arguments.report)
    if interrupt is not None:
        raise interrupt
    return 0 if all(result.answered for result in results) else 1


def check(arguments: Arguments) -> dict[str, Any]:
    """Refuse invalid options before anything is sent; returns the fields of --extra-body."""
    if arguments.workload.prompts is None:
        raise ConfigError("no prompts", hint="pass prompt files with --prompts")
    if (least := min(arguments.concurrency or (1,))) < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {least}")
    require_at_least(arguments, 0, "ready_seconds")
    arguments.cost.price(arguments.cost.instance)
    if arguments.detailed and not arguments.json:
        raise ConfigError("--detailed needs --json", hint="add --json")
    if arguments.export is not None:
        check_directory(arguments.export)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    if arguments.report is not None:
        check_report("--report", arguments.report)
    more = json_object(arguments.extra_body or "{}", "--extra-body")
    if {"stream", "n"} & more.keys():
        raise ConfigError("--extra-body must not set stream or n: every request streams one answer")
    return more


def run(
    arguments: Arguments, root: str, question: Question, prompts: list[Prompt], results: list[Result]
) -> tuple[str, KeyboardInterrupt | None]:
    """Measure under a progress bar; returns the model's name and the interrupt that ended the run early."""
    is_open = arguments.concurrency is None and arguments.request_rate != (math.inf,)
    concurrency = (None,) if is_open else arguments.concurrency or DEFAULT_CONCURRENCY
    num_turns = sum(prompt.num_turns for prompt in prompts)
    planned = [
        Result(Load(places, rate), arguments.workload.requests(places or 0, num_turns))
        for rate in arguments.request_rate
        for places in concurrency
    ]
    with progress_bar() as progress:
        task = progress.add_task("warming up", total=sum(result.num_requests for result in planned))

        def on_done(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=results[-1].load.label)

        def on_result(result: Result) -> None:
            if progress.console.is_terminal:
                figures = result.report()
                failed = f", {figures['failed']} failed" if figures["failed"] else ""
                progress.console.print(f"{result.load.label}: {figures['output_throughput']:,.1f} tokens/s{failed}")

        options: dict[str, Any] = {"seed": arguments.workload.seed, "on_result": on_result, "on_done": on_done}
        api_key, ready_seconds = arguments.key.read(), arguments.ready_seconds
        return measure(root, api_key, question, prompts, planned, results, ready_seconds=ready_seconds, **options)
