"""What a measurement means: whether drafting pays, and which setting to use."""

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.bench.cells import PLAIN

MIN_SPEED_UP = 1.02
"""A smaller gain is not worth the drafter's memory, and may be noise."""
KEPT = 0.95
"""Share of the accepted tokens that a shorter draft must keep to be recommended."""
MIN_LENGTH = 1.3
"""A rule of thumb, not a measurement: below this acceptance length the verdict is that drafting hardly pays."""


def shortest_draft(per_position: Sequence[float]) -> int:
    """The fewest draft tokens per step that keep `KEPT` of the accepted tokens; 0 if none is accepted.

    >>> shortest_draft([0.6, 0.3, 0.1, 0.01, 0.0])
    3
    """
    total, kept = sum(per_position), 0.0
    for depth, share in enumerate(per_position, start=1):
        kept += share
        if total and kept >= KEPT * total:
            return depth
    return 0


def acceptance_verdict(per_position: Sequence[float], num_drafts: int) -> str:
    """One sentence on whether drafts are accepted often enough, and one on the number of draft tokens."""
    if not num_drafts:
        return "nothing was drafted: use more or longer prompts"
    length, depth = 1 + sum(per_position), shortest_draft(per_position)
    pays_if = f"it pays only if a speculative step takes less than {length:.2f} times a plain one"
    if length < MIN_LENGTH:
        return (
            f"drafting hardly pays: {pays_if}; `peagle bench` measures that. Train the drafter longer, or on "
            "prompts like these (`peagle train --from`)"
        )
    return (
        f"drafting can pay: {pays_if}; `peagle bench` measures that. Let the engine choose the drafts (omit "
        f"--num-draft-tokens); a chain of {depth} keeps {KEPT:.0%} of the accepted tokens"
    )


def best_by_concurrency(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fastest cell that drafts at each concurrency where plain decoding was measured too."""
    keys = ("concurrency", "method", "num_draft_tokens", "label", "speedup")
    own = [cell for cell in cells if cell.get("quantize") is None]  # rounded weights are faster for another reason
    drafted = [cell for cell in own if cell["speedup"] is not None and cell["per_position"] is not None]
    best = {}
    for cell in sorted((cell for cell in drafted if cell["method"] != PLAIN), key=lambda cell: cell["speedup"]):
        best[cell["concurrency"]] = {key: cell[key] for key in keys}
    return [best[concurrency] for concurrency in sorted(best)]


def sweep_verdict(cells: Sequence[Mapping[str, Any]]) -> str | None:
    """Where drafting pays and the setting that is fastest there; None if nothing was drafted."""
    best = best_by_concurrency(cells)
    if not best:
        was_drafted = any(cell["per_position"] is not None and cell["method"] != PLAIN for cell in cells)
        return "add none to --methods to see whether drafting pays" if was_drafted else None
    speeds = ", ".join(f"{each['speedup']:.2f}x at concurrency {each['concurrency']}" for each in best)
    paying = [each for each in best if each["speedup"] >= MIN_SPEED_UP]
    if not paying:
        return f"drafting does not pay here: {speeds}. Use --num-draft-tokens 0"
    first = max(paying, key=lambda each: each["speedup"])
    if first["num_draft_tokens"] is None:
        setting = "leave --num-draft-tokens unset"
    else:
        setting = f"use --num-draft-tokens {first['num_draft_tokens']}"
    where = "" if paying == best else f" at concurrency {', '.join(str(each['concurrency']) for each in paying)}"
    return f"drafting pays{where}: {speeds}. With {first['label']} it is fastest: {setting}"
