"""Settings of `peagle data`. Imports neither torch nor numpy, so the command line can be built from them."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.data.kinds import read_shares
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams

NO_DRAFTER = "none"
"""As --drafter: plain decoding."""


@dataclass(frozen=True, kw_only=True)
class SynthesisSettings:
    """What the target writes."""

    max_length: int = 512
    """tokens per conversation, question and answer"""
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """each answer draws one of these; 0 is greedy"""
    num_held_out: int = 0
    """hold out this many greedy answers in OUTPUT/held_out, of each kind its share, to measure acceptance; never
    trained on"""
    keep_cut: bool = False
    """keep answers truncated at --max-length"""
    kinds: str | None = None
    """share of each kind of text, as in chat=0.5,summary=0.5: chat, turns, long, question, summary, rewrite, extract,
    translate, code; default: chat=0.4 and some of each, or chat alone for rows below 256 tokens"""
    documents: tuple[Path, ...] = ()
    """files that questions, summaries, rewriting and code are about; default: the target writes documents"""
    seed: int = 0
    """random seed of questions, temperatures and sampling"""


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig(SynthesisSettings):
    """All settings of a synthesis. The fields of this class are set in a recipe file."""

    top_p: float = 1.0
    """nucleus sampling of answers"""
    top_k: int = 0
    """sample answers from the k most likely tokens; 0 means all"""
    question_temperature: float = 0.9
    """temperature of questions"""
    max_question_tokens: int = 160
    """drop longer questions"""
    min_answer_tokens: int = 12
    """drop shorter answers"""
    max_answer_tokens: int = 1024
    """truncate longer answers; those of kind long end with the row"""
    max_turns: int = 4
    """most turns of conversations of kind turns"""
    keep_loops: bool = False
    """keep answers that end in a repeated passage, as greedy answers of small targets do, up to its third repetition"""
    given_share: float = 0.15
    """share of answers that go to the prompts of --given, while there are any"""
    system_prompts: tuple[str, ...] = (
        "",
        "You are a helpful assistant. The user asks for explanations, summaries, rewriting, brainstorming and essays.",
        "You are a programming assistant. The user asks for Python functions and explanations of code.",
        "You complete code. The user pastes the beginning of a Python function with its docstring.",
        "You are a math tutor. The user asks word problems and wants step by step solutions.",
        "You are an expert in science, history and philosophy. The user asks questions about them.",
        "You play roles and write stories, emails, poems and dialogues for the user.",
    )
    """system prompts to generate questions under; empty: the chat template's default"""

    def __post_init__(self) -> None:
        _check_sampling(self)
        require_at_least(self, 1, "max_question_tokens", "min_answer_tokens", "max_answer_tokens")
        require_at_least(self, 0, "num_held_out", "question_temperature")
        require_at_least(self, 8, "max_length")
        require_at_least(self, 2, "max_turns")
        read_shares(self.kinds, self.max_length)
        if not 0 <= self.given_share <= 1:
            raise ConfigError(f"given_share must be between 0 and 1, got {self.given_share}")
        if not self.system_prompts:
            raise ConfigError("system_prompts is empty", hint='list at least one; "" is the chat template\'s default')
        if self.num_held_out and 0 not in self.temperatures:
            raise ConfigError(
                f"num_held_out is {self.num_held_out}, but temperatures {list(self.temperatures)} has no 0",
                hint="acceptance is measured on greedy answers; add temperature 0",
            )

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind of text."""
        return read_shares(self.kinds, self.max_length)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt: at least half a row, and all but the longest answer."""
        return self.max_length - min(self.max_answer_tokens, self.max_length // 2)

    def for_base_model(self) -> "SynthesisConfig":
        """The settings for a target without a chat template: it continues text, which seldom ends within a row."""
        if self.kinds is not None and self.shares.keys() != {"chat"}:
            raise ConfigError(
                f"kinds {self.kinds!r} need a chat template, which the target does not have",
                hint="omit --kinds: a base model continues plain text",
            )
        return dataclasses.replace(self, kinds="chat=1", keep_cut=True)

    def described(self, *given: Path) -> dict[str, Any]:
        """The settings and files, as recorded in the manifest."""
        files = {"given": given, "documents": self.documents}
        described = {name: [describe_file(path) for path in paths] for name, paths in files.items()}
        return dataclasses.asdict(self) | described | {"kinds": self.shares}


@dataclass(frozen=True, kw_only=True)
class RegenerationSettings:
    """How the target answers."""

    max_length: int = 2048
    """tokens per conversation; it ends at the last turn that fits"""
    max_answer_tokens: int = 512
    """tokens per answer; a truncated answer is kept and ends its conversation"""
    max_turns: int | None = None
    """answer at most this many turns per conversation"""
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """each conversation draws one of these; 0 is greedy, needed to measure acceptance"""
    seed: int = 0
    """random seed of questions, temperatures and sampling"""


@dataclass(frozen=True, kw_only=True)
class RegenerationConfig(RegenerationSettings):
    """All settings of a regeneration. The fields of this class are set in a recipe file."""

    top_p: float = 1.0
    """nucleus sampling"""
    top_k: int = 0
    """sample from the k most likely tokens; 0 means all"""

    def __post_init__(self) -> None:
        _check_sampling(self)
        require_at_least(self, 1, "max_answer_tokens", "max_turns")
        require_at_least(self, 8, "max_length")

    def described(self, *prompts: Path, limit: int | None = None) -> dict[str, Any]:
        """The settings and prompt files, as recorded in the manifest."""
        return dataclasses.asdict(self) | {"prompts": [describe_file(path) | {"limit": limit} for path in prompts]}

    def answer_params(self, key: int, turn: int, room: int, end: int) -> SamplingParams:
        """Sampling of one turn. Deterministic per conversation and turn; all turns share the temperature."""
        return SamplingParams(
            min(self.max_answer_tokens, room),
            self.temperatures[drawn_number(self.seed, key) % len(self.temperatures)],
            top_p=self.top_p,
            top_k=self.top_k,
            seed=drawn_number(self.seed, key, turn),
            stop_token_ids=(end,),
        )


@dataclass(frozen=True)
class Until:
    """When to stop: at the first limit reached."""

    num_answers: int | None = None
    """answers in the output, over all runs"""
    num_tokens: int | None = None
    """answer tokens in the output, over all runs"""
    seconds: float | None = None
    """seconds of this run; running answers are finished"""

    def __post_init__(self) -> None:
        for name in ("num_answers", "num_tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if self.num_answers is self.num_tokens is self.seconds is None:
            raise ConfigError("no stopping condition", hint="pass --num-answers, --num-tokens or --seconds")

    def is_reached(self, counts: Mapping[str, Any]) -> bool:
        """Whether the output already has enough; --seconds always runs."""
        pairs = ((self.num_answers, counts["num_rows"]), (self.num_tokens, counts["num_answer_tokens"]))
        return any(wanted is not None and found >= wanted for wanted, found in pairs)

    def progress(self, counts: Mapping[str, Any], seconds: float) -> tuple[float, float]:
        """Done and total, of the first limit that is set."""
        pairs = ((counts["num_rows"], self.num_answers), (counts["num_answer_tokens"], self.num_tokens))
        return next(((done, wanted) for done, wanted in pairs if wanted is not None), (seconds, self.seconds or 0))


def describe_file(path: Path) -> dict[str, Any]:
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def drawn_number(*parts: int | str) -> int:
    """A pseudorandom number below 2**62, determined by the parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def require_at_least(config: Any, least: int, *names: str) -> None:
    """Reject settings below `least` or infinite, unless they are None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """For each setting of `now` that differs, what it was and is."""
    return [
        f"{name} was {earlier.get(name)!r}, is {value!r}" for name, value in now.items() if earlier.get(name) != value
    ]


def with_limit_of(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """`now` with the limit of an earlier run, if that was smaller: a larger one only adds the next prompts.

    Not with several files: a limit counts in each, so another one numbers the prompts of the later files anew.
    """
    before, after = earlier.get("prompts", ()), now.get("prompts", ())
    if len(before) == len(after) == 1 and before[0]["limit"] is not None:
        least, limit = before[0]["limit"], after[0]["limit"]
        if limit is None or limit > least:
            return {**now, "prompts": [{**after[0], "limit": least}]}
    return dict(now)


def _check_sampling(config: SynthesisConfig | RegenerationConfig) -> None:
    if not config.temperatures or not all(0 <= temperature < math.inf for temperature in config.temperatures):
        raise ConfigError(f"temperatures must be 0 or more, got {', '.join(map(str, config.temperatures)) or 'none'}")
    require_at_least(config, 0, "top_k", "seed")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, got {config.top_p}")
