"""New drafters: shapes taken from the target, weights from its last layers."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from harness.drafter_passes import aux_of, draft_logits
from harness.few_bit_targets import dequantized
from harness.tiny_models import tiny_drafter, tiny_target, tiny_tokenizer
from peagle.drafter.create import check_copies, config_for_target, create_drafter
from peagle.errors import ConfigError
from peagle.targets.few_bit import quantize_model
from peagle.targets.hf import HFTarget

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 288,
}


def test_a_drafter_takes_its_shape_from_the_target() -> None:
    target = tiny_target(rms_norm_eps=1e-6)
    config = config_for_target(target, num_layers=2, num_draft_tokens=8)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (64, 128, 16)
    assert (config.num_heads, config.num_kv_heads, config.num_layers) == (4, 2, 2)
    assert (config.vocab_size, config.draft_vocab_size, config.target_hidden_size) == (288, 288, 64)
    assert (config.aux_layer_ids, config.max_length, config.rms_norm_eps) == ((2, 4, 5), 512, 1e-6)
    assert config.mask_token_id == 268, "the first row beyond the tokenizer's"
    assert config_for_target(target, num_layers=2, parallel=False).mask_token_id is None


def test_a_one_layer_eagle3_drafter_starts_as_the_targets_last_layer() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, num_layers=1, parallel=False, norm_output=True)
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, target.layers[-1].mlp.up_proj.weight)
    assert torch.equal(drafter.layers[0].self_attn.o_proj.weight, target.layers[-1].self_attn.o_proj.weight)
    assert not hasattr(drafter, "mask_hidden")


def test_a_given_draft_vocabulary_is_the_drafters() -> None:
    target = tiny_target()
    offsets = torch.tensor([4, 4, 9, 9])
    config = config_for_target(target, num_layers=1, draft_vocab_size=4)
    drafter = create_drafter(target, config, "target", 0, offsets)
    assert drafter.to_target_ids(torch.arange(4)).tolist() == [4, 5, 11, 12]
    assert torch.equal(drafter.head_VD, target.head_VD[[4, 5, 11, 12]])
    with pytest.raises(ConfigError, match="distinct target ids below 288"):
        create_drafter(target, config, "target", 0, offsets * 100)


def test_layers_start_as_the_targets_last_ones() -> None:
    target = tiny_target()
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter += torch.rand_like(parameter)
    drafter = tiny_drafter(target)
    for layer, source in zip(drafter.layers, target.layers[-2:], strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, source.mlp.up_proj.weight)
        assert torch.equal(layer.self_attn.q_proj.weight[:, -64:], source.self_attn.q_proj.weight)
        assert torch.allclose(layer.post_attention_layernorm.weight, source.post_attention_layernorm.weight)
    first, source = drafter.layers[0], target.layers[-2]
    assert torch.allclose(first.hidden_norm.weight, source.input_layernorm.weight)
    assert first.self_attn.q_proj.weight[:, :64].std() == pytest.approx(0.02, rel=0.2), "noise for the embedding half"
    assert torch.allclose(drafter.norm.weight, target.model.model.norm.weight)


def test_layers_start_as_the_dequantized_ones_of_a_target_in_few_bits() -> None:
    target = tiny_target(num_layers=2)
    quantize_model(target.model, "int4")
    found, expected = tiny_drafter(target), tiny_drafter(dequantized(target))
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    check_copies(target, found.config)


def test_creation_is_a_function_of_the_seed() -> None:
    target = tiny_target()
    config = config_for_target(target, num_layers=1, num_draft_tokens=4)
    first, again, other = (create_drafter(target, config, "random", seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert torch.equal(draft_logits(target, first), draft_logits(target, again))
    assert not torch.equal(draft_logits(target, first), draft_logits(target, other))
    assert 0.8 < float(first.mask_hidden.detach().std()) < 1.2, "of the size of a state, not of a weight"


def test_creation_draws_from_a_generator_of_its_own() -> None:
    """Not the device's, which would give a GPU another start than a CPU; and it seeds nobody else's anew."""
    target = tiny_target()
    config = config_for_target(target, num_layers=1, num_draft_tokens=4)
    drafters, others = [], []
    for seed in (5, 6):
        torch.manual_seed(seed)
        drafters.append(create_drafter(target, config, "random", seed=1))
        others.append(torch.rand(3))
    assert all(map(torch.equal, *(drafter.parameters() for drafter in drafters)))
    assert not torch.equal(*others)
    with torch.device("meta"):  # as a caller may have it whose tensors are on a GPU
        elsewhere = create_drafter(target, config, "random", seed=1)
    assert all(map(torch.equal, elsewhere.parameters(), drafters[0].parameters()))


def test_a_pruned_head_of_its_own_starts_from_the_targets_rows() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=50, head="own")
    assert torch.equal(drafter.lm_head.weight, target.head_VD[:50])


def test_more_layers_than_the_target_has_need_random_weights() -> None:
    target = tiny_target(num_layers=2)
    config = config_for_target(target, num_layers=3)
    with pytest.raises(ConfigError, match="a drafter of 3 layers cannot start from a target of 2"):
        create_drafter(target, config, "target", seed=0)
    assert len(create_drafter(target, config, "random", seed=0).layers) == 3


def test_gemmas_norms_are_copied_as_what_they_multiply_by() -> None:
    target = HFTarget(GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=16)), tiny_tokenizer(), name="gemma")
    with torch.no_grad():
        target.model.model.norm.weight.fill_(0.25)
    drafter = create_drafter(target, config_for_target(target, num_layers=1), "target", seed=0)
    assert torch.allclose(drafter.norm.weight, torch.tensor(1.25))
    assert torch.allclose(drafter.layers[0].hidden_norm.weight, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16)), "pre_feedforward_layernorm.weight"),
        (lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), "no 'mlp.gate_proj.weight'"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=288)), "the norms none"),
    ],
    ids=["gemma2", "mixtral", "gpt2"],
)
def test_a_target_whose_layers_are_not_llamas_lends_its_shape_but_not_its_layers(model, message: str) -> None:
    target = HFTarget(model(), tiny_tokenizer(), name="other")
    config = config_for_target(target, num_layers=1, num_draft_tokens=2)
    with pytest.raises(ConfigError, match=message) as caught:
        create_drafter(target, config, "target", seed=0)
    assert "init = random" in str(caught.value.hint)
    drafter = create_drafter(target, config, "random", seed=0).requires_grad_(False)
    _, aux_BTA = aux_of(target)
    assert drafter.fuse(aux_BTA).shape[-1] == 64


def test_a_target_that_rotates_a_part_of_its_heads_lends_only_the_base() -> None:
    model = PhiForCausalLM(
        PhiConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5})
    )
    config = config_for_target(HFTarget(model, tiny_tokenizer(), name="phi"), num_layers=1)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 777.0}
