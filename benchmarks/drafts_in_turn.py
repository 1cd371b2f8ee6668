"""Each prompt decoded plain and with drafts in turn, for machines whose speed changes within minutes.

    python benchmarks/drafts_in_turn.py --prompts question.jsonl HumanEval.jsonl.gz --every 16 --max-tokens 64

Prints output tokens/s of both, the speedup with and without prefill, and the acceptance length, by prompt file.
"""

import argparse
import time
from pathlib import Path

from peagle import LLM, SamplingParams
from peagle.data.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, help="prompt files")
    parser.add_argument("--every", type=int, default=1, help="take every N-th prompt of each file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--verify-tokens", type=int, help="tokens per pass; by default those that pay")
    options = parser.parse_args()

    with LLM(max_batch=1, max_length=2048, reuse_prefixes=False, verify_tokens=options.verify_tokens) as llm:
        for file in options.prompts:
            chats = [list(prompt.messages) for prompt in read_prompts(file)][:: options.every]
            plain, drafted = Total(), Total()
            for _ in range(options.rounds):
                for chat in chats:
                    plain.add(llm, chat, SamplingParams(max_tokens=options.max_tokens, num_draft_tokens=0))
                    drafted.add(llm, chat, SamplingParams(max_tokens=options.max_tokens))
            print(
                f"{Path(file).name}, {len(chats)} prompts: {plain.num_tokens / plain.seconds:.1f} and "
                f"{drafted.num_tokens / drafted.seconds:.1f} tokens/s, {plain.seconds / drafted.seconds:.2f}x; "
                f"{plain.decode_seconds / drafted.decode_seconds:.2f}x without prefill; acceptance length "
                f"{1 + drafted.num_accepted / max(drafted.num_drafts, 1):.2f}",
                flush=True,
            )


class Total:
    """Sums over answers."""

    num_tokens = num_drafts = num_accepted = 0
    seconds = decode_seconds = 0.0

    def add(self, llm: LLM, chat: list[dict[str, object]], params: SamplingParams) -> None:
        started = time.perf_counter()
        [output] = llm.chat([chat], params)
        seconds, acceptance = time.perf_counter() - started, output.metrics.acceptance
        self.seconds += seconds
        self.decode_seconds += seconds - (output.metrics.first_token_seconds or 0.0)
        self.num_tokens += len(output.outputs[0].token_ids)
        self.num_drafts += acceptance.num_drafts
        self.num_accepted += sum(acceptance.accepted_per_position)


if __name__ == "__main__":
    main()
