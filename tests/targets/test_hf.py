"""A target is its transformers model: same logits, same states, with and without a cache."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from harness.tiny_models import tiny_target, tiny_tokenizer
from peagle.errors import ConfigError, TargetError
from peagle.targets.hf import HFTarget

WINDOW = 6
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
HEADS = SIZES | {"head_dim": 16}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**HEADS, tie_word_embeddings=True)),
    "llama-untied": lambda: LlamaForCausalLM(LlamaConfig(**HEADS, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**HEADS)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**HEADS, sliding_window=WINDOW)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**HEADS, sliding_window=WINDOW)),
    "gemma3-with-images": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=HEADS | {"sliding_window": WINDOW},
            vision_config=VISION | {"image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
        )
    ),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**HEADS, **EXPERTS, sliding_window=WINDOW, rope_parameters=ROPE)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**HEADS, **EXPERTS)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=8, n_head=4, vocab_size=288, n_positions=512, eos_token_id=2, bos_token_id=1)
    ),
}


def made(name: str) -> HFTarget:
    """A target of random weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return HFTarget(model, tiny_tokenizer(), name=name)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_aux_states_are_those_of_transformers(name: str) -> None:
    target = made(name)
    token_ids = torch.randint(3, 268, (2, 20))
    output = target.forward(token_ids)
    with torch.no_grad():
        reference = target.model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
    assert target.aux_layer_ids == (2, 4, 5)
    expected = torch.cat([reference.hidden_states[index] for index in (2, 4, 5)], dim=-1)
    assert torch.equal(output.logits_BTV, reference.logits)
    assert torch.equal(output.aux_hidden_BTA, expected)
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.max_length) == (8, 64, 288, 512)
    assert target.eos_token_ids == {2}
    assert target.embedding_VD.shape == target.head_VD.shape == (288, 64)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_was_cut_back_gives_what_a_fresh_pass_gives(name: str) -> None:
    target = made(name)
    token_ids = torch.randint(3, 268, (1, 3 * WINDOW))
    whole = target.forward(token_ids)
    cache = target.new_cache()
    parts = [target.forward(token_ids[:, :9], cache)]
    for first, last in ((9, 10), (10, 14), (14, 18)):
        target.forward(torch.randint(3, 268, (1, 5)), cache)
        cache.crop(-5)
        parts.append(target.forward(token_ids[:, first:last], cache))
    for index, name in enumerate(("logits", "aux states")):
        found = torch.cat([part[index] for part in parts], dim=1)
        assert torch.allclose(found, whole[index], atol=2e-4), name


def test_a_sliding_window_longer_ago_than_the_rejected_draft_is_still_there() -> None:
    target = made("mistral")
    token_ids = torch.randint(3, 268, (1, 30))
    cache = target.new_cache()
    target.forward(token_ids[:, :25], cache)
    cache.crop(-15)
    again = target.forward(token_ids[:, 10:], cache).logits_BTV
    assert torch.allclose(again, target.forward(token_ids).logits_BTV[:, 10:], atol=2e-4)


def test_tied_and_untied_heads_are_told_apart() -> None:
    tied, untied = made("llama"), made("llama-untied")
    assert tied.head_VD.data_ptr() == tied.embedding_VD.data_ptr()
    assert untied.head_VD.data_ptr() != untied.embedding_VD.data_ptr()


def test_tapping_again_replaces_the_earlier_choice() -> None:
    target = tiny_target(num_layers=6)
    token_ids = torch.tensor([[1, 5, 9]])
    target.tap((0, 5))
    states = target.model(input_ids=token_ids, output_hidden_states=True).hidden_states
    assert torch.equal(target.forward(token_ids).aux_hidden_BTA, torch.cat([states[0], states[5]], dim=-1))
    assert sum(len(layer._forward_pre_hooks) for layer in target.layers) == 2


def test_layers_that_are_not_there_are_refused_and_the_taps_stay() -> None:
    target = tiny_target(num_layers=4)
    with pytest.raises(ConfigError, match="between 0 and 3, got"):
        target.tap((1, 2, 4))
    assert target.aux_layer_ids == (1, 2, 3)
    assert target.forward(torch.tensor([[1, 5]])).aux_hidden_BTA.shape == (1, 2, 3 * 64)


def test_end_tokens_are_gathered_from_the_generation_settings_the_config_and_the_tokenizer() -> None:
    model = LlamaForCausalLM(LlamaConfig(**HEADS | {"eos_token_id": [2, 7]}))
    model.generation_config.eos_token_id = 9
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert HFTarget(model, tokenizer, name="many").eos_token_ids == {0, 2, 7, 9}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizer.eos_token = None
    assert HFTarget(model, tokenizer, name="none").eos_token_ids == frozenset()


def test_the_model_is_frozen_and_in_evaluation_mode() -> None:
    target = tiny_target(attention_dropout=0.5)
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    token_ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(target.forward(token_ids).logits_BTV, target.forward(token_ids).logits_BTV)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=288)), "recurrent state"),
        (lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, full_attn_idxs=[1, 3])), r"recurrent state \(conv\)"),
        (
            lambda: BertLMHeadModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)),
            "each token attends to later ones",
        ),
    ],
    ids=["mamba", "hybrid", "encoder"],
)
def test_models_that_cannot_be_verified_with_are_refused(model, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        HFTarget(model(), tiny_tokenizer(), name="other")
    assert caught.value.hint


def test_the_fingerprint_tells_weights_apart_and_not_precisions() -> None:
    target, same, other = tiny_target(), tiny_target(), tiny_target(seed=1)
    assert target.fingerprint() == same.fingerprint() != other.fingerprint()
    same.model.to(torch.bfloat16)
    assert target.fingerprint() == same.fingerprint()
    assert len({tiny_target(num_layers=n).fingerprint() for n in (7, 8)}) == 2
    with torch.no_grad():
        other.model.load_state_dict(target.model.state_dict())
        other.layers[3].mlp.up_proj.weight[0, 0] += 1
    assert target.fingerprint() != other.fingerprint()
