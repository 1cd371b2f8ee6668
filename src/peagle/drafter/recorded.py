"""The evidence on a drafter's card, as plain data; `evidence.py` makes it, the gate reads it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GoldenDraft:
    """What was drafted at one place of a text."""

    newest: int
    """index of the newest token of the text that the drafter had read"""
    token_ids: tuple[tuple[int, ...], ...]
    """for each depth the likeliest tokens, the likeliest first, as ids of the target"""
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class GoldenText:
    token_ids: tuple[int, ...]
    drafts: tuple[GoldenDraft, ...]


@dataclass(frozen=True)
class GateAcceptance:
    """Accepted drafts in the greedy answers to the gate's prompts."""

    prompts: str
    """hash of the prompts' token ids"""
    max_tokens: int
    num_drafts: int
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True)
class Evidence:
    """Facts by which a copy of a drafter can be told from the drafter itself."""

    tensors: dict[str, str]
    """by name in the drafter's state, a hash of shape and values"""
    config: dict[str, Any]
    """the settings that change what it computes"""
    dtype: str
    """precision that target and drafter had when the rest was recorded"""
    golden: tuple[GoldenText, ...] = ()
    acceptance: GateAcceptance | None = None
