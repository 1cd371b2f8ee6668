"""One training run from files to a finished drafter directory."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peagle.decoding.acceptance import Acceptance
from peagle.drafter.card import DrafterCard, TargetIdentity
from peagle.drafter.checkpoint import WEIGHTS_NAME, save_drafter
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.errors import ConfigError, DataError
from peagle.provenance import provenance
from peagle.targets.hf import HFTarget
from peagle.training.config import TrainConfig
from peagle.training.conversations import ConversationSet, read_conversations
from peagle.training.replay import replay
from peagle.training.resume import RunState
from peagle.training.trainer import Trainer

log = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, Any] | None], None]


def train_drafter(target: HFTarget, config: TrainConfig, on_step: OnStep) -> Drafter:
    """Train a drafter for `target` and write its directory (compact form) to `config.output`.

    An unfinished run of the same settings is continued. With `held_out` conversations, acceptance is replayed at
    every save and recorded in the metrics and the card. Nothing is written before settings and data were checked.
    """
    _check_limits(target, config)
    read = functools.partial(read_conversations, tokenizer=target.tokenizer, vocab_size=target.vocab_size)
    conversations = read(config.data, max_length=config.max_length)
    _check_labels(conversations, config)
    held_out = config.held_out and read(config.held_out, max_length=target.max_length)
    target.tap(config.aux_layer_ids or target.default_aux_layer_ids)
    drafter_config = config_for_target(
        target,
        num_layers=config.num_layers,
        num_draft_tokens=config.num_draft_tokens,
        mask_token_id=config.mask_token_id,
        fc_norm=config.fc_norm,
        embeddings=config.embeddings,
    )
    inputs = {"target_weights": target.fingerprint(), "data_bytes": config.data.stat().st_size}
    run = RunState(config, inputs)
    if (config.output / WEIGHTS_NAME).exists() and not run.can_continue:
        raise ConfigError(f"{config.output} already holds a finished drafter", hint="give another output")
    drafter = create_drafter(target, drafter_config, config.init, config.seed)
    trainer = Trainer(target, drafter, config, run)
    log.info(
        "training on %d conversations (%d answer tokens; %d cut at max_length, %d without an answer left out) "
        "from step %d",
        len(conversations),
        conversations.num_answer_tokens,
        conversations.num_cut,
        conversations.num_dropped,
        trainer.step,
    )

    def on_save(step: int) -> dict[str, Any]:
        assert held_out, "measured only with held-out conversations"
        return {"replay": _replay_record(replay(target, drafter, held_out.conversations, config.num_draft_tokens))}

    trainer.train(conversations.conversations, on_step, on_save if held_out else None)
    # From the metrics file, because an earlier process may have measured and then been stopped.
    replays = [line["replay"] for line in run.metrics() if "replay" in line]
    card = _card(target, drafter, config, conversations, replays[-1] if replays else None)
    save_drafter(drafter, config.output, card, full=False)
    run.finish()
    return drafter


def _check_limits(target: HFTarget, config: TrainConfig) -> None:
    if config.max_length > target.max_length:
        raise ConfigError(
            f"max_length {config.max_length} exceeds the target's {target.max_length}",
            hint=f"use at most {target.max_length}",
        )
    if config.init == "target" and config.num_layers > target.num_layers:
        raise ConfigError(
            f"num_layers {config.num_layers} exceeds the target's {target.num_layers}, so they cannot start as copies",
            hint=f"use at most {target.num_layers} layers, or init = random",
        )


def _check_labels(conversations: ConversationSet, config: TrainConfig) -> None:
    """Refuse data that teaches nothing: an answer's first token is the target's own, drafts begin with its second."""
    if not any((row.loss_mask[1:-1] & row.loss_mask[2:]).any() for row in conversations):
        raise DataError(
            f"{config.data}: no row has an answer of two tokens or more within max_length = {config.max_length}",
            hint="give longer answers, or raise max_length above the length of the prompts",
        )


def _card(
    target: HFTarget, drafter: Drafter, config: TrainConfig, data: ConversationSet, result: dict[str, Any] | None
) -> DrafterCard:
    settings = {key: value for key, value in dataclasses.asdict(config).items() if not isinstance(value, Path)}
    is_cuda = target.device.type == "cuda"
    return DrafterCard(
        target=TargetIdentity.of(target),
        method=drafter.config.method,
        num_draft_tokens=config.num_draft_tokens,
        max_length=config.max_length,
        aux_layer_ids=drafter.config.aux_layer_ids,
        data={
            "file": config.data.name,
            "num_conversations": len(data),
            "num_answer_tokens": data.num_answer_tokens,
            "num_cut": data.num_cut,
            "num_dropped": data.num_dropped,
        },
        acceptance={} if result is None else {"held_out_replay": result},
        training=settings
        | ({"peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if is_cuda else {}),
        provenance=provenance(torch.cuda.get_device_name() if is_cuda else None),
    )


def _replay_record(result: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": round(result.acceptance_length, 4),
        "per_position": [round(share, 4) for share in result.per_position],
        "num_drafts": result.num_drafts,
    }
