"""Acceptance length of chains and candidate trees by number of nodes, replayed and decoded, with and without pair head.

    python benchmarks/tree_acceptance.py --prompts question.jsonl HumanEval.jsonl.gz test.jsonl --limit 80
        [--nodes 8 16 24 32] [--decoded-nodes 32] [--json FILE]

Replay finds out what would be accepted of the answers that the chain decodes: all forms of drafts take one pass of
target and drafter. Decoding takes an engine for each, so --decoded-nodes can name fewer trees, or 0 for none. Rows
appear as they are measured. "head" is what the pair head gains by replay, "differ" the number of answers unlike the
chain's: in float32 there is none.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peagle import LLM, SamplingParams
from peagle.checkpoint.native import load_drafter
from peagle.data.conversations import Conversation
from peagle.data.prompts import Prompt, read_prompts, workload_name
from peagle.decoding.acceptance import Acceptance
from peagle.drafter.model import Drafter
from peagle.engine.outputs import RequestOutput
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.training.replay import Form, replay_forms

COLUMNS = ("prompts", "drafts", "pair head", "replayed", "decoded", "difference", "head", "differ")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--drafter", default=None, help="default: the one that ships with the embedded target")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(argv)
    target = load_target(None, dtype=options.dtype)
    drafter = load_drafter(options.drafter, target)
    heads = {} if drafter.pair_head is None else {"yes": drafter}
    compare(target, {"no": drafter.without_pair_head()} | heads, options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", nargs="+", required=True, help="prompt files")
    parser.add_argument("--limit", type=int, default=12, help="prompts per file")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-batch", type=int, default=16, help="answers decoded at the same time")
    parser.add_argument("--chain", type=int, default=7, help="draft tokens of the chain")
    parser.add_argument("--depth", type=int, default=8, help="depth of the trees")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 24, 32], help="of the trees, at most 62")
    parser.add_argument("--decoded-nodes", type=int, nargs="+", help="trees that are also decoded; default: all")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def compare(target: HFTarget, drafters: Mapping[str, Drafter], options: argparse.Namespace) -> None:
    """Print a row for each form of drafts, drafter and prompt file.

    The drafters have the same weights, and the first has no pair head.
    """
    chats = {workload_name(file): read_prompts(file, limit=options.limit) for file in options.prompts}
    without, *_ = drafters.values()
    forms = [
        (name, Form(drafter, options.chain if nodes is None else options.depth, nodes))
        for nodes in (None, *options.nodes)
        for name, drafter in drafters.items()
    ]
    answers = decoded(target, forms[0][1], chats, options)
    texts = {prompts: [conversation_of(output) for output in outputs] for prompts, outputs in answers.items()}
    replayed = {prompts: replayed_lengths(target, forms, rows) for prompts, rows in texts.items()}
    rows: list[dict[str, Any]] = []
    print(*COLUMNS, sep="\t")
    for index, (name, form) in enumerate(forms):
        is_decoded = form.tree_nodes is None or form.tree_nodes in (options.decoded_nodes or options.nodes)
        found = answers if index == 0 else decoded(target, form, chats, options) if is_decoded else {}
        base = forms.index((next(iter(drafters)), form._replace(drafter=without)))
        for prompts, lengths in replayed.items():
            outputs = found.get(prompts, [])
            length = decoded_length(outputs)
            num_different = sum(ours.text != first.text for ours, first in zip(outputs, answers[prompts], strict=False))
            rows.append(
                {
                    "prompts": prompts,
                    "drafts": f"chain, K = {options.chain}" if form.tree_nodes is None else f"{form.tree_nodes} nodes",
                    "pair head": name,
                    "replayed": lengths[index],
                    "decoded": length,
                    "difference": None if length is None else length - lengths[index],
                    "head": None if index == base else lengths[index] / lengths[base] - 1,
                    "differ": num_different if outputs else None,
                }
            )
            print(*shown(rows[-1]), sep="\t", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def replayed_lengths(
    target: HFTarget, forms: Sequence[tuple[str, Form]], conversations: Sequence[Conversation]
) -> list[float]:
    drafts = replay_forms(target, [form for _, form in forms], conversations)
    return [
        Acceptance.of((draft.num_accepted for draft in own), form.num_draft_tokens).acceptance_length
        for own, (_, form) in zip(drafts, forms, strict=True)
    ]


def decoded(
    target: HFTarget, form: Form, chats: Mapping[str, Sequence[Prompt]], options: argparse.Namespace
) -> dict[str, list[RequestOutput]]:
    """The answers to the prompts of each file, with all drafts verified."""
    sizes = {"max_batch": options.max_batch, "tree_nodes": form.tree_nodes, "verify_tokens": 0}
    params = SamplingParams(max_tokens=options.max_tokens)
    with LLM(target, form.drafter, form.num_draft_tokens, **sizes) as llm:
        return {name: llm.chat([list(each.messages) for each in prompts], params) for name, prompts in chats.items()}


def decoded_length(outputs: Sequence[RequestOutput]) -> float | None:
    if not outputs:
        return None
    first, *others = (output.metrics.acceptance for output in outputs)
    return sum(others, first).acceptance_length


def conversation_of(output: RequestOutput) -> Conversation:
    answer = output.outputs[0].token_ids
    token_ids = np.array([*output.prompt_token_ids, *answer], dtype=np.int32)
    return Conversation(token_ids, np.arange(len(token_ids)) >= len(output.prompt_token_ids))


def shown(row: Mapping[str, Any]) -> list[str]:
    formats = {"replayed": ".3f", "decoded": ".3f", "difference": "+.3f", "head": "+.1%"}
    return [("-" if row[name] is None else format(row[name], formats.get(name, ""))) for name in COLUMNS]


if __name__ == "__main__":
    main()
