"""Models whose attention is more than what they tell ours: refused, or run as they are, and never answered wrongly."""

import logging
from typing import Any

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from harness.model_families import BASE
from harness.tiny_models import tiny_tokenizer
from peagle.errors import TargetError
from peagle.targets.hf import HFTarget
from peagle.targets.packed import PackedTarget
from peagle.targets.paged import PagedTarget

SHAPE: dict[str, Any] = {name: value for name, value in BASE.items() if name != "head_dim"}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def target_of(model: Any) -> HFTarget:
    return HFTarget(model, tiny_tokenizer(), name="tiny")


def phimoe(window: int) -> HFTarget:
    return target_of(PhimoeForCausalLM(PhimoeConfig(**SHAPE, **EXPERTS, sliding_window=window)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: PhimoeForCausalLM(PhimoeConfig(**SHAPE, **EXPERTS, sliding_window=7)),
            "attends to 7 tokens by its mask",
        ),
        (lambda: DogeForCausalLM(DogeConfig(**SHAPE)), "layer 0 of DogeForCausalLM builds its own masks"),
        (lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**BASE)), "attends more than once in layer 0"),
        (lambda: StableLmForCausalLM(StableLmConfig(**SHAPE)), "does not pass keyword arguments to its attention"),
    ],
    ids=["phimoe", "doge", "diffllama", "stablelm"],
)
def test_what_our_attention_would_do_otherwise_is_refused(model: Any, words: str) -> None:
    target = target_of(model())
    earlier = target.model.config._attn_implementation
    with pytest.raises(TargetError) as caught:
        PagedTarget(target)
    assert words in caught.value.message
    assert target.model.config._attn_implementation == earlier and not target.is_lent


@torch.no_grad()
def test_in_training_documents_with_masks_of_their_own_have_rows_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    target = phimoe(window=7)
    with caplog.at_level(logging.WARNING, logger="peagle"):
        packed = PackedTarget(target)
    assert not packed.can_pack and "to 7 tokens by its mask" in caplog.text
    ids_1T = torch.arange(5, 45)[None]
    states = packed.forward(
        torch.cat([ids_1T, ids_1T], 1), torch.arange(2).repeat_interleave(40)[None], torch.arange(40).repeat(2)[None]
    )
    expected_TV = target.forward(ids_1T).logits_BTV[0]
    logits_NV = packed.head(states.last_hidden_BTD[0])
    torch.testing.assert_close(logits_NV, expected_TV.repeat(2, 1), atol=1e-4, rtol=1e-4)


def test_a_window_that_no_text_exceeds_is_none() -> None:
    target = phimoe(window=BASE["max_position_embeddings"])
    PagedTarget(target).close()
    assert PackedTarget(target).can_pack


def test_a_decoder_that_its_config_does_not_call_one_is_taken() -> None:
    config = GPTNeoXConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=272
    )
    assert config.is_decoder is False
    PagedTarget(target_of(GPTNeoXForCausalLM(config))).close()
