"""Two documents of `peagle bench serve`, of a server with drafts and of one without, as one that compares them."""

from collections.abc import Mapping, Sequence
from typing import Any

DRAFTED, PLAIN = "with drafts", "plain"
"""`label` of the loads of a joined document."""
SAME = ("model_id", "workload", "max_tokens", "temperature")
LOAD = ("max_concurrency", "request_rate")
Document = Mapping[str, Any]


def paired(documents: Sequence[Document]) -> list[Document]:
    """The documents, the only plain one of a workload joined with the only one that was drafted."""
    found: list[Document] = []
    for document in documents:
        others = [each for each in documents if _are_alike(document, each)]
        if len(others) != 2 or _is_drafted(others[0]) == _is_drafted(others[1]):
            found.append(document)
        elif document is others[0]:
            found.append(joined(*sorted(others, key=_is_drafted)))
    return found


def _are_alike(one: Document, other: Document) -> bool:
    return "results" in one and "results" in other and all(one.get(key) == other.get(key) for key in SAME)


def _is_drafted(document: Document) -> bool:
    return any(row.get("spec_decode_acceptance_length") for row in document["results"])


def joined(plain: Document, drafted: Document) -> dict[str, Any]:
    """One document with the loads of both, each with its `label`; `speedup` is over plain decoding at the same load."""
    speeds = {_load(row): row["output_throughput"] for row in plain["results"]}
    rows = [row | {"label": PLAIN, "speedup": None} for row in plain["results"]]
    for row in drafted["results"]:
        ours, theirs = row["output_throughput"], speeds.get(_load(row))
        rows.append(row | {"label": DRAFTED, "speedup": round(ours / theirs, 3) if ours and theirs else None})
    return {**drafted, "results": rows, "cost": None, "parts": [plain, drafted]}


def _load(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in LOAD)
