"""The network against a second writing of it in plain tensor operations, and the sharing of tables."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from harness.drafter_passes import TEXT, aux_of, draft_logits
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import DenseMemory, Drafter
from peagle.errors import ConfigError

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def noisy(drafter: Drafter) -> Drafter:
    """The drafter with every weight moved, norms and biases included, so that none can be left out unseen."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter


def rms(x: list[float], weight: list[float], eps: float) -> list[float]:
    scale = 1 / math.sqrt(sum(value * value for value in x) / len(x) + eps)
    return [value * scale * factor for value, factor in zip(x, weight, strict=True)]


def rms_rows(x_SD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.tensor([rms(row, weight_D.tolist(), eps) for row in x_SD.tolist()], dtype=torch.float64)


def plain_attention(
    w: dict[str, Tensor], prefix: str, x_SD: Tensor, config, positions: list[int], window: int
) -> Tensor:
    """Causal attention, one head and one row at a time, rotary angles applied to pairs (i, i + width / 2)."""

    def project(name: str) -> Tensor:
        bias = w.get(f"{prefix}{name}_proj.bias")
        out = x_SD @ w[f"{prefix}{name}_proj.weight"].T
        return out if bias is None else out + bias

    width, half = config.head_dim, config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]

    def turned(row: Tensor, position: int) -> Tensor:
        out = torch.empty_like(row)
        for i in range(half):
            angle = position * theta ** (-2 * i / width)
            a, b = row[i], row[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    query, key, value = project("q"), project("k"), project("v")
    heads = []
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        q, k, v = (
            part[:, index * width : (index + 1) * width]
            for part, index in ((query, head), (key, shared), (value, shared))
        )
        if config.qk_norm:
            q, k = (
                rms_rows(part, w[f"{prefix}{name}_norm.weight"], config.rms_norm_eps)
                for part, name in ((q, "q"), (k, "k"))
            )
        q = torch.stack([turned(row, at) for row, at in zip(q, positions, strict=True)])
        k = torch.stack([turned(row, at) for row, at in zip(k, positions, strict=True)])
        rows = []
        for row in range(len(q)):
            first = max(0, row + 1 - window) if window else 0
            scores = (k[first : row + 1] @ q[row]) / math.sqrt(width)
            weights = (scores - scores.max()).exp()
            rows.append((weights / weights.sum()) @ v[first : row + 1])
        heads.append(torch.stack(rows))
    bias = w.get(f"{prefix}o_proj.bias")
    out = torch.cat(heads, dim=1) @ w[f"{prefix}o_proj.weight"].T
    return out if bias is None else out + bias


def plain_drafter(
    drafter: Drafter, embedding_VD: Tensor, head_VD: Tensor, token_ids: list[int], aux_TA: Tensor, num_masks: int
) -> Tensor:
    """Logits of the text's slots and of `num_masks` placeholders behind them, from the state dict in float64."""
    config = drafter.config
    w = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    eps = config.rms_norm_eps
    aux = torch.cat([aux_TA.double(), w["mask_hidden"].expand(num_masks, -1)])
    if config.norm_before_fc:
        aux = rms_rows(aux, w["input_norm.weight"], eps)
    if config.fc_norm:
        width = config.target_hidden_size
        parts = [
            rms_rows(aux[:, i * width : (i + 1) * width], w[f"fc_norm.{i}.weight"], eps)
            for i in range(len(config.aux_layer_ids))
        ]
        aux = torch.cat(parts, dim=1)
    state = aux @ w["fc.weight"].T
    table = w.get("embed_tokens.weight", embedding_VD.double()).clone()
    table[config.mask_token_id] = w["mask_embedding"]
    embedding = table[token_ids + [config.mask_token_id] * num_masks]
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        if index == 0:
            normed = rms_rows(state, w[prefix + "hidden_norm.weight"], eps)
            attended = torch.cat([rms_rows(embedding, w[prefix + "input_layernorm.weight"], eps), normed], dim=1)
            residual = normed if config.norm_before_residual else state
        else:
            attended, residual = rms_rows(state, w[prefix + "input_layernorm.weight"], eps), state
        positions, window = list(range(len(state))), config.sliding_window if index in config.sliding_layers else 0
        state = residual + plain_attention(w, prefix + "self_attn.", attended, config, positions, window)
        normed = rms_rows(state, w[prefix + "post_attention_layernorm.weight"], eps)
        gate, up = normed @ w[prefix + "mlp.gate_proj.weight"].T, normed @ w[prefix + "mlp.up_proj.weight"].T
        state = state + (gate / (1 + (-gate).exp()) * up) @ w[prefix + "mlp.down_proj.weight"].T
    return rms_rows(state, w["norm.weight"], eps) @ w.get("lm_head.weight", head_VD.double()).T


@pytest.mark.parametrize(
    "switches",
    [
        {"fc_norm": False},
        {"fc_norm": True, "norm_before_residual": True},
        {"fc_norm": False, "norm_before_fc": True, "attention_bias": True},
        {"fc_norm": True, "embeddings": "own", "head": "own"},
        {"fc_norm": False, "qk_norm": True},
        {"fc_norm": True, "sliding_window": 3, "sliding_layers": (1,)},
    ],
    ids=lambda switches: "-".join(switches),
)
def test_the_network_is_the_one_written_out_in_plain_operations(switches: dict) -> None:
    target = tiny_target(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=False)
    config = config_for_target(target, num_layers=2, num_draft_tokens=4, **switches)
    drafter = noisy(create_drafter(target, config, "random", seed=3).requires_grad_(False))
    _, aux_BTA = aux_of(target)
    expected = plain_drafter(drafter, target.embedding_VD, target.head_VD, TEXT[1:], aux_BTA[0, :-1], num_masks=3)
    assert torch.allclose(draft_logits(target, drafter).double(), expected[-4:], atol=1e-4)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_scaled_rotary_attention_is_that_of_transformers(rope: dict) -> None:
    target = tiny_target(rope_parameters=rope)
    drafter = tiny_drafter(target)
    assert drafter.config.rope_parameters["rope_type"] == rope["rope_type"], "taken over from the target"
    ours = drafter.layers[1].self_attn
    reference_config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters=dict(rope),
        attn_implementation="eager",
    )
    reference = LlamaAttention(reference_config, layer_idx=0)
    reference.load_state_dict(ours.state_dict())
    x, positions = torch.randn(1, 40, 64), torch.arange(100, 140)[None]
    causal = torch.ones(1, 1, 40, 40).tril().bool()
    bias = torch.zeros(1, 1, 40, 40).masked_fill(~causal, float("-inf"))
    with torch.no_grad():
        expected, _ = reference(x, LlamaRotaryEmbedding(reference_config)(x, positions), bias)
        found = ours(x, drafter.rotary(x, positions), DenseMemory(causal[0], None).layer(0))
        plain = tiny_drafter(tiny_target()).rotary(x, positions)
        unscaled = ours(x, plain, DenseMemory(causal[0], None).layer(0))
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(unscaled, expected, atol=1e-2), "the scaling matters at these positions"


def test_rotary_frequencies_stay_float32_in_a_bfloat16_drafter() -> None:
    drafter = tiny_drafter(tiny_target())
    before = drafter.rotary.inv_freq.clone()
    lowered = drafter.to(torch.bfloat16)
    assert lowered.fc.weight.dtype == torch.bfloat16
    assert lowered.rotary.inv_freq.dtype == torch.float32 and torch.equal(lowered.rotary.inv_freq, before)
    cos, _ = lowered.rotary(torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[400]]))
    assert torch.allclose(cos[0, 0, :8].float(), (400 * before).cos(), atol=5e-3)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "mrope", "rope_theta": 1e4}, "are not supported"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "'factor'"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "only a part of each head"),
    ],
)
def test_rotary_settings_that_cannot_be_computed_are_refused(rope: dict, message: str) -> None:
    target = tiny_target()
    config = replace(config_for_target(target, num_layers=1), rope_parameters=rope)
    with pytest.raises(ConfigError, match=message):
        Drafter(config, target.embedding_VD, target.head_VD)


@pytest.mark.parametrize("embeddings", ["shared", "own"])
def test_the_mask_token_reads_the_drafters_row_wherever_it_appears(embeddings: str) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, embeddings=embeddings)
    mask = drafter.config.mask_token_id
    with torch.no_grad():
        drafter.mask_embedding.fill_(7.0)
    found = drafter.embed(torch.tensor([[5, mask, 6, mask]]))
    assert (found[0, [1, 3]] == 7.0).all()
    assert torch.equal(found[0, [0, 2]], target.embedding_VD[[5, 6]])


def test_draft_ids_are_turned_into_target_ids_by_their_offsets() -> None:
    target = tiny_target(tie_word_embeddings=False)
    drafter = tiny_drafter(target, draft_vocab_size=5)
    target_ids = torch.tensor([3, 9, 40, 41, 287])
    drafter.d2t.copy_(target_ids - torch.arange(5))
    assert torch.equal(drafter.to_target_ids(torch.arange(5)), target_ids)
    normed = torch.randn(1, 2, 64)
    assert torch.allclose(drafter.logits(normed), normed @ target.head_VD[target_ids].T, atol=1e-5)
    whole = tiny_drafter(target)
    assert torch.equal(whole.to_target_ids(target_ids), target_ids)
    assert torch.equal(whole.logits(normed)[..., target_ids], drafter.logits(normed))


def test_shared_tables_are_the_targets_memory_and_neither_saved_nor_trained() -> None:
    target = tiny_target(tie_word_embeddings=False)
    config = config_for_target(target, num_layers=1, num_draft_tokens=4)
    drafter = create_drafter(target, config, "random", seed=0)
    assert drafter.embedding_VD.data_ptr() == target.embedding_VD.data_ptr()
    assert drafter.head_VD.data_ptr() == target.head_VD.data_ptr()
    names = set(drafter.state_dict())
    assert not any("target" in name or name.startswith(("embed_tokens", "lm_head")) for name in names)
    before = copy.deepcopy(target.model.state_dict())
    token_ids_BT, aux_BTA = aux_of(target)
    visible = torch.ones(1, len(TEXT), len(TEXT)).tril().bool()
    output = drafter(token_ids_BT, drafter.fuse(aux_BTA), torch.arange(len(TEXT))[None], visible)
    drafter.logits(output.normed_BSD).square().mean().backward()
    assert all(p.grad is not None for name, p in drafter.named_parameters() if not name.startswith("mask_"))
    assert target.embedding_VD.grad is None and target.head_VD.grad is None
    torch.optim.SGD(drafter.parameters(), lr=1.0).step()
    assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())


def test_own_tables_are_copies_that_train_apart_from_the_target() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, embeddings="own", head="own")
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(drafter.state_dict())
    assert torch.equal(drafter.embedding_VD, target.embedding_VD)
    assert drafter.embedding_VD.data_ptr() != target.embedding_VD.data_ptr()
    assert torch.equal(drafter.lm_head.weight, target.head_VD)
    assert drafter.lm_head.weight.data_ptr() != target.head_VD.data_ptr()


@pytest.mark.parametrize("norm_output", [False, True])
def test_eagle3_carries_the_normed_state_only_when_asked(norm_output: bool) -> None:
    target = tiny_target()
    drafter = noisy(tiny_drafter(target, parallel=False, norm_output=norm_output))
    assert not {"mask_hidden", "mask_embedding"} & set(drafter.state_dict())
    token_ids_BT, aux_BTA = aux_of(target)
    visible = torch.ones(1, len(TEXT), len(TEXT)).tril().bool()
    output = drafter(token_ids_BT, drafter.fuse(aux_BTA), torch.arange(len(TEXT))[None], visible)
    assert torch.equal(output.carried_BSD, output.normed_BSD) == norm_output
    assert torch.allclose(drafter.norm(output.carried_BSD), output.normed_BSD) != norm_output
