"""vLLM's speculative config as users of vLLM and of AWS's containers write it, split into our options and the rest.

    {"method": "eagle3", "model": "amazon/GPT-OSS-20B-P-EAGLE", "parallel_drafting_spec": {"depth": 5}}
    -> the drafter amazon/GPT-OSS-20B-P-EAGLE, 5 draft tokens

`serve` reads it from SM_VLLM_SPECULATIVE_CONFIG, `deploy sagemaker` from --env, `deploy vllm` from the words after --.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from peagle.config import json_object
from peagle.errors import ConfigError, nearest

METHODS = ("eagle3", "eagle", "p-eagle")
DEPTH_KEYS = ("prediction_depth", "depth")
TREE_KEYS = ("num_parallel_trees", "parallel_trees", "num_trees")
USUAL_DRAFT_TOKENS = 3
"""Draft tokens per step where a config names a drafter or a parallel_drafting_spec, but no number."""


class Kind(Protocol):
    """A drafter's configuration."""

    @property
    def parallel(self) -> bool | None: ...


@dataclass(frozen=True)
class Speculation:
    """What a speculative config asks for; None: it does not say."""

    drafter: str | None = None
    num_draft_tokens: int | None = None
    parallel: bool | None = None
    rest: dict[str, Any] = field(default_factory=dict)
    """keys that are none of our options"""
    has_usual_number: bool = False
    """no number is given, and the config is of the kind that AWS's containers give the usual one"""

    def draft_tokens(self, given: int | None) -> int | None:
        """Draft tokens per step: the config's or `given`, which must not contradict each other, else the usual."""
        asked = self.num_draft_tokens
        if None not in (asked, given) and asked != given:
            raise ConfigError(
                f"the speculative config asks for {asked} draft tokens, but num_draft_tokens is {given}",
                hint="they are the same setting; pass one of them",
            )
        asked = given if asked is None else asked
        return USUAL_DRAFT_TOKENS if asked is None and self.has_usual_number else asked

    def check_kind(self, drafter: Kind | None, name: str) -> None:
        """Refuse a config that says P-EAGLE of an EAGLE-3 drafter, or the reverse."""
        parallel = None if drafter is None else drafter.parallel
        if None not in (self.parallel, parallel) and self.parallel != parallel:
            asked, found = ("P-EAGLE", "EAGLE-3") if self.parallel else ("EAGLE-3", "P-EAGLE")
            raise ConfigError(
                f"{name}: parallel_drafting is {str(self.parallel).lower()}, but the drafter is {found}",
                hint=f"remove the key, or pass a drafter of the kind {asked}",
            )


def read_speculation(text: str, name: str) -> Speculation:
    """Read a speculative config. `name` is the option or variable it comes from, for messages."""
    config = {key: value for key, value in json_object(text, name).items() if value is not None}
    method = config.pop("method", "eagle3")
    if method not in METHODS:
        raise ConfigError(f"{name}: the method {method!r} is not supported", hint="use 'eagle3'")
    drafter = config.pop("model", None)
    if drafter is not None and not isinstance(drafter, str):
        raise ConfigError(f"{name}: model must be a string, got {drafter!r}")
    parallel = config.pop("parallel_drafting", None)
    if parallel is not None and not isinstance(parallel, bool):
        raise ConfigError(f"{name}: parallel_drafting must be true or false, got {parallel!r}")
    number = _count(config.pop("num_speculative_tokens", None), f"{name}: num_speculative_tokens")
    spec = config.pop("parallel_drafting_spec", None)
    depth = _depth(spec, f"{name}: parallel_drafting_spec")
    if depth is not None and number not in (None, depth):
        raise ConfigError(
            f"{name}: num_speculative_tokens is {number}, but parallel_drafting_spec has depth {depth}",
            hint="both set the number of draft tokens; remove one",
        )
    if spec is not None and parallel is False:
        raise ConfigError(
            f"{name}: parallel_drafting is false, but parallel_drafting_spec is given", hint="remove one of them"
        )
    number = number if depth is None else depth
    names_one = bool(drafter) or spec is not None
    return Speculation(drafter or None, number, parallel, config, has_usual_number=number is None and names_one)


def _depth(spec: Any, name: str) -> int | None:
    """The number of draft tokens in the block that AWS's articles use: parallel trees and their depth."""
    if spec is None:
        return None
    if not isinstance(spec, dict):
        raise ConfigError(f"{name} must be a JSON object, got {spec!r}")
    for key in spec:
        if key not in DEPTH_KEYS + TREE_KEYS:
            raise ConfigError(f"{name}: unknown key {key!r}", hint=nearest(key, DEPTH_KEYS + TREE_KEYS))
    for key in TREE_KEYS:
        if _count(spec.get(key), f"{name}: {key}") not in (None, 1):
            raise ConfigError(
                f"{name}: {key} is {spec[key]}, but draft trees are not supported",
                hint="use 1: one sequence of draft tokens",
            )
    depths = [_count(spec[key], f"{name}: {key}") for key in DEPTH_KEYS if key in spec]
    return depths[0] if depths else None


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value
