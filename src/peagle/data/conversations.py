"""Conversations as token ids and loss masks, read from JSON files or shards.

Text rows go through the target's chat template. Token ids, in rows or shards, are used unchanged: decoding and
encoding them again might give other tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from peagle.data.shards import LossMask, TokenIds, open_shards
from peagle.errors import DataError, TargetError
from peagle.rows import SHAREGPT_ROLES, chat_messages, describe, is_text, place, read_rows
from peagle.tokenizer import answer_spans, tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANY_LENGTH = 2**31 - 1
ANSWER_KEYS = ("answer", "response", "completion")
ROW_SHAPES = (
    '{"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]}, '
    '{"prompt": text, "answer" or "response" or "completion": text}, {"prompt_ids": [...], "answer_ids": [...]}'
)


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One conversation: two read-only arrays of the same length, memory-mapped if they come from shards."""

    token_ids: TokenIds
    loss_mask: LossMask
    """True for tokens of the assistant"""
    number: int = 0
    """line of the file or row of the shards, counted from 1"""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ConversationSet:
    """The trainable conversations of a file or directory, and counts of the others."""

    conversations: tuple[Conversation, ...]
    num_cut: int
    """rows truncated at max_length that still have an answer"""
    num_dropped: int
    """rows without an answer token to train on"""
    num_answer_tokens: int
    """trained tokens of all rows"""
    is_greedy: npt.NDArray[np.bool_]
    """for each row, whether its answers are known to be greedy (temperature 0)"""

    def __len__(self) -> int:
        return len(self.conversations)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.conversations)


def read_conversations(
    path: str | Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int = ANY_LENGTH,
    vocab_size: int | None = None,
) -> ConversationSet:
    """Read a shard directory, or a JSONL or JSON-array file (plain or gzipped) with rows of the shapes ROW_SHAPES.

    Truncates rows at `max_length` tokens. Ids must be below `vocab_size` (default: the tokenizer's). Raises a DataError
    for a row that is not a conversation, for data without trainable rows, and for shards of another tokenizer;
    `shards.check_target` rejects shards of other weights.
    """
    path = Path(path)
    if path.is_dir():
        return _from_shards(path, tokenizer, max_length)
    vocab_size = vocab_size or len(tokenizer)
    conversations: list[Conversation] = []
    is_greedy: list[bool] = []
    num_cut = num_dropped = num_answer_tokens = 0
    for line_number, row in read_rows(path):
        token_ids, loss_mask = _row_tokens(row, tokenizer, vocab_size, place(path, line_number))
        is_cut = len(token_ids) > max_length
        if is_cut:
            # Copy, so that no view keeps the rest alive.
            token_ids, loss_mask = token_ids[:max_length].copy(), loss_mask[:max_length].copy()
        num_trained = int(np.count_nonzero(loss_mask))
        if num_trained == 0:
            num_dropped += 1
            continue
        num_cut += is_cut
        num_answer_tokens += num_trained
        conversations.append(Conversation(token_ids, loss_mask, line_number))
        is_greedy.append(row.get("temperature") == 0)
    counts = (num_cut, num_dropped, num_answer_tokens)
    return _checked(path, ConversationSet(tuple(conversations), *counts, np.array(is_greedy, np.bool_)), max_length)


def has_answers(path: Path) -> bool:
    """Whether a file holds conversations, not prompts, judged by its first row."""
    if is_text(path):
        return False
    _, row = next(read_rows(path))
    turns = row.get("messages", row.get("conversations"))
    if isinstance(turns, list):
        speakers = [turn.get("role", turn.get("from")) for turn in turns if isinstance(turn, dict)]
        return any(SHAREGPT_ROLES.get(str(speaker)) == "assistant" for speaker in speakers)
    is_prompt = any(key in row for key in ("prompt", "turns", "question", "instruction"))
    return not is_prompt or "answer_ids" in row or ("prompt" in row and any(key in row for key in ANSWER_KEYS))


def _from_shards(path: Path, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> ConversationSet:
    """Rows as views of the memory-mapped files."""
    shards = open_shards(path)
    if shards.target.tokenizer != tokenizer_hash(tokenizer):
        raise DataError(
            f"{path} was written by target {shards.target.name!r}, which has another tokenizer",
            hint="use the target that wrote the shards, or generate them again with this one",
        )
    conversations: list[Conversation] = []
    is_greedy = [np.zeros(0, dtype=np.bool_)]
    num_cut = num_dropped = num_answer_tokens = num_rows = 0
    for shard in shards.shards:
        starts = shard.offsets[:-1]
        ends = np.minimum(shard.offsets[1:], starts + max_length)
        trained_before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(shard.loss_mask, dtype=np.int64)))
        num_trained = trained_before[ends] - trained_before[starts]
        is_kept = num_trained > 0
        numbers = num_rows + 1 + np.flatnonzero(is_kept)
        num_rows += len(is_kept)
        num_dropped += int(np.count_nonzero(~is_kept))
        num_cut += int(np.count_nonzero(is_kept & (ends < shard.offsets[1:])))
        num_answer_tokens += int(num_trained.sum())
        is_greedy.append(shard.temperatures[is_kept] == 0)
        conversations += [
            Conversation(shard.token_ids[start:end], shard.loss_mask[start:end], number)
            for start, end, number in np.stack((starts[is_kept], ends[is_kept], numbers), axis=1).tolist()
        ]
    counts = (num_cut, num_dropped, num_answer_tokens)
    return _checked(path, ConversationSet(tuple(conversations), *counts, np.concatenate(is_greedy)), max_length)


def _checked(path: Path, conversations: ConversationSet, max_length: int) -> ConversationSet:
    if not len(conversations) and not conversations.num_dropped:
        raise DataError(f"{path} holds no rows", hint="generate some with `peagle data`")
    if not len(conversations):
        within, hint = "", "use rows with an assistant's answer"
        if max_length < ANY_LENGTH:
            within = f" within max_length = {max_length}"
            hint += ", or raise max_length above the length of the prompts"
        raise DataError(f"{path}: none of its {conversations.num_dropped} rows has an answer token{within}", hint=hint)
    return conversations


def _row_tokens(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", vocab_size: int, where: str
) -> tuple[TokenIds, LossMask]:
    # Ids take precedence over text.
    if "prompt_ids" in row or "answer_ids" in row:
        prompt_ids = _token_ids(row, "prompt_ids", vocab_size, where)
        answer_ids = _token_ids(row, "answer_ids", vocab_size, where)
        token_ids = np.concatenate((prompt_ids, answer_ids))
        loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
        # The first token has no predecessor to be predicted from.
        loss_mask[max(1, len(prompt_ids)) :] = True
        return token_ids, loss_mask
    messages = _row_messages(row, where)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where}: no assistant turn to train on (roles: {', '.join(message['role'] for message in messages)})",
            hint="let the target answer the prompts: peagle data regenerate",
        )
    try:
        ids, mask = answer_spans(tokenizer, messages)
    except (DataError, TargetError) as error:
        raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)


def _row_messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if (messages := chat_messages(row, where)) is not None:
        return messages
    answer_key = next((key for key in ANSWER_KEYS if key in row), None)
    if "prompt" in row and answer_key is not None:
        for key in ("prompt", answer_key):
            if not isinstance(row[key], str):
                raise DataError(
                    f"{where}: {key!r} is {describe(row[key])}; it must be a string",
                    hint='chat turns go under "messages", token ids under "prompt_ids" and "answer_ids"',
                )
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer_key]}]
    hint = f"allowed: {ROW_SHAPES}"
    if "prompt" in row or "question" in row or "turns" in row:
        hint += "; let the target answer a prompt file: peagle data regenerate"
    raise DataError(f"{where}: not a conversation; keys found: {', '.join(row) or 'none'}", hint=hint)


def _token_ids(row: dict[str, Any], key: str, vocab_size: int, where: str) -> TokenIds:
    value = row.get(key)
    if not isinstance(value, list):
        raise DataError(
            f"{where}: {key!r} is {describe(value)}; it must be a list of token ids",
            hint='a row of ids has both keys: {"prompt_ids": [...], "answer_ids": [...]}',
        )
    if not value:
        return np.zeros(0, dtype=np.int32)
    try:
        ids = np.array(value)
    except ValueError:
        ids = np.array(value, dtype=object)
    if ids.ndim != 1 or ids.dtype.kind != "i":
        wrong = [element for element in value if type(element) is not int]
        if wrong:
            shown = json.dumps(wrong[0])[:40]
            raise DataError(f"{where}: {key!r} holds {shown}; every element must be an integer token id")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{where}: {key!r} holds token id {low if low < 0 else high}; the target's ids are 0 to {vocab_size - 1}",
            hint="the ids come from another tokenizer; use the target that generated them",
        )
    return ids.astype(np.int32)
