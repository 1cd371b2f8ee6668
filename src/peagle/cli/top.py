"""Live view of a running server: requests, throughput, latency, KV cache, acceptance by position, drafter drift.

Reads /metrics of peagle or vLLM. Ctrl-C quits; use --once --json in scripts.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Annotated

import httpx
import tyro
from rich.console import Console
from rich.live import Live

from peagle.bench.client import headers_of, is_this_machine, root_of
from peagle.bench.scrape import Scrape
from peagle.console.arguments import DEFAULT_URL, KeyArguments, parse
from peagle.console.live import view
from peagle.console.watch import Watch
from peagle.errors import ConfigError, ServerError

SCRAPE_SECONDS = 10.0
MAX_WIDTH = 110


@dataclass(frozen=True)
class Arguments:
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[URL]")] = DEFAULT_URL
    """server address, with or without /metrics"""
    interval: float = 1.0
    """seconds between scrapes"""
    window: float = 30.0
    """seconds that rates, latencies and acceptance cover"""
    once: bool = False
    """scrape twice, one interval apart, print and exit"""
    json: bool = False
    """with --once: print one JSON document"""
    key: KeyArguments = field(default_factory=KeyArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "top", argv)
    for name, seconds in (("--interval", arguments.interval), ("--window", arguments.window)):
        if not 0.05 <= seconds <= 3600:
            raise ConfigError(f"{name} must be between 0.05 and 3600 seconds, got {seconds:g}")
    if arguments.json and not arguments.once:
        raise ConfigError("--json needs --once", hint="add --once, and run it in a loop if needed")
    root = root_of(arguments.url)
    headers = headers_of(arguments.key.read())
    console, watch = Console(), Watch(arguments.window)
    width = min(console.width, MAX_WIDTH)
    with httpx.Client(
        base_url=root, headers=headers, timeout=SCRAPE_SECONDS, trust_env=not is_this_machine(root)
    ) as client:
        watch.add(scrape(client, root))
        if not arguments.once:
            return follow(client, root, watch, arguments.interval, console, width)
        time.sleep(arguments.interval)
        watch.add(scrape(client, root))
    report = {"url": root} | watch.report()
    if arguments.json:
        print(json.dumps(report))
    else:
        console.print(view(report, watch.speeds), width=width)
    return 0


def scrape(client: httpx.Client, root: str) -> Scrape:
    try:
        response = client.get("/metrics")
        response.raise_for_status()
    except httpx.HTTPError as error:
        what = f"HTTP {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)
        raise ServerError(
            f"cannot read {root}/metrics: {what or type(error).__name__}",
            hint="is a server running there? `peagle serve` starts one, by default on port 8080",
        ) from error
    found = Scrape.parse(response.text, time.monotonic())
    if not found and response.text.strip():
        raise ServerError(f"{root}/metrics is not in Prometheus' text format", hint="check the server address")
    return found


def follow(client: httpx.Client, root: str, watch: Watch, interval: float, console: Console, width: int) -> int:
    """Refresh the view until Ctrl-C. If the server stops responding, keep trying."""
    trouble = ""
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                live.update(view({"url": root} | watch.report(), watch.speeds, trouble, width), refresh=True)
                time.sleep(interval)
                try:
                    watch.add(scrape(client, root))
                    trouble = ""
                except ServerError as error:
                    trouble = error.message
        except KeyboardInterrupt:
            return 0
