"""Kinds of text that users serve: what they ask for, and what the target writes first to be asked about.

chat        a question
turns       a question and follow-up questions
long        a request for a long text, answered up to the end of the row
question    documents and a question about them
summary     documents to summarize; rewrite, translate and extract (to JSON) take documents, too
code        source files and a request
"""

import logging
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from peagle.errors import ConfigError, nearest
from peagle.targets.catalog import ASSETS

log = logging.getLogger(__name__)

TEXT, CODE, LONG = "text", "code", "long"
"""What questions are written for besides plain ones: documents, source files and long answers."""
GIVEN = "given"
"""The kind of prompts that the user gives."""
MIN_ROW = 256
"""The shortest rows for kinds other than chat."""
FRUITLESS_PROMPTS = 64
"""Dropped prompts of a kind, without any answer, after which a run continues without the kind."""


class Kind(NamedTuple):
    share: float
    """share of the conversations by default"""
    source: str | None = None
    """what it is about: documents (TEXT) or source files (CODE)"""
    instructions: Sequence[str] = ()
    """what to do with them; empty: the target writes a question about them"""
    is_short: bool = False
    """whether the answer is as long as the document, which is therefore a single and short one"""


_TABLES = tomllib.loads((ASSETS / "text_kinds.toml").read_text(encoding="utf-8"))
KINDS: Mapping[str, Kind] = {name: Kind(**table) for name, table in _TABLES["kinds"].items()}
TOPICS: Mapping[str, list[str]] = _TABLES["topics"]
"""System prompts to write questions under, by what they are for."""
DOCUMENTS: Mapping[str, list[str]] = _TABLES["documents"]
"""Requests for a document on a topic, by source."""


def read_shares(text: str | None, max_length: int) -> dict[str, float]:
    """The share of each kind, which sum to 1, from text such as "chat=3,summary=1"; None: the default.

    Rows that are too short for documents are chat only, by default.

    >>> read_shares("chat=3,summary=1", 512)
    {'chat': 0.75, 'summary': 0.25}
    >>> read_shares(None, 128)
    {'chat': 1.0}
    """
    if text is None:
        shares = {name: kind.share for name, kind in KINDS.items() if name == "chat" or max_length >= MIN_ROW}
    else:
        shares = _read(text)
        for name in shares:
            if name != "chat" and max_length < MIN_ROW:
                raise ConfigError(
                    f"kind {name!r} requires rows of {MIN_ROW} tokens, but max_length is {max_length}",
                    hint=f"pass --max-length {MIN_ROW} or more, or --kinds chat",
                )
    whole = sum(shares.values())
    return {name: round(share / whole, 6) for name, share in shares.items()}


def _read(text: str) -> dict[str, float]:
    hint = f"for example --kinds chat=0.5,summary=0.5; kinds: {', '.join(KINDS)}"
    shares: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = map(str.strip, part.partition("="))
        if name not in KINDS:
            raise ConfigError(f"kinds: unknown kind {name!r}", hint=nearest(name, KINDS))
        if name in shares:
            raise ConfigError(f"kinds: {name!r} is given twice", hint=hint)
        try:
            shares[name] = float(value) if equals else 1.0
        except ValueError as error:
            raise ConfigError(f"kinds: {value!r} is not a number", hint=hint) from error
        if not 0 <= shares[name] < math.inf:
            raise ConfigError(f"kinds: the share of {name!r} must be 0 or more, got {value}", hint=hint)
    if not any(shares.values()):
        raise ConfigError(f"kinds: {text!r} has no share above 0", hint=hint)
    return {name: share for name, share in shares.items() if share}


class KindMix:
    """Which kind of conversation to begin next, so that each has its share.

    >>> mix = KindMix({"chat": 0.75, "summary": 0.25}, {"chat": 2})
    >>> [mix.next() for _ in range(6)]
    ['summary', 'chat', 'chat', 'chat', 'summary', 'chat']
    """

    def __init__(self, shares: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """`counts` are the finished conversations of each kind."""
        self._shares = dict(shares)
        self._num_begun = Counter(counts)
        """conversations of each kind, finished or begun"""
        self._fruitless = Counter[str]()
        """dropped conversations of each kind of which none was kept"""
        self._works: set[str] = set()

    def next(self) -> str:
        """The kind that lacks the most conversations. Counts the new one."""
        whole = sum(self._num_begun[kind] for kind in self._shares) + 1
        kind = max(self._shares, key=lambda each: self._shares[each] * whole - self._num_begun[each])
        self._num_begun[kind] += 1
        return kind

    def keep(self, kind: str) -> None:
        """One of a kind was kept."""
        self._works.add(kind)

    def drop(self, kind: str) -> None:
        """One of a kind was dropped. After many without a success the run continues without the kind."""
        self._num_begun[kind] -= 1
        if kind not in self._shares or kind in self._works or len(self._shares) == 1:
            return
        self._fruitless[kind] += 1
        if self._fruitless[kind] >= FRUITLESS_PROMPTS:
            del self._shares[kind]
            message = "kind %s: none of the first %d is usable; going on without it (see the reasons for drops)"
            log.warning(message, kind, FRUITLESS_PROMPTS)
