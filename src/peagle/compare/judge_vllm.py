"""The judge: vLLM decodes prompts with a drafter directory and records every draft it verifies.

Runs in vLLM's environment and imports nothing of peagle, so the two sides share only files.

    python judge_vllm.py TARGET DRAFTER NUM_DRAFT_TOKENS PROMPTS.json MAX_TOKENS OUT.json [--one-by-one]

PROMPTS.json is a list of prompts, each a list of token ids. OUT.json holds per request the output ids and the verified
steps (draft tokens, number accepted), then the engine's counters and versions. `--one-by-one` runs the drafter as
EAGLE-3, one pass per token. The judge fails if engine counters, request metrics and recorded drafts disagree.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# vLLM reads these on import: one process (the tap below needs no pickling, and no worker can be orphaned), a KV cache
# of 1 GiB, no network. Threads are not bound to cores: with binding, two busy cores decoded twenty times slower.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CONFIGURE_LOGGING": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# One request at a time, nothing that changes numerics, and metrics of every verification.
ENGINE_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_num_seqs": 1,
    "seed": 0,
    "disable_log_stats": False,
    "per_request_spec_decode_metrics": "detailed",
}

recorded_drafts: list[list[int]] = []


def tap_drafter(worker: Any) -> dict[str, bool]:
    """Wrap the drafter's `propose` to record every draft; returns what the drafter loaded."""
    runner = worker.model_runner
    drafter = runner.drafter
    propose = drafter.propose

    def recording_propose(*arguments: Any, **keywords: Any) -> Any:
        draft_tokens_BK = propose(*arguments, **keywords)
        recorded_drafts.extend(draft_tokens_BK.tolist())
        return draft_tokens_BK

    drafter.propose = recording_propose
    draft_model = drafter.model.model
    return {
        "own_embeddings": draft_model.embed_tokens is not runner.model.model.embed_tokens,
        "own_head": drafter.model.lm_head is not runner.model.lm_head,
        "fc_norm": draft_model.fc_norm is not None,
        "norm_before_fc": bool(draft_model.norm_before_fc),
    }


def start_engine(target: str, drafter: str, num_draft_tokens: int, max_model_len: int, parallel: bool) -> Any:
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(
        **ENGINE_OPTIONS,
        model=target,
        max_model_len=max_model_len,
        speculative_config={
            "method": "eagle3",
            "model": drafter,
            "num_speculative_tokens": num_draft_tokens,
            "parallel_drafting": parallel,
        },
    )


def decode_one(engine: Any, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy output and verified steps of one prompt, alone in the engine.

    The drafter runs once more than the target verifies, so the last draft is dropped. Each step must have emitted the
    accepted head of its own draft.
    """
    from vllm import SamplingParams

    recorded_drafts.clear()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    (answer,) = engine.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
    completion = answer.outputs[0]
    output_ids = list(completion.token_ids)
    accepted = list(completion.spec_decode_metrics.per_step_accepted)
    steps = [
        {"draft_tokens": draft, "num_accepted": count} for draft, count in zip(recorded_drafts, accepted, strict=False)
    ]
    assert len(recorded_drafts) >= len(accepted), (
        f"the engine verified {len(accepted)} drafts but the tap recorded {len(recorded_drafts)}"
    )
    cursor = 1
    for index, step in enumerate(steps):
        kept = step["draft_tokens"][: step["num_accepted"]]
        emitted = output_ids[cursor : cursor + len(kept)]
        assert emitted == kept[: len(emitted)], f"step {index}: accepted {kept} but the output has {emitted}"
        cursor += len(kept) + 1
    assert cursor >= max_tokens == len(output_ids), (
        f"steps account for {cursor} tokens, output has {len(output_ids)}, asked for {max_tokens}"
    )
    return {"prompt_ids": list(answer.prompt_token_ids), "output_ids": output_ids, "steps": steps}


def engine_counters(engine: Any) -> dict[str, Any]:
    """The engine's totals: drafts, draft tokens, accepted tokens, accepted per position."""
    values = {metric.name: metric for metric in engine.get_metrics()}
    return {
        "num_drafts": values["vllm:spec_decode_num_drafts"].value,
        "num_draft_tokens": values["vllm:spec_decode_num_draft_tokens"].value,
        "num_accepted": values["vllm:spec_decode_num_accepted_tokens"].value,
        "accepted_per_position": list(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


def count_steps(requests: list[dict[str, Any]], num_draft_tokens: int) -> dict[str, Any]:
    """The same totals as `engine_counters`, from the recorded steps."""
    steps = [step for request in requests for step in request["steps"]]
    return {
        "num_drafts": len(steps),
        "num_draft_tokens": sum(len(step["draft_tokens"]) for step in steps),
        "num_accepted": sum(step["num_accepted"] for step in steps),
        "accepted_per_position": [
            sum(step["num_accepted"] > position for step in steps) for position in range(num_draft_tokens)
        ],
    }


def installed_versions() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    import torch

    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("num_draft_tokens", type=int)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("max_tokens", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--one-by-one", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)

    prompts: list[list[int]] = json.loads(arguments.prompts.read_text())
    started = time.monotonic()
    # Leave room beyond max_tokens: vLLM stops drafting near the end of its context.
    longest = max(len(prompt) for prompt in prompts) + arguments.max_tokens + 2 * arguments.num_draft_tokens + 2
    parallel = not arguments.one_by_one
    engine = start_engine(arguments.target, arguments.drafter, arguments.num_draft_tokens, longest, parallel)
    loaded = engine.collective_rpc(tap_drafter)[0]
    startup_s = time.monotonic() - started

    requests = []
    for index, prompt_ids in enumerate(prompts):
        requests.append(decode_one(engine, prompt_ids, arguments.max_tokens))
        elapsed = time.monotonic() - started
        print(f"judge_vllm: prompt {index + 1}/{len(prompts)} done, {elapsed:.0f} s", file=sys.stderr, flush=True)

    counters = engine_counters(engine)
    recorded = count_steps(requests, arguments.num_draft_tokens)
    assert counters == recorded, f"engine counters {counters} differ from recorded steps {recorded}"
    result = {
        "versions": installed_versions(),
        "loaded": loaded,
        "startup_s": round(startup_s, 1),
        "total_s": round(time.monotonic() - started, 1),
        "counters": counters,
        "requests": requests,
    }
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
