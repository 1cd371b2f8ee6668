"""Reads prompt files as published by the benchmarks. Each row becomes the messages of one request.

Rows are recognized by their keys, so there is no format option.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from peagle.data.config import drawn_number
from peagle.errors import ConfigError, DataError
from peagle.rows import chat_messages, describe, empty_file, is_text, place, read_lines, read_rows

Messages = tuple[dict[str, Any], ...]

HUMANEVAL_INSTRUCTION = "Complete this Python function:\n"
"""Prepended to a HumanEval prompt, which is the start of a source file, to make it a user message."""

ROW_SHAPES = (
    '"turns" (MT-Bench, Spec-Bench, SPEED-Bench), "prompt" with "task_id" or "entry_point" (HumanEval), '
    '"question" (GSM8K), "messages" (OpenAI), "conversations" (ShareGPT), "prompt" (plain), '
    '"instruction" (Self-Instruct, Alpaca)'
)
GENERIC_STEMS = frozenset({"data", "dev", "prompt", "prompts", "question", "questions", "test", "train", "validation"})
"""File names that mean nothing without their folder. So does one part of a Parquet dataset."""
PART_STEM = re.compile(r"[a-z]+-\d{5}-of-\d{5}")
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""What the published SPEED-Bench has instead of texts that its license does not let it pass on."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of a prompt file. As one request of a workload, its chat messages end with a user message."""

    id: str
    """from the file, else the line number"""
    messages: Messages
    kind: str
    """row shape: turns, humaneval, gsm8k, messages, sharegpt, prompt, instruction or text"""
    where: str = field(default="", compare=False)
    """"FILE:LINE", for error messages"""
    category: str = ""
    """"category" of the row, as in MT-Bench, Spec-Bench and SPEED-Bench"""
    later: Messages = ()
    """user messages of later turns; the row has no answers to those before them"""

    @property
    def num_turns(self) -> int:
        return 1 + len(self.later)

    def following(self, answer: str) -> "Prompt | None":
        """The request of the next turn: all messages so far, this answer, the next user message. None after the last.

        >>> user = [{"role": "user", "content": text} for text in "abc"]
        >>> second = Prompt("1", (user[0],), "turns", later=tuple(user[1:])).following("yes")
        >>> [message["content"] for message in second.messages], second.num_turns
        (['a', 'yes', 'b'], 2)
        """
        if not self.later:
            return None
        said = (*self.messages, {"role": "assistant", "content": answer}, self.later[0])
        return replace(self, messages=said, later=self.later[1:])


class Dialog(NamedTuple):
    """A conversation of a prompt file. The target writes its assistant turns."""

    where: str
    """"FILE:LINE", for error messages"""
    messages: Sequence[dict[str, Any]]
    kind: str = ""
    """its category in the file, else the file's name"""

    def first_turn(self) -> "Dialog":
        """The messages up to and including the first user message, without assistant messages."""
        end = next(index for index, message in enumerate(self.messages) if message["role"] == "user") + 1
        said = [message for message in self.messages[:end] if message["role"] != "assistant"]
        return Dialog(self.where, said, self.kind)

    def key(self) -> int:
        """A hash of all messages; of a single user message, a hash of its text."""
        said = [message | {"content": message["content"].strip()} for message in self.messages]
        is_question = len(said) == 1 and said[0].keys() == {"role", "content"} and said[0]["role"] == "user"
        return drawn_number(said[0]["content"] if is_question else json.dumps(said, sort_keys=True))


def read_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts (default: all) of a .jsonl, .json, .txt (plain or gzipped) or .parquet file.

    Rows after the limit are not read. Errors name file and line.
    """
    return [_request(row) for row in _limited(Path(path), limit)]


def read_dialogs(path: str | Path, *, limit: int | None = None) -> list[Dialog]:
    """Read the same files with all turns, including the assistant's."""
    dialogs = []
    for row in _limited(Path(path), limit):
        for index in _user_turns(row):
            _check_text(row, row.messages[index])
        dialogs.append(Dialog(row.where, row.messages, row.category or workload_name(path)))
    return dialogs


def workload_name(path: str | Path) -> str:
    """A short name for reports: the file's, with its folder if the file name is generic (gsm8k/test)."""
    path = Path(path)
    stem = path.name.split(".")[0] or path.name
    folder = path.absolute().parent.name
    is_generic = stem.lower() in GENERIC_STEMS or PART_STEM.fullmatch(stem.lower()) is not None
    return f"{folder}/{stem}" if is_generic and folder else stem


def _limited(path: Path, limit: int | None) -> Iterator[Prompt]:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}", hint="omit it to read all prompts")
    return islice(_text_rows(path) if is_text(path) else _json_rows(path), limit)


def _text_rows(path: Path) -> Iterator[Prompt]:
    is_empty = True
    for line_number, line in read_lines(path):
        if text := line.strip():
            is_empty = False
            yield Prompt(str(line_number), _user_message(text), "text", place(path, line_number))
    if is_empty:
        raise empty_file(path, "one prompt per line")


def _json_rows(path: Path) -> Iterator[Prompt]:
    for line_number, row in read_rows(path):
        where = place(path, line_number)
        kind, messages = _messages(row, where)
        row_id = next((row[key] for key in ("question_id", "task_id", "id") if row.get(key) is not None), line_number)
        category = row["category"] if isinstance(row.get("category"), str) else ""
        yield Prompt(str(row_id), messages, kind, where, category)


def _request(row: Prompt) -> Prompt:
    """The first request of a row, and the user messages of its later turns.

    OpenAI messages with answers are one request, up to the last user message. Without answers they are turns, as in
    SPEED-Bench. Of ShareGPT only the first turn is used: the later ones are about answers of another model.
    """
    users = _user_turns(row)
    is_answered = any(message["role"] == "assistant" for message in row.messages)
    later: Messages = ()
    if row.kind == "sharegpt":
        messages: Messages = (row.messages[users[0]],)
    elif is_answered:
        messages = row.messages[: users[-1] + 1]
    else:
        messages, later = row.messages[: users[0] + 1], tuple(row.messages[index] for index in users[1:])
    for message in (messages[-1], *later):
        _check_text(row, message)
    return replace(row, messages=messages, later=later)


def _user_turns(row: Prompt) -> list[int]:
    users = [index for index, message in enumerate(row.messages) if message["role"] == "user"]
    if not users:
        speaker = '"from": "human"' if row.kind == "sharegpt" else '"role": "user"'
        raise DataError(
            f"{row.where}: no user message ({row.kind} row)", hint=f"a prompt ends with one: {{{speaker}, ...}}"
        )
    return users


def _check_text(row: Prompt, message: dict[str, Any]) -> None:
    if SPEED_BENCH_PLACEHOLDER in message["content"]:
        raise DataError(
            f"{row.where}: the file has a placeholder instead of this prompt",
            hint="run SPEED-Bench's own prepare_data.py, which fills in the texts, and pass the file that it writes",
        )
    if not message["content"].strip():
        raise DataError(f"{row.where}: the prompt is empty ({row.kind} row)", hint="remove the row or add a text")


def _messages(row: dict[str, Any], where: str) -> tuple[str, Messages]:
    """The row's shape, and its messages."""
    if (messages := chat_messages(row, where)) is not None:
        return "messages" if "messages" in row else "sharegpt", tuple(messages)
    if "turns" in row:
        return "turns", _turns(row["turns"], where)
    if "prompt" in row:
        text = _string(row, "prompt", where)
        if "task_id" in row or "entry_point" in row:
            return "humaneval", _user_message(HUMANEVAL_INSTRUCTION + text if text.strip() else text)
        return "prompt", _user_message(text)
    if "question" in row:
        return "gsm8k", _user_message(_string(row, "question", where))
    if "instruction" in row:
        return "instruction", _instruction(row, where)
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


def _turns(turns: Any, where: str) -> Messages:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise DataError(f"{where}: 'turns' is {describe(turns)}; it must be a non-empty list of strings")
    return tuple({"role": "user", "content": turn} for turn in turns)


def _instruction(row: dict[str, Any], where: str) -> Messages:
    """The instruction and its input: the row's own (Alpaca) or that of its first instance (Self-Instruct)."""
    text = _string(row, "instruction", where)
    holder, instances = row, row.get("instances")
    if isinstance(instances, list) and instances and isinstance(instances[0], dict):
        holder = instances[0]
    given = _string(holder, "input", where) if holder.get("input") else ""
    return _user_message(f"{text}\n\n{given}" if text.strip() and given.strip() else text)
