"""Single tokens as log-probabilities show them: a text, and the bytes it stands for."""

from functools import cache
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"


class TokenText(NamedTuple):
    text: str
    """half a character shows as a replacement sign; the bytes tell which half"""
    data: bytes


class TokenTexts:
    """Looks tokens up, and remembers them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self.special_ids = frozenset(tokenizer.all_special_ids)
        """tokens that a tokenizer may add to a text"""

    def __getitem__(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> TokenText:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if REPLACEMENT not in text:
            return TokenText(text, text.encode("utf-8", "replace"))
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        return TokenText(text, _piece_bytes(piece) or text.encode())


def _piece_bytes(piece: str) -> bytes | None:
    """Bytes that a vocabulary entry spells, in the two spellings there are: <0xE2>, or one letter for each byte.

    >>> _piece_bytes("<0xE2>"), _piece_bytes("\\u00e2\\u0124"), _piece_bytes("\\ufffd")
    (b'\\xe2', b'\\xe2\\x82', None)
    """
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in piece) if piece and all(letter in letters for letter in piece) else None


@cache
def _byte_letters() -> dict[str, int]:
    """Letters of byte-level vocabularies: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
