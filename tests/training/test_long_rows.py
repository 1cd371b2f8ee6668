"""Rows of 8,192 tokens: packed, trained in segments, and replayed as they are served."""

import numpy as np
import pytest

from harness.tiny_models import tiny_drafter, tiny_target
from harness.tiny_training import settings
from peagle.data.conversations import Conversation
from peagle.decoding.reference import decode
from peagle.objective.batches import Batches
from peagle.objective.p_eagle import ParallelObjective
from peagle.sampling_params import SamplingParams
from peagle.training.features import OnlineFeatures
from peagle.training.replay import replay_drafts

LENGTH = 8192
NUM_DRAFT_TOKENS = 3


@pytest.fixture(scope="module")
def target():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return tiny_target(num_layers=4, max_position_embeddings=LENGTH, **sizes)


def conversation(length, seed):
    chance = np.random.default_rng(seed)
    return Conversation(chance.integers(3, 260, length).astype(np.int32), np.arange(length) >= length // 2)


@pytest.mark.slow
def test_rows_of_8192_tokens_are_packed_and_trained_in_segments(target, tmp_path):
    rows = [conversation(5000, 0), conversation(3000, 1), conversation(192, 2)]
    drafter = tiny_drafter(target, num_layers=1, num_draft_tokens=NUM_DRAFT_TOKENS).requires_grad_(True)
    config = settings(tmp_path, max_length=LENGTH, batch_size=1, num_partitions=16)
    batch = Batches(rows, config).make(0)
    assert len(batch.parts) == 16 and int(batch.position_BT.max()) == 4999 and int(batch.document_BT.min()) == 0
    assert sorted(batch.documents[0]) == [0, 1, 2], "three documents in one row, without padding"
    assert max(int(part.labels.judge_N.max()) for part in batch.parts) == LENGTH - 2, "which judges the last token"
    loss, sums = ParallelObjective(drafter, config).accumulate(batch, OnlineFeatures(target)(batch), batch.num_labels)
    assert int(sums[2].sum()) == batch.num_labels > 8000 and loss.isfinite()
    gradients = [each.grad for each in drafter.parameters() if each.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in gradients)


@pytest.mark.slow
def test_replay_of_8192_tokens_counts_what_decoding_counts_and_where(target):
    drafter = tiny_drafter(target, num_layers=1, num_draft_tokens=NUM_DRAFT_TOKENS)
    prompt_ids = conversation(8150, 3).token_ids.tolist()
    params = SamplingParams(max_tokens=LENGTH - len(prompt_ids), temperature=0.0, ignore_eos=True)
    steps = list(decode(target, prompt_ids, params, drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS))
    token_ids = prompt_ids + [token for step in steps for token in step.token_ids]
    assert len(token_ids) == LENGTH
    row = Conversation(np.array(token_ids, dtype=np.int32), np.arange(LENGTH) >= len(prompt_ids))
    drafts = replay_drafts(target, drafter, [row], NUM_DRAFT_TOKENS)
    assert [draft.num_accepted for draft in drafts] == [step.num_accepted_emitted for step in steps[1:]]
    assert [draft.position for draft in drafts] == np.cumsum([len(step.token_ids) for step in steps[:-1]]).tolist()
    assert {draft.prompt_length for draft in drafts} == {len(prompt_ids)}
