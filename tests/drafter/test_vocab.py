"""The placeholder's token, and draft vocabularies."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from harness.tiny_models import tiny_tokenizer
from peagle.drafter.vocab import (
    check_offsets,
    choose_draft_vocab,
    choose_mask_token_id,
    draft_to_target,
    vocab_coverage,
)
from peagle.errors import ConfigError


def test_the_mask_token_is_the_first_embedding_row_beyond_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    assert choose_mask_token_id(tokenizer, len(tokenizer) + 20) == len(tokenizer)


def tokenizer_with_holes(*token_ids: int) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with one more token at each of these ids, and nothing at those between."""
    backend = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    backend["model"]["vocab"] |= {f"far{token_id}": token_id for token_id in token_ids}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))


def test_the_mask_token_is_no_text_where_the_tokenizers_ids_have_holes() -> None:
    tokenizer = tokenizer_with_holes(269)
    assert len(tokenizer) == 269 and tokenizer.convert_ids_to_tokens(269) == "far269"
    assert choose_mask_token_id(tokenizer, 288) == 270, "beyond the last id, not beyond their number"


def test_without_a_row_beyond_the_last_id_it_is_the_last_one_that_no_token_has() -> None:
    assert choose_mask_token_id(tokenizer_with_holes(287, 285), 288) == 286


def test_without_a_spare_row_it_is_the_tokenizers_mask_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert choose_mask_token_id(tokenizer, len(tokenizer)) == tokenizer.convert_tokens_to_ids("<mask>")


def test_then_it_is_the_last_special_token_that_has_no_role_and_is_not_in_the_template() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ '<used>' }}")
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<reserved_0>", "<reserved_1>", "<used>")])
    tokenizer.add_tokens(["plain"])
    assert choose_mask_token_id(tokenizer, len(tokenizer)) == tokenizer.convert_tokens_to_ids("<reserved_1>")


def test_a_vocabulary_without_an_unused_token_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match="none of the 268 token ids is unused") as caught:
        choose_mask_token_id(tokenizer, len(tokenizer))
    assert "mask_token_id" in str(caught.value.hint)


def test_offsets_are_added_to_draft_ids() -> None:
    assert draft_to_target(torch.tensor([0, 2, 5])).tolist() == [0, 3, 7]
    assert draft_to_target(torch.zeros(4, dtype=torch.long)).tolist() == [0, 1, 2, 3]


def test_the_draft_vocabulary_holds_the_most_frequent_tokens() -> None:
    counts = torch.tensor([3, 0, 40, 7, 0, 7, 43])
    offsets = choose_draft_vocab(counts, 3)
    assert draft_to_target(offsets).tolist() == [2, 3, 6], "of equal counts the lower id, in the target's order"
    assert vocab_coverage(counts, offsets) == pytest.approx(0.9)
    offsets = choose_draft_vocab(counts, 6)
    assert draft_to_target(offsets).tolist() == [0, 1, 2, 3, 5, 6] and vocab_coverage(counts, offsets) == 1.0
    for size in (1, 8):
        with pytest.raises(ConfigError, match=f"between 2 and the target's 7, got {size}"):
            choose_draft_vocab(counts, size)


@pytest.mark.parametrize("offsets", [[0, 0, 8], [0, -1, 0], [-1, 0, 0], [1, 0, 0]], ids=str)
def test_offsets_that_leave_the_vocabulary_or_meet_are_refused(offsets: list[int]) -> None:
    check_offsets(torch.tensor([0, 2, 5]), vocab_size=10)
    with pytest.raises(ConfigError, match="distinct target ids below 10") as caught:
        check_offsets(torch.tensor(offsets), vocab_size=10)
    assert "offsets" in str(caught.value.hint)
