"""Reads rows of prompt and conversation files: JSONL, a JSON array or text lines, plain or gzipped, and Parquet.

Errors are DataErrors that start with "FILE:LINE:". Also parses the chat formats that both kinds of file share (OpenAI
messages, ShareGPT turns).
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from peagle.errors import DataError, MissingExtraError, nearest

GZIP_MAGIC = b"\x1f\x8b"
JSON_WHITESPACE = " \t\r\n"
ARRAY_START = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*(]?)[ \t\r\n]*")
AFTER_ROW = re.compile(r"[ \t\r\n]*([],])[ \t\r\n]*")
FILE_SHAPES = "one JSON object per line (JSONL) or one JSON array of objects, plain or gzipped, or a Parquet file"

SHAREGPT_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("assistant", "bard", "bing", "chatgpt", "gpt"), "assistant"),
    "human": "user",
    "system": "system",
    "user": "user",
}
"""ShareGPT speaker to chat role."""
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TURN_SHAPES = '"messages" holds {"role": "user", "content": "text"}, "conversations" {"from": "human", "value": "text"}'


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
    row, path = None, Path(path)
    for row in _parquet_rows(path) if path.suffix.lower() == ".parquet" else _rows(path):
        yield row
    if row is None:
        raise empty_file(path, FILE_SHAPES)


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
        raise no_file(path) from error
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


def no_file(path: Path) -> DataError:
    return DataError(f"no file at {path}", hint="pass the path of an existing file")


def empty_file(path: Path, allowed: str) -> DataError:
    return DataError(f"{path} has no rows; expected {allowed}", hint="was the file written completely?")


def chat_messages(row: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The turns under "messages" (OpenAI) or "conversations" (ShareGPT) as role/content messages; None without them.

    Keeps other keys of a message (name, tool calls) for the chat template.
    """
    if "messages" in row:
        return _turns(row["messages"], where, "messages", "role", "content", CHAT_ROLES)
    if "conversations" in row:
        turns = _turns(row["conversations"], where, "conversations", "from", "value", SHAREGPT_ROLES)
        return [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    return None


def _turns(
    value: Any, where: str, name: str, speaker_key: str, text_key: str, speakers: Iterable[str]
) -> list[dict[str, Any]]:
    """Check a non-empty list of objects with a known speaker and a text."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name!r} is {describe(value)}; it must be a non-empty list of objects")
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise DataError(f"{where}: {name}[{index}] is {describe(turn)}; it must be an object")
        for key in (speaker_key, text_key):
            if not isinstance(turn.get(key), str):
                raise DataError(
                    f"{where}: {name}[{index}][{key!r}] is {describe(turn.get(key))}; it must be a string",
                    hint=TURN_SHAPES,
                )
        speaker = turn[speaker_key]
        if speaker not in speakers:
            raise DataError(
                f"{where}: {name}[{index}][{speaker_key!r}] is {speaker!r}; allowed: {', '.join(speakers)}",
                hint=f"{nearest(speaker, speakers)}; {TURN_SHAPES}",
            )
    return value


def describe(value: Any) -> str:
    """The type of a JSON value for an error message, with the value if it is short."""
    if value is None:
        return "missing or null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    shown = json.dumps(value, default=str)
    kind = kinds.get(type(value), type(value).__name__)
    return f"{kind} ({shown})" if len(shown) <= 40 else kind


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a Parquet file, numbered from 1."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError("pyarrow", "parquet", f"reading {path.name}") from error
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except FileNotFoundError as error:
        raise no_file(path) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path} as Parquet: {error}", hint="download or copy the file again") from error


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
        row = line.rstrip(JSON_WHITESPACE)  # an error at its end belongs to this line
        try:
            value = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise _not_json(path, line_number, row, error) from error
        yield line_number, _require_object(path, line_number, value)


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


def _not_json(path: Path, first_line: int, text: str, error: Exception, start: int = 0) -> DataError:
    """The error of a row that begins at `start` in `text`, which begins on `first_line`."""
    if not isinstance(error, json.JSONDecodeError):
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        error = json.JSONDecodeError(reason, text, start)
    rest = text[error.pos : error.pos + 40].strip()
    found = repr(rest) if rest else "nothing more (if the file is truncated, write it again)"
    where = place(path, first_line + error.lineno - 1)
    return DataError(
        f"{where}: not valid JSON: {error.msg} at column {error.colno}, found {found}",
        hint=f"allowed: {FILE_SHAPES}; prompts may also be a .txt file with one prompt per line",
    )


def _array_rows(path: Path, first_line: int, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Decode an array element by element, to know the line on which each row starts."""
    decoder = json.JSONDecoder()
    mark = ARRAY_START.match(text)
    assert mark is not None, "the caller saw the bracket"
    line_number, counted = first_line, 0
    while mark[1] != "]":
        start = mark.end()
        line_number, counted = line_number + text.count("\n", counted, start), start
        try:
            value, end = decoder.raw_decode(text, start)
            mark = AFTER_ROW.match(text, end)
            if mark is None:
                raise json.JSONDecodeError("expected ',' or ']' after a row", text, end)
        except (ValueError, RecursionError) as error:
            raise _not_json(path, first_line, text, error, start) from error
        yield line_number, _require_object(path, line_number, value)
    if mark.end() < len(text):
        extra = json.JSONDecodeError("expected nothing after the array", text, mark.end())
        raise _not_json(path, first_line, text, extra)
