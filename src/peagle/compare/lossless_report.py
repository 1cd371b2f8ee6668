"""The losslessness report: a JSON document, and the same as Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

from peagle.compare.lossless import CONTROL_TEMPERATURE, FALSE_ALARM, Findings
from peagle.compare.sampling_test import LENGTH

SHOWN_DIFFERENCES = 20
SHOWN_CELLS = 12


def document_of(findings: Findings, **facts: Any) -> dict[str, Any]:
    """The JSON document: the verdict, `facts` about the run, and every number."""
    acceptance = findings.acceptance
    return {
        "lossless": findings.is_lossless,
        **facts,
        "acceptance_length": round(acceptance.acceptance_length, 4),
        "num_drafts": acceptance.num_drafts,
        "comparisons": [each.report() for each in findings.comparisons],
        "distributions": [each.report() for each in findings.distributions],
    }


def markdown_of(document: dict[str, Any], decode: Callable[[Sequence[int]], str]) -> str:
    """The Markdown report; `decode` turns token ids into text."""
    lines = [f"# Losslessness of {document['drafter']['method']} decoding for {document['target']['name']}", ""]
    lines += _verdict(document)
    lines += ["## Token by token", ""]
    lines += _comparison_table(document["comparisons"])
    lines += _differences(document["comparisons"])
    lines += ["## Sampling", ""]
    lines += _distributions(document, decode)
    lines += _provenance(document)
    return "\n".join(lines) + "\n"


def _verdict(document: dict[str, Any]) -> list[str]:
    settings, target = document["settings"], document["target"]
    if document["lossless"]:
        verdict = "**LOSSLESS.** Every comparison below holds."
    elif not document["num_drafts"] or document["acceptance_length"] <= 1:
        verdict = "**NOT SHOWN.** No draft token was accepted, so nothing was tested."
    else:
        verdict = "**NOT LOSSLESS.** At least one comparison below fails."
    rule = (
        "In float32 no greedy token may differ, and a sampled one only if rounding moves it past its random number."
        if target["dtype"] == "float32"
        else f"In {target['dtype'].partition(',')[0]} answers may diverge only at near ties of the target."
    )
    return [
        f"{verdict} {rule}",
        "",
        f"{document['num_prompts']} prompts, up to {settings['max_tokens']} tokens each, "
        f"{_drafts(settings)}. The engine's acceptance length was "
        f"{document['acceptance_length']:.2f} over {document['num_drafts']} drafts.",
        "",
    ]


def _drafts(settings: dict[str, Any]) -> str:
    drafts = f"{settings['num_draft_tokens']} draft tokens per step"
    if settings["tree_nodes"] is not None:
        drafts = f"drafts as trees of {settings['tree_nodes']} nodes, up to {settings['num_draft_tokens']} deep"
    return drafts if settings["verify_tokens"] == 0 else f"{drafts}, of which each pass verifies what pays"


def _comparison_table(comparisons: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            each["name"],
            f"{each['num_identical']} of {each['num_answers']}",
            str(each["num_tokens"]),
            f"{len(each['differences'])} ({each['num_near_ties']})",
            "-" if each["largest_gap"] is None else f"{each['largest_gap']:.2g}",
            "-" if each["limit"] is None else f"{each['limit']:.2g}",
            _holds(each),
        )
        for each in comparisons
    ]
    heads = ("compared", "identical answers", "tokens", "diverge (at near ties)", "largest gap", "allowed gap", "")
    return [*_table(heads, rows), ""]


def _differences(comparisons: list[dict[str, Any]]) -> list[str]:
    found = [(each["name"], difference) for each in comparisons for difference in each["differences"]]
    if not found:
        return []
    rows = [
        (
            name,
            str(each["prompt"] + 1) + ("" if each["seed"] is None else f", seed {each['seed']}"),
            str(each["token"]),
            f"{each['gap']:.3g}",
            "near tie" if each["is_near_tie"] else "**difference**",
        )
        for name, each in sorted(found, key=lambda pair: -pair[1]["gap"])[:SHOWN_DIFFERENCES]
    ]
    more = [f"{len(found) - len(rows)} more are in the JSON document.", ""] if len(found) > len(rows) else []
    explanation = (
        "The gap of a greedy answer is the logit gap from the target's best token to the worse of the two. The gap of "
        "a sampled answer is the distance from its random number to the interval of the other token. Widest first."
    )
    return [explanation, "", *_table(("compared", "prompt", "token", "gap", ""), rows), "", *more]


def _distributions(document: dict[str, Any], decode: Callable[[Sequence[int]], str]) -> list[str]:
    settings, found = document["settings"], document["distributions"]
    rows = [
        (
            str(each["prompt"] + 1),
            str(each["num_samples"]),
            str(each["num_cells"]),
            f"{each['statistic']:.1f}",
            f"{each['p_value']:.3g}",
            f"{each['control_p_value']:.1g}",
            _holds(each),
        )
        for each in found
    ]
    heads = ("prompt", "answers drawn", "cells", "chi-square", "p", "p of the control", "")
    lines = [
        f"Openings of three tokens at temperature {settings['temperature']:g}, one seed each, against the target's "
        "exact probabilities (Pearson's chi-square test). A test fails below "
        f"p = {FALSE_ALARM / max(1, settings['num_sampled_prompts']):g}: lossless decoding fails one report in "
        f"{1 / FALSE_ALARM:,.0f} by chance. The control compares the same counts with temperature "
        f"{settings['temperature'] * CONTROL_TEMPERATURE:g}: a small p shows that the test finds faults.",
        "",
        *_table(heads, rows),
        "",
    ]
    for each in found:
        cells = list(zip(each["openings"], each["observed"], each["expected"], strict=False))[:SHOWN_CELLS]
        shown = [
            (_code(decode(opening)) + (" ..." if len(opening) < LENGTH else ""), str(ours), f"{theirs:.1f}")
            for opening, ours, theirs in cells
        ]
        rest = (sum(each["observed"][len(cells) :]), sum(each["expected"][len(cells) :]))
        shown.append(("all others", str(rest[0]), f"{rest[1]:.1f}"))
        lines += [f"Prompt {each['prompt'] + 1}:", "", *_table(("opening", "drawn", "expected"), shown), ""]
    return lines


def _provenance(document: dict[str, Any]) -> list[str]:
    target, drafter, source = document["target"], document["drafter"], document["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items() if version)
    hardware = source["hardware"]
    rows = [
        ("command", _code(source["command"])),
        ("made", source["created"]),
        ("code", source["commit"] or "an installed package"),
        ("versions", f"Python {source['python']}, {versions}"),
        ("hardware", hardware["accelerator"] or f"{hardware['processor']}, {hardware['num_cores']} cores"),
        ("precision", f"{target['dtype']} on {target['device']}"),
        ("target", f"{target['name']}, weights {_code(target['weights'])}"),
        ("tokenizer, chat template", f"{_code(target['tokenizer'])}, {_code(target['chat_template'])}"),
        ("drafter", f"{drafter['name']}, tensors {_code(drafter['tensors'])}"),
        ("prompts", f"{document['prompts']}, {_code(document['prompts_hash'])}"),
    ]
    return ["## Provenance", "", *_table(("", ""), rows)]


def _holds(part: dict[str, Any]) -> str:
    if not part["holds"]:
        return "**FAILS**"
    return "holds" if part.get("is_sharp", True) else "holds, but the test is weak"


def _code(text: str) -> str:
    """Text as Markdown code for a table cell."""
    plain = repr(text)[1:-1] if any(not char.isprintable() for char in text) else text
    plain = plain.replace("|", "\\|")
    fence = "``" if "`" in plain else "`"
    return f"{fence} {plain} {fence}" if fence == "``" or plain != plain.strip() or not plain else f"`{plain}`"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
