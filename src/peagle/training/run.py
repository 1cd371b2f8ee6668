"""One training run, from data to a drafter directory that is loaded back and checked."""

import dataclasses
import hashlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.checkpoint.card import DrafterCard, TargetIdentity, pair_head_of
from peagle.checkpoint.layouts import WEIGHTS_NAME
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.checkpoint.pair_head import as_stored
from peagle.compare.acceptance import baseline_after_training
from peagle.compare.evidence import record
from peagle.data.conversations import Conversation
from peagle.data.generation import check_max_length
from peagle.decoding.acceptance import Acceptance, acceptance_by_length
from peagle.drafter.model import Drafter
from peagle.drafter.pair_head import PairHead
from peagle.errors import CheckpointError, ConfigError
from peagle.objective.config import TrainConfig
from peagle.objective.eagle3 import UnrolledObjective
from peagle.objective.p_eagle import ParallelObjective
from peagle.objective.pairs import PairObjective
from peagle.provenance import provenance
from peagle.targets.hf import HFTarget
from peagle.training.curves import PLOT_NAME, plot, shown_on_tensorboard
from peagle.training.data import RunText, answer_counts, read_text
from peagle.training.distributed import World, shard, whole_state
from peagle.training.feature_store import contents_digest
from peagle.training.features import features_for
from peagle.training.initial_drafter import check_initial_drafter, draft_vocab_facts, earlier_facts, initial_drafter
from peagle.training.planner import planned
from peagle.training.replay import replay, replay_drafts
from peagle.training.resume import RunState, saved_settings
from peagle.training.trainer import Trainer

log = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, Any] | None], None]
Facts = dict[str, Any]
Replayed = tuple[Acceptance, Facts]
"""Acceptance on held-out answers, and by length of the text."""
OBJECTIVES: dict[str, type[ParallelObjective | UnrolledObjective]] = {
    "p-eagle": ParallelObjective,
    "eagle3": UnrolledObjective,
    "pair head": PairObjective,
}
NUM_CHECKED = 8
"""Conversations used to check the written directory if none are held out."""


def train_drafter(target: HFTarget, config: TrainConfig, on_step: OnStep, text: RunText | None = None) -> Drafter:
    """Train a drafter for `target`, write it to `config.output` (compact form), and return it as served.

    Resumes an unfinished run of the same settings. Each save also writes the current drafter to run/drafter and
    replays its acceptance on the held-out conversations. At the end the written directory is loaded back and must
    replay to the same acceptance. With several processes (see `distributed.py`) all call this, and the main process
    writes. Settings and data are checked first, except answers to a prompt file. `text` replaces `config.data`.
    """
    world = World.current()
    world.check(config)
    check_max_length(config.max_length, target)
    saved = saved_settings(config.output)
    earlier: Facts | None = saved.get("from_facts")
    if earlier is None:
        check_initial_drafter(target, config)
        earlier = None if config.from_drafter is None else earlier_facts(target, config.from_drafter)
    text = text or read_text(target, config, world)
    run = RunState(config, _inputs(target, text, earlier), world)
    if (config.output / WEIGHTS_NAME).exists() and not run.can_continue:
        raise ConfigError(f"{config.output} already holds a finished drafter", hint="pass a new --output")
    if config.keep_best and not text.held_out:
        raise ConfigError("keep_best needs held-out answers to compare checkpoints on", hint="pass --held-out FILE")
    counts_V = None if config.draft_vocab_size is None else answer_counts(text.conversations, target.vocab_size)
    drafter = initial_drafter(target, config, counts_V, saved)
    world.share(drafter.parameters())
    config = planned(target, drafter, config, world)
    features_of = features_for(target, config, text.conversations, world)
    if world.shards_layers(config):
        shard(drafter, target)
    objective = OBJECTIVES["pair head" if config.pair_head else config.method](drafter, config)
    trainer = Trainer(drafter, objective, features_of, config, run)
    if counts_V is not None:
        text.facts.update(draft_vocab_facts(drafter, counts_V))
    _log_start(text, config, world, trainer.step)

    def on_save(step: int) -> dict[str, Any]:
        served = _as_served(target, drafter)
        measured = _replayed(target, served, text.held_out, config.num_draft_tokens) if text.held_out else None
        card = _card(target, served, config, text, earlier, measured, step)
        if world.is_main:
            save_drafter(served, run.drafter, card, full=False)
        if measured is None:
            return {}
        replayed = _record(served, *measured)
        if world.is_main and config.keep_best and replayed["acceptance_length"] > run.best_replay()[0]:
            save_drafter(served, run.best, card, full=False)
        return {"replay": replayed}

    with shown_on_tensorboard(run, trainer.step):
        trainer.train(text.conversations, on_step, on_save)
    served, step = _as_served(target, drafter), config.num_steps
    if config.keep_best:
        world.barrier()
        length, step = run.best_replay()
        log.info("the drafter of step %d is kept: acceptance length %.3f on held-out answers", step, length)
        served = load_drafter(run.best, target)
    checked = text.held_out or text.conversations[:NUM_CHECKED]
    measured = _replayed(target, served, checked, config.num_draft_tokens)
    card = _card(target, served, config, text, earlier, measured if text.held_out else None, step)
    # In all processes, because the target may be sharded.
    with_engine = world.size == 1 and target.device.type == "cpu"
    acceptance = card.acceptance | _replay_without_pair_head(target, served, text, config.num_draft_tokens)
    acceptance |= baseline_after_training(target, served, with_engine=with_engine)
    card = dataclasses.replace(card, evidence=record(target, served), acceptance=acceptance)
    if world.is_main:
        save_drafter(served, config.output, card, full=False)
        size = f"{config.num_layers} layers, {config.num_draft_tokens} depths"
        plot(run.metrics(), config.output / PLOT_NAME, f"{config.method} drafter for {target.name}: {size}")
    world.barrier()
    _check_written(target, config, checked, measured[0])
    run.finish()
    return served


def seconds_per_step(target: HFTarget, config: TrainConfig, text: RunText, num_steps: int = 4) -> float:
    """Time of a training step, from the first steps of a run that is thrown away."""
    counts_V = None if config.draft_vocab_size is None else answer_counts(text.conversations, target.vocab_size)
    ended: list[float] = []
    with tempfile.TemporaryDirectory(prefix="peagle-timing-") as scratch:
        changes: dict[str, Any] = {"num_steps": num_steps, "log_every": 1, "save_every": num_steps}
        config = dataclasses.replace(config, output=Path(scratch), **changes)
        drafter = initial_drafter(target, config, counts_V)
        config = planned(target, drafter, config, World.current())
        features_of = features_for(target, config, text.conversations, World.current())
        trainer = Trainer(drafter, OBJECTIVES[config.method](drafter, config), features_of, config, RunState(config))
        trainer.train(text.conversations, lambda *_: ended.append(time.perf_counter()))
    later = [after - before for before, after in pairwise(ended)]  # the first step compiles
    return statistics.median(later)


def _inputs(target: HFTarget, text: RunText, earlier: Facts | None) -> Facts:
    """Hashes of everything the settings only name. A run resumes only if they match."""
    inputs = {
        "target_weights": target.fingerprint(),
        "num_answer_tokens": text.facts["num_answer_tokens"],
        "data_contents": _digest(text.conversations),
        "held_out_contents": _digest(text.held_out),
    }
    return inputs | ({} if earlier is None else {"from_weights": earlier["weights"], "from_facts": earlier})


def _digest(conversations: Sequence[Conversation]) -> str:
    """A hash of token ids and loss masks."""
    digest = hashlib.sha256(contents_digest(conversations, [len(row) for row in conversations]).encode())
    for row in conversations:
        digest.update(np.packbits(row.loss_mask).tobytes())
    return digest.hexdigest()[:32]


def _log_start(text: RunText, config: TrainConfig, world: World, step: int) -> None:
    if config.parallel == "fsdp" and not world.shards_layers(config):
        log.warning("--parallel fsdp has no effect in a single process; start several with torchrun")
    if config.warmup_steps >= config.num_steps:
        message = "warmup_steps %d >= num_steps %d: the learning rate never reaches its peak"
        log.warning(message, config.warmup_steps, config.num_steps)
    log.info(
        "training on %(num_conversations)d conversations (%(num_answer_tokens)d answer tokens; %(num_cut)d truncated "
        "at max_length, %(num_dropped)d dropped without an answer)",
        text.facts,
    )
    log.info(
        "%s step %d; %d held-out conversations", "resuming at" if step else "starting at", step, len(text.held_out)
    )


def _as_served(target: HFTarget, drafter: Drafter) -> Drafter:
    """The drafter as a server loads it: weights rounded to the saved precision, then in the target's dtype."""
    served = Drafter(drafter.config, target.embedding_VD, target.head_VD).to(target.device)
    served.load_state_dict(whole_state(drafter.without_pair_head().state_dict()))
    if drafter.pair_head is not None:
        served.pair_head = as_stored(PairHead(*(table_UR.detach() for table_UR in drafter.pair_head.tables())))
    return served.to(torch.bfloat16).to(target.dtype).eval().requires_grad_(False)


def _check_written(
    target: HFTarget, config: TrainConfig, conversations: Sequence[Conversation], expected: Acceptance
) -> None:
    """Load the written directory as a server does and check that it accepts the same drafts."""
    loaded = load_drafter(config.output, target)
    found = replay(target, loaded, conversations, config.num_draft_tokens)
    if found != expected:
        raise CheckpointError(
            f"{config.output} differs from the trained drafter: loaded back it accepts {found.num_accepted} draft "
            f"tokens in {found.num_drafts} drafts, in memory {expected.num_accepted} in {expected.num_drafts}",
            hint="check the disk; the run's state is kept, so rerun the command to write the directory again",
        )


def _card(
    target: HFTarget,
    drafter: Drafter,
    config: TrainConfig,
    text: RunText,
    earlier: Facts | None,
    measured: Replayed | None,
    step: int,
) -> DrafterCard:
    """The drafter card, without the evidence, which takes longer."""
    settings = {key: value for key, value in dataclasses.asdict(config).items() if not isinstance(value, Path)}
    is_cuda = target.device.type == "cuda"
    if earlier is not None:
        settings["from_drafter"] = earlier
        del settings["init"]  # not used
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
        acceptance={} if measured is None else {"held_out_replay": _record(drafter, *measured)},
        training=settings,
        provenance=provenance(torch.cuda.get_device_name() if is_cuda else None),
    )


def _replay_without_pair_head(
    target: HFTarget, drafter: Drafter, text: RunText, num_draft_tokens: int
) -> dict[str, Any]:
    """What a pair head is compared with on the card; empty without one."""
    if drafter.pair_head is None or not text.held_out:
        return {}
    plain = drafter.without_pair_head()
    found = replay(target, plain, text.held_out, num_draft_tokens)
    return {"held_out_replay_without_pair_head": _record(plain, found)}


def _replayed(
    target: HFTarget, drafter: Drafter, conversations: Sequence[Conversation], num_draft_tokens: int
) -> Replayed:
    drafts = replay_drafts(target, drafter, conversations, num_draft_tokens)
    acceptance = Acceptance.of((draft.num_accepted for draft in drafts), num_draft_tokens)
    return acceptance, {"by_length": acceptance_by_length(drafts)}


def _record(drafter: Drafter, result: Acceptance, more: Facts | None = None) -> Facts:
    record = {
        "num_draft_tokens": len(result.accepted_per_position),
        "acceptance_length": round(result.acceptance_length, 4),
        "per_position": [round(share, 4) for share in result.per_position],
        "num_drafts": result.num_drafts,
    }
    return pair_head_of(drafter) | record | (more or {})
