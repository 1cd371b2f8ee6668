"""config.json of drafter directories: written in vLLM's native form, read in that and in the speculators form.

The native form is vLLM's Llama-shaped EAGLE-3 config. Makers spell some keys differently; every spelling seen in
published directories is read, and two that disagree are refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.drafter.card import DrafterCard
from peagle.drafter.config import DrafterConfig
from peagle.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

ARCHITECTURE = "LlamaForCausalLMEagle3"
AUX_KEYS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
SUPPORTED_MODEL_TYPES = {"llama", "llama_peagle", "peagle", "eagle3", "speculators"}


def write_config(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """vLLM's native config. The mask token goes under each name its releases look for; the aux ids under both."""
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_length,
        "rope_parameters": config.rope_parameters,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.aux_layer_ids),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        },
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.mask_token_id is not None:
        values |= dict.fromkeys(MASK_TOKEN_KEYS, config.mask_token_id)
    return values


def read_config(
    path: Path, tensors: Mapping[str, Tensor], target: "HFTarget", card: DrafterCard | None
) -> DrafterConfig:
    """The drafter a config.json describes; `tensors` tell what it leaves open (parallel or not, own tables or not)."""
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint="the file is corrupt; copy it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
    try:
        return _from_values(_flatten(values), tensors, target, card)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks the key {error.args[0]!r}", hint="it is not a drafter's config") from error
    except (ConfigError, TypeError) as error:
        message, hint = (error.message, error.hint) if isinstance(error, ConfigError) else (str(error), None)
        raise CheckpointError(f"{path}: {message}", hint=hint) from error


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """One level of keys for all forms: eagle_config and the speculators form's layer config are merged in."""
    kind = values.get("speculators_model_type")
    if kind is not None:
        if kind not in ("peagle", "eagle3"):
            raise ConfigError(f"speculators_model_type {kind!r} is not supported", hint="known: peagle, eagle3")
        methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
        defaults = {
            "norm_before_residual": kind == "eagle3",
            "num_draft_tokens": methods[0].get("speculative_tokens"),
        }
        inner = values.get("transformer_layer_config") or {}
        values = defaults | inner | {k: v for k, v in values.items() if k != "transformer_layer_config"}
        values["model_type"] = inner.get("model_type", "llama")
    model_type = values.get("model_type", "llama")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(f"drafters of model_type {model_type!r} are not supported", hint="known: llama")
    return values | {k: v for k, v in (values.get("eagle_config") or {}).items() if k not in values}


def _from_values(
    values: dict[str, Any], tensors: Mapping[str, Tensor], target: "HFTarget", card: DrafterCard | None
) -> DrafterConfig:
    hidden_size, num_heads = values["hidden_size"], values["num_attention_heads"]
    parallel = "mask_hidden" in tensors
    mask_token_id = _agreed(values, MASK_TOKEN_KEYS)
    embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    vocab_size = values["vocab_size"]
    aux_layer_ids = _agreed(values, AUX_KEYS)
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=values.get("head_dim") or hidden_size // num_heads,
        vocab_size=vocab_size,
        draft_vocab_size=values.get("draft_vocab_size") or vocab_size,
        target_hidden_size=values.get("target_hidden_size") or hidden_size,
        aux_layer_ids=tuple(sorted(set(aux_layer_ids))) if aux_layer_ids else target.default_aux_layer_ids,
        parallel=parallel,
        mask_token_id=mask_token_id if parallel else None,
        num_draft_tokens=card.num_draft_tokens if card is not None else values.get("num_draft_tokens"),
        fc_norm=bool(values.get("fc_norm", False)),
        norm_before_fc=bool(values.get("norm_before_fc", False)),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_output=bool(values.get("norm_output", False)),
        attention_bias=bool(values.get("attention_bias", False)),
        rms_norm_eps=values.get("rms_norm_eps", 1e-5),
        max_length=values.get("max_position_embeddings") or target.max_length,
        rope_parameters=_rope_parameters(values),
        embeddings="shared" if _is_targets(embedding, target.embedding_VD, mask_token_id) else "own",
        head="shared" if _is_targets(head, target.head_VD, None) else "own",
    )


def _agreed(values: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The one value that the spellings present agree on; None when there is none."""
    found = {key: values[key] for key in keys if values.get(key) is not None}
    if len({json.dumps(value) for value in found.values()}) > 1:
        pairs = ", ".join(f"{key} = {value}" for key, value in found.items())
        raise ConfigError(f"keys that mean the same disagree: {pairs}", hint="keep the one it was trained with")
    return next(iter(found.values()), None)


def _is_targets(table: Tensor | None, target_table: Tensor, own_row: int | None) -> bool:
    """Whether a table can be the target's: absent, or equal to it except for the drafter's own row."""
    if table is None:
        return True
    if table.shape != target_table.shape:
        return False
    differs = (table != target_table.to("cpu", table.dtype)).any(1)
    if own_row is not None:
        differs[own_row] = False
    return not bool(differs.any())


def _rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings from the current key or from the older pair rope_theta and rope_scaling."""
    if values.get("rope_parameters"):
        return dict(values["rope_parameters"])
    scaling = dict(values.get("rope_scaling") or {})
    rope_type = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    return {"rope_type": rope_type, "rope_theta": values.get("rope_theta", 10000.0)} | scaling
