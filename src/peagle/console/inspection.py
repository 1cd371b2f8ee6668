"""The tables and examples of `peagle data inspect`."""

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peagle.bench.report import make_table

BAR_WIDTH = 40
TRAINED_STYLE, READ_STYLE = "bold green", "dim"


def show(document: dict[str, Any], console: Console) -> None:
    """Print an inspection report. Without colors, brackets mark the trained part of examples."""
    console.print(make_table(document["path"], ("measure", "value"), _fact_rows(document).items()))
    spans = [(span["from"], span["below"] - 1, span["count"]) for span in document["length_histogram"]]
    rows = [(str(first) if first == last else f"{first} to {last}", count) for first, last, count in spans]
    console.print(_bars("conversation length in tokens", rows))
    if document["top_tokens"]:
        rows = [(repr(token["text"]), token["count"]) for token in document["top_tokens"]]
        console.print(_bars("most frequent trained tokens", rows))
    for number, pieces in zip(document["example_rows"], document["examples"], strict=True):
        console.print(Panel(_example(pieces, console.is_terminal), title=f"row {number}", title_align="left"))
    if document["examples"]:
        legend = "bold green" if console.is_terminal else "between [[ and ]]"
        console.print(f"trained on: {legend}")


def _fact_rows(document: dict[str, Any]) -> dict[str, str]:
    rows: dict[str, str] = {}
    if "kind" in document:
        rows["written by"] = f"{document['kind']}, target {document['target']['name']}"
        state = "complete" if document["is_complete"] else "unfinished: rerun the command to resume"
        rows["shards"] = f"{document['num_shards']}, {state}"
    rows |= {
        "conversations": f"{document['num_conversations']:,}",
        "tokens": f"{document['num_tokens']:,}",
        "trained tokens": f"{document['num_trained_tokens']:,} ({document['trained_share']:.1%})",
        "distinct trained tokens": f"{document['num_distinct_trained_tokens']:,}",
    }
    for name, label in (("lengths", "length"), ("trained_lengths", "trained tokens per conversation")):
        spread = document[name]
        rows[f"{label}: min / median / mean / 95% / max"] = (
            f"{spread['min']} / {spread['median']:g} / {spread['mean']:g} / {spread['p95']:g} / {spread['max']}"
        )
    for size, share in document["coverage"].items():
        if share < 1:
            rows[f"covered by the {int(size):,} most frequent tokens"] = f"{share:.2%}"
    if "temperatures" in document:
        pairs = document["temperatures"].items()
        rows["by temperature"] = ", ".join(f"{temperature}: {number:,}" for temperature, number in pairs)
        for kind, found in document["kinds"].items():
            words = (f"{found[name]:,}" for name in ("num_conversations", "num_tokens", "num_trained_tokens"))
            rows[f"{kind}: conversations / tokens / trained"] = f"{' / '.join(words)} ({found['share']:.1%})"
        rows |= {f"dropped, {reason}": f"{number:,}" for reason, number in document["dropped"].items()}
    if document["num_without_answer"]:
        rows["without an answer"] = f"{document['num_without_answer']:,}"
    return rows


def _bars(title: str, rows: list[tuple[str, int]]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    most = max(count for _, count in rows)
    for label, count in rows:
        table.add_row(Text(label), f"{count:,}", "\u2588" * -(-count * BAR_WIDTH // most))
    return table


def _example(pieces: list[dict[str, Any]], is_colored: bool) -> Text:
    text = Text()
    for piece in pieces:
        words = piece["text"]
        if piece["is_trained"]:
            text.append(words if is_colored else f"[[{words}]]", style=TRAINED_STYLE)
        else:
            text.append(words, style=READ_STYLE)
    return text
