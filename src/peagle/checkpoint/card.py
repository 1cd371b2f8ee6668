"""drafter_card.json: the target a drafter was trained for, how it was trained, and what it was measured at."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
BASELINE, SAMPLED_BASELINE = "baseline", "baseline_sampled"
"""Keys in `DrafterCard.acceptance` of the entries that the drift alarm compares with: greedy, and sampled."""
PAIR_HEAD = "pair_head"
"""Key of entries that were measured with a pair head: its rank."""
DECODED = "decoded"
"""`kind` of entries that were measured by decoding prompts, not by replaying training data."""


@dataclass(frozen=True)
class TargetIdentity:
    """The target a drafter was trained on: hashes that identify it, and where it was."""

    name: str
    weights: str
    """fingerprint of the weights, independent of the dtype they are loaded in"""
    tokenizer: str
    chat_template: str
    source: str | None = None
    """its catalog name, Hugging Face id or absolute path; None on older cards"""

    @classmethod
    def of(cls, target: "HFTarget") -> "TargetIdentity":
        tokenizer = target.tokenizer
        hashes = target.fingerprint(), tokenizer_hash(tokenizer), chat_template_hash(tokenizer)
        return cls(target.name, *hashes, target.source)


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


def trusted_acceptance(acceptance: Mapping[str, Any], is_sampled: bool = False) -> dict[str, Mapping[str, Any]]:
    """The entries of a card's `acceptance` to rely on: those measured by decoding, else all with per-position rates.

    Of these the baselines, if there are any, and of these the entries of greedy requests, or of sampled ones; an entry
    without a temperature is of both.
    """
    entries = {name: entry for name, entry in acceptance.items() if isinstance(entry, Mapping)}
    entries = {name: entry for name, entry in entries.items() if entry.get("per_position")}
    entries = {name: entry for name, entry in entries.items() if _is_decoded(name, entry)} or entries
    baselines = {name: entry for name, entry in entries.items() if name in (BASELINE, SAMPLED_BASELINE)}
    entries = baselines or entries
    return {name: entry for name, entry in entries.items() if bool(entry.get("temperature", is_sampled)) == is_sampled}


def _is_decoded(name: str, entry: Mapping[str, Any]) -> bool:
    # Older cards have no `kind`, but entries measured by decoding named their number of draft tokens.
    return entry.get("kind", DECODED if "num_draft_tokens" in entry else None) == DECODED and "replay" not in name


@dataclass(frozen=True)
class Baseline:
    """The acceptance length that drift is measured against."""

    length: float
    source: str
    """how it was measured"""
    per_position: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """share of steps that accept the drafts up to each position"""

    def of_chain(self, num_draft_tokens: int) -> "Baseline":
        """The baseline of shorter drafts.

        >>> Baseline(2.4, "card", (0.8, 0.6)).of_chain(1), Baseline(2.4, "card", (0.8, 0.6)).of_chain(31)
        (Baseline(length=1.8, source='card'), Baseline(length=2.4, source='card'))
        """
        if num_draft_tokens >= len(self.per_position):
            return self
        return replace(self, length=round(1 + sum(self.per_position[:num_draft_tokens]), 4))


def baseline_of(acceptance: Mapping[str, Any], num_draft_tokens: int, is_sampled: bool = False) -> Baseline | None:
    """The acceptance length to expect with `num_draft_tokens`, from a card; None if the card has no figure.

    is_sampled: of requests with a temperature. Figures measured by decoding prompts take precedence over replays of
        training data.
    Rates per position do not depend on how many more positions are drafted, so a shorter draft's baseline is known too.

    >>> baseline_of({"one": {"per_position": [0.6, 0.4, 0.2]}, "two": {"per_position": [0.8, 0.6, 0.4]}}, 2)
    Baseline(length=2.2, source='one, two')
    """
    entries = {
        name: entry
        for name, entry in trusted_acceptance(acceptance, is_sampled).items()
        if len(entry["per_position"]) >= num_draft_tokens
    }
    if not entries or num_draft_tokens < 1:
        return None
    columns = zip(*(entry["per_position"][:num_draft_tokens] for entry in entries.values()), strict=True)
    rates = tuple(sum(column) / len(column) for column in columns)
    return Baseline(round(1 + sum(rates), 4), sources_of(entries), rates)


def sources_of(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """How entries of `acceptance` were measured."""
    return ", ".join(
        f"decoding {entry.get('prompts', name)} at temperature {entry.get('temperature', 0):g}"
        if entry.get("kind") == DECODED
        else name
        for name, entry in entries.items()
    )


def pair_head_of(drafter: "Drafter") -> dict[str, Any]:
    """What an entry of `acceptance` says about the pair head it was measured with: its rank, or nothing."""
    return {} if drafter.pair_head is None else {PAIR_HEAD: drafter.pair_head.rank}


def without_pair_head(card: DrafterCard) -> DrafterCard:
    """The card without acceptance that was measured with a pair head."""
    kept = {name: entry for name, entry in card.acceptance.items() if PAIR_HEAD not in entry}
    return dataclasses.replace(card, acceptance=kept)


def card_of(drafter: "Drafter", target: "HFTarget", provenance: dict[str, Any] | None = None) -> DrafterCard:
    """The drafter's card, or a new one for a drafter without; `provenance` replaces the card's.

    It says where the target is now, unless this is another target than the card's.
    """
    config, identity = drafter.config, TargetIdentity.of(target)
    card = drafter.card or DrafterCard(
        identity, config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    if card.target.weights == identity.weights and identity.source is not None:
        card = dataclasses.replace(card, target=dataclasses.replace(card.target, source=identity.source))
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
