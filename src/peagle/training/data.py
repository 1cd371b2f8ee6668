"""The conversations of a run: what it trains on, what it holds out, and the facts about both for the card."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.checkpoint.card import TargetIdentity
from peagle.data.config import RegenerationConfig
from peagle.data.conversations import Conversation, ConversationSet, has_answers, read_conversations
from peagle.data.inspection import trained_token_counts
from peagle.data.prompts import read_dialogs
from peagle.data.regeneration import answer_dialogs
from peagle.data.shard_writer import check_made_by
from peagle.data.shards import HELD_OUT_NAME, check_target, is_shard_directory, open_shards, read_manifest
from peagle.drafter.model import Drafter
from peagle.errors import DataError
from peagle.objective.config import TrainConfig
from peagle.targets.hf import HFTarget
from peagle.training.distributed import ALONE, World

log = logging.getLogger(__name__)

MOST_HELD_OUT = 0.1
"""The largest share of the greedy answers to hold out."""


@dataclass(frozen=True, eq=False)
class RunText:
    """Conversations by their use. `facts` go to the drafter's card."""

    conversations: Sequence[Conversation]
    held_out: Sequence[Conversation]
    facts: dict[str, Any]


def read_text(target: HFTarget, config: TrainConfig, world: World) -> RunText:
    """Read the data of `config`. The target first answers a prompt file, into OUTPUT/data, which can be resumed."""
    path = config.data
    if not path.is_dir() and not has_answers(path):
        asked = RegenerationConfig(max_length=config.max_length, max_answer_tokens=config.max_length, seed=config.seed)
        path = answered(target, path, config.output / "data", asked, world=world)
    data = _read(path, target, config.max_length)
    # The target emits an answer's first token, so drafts begin with the second.
    if not any((row.loss_mask[1:-1] & row.loss_mask[2:]).any() for row in data):
        raise DataError(
            f"{path}: no row has an answer of two or more tokens within max_length = {config.max_length}",
            hint="use longer answers, or raise max_length above the length of the prompts",
        )
    facts: dict[str, Any] = {
        "name": config.data.name,
        "num_conversations": len(data),
        "num_answer_tokens": data.num_answer_tokens,
        "num_cut": data.num_cut,
        "num_dropped": data.num_dropped,
    }
    if is_shard_directory(path):
        manifest = read_manifest(path)
        facts |= {"made_by": manifest["kind"], "settings": manifest["settings"]}
        if not manifest["is_complete"]:
            log.warning("%s is unfinished; training on what it holds (rerun its `peagle data` command to resume)", path)
    given = config.held_out
    if given is None and is_shard_directory(path / HELD_OUT_NAME):
        given = path / HELD_OUT_NAME
        if not open_shards(given).counts()["num_rows"]:
            log.warning("%s holds no rows; holding out some of the training data", given)
            given = None
    if given is None:
        return _split(data, config, facts)
    held_out = _read(given, target, target.max_length)
    num_greedy = int(np.count_nonzero(held_out.is_greedy))
    if num_greedy < len(held_out):
        message = "%s: only %d of %d answers are known to be greedy; acceptance on the others may differ from serving"
        log.warning(message, given, num_greedy, len(held_out))
    facts["held_out"] = {"name": given.name, "num": len(held_out), "num_greedy": num_greedy}
    return RunText(data.conversations, held_out.conversations, facts)


def answer_counts(conversations: Sequence[Conversation], vocab_size: int) -> Tensor:
    """How often each token occurs in the answers, [vocab_size]."""
    return torch.from_numpy(trained_token_counts(conversations, vocab_size))


def answered(
    target: HFTarget,
    path: Path,
    directory: Path,
    asked: RegenerationConfig,
    drafter: Drafter | None = None,
    world: World = ALONE,
) -> Path:
    """The shard directory with the target's answers to a prompt file; written now, resumed, or found complete."""
    settings = asked.described(path)
    if is_shard_directory(directory) and read_manifest(directory)["is_complete"]:
        check_made_by(directory, "regenerate", TargetIdentity.of(target), settings)
        return directory
    if world.size > 1:
        raise DataError(
            f"{path} holds prompts without answers",
            hint=f"answer them first: peagle data regenerate --prompts {path} --output DIR",
        )
    log.info("%s holds prompts: the target answers them first, into %s", path, directory)
    answer_dialogs(target, read_dialogs(path), directory, asked, settings, drafter=drafter)
    return directory


def _read(path: Path, target: HFTarget, max_length: int) -> ConversationSet:
    if is_shard_directory(path):
        check_target(path, target)
    return read_conversations(path, target.tokenizer, max_length=max_length, vocab_size=target.vocab_size)


def _split(data: ConversationSet, config: TrainConfig, facts: dict[str, Any]) -> RunText:
    """Hold out greedy answers, evenly spread over the data; none if it does not say which are greedy."""
    greedy = np.flatnonzero(data.is_greedy)
    number = min(config.num_held_out, int(MOST_HELD_OUT * len(greedy)))
    if number == 0:
        if config.num_held_out:
            message = (
                "acceptance is not measured: %d of %d conversations are known to be greedy, and of these at most a "
                "tenth is held out; pass --held-out"
            )
            log.warning(message, len(greedy), len(data))
        return RunText(data.conversations, (), facts)
    aside = set(greedy[np.linspace(0, len(greedy) - 1, number).round().astype(int)].tolist())
    held_out = [data.conversations[index] for index in sorted(aside)]
    kept = [row for index, row in enumerate(data.conversations) if index not in aside]
    num_answer_tokens = sum(int(np.count_nonzero(row.loss_mask)) for row in kept)
    facts |= {"num_conversations": len(kept), "num_answer_tokens": num_answer_tokens}
    facts["held_out"] = {"name": "split off the data", "num": number, "num_greedy": number}
    return RunText(kept, held_out, facts)
