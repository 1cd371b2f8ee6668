"""Watch a server live: requests, speed, latencies, KV cache, acceptance by position, and drift of the drafter.

Reads /metrics of this server or of vLLM's, and shows what it has. Ctrl-C ends it; --once --json is for scripts.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peagle.bench.client import headers_of, is_this_machine, root_of
from peagle.bench.scrape import Scrape
from peagle.bench.watch import DRIFT_SHARE, Watch
from peagle.cli.arguments import parse
from peagle.cli.remote import DEFAULT_URL, KeyArguments, KeyOptions
from peagle.errors import ConfigError, ServerError

SCRAPE_SECONDS = 10.0
SPARKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
BAR, BAR_WIDTH = "\u2588", 30
LATENCIES = {"ttft": "TTFT ms", "tpot": "TPOT ms", "itl": "ITL ms", "e2el": "E2E ms"}
MAX_WIDTH = 110
"""columns beyond which the view does not grow"""


@dataclass(frozen=True)
class Arguments:
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[URL]")] = DEFAULT_URL
    """address of the server, with or without /metrics"""
    interval: float = 1.0
    """seconds between two looks"""
    window: float = 30.0
    """seconds over which rates, latencies and acceptance are taken"""
    once: bool = False
    """look twice, one interval apart, print it and end"""
    json: bool = False
    """with --once: print one JSON document instead"""
    key: KeyOptions = field(default_factory=KeyArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "top", argv)
    for name, seconds in (("--interval", arguments.interval), ("--window", arguments.window)):
        if not 0.05 <= seconds <= 3600:
            raise ConfigError(f"{name} must be between 0.05 and 3600 seconds, got {seconds:g}")
    if arguments.json and not arguments.once:
        raise ConfigError("--json prints one document, so it needs --once", hint="add --once, or run it in a loop")
    root = root_of(arguments.url)
    headers = headers_of(arguments.key.read())
    client = httpx.Client(base_url=root, headers=headers, timeout=SCRAPE_SECONDS, trust_env=not is_this_machine(root))
    with client:
        watch = Watch(arguments.window)
        watch.add(look(client, root))
        if arguments.once:
            time.sleep(arguments.interval)
            watch.add(look(client, root))
            report = {"url": root} | watch.report()
            if arguments.json:
                print(json.dumps(report))
            else:
                console = Console()
                console.print(view(report, watch.speeds), width=min(console.width, MAX_WIDTH))
            return 0
        follow(arguments, client, root, watch)
    return 0


def look(client: httpx.Client, root: str) -> Scrape:
    """One scrape, or why there is none."""
    try:
        response = client.get("/metrics")
        response.raise_for_status()
    except httpx.HTTPError as error:
        what = f"HTTP {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)
        raise ServerError(
            f"{root}/metrics cannot be read: {what or type(error).__name__}",
            hint="is a server running there? `peagle serve` starts one, by default on port 8080",
        ) from error
    scrape = Scrape.parse(response.text, time.monotonic())
    if not scrape and response.text.strip():
        raise ServerError(f"{root}/metrics is not in Prometheus' text format", hint="is this the server's own address?")
    return scrape


def follow(arguments: Arguments, client: httpx.Client, root: str, watch: Watch) -> None:
    """Show it until the user has enough. A server that stops answering is waited for."""
    console, trouble = Console(), ""
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                report = {"url": root} | watch.report()
                live.update(view(report, watch.speeds, trouble, min(console.width, MAX_WIDTH)), refresh=True)
                time.sleep(arguments.interval)
                try:
                    watch.add(look(client, root))
                    trouble = ""
                except ServerError as error:
                    trouble = error.message
        except KeyboardInterrupt:
            return


def view(
    report: dict[str, Any], speeds: Sequence[float] = (), trouble: str = "", width: int | None = None
) -> RenderableType:
    """The whole picture."""
    names = ", ".join(report["models"]) or "starting"
    title = f"{names} at {report['url']}"
    recent, total = report["recent"], report["since_start"]
    parts: list[RenderableType] = [_now(report, speeds), _latencies(recent, total), _acceptance(recent, total)]
    if report["drift"] is not None:
        parts.append(_drift(report["drift"]))
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    return Panel(Group(*parts), title=title, title_align="left", width=width)


def _now(report: dict[str, Any], speeds: Sequence[float]) -> Table:
    now, recent, total = report["now"], report["recent"] or {}, report["since_start"]
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column()
    places = f" of {now['max_batch']:.0f}" if now["max_batch"] else ""
    kv = "-" if now["kv_cache_usage"] is None else f"{now['kv_cache_usage']:6.1%} {_bar(now['kv_cache_usage'], 12)}"
    table.add_row(_dim("running"), f"{_number(now['running'])}{places}", _dim("KV cache"), kv)
    hits = total["prefix_cache_hit_rate"]
    cached = "-" if hits is None else f"{hits:.1%} of prompt tokens since start"
    table.add_row(_dim("waiting"), _number(now["waiting"]), _dim("prefix cache"), cached)
    speed = Text(f"{_number(recent.get('output_tokens_per_second'), 1)} ")
    speed.append(_sparks(speeds), style="green")
    prompt_speed = f"{_number(recent.get('prompt_tokens_per_second'), 1)} of prompts"
    table.add_row(_dim("tokens/s"), speed, _dim("tokens/s"), prompt_speed)
    lost = f"{_number(total['preemptions'])} preempted, {_number(total['rejected'])} refused"
    table.add_row(_dim("finished"), _number(total["finished"]), _dim("since start"), lost)
    return table


def _latencies(recent: dict[str, Any] | None, total: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("", style="dim", no_wrap=True)
    span = "lately" if recent is None else f"last {recent['seconds']:.0f} s"
    for name in (f"{span}\np50", "\np95", "\np99", "since start\np50", "\np95", "\np99"):
        table.add_column(name, justify="right", no_wrap=True)
    for key, name in LATENCIES.items():
        cells = []
        for figures in (recent, total):
            found = (figures or {}).get(f"{key}_ms")
            cells += [_number(found[each], 1) if found else "-" for each in ("p50", "p95", "p99")]
        table.add_row(name, *cells)
    return table


def _acceptance(recent: dict[str, Any] | None, total: dict[str, Any]) -> RenderableType:
    lately = (recent or {}).get("speculation")
    shown = lately or total["speculation"]
    if shown is None:
        return _dim("nothing was drafted")
    span = f"last {recent['seconds']:.0f} s" if lately and recent else "since start"
    head = Text(f"\nacceptance length {shown['acceptance_length']:.2f}", style="bold")
    head.append(f" ({span}; {shown['acceptance_rate']:.1%} of draft tokens", style="dim")
    if lately:
        head.append(f", {lately['drafted_per_second']:,.0f} drafted/s", style="dim")
        head.append(f", {lately['accepted_per_second']:,.0f} accepted/s", style="dim")
        head.append(f"; since start {total['speculation']['acceptance_length']:.2f}", style="dim")
    head.append(")", style="dim")
    bars = Table.grid(padding=(0, 1))
    for position, rate in enumerate(shown["per_position"], start=1):
        bars.add_row(_dim(f"{position:>3}"), Text(_bar(rate, BAR_WIDTH), style="cyan"), f"{rate:6.1%}")
    return Group(head, bars)


def _drift(drift: dict[str, Any]) -> Text:
    text = Text("against the drafter card: ", style="dim")
    if drift["share"] is None:
        return text.append(f"baseline {drift['baseline']:.2f}, nothing drafted yet")
    line = f"{drift['acceptance_length']:.2f} of {drift['baseline']:.2f} ({drift['share']:.0%})"
    text.append(line, style="bold red" if drift["has_drifted"] else "bold green")
    word = "no alarm"
    if drift["has_drifted"]:
        word = "DRIFT: the drafter no longer fits what it is asked"
    elif drift["share"] < DRIFT_SHARE:
        word = "too few for an alarm"
    return text.append(f" over {drift['num_drafts']:,} drafts; {word}")


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _bar(share: float, width: int) -> str:
    filled = round(max(0.0, min(1.0, share)) * width)
    return BAR * filled + "\u2591" * (width - filled)


def _sparks(values: Sequence[float], count: int = 30) -> str:
    shown = list(values)[-count:]
    most = max(shown, default=0.0)
    if most <= 0:
        return ""
    return "".join(SPARKS[round(value / most * (len(SPARKS) - 1))] for value in shown)
