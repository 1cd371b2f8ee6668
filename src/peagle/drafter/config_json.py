"""config.json of drafter directories: written in vLLM's native form, read in that and in the speculators form.

The native form is vLLM's Llama-shaped EAGLE-3 config. Makers spell some keys differently; every spelling seen in
published directories is read, and two that disagree are refused.
"""

import json
import logging
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

log = logging.getLogger(__name__)

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
    if config.parallel:
        values |= dict.fromkeys(MASK_TOKEN_KEYS, config.mask_token_id)
    return values


def read_config(
    path: Path, tensors: Mapping[str, Tensor], target: "HFTarget", card: DrafterCard | None
) -> DrafterConfig:
    """The drafter a config.json describes; `tensors` tell what it leaves open (parallel or not, own tables or not)."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint="it is corrupt; copy it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
    try:
        return _from_values(_flatten(values), tensors, target, card)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks the key {error.args[0]!r}", hint="it is not a drafter's config") from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}", hint=error.hint) from error


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """One level of keys for all forms: eagle_config and the speculators form's layer config are merged in."""
    values = _present(values)
    kind = values.get("speculators_model_type")
    if kind is not None:
        if kind not in ("peagle", "eagle3"):
            raise ConfigError(f"speculators_model_type {kind!r} is not supported", hint="known: peagle, eagle3")
        inner = _mapping(values, "transformer_layer_config")
        values = _speculators_defaults(values, kind) | inner | values
        values["model_type"] = inner.get("model_type", "llama")
    nested = _mapping(values, "eagle_config")
    for key in nested.keys() & values.keys():
        if nested[key] != values[key]:
            raise _disagreement({key: values[key], f"eagle_config.{key}": nested[key]})
    return nested | values


def _speculators_defaults(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """What the speculators form leaves out or says elsewhere."""
    methods = _mapping(values, "speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise ConfigError(f"proposal_methods must be a list of objects, got {methods!r}")
    num_draft_tokens = methods[0].get("speculative_tokens")
    return _present({"norm_before_residual": kind == "eagle3", "num_draft_tokens": num_draft_tokens})


def _present(values: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that hold null: makers write it for "not set"."""
    return {key: value for key, value in values.items() if value is not None}


def _mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{key} must be an object, got {found!r}")
    return _present(found)


def _check_supported(values: dict[str, Any]) -> None:
    """Refuse what would make another network than ours out of the same tensors."""
    model_type = values.get("model_type", "llama")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(f"drafters of model_type {model_type!r} are not supported", hint="known: llama")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {values['hidden_act']!r} is not supported", hint="known: silu")
    if not values.get("use_aux_hidden_state", True):
        raise ConfigError(
            "use_aux_hidden_state is false: an EAGLE drafter of the first or second kind", hint="known: true"
        )
    if "sliding_attention" in values.get("layer_types", ()):
        log.warning(
            "the drafter was trained with a sliding window of %s tokens; here it attends to the whole text, which may "
            "cost acceptance in longer ones",
            values.get("sliding_window"),
        )


def _from_values(
    values: dict[str, Any], tensors: Mapping[str, Tensor], target: "HFTarget", card: DrafterCard | None
) -> DrafterConfig:
    _check_supported(values)
    hidden_size, num_heads = _whole(values, "hidden_size"), _whole(values, "num_attention_heads")
    vocab_size = _whole(values, "vocab_size")
    mask_token_id = _agreed(values, MASK_TOKEN_KEYS)
    if mask_token_id is not None and type(mask_token_id) is not int:
        raise ConfigError(f"mask_token_id must be a token id, got {mask_token_id!r}")
    # A directory that names a mask token but has lost the state is a broken P-EAGLE drafter, not an EAGLE-3 one.
    parallel = "mask_hidden" in tensors or mask_token_id is not None
    embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=_whole(values, "intermediate_size"),
        num_layers=_whole(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_whole(values, "num_key_value_heads", num_heads),
        head_dim=_whole(values, "head_dim", hidden_size // num_heads),
        vocab_size=vocab_size,
        draft_vocab_size=_whole(values, "draft_vocab_size", vocab_size),
        target_hidden_size=_whole(values, "target_hidden_size", hidden_size),
        aux_layer_ids=_aux_layer_ids(values, target),
        parallel=parallel,
        mask_token_id=mask_token_id,
        num_draft_tokens=card.num_draft_tokens if card is not None else _whole(values, "num_draft_tokens", 0) or None,
        fc_norm=bool(values.get("fc_norm", False)),
        norm_before_fc=bool(values.get("norm_before_fc", False)),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_output=bool(values.get("norm_output", False)),
        attention_bias=bool(values.get("attention_bias", False)),
        rms_norm_eps=values.get("rms_norm_eps", 1e-5),
        max_length=_whole(values, "max_position_embeddings", target.max_length),
        rope_parameters=_rope_parameters(values),
        embeddings="shared" if _is_targets(embedding, target.embedding_VD, mask_token_id) else "own",
        head="shared" if _is_targets(head, target.head_VD, None) else "own",
    )


def _whole(values: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number. A key without a default must be there: KeyError."""
    value = values[key] if default is None else values.get(key, default)
    if type(value) is not int or (value < 1 and value != default):
        raise ConfigError(f"{key} must be a positive whole number, got {value!r}")
    return value


def _aux_layer_ids(values: dict[str, Any], target: "HFTarget") -> tuple[int, ...]:
    """In ascending order and once each, as engines take them, whatever the order in the file."""
    found = _agreed(values, AUX_KEYS)
    if not found:
        return target.default_aux_layer_ids
    if not isinstance(found, list) or not all(type(index) is int for index in found):
        raise ConfigError(f"{AUX_KEYS[0]} must be a list of layer numbers, got {found!r}")
    return tuple(sorted(set(found)))


def _agreed(values: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The one value that the spellings present agree on; None when there is none."""
    found = {key: values[key] for key in keys if values.get(key) is not None}
    if len({json.dumps(value) for value in found.values()}) > 1:
        raise _disagreement(found)
    return next(iter(found.values()), None)


def _disagreement(found: dict[str, Any]) -> ConfigError:
    pairs = ", ".join(f"{key} = {value}" for key, value in found.items())
    return ConfigError(f"keys that mean the same disagree: {pairs}", hint="keep the one it was trained with")


def _is_targets(table: Tensor | None, target_table: Tensor, own_row: int | None) -> bool:
    """Whether a table can be the target's: absent, or equal to it except for the drafter's own row."""
    if table is None:
        return True
    if table.shape != target_table.shape:
        return False
    # In the coarser of the two precisions: the drafter is loaded in the target's, and may be stored in a coarser one.
    dtype = min(table.dtype, target_table.dtype, key=lambda dtype: dtype.itemsize)
    differs = (table.to(dtype) != target_table.to("cpu", dtype)).any(1)
    if own_row is not None and 0 <= own_row < len(differs):
        differs[own_row] = False
    return not bool(differs.any())


def _rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings from the current key or from the older pair rope_theta and rope_scaling."""
    found = _mapping(values, "rope_parameters") or _mapping(values, "rope_scaling")
    if any(isinstance(value, dict) for value in found.values()):
        raise ConfigError("rope_parameters differ by layer, which drafters here do not", hint="known: one set for all")
    rope_type = found.get("rope_type", found.get("type", "default"))
    rest = {key: value for key, value in found.items() if key not in ("rope_type", "type")}
    return {"rope_type": rope_type, "rope_theta": values.get("rope_theta", 10000.0)} | rest
