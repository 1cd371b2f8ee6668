"""Acceptance length of a drafter by set of prompts, depth and length of the text, decoded greedily on the engine.

    python benchmarks/acceptance_sets.py --prompts mt_bench/question.jsonl HumanEval.jsonl.gz gsm8k/test.jsonl \\
        spec_bench/question.jsonl [--drafter DIR] [--json OUT.json] [--plot OUT.svg] [--eager]

Each file is a set. Its categories are sets of their own if they have at least 20 prompts, as in Spec-Bench. Four kinds
of text that invite depth are added: lists, code, tables, and copies of a prompt. Chains of 7 and 16 drafts (--chains)
and trees of 31 run on an engine each, which answers all sets in one batch. Depths beyond those the drafter was trained
for are left out. On a GPU --eager starts sooner and decodes slower; acceptance stays the same but for rounding.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from peagle import LLM, SamplingParams
from peagle.bench.plot import save
from peagle.checkpoint.native import drafter_directory, load_drafter
from peagle.compare.acceptance import MIXED_PROMPTS_PATH
from peagle.compare.answers import render_prompt
from peagle.data.prompts import Prompt, read_prompts, workload_name
from peagle.decoding.acceptance import Acceptance, VerifiedDraft, acceptance_by_length
from peagle.drafter.model import Drafter
from peagle.engine.outputs import RequestOutput
from peagle.report.charts import lines
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target

LEAST_PROMPTS = 20  # of a category that is a set of its own
TREE_NODES, TREE_DEPTH = 31, 8
SHORT, LONG = (0, 512), (1024, 4096)
"""Tokens of the text, prompt and answer so far, whose acceptance lengths are compared."""
TOPICS = (
    *("animal", "city", "sport", "fruit", "country", "tool", "river", "planet", "color", "metal"),
    *("instrument", "bird", "job", "game", "language", "flower", "car", "food", "tree", "month"),
)
DEEP = {
    "lists": "Write a numbered list of 30 items about this topic, one short item per line: {}",
    "code": "Write a Python class named {0} with eight attributes, a getter and a setter for each, and tests.",
    "tables": "Write a Markdown table of 15 rows about this topic, with the columns number, name, size and price: {}",
}
"""Requests for text that invites depth, by kind."""
COPY = "Repeat this text three times, word for word, and write nothing else:\n\n{}"
Sets = Mapping[str, Sequence[Prompt]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", default=[], help="prompt files")
    parser.add_argument("--drafter", default=None, help="directory (default: the one that ships)")
    parser.add_argument("--target", default=None, help="default: the embedded target")
    parser.add_argument("--dtype", default="auto", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--allow-mismatch", action="store_true", help="measure a drafter of another target")
    parser.add_argument("--chains", type=int, nargs="*", default=[7, 16], help="their draft tokens")
    parser.add_argument("--limit", type=int, default=80, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-batch", type=int, default=None)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="acceptance length by tokens of the text (.svg)")
    options = parser.parse_args(argv)
    target = load_target(options.target, dtype=options.dtype)
    drafter = load_drafter(options.drafter, target, allow_mismatch=options.allow_mismatch)
    sets = {name: prompts[: options.limit] for name, prompts in read_sets(options.prompts).items()}
    forms: dict[str, dict[str, Any]] = {
        f"chain, K = {depth}": {"num_draft_tokens": depth} for depth in drafter.config.depths_within(options.chains)
    }
    if drafter.config.parallel:
        forms[f"tree, {TREE_NODES} nodes"] = {
            "num_draft_tokens": min(TREE_DEPTH, drafter.config.num_draft_tokens or TREE_DEPTH),
            "tree_nodes": TREE_NODES,
        }
    found: dict[str, dict[str, Any]] = {}
    path = str(drafter_directory(options.drafter, target).name)
    document = {"drafter": path, "device": target.device.type, "max_tokens": options.max_tokens, "forms": found}
    for form, settings in forms.items():
        found[form] = measured(target, drafter, sets, settings, options)
        print_form(form, found[form])
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print_lengths(found)
    if options.plot is not None:
        plot(found, options.plot)


def read_sets(files: Sequence[str]) -> Sets:
    """The prompts by set."""
    sets: dict[str, list[Prompt]] = defaultdict(list)
    for file in files:
        prompts = read_prompts(file)
        sizes = Counter(prompt.category for prompt in prompts)
        for prompt in prompts:
            is_set = prompt.category and LEAST_PROMPTS <= sizes[prompt.category] < len(prompts)
            sets[prompt.category if is_set else workload_name(file)].append(prompt)
    for kind, request in DEEP.items():
        sets[kind] = [_asked(request.format(topic)) for topic in TOPICS]
    texts = json.loads(MIXED_PROMPTS_PATH.read_text(encoding="utf-8")).values()
    sets["copies"] = [_asked(COPY.format(text)) for kind in texts for text in kind][: len(TOPICS)]
    return sets


def _asked(text: str) -> Prompt:
    return Prompt("", ({"role": "user", "content": text},), "prompt")


def measured(
    target: HFTarget, drafter: Drafter, sets: Sets, settings: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """What one form of drafts accepts, by set."""
    asked = [(name, render_prompt(target, prompt)) for name, prompts in sets.items() for prompt in prompts]
    longest = max(len(prompt_ids) for _, prompt_ids in asked) + options.max_tokens + 2 * settings["num_draft_tokens"]
    engine = {"max_length": min(longest, target.max_length), "max_batch": options.max_batch, "eager": options.eager}
    outputs: dict[str, list[RequestOutput]] = defaultdict(list)
    with LLM(target, drafter, **settings, **engine, verify_tokens=0) as llm:
        answers = llm.generate([prompt_ids for _, prompt_ids in asked], SamplingParams(max_tokens=options.max_tokens))
        for (name, _), output in zip(asked, answers, strict=True):
            outputs[name].append(output)
    return {name: _summary(own) for name, own in outputs.items()}


def _summary(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    first, *others = (output.metrics.acceptance for output in outputs)
    acceptance: Acceptance = sum(others, first)
    drafts = [draft for output in outputs for draft in output.verified_drafts]
    counts = (acceptance.num_drafts, *acceptance.accepted_per_position)
    return {
        "num_prompts": len(outputs),
        "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "acceptance_length": round(acceptance.acceptance_length, 4),
        "per_position": [round(share, 4) for share in acceptance.per_position],
        "after_the_one_before": [round(after / max(1, before), 4) for before, after in pairwise(counts)],
        "num_drafts": acceptance.num_drafts,
        "long_over_short": _long_over_short(drafts),
        "by_length": acceptance_by_length(drafts),
    }


def _long_over_short(drafts: Sequence[VerifiedDraft]) -> float | None:
    """The acceptance length on long text, relative to that on short text; None if either has no draft."""
    lengths = []
    for low, high in (LONG, SHORT):
        accepted = [draft.num_accepted for draft in drafts if low <= draft.prompt_length + draft.position < high]
        if not accepted:
            return None
        lengths.append(1 + sum(accepted) / len(accepted))
    return round(lengths[0] / lengths[1], 4)


def print_form(form: str, sets: Mapping[str, Any]) -> None:
    print(f"{form}: accepted by depth (given the one before)")
    for name, own in sets.items():
        pairs = zip(own["per_position"], own["after_the_one_before"], strict=True)
        print(name, *(f"{share:.3f} ({given:.2f})" for share, given in pairs), sep="\t")
    for of in ("prompt", "answer", "text"):
        print(f"\n{form}: acceptance length by tokens of the {of}")
        for name, own in sets.items():
            ranges = own["by_length"].get(of, {}).items()
            ratio = own["long_over_short"]
            more = [f"1,024 to 4,095 over below 512: {ratio:.2f}"] if of == "text" and ratio is not None else []
            print(name, *(f"{span}: {each['acceptance_length']:.2f}" for span, each in ranges), *more, sep="\t")
    print(flush=True)


def print_lengths(found: Mapping[str, Mapping[str, Any]]) -> None:
    print("acceptance length", *found, sep="\t")
    for name in next(iter(found.values())):
        print(name, *(f"{sets[name]['acceptance_length']:.3f}" for sets in found.values()), sep="\t")


def plot(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Acceptance length by tokens of the text, of all sets together and of each form."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    curves = {form: _by_text(sets.values()) for form, sets in found.items()}
    labels = lines(figure.subplots(), curves, "tokens of the text", "acceptance length")
    save(figure, labels, path)


def _by_text(sets: Any) -> list[tuple[float, float]]:
    """The first number of tokens of each range, and the acceptance length there."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0, 0])
    for own in sets:
        for span, each in own["by_length"]["text"].items():
            found = sums[max(64, int(span.split("-")[0]))]  # the axis is logarithmic
            found[0] += each["num_drafts"]
            found[1] += each["num_drafts"] * each["acceptance_length"]
    return [(first, total / number) for first, (number, total) in sorted(sums.items())]


if __name__ == "__main__":
    main()
