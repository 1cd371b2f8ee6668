"""A recommendation as a table and as sentences."""

from typing import Any

from rich.table import Table

from peagle.bench.report import make_table, number


def table_of(tuned: dict[str, Any]) -> Table:
    columns = (
        "concurrency",
        "tokens/s",
        *(["served"] if tuned.get("served") else []),
        "plain",
        "fastest",
        "TPOT ms\np50 p99",
        "TTFT ms\np50 p99",
        "acceptance\nlength",
    )
    rows = [
        (
            str(row["concurrency"]),
            number(row["output_tokens_per_second"], 1),
            *([number(row["served_tokens_per_second"], 1)] if tuned.get("served") else []),
            number(row["plain_tokens_per_second"], 1),
            f"{row['fastest_tokens_per_second']:,.1f} ({row['fastest']})",
            f"{number(row['tpot_p50_ms'], 2)} {number(row['tpot_p99_ms'], 2)}",
            f"{number(row['ttft_p50_ms'], 1)} {number(row['ttft_p99_ms'], 1)}",
            number(row["acceptance_length"], 2),
        )
        for row in tuned["by_concurrency"]
    ]
    return make_table(f"recommended: {tuned['label']}", columns, rows)


def lines_of(tuned: dict[str, Any]) -> list[str]:
    """The recommendation, what to expect, and where drafting stops paying."""
    depth, expected = tuned["num_draft_tokens"], tuned["expected"]
    drafts = "the engine chooses the drafts" if depth is None else f"--num-draft-tokens {depth}"
    if depth:
        drafts += ", of which the engine verifies those that pay"
    form = "" if tuned["quantize"] is None else f", --quantize {tuned['quantize']}"
    said = [f"recommended: {tuned['label']} ({drafts}), --max-batch {tuned['max_batch']}{form}."]
    if form:
        said.append("Answers are then those of the quantized model, not of the target as it is.")
    where = "as served" if tuned.get("served") else "by the engine alone, which is faster than a server"
    said.append(
        f"Expect {expected['output_tokens_per_second']:,.1f} tokens/s at concurrency {expected['concurrency']:g}: "
        f"{number(expected['tpot_p50_ms'], 2)} ms per token (p99 {number(expected['tpot_p99_ms'], 2)}), "
        f"first token after {number(expected['ttft_p50_ms'], 1)} ms (p99 {number(expected['ttft_p99_ms'], 1)}), "
        f"{where}."
    )
    if tuned["keeps_up"] is False:
        needed = tuned["needed_tokens_per_second"]
        said.append(f"{tuned['request_rate']:g} requests/s need {needed:,.1f} tokens/s: this machine does not keep up.")
    if tuned["is_within_limit"] is False:
        said.append(f"No measured setting stays within {tuned['max_tpot_ms']:g} ms per token (p99).")
    stops = tuned["stops_paying_at_concurrency"]
    if stops is not None:
        said.append(f"Drafting stops paying at about {stops:.3g} concurrent requests.")
    if tuned["vllm"] is not None:
        depth = tuned["vllm"]["num_draft_tokens"]
        said.append(f"For vLLM: --num-draft-tokens {depth} -- --max-num-seqs {tuned['max_batch']}.")
    return said
