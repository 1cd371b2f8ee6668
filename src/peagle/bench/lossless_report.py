"""The losslessness report: one document, and the same as Markdown for people."""

from collections.abc import Callable, Sequence
from typing import Any

from peagle.bench.lossless import CONTROL_TEMPERATURE, FALSE_ALARM, Findings
from peagle.bench.sampling_test import LENGTH

SHOWN_PARTINGS = 20
SHOWN_CELLS = 12


def document_of(findings: Findings, **facts: Any) -> dict[str, Any]:
    """The JSON document: the verdict, `facts` about the run as they are given, and every number."""
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
    """The report to keep; `decode` turns token ids into text."""
    lines = [f"# Losslessness of {document['drafter']['method']} decoding for {document['target']['name']}", ""]
    lines += _verdict(document)
    lines += ["## Token for token", ""]
    lines += _comparison_table(document["comparisons"])
    lines += _partings(document["comparisons"])
    lines += ["## Sampling", ""]
    lines += _distributions(document, decode)
    lines += _provenance(document)
    return "\n".join(lines) + "\n"


def _verdict(document: dict[str, Any]) -> list[str]:
    settings, target = document["settings"], document["target"]
    if document["lossless"]:
        verdict = "**LOSSLESS.** Every comparison below holds."
    elif not document["num_drafts"] or document["acceptance_length"] <= 1:
        verdict = "**NOT SHOWN.** No draft token was ever accepted, so nothing was put to the test."
    else:
        verdict = "**NOT LOSSLESS.** At least one comparison below fails."
    rule = (
        "In float32 no greedy token may differ; a sampled one only where rounding moves it past its random number."
        if target["dtype"] == "float32"
        else f"In {target['dtype']} answers may part only where the target itself is undecided to within rounding."
    )
    return [
        f"{verdict} {rule}",
        "",
        f"{document['num_prompts']} prompts, up to {settings['max_tokens']} tokens each, "
        f"{settings['num_draft_tokens']} draft tokens a step; the engine's acceptance length was "
        f"{document['acceptance_length']:.2f} over {document['num_drafts']} drafts.",
        "",
    ]


def _comparison_table(comparisons: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            each["name"],
            f"{each['num_identical']} of {each['num_answers']}",
            str(each["num_tokens"]),
            f"{len(each['partings'])} ({each['num_near_ties']})",
            "-" if each["largest_gap"] is None else f"{each['largest_gap']:.2g}",
            "-" if each["limit"] is None else f"{each['limit']:.2g}",
            _holds(each),
        )
        for each in comparisons
    ]
    heads = ("compared", "identical answers", "tokens", "part (at near ties)", "largest gap", "allowed gap", "")
    return [*_table(heads, rows), ""]


def _partings(comparisons: list[dict[str, Any]]) -> list[str]:
    found = [(each["name"], parting) for each in comparisons for parting in each["partings"]]
    if not found:
        return []
    rows = [
        (
            name,
            str(parting["prompt"] + 1) + ("" if parting["seed"] is None else f", seed {parting['seed']}"),
            str(parting["token"]),
            f"{parting['gap']:.3g}",
            "near tie" if parting["is_near_tie"] else "**difference**",
        )
        for name, parting in sorted(found, key=lambda pair: -pair[1]["gap"])[:SHOWN_PARTINGS]
    ]
    more = [f"{len(found) - len(rows)} more are in the JSON document.", ""] if len(found) > len(rows) else []
    explanation = (
        "The gap of a greedy answer is from the target's best logit where the answers part to the lower of the two "
        "tokens'; that of a sampled one is how far its random number was from drawing the other token. The widest "
        "come first."
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
        f"Openings of three tokens at temperature {settings['temperature']:g}, one seed each, against the "
        "probabilities that the target gives them, by Pearson's chi-square test. A test fails below "
        f"p = {FALSE_ALARM / max(1, settings['num_sampled_prompts']):g}: lossless decoding would fail one report in "
        f"{1 / FALSE_ALARM:,.0f} by chance. The control holds the same counts against temperature "
        f"{settings['temperature'] * CONTROL_TEMPERATURE:g} and shows that the test can tell a wrong distribution.",
        "",
        *_table(heads, rows),
        "",
    ]
    for each in found:
        cells = list(zip(each["openings"], each["observed"], each["expected"], strict=False))[:SHOWN_CELLS]
        shown = [
            (_code(decode(opening)) + (" and others" if len(opening) < LENGTH else ""), str(ours), f"{theirs:.1f}")
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
    return "holds" if part.get("is_sharp", True) else "holds, but the test is weak here"


def _code(text: str) -> str:
    """Text as Markdown code that fits into a cell of a table."""
    plain = repr(text)[1:-1] if any(not char.isprintable() for char in text) else text
    plain = plain.replace("|", "\\|")
    fence = "``" if "`" in plain else "`"
    return f"{fence} {plain} {fence}" if fence == "``" or plain != plain.strip() or not plain else f"`{plain}`"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
