"""drafter_card.json: the round trip, and cards that cannot be read."""

import json
from pathlib import Path

import pytest
import torch

from harness.drafter_passes import card_for
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.card import CARD_NAME, DrafterCard, TargetIdentity, differences, read_card
from peagle.errors import CheckpointError


@pytest.fixture
def card() -> DrafterCard:
    target = tiny_target()
    return card_for(target, tiny_drafter(target))


def test_a_card_comes_back_as_it_was_written(tmp_path: Path, card: DrafterCard) -> None:
    (tmp_path / CARD_NAME).write_text(card.to_json())
    assert read_card(tmp_path) == card
    assert card.method == "p-eagle" and card.aux_layer_ids == (2, 4, 5)


def test_a_directory_may_lack_a_card(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metod": "p-eagle"}, "unknown key 'metod'"),
        ({"num_draft_tokens": "eight"}, "num_draft_tokens"),
        ({"target": "tiny"}, "target"),
        ({"aux_layer_ids": 3}, "aux_layer_ids"),
    ],
)
def test_a_card_with_a_wrong_entry_is_refused(tmp_path: Path, card: DrafterCard, change: dict, message: str) -> None:
    (tmp_path / CARD_NAME).write_text(json.dumps(json.loads(card.to_json()) | change))
    with pytest.raises(CheckpointError) as caught:
        read_card(tmp_path)
    assert str(tmp_path / CARD_NAME) in caught.value.message and message in caught.value.message
    assert caught.value.hint == "copy it again, or delete it to load the drafter without these checks"
    assert str(caught.value).count("hint:") == 1


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"{}"])
def test_a_card_that_is_no_card_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CARD_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_card(tmp_path)


def test_a_target_is_the_same_in_float32_and_bfloat16_and_another_with_other_weights(card: DrafterCard) -> None:
    target = tiny_target()
    assert differences(card, target) == []
    target.model.to(torch.bfloat16)
    assert differences(card, target) == []
    assert TargetIdentity.of(target) == card.target
    with torch.no_grad():
        target.model.lm_head.weight *= 1.5
    assert differences(card, target) == ["its weights are not the ones the drafter was trained on"]


def test_in_float16_the_rounding_is_named_as_a_possible_cause(card: DrafterCard) -> None:
    target = tiny_target(seed=1)
    target.model.to(torch.float16)
    assert "float16 rounded them" in differences(card, target)[0]
