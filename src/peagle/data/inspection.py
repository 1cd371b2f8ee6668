"""Statistics of training data: counts, lengths, tokens, and examples with the trained part marked."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from peagle.data.conversations import Conversation, read_conversations
from peagle.data.shards import Shard, is_shard_directory, open_shards
from peagle.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 4096
NUM_BINS = 12
VOCABULARY_SIZES = (256, 1024, 4096, 8192, 16384, 32768, 65536)


def inspect(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    num_examples: int = 3,
    num_top_tokens: int = 20,
    rows_shown: Sequence[int] = (),
) -> dict[str, Any]:
    """A JSON report on a shard directory or a file of conversations. Lengths are in tokens.

    Examples are `num_examples` rows spread over the data, or the rows `rows_shown` (line or row numbers).
    """
    if num_examples < 0 or num_top_tokens < 0:
        raise ConfigError(f"num_examples and num_top_tokens must be 0 or more, got {num_examples} and {num_top_tokens}")
    rows = read_conversations(path, tokenizer)
    lengths = np.array([len(row) for row in rows])
    answers = np.array([int(np.count_nonzero(row.loss_mask)) for row in rows])
    counts = trained_token_counts(rows.conversations, len(tokenizer))
    shown = [rows.conversations[index] for index in _spaced(len(rows), num_examples)]
    if rows_shown:
        shown = _numbered(path, rows.conversations, rows_shown)
    report = {
        "path": str(path),
        "num_conversations": len(rows),
        "num_tokens": int(lengths.sum()),
        "num_trained_tokens": rows.num_answer_tokens,
        "trained_share": round(rows.num_answer_tokens / int(lengths.sum()), 4),
        "num_without_answer": rows.num_dropped,
        "num_known_greedy": int(np.count_nonzero(rows.is_greedy)),
        "lengths": _spread(lengths),
        "trained_lengths": _spread(answers),
        "length_histogram": _histogram(lengths),
        "num_distinct_trained_tokens": int(np.count_nonzero(counts)),
        "top_tokens": _top_tokens(counts, tokenizer, num_top_tokens),
        "coverage": _coverage(counts),
        "examples": [segments(row, tokenizer) for row in shown],
        "example_rows": [row.number for row in shown],
    }
    return report | (_shard_facts(path) if is_shard_directory(path) else {})


def trained_token_counts(conversations: Sequence[Conversation], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token is trained on, [vocab_size] or longer if larger ids occur."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(conversations), ROWS_AT_ONCE):
        some = conversations[first : first + ROWS_AT_ONCE]
        found = np.bincount(np.concatenate([row.token_ids[row.loss_mask] for row in some]), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def segments(conversation: Conversation, tokenizer: "PreTrainedTokenizerBase") -> list[dict[str, Any]]:
    """A conversation's text with special tokens, split where the loss mask changes."""
    changes = np.flatnonzero(np.diff(conversation.loss_mask)) + 1
    bounds = [0, *changes.tolist(), len(conversation)]
    return [
        {
            "text": tokenizer.decode(conversation.token_ids[start:end].tolist(), clean_up_tokenization_spaces=False),
            "is_trained": bool(conversation.loss_mask[start]),
        }
        for start, end in pairwise(bounds)
    ]


def _shard_facts(path: Path) -> dict[str, Any]:
    shards = open_shards(path)
    temperatures = np.concatenate([np.zeros(0, dtype=np.float32), *(shard.temperatures for shard in shards.shards)])
    values, numbers = np.unique(temperatures, return_counts=True)
    pairs = zip(values.tolist(), numbers.tolist(), strict=True)
    return {name: shards.manifest[name] for name in ("kind", "target", "settings", "is_complete")} | {
        "num_shards": len(shards.shards),
        "temperatures": {f"{value:g}": number for value, number in pairs},
        "dropped": shards.counts()["dropped"],
        "kinds": _kinds(shards.shards),
    }


def _kinds(shards: Sequence[Shard]) -> dict[str, dict[str, float]]:
    """By kind of text, most frequent first: conversations, their share, and tokens. Empty if none is recorded."""
    rows, tokens, trained = Counter[str](), Counter[str](), Counter[str]()
    for shard in shards:
        kind_T = np.repeat(shard.row_kinds, np.diff(shard.offsets))
        parts = zip((rows, tokens, trained), (shard.row_kinds, kind_T, kind_T[shard.loss_mask]), strict=True)
        for counter, numbers in parts:
            found = np.bincount(numbers, minlength=len(shard.kinds)).tolist()
            counter.update(dict(zip(shard.kinds, found, strict=True)))
    return {
        kind: {
            "num_conversations": number,
            "share": round(number / rows.total(), 4),
            "num_tokens": tokens[kind],
            "num_trained_tokens": trained[kind],
        }
        for kind, number in rows.most_common()
        if kind
    }


def _spread(values: npt.NDArray[np.int64]) -> dict[str, float]:
    return {
        "min": int(values.min()),
        "median": float(np.median(values)),
        "mean": round(float(values.mean()), 1),
        "p95": float(np.percentile(values, 95)),
        "max": int(values.max()),
    }


def _histogram(values: npt.NDArray[np.int64]) -> list[dict[str, int]]:
    """Bins of equal width, from `from` up to but excluding `below`."""
    least = int(values.min())
    width = -(-(int(values.max()) + 1 - least) // NUM_BINS)
    return [
        {"from": least + index * width, "below": least + (index + 1) * width, "count": count}
        for index, count in enumerate(np.bincount((values - least) // width).tolist())
    ]


def _top_tokens(
    counts: npt.NDArray[np.int64], tokenizer: "PreTrainedTokenizerBase", number: int
) -> list[dict[str, Any]]:
    order = np.argsort(-counts, kind="stable")[:number]
    whole = int(counts.sum())
    return [
        {
            "token_id": token_id,
            "text": tokenizer.decode([token_id]),
            "count": int(counts[token_id]),
            "share": round(int(counts[token_id]) / whole, 5),
        }
        for token_id in order.tolist()
        if counts[token_id]
    ]


def _coverage(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """The share of trained tokens covered by the N most frequent ones, by N."""
    ordered = np.cumsum(np.sort(counts)[::-1])
    sizes = [size for size in VOCABULARY_SIZES if size < len(counts)]
    return {str(size): round(float(ordered[size - 1] / ordered[-1]), 5) for size in sizes}


def _numbered(path: Path, conversations: Sequence[Conversation], numbers: Sequence[int]) -> list[Conversation]:
    by_number = {row.number: row for row in conversations}
    missing = [number for number in numbers if number not in by_number]
    if missing:
        raise DataError(
            f"{path} has no row {missing[0]} with an answer; rows are {min(by_number)} to {max(by_number)}",
            hint="rows are counted from 1: lines of a file, or rows of all shards",
        )
    return [by_number[number] for number in numbers]


def _spaced(length: int, number: int) -> list[int]:
    """Up to `number` indices spread evenly over `length`.

    >>> _spaced(100, 3), _spaced(2, 5)
    ([0, 33, 66], [0, 1])
    """
    number = min(length, number)
    return [index * length // number for index in range(number)]
