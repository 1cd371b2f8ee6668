"""Drafters of shapes that only other makers train: the engine drafts with them what the reference decoder does."""

import dataclasses
from typing import Any

import pytest
import torch

from harness.drafter_passes import draft_logits
from harness.model_families import family_target, trained_drafter
from harness.tiny_models import tiny_target
from peagle.decoding.acceptance import Acceptance
from peagle.decoding.reference import decode
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.worker.linear_layers import join_models

NUM_DRAFT_TOKENS = 3
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 117, 115, 200, 17], [1, 9, 33, 260], [1, 41, 77, 8, 150, 64]]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "windows": {"num_layers": 2, "sliding_window": 4, "sliding_layers": (0, 1)},
    "some windows, own embeddings": {
        "num_layers": 2,
        "sliding_window": 4,
        "sliding_layers": (1,),
        "embeddings": "own",
        "qk_norm": True,
    },
}


def texts_of(target: HFTarget) -> list[list[int]]:
    rows = [
        target.model.generate(torch.tensor([prompt]), max_new_tokens=28, do_sample=False, eos_token_id=None)
        for prompt in PROMPTS
    ]
    return [row[0].tolist() for row in rows]


@pytest.mark.parametrize(
    "shape",
    ["some windows, own embeddings", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "windows"))],
)
def test_the_engine_drafts_like_the_reference_decoder(shape: str) -> None:
    target = tiny_target(num_layers=4)
    drafter = trained_drafter(
        target, texts_of(target), num_draft_tokens=NUM_DRAFT_TOKENS, num_steps=40, **SHAPES[shape]
    )
    expected = []
    for prompt in PROMPTS:
        steps = list(decode(target, prompt, GREEDY, drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS))
        accepted = [step.kinds.count("accepted") for step in steps if step.draft_token_ids]
        counts = [sum(count > position for count in accepted) for position in range(NUM_DRAFT_TOKENS)]
        expected.append(([token for step in steps for token in step.token_ids], len(accepted), counts))
    with LLM(target, drafter, NUM_DRAFT_TOKENS, max_batch=3, max_length=64, verify_tokens=0) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    found = []
    for output in outputs:
        acceptance: Acceptance = output.metrics.acceptance
        counts = list(acceptance.accepted_per_position)
        found.append((list(output.outputs[0].token_ids), acceptance.num_drafts, counts))
    assert found == expected
    assert sum(counts[0] for _, _, counts in found) > 0, "a drafter that is never right would prove nothing"


def test_a_window_changes_what_is_drafted() -> None:
    target = tiny_target(num_layers=4)
    windowed = trained_drafter(target, texts_of(target), num_steps=1, **SHAPES["windows"])
    whole_config = dataclasses.replace(windowed.config, sliding_window=0, sliding_layers=())
    whole = Drafter(whole_config, target.embedding_VD, target.head_VD)
    whole.load_state_dict(windowed.state_dict())
    assert not torch.allclose(draft_logits(target, windowed), draft_logits(target, whole))


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"sliding_window": 4}, "do not belong together"),
        ({"sliding_layers": (0,)}, "do not belong together"),
        ({"sliding_window": -4, "sliding_layers": (0,)}, "do not belong together"),
        ({"sliding_window": 4, "sliding_layers": (1,)}, "ascending and below 1, got \\[1\\]"),
    ],
)
def test_windows_that_mean_nothing_are_refused(switches: dict, message: str) -> None:
    target = tiny_target(num_layers=4)
    config = trained_drafter(target, [[1, 2, 3, 4, 5, 6, 7, 8]], num_steps=0).config
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, **switches)


def test_on_a_gpu_the_rows_of_a_smaller_draft_vocabulary_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_target("llama")
    config = config_for_target(target, num_layers=1, mask_token_id=3, num_draft_tokens=3, draft_vocab_size=40)
    drafter = create_drafter(target, config, "random", seed=0, offsets_U=2 * torch.arange(40))
    x_ND = torch.randn(5, target.hidden_size)
    expected = drafter.logits(x_ND)
    undo = join_models(target, drafter)
    monkeypatch.setattr(Drafter, "head_VD", property(lambda _: pytest.fail("gathered again")))
    assert torch.equal(drafter.logits(x_ND), expected)
    monkeypatch.undo()
    undo()
    assert drafter._served_head is None
