"""A report from the JSON documents of `peagle bench`, `bench serve`, `tune`, `lossless` and `eval`."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.bench.plot import check_plot_library
from peagle.bench.report import check_output
from peagle.bench.report import number as shown
from peagle.cost import MeasuredCost
from peagle.errors import ConfigError
from peagle.report.html import html_of
from peagle.report.load import load_sections, load_summary
from peagle.report.markdown import markdown_of
from peagle.report.parts import Report, Section, Table
from peagle.report.sweep import acceptance_section, length_tables, sweep_sections, sweep_summary

SUFFIXES = (".html", ".md")
KINDS = {"cells": "bench", "results": "bench serve", "lossless": "lossless", "per_position": "eval"}
"""The key by which a document is known, and the command that writes it. `tune` writes what `bench` does, and more."""
Document = Mapping[str, Any]


def check_report(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    check_output(flag, path, SUFFIXES)
    if path.suffix.lower() == ".html":
        check_plot_library(flag)


def read_document(path: Path) -> dict[str, Any]:
    """The JSON document in a file: the whole of it, or its last line, as --json prints it after other output."""
    try:
        text = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    for candidate in (text, text.rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict) and kind_of(found) is not None:
            return found
    raise ConfigError(
        f"{path} is not a result of peagle",
        hint="pass what `--json` of bench, bench serve, tune, lossless or eval prints",
    )


def kind_of(document: Document) -> str | None:
    return next((kind for key, kind in KINDS.items() if key in document), None)


def write_report(documents: Sequence[Document], path: Path) -> None:
    report = report_of(documents)
    path.write_text(html_of(report) if path.suffix.lower() == ".html" else markdown_of(report), encoding="utf-8")


def priced(documents: Sequence[Document], cost: MeasuredCost) -> Sequence[Document]:
    """The documents, with the cost of what was measured if there is a price; it takes the place of an earlier one."""
    price = cost.price(cost.instance)
    if price is None:
        return documents
    found = []
    for document in documents:
        if "cells" in document:
            price.check(document["provenance"]["hardware"]["accelerator"])
        found.append(cost.added_to(dict(document)) if "cells" in document or "results" in document else document)
    if not any(document.get("cost") for document in found):
        raise ConfigError(
            "no result has a speed to compute a cost from", hint="pass those of bench, bench serve or tune"
        )
    return found


def report_of(documents: Sequence[Document]) -> Report:
    """One report. Its summary is that of the first document with figures; a proof of losslessness adds a sentence."""
    by_kind: dict[str, list[Document]] = {kind: [] for kind in KINDS.values()}
    for document in documents:
        by_kind[kind_of(document) or ""].append(document)
    sweeps = [each for each in by_kind["bench"] if any(cell["output_tokens_per_second"] for cell in each["cells"])]
    loads = [each for each in by_kind["bench serve"] if any(row["output_throughput"] for row in each["results"])]
    if not (sweeps or loads or by_kind["lossless"] or by_kind["eval"]):
        raise ConfigError("nothing was measured, so there is nothing to report", hint="run the benchmark again")
    summaries = [*map(sweep_summary, sweeps), *map(load_summary, loads), *map(_proof_summary, by_kind["lossless"])]
    said = summaries[0] if summaries else _eval_summary(by_kind["eval"])
    if by_kind["lossless"] and (sweeps or loads):
        said = [said[0], _proof_summary(by_kind["lossless"][0])[0], *said[2:]]
    sections: list[Section] = []
    for found, make in ((sweeps, sweep_sections), (loads, load_sections)):
        for document in found:
            own = make(document)
            sections += [_named(section, document) for section in own] if len(found) > 1 else own
    sections += [_proof(document) for document in by_kind["lossless"]]
    if by_kind["eval"]:
        sections.append(_evaluations(by_kind["eval"]))
    sections += [_provenance(part) for document in documents for part in document.get("parts") or [document]]
    return Report(_title(documents[0]), " ".join(said[:3]), _distinct(sections))


def _distinct(sections: Sequence[Section]) -> list[Section]:
    """The sections, each with a title of its own: a screen reader lists them."""
    seen: Counter[str] = Counter()
    found = []
    for section in sections:
        seen[section.title] += 1
        number = seen[section.title]
        found.append(section if number == 1 else replace(section, title=f"{section.title} ({number})"))
    return found


def _named(section: Section, document: Document) -> Section:
    return replace(section, title=f"{section.title}: {document['workload']}")


def _title(document: Document) -> str:
    target = document.get("model_id") or document["target"]
    name = target["name"] if isinstance(target, dict) else target
    what = {"lossless": "Losslessness", "eval": "Acceptance"}.get(kind_of(document) or "", "Speculative decoding")
    on = document.get("workload")
    return f"{what} of {name}" + (f" on {on}" if on else "")


def _proof_summary(document: Document) -> list[str]:
    verdict = "is lossless" if document["lossless"] else "was not shown to be lossless"
    checks = [*document["comparisons"], *document["distributions"]]
    held = sum(each["holds"] for each in checks)
    return [
        f"Decoding with drafts {verdict}: {held} of {len(checks)} comparisons with the target's own answers hold.",
        f"They cover {document['num_prompts']} prompts, greedy, seeded and sampled.",
        f"It emitted {document['acceptance_length']:.2f} tokens per step on average.",
    ]


def _proof(document: Document) -> Section:
    rows = [
        (
            each["name"],
            f"{each['num_identical']} of {each['num_answers']}",
            shown(each["num_tokens"]),
            f"{len(each['differences'])} ({each['num_near_ties']})",
            "-" if each["largest_gap"] is None else f"{each['largest_gap']:.2g}",
            "holds" if each["holds"] else "FAILS",
        )
        for each in document["comparisons"]
    ]
    heads = ("compared", "identical answers", "tokens", "differ (near ties)", "largest gap", "verdict")
    drawn = [
        (
            f"prompt {each['prompt'] + 1}",
            shown(each["num_samples"]),
            f"{each['statistic']:.1f}",
            f"{each['p_value']:.3g}",
            f"{each['control_p_value']:.1g}",
            "holds" if each["holds"] else "FAILS",
        )
        for each in document["distributions"]
    ]
    tested = ("sampled from", "answers drawn", "chi-square", "p", "p of the control", "verdict")
    tables = [Table("Token by token", heads, rows), Table("Sampled distributions", tested, drawn)]
    return Section("Losslessness", [_proof_summary(document)[0]], (), [each for each in tables if each.rows])


def _eval_summary(documents: Sequence[Document]) -> list[str]:
    lengths = ", ".join(f"{each['acceptance_length']:.2f} on {each['workload']}" for each in documents)
    first = documents[0]
    return [
        f"The {first['method']} drafter of {first['target']} reaches an acceptance length of {lengths}.",
        f"{sum(each['num_drafts'] for each in documents):,} drafts were verified.",
        f"On {first['workload']}, {first['verdict'].partition(';')[0]}.",
    ]


def _evaluations(documents: Sequence[Document]) -> Section:
    rows = [
        (each["workload"], shown(each["num_tokens"]), shown(each["num_drafts"]), f"{each['acceptance_length']:.3f}")
        for each in documents
    ]
    table = Table("Acceptance length by workload", ("workload", "answer tokens", "drafts", "acceptance length"), rows)
    by_length = {each["workload"]: each.get("by_length") for each in documents}
    tables = [table, *length_tables("workload", by_length)]
    return acceptance_section({each["workload"]: each["per_position"] for each in documents}, tables)


def _provenance(document: Document) -> Section:
    source = document["provenance"]
    hardware = source["hardware"]
    target = document.get("model_id") or document["target"]
    facts = {
        "target": target["name"] if isinstance(target, dict) else target,
        "drafters": ", ".join(f"{name} ({method})" for method, name in (document.get("drafters") or {}).items()),
        "precision": " on ".join(filter(None, (document.get("dtype"), document.get("device")))),
        "prompts": document.get("workload") or document.get("prompts"),
        "sampling": None if "temperature" not in document else f"temperature {document['temperature']:g}",
        "accelerator": hardware["accelerator"],
        "processor": f"{hardware['processor']}, {hardware['num_cores']} cores",
        "measured": source["created"],
        "code": source["commit"] or "an installed package",
        "versions": ", ".join(
            [f"Python {source['python']}", *(f"{name} {each}" for name, each in source["versions"].items() if each)]
        ),
    }
    rows = [(name, str(value)) for name, value in facts.items() if value]
    table = Table("What was measured, and where", ("fact", "value"), rows, num_left=2)
    kind = "tune" if document.get("tuned") else kind_of(document)
    return Section(f"How to reproduce: {kind}", (), (), [table], code=source["command"])
