"""Text and bytes of single tokens, for log-probabilities, and control tokens in the text of clients."""

import re
import secrets
from functools import cache
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"
XML_TAG = re.compile(r"</?\w+>")


class TokenText(NamedTuple):
    text: str
    """part of a character shows as a replacement sign; `data` has its bytes"""
    data: bytes


class TokenTexts(dict[int, TokenText]):
    """A cache of token texts by id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        """tokens that the tokenizer may add to a text"""

    def __missing__(self, token_id: int) -> TokenText:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        data = text.encode("utf-8", "replace")
        if REPLACEMENT in text:
            data = _piece_bytes(self._tokenizer.convert_ids_to_tokens(token_id) or "") or data
        self[token_id] = found = TokenText(text, data)
        return found


class ControlTokens:
    """Keeps text of a client from becoming control tokens: the special ones, and markers that the template writes.

    A mark goes into each of them. The rendered prompt is cut at the marks and its parts are encoded one by one, so no
    part has a whole control token of a client, but all those of the template. XML tags such as <think> stay tokens:
    clients send back answers that contain them.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        added = tokenizer.added_tokens_decoder.values()
        tags = {each.content for each in added if not each.special and XML_TAG.fullmatch(each.content)}
        texts = {each.content for each in added if each.special or each.content in template}
        self._texts = {text for text in texts | set(tokenizer.all_special_tokens) if len(text.strip()) > 1} - tags
        self._lengths = sorted(set(map(len, self._texts)))
        self._first = re.compile(
            f"[{re.escape(''.join({text[0] for text in self._texts}))}]" if self._texts else "(?!)"
        )
        self.mark = str(secrets.randbits(128) | 1 << 127)
        """Digits, because templates change case and write JSON. Clients cannot guess it."""

    def marked(self, value: Any) -> Any:
        """A JSON value with a mark behind the first character of each control token in its strings."""
        if isinstance(value, str):
            return self._first.sub(self._with_mark, value)
        if isinstance(value, list):
            return [self.marked(each) for each in value]
        if isinstance(value, dict):
            return {self.marked(key): self.marked(each) for key, each in value.items()}
        return value

    def _with_mark(self, found: re.Match[str]) -> str:
        text, start = found.string, found.start()
        is_control = any(text[start : start + length] in self._texts for length in self._lengths)
        return found[0] + self.mark * is_control


def _piece_bytes(piece: str) -> bytes | None:
    """Bytes of a vocabulary entry, written as <0xE2> or in the byte-level alphabet; None if neither.

    >>> _piece_bytes("<0xE2>"), _piece_bytes("\\u00e2\\u0124"), _piece_bytes("\\ufffd")
    (b'\\xe2', b'\\xe2\\x82', None)
    """
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in piece) if piece and all(letter in letters for letter in piece) else None


@cache
def _byte_letters() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others start at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
