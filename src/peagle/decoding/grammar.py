"""Holding an answer to a grammar: which tokens may come next, after the text and after each of its draft tokens.

The library `llguidance` follows the text byte by byte and says which tokens keep to the grammar. It comes with the
extra `serve`; where it is missing, a request with a grammar is refused and nothing else changes.

JSON is written with one space behind each comma and colon and no other space between its parts. So most of what a
schema prescribes is prescribed to the byte, and can be drafted instead of guessed; and no answer is lost in white
space.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from peagle.errors import MissingExtraError, RequestError, TargetError
from peagle.sampling_params import Grammar

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

BITS = 32
MAX_KEPT_GRAMMARS = 256
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


PROBE = '{"a b": [1, 23]} \u00e9\u4e2d \U0001f600.'
"""Text whose tokens must mean the same bytes to the library as to the tokenizer."""


class Guide:
    """The place of one answer in its grammar. It is moved by `advance` alone."""

    def __init__(self, matcher: Any, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_words = -(-vocab_size // BITS)
        self._has_failed = False

    def advance(self, token_ids: Sequence[int]) -> None:
        """The tokens have joined the answer; they were allowed. The token that ends it changes nothing."""
        self._matcher.consume_tokens([token for token in token_ids if token not in self._end_ids])
        if self._matcher.is_error() and not self._has_failed:
            self._has_failed = True  # a limit of the library; all that it allows from here on is the end
            log.warning("a grammar cannot be followed any further: %s", _first_line(self._matcher.get_error()))

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next: bit v % 32 of word v // 32, int32."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._num_words]

    def plan(self, draft_ids: Sequence[int], allowed_LW: np.ndarray) -> list[int]:
        """The drafts worth verifying, and in row j of `allowed_LW` what may come after the first j of them.

        Where the grammar leaves one continuation, it takes the place of the drafts. Rows behind a draft token that is
        not allowed are never reached, because it is never accepted; nor are those behind an end. They allow all.
        """
        drafts = list(draft_ids)
        allowed_LW[:] = -1
        forced: list[int] = []
        num_walked = 0
        for row in range(len(drafts) + 1):
            allowed_LW[row] = self.allowed()
            if row == len(drafts):
                break
            forced = forced or self._forced()
            if forced:
                drafts[row] = forced.pop(0)
            token = drafts[row]
            is_allowed = (int(allowed_LW[row, token // BITS]) >> token % BITS) & 1
            if token in self._end_ids or not is_allowed or not self._matcher.try_consume_tokens([token]):
                break
            num_walked += 1
        if num_walked:
            self._matcher.rollback(num_walked)
        return drafts

    def _forced(self) -> list[int]:
        """The tokens that spell what must come next, as the tokenizer would write it; empty if there is a choice."""
        if self._matcher.is_stopped():
            return [self._end_ids[0]]
        return list(self._matcher.compute_ff_tokens())

    def allowed_after(self, answer_ids: Sequence[int]) -> np.ndarray | None:
        """Whether each token may come after a whole answer so far, bool; None if the answer itself breaks the grammar
        or has ended. For those who keep no place: the guide goes through the answer from its start."""
        self._matcher.reset()
        num_kept = self._matcher.try_consume_tokens(list(answer_ids))
        if num_kept < len(answer_ids) or any(token in self._end_ids for token in answer_ids):
            return None
        return np.unpackbits(self.allowed().view(np.uint8), bitorder="little").astype(np.bool_)


class _Grammars:
    """The tokenizer of one target in the library's form, and grammars that were compiled for it lately."""

    def __init__(self, target: "HFTarget") -> None:
        try:
            import llguidance
        except ImportError as error:
            raise MissingExtraError("llguidance", "serve", "answering by a grammar") from error
        backend = getattr(target.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TargetError(
                f"target {target.name!r} has a tokenizer without a fast form, which grammars need",
                hint="leave the grammar out",
            )
        own = target.tokenizer.eos_token_id
        self.end_ids = sorted(target.eos_token_ids, key=lambda token: (token != own, token))
        if not self.end_ids:
            raise TargetError(f"target {target.name!r} has no end token, which an answer by a grammar needs")
        self.vocab_size = target.vocab_size
        size = max(target.vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._library: Any = llguidance
        self._tokenizer = llguidance.LLTokenizer(_plain_form(backend.to_str()), n_vocab=size, eos_token=self.end_ids)
        ids = backend.encode(PROBE, add_special_tokens=False).ids
        if self._tokenizer.decode_bytes(ids).strip() != PROBE.encode():
            raise TargetError(
                f"target {target.name!r} has a tokenizer that the library for grammars misreads",
                hint="leave the grammar out",
            )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._matchers: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()
        """not held while a grammar is compiled: nobody waits for another's"""

    def guide(self, grammar: Grammar) -> Guide:
        with self._lock:
            matcher = self._matchers.get(grammar)
        matcher = matcher or self._compile(grammar)
        with self._lock:
            self._matchers[grammar] = matcher
            self._matchers.move_to_end(grammar)
            if len(self._matchers) > MAX_KEPT_GRAMMARS:
                self._matchers.popitem(last=False)
            return Guide(matcher.deep_copy(), self.end_ids, self.vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        matcher_type = self._library.LLMatcher
        if grammar.kind == "regex":
            text = matcher_type.grammar_from_regex(grammar.value)
        elif grammar.kind == "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in grammar.value or ())
            text = matcher_type.grammar_from_lark(f"start: {choices}")
        else:
            schema = grammar.value if grammar.kind == "json_schema" else '{"type": "object"}'
            text = matcher_type.grammar_from_json_schema(schema, overrides=JSON_FORM)
        matcher = matcher_type(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(f"the {grammar.kind} of the grammar cannot be followed: {matcher.get_error().strip()}")
        return matcher


def _plain_form(tokenizer_json: str) -> str:
    """A tokenizer.json without padding and truncation, whose decoder says at once that tokens spell bytes."""
    form = json.loads(tokenizer_json)
    form["padding"] = form["truncation"] = None
    decoder = form.get("decoder") or {}
    for part in decoder.get("decoders", ()):
        if part["type"] == "ByteLevel":  # as a GGUF file's: the others in the list do nothing to such tokens
            form["decoder"] = part
    return json.dumps(form)


_lock = threading.Lock()
_grammars: "WeakKeyDictionary[HFTarget, _Grammars]" = WeakKeyDictionary()


def make_guide(target: "HFTarget", grammar: Grammar) -> Guide:
    """A guide at the start of an answer. A grammar that cannot be followed is refused.

    What was compiled is kept, so that a caller in another thread can have the work done before it matters; the first
    call for a target takes about a second for a large vocabulary.
    """
    with _lock:
        if target not in _grammars:
            _grammars[target] = _Grammars(target)
        grammars = _grammars[target]
    return grammars.guide(grammar)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
