"""drafter_card.json: the target a drafter was trained for, how it was trained, and what it was measured at."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.config import from_mapping
from peagle.errors import CheckpointError, ConfigError
from peagle.tokenizer import chat_template_hash, tokenizer_hash

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

CARD_NAME = "drafter_card.json"
AUX_CONVENTION = "the residual stream entering each layer, before its norm"
BASELINE = "baseline"
"""Key in `DrafterCard.acceptance` of the entry that the drift alarm compares with."""
PAIR_HEAD = "pair_head"
"""Key of entries that were measured with a pair head: its rank."""
DECODED = "decoded"
"""`kind` of entries that were measured by decoding prompts, not by replaying training data."""


@dataclass(frozen=True)
class TargetIdentity:
    """Hashes that identify the target a drafter was trained on."""

    name: str
    weights: str
    """fingerprint of the weights, independent of the dtype they are loaded in"""
    tokenizer: str
    chat_template: str

    @classmethod
    def of(cls, target: "HFTarget") -> "TargetIdentity":
        tokenizer = target.tokenizer
        return cls(target.name, target.fingerprint(), tokenizer_hash(tokenizer), chat_template_hash(tokenizer))


@dataclass(frozen=True)
class GoldenDraft:
    """A recorded draft at one position of a text."""

    newest: int
    """index of the newest token the drafter had read"""
    token_ids: tuple[tuple[int, ...], ...]
    """for each depth the most likely tokens, best first, as target ids"""
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class GoldenText:
    token_ids: tuple[int, ...]
    drafts: tuple[GoldenDraft, ...]


@dataclass(frozen=True)
class GateAcceptance:
    """Accepted draft tokens in greedy answers to the gate's prompts."""

    prompts: str
    """hash of the prompts' token ids"""
    max_tokens: int
    num_drafts: int
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True)
class Evidence:
    """Facts that tell an intact copy of a drafter from a damaged one. `compare/evidence.py` records them."""

    tensors: dict[str, str]
    """by name in the drafter's state, a hash of shape and values"""
    config: dict[str, Any]
    """the settings that change what it computes"""
    dtype: str
    """dtype of target and drafter while the rest was recorded"""
    golden: tuple[GoldenText, ...] = ()
    acceptance: GateAcceptance | None = None


@dataclass(frozen=True)
class DrafterCard:
    """Facts about a drafter that its weights do not show."""

    target: TargetIdentity
    method: str
    num_draft_tokens: int | None
    """most draft tokens it was trained for; None if unknown"""
    max_length: int
    """longest text it was trained on"""
    aux_layer_ids: tuple[int, ...]
    aux_convention: str = AUX_CONVENTION
    data: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    """by prompt set: acceptance length, per-position rates and the settings they were measured at"""
    training: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence | None = None
    """what the gate compares a copy with; None if nothing was recorded"""

    def to_json(self) -> str:
        text = json.dumps(dataclasses.asdict(self), indent=2)
        # One line per list of numbers: a golden draft has hundreds of them.
        return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text) + "\n"


def trusted_acceptance(acceptance: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The entries of a card's `acceptance` to rely on: those measured by decoding, else all with per-position rates."""
    entries = {name: entry for name, entry in acceptance.items() if isinstance(entry, Mapping)}
    entries = {name: entry for name, entry in entries.items() if entry.get("per_position")}
    return {name: entry for name, entry in entries.items() if _is_decoded(name, entry)} or entries


def _is_decoded(name: str, entry: Mapping[str, Any]) -> bool:
    # Older cards have no `kind`, but entries measured by decoding named their number of draft tokens.
    return entry.get("kind", DECODED if "num_draft_tokens" in entry else None) == DECODED and "replay" not in name


def pair_head_of(drafter: "Drafter") -> dict[str, Any]:
    """What an entry of `acceptance` says about the pair head it was measured with: its rank, or nothing."""
    return {} if drafter.pair_head is None else {PAIR_HEAD: drafter.pair_head.rank}


def without_pair_head(card: DrafterCard) -> DrafterCard:
    """The card without acceptance that was measured with a pair head."""
    kept = {name: entry for name, entry in card.acceptance.items() if PAIR_HEAD not in entry}
    return dataclasses.replace(card, acceptance=kept)


def card_of(drafter: "Drafter", target: "HFTarget", provenance: dict[str, Any] | None = None) -> DrafterCard:
    """The drafter's card, or a new one for a drafter without; `provenance` replaces the card's."""
    config = drafter.config
    card = drafter.card or DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    return card if provenance is None else dataclasses.replace(card, provenance=provenance)


def read_card(directory: Path) -> DrafterCard | None:
    """The card of a drafter directory; None if there is none."""
    path = directory / CARD_NAME
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ConfigError(f"it must hold a JSON object, got {type(values).__name__}")
        return from_mapping(DrafterCard, values, CARD_NAME)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, ConfigError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.message if isinstance(error, ConfigError) else error}",
            hint="copy it again, or delete it to load the drafter without these checks",
        ) from error


def differences(card: DrafterCard, target: "HFTarget") -> list[str]:
    """How the target differs from the one on the card, one phrase per difference."""
    ours = TargetIdentity.of(target)
    rounding = " (or float16 rounded them; try bfloat16)" if str(target.dtype) == "torch.float16" else ""
    phrases = {
        "weights": f"its weights are not the ones the drafter was trained on{rounding}",
        "tokenizer": "its tokenizer is another one",
        "chat_template": "its chat template is another one",
    }
    return [phrase for key, phrase in phrases.items() if getattr(card.target, key) != getattr(ours, key)]
