"""Create an untrained drafter for a target: its shape from the target, its weights from the last layers or noise."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import check_offsets, choose_mask_token_id
from peagle.errors import ConfigError
from peagle.linears.few_bit import dequantize
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.targets.hf import HFTarget, norm_scale

WEIGHT_STD = 0.02
RANDOM_INSTEAD = "use init = random for targets whose layers are not Llama-shaped"
WIDENED = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")  # layer 0 reads [embedding, state]


def config_for_target(target: HFTarget, *, num_layers: int, **switches: Any) -> DrafterConfig:
    """A config with the target's width, heads, rotary embedding and norms; `switches` set the other fields."""
    config = target.model.config.get_text_config()
    num_heads, size = config.num_attention_heads, getattr(config, "intermediate_size", None)
    if switches.get("mask_token_id") is None and switches.get("parallel", True):
        switches["mask_token_id"] = choose_mask_token_id(target.tokenizer, target.vocab_size)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=size if isinstance(size, int) else 4 * target.hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_of_first_layer(config, "num_key_value_heads") or num_heads,
        head_dim=_of_first_layer(config, "head_dim") or target.hidden_size // num_heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=switches.pop("draft_vocab_size", None) or target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=target.aux_layer_ids,
        max_length=target.max_length,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_parameters=_rope_parameters(config),
        **switches,
    )


def _of_first_layer(config: Any, name: str) -> int | None:
    """A number of the config, the first layer's if layers differ; None if it is not set."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises its own error if layers differ (Gemma-4)
        return getattr(config.per_layer_config[0], name, None)


def create_drafter(
    target: HFTarget,
    config: DrafterConfig,
    init: Literal["target", "random"],
    seed: int,
    offsets_U: Tensor | None = None,
) -> Drafter:
    """An untrained drafter in float32 on the target's device. A seed gives the same weights on any device.

    `offsets_U` (see `draft_to_target`) defines a draft vocabulary smaller than the target's; by default its first ids.
    """
    with torch.device("cpu"):  # each device type draws different numbers from a seed
        drafter, noise = Drafter(config, target.embedding_VD, target.head_VD), torch.Generator().manual_seed(seed)
    if offsets_U is not None:
        check_offsets(offsets_U, config.vocab_size)
        drafter.d2t.copy_(offsets_U)
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=WEIGHT_STD, generator=noise)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    if config.parallel:
        nn.init.normal_(drafter.mask_hidden, generator=noise)
    drafter = drafter.to(target.device)
    with torch.no_grad():
        if config.embeddings == "own":
            _start_as(drafter.embed_tokens.weight, target.embedding_VD)
        if config.head == "own":
            draft_ids = torch.arange(config.draft_vocab_size, device=target.device)
            _start_as(drafter.lm_head.weight, target.head_VD[drafter.to_target_ids(draft_ids)])
        if init == "target":
            _copy_last_layers(drafter, target)
    return drafter


def check_copies(target: HFTarget, config: DrafterConfig) -> None:
    """Refuse a drafter whose layers cannot start as copies of the target's. Allocates nothing."""
    with torch.device("meta"):
        drafter = Drafter(config, target.embedding_VD, target.head_VD)
    with torch.no_grad():
        _copy_last_layers(drafter, target)


def _copy_last_layers(drafter: Drafter, target: HFTarget) -> None:
    """Start the layers as copies of the target's last ones, fed with its last aux state.

    The first layer's attention copies the target's weights for the state half of its input and keeps noise for the
    embedding half.
    """
    size, num_layers = drafter.config.hidden_size, len(drafter.layers)
    if num_layers > target.num_layers:
        raise ConfigError(
            f"a drafter of {num_layers} layers cannot start from a target of {target.num_layers} layers",
            hint="use fewer layers, or init = random",
        )
    for index, (layer, source) in enumerate(zip(drafter.layers, target.layers[-num_layers:], strict=True)):
        weights = _llama_weights(target, source)
        for name, weight in layer.state_dict().items():
            if index == 0 and name == "input_layernorm.weight":
                continue  # norms the embedding; the target's layers have no such norm
            source_name = "input_layernorm.weight" if name == "hidden_norm.weight" else name
            part = weight[:, size:] if index == 0 and name in WIDENED else weight
            if source_name not in weights or weights[source_name].shape != part.shape:
                raise ConfigError(
                    f"the target's layers have no {source_name!r} of shape {list(part.shape)} to start from",
                    hint=RANDOM_INSTEAD,
                )
            part.copy_(weights[source_name])
    drafter.norm.weight.copy_(target.final_norm_weight)
    state_scale = _aux_scale(target) if drafter.config.fc_norm or drafter.config.norm_before_fc else 1.0
    drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.fc.weight.device) * state_scale


def _start_as(weight: Tensor, source: Tensor) -> None:
    """Copy a table of the target if the shapes match; otherwise keep the noise."""
    if weight.shape == source.shape:
        weight.copy_(source)


def _llama_weights(target: HFTarget, source: nn.Module) -> dict[str, Tensor]:
    """A target layer's tensors, dequantized, with the effective scales of its norms.

    Refuses layers without Llama's two norms.
    """
    weights = source.state_dict()
    for path, module in source.named_modules():
        if isinstance(module, FewBitLinear):
            weights[f"{path}.weight"] = dequantize(module.stored)
    norms = {name for name in weights if "norm" in name and not name.startswith("self_attn.")}
    if norms != {"input_layernorm.weight", "post_attention_layernorm.weight"}:
        raise ConfigError(
            f"the target's layers have the norms {', '.join(sorted(norms)) or 'none'}, not those of a Llama layer, "
            "so the drafter cannot start from them",
            hint=RANDOM_INSTEAD,
        )
    return weights | {name: norm_scale(source.get_submodule(name.removesuffix(".weight"))) for name in norms}


def _aux_scale(target: HFTarget) -> float:
    """Typical magnitude of the target's last aux state, to undo a norm before `fc`."""
    token_ids: Any = target.tokenizer("The target's states on this sentence tell their scale.")["input_ids"]
    aux_hidden = target.aux_hidden(torch.tensor([token_ids], device=target.device))[..., -target.hidden_size :]
    return float(aux_hidden.float().square().mean(-1).sqrt().median())


def _rope_parameters(config: Any) -> dict[str, Any]:
    """The target's rotary settings, those of full attention if they differ by layer type.

    Drafters rotate whole heads, so only the base of a partial rotation is kept.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    rope = {"rope_type": "default", "rope_theta": 10000.0} | {k: v for k, v in rope.items() if v is not None}
    is_partial = rope.pop("partial_rotary_factor", 1) != 1
    if rope["rope_type"] == "default" or is_partial:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope
