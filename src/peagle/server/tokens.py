"""Text and bytes of single tokens, for log-probabilities."""

from functools import cache
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"


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
