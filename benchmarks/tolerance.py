"""What a tolerance below 1 brings and costs: acceptance length, agreement with exact answers, right answers on GSM8K.

    python benchmarks/tolerance.py --prompts gsm8k/test.jsonl --limit 40 --tolerance 0.99 0.95 0.9

Drafts are the default tree, or a chain with --num-draft-tokens, and all of them are verified. An answer is right if its
last number is the one after "####" in the file (exact match on GSM8K). Agreement is the share of exact answers that
stay identical, and the mean share of an answer's tokens before the first difference.
"""

import argparse
import re
from itertools import islice, takewhile
from operator import eq

from peagle import LLM, SamplingParams
from peagle.checkpoint.native import load_drafter
from peagle.data.prompts import read_prompts
from peagle.engine.outputs import RequestOutput
from peagle.rows import read_rows
from peagle.targets.load import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="a prompt file, in JSONL; GSM8K has solutions")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-batch", type=int, default=16, help="answers decoded at the same time")
    parser.add_argument("--num-draft-tokens", type=int, help="of a chain; default: the default tree")
    parser.add_argument("--tolerance", type=float, nargs="+", default=[0.99, 0.95, 0.9])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    target = load_target(None, dtype=options.dtype)
    drafter = load_drafter(None, target)
    chats = [list(prompt.messages) for prompt in read_prompts(options.prompts, limit=options.limit)]
    rows = islice(read_rows(options.prompts), options.limit)
    solutions = [str(row.get("answer", "")) for _, row in rows]
    print("tolerance", "acceptance length", "tolerated tokens", "identical", "same tokens", "exact match", sep="\t")
    exact: list[RequestOutput] = []
    with LLM(target, drafter, options.num_draft_tokens, max_batch=options.max_batch, verify_tokens=0) as llm:
        for tolerance in (1.0, *options.tolerance):
            outputs = llm.chat(chats, SamplingParams(max_tokens=options.max_tokens, tolerance=tolerance))
            exact = exact or outputs
            first, *others = (output.metrics.acceptance for output in outputs)
            num_tokens = sum(len(tokens(output)) for output in outputs)
            num_tolerated = sum(output.metrics.num_tolerated_tokens for output in outputs)
            pairs = [(tokens(ours), tokens(own)) for ours, own in zip(outputs, exact, strict=True)]
            same = [sum(takewhile(bool, map(eq, ours, own))) / len(own) for ours, own in pairs]
            num_right = sum(is_right(output.text, given) for output, given in zip(outputs, solutions, strict=True))
            print(
                tolerance,
                f"{sum(others, first).acceptance_length:.2f}",
                f"{num_tolerated / num_tokens:.1%}",
                f"{sum(ours == own for ours, own in pairs)} of {len(pairs)}",
                f"{sum(same) / len(same):.0%}",
                f"{num_right} of {len(pairs)}" if any(solutions) else "-",
                sep="\t",
                flush=True,
            )


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def is_right(text: str, solution: str) -> bool:
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", text)
    _, mark, wanted = solution.rpartition("####")
    return bool(mark and numbers) and float(numbers[-1].replace(",", "")) == float(wanted.replace(",", ""))


if __name__ == "__main__":
    main()
