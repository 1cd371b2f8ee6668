"""The catalog as tables and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from peagle.targets.catalog import CatalogDrafter, CatalogEntry


def describe(entry: CatalogEntry) -> dict[str, Any]:
    """An entry as JSON."""
    drafters = [
        asdict(each) | {"is_public": each.is_public, "context": context(entry, each)} for each in offered(entry)
    ]
    usual = entry.drafter()
    memory = {"native_gb": round(entry.native_gb(usual), 1), "vllm_gb": round(entry.vllm_gb(usual), 1)}
    return asdict(entry) | memory | {"drafters": drafters, "serve": serve_commands(entry)}


def offered(entry: CatalogEntry) -> tuple[CatalogDrafter, ...]:
    """Its drafters, without packaged ones that this installation lacks."""
    return tuple(each for each in entry.drafters if each.where != "package" or each.is_here)


def overview(known: tuple[CatalogEntry, ...]) -> Table:
    table = Table(
        title="catalog: `peagle serve NAME` serves one, `peagle catalog NAME` shows its details", title_justify="left"
    )
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
    usual = entry.drafter()
    extra = "" if usual.num_parameters is None else ", including the drafter"
    form = f"{entry.weights} kept, on a GPU" if entry.keeps_few_bits else "bfloat16"
    memory = f"{entry.native_gb(usual):.1f} GB native ({form}), {entry.vllm_gb(usual):.1f} GB with vLLM{extra}"
    rows = {
        "name": entry.name,
        "target": entry.target + (f", for vLLM {entry.quantized_target}" if entry.quantized_target else ""),
        "architecture": entry.architecture or "unknown",
        "parameters": f"{entry.num_parameters / 1e9:.1f} billion, stored as {entry.weights}",
        "context": f"{entry.max_length} tokens" if entry.max_length else "unknown",
        "license": entry.license or "unknown",
        "memory": f"{memory}; plus the KV cache",
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


def drafter_text(entry: CatalogEntry, drafter: CatalogDrafter) -> str:
    parts = [source(drafter), drafter.method, context(entry, drafter)]
    if drafter.num_draft_tokens is not None:
        parts.append(f"{drafter.num_draft_tokens} draft tokens recommended")
    if drafter.trained_draft_tokens is not None:
        parts.append(f"trained for {drafter.trained_draft_tokens}")
    if drafter.acceptance_length is not None:
        parts.append(f"acceptance length {drafter.acceptance_length:.2f} published ({drafter.acceptance_source})")
    if drafter.license is not None:
        parts.append(drafter.license)
    return "; ".join([*parts, *([drafter.note] if drafter.note else [])])


def source(drafter: CatalogDrafter) -> str:
    if not drafter.is_public:
        return "not public (JumpStart only)"
    return f"ships with peagle ({drafter.source})" if drafter.where == "package" else str(drafter.source)


def context(entry: CatalogEntry, drafter: CatalogDrafter) -> str:
    """The context lengths that a drafter is chosen for."""
    if drafter.method != "p-eagle":
        return "by name"
    higher = [each.min_length for each in entry.drafters if each.min_length > drafter.min_length]
    if drafter.min_length:
        return f"above {drafter.min_length} tokens"
    return f"up to {min(higher)} tokens" if higher else "any length"


def serve_commands(entry: CatalogEntry) -> dict[str, str]:
    """One command per engine; without speculation if the drafter is not public."""
    plain = "" if entry.drafter().is_public else " --num-draft-tokens 0"
    flags = {"native": "", "vllm": " --engine vllm"}
    return {engine: f"peagle serve {entry.name}{flags[engine]}{plain}" for engine in entry.engines}
