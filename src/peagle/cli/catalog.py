"""List the models known by name: target, drafters, draft tokens, memory, hardware, license.

With a name: everything about one, and how to serve it. A TOML file adds models of your own (PEAGLE_CATALOG, or
catalog.toml in ~/.config/peagle); docs/guides/models.md has its form.
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from peagle.cli.arguments import parse
from peagle.errors import ConfigError, nearest
from peagle.targets.catalog import CatalogDrafter, CatalogEntry, entries, find, user_file

TABLE_WIDTH = 180
"""A table that is read by a program or sent to a file is not broken at a terminal's usual 80 columns."""


@dataclass(frozen=True)
class Arguments:
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """a catalog name, or the Hugging Face id of its target"""
    json: bool = False
    """print one JSON document instead of a table"""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "catalog", argv)
    known = entries()
    document: dict[str, Any]
    if arguments.name is None:
        document = {"entries": [describe(entry) for entry in known], "file": str(user_file() or "") or None}
        shown = overview(known)
    else:
        entry = find(arguments.name)
        if entry is None:
            raise ConfigError(
                f"the catalog has no {arguments.name!r}", hint=nearest(arguments.name, [each.name for each in known])
            )
        document, shown = describe(entry), details(entry)
    if arguments.json:
        print(json.dumps(document))
    else:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=TABLE_WIDTH, highlight=False)
        console.print(shown)
    return 0


def describe(entry: CatalogEntry) -> dict[str, Any]:
    """An entry as JSON: what the catalog says, and what follows from it."""
    drafters = [
        asdict(each) | {"is_public": each.is_public, "context": context(entry, each)} for each in offered(entry)
    ]
    usual = entry.drafter()
    memory = {"native_gb": round(entry.native_gb(usual), 1), "vllm_gb": round(entry.vllm_gb(usual), 1)}
    return asdict(entry) | memory | {"drafters": drafters, "serve": serve_commands(entry)}


def offered(entry: CatalogEntry) -> tuple[CatalogDrafter, ...]:
    """Its drafters without those that this installation was made without."""
    return tuple(each for each in entry.drafters if each.where != "package" or each.is_here)


def overview(known: tuple[CatalogEntry, ...]) -> Table:
    table = Table(title="catalog: `peagle serve NAME`, `peagle catalog NAME` for all about one", title_justify="left")
    for column in ("name, target, license", "drafter", "K", "weights", "hardware, engines"):
        table.add_column(column, justify="right" if column == "K" else "left", overflow="fold")
    for entry in known:
        for index, drafter in enumerate(offered(entry)):
            table.add_row(
                "" if index else f"{entry.name}\n{entry.target}\n{entry.license or 'license unknown'}",
                f"{source(drafter)}\n{context(entry, drafter)}",
                "?" if drafter.num_draft_tokens is None else str(drafter.num_draft_tokens),
                f"{entry.native_gb(drafter):.1f} GB native\n{entry.vllm_gb(drafter):.1f} GB vLLM",
                "" if index else "\n".join(filter(None, (entry.hardware, entry.instance, ", ".join(entry.engines)))),
            )
        table.add_section()
    return table


def details(entry: CatalogEntry) -> Table:
    table = Table(title=entry.title or entry.name, title_justify="left", show_header=False)
    rows = {
        "name": entry.name,
        "target": entry.target + (f", for vLLM {entry.quantized_target}" if entry.quantized_target else ""),
        "architecture": entry.architecture or "unknown",
        "parameters": f"{entry.num_parameters / 1e9:.1f} billion, stored as {entry.weights}",
        "longest text": f"{entry.max_length} tokens" if entry.max_length else "unknown",
        "license": entry.license or "unknown",
        "memory": memory(entry),
        "hardware": entry.hardware or "unknown",
        "SageMaker": f"{entry.instance} or larger" if entry.instance else "any instance",
        "note": entry.note,
    }
    for drafter in offered(entry):
        rows[f"drafter {drafter.variant}"] = drafter_text(entry, drafter)
    rows |= {f"serve ({engine})": command for engine, command in serve_commands(entry).items()}
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    return table


def memory(entry: CatalogEntry) -> str:
    usual = entry.drafter()
    head = "" if usual.num_parameters is None else ", drafter included"
    return (
        f"{entry.native_gb(usual):.1f} GB natively (bfloat16), {entry.vllm_gb(usual):.1f} GB with vLLM{head}; "
        "the texts in progress come on top"
    )


def drafter_text(entry: CatalogEntry, drafter: CatalogDrafter) -> str:
    parts = [source(drafter), drafter.method, context(entry, drafter)]
    if drafter.num_draft_tokens is not None:
        parts.append(f"{drafter.num_draft_tokens} draft tokens advised")
    if drafter.trained_draft_tokens is not None:
        parts.append(f"trained for {drafter.trained_draft_tokens}")
    if drafter.license is not None:
        parts.append(drafter.license)
    return "; ".join([*parts, *([drafter.note] if drafter.note else [])])


def source(drafter: CatalogDrafter) -> str:
    if not drafter.is_public:
        return "not public (JumpStart only)"
    return f"ships with peagle ({drafter.source})" if drafter.where == "package" else str(drafter.source)


def context(entry: CatalogEntry, drafter: CatalogDrafter) -> str:
    """The lengths of text that a drafter is chosen for."""
    if drafter.method != "p-eagle":
        return "by name"
    higher = [each.min_length for each in entry.drafters if each.min_length > drafter.min_length]
    if drafter.min_length:
        return f"above {drafter.min_length} tokens"
    return f"up to {min(higher)} tokens" if higher else "any length"


def serve_commands(entry: CatalogEntry) -> dict[str, str]:
    """One command for each engine; plain decoding where nobody can have the drafter."""
    plain = "" if entry.drafter().is_public else " --num-draft-tokens 0"
    flags = {"native": "", "vllm": " --engine vllm"}
    return {engine: f"peagle serve {entry.name}{flags[engine]}{plain}" for engine in entry.engines}
