"""Load any OpenAI-compatible server, this one or vLLM, and measure what its clients see.

Sweeps concurrency and request rates; reports throughput, goodput, time to the first token, time per output token,
latency, failures with their reasons, and acceptance by the server's own /metrics. Ctrl-C reports what was measured.
"""

import asyncio
import json
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from peagle.bench.client import Connections, Outcome, Question, model_of, root_of
from peagle.bench.offline import default_num_requests
from peagle.bench.online import PERCENTILES, Load, Result, now_as_vllm, read_goals, sweep, warm_up
from peagle.bench.online_report import plot, tables
from peagle.bench.report import check_plot, print_report
from peagle.bench.workloads import Prompt, read_prompts, workload_name
from peagle.cli.arguments import parse
from peagle.cli.lists import Files, Numbers, comma_list
from peagle.cli.progress import progress_bar
from peagle.cli.remote import DEFAULT_URL, KeyArguments, KeyOptions
from peagle.errors import ConfigError
from peagle.provenance import provenance

DEFAULT_CONCURRENCY = (1, 8, 32)
TABLE_WIDTH = 180
"""columns of a table that goes to a file or a pipe"""


def read_rate(word: str) -> float:
    rate = float(word)
    if not rate > 0:
        raise ConfigError(f"--request-rate must be above 0, got {word}", hint="inf sends as fast as it is answered")
    return rate


Rates = Annotated[tuple[float, ...], comma_list(read_rate, "RATE[,RATE...]")]


@dataclass(frozen=True)
class Arguments:
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[URL]")] = DEFAULT_URL
    """address of the server, with or without /v1"""
    prompts: Files | None = None
    """prompt files, separated by commas"""
    limit: int | None = None
    """use only the first so many prompts of each file"""
    endpoint: Literal["chat", "completions"] = "chat"
    """/v1/chat/completions, or /v1/completions without a chat template"""
    model: str | None = None
    """name to ask for; by default the first one the server lists"""
    concurrency: Numbers | None = None
    """most requests in flight; by default 1,8,32, and without a limit where --request-rate is given"""
    request_rate: Rates = (math.inf,)
    """requests a second, by a Poisson process; inf sends the next as soon as there is a place"""
    burstiness: float = 1.0
    """shape of the gaps between requests: below 1 burstier than a Poisson process, above 1 more even"""
    num_requests: int | None = None
    """requests of each load; by default each prompt once, and at least eight times a concurrency above 1"""
    num_warmups: int = 2
    """requests that are sent before and not measured"""
    max_tokens: int = 256
    """tokens to answer each prompt with, at most"""
    ignore_eos: bool = False
    """ask for answers of exactly that length (servers of vLLM's kind, this one among them, know it)"""
    temperature: float = 0.0
    """0 takes the most likely token; 1 samples the target's own distribution"""
    seed: int = 0
    """of the arrivals, and of samples where the temperature is above 0"""
    extra_body: str | None = None
    """JSON object whose fields are added to every request, for example {"speculation": {"enabled": false}}"""
    goodput: str | None = None
    """limits in ms of answers that count as good, among ttft, tpot and e2el: ttft:200,tpot:20"""
    percentiles: Numbers = PERCENTILES
    """percentiles of the latencies, whole numbers from 1 to 99; tables show the highest"""
    timeout_seconds: float = 600.0
    """after which a request counts as failed"""
    ready_seconds: float = 0.0
    """how long to wait for a server that still loads"""
    label: str | None = None
    """a name for this run, in its title and document"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of tables"""
    detailed: bool = False
    """with every request's times, lengths and text in the document"""
    plot: Path | None = None
    """draw throughput and time per output token against concurrency into this file (.png, .svg or .pdf)"""
    key: KeyOptions = field(default_factory=KeyArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "bench serve", argv)
    more = check(arguments)
    goals = None if arguments.goodput is None else read_goals(arguments.goodput)
    root, api_key = root_of(arguments.url), arguments.key.read()
    assert arguments.prompts is not None
    prompts = [prompt for path in arguments.prompts for prompt in read_prompts(path, limit=arguments.limit)]
    planned, results = plan(arguments, len(prompts)), list[Result]()
    facts: dict[str, Any] = {}
    is_interrupted = False
    try:
        is_complete = measure(arguments, root, api_key, prompts, more, planned, results, facts)
        is_interrupted = not is_complete
    except KeyboardInterrupt:
        is_interrupted = True
    if not results:
        raise KeyboardInterrupt
    document = facts_of(arguments, root, len(prompts), facts.get("model")) | {"goodput": goals}
    head = {key: document[key] for key in ("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id")}
    options: dict[str, Any] = {"percentiles": arguments.percentiles, "goals": goals, "is_detailed": arguments.detailed}
    document["is_interrupted"] = is_interrupted
    document["results"] = [head | {"burstiness": arguments.burstiness} | result.report(**options) for result in results]
    print_report(document, arguments.json, tables, TABLE_WIDTH)
    if arguments.plot is not None and any(row["output_throughput"] for row in document["results"]):
        plot(document, arguments.plot)
    if is_interrupted:
        raise KeyboardInterrupt
    return 0 if all(result.answered for result in results) else 1


def check(arguments: Arguments) -> dict[str, Any]:
    """Refuse what cannot be run before anything is sent; returns the fields of --extra-body."""
    if arguments.prompts is None:
        raise ConfigError("nothing to ask", hint="give prompt files with --prompts")
    for name, value, least in (
        ("--concurrency", min(arguments.concurrency or (1,)), 1),
        ("--num-requests", 1 if arguments.num_requests is None else arguments.num_requests, 1),
        ("--max-tokens", arguments.max_tokens, 1),
        ("--num-warmups", arguments.num_warmups, 0),
        ("--ready-seconds", arguments.ready_seconds, 0),
        ("--temperature", arguments.temperature, 0),
    ):
        if not value >= least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    for name, number in (("--burstiness", arguments.burstiness), ("--timeout-seconds", arguments.timeout_seconds)):
        if not 0 < number < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, got {number}")
    if not all(1 <= each <= 99 for each in arguments.percentiles):
        raise ConfigError(f"--percentiles must be from 1 to 99, got {','.join(map(str, arguments.percentiles))}")
    if arguments.detailed and not arguments.json:
        raise ConfigError("--detailed belongs to the document, which only --json prints", hint="add --json")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    try:
        more = json.loads(arguments.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(more, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {arguments.extra_body}")
    if {"stream", "n"} & more.keys():
        raise ConfigError("--extra-body must not have stream or n: every request streams one answer")
    return more


def plan(arguments: Arguments, num_prompts: int) -> list[Result]:
    """Every concurrency with every request rate."""
    is_open = arguments.concurrency is None and arguments.request_rate != (math.inf,)
    concurrency = (None,) if is_open else arguments.concurrency or DEFAULT_CONCURRENCY
    return [
        Result(Load(places, rate), arguments.num_requests or default_num_requests(places or 0, num_prompts))
        for rate in arguments.request_rate
        for places in concurrency
    ]


def measure(
    arguments: Arguments,
    root: str,
    api_key: str | None,
    prompts: list[Prompt],
    more: dict[str, Any],
    planned: list[Result],
    results: list[Result],
    facts: dict[str, Any],
) -> bool:
    """Warm up and sweep under a progress bar; True where it was not interrupted. Tells the model in `facts`."""

    async def run(on_done: Callable[[Outcome], None], on_result: Callable[[Result], None]) -> bool:
        own = asyncio.current_task()
        assert own is not None, "it runs as a task"
        # asyncio turns Ctrl-C into this; SIGTERM would break into whichever task happens to run.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
        async with Connections(root, api_key, seconds=arguments.timeout_seconds) as connections:
            model = arguments.model
            if model is None or arguments.ready_seconds:
                found = await model_of(connections, root, ready_seconds=arguments.ready_seconds)
                model = model or found
            facts["model"] = model
            question = Question(
                model,
                arguments.endpoint == "chat",
                arguments.max_tokens,
                arguments.temperature,
                arguments.ignore_eos,
                arguments.seed,
                arguments.timeout_seconds,
                more,
            )
            await warm_up(connections, question, prompts[0], arguments.num_warmups)
            options: dict[str, Any] = {"seed": arguments.seed, "burstiness": arguments.burstiness}
            return await sweep(
                connections, question, prompts, planned, results, on_result=on_result, on_done=on_done, **options
            )

    with progress_bar() as progress:
        task = progress.add_task("warming up", total=sum(result.num_requests for result in planned))

        def on_done(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=results[-1].load.label)

        def on_result(result: Result) -> None:
            if not progress.console.is_terminal:
                return
            figures = result.report()
            failed = f", {figures['failed']} failed" if figures["failed"] else ""
            progress.console.print(f"{result.load.label}: {figures['output_throughput']:,.1f} tokens/s{failed}")

        return asyncio.run(run(on_done, on_result))


def facts_of(arguments: Arguments, root: str, num_prompts: int, model: str | None) -> dict[str, Any]:
    assert arguments.prompts is not None
    return {
        "date": now_as_vllm(),
        "endpoint_type": "openai-chat" if arguments.endpoint == "chat" else "openai",
        "backend": "openai-chat" if arguments.endpoint == "chat" else "openai",
        "label": arguments.label,
        "model_id": model or arguments.model,
        "tokenizer_id": None,
        "base_url": root,
        "workload": "+".join(workload_name(path) for path in arguments.prompts),
        "num_different_prompts": num_prompts,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "ignore_eos": arguments.ignore_eos,
        "seed": arguments.seed,
        "percentiles": list(arguments.percentiles),
        "provenance": provenance(),
    }
