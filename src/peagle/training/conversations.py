"""Conversations as training rows: token ids, and which of them the target is to be imitated on.

Text rows go through the target's chat template; rows of token ids and shards, as the target generated them, are used
as they are, because decoding and encoding again need not give the same tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from peagle.errors import ConfigError, DataError, TargetError
from peagle.json_rows import chat_messages, describe, place, read_rows, sharegpt_messages
from peagle.tokenizer import answer_spans, tokenizer_hash
from peagle.training.shards import LossMask, Shard, TokenIds, open_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANY_LENGTH = 2**31 - 1
ANSWER_KEYS = ("answer", "response", "completion")
ROW_SHAPES = (
    '{"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]}, '
    '{"prompt": text, "answer" or "response" or "completion": text}, {"prompt_ids": [...], "answer_ids": [...]}'
)
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One training row: two arrays of the same length, not to be written to; those of shards lie on the disk."""

    token_ids: TokenIds
    loss_mask: LossMask
    """True where the token was written by the assistant"""
    number: int = 0
    """where to find it in the data, counted from 1: the line of a file, the row of a directory of shards"""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ConversationSet:
    """All rows of one file or directory that can be trained on, in its order, and what became of the others."""

    conversations: tuple[Conversation, ...]
    num_cut: int
    """rows that were longer than max_length and lost their end (those without an answer left are in num_dropped)"""
    num_dropped: int
    """rows left out because no answer token was left to train on"""
    num_answer_tokens: int
    """trained tokens over all rows kept"""
    is_greedy: npt.NDArray[np.bool_]
    """for each row kept, whether it is known that its answers were taken at temperature 0"""

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
    """Read a directory of shards, or a JSONL or JSON-array file (plain or gzipped) with rows of the shapes ROW_SHAPES.

    Rows are cut at `max_length` tokens; ids must lie below `vocab_size`, by default the tokenizer's. A row that cannot
    be understood or has no assistant turn is a DataError that names its line; data of which no row can be trained on
    is one, too. Shards of another tokenizer are refused here, those of other weights by `shards.check_target`.
    """
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2, got {max_length}")
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
            # Copies, so that the cut-off part is not kept alive by a view.
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


def _from_shards(path: Path, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> ConversationSet:
    """Rows as views of the mapped files: nothing is copied, and reading them is left to whoever uses them."""
    shards = open_shards(path)
    if shards.target.tokenizer != tokenizer_hash(tokenizer):
        raise DataError(
            f"{path} was written by target {shards.target.name!r}, which has another tokenizer",
            hint="give the target that wrote the shards, or write them again with this one",
        )
    conversations: list[Conversation] = []
    is_greedy = [np.zeros(0, dtype=np.bool_)]
    num_cut = num_dropped = num_answer_tokens = num_rows = 0
    for shard in shards.shards:
        starts, ends, num_trained = _bounds(shard, max_length)
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


def _bounds(shard: Shard, max_length: int) -> tuple[Int64s, Int64s, Int64s]:
    """Start, end and number of trained tokens of each row, cut at `max_length`."""
    starts = shard.offsets[:-1]
    ends = np.minimum(shard.offsets[1:], starts + max_length)
    trained_before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(shard.loss_mask, dtype=np.int64)))
    return starts, ends, trained_before[ends] - trained_before[starts]


def _checked(path: Path, conversations: ConversationSet, max_length: int) -> ConversationSet:
    if not len(conversations) and not conversations.num_dropped:
        raise DataError(f"{path} holds no rows", hint="give data that has some, or write more of it with peagle data")
    if not len(conversations):
        within, hint = "", "give rows with an assistant's answer"
        if max_length < ANY_LENGTH:
            within = f" within max_length = {max_length}"
            hint += ", or raise max_length above the length of the prompts"
        raise DataError(f"{path}: none of its {conversations.num_dropped} rows has an answer token{within}", hint=hint)
    return conversations


def _row_tokens(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", vocab_size: int, where: str
) -> tuple[TokenIds, LossMask]:
    # Ids first: rows that carry the text beside the ids are there to be read by people.
    if "prompt_ids" in row or "answer_ids" in row:
        prompt_ids = _token_ids(row, "prompt_ids", vocab_size, where)
        answer_ids = _token_ids(row, "answer_ids", vocab_size, where)
        token_ids = np.concatenate((prompt_ids, answer_ids))
        loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
        # The first token of all has no predecessor to be predicted from.
        loss_mask[max(1, len(prompt_ids)) :] = True
        return token_ids, loss_mask
    messages = _row_messages(row, where)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where}: no assistant turn to learn from (roles: {', '.join(message['role'] for message in messages)})",
            hint="let the target answer the prompts: peagle data regenerate",
        )
    try:
        ids, mask = answer_spans(tokenizer, messages)
    except (DataError, TargetError) as error:
        raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)


def _row_messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if "messages" in row:
        return chat_messages(row["messages"], where)
    if "conversations" in row:
        return sharegpt_messages(row["conversations"], where)
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
        hint += "; let the target answer a file of prompts: peagle data regenerate"
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
            hint="the ids were made with another tokenizer; use the target that generated them",
        )
    return ids.astype(np.int32)
