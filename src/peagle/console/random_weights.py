"""The options of `peagle bench` for targets and drafters with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from peagle.bench.dummy import USUAL_DEPTH, assumed_shares, dummy_drafter, published_drafter, published_shares
from peagle.console.arguments import NumbersOrAuto, comma_list
from peagle.data.config import require_at_least
from peagle.errors import ConfigError
from peagle.targets.shapes import read_shape

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

PUBLISHED = "published"


def _share_or_published(word: str) -> float | str:
    return word if word == PUBLISHED else float(word)


Shares = Annotated[
    tuple[float | str, ...], comma_list(_share_or_published, "{FLOAT[,FLOAT...]|published}", may_repeat=True)
]


@dataclass(frozen=True)
class RandomWeights:
    """Random weights, for measurements without a download."""

    dummy: str | None = None
    """instead of prompts and a target: plain decoding with random weights of a shape (llama-8b) or a config.json"""
    assume_acceptance: Shares | None = None
    """with --dummy: also draft with a random drafter, with these acceptance rates by position; one number: the
    probability of each draft or, above 1, the acceptance length; published: that of the catalog's drafter of this
    shape"""
    drafter_layers: int | None = None
    """layers of the random drafter; default: 4, as published ones have"""
    draft_vocab: int | None = None
    """tokens that the random drafter chooses from; default: the target's vocabulary"""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "drafter_layers")
        require_at_least(self, 2, "draft_vocab")

    def check(self, num_draft_tokens: NumbersOrAuto, others: Mapping[str, Any]) -> None:
        """Refuse options that contradict each other; `others` are options for real weights that were given."""
        given = {
            "--assume-acceptance": self.assume_acceptance,
            "--drafter-layers": self.drafter_layers,
            "--draft-vocab": self.draft_vocab,
        }
        if self.dummy is None:
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(f"{name} needs --dummy", hint="drop it: with prompts, the drafter is real")
            return
        vocab_size: int = read_shape(self.dummy).get("vocab_size", self.draft_vocab or 0)
        if self.assume_acceptance is None:
            others = {**others, "--num-draft-tokens": any(num_draft_tokens)}
            for name in ("--drafter-layers", "--draft-vocab"):
                if given[name] is not None:
                    raise ConfigError(f"{name} needs --assume-acceptance", hint="without it nothing is drafted")
        else:
            self.shares(max(self.depths(num_draft_tokens)))
        if self.draft_vocab is not None and self.draft_vocab > vocab_size:
            raise ConfigError(f"--draft-vocab {self.draft_vocab} exceeds the vocabulary of {vocab_size} tokens")
        for name, value in others.items():
            if value:
                raise ConfigError(
                    f"--dummy runs plain decoding on random weights and prompts, which contradicts {name}",
                    hint="drop one of the two",
                )

    def depths(self, num_draft_tokens: NumbersOrAuto) -> tuple[int, ...]:
        return tuple(depth for depth in num_draft_tokens if depth is not None) or (USUAL_DEPTH,)

    def shares(self, num_draft_tokens: int) -> tuple[float, ...]:
        """The share of steps in which the draft at each position is accepted; empty if nothing is drafted."""
        if self.assume_acceptance is None:
            return ()
        if self.assume_acceptance == (PUBLISHED,):
            return published_shares(str(self.dummy), num_draft_tokens)
        if PUBLISHED in self.assume_acceptance:
            raise ConfigError("--assume-acceptance takes shares or 'published', not both")
        return assumed_shares([float(share) for share in self.assume_acceptance], num_draft_tokens)

    def drafters(self, target: "HFTarget", num_draft_tokens: int) -> "dict[str, Drafter]":
        """The random drafter by its method; empty if nothing is drafted."""
        if self.assume_acceptance is None:
            return {}
        size: tuple[Any, ...] = (self.drafter_layers, self.draft_vocab, published_drafter(str(self.dummy)))
        return {"p-eagle": dummy_drafter(target, num_draft_tokens, *size)}
