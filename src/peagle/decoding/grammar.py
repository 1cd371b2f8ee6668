"""Constrain an answer to a grammar: which tokens may follow the text and each draft token.

`llguidance` follows the text byte by byte and computes the allowed tokens. It comes with the extra `serve`; without it
only requests with a grammar are refused.

JSON has one space after each comma and colon, and no other whitespace. So most of what a schema prescribes is known to
the byte and can be drafted, and no answer loops in whitespace.
"""

import json
import logging
import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from peagle.decoding.draft_tree import DraftTree
from peagle.errors import MissingExtraError, RequestError, TargetError
from peagle.sampling_params import ANY_TEXT, Grammar

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

Draft = tuple[int, int, float]
"""Token, parent (0 is the newest token, 1 the first draft), and log-probability of the path; -inf if there is none."""

BITS = 32
MAX_KEPT_GRAMMARS = 256
MAX_ITEMS = 50_000
"""Continuations that the library follows at once, as many as in a whole step. Its own limit fails on large schemas."""
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PROBE = '{"a b": [1, 23]} \u00e9\u4e2d \U0001f600.'
"""Text that the library and the tokenizer must decode to the same bytes."""


class Guide:
    """The state of one answer in its grammar. Only `advance` changes it."""

    def __init__(self, matcher: Any, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_words = -(-vocab_size // BITS)
        self._is_logged = False

    @property
    def has_failed(self) -> bool:
        """Whether a limit of the library was reached. Then only the end is allowed."""
        return bool(self._matcher.is_error())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append allowed tokens to the answer. End tokens change nothing."""
        self._matcher.consume_tokens([token for token in token_ids if token not in self._end_ids])
        if self.has_failed and not self._is_logged:
            self._is_logged = True
            reason, *_ = self._matcher.get_error().strip().splitlines()
            log.warning("a grammar cannot be followed further: %s", reason)

    def allowed(self) -> np.ndarray:
        """Bitmask of the tokens that may come next: bit v % 32 of word v // 32, int32."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._num_words]

    def plan(self, drafts: Sequence[Draft], max_depth: int, allowed_LW: np.ndarray) -> DraftTree:
        """The drafts to verify, the likeliest first; writes to row j of `allowed_LW` what may follow node j of them.

        Drafts that are not allowed go. Where the grammar forces a continuation, it replaces the drafts, and takes the
        places of those that went. A forced token is as likely as what it follows.
        """
        tree = DraftTree()
        allowed_LW[:] = -1
        forced = [self._look([], allowed_LW[0])]

        def add(parent: int, token: int, logprob: float) -> int | None:
            """The node of this token behind a node; None if it is not allowed, or too deep."""
            if forced[parent]:
                token, logprob = forced[parent][0], 0.0
            if (node := tree.child(parent, token)) is not None:
                return node
            is_allowed = (int(allowed_LW[parent, token // BITS]) >> token % BITS) & 1
            has_ended = parent > 0 and tree.token_ids[parent - 1] in self._end_ids
            if not is_allowed or has_ended or tree.depths[parent] == max_depth:
                return None
            node = tree.add(parent, token, tree.scores[parent] + min(logprob, 0.0))
            is_end = token in self._end_ids
            own = [] if is_end else self._look(tree.tokens(tree.path(node)), allowed_LW[node])
            forced.append(forced[parent][1:] or own)
            return node

        found: list[int | None] = [0]
        for token, parent, score in drafts:
            above = found[parent] if score > -math.inf else None
            score_above = drafts[parent - 1][2] if parent else 0.0
            found.append(None if above is None else add(above, token, score - score_above))
        for parent in range(len(drafts)):
            if parent <= len(tree) < len(drafts) and forced[parent]:
                add(parent, forced[parent][0], 0.0)
        tree, order = tree.best_first()
        allowed_LW[: len(order)] = allowed_LW[order]
        return tree

    def _look(self, token_ids: Sequence[int], allowed_W: np.ndarray) -> list[int]:
        """Write the mask of what may follow these tokens, and return what must, as the tokenizer would write it."""
        num_walked = self._matcher.try_consume_tokens(list(token_ids)) if token_ids else 0
        if num_walked == len(token_ids):
            allowed_W[:] = self.allowed()
            is_over = self._matcher.is_stopped()
            forced = [self._end_ids[0]] if is_over else list(self._matcher.compute_ff_tokens())
        else:
            forced = []
        if num_walked:
            self._matcher.rollback(num_walked)
        return forced

    def allowed_after(self, answer_ids: Sequence[int]) -> np.ndarray | None:
        """Mask of the tokens that may follow an answer, bool; None if the answer breaks the grammar or has ended.

        Replays the answer from its start, for callers that do not use `advance`.
        """
        self._matcher.reset()
        num_kept = self._matcher.try_consume_tokens(list(answer_ids))
        if num_kept < len(answer_ids) or any(token in self._end_ids for token in answer_ids):
            return None
        return np.unpackbits(self.allowed().view(np.uint8), bitorder="little").astype(np.bool_)


class _Grammars:
    """One target's tokenizer in the library's form, with a cache of compiled grammars."""

    def __init__(self, target: "HFTarget") -> None:
        try:
            import llguidance
        except ImportError as error:
            raise MissingExtraError("llguidance", "serve", "a grammar") from error
        backend = getattr(target.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TargetError(
                f"grammars need a fast tokenizer, which target {target.name!r} does not have",
                hint="send the request without a grammar",
            )
        own = target.tokenizer.eos_token_id
        self.end_ids = sorted(target.eos_token_ids, key=lambda token: (token != own, token))
        if not self.end_ids:
            raise TargetError(f"grammars need an end token, which target {target.name!r} does not have")
        self.vocab_size = target.vocab_size
        size = max(target.vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._library: Any = llguidance
        self._backend = backend
        self._tokenizer = llguidance.LLTokenizer(_plain_form(backend.to_str()), n_vocab=size, eos_token=self.end_ids)
        ids = backend.encode(PROBE, add_special_tokens=False).ids
        if self._tokenizer.decode_bytes(ids).strip() != PROBE.encode():
            raise TargetError(
                f"llguidance misreads the tokenizer of target {target.name!r}",
                hint="send the request without a grammar",
            )
        self._limits = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ITEMS)
        # Holds no lock while it compiles, so requests do not wait for each other.
        self._matcher = lru_cache(MAX_KEPT_GRAMMARS)(self._compile)

    def guide(self, grammar: Grammar) -> Guide:
        return Guide(self._matcher(grammar).deep_copy(), self.end_ids, self.vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        try:
            source = self._source(grammar)
        except ValueError as error:  # for example, a schema that is nested too deeply
            raise _refusal(grammar, str(error)) from None
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        first = matcher if matcher.is_error() else matcher.deep_copy()
        first.compute_bitmask()  # fails if no text matches
        if first.is_error():
            raise _refusal(grammar, first.get_error())
        return matcher

    def _source(self, grammar: Grammar) -> str:
        """The grammar in the library's own language, with what comes before the answer."""
        answer = self._answer_source(grammar)
        if not grammar.openings:
            return answer
        own = {"lark_grammar": answer} if grammar.kind == "choice" else json.loads(answer)["grammars"][0]
        before = {"lark_grammar": "start: opening @answer\n" + self._opening_rules(grammar.openings)}
        return json.dumps({"grammars": [before, own | {"name": "answer"}]})

    def _opening_rules(self, openings: Sequence[Sequence[str]]) -> str:
        """The rule `opening` in Lark: one of these sequences."""
        rules, sequences = ["TEXT: /(?s:.*)/"], []
        for pieces in openings:
            words: list[str] = []
            for piece in pieces:
                literal = json.dumps(piece, ensure_ascii=False)
                token_id = self._backend.token_to_id(piece)
                if piece == ANY_TEXT:
                    words.append("TEXT")
                elif token_id is not None and self._tokenizer.is_special_token(token_id):
                    words.append(f"<[{token_id}]>")  # no text contains it
                elif words and words[-1] == "TEXT":
                    words[-1] = f"text_{len(rules)}"
                    rules.append(f"{words[-1]}[suffix={literal}]: TEXT")
                else:
                    words.append(literal)
            sequences.append(" ".join(words) or '""')
        return "\n".join([f"opening: {' | '.join(sequences)}", *rules])

    def _answer_source(self, grammar: Grammar) -> str:
        matcher_type = self._library.LLMatcher
        if grammar.kind == "regex":
            return str(matcher_type.grammar_from_regex(grammar.value))
        if grammar.kind == "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in grammar.value or ())
            # One lexeme: as rules, thousands of choices exceed limits of the parser.
            return str(matcher_type.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
        schema = grammar.value if grammar.kind == "json_schema" else '{"type": "object"}'
        return str(matcher_type.grammar_from_json_schema(schema, overrides=JSON_FORM))


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    reason = "no text matches it" if reason.startswith("NoExtension") else reason.strip()
    return RequestError(f"the {grammar.kind} grammar is not supported: {reason}")


def _plain_form(tokenizer_json: str) -> str:
    """A tokenizer.json without padding and truncation, with the byte-level decoder at its top level."""
    form = json.loads(tokenizer_json)
    form["padding"] = form["truncation"] = None
    decoder = form.get("decoder") or {}
    for part in decoder.get("decoders", ()):
        if part["type"] == "ByteLevel":  # from a GGUF file; the other decoders do not affect such tokens
            form["decoder"] = part
    return json.dumps(form)


_lock = threading.Lock()
_grammars: "WeakKeyDictionary[HFTarget, _Grammars]" = WeakKeyDictionary()


def make_guide(target: "HFTarget", grammar: Grammar) -> Guide:
    """A guide at the start of an answer. Refuses a grammar that is not supported.

    Compiled grammars are cached, so another thread can compile ahead of time. The first call for a target takes about a
    second with a large vocabulary.
    """
    with _lock:
        grammars = _grammars.get(target) or _grammars.setdefault(target, _Grammars(target))
    return grammars.guide(grammar)
