"""Reads rows of prompt and conversation files: JSONL, a JSON array, or text lines, plain or gzipped.

Errors are DataErrors that start with "FILE:LINE:". Also parses the chat formats that both kinds of file share (OpenAI
messages, ShareGPT turns).
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from peagle.errors import DataError, nearest

GZIP_MAGIC = b"\x1f\x8b"
JSON_WHITESPACE = " \t\r\n"
WHITESPACE_RUN = re.compile(f"[{JSON_WHITESPACE}]*")
FILE_SHAPES = "one JSON object per line (JSONL) or one JSON array of objects, plain or gzipped"

SHAREGPT_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("assistant", "bard", "bing", "chatgpt", "gpt"), "assistant"),
    "human": "user",
    "system": "system",
    "user": "user",
}
"""ShareGPT speaker to chat role."""
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def place(path: Path, line_number: int) -> str:
    """The "FILE:LINE" prefix of messages about a row."""
    return f"{path}:{line_number}"


def is_text(path: Path) -> bool:
    """Whether a file holds text lines, by its name."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1:] == [".txt"]


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for every row. Blank lines are skipped.

    JSONL is streamed; an array is read into memory. A file without rows raises at the end of the iteration.
    """
    row = None
    for row in _rows(Path(path)):
        yield row
    if row is None:
        raise empty_file(Path(path), FILE_SHAPES)


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of a UTF-8 file, plain or gzipped (detected by content)."""
    path = Path(path)
    line_number = 0
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
            for line_number, line in enumerate(stream, start=1):
                # Files from Windows may start with a byte-order mark.
                yield line_number, line.decode("utf-8-sig" if line_number == 1 else "utf-8")
    except FileNotFoundError as error:
        raise DataError(f"no file at {path}", hint="pass the path of an existing file") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place(path, line_number)}: not UTF-8 text: byte 0x{error.object[error.start]:02x} at column "
            f"{error.start + 1}",
            hint="save the file as UTF-8; of compressed files only gzip is supported",
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is a damaged gzip file: after line {line_number}: {error}",
            hint="the file is probably truncated; download or copy it again",
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", hint="pass the path of a file") from error


def empty_file(path: Path, allowed: str) -> DataError:
    return DataError(f"{path} has no rows; expected {allowed}", hint="was the file written completely?")


def chat_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Check the value of "messages": a non-empty list of {"role": one of CHAT_ROLES, "content": str}.

    Keeps other keys of a message (name, tool calls) for the chat template.
    """
    messages = _require_turns(value, where, "messages")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(
                    f"{where}: messages[{index}][{key!r}] is {describe(message.get(key))}; it must be a string",
                    hint='a message is {"role": "user", "content": "text"}',
                )
        if message["role"] not in CHAT_ROLES:
            raise DataError(
                f"{where}: messages[{index}]['role'] is {message['role']!r}; allowed: {', '.join(CHAT_ROLES)}",
                hint=nearest(message["role"], CHAT_ROLES),
            )
    return messages


def sharegpt_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Convert the value of "conversations", [{"from": speaker, "value": text}], to role/content messages."""
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(_require_turns(value, where, "conversations")):
        speaker, text = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            found = repr(speaker) if isinstance(speaker, str) else describe(speaker)
            raise DataError(
                f"{where}: conversations[{index}]['from'] is {found}; allowed: {', '.join(SHAREGPT_ROLES)}",
                hint='for other roles use "messages": [{"role": ..., "content": ...}]',
            )
        if not isinstance(text, str):
            raise DataError(
                f"{where}: conversations[{index}]['value'] is {describe(text)}; it must be a string",
                hint='a turn is {"from": "human", "value": "text"}',
            )
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": text})
    return messages


def describe(value: Any) -> str:
    """The type of a JSON value for an error message, with the value if it is short."""
    if value is None:
        return "missing or null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    shown = json.dumps(value)
    kind = kinds.get(type(value), type(value).__name__)
    return f"{kind} ({shown})" if len(shown) <= 40 else kind


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = read_lines(path)
    is_first = True
    for line_number, line in lines:
        if not line.strip(JSON_WHITESPACE):
            continue
        if is_first and line.lstrip(JSON_WHITESPACE).startswith("["):
            yield from _array_rows(path, line_number, line + "".join(text for _, text in lines))
            return
        is_first = False
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _not_json(path, line_number, line, error) from error
        yield line_number, _require_object(path, line_number, value)


def _require_turns(value: Any, where: str, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key!r} is {describe(value)}; it must be a non-empty list of objects")
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise DataError(f"{where}: {key}[{index}] is {describe(turn)}; it must be an object")
    return value


def _require_object(path: Path, line_number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place(path, line_number)}: a row must be a JSON object, found {describe(value)}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON may contain lone surrogates
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(
            f"{place(path, line_number)}: {half} is a lone surrogate", hint="save the text as UTF-8"
        ) from error
    return value


def _not_json(path: Path, line_number: int, text: str, error: Exception) -> DataError:
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg} at column {error.colno}: {text[error.pos : error.pos + 40].rstrip()!r}"
    else:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    hint = f"allowed: {FILE_SHAPES}; prompts may also be a .txt file with one prompt per line"
    return DataError(f"{place(path, line_number)}: not valid JSON: {reason}", hint=hint)


def _array_rows(path: Path, line_number: int, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Decode an array element by element, to know the line on which each row starts."""
    decoder = json.JSONDecoder()

    def skip_whitespace(position: int) -> int:
        return position + len(WHITESPACE_RUN.match(text, position)[0])  # type: ignore[index]  # it may be empty

    def refuse(position: int, reason: str) -> DataError:
        found = repr(text[position : position + 40].rstrip()) if position < len(text) else "the end of the file"
        line = line_number + text.count("\n", 0, position)
        hint = "the file is probably truncated; write it again" if position >= len(text) else f"allowed: {FILE_SHAPES}"
        return DataError(f"{place(path, line)}: not valid JSON: {reason}, found {found}", hint=hint)

    position = skip_whitespace(text.index("[") + 1)
    row_line, counted = line_number, 0
    if text[position : position + 1] == "]":
        position = skip_whitespace(position + 1)
    else:
        while True:
            row_line += text.count("\n", counted, position)
            counted = position
            try:
                value, end = decoder.raw_decode(text, position)
            except json.JSONDecodeError as error:
                raise refuse(error.pos, error.msg) from error
            except (ValueError, RecursionError) as error:
                raise _not_json(path, row_line, text, error) from error
            yield row_line, _require_object(path, row_line, value)
            end = skip_whitespace(end)
            closing = text[end : end + 1]
            if closing not in (",", "]"):
                raise refuse(end, "expected ',' or ']' after a row")
            position = skip_whitespace(end + 1)
            if closing == "]":
                break
    if position < len(text):
        raise refuse(position, "expected nothing after the array")
