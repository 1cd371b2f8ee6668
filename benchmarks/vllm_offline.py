"""Output tokens/s of vLLM on the prompts of `peagle bench`, to put beside its cells.

    PYTHONPATH=src ~/vllm/bin/python benchmarks/vllm_offline.py --prompts question.jsonl,HumanEval.jsonl.gz --limit 40 \
        --target TARGET --drafter DRAFTER --num-draft-tokens 7 --parallel --concurrency 8

Run it with the Python of vLLM's environment, once per concurrency. TARGET and DRAFTER are directories that vLLM reads
(`peagle export --to vllm` writes a drafter). Without --drafter vLLM decodes without drafts; --parallel marks a P-EAGLE
drafter. vLLM's scheduler limits the requests in flight to the concurrency, as a closed loop does.
"""

import argparse
import json
import os
import time
from typing import Any

from peagle.data.prompts import read_prompts

REQUESTS_PER_PLACE = 8  # as in `peagle bench`


def speculative_config(options: argparse.Namespace) -> dict[str, Any] | None:
    if options.drafter is None:
        return None
    return {
        "method": "eagle3",
        "model": options.drafter,
        "num_speculative_tokens": options.num_draft_tokens,
        **({"parallel_drafting": True} if options.parallel else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--parallel", action="store_true", help="the drafter is P-EAGLE")
    parser.add_argument("--prompts", required=True, help="prompt files, separated by commas")
    parser.add_argument("--limit", type=int, help="prompts to take from each file")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=2048)
    options = parser.parse_args()

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: faster for a small model
    from vllm import LLM, SamplingParams

    llm = LLM(
        options.target,
        dtype="bfloat16",
        max_model_len=options.max_length,
        max_num_seqs=options.concurrency,
        speculative_config=speculative_config(options),
        disable_log_stats=True,
    )
    prompts = [prompt for path in options.prompts.split(",") for prompt in read_prompts(path, limit=options.limit)]
    chats = [list(prompt.messages) for prompt in prompts]
    num_requests = max(len(chats), REQUESTS_PER_PLACE * options.concurrency)
    requests = [chats[index % len(chats)] for index in range(num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, detokenize=False)

    llm.chat(requests[: 2 * options.concurrency], params, use_tqdm=False)  # warm-up
    started = time.perf_counter()
    outputs = llm.chat(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        json.dumps(
            {
                "drafter": options.drafter,
                "num_draft_tokens": options.num_draft_tokens if options.drafter else 0,
                "concurrency": options.concurrency,
                "num_requests": num_requests,
                "num_output_tokens": num_tokens,
                "seconds": round(seconds, 3),
                "output_tokens_per_second": round(num_tokens / seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
