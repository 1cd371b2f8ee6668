"""A new drafter for a target: its shape taken from the target's, its weights from the target's last layers or noise."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import check_offsets, choose_mask_token_id
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

WEIGHT_STD = 0.02
RANDOM_INSTEAD = "use init = random for targets whose layers are not Llama-shaped"
WIDENED = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")  # twice as wide in the first layer


def config_for_target(target: "HFTarget", *, num_layers: int, **switches: Any) -> DrafterConfig:
    """A drafter config of the target's width, heads, rotary embedding and norms; `switches` are the other fields."""
    config = target.model.config.get_text_config()
    num_heads = config.num_attention_heads
    if switches.get("mask_token_id") is None and switches.get("parallel", True):
        switches["mask_token_id"] = choose_mask_token_id(target.tokenizer, target.vocab_size)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=_intermediate_size(config, target.hidden_size),
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
    """A number of the config, the first layer's where they differ from layer to layer; None where it is silent."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses the question where layers differ (Gemma-4), with an error of its own
        return getattr(config.per_layer_config[0], name, None)


def create_drafter(
    target: "HFTarget",
    config: DrafterConfig,
    init: Literal["target", "random"],
    seed: int,
    offsets_U: Tensor | None = None,
) -> Drafter:
    """An untrained drafter in float32 on the target's device, the same for a seed wherever that is.

    A draft vocabulary smaller than the target's is that of `offsets_U` (see `draft_to_target`), by default its first
    tokens.
    """
    with torch.device("cpu"):  # every device draws other numbers from a seed
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


def check_copies(target: "HFTarget", config: DrafterConfig) -> None:
    """Refuse a drafter whose layers cannot start as copies of the target's last ones. Nothing is allocated."""
    with torch.device("meta"):
        drafter = Drafter(config, target.embedding_VD, target.head_VD)
    with torch.no_grad():
        _copy_last_layers(drafter, target)


def _copy_last_layers(drafter: Drafter, target: "HFTarget") -> None:
    """Start every layer as a copy of the target's last ones, fed with its last aux state.

    The first layer's attention takes a copy of the target's for the half of its input that is a state, and noise for
    the half that is an embedding.
    """
    size, num_layers = drafter.config.hidden_size, len(drafter.layers)
    if num_layers > target.num_layers:
        raise ConfigError(
            f"a drafter of {num_layers} layers cannot start from a target of {target.num_layers}",
            hint="use fewer layers, or init = random",
        )
    for index, (layer, source) in enumerate(zip(drafter.layers, target.layers[-num_layers:], strict=True)):
        weights = _llama_weights(target, source)
        for name, weight in layer.state_dict().items():
            if index == 0 and name == "input_layernorm.weight":
                continue  # it norms the embedding, which the target's layers never read
            source_name = "input_layernorm.weight" if name == "hidden_norm.weight" else name
            part = weight[:, size:] if index == 0 and name in WIDENED else weight
            if source_name not in weights or weights[source_name].shape != part.shape:
                raise ConfigError(
                    f"the target's layers have no {source_name!r} of shape {list(part.shape)} to start from",
                    hint=RANDOM_INSTEAD,
                )
            part.copy_(weights[source_name])
    drafter.norm.weight.copy_(target.final_norm_weight)
    state_scale = _aux_scale(target)
    drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.fc.weight.device) * (
        state_scale if drafter.config.fc_norm or drafter.config.norm_before_fc else 1.0
    )


def _start_as(weight: Tensor, source: Tensor) -> None:
    """Copy a table of the target's where it fits; a drafter of another width keeps its noise."""
    if weight.shape == source.shape:
        weight.copy_(source)


def _llama_weights(target: "HFTarget", source: nn.Module) -> dict[str, Tensor]:
    """A target layer's tensors, norms as what they multiply by. Layers whose norms sit elsewhere are refused."""
    weights = source.state_dict()
    norms = {name for name in weights if "norm" in name and not name.startswith("self_attn.")}
    if norms != {"input_layernorm.weight", "post_attention_layernorm.weight"}:
        raise ConfigError(
            f"the target's layers have the norms {', '.join(sorted(norms)) or 'none'}, not those of a Llama layer, "
            "so the drafter cannot start from them",
            hint=RANDOM_INSTEAD,
        )
    return weights | {name: target.norm_scale(source.get_submodule(name.removesuffix(".weight"))) for name in norms}


def _intermediate_size(config: Any, hidden_size: int) -> int:
    """The target's, where its config has one number for it; else four times the width."""
    size = getattr(config, "intermediate_size", None)
    return size if isinstance(size, int) else 4 * hidden_size


def _aux_scale(target: "HFTarget") -> float:
    """Typical magnitude of the target's last aux state, which a normed one must be scaled back to."""
    token_ids: Tensor = target.tokenizer("The target's states on this sentence tell their scale.", return_tensors="pt")[
        "input_ids"
    ]
    aux_hidden = target.forward(token_ids.to(target.device)).aux_hidden_BTA[..., -target.hidden_size :]
    return float(aux_hidden.float().square().mean(-1).sqrt().median())


def _rope_parameters(config: Any) -> dict[str, Any]:
    """The target's rotary settings; of the kinds a per-layer-type model has, the full-attention one.

    A target that rotates a part of each head lends only its base: drafters rotate whole heads.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    rope = {"rope_type": "default", "rope_theta": 10000.0} | {k: v for k, v in rope.items() if v is not None}
    is_partial = rope.pop("partial_rotary_factor", 1) != 1
    if rope["rope_type"] == "default" or is_partial:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope
