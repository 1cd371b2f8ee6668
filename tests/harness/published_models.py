"""The published models in miniature: Hugging Face directories with the keys and tensor names of the real ones.

The configs have every key that shapes the network, under its published name, with smaller numbers. Quantized ones
hold what their makers store: MXFP4 blocks and scales for GPT-OSS, FP8 blocks and their scales for Qwen3-Coder. Heads
are laid out as Amazon lays out its own: `midlayer`, `ptd_token_id`, a table and an output head of their own, identity
vocabulary maps, Llama-3 rotary scaling.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from harness.model_families import trained_drafter
from harness.tiny_models import tiny_tokenizer
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.targets.hf import HFTarget

VOCABULARY, MASK_TOKEN = 288, 280
WINDOW = 16
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 16}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "experts_per_token": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initial_context_length": 16,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "pad_token_id": 0,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN | {"rope_type": "yarn", "truncate": False},
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": WINDOW,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
QWEN3_CODER: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [16, 16],
    "modules_to_not_convert": ["lm_head"],
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "audio_token_id": 285,
    "boa_token_id": 281,
    "boi_token_id": 282,
    "dtype": "bfloat16",
    "eoa_token_index": 283,
    "eoi_token_id": 284,
    "eos_token_id": [2, 106],
    "image_token_id": 286,
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 2,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 12,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "tie_word_embeddings": True,
    "video_token_id": 287,
    "vision_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "model_type": "gemma4_vision",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 64,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "standardize": True,
        "use_clipped_linears": False,
    },
    "vision_soft_tokens_per_image": 4,
}
QWEN3_CODER_FP8 = QWEN3_CODER | {"quantization_config": FP8}


@dataclass(frozen=True)
class Published:
    """One published target and its head in miniature."""

    config: dict[str, Any]
    num_draft_tokens: int
    """what its card or blog recommends"""
    store: Callable[[dict[str, Tensor]], dict[str, Tensor]] = field(default=lambda tensors: tensors)
    """from plain tensors to what its makers store"""


def as_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as random blocks of 32 four-bit numbers with an exponent each; the rest in bfloat16."""
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            num_experts, num_in, num_out = tensor.shape
            blocks = (num_experts, num_out, num_in // 32)
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(122, 125, blocks, dtype=torch.uint8)
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return stored


def as_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of the layers, routers excepted, in blocks of 8-bit floats with a factor each."""
    rows, columns = QWEN3_CODER_FP8["quantization_config"]["weight_block_size"]
    stored = {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            stored[name] = tensor.to(torch.bfloat16)
            continue
        blocks = tensor.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        factor = blocks.abs().amax((1, 3), keepdim=True) / 448
        stored[name] = (blocks / factor).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = factor[:, 0, :, 0]
    return stored


def as_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


PUBLISHED = {
    "gpt-oss-120b": Published(GPT_OSS | {"num_local_experts": 16, "num_hidden_layers": 10}, 5, as_mxfp4),
    "gpt-oss-20b": Published(GPT_OSS, 7, as_mxfp4),
    "qwen3-coder-30b-a3b-instruct": Published(QWEN3_CODER, 10, as_bfloat16),
    "qwen3-coder-30b-a3b-instruct-fp8": Published(QWEN3_CODER_FP8, 10, as_fp8),
    "gemma-4-31b-it": Published(GEMMA4, 7, as_bfloat16),
}
PUBLISHED["gpt-oss-120b"].config["layer_types"] = ["sliding_attention", "full_attention"] * 5


def write_target(published: Published, directory: Path, seed: int = 0) -> Path:
    """A random target of the published layout; norms, sinks and scalars are random too."""
    torch.manual_seed(seed)
    plain = {key: value for key, value in published.config.items() if key != "quantization_config"}
    config = AutoConfig.for_model(plain.pop("model_type"), **json.loads(json.dumps(plain)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            _randomize(name, tensor)
    model.save_pretrained(directory)
    (weights,) = directory.glob("*.safetensors")
    save_file(published.store(load_file(weights)), weights, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(published.config))
    tiny_tokenizer().save_pretrained(directory)
    return directory


def _randomize(name: str, tensor: Tensor) -> None:
    if name.endswith(("inv_freq", "embed_scale")) or not tensor.is_floating_point():
        return
    noise = torch.randn_like(tensor)
    if "post_" in name and "norm" in name and "language_model" in name:
        tensor.copy_(4 + noise)  # Gemma's tied table would let the target repeat its last token otherwise
    elif "norm" in name or name.endswith(("layer_scalar", "std_scale")):
        tensor.copy_(1 + 0.2 * noise)
    elif name.endswith("sinks"):
        tensor.copy_(noise)
    else:
        tensor.copy_(0.2 * noise)


def published_drafter(
    target: HFTarget, texts: Sequence[Sequence[int]], num_draft_tokens: int, num_steps: int = 18
) -> Drafter:
    """A drafter of the shape of Amazon's heads, right about some of `texts`."""
    return trained_drafter(
        target,
        texts,
        num_draft_tokens=num_draft_tokens,
        num_steps=num_steps,
        num_layers=4,
        intermediate_size=96,
        num_heads=4,
        head_dim=16,
        fc_norm=False,
        embeddings="own",
        mask_token_id=MASK_TOKEN,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    )


def write_head(drafter: Drafter, directory: Path) -> Path:
    """A drafter as Amazon publishes its own: no card, and nothing said of the layers it reads or of its depth."""
    config = drafter.config
    tensors = dict(drafter.state_dict())
    table = tensors["embed_tokens.weight"].clone()
    table[config.mask_token_id] = tensors.pop("mask_embedding")
    tensors["embed_tokens.weight"] = table
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.long)
    tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    named = {name.replace("layers.0.", "midlayer."): tensor.contiguous() for name, tensor in tensors.items()}
    directory.mkdir(parents=True)
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_head_config(config)))
    return directory


def _head_config(config: DrafterConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": config.draft_vocab_size,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_length,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "ptd_token_id": config.mask_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
