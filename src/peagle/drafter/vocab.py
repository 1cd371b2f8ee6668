"""Choosing the tokens a drafter needs: its placeholder, and (when smaller than the target's) its vocabulary."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def choose_mask_token_id(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> int:
    """A token id that no text uses, for the placeholders.

    First the embedding row after the tokenizer's last token, or the last one between its tokens (ids may have holes,
    so the number of tokens says nothing); then the tokenizer's mask token; then its last added token that neither the
    chat template nor a special role mentions.
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
            f"no unused token among the {vocab_size} of this vocabulary was found for the placeholders",
            hint="set mask_token_id to an id that no text of yours contains",
        )
    return spare[-1]


def choose_draft_vocab(counts_V: Tensor, size: int) -> Tensor:
    """Offset table [size] of the tokens with the highest counts.

    Of equal counts the lower id is taken. Tokens that never occur fill up what is left.
    """
    if not 2 <= size <= len(counts_V):
        raise ConfigError(f"draft_vocab_size must be between 2 and the target's {len(counts_V)}, got {size}")
    chosen_U = counts_V.argsort(descending=True, stable=True)[:size].sort().values
    return chosen_U - torch.arange(size, device=chosen_U.device)


def vocab_coverage(counts_V: Tensor, offsets_U: Tensor) -> float:
    """The share of all counts that tokens of the draft vocabulary have: no more than that can be drafted right."""
    return float(counts_V[draft_to_target(offsets_U)].sum() / counts_V.sum().clamp_min(1))


def draft_to_target(offsets_U: Tensor) -> Tensor:
    """Target ids of the draft vocabulary, from the checkpoint's offset table: target = draft + d2t[draft]."""
    return torch.arange(len(offsets_U), device=offsets_U.device) + offsets_U


def read_table(table_U: Tensor, present_V: Tensor | None, vocab_size: int) -> tuple[Tensor, bool]:
    """The offset table that a published `d2t` means, and whether it held target ids instead.

    Offsets are the custom, so a table that can be read as offsets is. Only one that cannot be, and that lists distinct
    ids in ascending order, or that a `t2d` (`present_V`, whether each target token has a draft id) proves to be a list
    of ids, is taken for one. A `d2t` and a `t2d` that name different tokens either way are refused.

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
                f"d2t and t2d do not name the same tokens: t2d has {len(expected)}, d2t has {len(table_U)}",
                hint="the draft vocabulary was never stored, or the two are of different drafters",
            )
    elif not as_offsets:
        as_ids = as_ids and bool((table_U.diff() > 0).all())
    if as_ids and not as_offsets:
        return table_U - draft_ids, True
    check_offsets(table_U, vocab_size)
    return table_U, False


def _are_tokens(target_ids: Tensor, vocab_size: int) -> bool:
    """Whether all are tokens of the target, none of them twice."""
    in_range = int(target_ids.min()) >= 0 and int(target_ids.max()) < vocab_size
    return in_range and len(target_ids.unique()) == len(target_ids)


def check_offsets(offsets_U: Tensor, vocab_size: int) -> None:
    """Refuse a table whose target ids are not distinct or not in range, as when it holds ids instead of offsets."""
    if not _are_tokens(draft_to_target(offsets_U), vocab_size):
        raise ConfigError(
            f"d2t does not map each draft id to a target id of its own below {vocab_size}",
            hint="d2t holds offsets (target = draft + d2t[draft]), not target ids",
        )
