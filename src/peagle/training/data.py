"""The text of a run: what is trained on, what is set apart to measure acceptance, and the facts about both."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.card import TargetIdentity
from peagle.errors import DataError
from peagle.json_rows import SHAREGPT_ROLES, is_text, read_rows
from peagle.targets.hf import HFTarget
from peagle.training.config import TrainConfig
from peagle.training.conversations import ANSWER_KEYS, Conversation, ConversationSet, read_conversations
from peagle.training.generation import RegenerationConfig
from peagle.training.shard_writer import check_made_by
from peagle.training.shards import check_target, is_shard_directory, open_shards, read_manifest

log = logging.getLogger(__name__)

AnswerPrompts = Callable[[Path, Path, RegenerationConfig], None]
"""Has the target answer a prompt file (the first path) into a directory of shards (the second)."""
HELD_OUT_NAME = "held_out"
MOST_HELD_OUT = 0.1
"""Share of the greedy answers that may be taken from the training for measuring."""


@dataclass(frozen=True, eq=False)
class RunText:
    """Conversations by their use. `facts` go to the drafter's card."""

    conversations: Sequence[Conversation]
    held_out: Sequence[Conversation]
    facts: dict[str, Any]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.facts["num_answer_tokens"])


def read_text(target: HFTarget, config: TrainConfig, answer_prompts: AnswerPrompts | None) -> RunText:
    """Read what `config` names. A file of prompts is first answered, into OUTPUT/data; that may be interrupted, too."""
    path = config.data
    if not path.is_dir() and not has_answers(path):
        path = _answered(target, config, answer_prompts)
    data = _read(path, target, config.max_length)
    _check_labels(path, data, config)
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
            log.warning("%s is unfinished: trained on is what is there; `peagle data` with its options goes on", path)
    given = config.held_out
    if given is None and is_shard_directory(path / HELD_OUT_NAME):
        given = path / HELD_OUT_NAME
        if not open_shards(given).counts()["num_rows"]:
            log.warning("%s holds no rows, so some of the data's own are set apart", given)
            given = None
    if given is None:
        return _split(data, config, facts)
    held_out = _read(given, target, target.max_length)
    num_greedy = int(np.count_nonzero(held_out.is_greedy))
    if num_greedy < len(held_out):
        log.warning(
            "%s: %d of %d answers are known to be greedy ones of the target; the acceptance replayed on others is that "
            "of drafts which equal the text, and serving may show another",
            given,
            num_greedy,
            len(held_out),
        )
    facts["held_out"] = {"name": given.name, "num": len(held_out), "num_greedy": num_greedy}
    return RunText(data.conversations, held_out.conversations, facts)


def has_answers(path: Path) -> bool:
    """Whether a file is one of conversations; by its first row, without which it is a DataError."""
    if is_text(path):
        return False
    _, row = next(read_rows(path))
    turns = row.get("messages", row.get("conversations"))
    if isinstance(turns, list):
        speakers = [turn.get("role", turn.get("from")) for turn in turns if isinstance(turn, dict)]
        return any(SHAREGPT_ROLES.get(str(speaker)) == "assistant" for speaker in speakers)
    is_prompt = any(key in row for key in ("prompt", "turns", "question", "instruction"))
    return not is_prompt or "answer_ids" in row or ("prompt" in row and any(key in row for key in ANSWER_KEYS))


def answer_counts(conversations: Sequence[Conversation], vocab_size: int) -> Tensor:
    """How often each token occurs in the answers, [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in conversations:
        counts += np.bincount(row.token_ids[row.loss_mask], minlength=vocab_size)
    return torch.from_numpy(counts)


def _answered(target: HFTarget, config: TrainConfig, answer_prompts: AnswerPrompts | None) -> Path:
    directory = config.output / "data"
    asked = RegenerationConfig(config.max_length, config.max_length, seed=config.seed)
    if is_shard_directory(directory) and read_manifest(directory)["is_complete"]:
        check_made_by(directory, "regenerate", TargetIdentity.of(target), asked.described(config.data))
        return directory
    if answer_prompts is None:
        raise DataError(
            f"{config.data} holds prompts without answers",
            hint="let the target answer them first: peagle data regenerate",
        )
    log.info("%s holds prompts: the target answers them first, into %s", config.data, directory)
    answer_prompts(config.data, directory, asked)
    return directory


def _read(path: Path, target: HFTarget, max_length: int) -> ConversationSet:
    if is_shard_directory(path):
        check_target(path, target)
    return read_conversations(path, target.tokenizer, max_length=max_length, vocab_size=target.vocab_size)


def _check_labels(path: Path, conversations: ConversationSet, config: TrainConfig) -> None:
    """Refuse data that teaches nothing: an answer's first token is the target's own, drafts begin with its second."""
    if not any((row.loss_mask[1:-1] & row.loss_mask[2:]).any() for row in conversations):
        raise DataError(
            f"{path}: no row has an answer of two tokens or more within max_length = {config.max_length}",
            hint="give longer answers, or raise max_length above the length of the prompts",
        )


def _split(data: ConversationSet, config: TrainConfig, facts: dict[str, Any]) -> RunText:
    """Set greedy answers apart, evenly spread over the data; none where it does not say which are greedy."""
    greedy = np.flatnonzero(data.is_greedy)
    number = min(config.num_held_out, int(MOST_HELD_OUT * len(greedy)))
    if number == 0:
        if config.num_held_out:
            log.warning(
                "acceptance is not measured: of %d conversations %d are known to be greedy answers, too few to set "
                "some apart; give some with held_out",
                len(data),
                len(greedy),
            )
        return RunText(data.conversations, (), facts)
    aside = set(greedy[np.linspace(0, len(greedy) - 1, number).round().astype(int)].tolist())
    held_out = [data.conversations[index] for index in sorted(aside)]
    kept = [row for index, row in enumerate(data.conversations) if index not in aside]
    num_answer_tokens = sum(int(np.count_nonzero(row.loss_mask)) for row in kept)
    facts |= {"num_conversations": len(kept), "num_answer_tokens": num_answer_tokens}
    facts["held_out"] = {"name": "split off the data", "num": number, "num_greedy": number}
    return RunText(kept, held_out, facts)
