"""An offline sweep as a JSON document and as tables."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from peagle.bench.cells import PLAIN, Cell, CellResult
from peagle.errors import ConfigError
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

TABLE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""


def document_of(results: Sequence[CellResult], *, categories: Sequence[str] = (), **facts: Any) -> dict[str, Any]:
    """The JSON document of a run: `facts`, then the cells with their speedup over plain decoding.

    Speedup is against plain decoding at the same concurrency, with the weights as they are; None if that was not run.
    `speedup_plain_requests` is the number of requests plain decoding ran there: an anchor may have run fewer.
    `categories` has the category of every prompt; a category's speedup compares the speed of its single requests.
    """
    cells = [result.report() | {"by_category": result.by_category(categories)} for result in results]
    plain = {cell["concurrency"]: cell for cell in cells if cell["method"] == PLAIN and cell["quantize"] is None}
    for cell in cells:
        base = plain.get(cell["concurrency"], {})
        ours, theirs = cell["output_tokens_per_second"], base.get("output_tokens_per_second")
        cell["speedup"] = round(ours / theirs, 3) if ours and theirs else None
        cell["speedup_plain_requests"] = base["num_requests"] if ours and theirs else None
        for name, own in cell["by_category"].items():
            ours = own["tokens_per_second_per_request"]
            theirs = base.get("by_category", {}).get(name, {}).get("tokens_per_second_per_request")
            own["speedup"] = round(ours / theirs, 3) if ours and theirs else None
    return facts | {"cells": cells}


def cell_line(result: CellResult, results: Sequence[CellResult]) -> str:
    """A finished cell in one line, with its speedup if plain decoding is among `results`."""
    cell, speed = result.cell, result.tokens_per_second
    name = f"{cell.label} K=auto" if cell.num_draft_tokens is None else cell.label
    where = f"{name} at concurrency {cell.concurrency}: "
    if result.failure is not None:
        return f"{where}failed, {result.failure}"
    said = [f"{speed or 0:,.1f} tokens/s"]
    plain = Cell(PLAIN, 0, cell.concurrency)
    base = next((each.tokens_per_second for each in results if each.cell == plain), None)
    if base and speed and cell != plain:
        said.append(f"{speed / base:.2f}x plain")
    if result.acceptance is not None:
        said.append(f"acceptance length {result.acceptance.acceptance_length:.2f}")
    return where + ", ".join(said)


def facts_of(
    target: "HFTarget", params: SamplingParams, accelerator: str | None, workload: str, num_prompts: int, **more: Any
) -> dict[str, Any]:
    return more | {
        "workload": workload,
        "num_prompts": num_prompts,
        "target": target.name,
        "dtype": target.precision,
        "device": str(target.device),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "provenance": provenance(accelerator),
    }


def tables(document: dict[str, Any]) -> list[Table]:
    """The sweep; then, if present, acceptance by position, memory bandwidth and failures."""
    cells = document["cells"]
    found = [_sweep_table(document)]
    # One row per method and depth, at its lowest concurrency: acceptance does not depend on the batch.
    drafted = list({cell["label"]: cell for cell in reversed(cells) if cell["per_position"]}.values())[::-1]
    if drafted:
        found.append(position_table((cell["label"], cell["per_position"]) for cell in drafted))
    if (by_category := category_rows(cells)) is not None:
        note = "at the lowest concurrency: acceptance length, tokens/s of one request, its speedup"
        found.append(make_table("by category", *by_category, caption=note))
    if document.get("bandwidth"):
        found.append(_bandwidth_table(document["bandwidth"]))
    if failures := [(c["label"], str(c["concurrency"]), c["failure"]) for c in cells if c["failure"]]:
        found.append(make_table("failed", ("method", "concurrency", "reason"), failures, num_right=0))
    return found


def category_rows(cells: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Columns and rows of a table by category, each label at its lowest concurrency; None with fewer than two."""
    labels = {cell["label"]: cell.get("by_category") or {} for cell in reversed(cells)}
    labels = dict(reversed([(label, own) for label, own in labels.items() if own]))
    names = list(dict.fromkeys(name for own in labels.values() for name in own))
    if len(names) < 2:
        return None
    requests = {name: max(own[name]["num_requests"] for own in labels.values() if name in own) for name in names}
    rows = [[name, str(requests[name]), *(_category(own.get(name)) for own in labels.values())] for name in names]
    return ["category", "requests", *labels], rows


def _category(found: dict[str, Any] | None) -> str:
    """Acceptance length, tokens/s of one request, and speedup where it is not plain decoding's."""
    if found is None:
        return "-"
    length, speed, speedup = (found[key] for key in ("acceptance_length", "tokens_per_second_per_request", "speedup"))
    words = [] if length is None else [f"{length:.2f}"]
    words.append(number(speed, 1))
    return " ".join([*words, f"{speedup:.2f}x"] if speedup is not None and length is not None else words)


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_right: int | None = None, **options: Any
) -> Table:
    """A table whose columns are right-aligned after the first, or `num_right` of them."""
    table = Table(title=title, **options)
    for index, name in enumerate(columns):
        is_right = index > 0 if num_right is None else 0 < index <= num_right
        table.add_column(name, justify="right" if is_right else "left", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table


def position_table(rows: Iterable[tuple[str, Sequence[float]]]) -> Table:
    rows = list(rows)
    depths = range(1, 1 + max(len(rates) for _, rates in rows))
    cells = [(label, *(f"{rate:.3f}" for rate in rates)) for label, rates in rows]
    return make_table("acceptance by position", ("", *map(str, depths)), cells)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _sweep_table(document: dict[str, Any]) -> Table:
    columns = (
        "method",
        "concurrency",
        "requests\n(plain)",
        "output\ntokens/s",
        "at full\nbatch",
        "speedup",
        "TTFT ms\nmean p50 p95",
        "TPOT ms\nmean p50 p95",
        "acceptance\nlength",
        "step ms\nwall",
        "\nverify",
        "\ndraft",
        "\nhost gap",
        "memory\nGiB",
        "differ\n(near ties)",
    )
    rows = []
    for cell in document["cells"]:
        step, memory = cell["step"] or {}, cell["memory_bytes"]
        gap = step.get("host_gap_ms")
        rows.append(
            (
                cell["label"],
                str(cell["concurrency"]),
                _requests(cell),
                "failed" if cell["failure"] else number(cell["output_tokens_per_second"], 1),
                number(cell["steady_tokens_per_second"], 1),
                number(cell["speedup"], 2),
                _spread(cell["ttft_ms"], 1),
                _spread(cell["time_per_output_token_ms"], 2),
                number(cell["acceptance_length"], 2),
                *(number(step.get(f"{part}_ms"), 3) for part in ("wall", "verify", "draft")),
                "-" if gap is None else f"{gap:.3f} ({step['host_gap_share']:.1%})",
                number(None if memory is None else memory / 2**30, 1),
                _differing(cell),
            )
        )
    return make_table(title(document), columns, rows, caption=_caption(document))


def title(document: dict[str, Any]) -> str:
    target = f"{document['target']}, {document['dtype']} on {document['device']}"
    asked = f"{document['workload']}: {document['num_prompts']} prompts, up to {document['max_tokens']} tokens"
    return "; ".join(filter(None, (asked, target, incomplete(document))))


def incomplete(document: Mapping[str, Any]) -> str | None:
    """How much of a run that ended early was measured; None if it is complete."""
    if not document.get("is_interrupted"):
        return None
    planned = document.get("num_planned_cells")
    return "incomplete" + (f": {len(document['cells'])} of {planned} cells" if planned else "")


def _differing(cell: dict[str, Any]) -> str:
    if cell["num_compared"] is None:
        return "-"
    near = number(cell["num_divergences_at_near_ties"])
    return f"{cell['num_divergences']} ({near}) of {cell['num_compared']}"


def _caption(document: dict[str, Any]) -> str | None:
    if not any(cell["num_compared"] for cell in document["cells"]):
        return None
    meaning = "differ: answers that differ from plain decoding at the lowest concurrency"
    limit = max(cell["near_tie"] or 0.0 for cell in document["cells"])
    if not limit:
        return f"{meaning}. The run ended before the near ties among them were counted"
    largest = max(cell["largest_gap"] or 0.0 for cell in document["cells"])
    return (
        f"{meaning}. Near ties: both tokens are within {limit:g} of the target's best logit, which is rounding error. "
        f"Largest gap: {largest:g}"
    )


def _bandwidth_table(bandwidth: dict[str, Any]) -> Table:
    speed = f"{bandwidth['bytes_per_second'] / 1e9:.0f} GB/s measured"
    title = f"memory bandwidth: {speed}, {bandwidth['num_parameters'] / 1e9:.2f} billion parameters"
    rows = [
        (
            row.get("label", "plain"),
            str(row["concurrency"]),
            f"{row['weight_bytes'] / 1e9:.2f}",
            number(row["limit_ms"], 3),
            number(row["step_ms"], 3),
            *(_share(row.get(name)) for name in ("fraction_of_limit", "verify_fraction_of_limit")),
        )
        for row in bandwidth["steps"]
    ]
    columns = ("method", "concurrency", "weights GB", "limit ms", "step ms", "of the limit", "verification alone")
    return make_table(title, columns, rows)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _spread(spread: dict[str, float] | None, digits: int) -> str:
    return "-" if spread is None else " ".join(number(spread[name], digits) for name in ("mean", "p50", "p95"))


def _requests(cell: dict[str, Any]) -> str:
    """Requests of the cell, and of plain decoding if those differ."""
    ours, plain = cell["num_requests"], cell["speedup_plain_requests"]
    return str(ours) if plain in (None, ours) else f"{ours} ({plain})"


def print_document(document: dict[str, Any], as_json: bool, *tables: Table, verdict: str | None = None) -> None:
    """Print the result of a command: one line of JSON, or its tables and what they mean."""
    if as_json:
        print(json.dumps(document))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=max(console.width, TABLE_WIDTH), highlight=False)
    console.print(*tables, sep="\n")
    if verdict is not None:
        console.print(verdict, markup=False, soft_wrap=True)


def check_output(flag: str, path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{flag} {path}: the name must end in {', '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no directory {path.parent}", hint="create it first")
