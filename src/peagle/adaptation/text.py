"""The text of an adaptation: what is served and what the drafter learned from, each with a part held out.

It is gathered once and stored, because a recording grows while the server runs: a rerun trains on the same text.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peagle.adaptation.config import AdaptSettings
from peagle.compare.answers import outputs_of_engine
from peagle.data.config import RegenerationConfig, SynthesisConfig, Until, differences
from peagle.data.conversations import Conversation, ConversationSet, read_conversations
from peagle.data.shards import HELD_OUT_NAME, check_target, is_shard_directory, open_shards, write_whole
from peagle.data.synthesis import write_synthesis
from peagle.drafter.model import Drafter
from peagle.errors import ConfigError, DataError
from peagle.rows import is_text, read_rows
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.training.data import answered

log = logging.getLogger(__name__)

RECORDS = "traffic-*.jsonl"
"""Files of a recording, as `engine/recorder.py` names them."""
TEXT_NAME = "text.npz"
PARTS = ("train", "traffic", "old")
MOST_HELD_OUT = 5
"""One of at least so many prompts is held out."""
NUM_OLD = {"cuda": 1024, "cpu": 96}
MOST_ANSWERED = 2048
"""Tokens of a conversation that the target answers."""
MOST_SYNTHESIZED = 512


@dataclass(frozen=True, eq=False)
class AdaptText:
    """Conversations by their use. `facts` go to the drafter's card."""

    train: Sequence[Conversation]
    traffic: Sequence[Conversation]
    """held out from what is served; the target's greedy answers"""
    old: Sequence[Conversation]
    """held out from old text, likewise"""
    facts: dict[str, Any]


def gather(
    target: HFTarget, drafter: Drafter, settings: AdaptSettings, work: Path, described: dict[str, Any]
) -> AdaptText:
    """The text of an adaptation, read from `work` if an earlier run stored it there. The target may have to write.

    A rerun must have the same settings, as `described`.
    """
    path = work / TEXT_NAME
    if path.exists():
        return _stored(path, settings.output, described)
    work.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds users' text
    new = read_served(target, drafter, settings.data, work)
    traffic_train, traffic = split(target, drafter, new, settings)
    old_train, old = _old_text(target, drafter, settings, work)
    if not old:
        raise DataError(
            "no old text is held out, so forgetting cannot be measured", hint="pass --old, or more --num-old"
        )
    kept = mixed(old_train, _num_tokens(traffic_train), settings)
    train = [*traffic_train, *kept]
    facts = {
        "name": settings.data.name,
        "num_conversations": len(train),
        "num_answer_tokens": sum(int(np.count_nonzero(row.loss_mask)) for row in train),
        "num_cut": new.num_cut,
        "num_dropped": new.num_dropped,
        "made_by": "adapt",
        "num_old": len(kept),
        "held_out": {"name": "traffic", "num": len(traffic), "num_old": len(old), "num_greedy": len(traffic)},
    }
    text = AdaptText(train, traffic, old, facts)
    write_whole(path, lambda file: np.savez(file, **_arrays(text, described)))
    return text


# What is served -------------------------------------------------------------------------------------------------------


def read_served(target: HFTarget, drafter: Drafter, path: Path, work: Path) -> ConversationSet:
    """Conversations with the target's own answers. Text in a file is answered anew; token ids are taken as they are."""
    if path.is_dir() and not is_shard_directory(path):
        path = _snapshot(path, work)
    elif not path.is_dir() and not _has_ids(path):
        length = min(MOST_ANSWERED, target.max_length)
        asked = RegenerationConfig(
            max_length=length, max_answer_tokens=min(length, RegenerationConfig.max_answer_tokens)
        )
        path = answered(target, path, work / "answers", asked, drafter)
    if is_shard_directory(path):
        check_target(path, target)
    return read_conversations(path, target.tokenizer, max_length=target.max_length, vocab_size=target.vocab_size)


def _has_ids(path: Path) -> bool:
    if is_text(path):
        return False
    _, row = next(read_rows(path))
    return "answer_ids" in row


def _snapshot(directory: Path, work: Path) -> Path:
    """One file with the records of a recording that have text. The server may keep recording."""
    files = sorted(directory.glob(RECORDS))
    if not files:
        raise DataError(
            f"{directory} is neither a recording nor a shard directory: it has no {RECORDS}",
            hint="record with `peagle serve --record DIR --record-text`, or pass a file of conversations",
        )
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    kept = [line for line in lines if _is_answer(line)]
    if not kept:
        raise DataError(
            f"{directory} holds {len(lines)} records, but no text: only ids and lengths were recorded",
            hint="record text as well: peagle serve --record DIR --record-text",
        )
    if len(kept) < len(lines):
        log.info("%s: %d of %d records have text", directory, len(kept), len(lines))
    path = work / "traffic.jsonl"
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return path


def _is_answer(line: str) -> bool:
    """Whether a record has text. The last line of a file may be half written."""
    try:
        return bool(json.loads(line).get("answer_ids"))
    except (json.JSONDecodeError, AttributeError):
        return False


# Holding out ----------------------------------------------------------------------------------------------------------


def split(
    target: HFTarget, drafter: Drafter, rows: ConversationSet, settings: AdaptSettings
) -> tuple[list[Conversation], list[Conversation]]:
    """Rows to train on, and held-out greedy ones, evenly spread. A prompt is on one side only, however often it came.

    If too few answers are known to be greedy, the target answers held-out prompts once more, greedily.
    """
    by_prompt: dict[bytes, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_prompt[row.token_ids[: _start(row)].tobytes()].append(index)
    groups = list(by_prompt.values())
    if len(groups) < MOST_HELD_OUT:
        raise DataError(
            f"{settings.data}: {len(groups)} different prompts with answers are too few to hold some out",
            hint=f"use at least {MOST_HELD_OUT}; a good adaptation needs hundreds",
        )
    number = min(settings.num_held_out, len(groups) // MOST_HELD_OUT)
    greedy = [group for group in groups if rows.is_greedy[group].any()]
    candidates = greedy if len(greedy) >= number else groups
    chosen = [candidates[place] for place in np.linspace(0, len(candidates) - 1, number).round().astype(int)]
    aside = {index for group in chosen for index in group}
    known = [next((index for index in group if rows.is_greedy[index]), None) for group in chosen]
    held_out = [rows.conversations[index] for index in known if index is not None]
    unknown = [rows.conversations[group[0]] for group, index in zip(chosen, known, strict=True) if index is None]
    if unknown:
        log.info("the target answers %d held-out prompts greedily, to measure acceptance", len(unknown))
        held_out += greedy_answers(target, drafter, unknown)
    return [row for index, row in enumerate(rows) if index not in aside], held_out


def greedy_answers(target: HFTarget, drafter: Drafter, rows: Sequence[Conversation]) -> list[Conversation]:
    """The prompts of these rows with the target's greedy answers, as long as the rows are."""
    prompts = [row.token_ids[: _start(row)].tolist() for row in rows]
    params = [SamplingParams(max_tokens=len(row) - len(prompt)) for row, prompt in zip(rows, prompts, strict=True)]
    outputs = outputs_of_engine(target, drafter, drafter.config.usual_num_draft_tokens, prompts, params)
    made = []
    for row, prompt, output in zip(rows, prompts, outputs, strict=True):
        token_ids = np.array([*prompt, *output.outputs[0].token_ids], dtype=np.int32)
        made.append(Conversation(token_ids, np.arange(len(token_ids)) >= len(prompt), row.number))
    return made


def _start(row: Conversation) -> int:
    """Where the first answer begins."""
    return int(np.argmax(row.loss_mask))


# Old text -------------------------------------------------------------------------------------------------------------


def _old_text(
    target: HFTarget, drafter: Drafter, settings: AdaptSettings, work: Path
) -> tuple[list[Conversation], list[Conversation]]:
    path = settings.old
    if path is None:
        path = _synthesized(target, drafter, settings, work / "old")
    if is_shard_directory(path / HELD_OUT_NAME) and open_shards(path / HELD_OUT_NAME).counts()["num_rows"]:
        held_out = read_conversations(path / HELD_OUT_NAME, target.tokenizer, vocab_size=target.vocab_size)
        rows = read_served(target, drafter, path, work)
        return list(rows), _spread(held_out.conversations, settings.num_held_out)
    return split(target, drafter, read_served(target, drafter, path, work / "given"), settings)


def _synthesized(target: HFTarget, drafter: Drafter, settings: AdaptSettings, directory: Path) -> Path:
    """Text of the kinds that the drafter's card names, written by the target; plain questions if it names none."""
    trained_on = {} if drafter.card is None else drafter.card.data.get("settings", {})
    kinds: dict[str, float] = trained_on.get("kinds") or {"chat": 1.0}
    number = settings.num_old or NUM_OLD[target.device.type]
    length = min(MOST_SYNTHESIZED, target.max_length)
    config = SynthesisConfig(
        max_length=length,
        kinds=",".join(f"{kind}={share}" for kind, share in kinds.items()),
        num_held_out=min(settings.num_held_out, -(-number // 3)),
        keep_cut=True,
        keep_loops=True,
        seed=settings.seed,
    )
    if not target.tokenizer.chat_template:
        config = config.for_base_model()
    log.info(
        "the target writes %d conversations of the kind that the drafter learned from; --old gives your own", number
    )
    write_synthesis(target, directory, config, Until(num_answers=number), (), config.described(), drafter=drafter)
    return directory


def mixed(old: Sequence[Conversation], num_new_tokens: int, settings: AdaptSettings) -> list[Conversation]:
    """As much old text as gives it its share of the training text, evenly spread; all if there is less."""
    wanted = settings.old_share / (1 - settings.old_share) * num_new_tokens
    have = _num_tokens(old)
    if not wanted or not have:
        return []
    return _spread(old, max(1, round(len(old) * min(1.0, wanted / have))))


def _spread(rows: Sequence[Conversation], number: int) -> list[Conversation]:
    places = np.linspace(0, len(rows) - 1, min(number, len(rows))).round().astype(int)
    return [rows[place] for place in places]


def _num_tokens(rows: Iterable[Conversation]) -> int:
    return sum(map(len, rows))


# Storing --------------------------------------------------------------------------------------------------------------


def _arrays(text: AdaptText, described: dict[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {"about": json.dumps({"facts": text.facts, "settings": described})}
    for part in PARTS:
        rows: Sequence[Conversation] = getattr(text, part)
        arrays[f"{part}_lengths"] = np.array([len(row) for row in rows], np.int64)
        arrays[f"{part}_ids"] = np.concatenate([row.token_ids for row in rows] or [np.zeros(0, np.int32)])
        arrays[f"{part}_mask"] = np.concatenate([row.loss_mask for row in rows] or [np.zeros(0, np.bool_)])
    return arrays


def _stored(path: Path, output: Path, described: dict[str, Any]) -> AdaptText:
    with np.load(path) as stored:
        about = json.loads(str(stored["about"]))
        if differing := differences(about["settings"], described):
            raise ConfigError(
                f"{output} holds an unfinished adaptation with other settings: {'; '.join(differing)}",
                hint="pass the earlier settings to resume it, or a new --output to start over",
            )
        parts: dict[str, list[Conversation]] = {}
        for part in PARTS:
            ends = np.cumsum(stored[f"{part}_lengths"])[:-1]
            pairs = (np.split(stored[f"{part}_{name}"], ends) for name in ("ids", "mask"))
            rows = zip(*pairs, strict=True)
            parts[part] = [Conversation(ids, mask, number) for number, (ids, mask) in enumerate(rows, 1) if len(ids)]
    return AdaptText(**parts, facts=about["facts"])
