"""One training run from files to a drafter directory that was loaded and measured again."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.decoding.acceptance import Acceptance
from peagle.decoding.reference import decode
from peagle.drafter.card import DrafterCard, TargetIdentity
from peagle.drafter.checkpoint import load_drafter, save_drafter
from peagle.drafter.evidence import record
from peagle.drafter.layouts import WEIGHTS_NAME
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.provenance import provenance
from peagle.targets.hf import HFTarget
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation
from peagle.training.curves import PLOT_NAME, plot, shown_on_tensorboard
from peagle.training.data import AnswerPrompts, RunText, answer_counts, read_text
from peagle.training.distributed import World, shard, whole_state
from peagle.training.eagle3 import UnrolledObjective
from peagle.training.feature_store import contents_digest
from peagle.training.features import features_for
from peagle.training.objective import Objective
from peagle.training.p_eagle import ParallelObjective
from peagle.training.planner import planned
from peagle.training.replay import replay
from peagle.training.resume import RunState
from peagle.training.start import check_start, draft_vocab_facts, earlier_facts, starting_drafter
from peagle.training.trainer import Trainer

log = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, Any] | None], None]
OBJECTIVES: dict[str, Callable[[Drafter, TrainConfig], Objective]] = {
    "p-eagle": ParallelObjective,
    "eagle3": UnrolledObjective,
}
NUM_CHECKED = 8
"""Conversations by which the written directory is checked where none are held out."""


def train_drafter(
    target: HFTarget, config: TrainConfig, on_step: OnStep, answer_prompts: AnswerPrompts | None = None
) -> Drafter:
    """Train a drafter for `target`, write its directory (compact form) to `config.output`, and return it as served.

    An unfinished run of the same settings is continued. At every save the drafter so far is written to run/drafter, to
    be tried or trained on from; where there are held-out conversations, acceptance is replayed with it and recorded in
    the metrics and the card. In the end the directory is loaded again, and must replay
    to what the drafter in memory does. Of several processes (see `distributed.py`) all take part, and the first one
    writes. Nothing is written before settings and data were checked, except for the answers to a file of prompts,
    which `answer_prompts` has the target write.
    """
    world = World.current()
    world.check(config)
    _check_limits(target, config)
    check_start(target, config)
    text = read_text(target, config, answer_prompts)
    run = RunState(config, _inputs(target, config, text), world)
    if (config.output / WEIGHTS_NAME).exists() and not run.can_continue:
        raise ConfigError(f"{config.output} already holds a finished drafter", hint="give another output")
    counts_V = None if config.draft_vocab_size is None else answer_counts(text.conversations, target.vocab_size)
    drafter = starting_drafter(target, config, counts_V)
    world.share(drafter.parameters())
    if counts_V is not None:
        text.facts.update(draft_vocab_facts(drafter, counts_V))
    config = planned(target, drafter, config, world)
    features_of = features_for(target, config, text.conversations, world)
    if world.shards_layers(config):
        shard(drafter, target)
    objective = OBJECTIVES[config.method](drafter, config)
    trainer = Trainer(drafter, objective, features_of, config, run)
    _log_start(text, config, world, trainer.step)

    def on_save(step: int) -> dict[str, Any]:
        served = _as_served(target, drafter)
        measured = replay(target, served, text.held_out, config.num_draft_tokens) if text.held_out else None
        card = _card(target, served, config, text, measured, step)
        if world.is_main:
            save_drafter(served, run.drafter, card, full=False)
        return {} if measured is None else {"replay": _record(measured)}

    with shown_on_tensorboard(run, trainer.step):
        trainer.train(text.conversations, on_step, on_save)
    served = _as_served(target, drafter)
    checked = text.held_out or text.conversations[:NUM_CHECKED]
    measured = replay(target, served, checked, config.num_draft_tokens)
    card = _card(target, served, config, text, measured if text.held_out else None, config.num_steps)
    # By all processes: the target may be spread over them.
    card = dataclasses.replace(card, evidence=record(target, served, decode))
    if world.is_main:
        save_drafter(served, config.output, card, full=False)
        title = (
            f"{config.method} drafter for {target.name}: {config.num_layers} layers, {config.num_draft_tokens} depths"
        )
        plot(run.metrics(), config.output / PLOT_NAME, title)
    world.barrier()
    _check_written(target, config, checked, measured)
    run.finish()
    return served


def _check_limits(target: HFTarget, config: TrainConfig) -> None:
    if config.max_length > target.max_length:
        raise ConfigError(
            f"max_length {config.max_length} exceeds the target's {target.max_length}",
            hint=f"use at most {target.max_length}",
        )


def _inputs(target: HFTarget, config: TrainConfig, text: RunText) -> dict[str, Any]:
    """Facts about what the settings only name: a run is not continued with others."""
    inputs = {
        "target_weights": target.fingerprint(),
        "num_answer_tokens": text.num_answer_tokens,
        "data_contents": _digest(text.conversations),
        "held_out_contents": _digest(text.held_out),
    }
    if config.from_drafter is not None:
        inputs["from_weights"] = earlier_facts(target, config.from_drafter)["weights"]
    return inputs


def _digest(conversations: Sequence[Conversation]) -> str:
    """A hash of token ids and of what of them is learned."""
    digest = hashlib.sha256(contents_digest(conversations, [len(row) for row in conversations]).encode())
    for row in conversations:
        digest.update(np.packbits(row.loss_mask).tobytes())
    return digest.hexdigest()[:32]


def _log_start(text: RunText, config: TrainConfig, world: World, step: int) -> None:
    if config.parallel == "fsdp" and not world.shards_layers(config):
        log.warning("parallel = fsdp changes nothing in one process; torchrun starts several")
    if config.warmup_steps >= config.num_steps:
        log.warning(
            "warmup_steps %d of num_steps %d: the learning rate never reaches its peak",
            config.warmup_steps,
            config.num_steps,
        )
    facts = text.facts
    log.info(
        "training on %d conversations (%d answer tokens; %d cut at max_length, %d without an answer left out) "
        "from step %d; acceptance is measured on %d others",
        facts["num_conversations"],
        facts["num_answer_tokens"],
        facts["num_cut"],
        facts["num_dropped"],
        step,
        len(text.held_out),
    )


def _as_served(target: HFTarget, drafter: Drafter) -> Drafter:
    """The drafter as it will be loaded: its weights rounded to what is written, in the target's precision."""
    served = Drafter(drafter.config, target.embedding_VD, target.head_VD).to(target.device)
    served.load_state_dict(whole_state(drafter.state_dict()))
    return served.to(torch.bfloat16).to(target.dtype).eval().requires_grad_(False)


def _check_written(
    target: HFTarget, config: TrainConfig, conversations: Sequence[Conversation], expected: Acceptance
) -> None:
    """Load the directory as a server would; a drafter that then accepts otherwise was not written as it was trained."""
    loaded = load_drafter(config.output, target)
    found = replay(target, loaded, conversations, config.num_draft_tokens)
    if found != expected:
        raise CheckpointError(
            f"{config.output}, loaded again, accepts {found.num_accepted} draft tokens in {found.num_drafts} drafts, "
            f"the drafter in memory {expected.num_accepted} in {expected.num_drafts}: it was not written as it is",
            hint="check the disk; the run's state is kept, so the same command writes the directory again",
        )


def _card(
    target: HFTarget, drafter: Drafter, config: TrainConfig, text: RunText, measured: Acceptance | None, step: int
) -> DrafterCard:
    """What is known of the drafter but for the evidence, which takes the target some time."""
    settings = {key: value for key, value in dataclasses.asdict(config).items() if not isinstance(value, Path)}
    is_cuda = target.device.type == "cuda"
    if config.from_drafter is not None:
        settings["from_drafter"] = earlier_facts(target, config.from_drafter)
        del settings["init"]  # which was not looked at
    if step < config.num_steps:
        settings["num_steps_done"] = step
    if is_cuda:
        settings["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return DrafterCard(
        target=TargetIdentity.of(target),
        method=drafter.config.method,
        num_draft_tokens=config.num_draft_tokens,
        max_length=config.max_length,
        aux_layer_ids=drafter.config.aux_layer_ids,
        data=text.facts,
        acceptance={} if measured is None else {"held_out_replay": _record(measured)},
        training=settings,
        provenance=provenance(torch.cuda.get_device_name() if is_cuda else None),
    )


def _record(result: Acceptance) -> dict[str, Any]:
    return {
        "num_draft_tokens": len(result.accepted_per_position),
        "acceptance_length": round(result.acceptance_length, 4),
        "per_position": [round(share, 4) for share in result.per_position],
        "num_drafts": result.num_drafts,
    }
