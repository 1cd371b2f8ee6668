"""llama.cpp on the same GGUF file, by the package xllamacpp: what users of a CPU have without peagle.

It returns text, not tokens: answers are counted by llama.cpp itself, and their tokens are those of the text.
"""

import importlib.util
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.cells import Answer

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

LLAMA_CPP = "llama.cpp"


def can_run(target: "HFTarget") -> bool:
    """Whether xllamacpp is installed, and the target comes from a GGUF file on a CPU."""
    is_installed = importlib.util.find_spec("xllamacpp") is not None
    return is_installed and target.device.type == "cpu" and gguf_file(target) is not None


def gguf_file(target: "HFTarget") -> Path | None:
    """The GGUF file that the target was read from."""
    if target.entry is not None and target.entry.package is not None:
        return target.entry.package.path(target.entry.name)
    path = Path(target.source or "")
    return path if path.suffix == ".gguf" and path.is_file() else None


def run_llama_cpp(
    target: "HFTarget", prompts: Sequence[Sequence[int]], batches: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[Answer], float]:
    """Answer the prompts, as many at once as a batch has. Greedy, without drafts, with torch's number of threads."""
    import torch
    import xllamacpp

    concurrency, order = len(batches[0]), [index for batch in batches for index in batch]
    settings = xllamacpp.CommonParams()
    settings.model.path = str(gguf_file(target))
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    settings.n_parallel = concurrency
    settings.n_ctx = concurrency * (max(len(prompts[index]) for index in order) + max_tokens + 8)
    settings.verbosity = -1
    server = xllamacpp.Server(settings)

    def answer(index: int) -> Answer:
        request = {"prompt": list(prompts[index]), "max_tokens": max_tokens, "temperature": 0, "cache_prompt": False}
        result: Any = server.handle_completions(request)
        token_ids = target.tokenizer(result["choices"][0]["text"], add_special_tokens=False)["input_ids"]
        num_tokens, timings = result["usage"]["completion_tokens"], result["timings"]
        # The end token has no text.
        token_ids = (*token_ids, *[min(target.eos_token_ids, default=0)] * (num_tokens - len(token_ids)))[:num_tokens]
        return Answer(index, token_ids, timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3 / max(num_tokens, 1))

    with ThreadPoolExecutor(concurrency) as places:
        list(places.map(answer, order[:concurrency]))  # warm up
        started = time.perf_counter()
        answers = list(places.map(answer, order))
        return answers, time.perf_counter() - started
