"""The view of `peagle top`: one report of `Watch` as a panel."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peagle.bench.report import number
from peagle.console.watch import DRIFT_SHARE

SPARKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
BAR, BAR_WIDTH = "\u2588", 30
LATENCIES = {"ttft": "TTFT ms", "tpot": "TPOT ms", "itl": "ITL ms", "e2el": "E2E ms"}


def view(
    report: dict[str, Any], speeds: Sequence[float] = (), trouble: str = "", width: int | None = None
) -> RenderableType:
    """The whole panel. `speeds`: recent output tokens/s; `trouble`: why the last scrape failed."""
    title = f"{', '.join(report['models']) or 'starting'} at {report['url']}"
    recent, total = report["recent"], report["since_start"]
    parts: list[RenderableType] = [_now(report, speeds), _latencies(recent, total), _acceptance(recent, total)]
    if report["drift"] is not None:
        parts.append(_drift(report["drift"]))
    if report["drafting"] is not None:
        parts.append(_drafting(report["drafting"]))
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    return Panel(Group(*parts), title=title, title_align="left", width=width)


def _now(report: dict[str, Any], speeds: Sequence[float]) -> Table:
    now, recent, total = report["now"], report["recent"] or {}, report["since_start"]
    table = Table.grid(padding=(0, 2))
    limit = f" of {now['max_batch']:.0f}" if now["max_batch"] else ""
    kv = "-" if now["kv_cache_usage"] is None else f"{now['kv_cache_usage']:6.1%} {_bar(now['kv_cache_usage'], 12)}"
    hits = total["prefix_cache_hit_rate"]
    cached = "-" if hits is None else f"{hits:.1%} hit rate since start"
    speed = Text(f"{number(recent.get('output_tokens_per_second'), 1)} ")
    speed.append(_sparks(speeds), style="green")
    lost = f"{number(total['preemptions'])} preempted, {number(total['rejected'])} rejected"
    for left, first, right, second in (
        ("running", f"{number(now['running'])}{limit}", "KV cache", kv),
        ("waiting", number(now["waiting"]), "prefix cache", cached),
        ("output tokens/s", speed, "prompt tokens/s", number(recent.get("prompt_tokens_per_second"), 1)),
        ("finished", number(total["finished"]), "since start", lost),
    ):
        table.add_row(_dim(left), first, _dim(right), second)
    return table


def _latencies(recent: dict[str, Any] | None, total: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("", style="dim", no_wrap=True)
    span = "recent" if recent is None else f"last {recent['seconds']:.0f} s"
    for name in (f"{span}\np50", "\np95", "\np99", "since start\np50", "\np95", "\np99"):
        table.add_column(name, justify="right", no_wrap=True)
    for key, name in LATENCIES.items():
        cells = []
        for figures in (recent, total):
            found = (figures or {}).get(f"{key}_ms")
            cells += [number(found[each], 1) if found else "-" for each in ("p50", "p95", "p99")]
        table.add_row(name, *cells)
    return table


def _acceptance(recent: dict[str, Any] | None, total: dict[str, Any]) -> RenderableType:
    lately = (recent or {}).get("speculation")
    shown = lately or total["speculation"]
    if shown is None:
        return _dim("no drafts")
    span = f"last {recent['seconds']:.0f} s" if lately and recent else "since start"
    head = Text(f"\nacceptance length {shown['acceptance_length']:.2f}", style="bold")
    notes = f"{span}; {shown['acceptance_rate']:.1%} of draft tokens accepted"
    if lately:
        notes += f", {lately['drafted_per_second']:,.0f} drafted/s, {lately['accepted_per_second']:,.0f} accepted/s"
        notes += f"; since start {total['speculation']['acceptance_length']:.2f}"
    head.append(f" ({notes})", style="dim")
    bars = Table.grid(padding=(0, 1))
    for position, rate in enumerate(shown["per_position"], start=1):
        bars.add_row(_dim(f"{position:>3}"), Text(_bar(rate, BAR_WIDTH), style="cyan"), f"{rate:6.1%}")
    return Group(head, bars)


def _drift(drift: dict[str, Any]) -> Text:
    text = Text("vs. the drafter card: ", style="dim")
    if drift["share"] is None:
        return text.append(f"baseline {drift['baseline']:.2f}, no drafts yet")
    line = f"{drift['acceptance_length']:.2f} of {drift['baseline']:.2f} ({drift['share']:.0%})"
    text.append(line, style="bold red" if drift["has_drifted"] else "bold green")
    verdict = "ok"
    if drift["has_drifted"]:
        verdict = "DRIFT: the drafter no longer fits the traffic"
    elif drift["share"] < DRIFT_SHARE:
        verdict = "too few drafts for an alarm"
    return text.append(f" over {drift['num_drafts']:,} drafts; {verdict}")


def _drafting(found: dict[str, Any]) -> Text:
    text = Text("drafting: ", style="dim")
    text.append("pays", "bold green") if found["pays"] else text.append("OFF, it did not pay", "bold red")
    gain = "" if found["gain"] is None else f"; newest step: {found['gain']:.2f} times plain decoding expected"
    times = f"; stops: {found['num_pauses']}" if found["num_pauses"] else ""
    return text.append(f"{gain}{times}")


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def _bar(share: float, width: int) -> str:
    filled = round(max(0.0, min(1.0, share)) * width)
    return BAR * filled + "\u2591" * (width - filled)


def _sparks(values: Sequence[float], count: int = 30) -> str:
    shown = list(values)[-count:]
    most = max(shown, default=0.0)
    if most <= 0:
        return ""
    return "".join(SPARKS[round(value / most * (len(SPARKS) - 1))] for value in shown)
