"""A new drafter for a target: its shape taken from the target's, its weights from the target's last layers or noise."""

import logging
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import choose_mask_token_id
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

WEIGHT_STD = 0.02
WIDENED = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")  # twice as wide in the first layer


def config_for_target(target: "HFTarget", *, num_layers: int, **switches: Any) -> DrafterConfig:
    """A drafter config of the target's width, heads, rotary embedding and norms; `switches` are the other fields."""
    config = target.model.config.get_text_config()
    num_heads = config.num_attention_heads
    if switches.get("mask_token_id") is None and switches.get("parallel", True):
        switches["mask_token_id"] = choose_mask_token_id(target.tokenizer, target.vocab_size)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // num_heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=target.aux_layer_ids,
        max_length=target.max_length,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_parameters=_rope_parameters(config),
        **switches,
    )


def create_drafter(target: "HFTarget", config: DrafterConfig, init: Literal["target", "random"], seed: int) -> Drafter:
    """An untrained drafter in float32 on the target's device."""
    torch.manual_seed(seed)
    drafter = Drafter(config, target.embedding_VD, target.head_VD).to(target.device)
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=WEIGHT_STD)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    with torch.no_grad():
        if config.embeddings == "own":
            drafter.embed_tokens.weight.copy_(target.embedding_VD)
        if config.head == "own":
            drafter.lm_head.weight.copy_(target.head_VD)
        if init == "target":
            _copy_last_layers(drafter, target)
    return drafter


def _copy_last_layers(drafter: Drafter, target: "HFTarget") -> None:
    """Start every layer as a copy of the target's last ones, fed with its last aux state.

    The first layer's attention takes a copy of the target's for the half of its input that is a state, and noise for
    the half that is an embedding.
    """
    size = drafter.config.hidden_size
    for layer, source in zip(drafter.layers, target.layers[-len(drafter.layers) :], strict=True):
        source_weights = source.state_dict()
        for name, weight in layer.state_dict().items():
            if name.startswith("hidden_norm."):
                weight.copy_(source_weights["input_layernorm.weight"])
            elif layer.hidden_norm is not None and name == "input_layernorm.weight":
                continue
            elif name not in source_weights:
                raise ConfigError(
                    f"the target's layers have no {name!r} to start the drafter from",
                    hint="use init = random for targets whose layers are not Llama-shaped",
                )
            else:
                reads_embedding_too = layer.hidden_norm is not None and name in WIDENED
                (weight[:, size:] if reads_embedding_too else weight).copy_(source_weights[name])
    drafter.norm.weight.copy_(target.final_norm_weight)
    state_scale = _aux_scale(target)
    drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.fc.weight.device) * (
        state_scale if drafter.config.fc_norm or drafter.config.norm_before_fc else 1.0
    )


def _aux_scale(target: "HFTarget") -> float:
    """Typical magnitude of the target's last aux state, which a normed one must be scaled back to."""
    token_ids: Tensor = target.tokenizer("The target's states on this sentence tell their scale.", return_tensors="pt")[
        "input_ids"
    ]
    aux_hidden = target.forward(token_ids.to(target.device)).aux_hidden_BTA[..., -target.hidden_size :]
    return float(aux_hidden.float().square().mean(-1).sqrt().median())


def _rope_parameters(config: Any) -> dict[str, Any]:
    """The target's rotary settings; of the kinds a per-layer-type model has, the full-attention one."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    return {"rope_type": "default", "rope_theta": 10000.0} | {k: v for k, v in rope.items() if v is not None}
