"""Evidence on a card: what it does not depend on, what it does, and how it is written."""

import dataclasses
from pathlib import Path

import pytest
import torch

from harness.drafter_passes import card_for
from harness.tiny_models import tiny_drafter, tiny_target, tiny_tokenizer
from peagle.checkpoint.card import CARD_NAME, Evidence, read_card
from peagle.compare.evidence import draft_logprobs, fingerprint, gate_prompts, meaning_of, own_tensors, record
from peagle.targets.hf import HFTarget


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def evidence(target: HFTarget) -> Evidence:
    return record(target, tiny_drafter(target))


def test_a_fingerprint_is_the_same_in_float32_and_bfloat16_and_another_for_other_values_or_shapes() -> None:
    tensor = torch.randn(4, 6).bfloat16()
    assert fingerprint(tensor) == fingerprint(tensor.float()) == fingerprint(tensor.t().contiguous().t())
    others = (tensor.view(6, 4), tensor * 1.5, tensor.view(torch.int16))
    assert len({fingerprint(tensor), *map(fingerprint, others)}) == 4


def test_tables_that_are_the_targets_own_are_left_out_and_others_are_not(target: HFTarget) -> None:
    own = tiny_drafter(target, embeddings="own", head="own")
    own.embed_tokens.weight.data.copy_(target.embedding_VD)
    own.lm_head.weight.data.copy_(target.head_VD)
    own.embed_tokens.weight.data[own.config.mask_token_id] += 1  # the drafter's own row does not count
    assert own_tensors(target, own).keys() == own_tensors(target, tiny_drafter(target)).keys()
    own.lm_head.weight.data[3] += 1
    assert "lm_head.weight" in own_tensors(target, own)


def test_evidence_comes_back_from_a_card_with_a_line_for_each_list_of_numbers(
    tmp_path: Path, target: HFTarget, evidence: Evidence
) -> None:
    card = dataclasses.replace(card_for(target, tiny_drafter(target)), evidence=evidence)
    text = card.to_json()
    (tmp_path / CARD_NAME).write_text(text)
    assert read_card(tmp_path) == card
    ids = evidence.golden[0].token_ids
    assert f'"token_ids": [ {", ".join(map(str, ids))} ]' in text


def test_golden_drafts_are_the_sessions_own_whatever_was_drafted_before(target: HFTarget, evidence: Evidence) -> None:
    drafter = tiny_drafter(target)
    golden = evidence.golden[0]
    for draft in golden.drafts:
        (alone_KV,) = draft_logprobs(target, drafter, golden.token_ids, [draft.newest], len(draft.token_ids))
        for depth, (token_ids, logprobs) in enumerate(zip(draft.token_ids, draft.logprobs, strict=True)):
            assert alone_KV[depth].argmax() == token_ids[0], f"depth {depth} behind token {draft.newest}"
            torch.testing.assert_close(alone_KV[depth, list(token_ids)], torch.tensor(logprobs), atol=1e-4, rtol=0)
    assert len(golden.drafts) == 2 and golden.drafts[0].newest < golden.drafts[1].newest == len(golden.token_ids) - 1


def test_meaning_leaves_out_how_tables_are_stored(target: HFTarget) -> None:
    config = tiny_drafter(target).config
    assert meaning_of(config) == meaning_of(dataclasses.replace(config, embeddings="own", head="own"))
    assert meaning_of(config) != meaning_of(dataclasses.replace(config, norm_before_residual=True))


def test_prompts_need_no_chat_template_and_leave_room_for_answers() -> None:
    assert len(gate_prompts(tiny_tokenizer(), 512)) == len(gate_prompts(tiny_tokenizer(chat_template=None), 512)) == 4
    assert gate_prompts(tiny_tokenizer(), 48) == []
