"""drafter_card.json: which target a drafter was made for, what it learned, and what it was measured at."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.config import from_mapping
from peagle.drafter.recorded import Evidence
from peagle.errors import CheckpointError, ConfigError
from peagle.tokenizer import chat_template_hash, tokenizer_hash

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

CARD_NAME = "drafter_card.json"
AUX_CONVENTION = "the residual stream entering each layer, before its norm"


@dataclass(frozen=True)
class TargetIdentity:
    """What makes a target the one a drafter was trained on."""

    name: str
    weights: str
    """fingerprint of the weights, the same in every precision they are loaded in"""
    tokenizer: str
    chat_template: str

    @classmethod
    def of(cls, target: "HFTarget") -> "TargetIdentity":
        tokenizer = target.tokenizer
        return cls(target.name, target.fingerprint(), tokenizer_hash(tokenizer), chat_template_hash(tokenizer))


@dataclass(frozen=True)
class DrafterCard:
    """Facts about a drafter that its weights cannot tell."""

    target: TargetIdentity
    method: str
    num_draft_tokens: int | None
    """most draft tokens it was trained for; None when its makers did not say"""
    max_length: int
    """longest text it was trained on"""
    aux_layer_ids: tuple[int, ...]
    aux_convention: str = AUX_CONVENTION
    data: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    """by prompt set: acceptance length and per-position acceptance, with the settings they were measured at"""
    training: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence | None = None
    """what tells a broken copy from a sound one; None on cards that were written without it"""

    def to_json(self) -> str:
        text = json.dumps(dataclasses.asdict(self), indent=2)
        # Lists of numbers stand on one line each: a golden draft has hundreds of them.
        return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text) + "\n"


def read_card(directory: Path) -> DrafterCard | None:
    """The card of a drafter directory; None where its makers left none."""
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
            hint="remove the card to load the drafter without its checks",
        ) from error


def differences(card: DrafterCard, target: "HFTarget") -> list[str]:
    """What of the target differs from the one the card names, as sentences; empty when it is the same."""
    ours = TargetIdentity.of(target)
    rounding = " (or float16 has rounded them; try bfloat16)" if str(target.dtype) == "torch.float16" else ""
    what = {
        "weights": f"its weights are not the ones the drafter was trained on{rounding}",
        "tokenizer": "its tokenizer is another one",
        "chat_template": "its chat template is another one",
    }
    return [sentence for key, sentence in what.items() if getattr(card.target, key) != getattr(ours, key)]
