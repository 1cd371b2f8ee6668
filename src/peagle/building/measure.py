"""Measures what a plan needs: how fast this machine decodes with the target, and how long a training step takes."""

import json
import time
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from peagle.bench.offline import peak_memory
from peagle.building.config import BuildSettings
from peagle.building.plan import Measured
from peagle.building.shape import Shape, TargetFacts, shape_of
from peagle.compare.acceptance import MIXED_PROMPTS_PATH
from peagle.compare.evidence import render_texts
from peagle.data.conversations import Conversation
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.host_memory import available_bytes
from peagle.objective.config import TrainConfig
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.training.data import RunText
from peagle.training.initial_drafter import check_initial_drafter, initial_drafter
from peagle.training.run import seconds_per_step

BATCH = {"cuda": 256, "cpu": 16}
PROMPT_TOKENS = 16
TIMED_TOKENS = {"cuda": 128, "cpu": 16}
TIMED_STEPS = {"cuda": 12, "cpu": 3}


def measure(target: HFTarget, settings: BuildSettings, budget: float, load_seconds: float) -> Measured:
    """Decode random prompts and train a few steps on random rows. Nothing is kept. `budget` is in seconds."""
    text_config = target.model.config.get_text_config()
    num_parameters = sum(parameter.numel() for parameter in target.model.parameters())
    start_seconds, alone, batched = _decoding(target)
    is_gpu, batch = target.device.type == "cuda", BATCH[target.device.type]
    facts = TargetFacts(
        num_parameters=num_parameters,
        architecture=type(target.model).__name__,
        has_experts=bool(getattr(text_config, "num_experts_per_tok", None)),
        is_gpu=is_gpu,
        max_length=target.max_length,
        vocab_size=target.vocab_size,
        budget=budget,
        seconds_per_token=batch / batched,
    )
    shape = shape_of(settings, facts)
    config = shape.train_config(Path("data"), settings.output / "drafter")
    check_initial_drafter(target, config)
    seconds = _training(target, config)
    peak, drafter = peak_memory(target.device) or 0, _drafter(target, config)
    return Measured(
        target=target.name,
        num_parameters=num_parameters,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device.type,
        accelerator=torch.cuda.get_device_name(target.device) if is_gpu else None,
        recipe=shape.recipe,
        options=shape.options,
        full_tokens=shape.num_tokens,
        full_steps=_full_steps(shape, config),
        tokens_per_step=config.batch_size * config.max_length,
        max_length=config.max_length,
        num_draft_tokens=config.num_draft_tokens,
        num_layers=config.num_layers,
        num_drafter_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        feature_bytes=_feature_bytes(target, drafter) if config.features == "cached" else 0,
        load_seconds=round(load_seconds, 2),
        start_seconds=round(start_seconds, 2),
        tokens_per_second=round(batched, 1),
        tokens_per_second_alone=round(alone, 1),
        batch=batch,
        seconds_per_step=round(seconds, 4),
        memory_needed=peak,
        memory_free=_free(target.device, peak),
        has_chat_template=bool(target.tokenizer.chat_template),
    )


def _full_steps(shape: Shape, config: TrainConfig) -> int:
    """Steps of a build without a budget. A CPU has no recipe; its steps have fewer tokens than those on a GPU."""
    if shape.recipe is not None:
        return config.num_steps
    whole = Shape("embedded", {}, 1).train_config(Path("data"), Path("drafter"))
    return whole.num_steps * whole.batch_size * whole.max_length // (config.batch_size * config.max_length)


def _decoding(target: HFTarget) -> tuple[float, float, float]:
    """Seconds to start an engine, and tokens per second of one request and of a batch, without drafts."""
    batch, num_tokens = BATCH[target.device.type], TIMED_TOKENS[target.device.type]
    num_tokens = min(num_tokens, target.max_length - PROMPT_TOKENS)
    random = np.random.default_rng(0)
    prompts = random.integers(3, target.vocab_size, (batch, PROMPT_TOKENS)).tolist()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    with LLM(target, None, max_batch=batch, max_length=PROMPT_TOKENS + num_tokens) as llm:
        start_seconds = time.perf_counter() - started
        rates = []
        for part in (prompts[:1], prompts):
            started = time.perf_counter()
            llm.generate(part, params)
            rates.append(len(part) * num_tokens / (time.perf_counter() - started))
    return start_seconds, rates[0], rates[1]


def _training(target: HFTarget, config: TrainConfig) -> float:
    random = np.random.default_rng(0)
    token_ids = random.integers(3, target.vocab_size, (4 * config.batch_size, config.max_length)).astype(np.int32)
    mask = np.arange(config.max_length) >= config.max_length // 4
    rows = [Conversation(row, mask, number) for number, row in enumerate(token_ids, start=1)]
    if config.method == "p-eagle":
        config = replace(config, labels="all")  # as in greedy answers; in random rows few labels are reached
    return seconds_per_step(target, config, RunText(rows, (), {}), TIMED_STEPS[target.device.type])


def _drafter(target: HFTarget, config: TrainConfig) -> Drafter:
    counts_V = None if config.draft_vocab_size is None else torch.ones(target.vocab_size, dtype=torch.int64)
    return initial_drafter(target, config, counts_V)


def _feature_bytes(target: HFTarget, drafter: Drafter) -> int:
    """Bytes on disk per token, if the target's hidden states are stored."""
    return (len(drafter.config.aux_layer_ids) + 1) * target.hidden_size * target.dtype.itemsize


def _free(device: torch.device, peak: int) -> int:
    """Bytes that this process has or could have."""
    if device.type != "cuda":
        return available_bytes() + peak
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def fitting_prompts(target: HFTarget) -> list[dict[str, str]]:
    """The prompts that ship, in rows of a prompt file, as far as the target's context holds them and an answer."""
    kinds: dict[str, list[str]] = json.loads(MIXED_PROMPTS_PATH.read_text(encoding="utf-8"))
    turns = zip_longest(*([(kind, text) for text in texts] for kind, texts in kinds.items()))
    rows = [{"category": row[0], "prompt": row[1]} for turn in turns for row in turn if row is not None]
    room = target.max_length // 2
    return [row for row in rows if render_texts(target.tokenizer, [row["prompt"]], room)]
