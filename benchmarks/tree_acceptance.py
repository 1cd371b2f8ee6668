"""Acceptance length of candidate trees by number of nodes, decoded for real, with a chain beside them.

    python benchmarks/tree_acceptance.py --prompts question.jsonl HumanEval.jsonl.gz --limit 12 --nodes 16 32

Every answer is compared with the chain's: in float32 they are identical.
"""

import argparse
from collections.abc import Mapping, Sequence

from peagle import LLM, SamplingParams
from peagle.checkpoint.native import load_drafter
from peagle.data.prompts import Prompt, read_prompts, workload_name
from peagle.drafter.model import Drafter
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target

Chats = Mapping[str, Sequence[Prompt]]
"""Prompts by workload."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    target = load_target(None, dtype=options.dtype)
    drafter = load_drafter(target.shipped_drafter, target)
    compare(target, {"": drafter}, options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", nargs="+", required=True, help="prompt files")
    parser.add_argument("--limit", type=int, default=12, help="prompts per file")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--chain", type=int, default=7, help="draft tokens of the chain")
    parser.add_argument("--depth", type=int, default=8, help="depth of the trees")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])


def compare(target: HFTarget, drafters: Mapping[str, Drafter], options: argparse.Namespace) -> None:
    """Print a row for each form of drafts and each drafter."""
    chats: Chats = {workload_name(file): read_prompts(file, limit=options.limit) for file in options.prompts}
    params = SamplingParams(max_tokens=options.max_tokens)
    expected: dict[str, list[str]] = {}
    print("drafts", *chats, sep="\t")
    for nodes in (None, *options.nodes):
        depth = options.chain if nodes is None else options.depth
        form = f"chain, K = {depth}" if nodes is None else f"{nodes} nodes"
        for name, drafter in drafters.items():
            cells = decoded(target, drafter, chats, params, depth, nodes, expected)
            print(f"{form}{name}", *cells, sep="\t", flush=True)


def decoded(
    target: HFTarget,
    drafter: Drafter,
    chats: Chats,
    params: SamplingParams,
    num_draft_tokens: int,
    nodes: int | None,
    expected: dict[str, list[str]],
) -> list[str]:
    """The acceptance length of each workload, and how many answers differ from the `expected`: the first ones given."""
    cells = []
    with LLM(target, drafter, num_draft_tokens, max_batch=16, tree_nodes=nodes, verify_tokens=0) as llm:
        for name, prompts in chats.items():
            outputs = llm.chat([list(prompt.messages) for prompt in prompts], params)
            first, *others = (output.metrics.acceptance for output in outputs)
            texts = [output.text for output in outputs]
            wanted = expected.setdefault(name, texts)
            num_different = sum(text != other for text, other in zip(texts, wanted, strict=True))
            cells.append(f"{sum(others, first).acceptance_length:.2f} ({num_different} differ)")
    return cells


if __name__ == "__main__":
    main()
