"""Choose method, draft tokens and batch limit from the cells of a sweep.

A setting is a label of the sweep: plain decoding, a method whose drafts the engine chooses (its default), or a method
with a fixed number of draft tokens. A load is the measured concurrencies, each as important as the others, or a request
rate. At a rate, a closed loop of c requests that emits as many tokens per second runs at the same point, so figures
between two measured concurrencies are interpolated over log2(c).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from peagle.bench.cells import PLAIN
from peagle.bench.verdict import MIN_SPEED_UP
from peagle.cost import break_even_concurrency

Cell = Mapping[str, Any]
Curve = list[Cell]
"""The cells of one setting, by rising concurrency."""

CLOSE = 0.98
"""A setting at this share of the best counts as equal: measurements vary. Of equals, the engine's own choice wins."""


def recommend(
    cells: Sequence[Cell], *, request_rate: float | None = None, max_tpot: float | None = None
) -> dict[str, Any] | None:
    """The recommendation, ready for JSON; None if nothing was measured. `max_tpot` limits the p99 in ms."""
    curves = curves_of(cells)
    if not curves:
        return None
    needed = None if request_rate is None else request_rate * tokens_per_request(cells)
    label = chosen_form(curves, _scorer(curves, needed, max_tpot))
    form = curves[label][0].get("quantize")
    method, batch = curves[label][0]["method"], batch_limit(curves[label], max_tpot)
    as_they_are = of_form(curves, None)  # vLLM has other forms
    same_drafter = as_they_are if method == PLAIN else of_methods(as_they_are, PLAIN, method)
    fixed = {name: curve for name, curve in same_drafter.items() if curve[0]["num_draft_tokens"] is not None}
    for_vllm = fixed[chosen(fixed, _scorer(fixed, needed, max_tpot))][0] if len(fixed) > 1 else None
    gains = gains_of(of_form(curves, form))
    return {
        "label": label,
        "method": method,
        "num_draft_tokens": curves[label][0]["num_draft_tokens"],
        "quantize": form,
        "max_batch": batch,
        "request_rate": request_rate,
        "needed_tokens_per_second": None if needed is None else round(needed, 2),
        "keeps_up": None if needed is None else max(map(speed_of, curves[label])) >= needed,
        "max_tpot_ms": max_tpot,
        "is_within_limit": None if max_tpot is None else _is_within(at(curves[label], batch), max_tpot),
        "expected": figures(at(curves[label], batch if needed is None else place_of(curves[label], needed))),
        "by_concurrency": [_row(curves, label, concurrency) for concurrency in concurrencies(curves)],
        "stops_paying_at_concurrency": break_even_concurrency(gains),
        "vllm": for_vllm and {"method": for_vllm["method"], "num_draft_tokens": for_vllm["num_draft_tokens"]},
    }


def of_form(curves: Mapping[str, Curve], form: str | None) -> dict[str, Curve]:
    """The curves of one form of the target's weights; None: as they are."""
    return {name: curve for name, curve in curves.items() if curve[0].get("quantize") == form}


def chosen_form(curves: Mapping[str, Curve], score: Callable[[Curve], float]) -> str:
    """The setting to use. Quantized weights change the answers, so they must be faster to be chosen."""
    forms = dict.fromkeys(curve[0].get("quantize") for curve in curves.values())
    best, *others = [chosen(of_form(curves, form), score) for form in forms]
    fastest = max(others, key=lambda label: score(curves[label]), default=best)
    return fastest if score(curves[fastest]) >= MIN_SPEED_UP * score(curves[best]) else best


def of_methods(curves: Mapping[str, Curve], *methods: str) -> dict[str, Curve]:
    return {name: curve for name, curve in curves.items() if curve[0]["method"] in methods}


def curves_of(cells: Sequence[Cell]) -> dict[str, Curve]:
    """The measured cells of plain decoding and of methods that draft, by label."""
    curves: dict[str, Curve] = {}
    for cell in sorted(cells, key=lambda cell: cell["concurrency"]):
        if cell["output_tokens_per_second"] and (cell["method"] == PLAIN or cell["per_position"] is not None):
            curves.setdefault(cell["label"], []).append(cell)
    return curves


def concurrencies(curves: Mapping[str, Curve]) -> list[int]:
    return sorted({cell["concurrency"] for curve in curves.values() for cell in curve})


def speed_of(cell: Cell) -> float:
    return float(cell["output_tokens_per_second"])


def tokens_per_request(cells: Sequence[Cell]) -> float:
    """Mean length of the answers."""
    return sum(cell["num_output_tokens"] for cell in cells) / max(1, sum(cell["num_requests"] for cell in cells))


def chosen(curves: Mapping[str, Curve], score: Callable[[Curve], float]) -> str:
    """The setting to use: the best one, or the simplest of those that are as good.

    Plain decoding needs no memory for a drafter; the engine's own choice adapts to loads that were not measured.
    """
    scores = {label: score(curve) for label, curve in curves.items()}
    best = max(scores, key=lambda label: scores[label])
    plain = next((label for label, curve in curves.items() if curve[0]["method"] == PLAIN), None)
    if plain is not None and scores[best] < MIN_SPEED_UP * scores[plain]:
        return plain
    close = [label for label in scores if scores[label] >= CLOSE * scores[best] and label != plain]
    return min(close, key=lambda label: (curves[label][0]["num_draft_tokens"] is not None, -scores[label]))


def _scorer(curves: Mapping[str, Curve], needed: float | None, max_tpot: float | None) -> Callable[[Curve], float]:
    """How good a setting is for the load; higher is better."""

    def within(curve: Curve) -> float:
        """Most tokens/s within the limit; far less if it never is."""
        allowed = [speed_of(cell) for cell in curve if max_tpot is not None and _is_within(cell, max_tpot)]
        return max(allowed, default=1e-6 * max(map(speed_of, curve)))

    def at_rate(curve: Curve) -> float:
        """Speed for one user where the server emits what is needed; far less if it cannot."""
        assert needed is not None
        if (most := max(map(speed_of, curve))) < needed:
            return 1e-6 * most
        return 1 / (figures(at(curve, place_of(curve, needed)))["tpot_p50_ms"] or math.inf)

    def everywhere(curve: Curve) -> float:
        """Geometric mean of tokens/s over the concurrencies that all settings have."""
        shared = set.intersection(*({cell["concurrency"] for cell in each} for each in curves.values()))
        speeds = [speed_of(cell) for cell in curve if not shared or cell["concurrency"] in shared]
        return math.exp(sum(map(math.log, speeds)) / len(speeds))

    return within if max_tpot is not None else at_rate if needed is not None else everywhere


def _is_within(cell: Cell, max_tpot: float) -> bool:
    tpot = figures(cell)["tpot_p99_ms"]
    return tpot is not None and tpot <= max_tpot


def batch_limit(curve: Curve, max_tpot: float | None) -> int:
    """The requests to run at once: the fewest that reach `CLOSE` of the most tokens/s, within the limit if possible."""
    allowed = [cell for cell in curve if max_tpot is None or _is_within(cell, max_tpot)] or curve[:1]
    most = max(map(speed_of, allowed))
    return int(next(cell["concurrency"] for cell in allowed if speed_of(cell) >= CLOSE * most))


def place_of(curve: Curve, needed: float) -> float:
    """The concurrency at which a closed loop emits `needed` tokens/s, at most the largest that was measured."""
    if speed_of(curve[0]) >= needed:
        return float(curve[0]["concurrency"])
    for low, high in pairwise(curve):
        if speed_of(low) < needed <= speed_of(high):
            share = (needed - speed_of(low)) / (speed_of(high) - speed_of(low))
            start, end = math.log2(low["concurrency"]), math.log2(high["concurrency"])
            return float(2 ** (start + share * (end - start)))
    return float(curve[-1]["concurrency"])


FIGURES = ("output_tokens_per_second", "tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "acceptance_length")


def figures(cell: Cell) -> dict[str, float | None]:
    """What users see, of a cell of a sweep or of one between two."""
    if "tpot_p50_ms" in cell:
        return {name: cell[name] for name in ("concurrency", *FIGURES)}
    tpot, ttft = cell["time_per_output_token_ms"] or {}, cell["ttft_ms"] or {}
    values = (speed_of(cell), tpot.get("p50"), tpot.get("p99"), ttft.get("p50"), ttft.get("p99"))
    return {"concurrency": cell["concurrency"]} | dict(zip(FIGURES, (*values, cell["acceptance_length"]), strict=True))


def at(curve: Curve, concurrency: float) -> dict[str, float | None]:
    """The figures of a setting at a concurrency, between its neighbours if it was not measured."""
    places = [cell["concurrency"] for cell in curve]
    above = next((index for index, place in enumerate(places) if place >= concurrency), len(places) - 1)
    if places[above] <= concurrency or above == 0:
        return figures(curve[above])
    low, high = figures(curve[above - 1]), figures(curve[above])
    start, end = math.log2(places[above - 1]), math.log2(places[above])
    share = (math.log2(concurrency) - start) / (end - start)
    between = {
        name: None
        if low[name] is None or high[name] is None
        else round((1 - share) * low[name] + share * high[name], 4)  # type: ignore[operator]
        for name in FIGURES
    }
    return {"concurrency": round(concurrency, 2)} | between


def gains_of(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """The saving of the best setting that drafts, by concurrency, where plain decoding was measured too."""
    rows = []
    for concurrency in concurrencies(curves):
        here = {label: cell for label, curve in curves.items() for cell in curve if cell["concurrency"] == concurrency}
        plain = [speed_of(cell) for cell in here.values() if cell["method"] == PLAIN]
        drafted = [speed_of(cell) for cell in here.values() if cell["method"] != PLAIN]
        if plain and drafted:
            rows.append({"concurrency": concurrency, "saving": 1 - plain[0] / max(drafted)})
    return rows


def _row(curves: Mapping[str, Curve], label: str, concurrency: int) -> dict[str, Any]:
    """At one concurrency: the recommended setting, plain decoding, and the fastest."""
    here = {name: cell for name, curve in curves.items() for cell in curve if cell["concurrency"] == concurrency}
    fastest = max(here, key=lambda name: speed_of(here[name]))
    plain = next((speed_of(cell) for cell in here.values() if cell["method"] == PLAIN), None)
    found = figures(here[label]) if label in here else {"concurrency": concurrency} | dict.fromkeys(FIGURES)
    return found | {
        "plain_tokens_per_second": plain,
        "fastest": fastest,
        "fastest_tokens_per_second": speed_of(here[fastest]),
    }
