"""Judge: vLLM given nothing but a directory in the layout of speculators, which names target, method and drafts itself.

    python judge_vllm_alone.py JUDGE_VLLM.py TARGET DIRECTORY NUM_DRAFT_TOKENS PROMPTS.json MAX_TOKENS OUT.json

The rest is the judge's at JUDGE_VLLM.py. Fails when vLLM settles on another target or number of draft tokens.
"""

import importlib.util
import sys
from typing import Any


def main() -> None:
    spec = importlib.util.spec_from_file_location("judge_vllm", sys.argv.pop(1))
    assert spec is not None and spec.loader is not None, "the judge is a Python file"
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)

    def start_engine(target: str, drafter: str, num_draft_tokens: int, max_model_len: int, parallel: bool) -> Any:
        from vllm import LLM

        engine = LLM(**judge.ENGINE_OPTIONS, model=drafter, max_model_len=max_model_len)
        config = engine.llm_engine.vllm_config
        assert config.model_config.model == target, f"vLLM serves {config.model_config.model}, not {target}"
        assert config.speculative_config.num_speculative_tokens == num_draft_tokens, "vLLM drafts another number"
        assert config.speculative_config.parallel_drafting == parallel, "vLLM drafts by another method"
        return engine

    judge.start_engine = start_engine
    judge.main()


if __name__ == "__main__":
    main()
