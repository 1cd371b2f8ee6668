"""Documents that prompts are about: given by the user, or written by the target."""

import random
import re
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.data.kinds import CODE, TEXT
from peagle.errors import DataError
from peagle.rows import read_lines, read_rows
from peagle.tokenizer import detokenize, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_SUFFIXES = {".json", ".jsonl"}
CODE_SUFFIXES = {".c", ".cc", ".cpp", ".cs", ".go", ".h", ".java", ".js", ".py", ".rb", ".rs", ".sh", ".sql", ".ts"}
ROW_KEYS = ("document", "text", "content")
CODE_BLOCK = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)
ENDS = ("\n\n", "\n", ". ")
"""Where a passage may begin and end, best first."""
MOST_KEPT = 4096
"""Documents that a shelf remembers."""
MOST_TOGETHER = 32
"""Documents of one prompt."""
MIN_TOKENS = 32
"""Tokens of the shortest passage."""


def read_documents(paths: Iterable[Path]) -> dict[str, list[str]]:
    """The documents of files by source, TEXT or CODE: rows with "document" or "text", else a file is one document."""
    found: dict[str, list[str]] = {TEXT: [], CODE: []}
    for path in paths:
        suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
        suffix = suffixes[-1] if suffixes else ""
        if suffix in ROW_SUFFIXES:
            for line_number, row in read_rows(path):
                text = next((row[key] for key in ROW_KEYS if isinstance(row.get(key), str)), None)
                if text is None:
                    raise DataError(
                        f"{path}:{line_number}: no document found; keys found: {', '.join(row) or 'none'}",
                        hint='a row needs "document", "text" or "content"; any other file is one document',
                    )
                found[TEXT].append(text)
        else:
            text = "".join(line for _, line in read_lines(path))
            found[CODE if suffix in CODE_SUFFIXES else TEXT].append(text)
    return {source: [text.strip() for text in texts if text.strip()] for source, texts in found.items()}


def code_of(answer: str) -> str:
    """The code blocks of an answer, without the text around them.

    >>> code_of("Here it is:\\n```python\\nprint(1)\\n```\\nIt prints 1.")
    'print(1)'
    """
    return "\n\n".join(block.strip("\n") for block in CODE_BLOCK.findall(answer))


class Shelf:
    """Documents of one source. Each that the target writes leads `num_uses` prompts; given ones lead prompts in turn.

    Later prompts may hold it next to their own, so that long prompts do not need many new documents.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", chance: random.Random, given: Sequence[str], num_uses: int
    ) -> None:
        self._tokenizer, self._chance, self._num_uses = tokenizer, chance, num_uses
        self._kept: deque[list[int]] = deque((encode(tokenizer, text) for text in given), maxlen=MOST_KEPT)
        self._leading: deque[list[int]] = deque(self._kept)
        self._is_given = bool(given)

    def add(self, text: str) -> None:
        document = encode(self._tokenizer, text)
        self._kept.append(document)
        self._leading.extend([document] * self._num_uses)

    @property
    def has_next(self) -> bool:
        """Whether there is a document to begin a prompt with."""
        return bool(self._leading)

    def passages(self, num_tokens: int, *, is_single: bool = False) -> list[str]:
        """The next document, then others drawn at random, up to about `num_tokens`."""
        lead = self._leading.popleft()
        if self._is_given:
            self._leading.append(lead)
        texts, used = [self._passage(lead, num_tokens)], len(lead)
        while not is_single and num_tokens - used >= MIN_TOKENS and len(texts) < MOST_TOGETHER:
            document = self._chance.choice(self._kept)
            text = self._passage(document, num_tokens - used)
            used += min(len(document), num_tokens - used)
            if text not in texts:
                texts.append(text)
        self._chance.shuffle(texts)
        return texts

    def _passage(self, document: list[int], num_tokens: int) -> str:
        """At most `num_tokens` of a document, up to the end of a paragraph or sentence; of a given one, any part."""
        if len(document) <= num_tokens:
            return detokenize(self._tokenizer, document).strip()
        start = self._chance.randrange(len(document) - num_tokens) if self._is_given else 0
        text = detokenize(self._tokenizer, document[start : start + num_tokens])
        half = len(text) // 2
        if start:
            text = next((text[at + len(end) :] for end in ENDS if (at := text.find(end, 0, half)) >= 0), text)
        half = len(text) // 2
        return next((text[: at + 1] for end in ENDS if (at := text.rfind(end, half)) >= 0), text).strip()


def joined(texts: Sequence[str], source: str) -> str:
    """Passages as part of a prompt; several are numbered.

    >>> joined(["One."], TEXT), joined(["a = 1", "b = 2"], CODE)
    ('One.', 'File 1:\\na = 1\\n\\nFile 2:\\nb = 2')
    """
    if len(texts) == 1:
        return texts[0]
    name = "File" if source == CODE else "Document"
    return "\n\n".join(f"{name} {number}:\n{text}" for number, text in enumerate(texts, 1))
