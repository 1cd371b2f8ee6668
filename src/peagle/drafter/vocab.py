"""The mask token of a drafter, and its draft vocabulary if that is smaller than the target's."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def choose_mask_token_id(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> int:
    """A token id that no text uses, for the placeholders. In order of preference:

    1. the embedding row after the tokenizer's last id, or the last unused id below it (ids may have holes)
    2. the tokenizer's mask token
    3. its last added special token that has no role and is not in the chat template
    """
    token_ids = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}
    beyond = max(token_ids) + 1
    if beyond < vocab_size:
        return beyond
    holes = set(range(vocab_size)) - token_ids
    if holes:
        return max(holes)
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    template = str(tokenizer.chat_template or "")
    used = set(tokenizer.all_special_tokens)
    spare = [
        token_id
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and str(token) not in used and str(token) not in template
    ]
    if not spare:
        raise ConfigError(
            f"none of the {vocab_size} token ids is unused, so the placeholders have no token",
            hint="set mask_token_id to an id that your texts do not contain",
        )
    return spare[-1]


def choose_draft_vocab(counts_V: Tensor, size: int) -> Tensor:
    """Offset table [size] of the tokens with the highest counts; the lower id wins among equal counts."""
    if not 2 <= size <= len(counts_V):
        raise ConfigError(f"draft_vocab_size must be between 2 and the target's {len(counts_V)}, got {size}")
    chosen_U = counts_V.argsort(descending=True, stable=True)[:size].sort().values
    return chosen_U - torch.arange(size, device=chosen_U.device)


def vocab_coverage(counts_V: Tensor, offsets_U: Tensor) -> float:
    """The share of all counts in the draft vocabulary: an upper bound on correct drafts."""
    return float(counts_V[draft_to_target(offsets_U)].sum() / counts_V.sum().clamp_min(1))


def draft_to_target(offsets_U: Tensor) -> Tensor:
    """Target ids of the draft vocabulary, from the checkpoint's offset table: target = draft + d2t[draft]."""
    return torch.arange(len(offsets_U), device=offsets_U.device) + offsets_U


def read_table(table_U: Tensor, present_V: Tensor | None, vocab_size: int) -> tuple[Tensor, bool]:
    """The offset table of a published `d2t`, and whether it held target ids instead of offsets.

    A table that is valid as offsets is read as offsets. Otherwise it is read as ids if they are distinct and ascending,
    or if `t2d` (`present_V`: which target tokens have a draft id) confirms it. A `d2t` and a `t2d` that disagree either
    way are refused.

    >>> read_table(torch.tensor([3, 3, 6]), None, vocab_size=9)[0].tolist()  # tokens 3, 4 and 8
    [3, 3, 6]
    >>> read_table(torch.tensor([3, 4, 8]), None, vocab_size=9)  # would be 3, 5 and 10: these are the ids
    (tensor([3, 3, 6]), True)
    """
    table_U = table_U.long()
    draft_ids = torch.arange(len(table_U), device=table_U.device)
    as_offsets, as_ids = _are_tokens(draft_ids + table_U, vocab_size), _are_tokens(table_U, vocab_size)
    if present_V is not None and present_V.dtype == torch.bool and present_V.shape == (vocab_size,):
        expected = present_V.nonzero().flatten()
        as_offsets = as_offsets and torch.equal((draft_ids + table_U).sort().values, expected)
        as_ids = as_ids and torch.equal(table_U.sort().values, expected)
        if not as_offsets and not as_ids:
            raise ConfigError(
                f"d2t and t2d name different tokens: t2d has {len(expected)}, d2t has {len(table_U)}",
                hint="the draft vocabulary was not saved, or the tables come from different drafters",
            )
    elif not as_offsets:
        as_ids = as_ids and bool((table_U.diff() > 0).all())
    if as_ids and not as_offsets:
        return table_U - draft_ids, True
    check_offsets(table_U, vocab_size)
    return table_U, False


def _are_tokens(target_ids: Tensor, vocab_size: int) -> bool:
    """Whether all are distinct ids of the target."""
    in_range = int(target_ids.min()) >= 0 and int(target_ids.max()) < vocab_size
    return in_range and len(target_ids.unique()) == len(target_ids)


def check_offsets(offsets_U: Tensor, vocab_size: int) -> None:
    """Refuse a table whose target ids are not distinct or out of range, such as ids instead of offsets."""
    if not _are_tokens(draft_to_target(offsets_U), vocab_size):
        raise ConfigError(
            f"d2t does not map the draft ids to distinct target ids below {vocab_size}",
            hint="d2t holds offsets (target = draft + d2t[draft]), not target ids",
        )
