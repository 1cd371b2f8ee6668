"""Sampling parameters of a request."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from peagle.errors import RequestError

MAX_LOGIT_BIASES = 300

GrammarKind = Literal["json_schema", "json_object", "regex", "choice"]

ANY_TEXT = ""
"""In `Grammar.openings`: any text, up to the next piece."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar for the answer. An answer cut by `max_tokens` or a stop condition is a prefix of a valid one."""

    kind: GrammarKind
    value: str | tuple[str, ...] | None = None
    """By kind: a JSON schema as text, None for any JSON object, a regular expression, or the allowed answers."""
    openings: tuple[tuple[str, ...], ...] = ()
    """What comes before the answer, such as thinking: one of these sequences of texts, control tokens and ANY_TEXT."""

    def __post_init__(self) -> None:
        given: object = self.value
        value = tuple(given) if isinstance(given, list) else given
        object.__setattr__(self, "value", value)
        if self.kind not in get_args(GrammarKind):
            raise RequestError(f"grammar must be one of {', '.join(get_args(GrammarKind))}, got {self.kind!r}")
        if self.kind == "json_object":
            is_right, wanted = value is None, "no value"
        elif self.kind == "choice":
            is_right = isinstance(value, tuple) and bool(value) and all(isinstance(v, str) and v for v in value)
            wanted = "a list of non-empty strings"
        elif self.kind == "regex":
            is_right, wanted = isinstance(value, str) and bool(value), "a regular expression"
        else:
            is_right, wanted = isinstance(value, str) and _is_json_object(value), "a JSON object as text"
        if not is_right:
            raise RequestError(f"a grammar of kind {self.kind} takes {wanted}, got {repr(value)[:200]}")


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per-request sampling settings. Out-of-range values raise RequestError.

    `logit_bias`, `min_tokens`, the penalties and the grammar change the target's logits, in this order and before the
    temperature. They take earlier draft tokens into account, so an answer is the same with and without drafts.
    Log-probabilities are the target's own, before any of these changes (as in vLLM).
    """

    max_tokens: int = 256
    """The most tokens to generate."""
    temperature: float = 0.0
    """0 takes the most likely token; 1 samples the target's own distribution."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 means all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    seed: int = 0
    """Together with the position in the text, it determines every random draw."""
    stop: tuple[str, ...] = ()
    """End before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """End at any of these tokens, in addition to the target's end tokens."""
    ignore_eos: bool = False
    """Continue after the target's end tokens."""
    min_tokens: int = 0
    """The fewest tokens to generate: until then end tokens are banned and stop strings ignored."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """By token id: a number to add to its logit, -100 to 100."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it occurs in the answer."""
    grammar: Grammar | None = None
    """Constrains the answer: tokens that break the grammar are never chosen."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens to keep in the text, such as the marks around thinking; other special tokens have no text."""
    n: int = 1
    """Number of answers; answer i uses seed + i."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely ones; None for none."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first; disables prefix caching. None for none."""
    num_draft_tokens: int | None = None
    """Draft tokens per step, at most the engine's; 0 decodes without drafts, None uses the engine's."""
    tolerance: float = 1.0
    """Below 1 the answer is NOT lossless: a draft is also kept if the target gives it at least this fraction of the
    probability of its most likely token."""

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        object.__setattr__(self, "shown_token_ids", frozenset(self.shown_token_ids))
        # Some limits only keep numbers within the GPU's types.
        require(self.max_tokens >= 1, "max_tokens", "at least 1")
        require(self.max_tokens < 2**31, "max_tokens", "below 2**31")
        require(self.temperature >= 0, "temperature", "0 or more")
        require(self.temperature <= 1e6, "temperature", "at most 1e6")
        require(self.top_k >= 0, "top_k", "0 (all tokens) or more")
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        require(0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        require(all(self.stop), "stop", "a list of non-empty strings")
        require(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", "a list of token ids, 0 or more")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"between 0 and max_tokens ({self.max_tokens})")
        require(
            len(self.logit_bias) <= MAX_LOGIT_BIASES
            and all(token >= 0 and -100 <= bias <= 100 for token, bias in self.logit_bias.items()),
            "logit_bias",
            f"at most {MAX_LOGIT_BIASES} token ids with numbers between -100 and 100",
        )
        require(1e-3 <= self.repetition_penalty <= 1e3, "repetition_penalty", "between 0.001 and 1000")
        require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        require(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        if self.grammar is not None:
            require(not self.ignore_eos, "ignore_eos", "off with a grammar, which ends the answer")
            require(not self.min_tokens, "min_tokens", "0 with a grammar, which ends the answer")
        require(self.n >= 1, "n", "at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 20, name, "between 0 and 20, or None")
        require(self.num_draft_tokens is None or self.num_draft_tokens >= 0, "num_draft_tokens", "0 or more, or None")
        require(0 < self.tolerance <= 1, "tolerance", "above 0 and at most 1 (exact)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def tolerated_gap(self) -> float | None:
        """How far the logit of a tolerated draft may lie below the highest one; None: no draft is tolerated.

        Probabilities are those at the temperature; a greedy request has the target's own, at temperature 1.
        """
        return None if self.tolerance == 1 else -math.log(self.tolerance) * (self.temperature or 1.0)

    @property
    def adjusts_logits(self) -> bool:
        """Whether the target's logits change before a token is chosen."""
        return bool(
            self.min_tokens
            or self.logit_bias
            or self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.grammar is not None
        )
