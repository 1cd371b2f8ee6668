"""Prompt files as published by the benchmarks, read in place: every row becomes the messages of one request.

Rows are recognized by their keys, so no format flag is needed; `Prompt.kind` records what was recognized.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from peagle.errors import ConfigError, DataError
from peagle.json_rows import (
    chat_messages,
    describe,
    empty_file,
    is_text,
    place,
    read_lines,
    read_rows,
    sharegpt_messages,
)
from peagle.training.generation import Dialog

Messages = tuple[dict[str, Any], ...]
MessageReader = Callable[[dict[str, Any], str], Messages]

HUMANEVAL_INSTRUCTION = "Complete this Python function:\n"
"""Put before a HumanEval prompt, which is the start of a source file, to make it a user message."""

ROW_SHAPES = (
    '"turns" (MT-Bench, Spec-Bench), "prompt" with "task_id" or "entry_point" (HumanEval), "question" (GSM8K), '
    '"messages" (OpenAI), "conversations" (ShareGPT), "prompt" (plain), "instruction" (Self-Instruct, Alpaca)'
)
GENERIC_STEMS = frozenset({"data", "dev", "prompt", "prompts", "question", "questions", "test", "train", "validation"})
"""File names that say nothing without their folder."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload: chat messages that end with a user's."""

    id: str
    """as the file gives it, else the line number"""
    messages: tuple[dict[str, Any], ...]
    category: str | None
    kind: str
    """the row shape: turns, humaneval, gsm8k, messages, sharegpt, prompt, instruction or text"""


class PromptRow(NamedTuple):
    """One row of a file with all its turns."""

    where: str
    id: str
    category: str | None
    kind: str
    messages: Messages


def read_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts (all by default) of a .jsonl, .json or .txt file, plain or gzipped.

    Rows after the limit are not looked at. What cannot be understood is a DataError that names file and line.
    """
    return [_prompt(row) for row in _limited(Path(path), limit)]


def read_dialogs(path: str | Path, *, limit: int | None = None) -> list[Dialog]:
    """Read the same files with all their turns, the assistant's included, for the target to answer them anew."""
    return [_dialog(row) for row in _limited(Path(path), limit)]


def workload_name(path: str | Path) -> str:
    """A short name for reports: the file's, with its folder where the file's alone says nothing (gsm8k/test)."""
    path = Path(path)
    stem = path.name.split(".")[0] or path.name
    folder = path.absolute().parent.name
    return f"{folder}/{stem}" if stem.lower() in GENERIC_STEMS and folder else stem


def workload_kind(prompts: Sequence[Prompt]) -> str:
    """The row shape of a workload, or several joined with "+" in order of appearance."""
    return "+".join(dict.fromkeys(prompt.kind for prompt in prompts))


def _limited(path: Path, limit: int | None) -> Iterator[PromptRow]:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}", hint="leave it out to read all prompts")
    return islice(_text_rows(path) if is_text(path) else _json_rows(path), limit)


def _text_rows(path: Path) -> Iterator[PromptRow]:
    is_empty = True
    for line_number, line in read_lines(path):
        if text := line.strip():
            is_empty = False
            yield PromptRow(place(path, line_number), str(line_number), None, "text", _user_message(text))
    if is_empty:
        raise empty_file(path, "one prompt per line")


def _json_rows(path: Path) -> Iterator[PromptRow]:
    for line_number, row in read_rows(path):
        where = place(path, line_number)
        kind, read_messages = _recognize(row, where)
        category = row.get("category")
        row_id = next((row[key] for key in ("question_id", "task_id", "id") if row.get(key) is not None), line_number)
        messages = read_messages(row, where)
        yield PromptRow(where, str(row_id), category if isinstance(category, str) else None, kind, messages)


def _prompt(row: PromptRow) -> Prompt:
    """The request of a row: the first turn, or, of OpenAI messages, everything up to the last user message."""
    users = _user_turns(row)
    if row.kind == "messages":
        messages = row.messages[: users[-1] + 1]
    else:
        messages = row.messages[users[0] : users[0] + 1]
    _refuse_empty(row, messages[-1])
    return Prompt(row.id, messages, row.category, row.kind)


def _dialog(row: PromptRow) -> Dialog:
    for index in _user_turns(row):
        _refuse_empty(row, row.messages[index])
    return Dialog(row.where, row.messages)


def _user_turns(row: PromptRow) -> list[int]:
    users = [index for index, message in enumerate(row.messages) if message["role"] == "user"]
    if users:
        return users
    if row.kind == "sharegpt":
        raise DataError(
            f"{row.where}: 'conversations' has no human turn", hint='a human turn is {"from": "human", "value": ...}'
        )
    raise DataError(f"{row.where}: 'messages' has no user message", hint="a prompt ends with a user's message")


def _refuse_empty(row: PromptRow, message: dict[str, Any]) -> None:
    if not message["content"].strip():
        raise DataError(f"{row.where}: the prompt is empty ({row.kind} row)", hint="remove the row or give it a text")


def _recognize(row: dict[str, Any], where: str) -> tuple[str, MessageReader]:
    if "messages" in row:
        return "messages", _messages
    if "conversations" in row:
        return "sharegpt", _sharegpt
    if "turns" in row:
        return "turns", _turns
    if "prompt" in row:
        is_humaneval = "task_id" in row or "entry_point" in row
        return ("humaneval", _humaneval) if is_humaneval else ("prompt", _plain)
    if "question" in row:
        return "gsm8k", _question
    if "instruction" in row:
        return "instruction", _instruction
    raise DataError(
        f"{where}: no prompt found; keys found: {', '.join(row) or 'none'}",
        hint=f"a row needs one of: {ROW_SHAPES}",
    )


def _user_message(text: str) -> Messages:
    return ({"role": "user", "content": text},)


def _string(row: dict[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} is {describe(value)}; it must be a string", hint=f"a row needs: {ROW_SHAPES}"
        )
    return value


def _messages(row: dict[str, Any], where: str) -> Messages:
    return tuple(chat_messages(row["messages"], where))


def _sharegpt(row: dict[str, Any], where: str) -> Messages:
    return tuple(sharegpt_messages(row["conversations"], where))


def _turns(row: dict[str, Any], where: str) -> Messages:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise DataError(f"{where}: 'turns' is {describe(turns)}; it must be a non-empty list of strings")
    return tuple({"role": "user", "content": turn} for turn in turns)


def _humaneval(row: dict[str, Any], where: str) -> Messages:
    source = _string(row, "prompt", where)
    return _user_message(HUMANEVAL_INSTRUCTION + source if source.strip() else source)


def _plain(row: dict[str, Any], where: str) -> Messages:
    return _user_message(_string(row, "prompt", where))


def _question(row: dict[str, Any], where: str) -> Messages:
    return _user_message(_string(row, "question", where))


def _instruction(row: dict[str, Any], where: str) -> Messages:
    """The instruction, and below it its input: the row's own (Alpaca) or that of its first instance (Self-Instruct)."""
    text = _string(row, "instruction", where)
    holder, instances = row, row.get("instances")
    if isinstance(instances, list) and instances and isinstance(instances[0], dict):
        holder = instances[0]
    given = _string(holder, "input", where) if holder.get("input") else ""
    return _user_message(f"{text}\n\n{given}" if text.strip() and given.strip() else text)
