"""What a million output tokens cost, with and without drafts: an hourly price over measured throughput.

    usd_per_million = usd_per_hour / 3600 / tokens_per_second * 1e6

Everything is computed from the cells of a JSON document of `peagle bench`, or the results of `peagle bench serve`, so
that it can be checked by hand. Break-even: a speculative step takes acceptance_length / speedup times a plain one, so
that quotient is the acceptance length at which both cost the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from peagle.errors import ConfigError
from peagle.targets.prices import HOURS_A_MONTH, Price, price_of

PLAIN = "none"
MILLION = 1_000_000


@dataclass(frozen=True)
class CostOptions:
    """Cost. Needs a price: of an instance, or per hour."""

    price_per_hour: float | None = None
    """price in US dollars; default: that of the instance in peagle's dated list"""
    max_tpot: float | None = None
    """also find the cheapest setting whose 95th percentile of the time per output token stays within this many ms"""
    training_hours: float | None = None
    """hours it took to train the drafter, at the same price: adds its cost and when that is earned back"""

    def __post_init__(self) -> None:
        for flag, value in (("--max-tpot", self.max_tpot), ("--training-hours", self.training_hours)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{flag} must be above 0, got {value:g}")

    def price(self, instance: str | None) -> Price | None:
        """The price to use; None if none is asked for."""
        found = price_of(instance, self.price_per_hour)
        for flag, value in (("--max-tpot", self.max_tpot), ("--training-hours", self.training_hours)):
            if found is None and value is not None:
                raise ConfigError(f"{flag} needs a price", hint="pass --price-per-hour, or --instance")
        return found


@dataclass(frozen=True)
class MeasuredCost(CostOptions):
    """Cost. Needs a price: of an instance, or per hour."""

    instance: str | None = None
    """instance type that this machine is, for example ml.p5.4xlarge: its price per GPU is used"""

    def check(self, accelerator: str | None) -> None:
        """Refuse an instance without a known price, or with another GPU than this machine."""
        if (price := self.price(self.instance)) is not None:
            price.check(accelerator)

    def added_to(self, document: dict[str, Any]) -> dict[str, Any]:
        """The document with its cost block; None if no price is given or nothing was measured."""
        price = self.price(self.instance)
        return document | {"cost": cost_of(document, price, self) if price and _cells(document) else None}


def usd_per_million(usd_per_hour: float, tokens_per_second: float) -> float:
    """
    >>> round(usd_per_million(4.50, 1250), 6)
    1.0
    """
    return usd_per_hour / 3600 / tokens_per_second * MILLION


def cost_of(document: Mapping[str, Any], price: Price, options: CostOptions | None = None) -> dict[str, Any]:
    """The cost block of a document of `bench`, which uses one GPU, or `bench serve`: a server uses the instance."""
    options = options or CostOptions()
    cells = _cells(document)
    if not cells:
        raise ConfigError(
            "there is no measurement to compute a cost from", hint="run `peagle bench` or `peagle bench serve` first"
        )
    charged = price.usd_per_hour if document.get("results") else price.usd_per_gpu_hour
    for cell in cells:
        cell["usd_per_million"] = round(usd_per_million(charged, cell.pop("tokens_per_second")), 6)
    rows = _by_concurrency(cells)
    return {
        "price": vars(price) | {"charged_usd_per_hour": charged},
        "cells": cells,
        "by_concurrency": rows,
        "break_even_concurrency": break_even_concurrency(rows),
        "within_limit": None if options.max_tpot is None else _within(cells, options.max_tpot),
        "training": None if options.training_hours is None else _training(rows, charged, options.training_hours),
    }


def _cells(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measured cells under the same names, whichever command wrote the document."""
    cells = []
    for cell in document.get("cells") or ():
        if cell["output_tokens_per_second"]:
            spread = cell["time_per_output_token_ms"] or {}
            # Rounded weights are cheaper for another reason than drafts.
            length, speedup = cell["acceptance_length"], None if cell.get("quantize") else cell["speedup"]
            cells.append(
                {
                    "label": cell["label"],
                    "method": cell["method"],
                    "concurrency": cell["concurrency"],
                    "tokens_per_second": cell["output_tokens_per_second"],
                    "tpot_p95_ms": spread.get("p95"),
                    "acceptance_length": length,
                    "break_even_acceptance_length": round(length / speedup, 4) if length and speedup else None,
                }
            )
    for row in document.get("results") or ():
        if row["output_throughput"]:
            label = row.get("label") or "server"
            length, speedup = row.get("spec_decode_acceptance_length"), row.get("speedup")
            cells.append(
                {
                    "label": label,
                    "method": PLAIN if label == "plain" else "server",
                    "concurrency": row["max_concurrency"],
                    "tokens_per_second": row["output_throughput"],
                    "tpot_p95_ms": row.get("p95_tpot_ms"),
                    "acceptance_length": length,
                    "break_even_acceptance_length": round(length / speedup, 4) if length and speedup else None,
                }
            )
    return cells


def _by_concurrency(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain decoding and the cheapest cell that drafts, at each concurrency that has both."""
    rows = []
    for concurrency in dict.fromkeys(cell["concurrency"] for cell in cells if cell["concurrency"] is not None):
        here = [cell for cell in cells if cell["concurrency"] == concurrency]
        plain = next((cell for cell in here if cell["method"] == PLAIN), None)
        drafted = [cell for cell in here if cell["break_even_acceptance_length"] and cell["method"] != PLAIN]
        if plain is None or not drafted:
            continue
        best = min(drafted, key=lambda cell: cell["usd_per_million"])
        rows.append(
            {
                "concurrency": concurrency,
                "plain_usd_per_million": plain["usd_per_million"],
                "drafted_usd_per_million": best["usd_per_million"],
                "label": best["label"],
                "saving": round(1 - best["usd_per_million"] / plain["usd_per_million"], 4),
                "acceptance_length": best["acceptance_length"],
                "break_even_acceptance_length": best["break_even_acceptance_length"],
            }
        )
    return rows


def break_even_concurrency(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Where the saving falls to 0, between two measured loads; None if it does not."""
    for low, high in pairwise(rows):
        if low["saving"] > 0 >= high["saving"]:
            share = low["saving"] / (low["saving"] - high["saving"])
            start, end = math.log2(low["concurrency"]), math.log2(high["concurrency"])
            return round(2 ** (start + share * (end - start)), 2)
    return None


def _within(cells: Sequence[Mapping[str, Any]], max_tpot: float) -> dict[str, Any]:
    """The cheapest plain cell and the cheapest with drafts whose time per token stays within the limit."""

    def cheapest(is_plain: bool) -> Mapping[str, Any] | None:
        timed = [cell for cell in cells if cell["tpot_p95_ms"] and cell["tpot_p95_ms"] <= max_tpot]
        fitting = [cell for cell in timed if (cell["method"] == PLAIN) == is_plain]
        return min(fitting, key=lambda cell: cell["usd_per_million"], default=None)

    return {"max_tpot_ms": max_tpot, "plain": cheapest(True), "drafted": cheapest(False)}


def _training(rows: Sequence[Mapping[str, Any]], usd_per_hour: float, hours: float) -> dict[str, Any]:
    """What training cost, and after how many output tokens the saving at each concurrency has paid for it."""
    usd = hours * usd_per_hour
    return {
        "hours": hours,
        "usd": round(usd, 4),
        "earned_back_after_tokens": [
            {
                "concurrency": row["concurrency"],
                "num_tokens": _tokens_to_save(usd, row["plain_usd_per_million"] - row["drafted_usd_per_million"]),
            }
            for row in rows
        ],
    }


def _tokens_to_save(usd: float, saved_per_million: float) -> int | None:
    return None if saved_per_million <= 0 else math.ceil(usd / saved_per_million * MILLION)


# As text ----------------------------------------------------------------------------------------------------------


def dollars(value: float) -> str:
    """
    >>> dollars(0.01234), dollars(1.5), dollars(1234.5)
    ('$0.0123', '$1.50', '$1,234.50')
    """
    return f"${value:,.2f}" if value >= 1 else f"${value:#.3g}"


def price_text(price: Mapping[str, Any]) -> str:
    return Price(**{name: value for name, value in price.items() if name != "charged_usd_per_hour"}).text


def cost_lines(cost: Mapping[str, Any]) -> list[str]:
    """What the cost block says, one sentence a line; nothing without one."""
    if not cost:
        return []
    lines = [f"price: {price_text(cost['price'])}"]
    for row in cost["by_concurrency"]:
        plain, drafted = dollars(row["plain_usd_per_million"]), dollars(row["drafted_usd_per_million"])
        change = f"{abs(row['saving']):.0%} {'cheaper' if row['saving'] >= 0 else 'dearer'}"
        lines.append(
            f"concurrency {row['concurrency']}: {plain} per million output tokens plain, {drafted} with {row['label']} "
            f"({change}); pays above an acceptance length of {row['break_even_acceptance_length']:.2f}, "
            f"measured {row['acceptance_length']:.2f}"
        )
    if not cost["by_concurrency"]:
        lines += [
            f"{cell['label']} at concurrency {cell['concurrency'] or 'unlimited'}: "
            f"{dollars(cell['usd_per_million'])} per million output tokens"
            for cell in cost["cells"]
        ]
    if cost["break_even_concurrency"] is not None:
        lines.append(f"drafting stops paying at about {cost['break_even_concurrency']:.3g} concurrent requests")
    if (limit := cost["within_limit"]) is not None:
        for name, what in (("plain", "plain"), ("drafted", "with drafts")):
            cell = limit[name]
            found = "no measured setting" if cell is None else f"{dollars(cell['usd_per_million'])} ({_where(cell)})"
            lines.append(f"within {limit['max_tpot_ms']:g} ms per output token (p95), {what}: {found}")
    if (training := cost["training"]) is not None:
        earned = ", ".join(
            f"{_after(each['num_tokens'])} at concurrency {each['concurrency']}"
            for each in training["earned_back_after_tokens"]
        )
        spent = f"training took {training['hours']:g} hours and cost {dollars(training['usd'])}"
        lines.append(spent + (f", earned back {earned}" if earned else ""))
    return lines


def _after(num_tokens: int | None) -> str:
    """
    >>> _after(8_842), _after(172_000_000)
    ('after 8,842 tokens', 'after 172 million tokens')
    """
    if num_tokens is None:
        return "never"
    return (
        f"after {num_tokens:,} tokens" if num_tokens < MILLION else f"after {num_tokens / MILLION:,.3g} million tokens"
    )


def _where(cell: Mapping[str, Any]) -> str:
    return f"{cell['label']} at concurrency {cell['concurrency']}"


def hourly_lines(price: Price, num_instances: int, max_instances: int | None) -> list[str]:
    """What a deployment costs per hour and month, at any load."""
    usual = num_instances * price.usd_per_hour
    most = "" if max_instances is None else f", at most {dollars(max_instances * price.usd_per_hour)} when scaled out"
    sums = f"{dollars(usual)} per hour, {dollars(usual * HOURS_A_MONTH)} a month"
    return [f"cost: {sums}{most}; {num_instances} x {price.text}"]
