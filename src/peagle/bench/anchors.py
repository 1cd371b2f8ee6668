"""Baselines on the same target, prompts and device: what users have without peagle.

    transformers eager                 generate over left-padded batches, no compilation
    transformers static compiled       the same with a static cache and the compiled forward
    transformers continuous batching   its paged scheduler, with a batch as large as the concurrency
    llama.cpp                          on the same GGUF file, on a CPU, if the package xllamacpp is installed

Greedy. Only tokens up to each answer's end count, not the padding. A batch of `generate` returns all at once, so its
TPOT is the batch's time (with prefill) over its longest answer, and it has no TTFT.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peagle.bench.cells import Answer, Cell, CellResult
from peagle.bench.llama_cpp import LLAMA_CPP, can_run, run_llama_cpp
from peagle.bench.offline import peak_memory, reason_of, reset_peak_memory
from peagle.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from peagle.targets.hf import HFTarget

EAGER = "transformers eager"
STATIC = "transformers static compiled"
CONTINUOUS = "transformers continuous batching"
SHORT_NAMES = {"eager": EAGER, "static": STATIC, "continuous": CONTINUOUS, LLAMA_CPP: LLAMA_CPP}
"""What users choose anchors by."""

MAX_BATCHES = 10
"""Limits the requests at low concurrency, where a whole workload would take most of the run."""
WARMUP_TOKENS = 8
STANDARD_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
BLOCK_SIZE = 256
"""tokens per page"""
CPU_COMPILE: dict[str, Any] = {"backend": "inductor", "mode": "default"}
"""compile options of generate on a CPU; its default is for CUDA graphs"""
MAX_BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
"""prefill plus decode; on a GPU transformers' default"""

Timed = tuple[list[Answer], float]
Batches = list[list[int]]


def run_anchors(
    target: "HFTarget",
    prompts: Sequence[Sequence[int]],
    concurrency: Sequence[int],
    max_tokens: int,
    results: list[CellResult],
    *,
    num_requests: Mapping[int, int],
    chosen: Sequence[str] = (),
    on_cell: Callable[[CellResult], None] = lambda _: None,
) -> None:
    """Measure the anchors, as `anchors_of` chooses, at every concurrency and append to `results`.

    `num_requests` maps concurrency to requests, as for the engine's cells. They run in whole batches, at most
    `MAX_BATCHES`. An anchor that fails is recorded with its reason, and the rest continue. The target's attention and
    taps are restored afterwards, and compiled code is dropped.
    """
    for method, run in anchors_of(target, chosen).items():
        for places in sorted(concurrency):
            result = CellResult(Cell(method, 0, places))
            try:
                with as_loaded(target):
                    reset_peak_memory(target.device)
                    batches = batches_of(len(prompts), places, min(num_requests[places], MAX_BATCHES * places))
                    result.answers, result.seconds = run(target, prompts, batches, max_tokens)
                    result.memory_bytes = peak_memory(target.device)
            except Exception as error:  # a failure in transformers must not end the run
                result.failure = reason_of(error)
            results.append(result)
            on_cell(result)


def anchors_of(target: "HFTarget", chosen: Sequence[str] = ()) -> dict[str, Callable[..., Timed]]:
    """The anchors by name: those of these short names, or all that can run here."""
    known = {EAGER: run_eager, STATIC: run_static, CONTINUOUS: run_continuous}
    known |= {LLAMA_CPP: run_llama_cpp} if can_run(target) else {}
    if LLAMA_CPP in chosen and LLAMA_CPP not in known:
        raise ConfigError(
            "llama.cpp runs a GGUF file on a CPU, with the package xllamacpp",
            hint="pip install xllamacpp, and use --device cpu with the built-in target or --target FILE.gguf",
        )
    return known if not chosen else {SHORT_NAMES[name]: known[SHORT_NAMES[name]] for name in chosen}


def batches_of(num_prompts: int, concurrency: int, num_requests: int) -> Batches:
    """Prompt indices in whole batches: a smaller last batch would trigger a recompile."""
    starts = range(0, num_requests, concurrency)
    return [[index % num_prompts for index in range(start, start + concurrency)] for start in starts]


@contextlib.contextmanager
def as_loaded(target: "HFTarget") -> Iterator[None]:
    """The target with an attention implementation of transformers and without taps; restores both."""
    model = target.model
    attention = model.config._attn_implementation
    hooks = [(module, dict(module._forward_pre_hooks)) for module in model.modules() if module._forward_pre_hooks]
    try:
        for module, _ in hooks:
            module._forward_pre_hooks.clear()
        if attention not in STANDARD_ATTENTION:
            model.set_attn_implementation("sdpa")
        yield
    finally:
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        for module, kept in hooks:
            module._forward_pre_hooks.update(kept)
        _forget_compiled(model)


def _forget_compiled(model: "nn.Module") -> None:
    """Drop what generate caches on the model, and the compiled code."""
    import gc

    import torch

    if "_compiled_call" in vars(model):
        torch._dynamo.reset()
    for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length"):
        vars(model).pop(name, None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_eager(target: "HFTarget", prompts: Sequence[Sequence[int]], batches: Batches, max_tokens: int) -> Timed:
    return _generate(target, prompts, batches, max_tokens, {"disable_compile": True})


def run_static(target: "HFTarget", prompts: Sequence[Sequence[int]], batches: Batches, max_tokens: int) -> Timed:
    """One cache length for all batches, so that nothing is compiled during the measurement."""
    options: dict[str, Any] = {
        "cache_implementation": "static",
        "max_cache_len": _longest(prompts, batches) + max_tokens,
    }
    if target.device.type == "cpu":
        from transformers import CompileConfig

        # By default generate does not compile on a CPU.
        options["compile_config"] = CompileConfig(**CPU_COMPILE)
        options["compile_config"]._compile_all_devices = True
    return _generate(target, prompts, batches, max_tokens, options)


def _generate(
    target: "HFTarget", prompts: Sequence[Sequence[int]], batches: Batches, max_tokens: int, options: dict[str, Any]
) -> Timed:
    by_length = sorted({index for batch in batches for index in batch}, key=lambda index: -len(prompts[index]))
    longest = [by_length[place % len(by_length)] for place in range(len(batches[0]))]
    for _ in range(2):  # the second call sees a used cache, which may trigger another compile
        _generate_batch(target, prompts, longest, min(WARMUP_TOKENS, max_tokens), options)
    answers: list[Answer] = []
    started = time.perf_counter()
    for batch in batches:
        answers += _generate_batch(target, prompts, batch, max_tokens, options)
    return answers, time.perf_counter() - started


def _generate_batch(
    target: "HFTarget", prompts: Sequence[Sequence[int]], batch: list[int], max_tokens: int, options: dict[str, Any]
) -> list[Answer]:
    started = time.perf_counter()
    ids_BT, mask_BT = left_padded([prompts[index] for index in batch], pad_token_id(target))
    ids_BT, mask_BT = ids_BT.to(target.device), mask_BT.to(target.device)
    output_BT = target.model.generate(
        ids_BT, attention_mask=mask_BT, generation_config=_generation_config(target, max_tokens, **options)
    )
    rows = [until_end(row, target.eos_token_ids) for row in output_BT[:, ids_BT.shape[1] :].tolist()]
    per_token = (time.perf_counter() - started) / max(len(row) for row in rows)
    return [Answer(index, row, None, per_token) for index, row in zip(batch, rows, strict=True)]


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Token ids and attention mask of a left-padded batch."""
    import torch

    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def until_end(token_ids: Sequence[int], eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """The answer up to and including its end token, without padding."""
    end = next((index for index, token in enumerate(token_ids) if token in eos_token_ids), len(token_ids) - 1)
    return tuple(token_ids[: end + 1])


def pad_token_id(target: "HFTarget") -> int:
    pad = getattr(target.tokenizer, "pad_token_id", None)
    return int(pad) if pad is not None else min(target.eos_token_ids, default=0)


def run_continuous(target: "HFTarget", prompts: Sequence[Sequence[int]], batches: Batches, max_tokens: int) -> Timed:
    """Submit all requests at once; the scheduler starts the next one when a slot is free.

    Prefixes are not shared, as in peagle's own cells. TTFT counts from when a request is scheduled.
    """
    from transformers import ContinuousBatchingConfig

    concurrency, order = len(batches[0]), [index for batch in batches for index in batch]
    pages_each = -(-(_longest(prompts, batches) + max_tokens) // BLOCK_SIZE) + 1
    config = ContinuousBatchingConfig(
        block_size=BLOCK_SIZE,
        num_blocks=concurrency * pages_each,
        max_batch_tokens=MAX_BATCH_TOKENS[target.device.type],
        max_requests_per_batch=concurrency,
        allow_block_sharing=False,
    )
    # One setting for all requests; -1 means no end token.
    generation = _generation_config(target, max_tokens, eos_token_id=sorted(target.eos_token_ids) or -1)
    with target.model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, timeout=30
    ) as manager:
        warm = [list(prompts[index])[::-1] for index in order[:concurrency]]
        _finish_all(manager, manager.add_requests(warm, max_new_tokens=min(WARMUP_TOKENS, max_tokens)))
        started = time.perf_counter()
        requests = [list(prompts[index]) for index in order]
        names = manager.add_requests(requests, max_new_tokens=max_tokens, record_timestamps=True)
        outputs = _finish_all(manager, names)
        seconds = time.perf_counter() - started
    return [_answer(index, outputs[name]) for index, name in zip(order, names, strict=True)], seconds


def _finish_all(manager: Any, names: list[str]) -> dict[str, Any]:
    """Wait for all requests; raise if one fails or the scheduler dies."""
    outputs: dict[str, Any] = {}
    while len(outputs) < len(names):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                fatal = manager.background_thread_status.fatal_error
                raise RuntimeError(f"the scheduler thread died: {fatal}" if fatal else "the scheduler thread died")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            outputs[result.request_id] = result
    return outputs


def _answer(index: int, output: Any) -> Answer:
    tokens, times = tuple(output.generated_tokens), output.timestamps
    if not times:
        return Answer(index, tokens)
    per_token = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return Answer(index, tokens, times[0] - output.lifespan[0], per_token)


def _generation_config(target: "HFTarget", max_tokens: int, **options: Any) -> Any:
    from transformers import GenerationConfig

    settings = {
        "max_new_tokens": max_tokens,
        "do_sample": False,
        "eos_token_id": sorted(target.eos_token_ids) or None,
        "pad_token_id": pad_token_id(target),
    }
    return GenerationConfig(**(settings | options))


def _longest(prompts: Sequence[Sequence[int]], batches: Batches) -> int:
    return max(len(prompts[index]) for batch in batches for index in batch)
