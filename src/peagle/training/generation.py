"""What the target is asked to write, and the door through which it writes.

Training does not know the engine: whoever calls it passes a `Generator` in. Importing this module imports neither
torch nor numpy, so the command line can be made from its settings.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget


class Job(NamedTuple):
    """Text to continue until an end token or a limit. `tag` is the caller's own and comes back with the answer."""

    tag: Any
    prompt_ids: list[int]
    params: SamplingParams


class Answer(Protocol):
    """What the target wrote for a job."""

    @property
    def job(self) -> Job: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """with the end token, if it came to one"""
        ...

    @property
    def is_ended(self) -> bool: ...


NextJobs = Callable[[int], Sequence[Job]]
"""Given how many more jobs would be run at once, gives up to so many; an empty answer means: nothing at the moment."""


class Generator(Protocol):
    """Runs many jobs at a time. It has lent the target to itself while it is open."""

    target: "HFTarget"
    max_length: int
    """most tokens of one text, prompt and answer"""

    def run(self, next_jobs: NextJobs) -> Iterator[Sequence[Answer]]:
        """Yield answers as they finish, in no fixed order, until `next_jobs` gives none and none is running.

        It may yield nothing, to let those who follow the progress have a look.
        """
        ...


class Dialog(NamedTuple):
    """A conversation of a prompt file, whose assistant turns the target is to write."""

    where: str
    """"FILE:LINE", for messages about it"""
    messages: Sequence[dict[str, Any]]

    def first_turn(self) -> "Dialog":
        """What is said up to and with the user's first message, without what an assistant said before it."""
        end = next(index for index, message in enumerate(self.messages) if message["role"] == "user") + 1
        return Dialog(self.where, [message for message in self.messages[:end] if message["role"] != "assistant"])

    def key(self) -> int:
        """The same for dialogs that say the same, in all their messages. A question alone has the key of its words."""
        said = [message | {"content": message["content"].strip()} for message in self.messages]
        is_question = len(said) == 1 and said[0].keys() == {"role", "content"} and said[0]["role"] == "user"
        return drawn_number(said[0]["content"] if is_question else json.dumps(said, sort_keys=True))


@dataclass(frozen=True)
class SynthesisConfig:
    """How the target's own questions and answers are made."""

    max_length: int = 512
    """tokens a row, question and answer"""
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """each answer draws one of these; 0 takes the most likely token"""
    top_p: float = 1.0
    """sample among the most likely tokens that together hold this probability"""
    top_k: int = 0
    """sample among the k most likely tokens only; 0 means all"""
    question_temperature: float = 0.9
    """at which questions are written; answers have temperatures of their own"""
    max_question_tokens: int = 160
    """questions that are longer are dropped"""
    min_answer_tokens: int = 12
    """answers that are shorter are dropped"""
    keep_cut: bool = False
    """keep answers that reached max_length before they came to an end"""
    keep_loops: bool = False
    """keep answers that end in a passage said again and again, as greedy answers of small targets do"""
    given_share: float = 0.15
    """share of the answers that go to given prompts, as long as there are any"""
    num_held_out: int = 0
    """greedy answers to set apart in OUTPUT/held_out, to measure acceptance on; they are never trained on"""
    system_prompts: tuple[str, ...] = (
        "",
        "You are a helpful assistant. The user asks for explanations, summaries, rewriting, brainstorming and essays.",
        "You are a programming assistant. The user asks for Python functions and explanations of code.",
        "You complete code. The user pastes the beginning of a Python function with its docstring.",
        "You are a math tutor. The user asks word problems and wants step by step solutions.",
        "You are an expert in science, history and philosophy. The user asks questions about them.",
        "You play roles and write stories, emails, poems and dialogues for the user.",
    )
    """what the questions are asked under, for breadth; empty: what the chat template says by itself"""
    seed: int = 0
    """of everything that is drawn"""

    def __post_init__(self) -> None:
        _check_sampling(self.temperatures, self.top_p, self.top_k, self.seed)
        _check_sampling((self.question_temperature,), self.top_p, self.top_k, self.seed, "question_temperature")
        _require(self, 1, "max_question_tokens", "min_answer_tokens")
        _require(self, 0, "num_held_out")
        _require(self, 8, "max_length")
        if not 0 <= self.given_share <= 1:
            raise ConfigError(f"given_share must be between 0 and 1, got {self.given_share}")
        if not self.system_prompts:
            raise ConfigError("system_prompts is empty", hint='give at least one; "" is the chat template\'s own')
        if self.num_held_out and 0 not in self.temperatures:
            raise ConfigError(
                f"num_held_out is {self.num_held_out}, but temperatures {list(self.temperatures)} has no 0",
                hint="acceptance is measured on greedy answers; add temperature 0",
            )


@dataclass(frozen=True)
class RegenerationConfig:
    """How the target answers the prompts of a file."""

    max_length: int = 2048
    """tokens a row, all turns; what would be longer ends at the last turn that fits"""
    max_answer_tokens: int = 512
    """tokens of one answer; one that has not come to an end by then is kept as it is, and ends its conversation"""
    max_turns: int | None = None
    """answer only the first so many turns of each conversation"""
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """each conversation draws one of these; 0 takes the most likely token, as measuring acceptance needs"""
    top_p: float = 1.0
    """sample among the most likely tokens that together hold this probability"""
    top_k: int = 0
    """sample among the k most likely tokens only; 0 means all"""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_sampling(self.temperatures, self.top_p, self.top_k, self.seed)
        _require(self, 1, "max_answer_tokens")
        _require(self, 8, "max_length")
        if self.max_turns is not None:
            _require(self, 1, "max_turns")

    def described(self, *prompts: Path, limit: int | None = None) -> dict[str, Any]:
        """What the answers to these files depend on, as the manifest of their shards tells it."""
        return dataclasses.asdict(self) | {"prompts": [describe_file(path) | {"limit": limit} for path in prompts]}

    def answer_params(self, key: int, turn: int, room: int, end: int) -> SamplingParams:
        """The same for a conversation and a turn in every run; the temperature is the same in all turns."""
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
    """When to stop: the first that is reached. Numbers count what is in the output, seconds are those of this run."""

    num_answers: int | None = None
    """answers in the output"""
    num_tokens: int | None = None
    """answer tokens in the output"""
    seconds: float | None = None
    """seconds of this run; what was begun by then is finished"""

    def __post_init__(self) -> None:
        for name in ("num_answers", "num_tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if self.num_answers is self.num_tokens is self.seconds is None:
            raise ConfigError(
                "nothing says when to stop", hint="give --num-answers, --num-tokens or --seconds; the first one counts"
            )

    def is_reached(self, counts: Mapping[str, Any]) -> bool:
        """Whether there is nothing to do any more; seconds always leave something to do."""
        pairs = ((self.num_answers, counts["num_rows"]), (self.num_tokens, counts["num_answer_tokens"]))
        return any(wanted is not None and found >= wanted for wanted, found in pairs)


def check_max_length(max_length: int, target: "HFTarget") -> None:
    if max_length > target.max_length:
        raise ConfigError(
            f"max_length {max_length} exceeds the target's {target.max_length}",
            hint=f"use at most {target.max_length}",
        )


def describe_file(path: Path) -> dict[str, Any]:
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def drawn_number(*parts: int | str) -> int:
    """A number below 2**62 that looks random and is the same whenever the parts are."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _require(config: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(config, name) < least:
            raise ConfigError(f"{name} must be at least {least}, got {getattr(config, name)}")


def _check_sampling(
    temperatures: tuple[float, ...], top_p: float, top_k: int, seed: int, name: str = "temperatures"
) -> None:
    if not temperatures or not all(0 <= temperature < math.inf for temperature in temperatures):
        raise ConfigError(f"{name} must be 0 or more, got {', '.join(map(str, temperatures)) or 'none'}")
    if not 0 < top_p <= 1 or top_k < 0 or seed < 0:
        raise ConfigError(
            f"top_p must be above 0 and at most 1, top_k and seed 0 or more, got {top_p}, {top_k} and {seed}"
        )
