"""config.json of drafter directories: written in vLLM's native form, read in that and in the speculators form.

The native form is vLLM's Llama- or Qwen3-shaped EAGLE-3 config. Projects spell some keys differently: every spelling
found in published directories is read, and two that disagree are an error. Missing keys get the defaults of
transformers, which is what other engines see. This file does not import torch.
"""

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.checkpoint.card import DrafterCard
from peagle.drafter.config import DrafterConfig
from peagle.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from peagle.targets.hf import HFTarget

LLAMA_ARCHITECTURE, QWEN3_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
VLLM_ARCHITECTURES = (
    LLAMA_ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    QWEN3_ARCHITECTURE,
    "PeagleQwen3ForCausalLM",
)
"""Drafter architectures in vLLM's model registry."""
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
VLLM_MASK_TOKEN_KEYS = (
    "dflash_config.mask_token_id",
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)
"""Where vLLM looks for the mask token. It takes the first key that is present."""
MASK_TOKEN_KEYS = (*VLLM_MASK_TOKEN_KEYS, "unused_token_id")
"""Every known spelling of the mask token. A drafter that has one of them drafts in parallel."""
WRITTEN_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Releases of vLLM read different keys, so the same value is written to all of these."""
NORM_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "qwen3", "llama_peagle", "peagle", "eagle3", "speculators"),
    "hidden_act": ("silu", "swish"),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "mlp_bias": (False,),
    "quantization_config": ({},),
}
"""Keys of which other values would need another network than ours."""


def write_config(config: DrafterConfig, dtype: "torch.dtype") -> dict[str, Any]:
    """vLLM's native config. Mask token and aux layer ids go under every key that a vLLM release reads."""
    values: dict[str, Any] = {
        "architectures": [QWEN3_ARCHITECTURE if config.qk_norm else LLAMA_ARCHITECTURE],
        **layer_values(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.aux_layer_ids),
        AUX_KEY: list(config.aux_layer_ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
            AUX_KEY: list(config.aux_layer_ids),
        },
        **{name: getattr(config, name) for name in NORM_FLAGS},
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.parallel:
        values |= dict.fromkeys(WRITTEN_MASK_TOKEN_KEYS, config.mask_token_id)
    return values


def layer_values(config: DrafterConfig) -> dict[str, Any]:
    """The drafter's layers in the keys of transformers' Llama or Qwen3 config."""
    values: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",
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
        **_rope_values(config.rope_parameters),
        "vocab_size": config.vocab_size,
    }
    if config.sliding_layers:
        kinds = ["sliding_attention" if config.window(n) else "full_attention" for n in range(config.num_layers)]
        values |= {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    return values


def _rope_values(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings under the current key and under the two keys of transformers 4.

    Without the old keys, an engine on transformers 4 silently uses rope_theta = 10000.
    """
    values: dict[str, Any] = {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        values["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return values


def read_object(path: Path) -> dict[str, Any]:
    """A config.json or card as it is written."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"no drafter at {path.parent}: {path.name} is missing",
            hint="the copy is incomplete, or this is not a drafter directory",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint="it is corrupt; copy it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got {type(values).__name__}", hint="it is not a model's config"
        )
    return values


def read_values(path: Path) -> dict[str, Any]:
    """A drafter's config.json with all keys on one level, whichever form it is in."""
    with errors_in(path):
        return _flatten(read_object(path))


@contextmanager
def errors_in(path: Path) -> Iterator[None]:
    """Turn errors about the content of a drafter's file into CheckpointErrors that name the file."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{path} lacks the key {error.args[0]!r}", hint="it is not a drafter's config") from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}", hint=error.hint) from error


def is_parallel(values: Mapping[str, Any], tensor_names: Container[str]) -> bool:
    """Whether a drafter is P-EAGLE (all draft tokens in one pass). `tensor_names` are in vLLM's spelling."""
    # A directory with a mask token but without mask_hidden is a broken P-EAGLE drafter, not an EAGLE-3 one.
    has_token = mask_token_id(values) is not None or bool(values.get("parallel_drafting"))
    return has_token or "mask_hidden" in tensor_names


def mask_token_id(values: Mapping[str, Any]) -> int | None:
    """The mask token from the flattened config, under any known key; None if there is none."""
    flat = _with_nested_key(values)
    found = {key: flat[key] for key in MASK_TOKEN_KEYS if flat.get(key) is not None}
    for value in found.values():
        if type(value) is not int:
            raise ConfigError(f"mask_token_id must be a token id, got {value!r}")
    if len(set(found.values())) > 1:
        raise _disagreement(found)
    return next(iter(found.values()), None)


def vllm_mask_token_id(values: Mapping[str, Any]) -> Any:
    """The mask token that vLLM finds in a raw config.json: at the top level, under a key it knows; None if absent."""
    flat = _with_nested_key(values)
    return next((flat[key] for key in VLLM_MASK_TOKEN_KEYS if flat.get(key) is not None), None)


def _with_nested_key(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "dflash_config.mask_token_id": _mapping(values, "dflash_config").get("mask_token_id")}


def trained_draft_tokens(values: Mapping[str, Any]) -> int | None:
    """Draft tokens the drafter was trained for: NeMo's num_depths or the proposal of a speculators config."""
    return _whole(values, "num_draft_tokens", 0) or _whole(values, "num_depths", 0) or None


def read_config(
    path: Path, tensors: Mapping[str, "Tensor"], target: "HFTarget", card: DrafterCard | None, repairs: list[str]
) -> DrafterConfig:
    """The drafter that a config.json describes. `tensors` decide what it leaves open.

    Values that are read in another sense than vLLM reads them are added to `repairs`, one sentence each.
    """
    values = read_values(path)
    with errors_in(path):
        _check_supported(values)
        is_qwen3 = values.get("model_type") == "qwen3"
        if is_qwen3:
            values = {"head_dim": 128, "num_key_value_heads": 32} | values
        mask_token, parallel = mask_token_id(values), is_parallel(values, tensors)
        if parallel and mask_token is None:
            raise ConfigError(
                "a parallel drafter needs mask_token_id, and the config has none",
                hint="add mask_token_id with the token it was trained with",
            )
        sliding_window, sliding_layers = _windows(values)
        embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
        return DrafterConfig(
            **plain_settings(values, target),
            aux_layer_ids=_aux_layer_ids(values, target, card, repairs),
            parallel=parallel,
            mask_token_id=mask_token,
            num_draft_tokens=trained_draft_tokens(values) if card is None else card.num_draft_tokens,
            qk_norm=is_qwen3,
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
            rope_parameters=_rope_parameters(values),
            embeddings="shared" if _is_targets(embedding, target.embedding_VD, mask_token) else "own",
            head="shared" if _is_targets(head, target.head_VD, None) else "own",
        )


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """All keys on one level: eagle_config and the layer config of the speculators form are merged in."""
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
    """Keys that the speculators form leaves out or keeps elsewhere."""
    methods = _mapping(values, "speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise ConfigError(f"proposal_methods must be a list of objects, got {methods!r}")
    num_draft_tokens = methods[0].get("speculative_tokens")
    return _present({"norm_before_residual": kind == "eagle3", "num_draft_tokens": num_draft_tokens})


def _present(values: dict[str, Any]) -> dict[str, Any]:
    """Drop keys that hold null, which means "not set"."""
    return {key: value for key, value in values.items() if value is not None}


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{key} must be an object, got {found!r}")
    return _present(found)


def _check_supported(values: dict[str, Any]) -> None:
    """Refuse settings that would need another network than ours."""
    if not values.get("use_aux_hidden_state", True):
        raise ConfigError(
            "use_aux_hidden_state is false: EAGLE-1 and EAGLE-2 drafters are not supported", hint="known: true"
        )
    for key, known in SUPPORTED.items():
        if key in values and values[key] not in known:
            hint = f"known: {', '.join(map(str, known))}"
            raise ConfigError(f"{key} is {values[key]!r}, which is not supported in a drafter", hint=hint)


def plain_settings(values: Mapping[str, Any], target: "HFTarget") -> dict[str, Any]:
    """The fields of `DrafterConfig` that every engine reads from the same keys, with the defaults of transformers."""
    hidden_size, num_heads = _whole(values, "hidden_size"), _whole(values, "num_attention_heads")
    vocab_size = _whole(values, "vocab_size")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": _whole(values, "intermediate_size"),
        "num_layers": _whole(values, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _whole(values, "num_key_value_heads", num_heads),
        "head_dim": _whole(values, "head_dim", hidden_size // num_heads),
        "vocab_size": vocab_size,
        "draft_vocab_size": _whole(values, "draft_vocab_size", vocab_size),
        "target_hidden_size": _whole(values, "target_hidden_size", hidden_size),
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "max_length": _whole(values, "max_position_embeddings", target.max_length),
        "attention_bias": bool(values.get("attention_bias", False)),
        **{name: bool(values.get(name, False)) for name in NORM_FLAGS},
    }


def _whole(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; KeyError if the key is missing and has no default."""
    value = values[key] if default is None else values.get(key, default)
    if type(value) is not int or (value < 1 and value != default):
        raise ConfigError(f"{key} must be a positive integer, got {value!r}")
    return value


def _windows(values: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The sliding window and its layers. Without layer_types, engines use it in Qwen3's later layers."""
    num_layers, window = _whole(values, "num_hidden_layers"), _whole(values, "sliding_window", 0)
    kinds = values.get("layer_types")
    if kinds is None:
        is_used = values.get("model_type") == "qwen3" and values.get("use_sliding_window", False)
        first = values.get("max_window_layers", 28) if is_used else num_layers
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise ConfigError(f"layer_types must name the kind of each of {num_layers} layers, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds[:num_layers]} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"layer_types {', '.join(unknown)} are not supported", hint="known: full_attention, sliding_attention"
        )
    layers = tuple(layer for layer in range(num_layers) if kinds[layer] == "sliding_attention")
    if layers and not window:
        raise ConfigError("layer_types asks for sliding attention, but sliding_window is not given")
    return (window, layers) if layers else (0, ())


def _aux_layer_ids(
    values: dict[str, Any], target: "HFTarget", card: DrafterCard | None, repairs: list[str]
) -> tuple[int, ...]:
    """Sorted and without duplicates, as engines use them.

    SGLang and SpecForge number layers by their output, so their default ids are one lower than vLLM's. A directory
    without a card that has exactly those ids is read that way.
    """
    default = target.default_aux_layer_ids
    found = values.get(AUX_KEY)
    if not found:
        if values.get("target_layer_ids"):
            raise ConfigError(
                f"target_layer_ids is {values['target_layer_ids']!r}, which projects number in two ways",
                hint=f"use {AUX_KEY} instead: the layers whose input the drafter reads",
            )
        return default
    if not isinstance(found, list) or not all(type(index) is int for index in found):
        raise ConfigError(f"{AUX_KEY} must be a list of layer numbers, got {found!r}")
    ids = tuple(sorted(set(found)))
    if card is None and target.num_layers >= 7 and ids == tuple(index - 1 for index in default):
        repairs.append(
            f"{AUX_KEY} {list(ids)} numbers layers by their output, as SGLang does; it is read as {list(default)}"
        )
        return default
    return ids


def _disagreement(found: dict[str, Any]) -> ConfigError:
    pairs = ", ".join(f"{key} = {value}" for key, value in found.items())
    return ConfigError(f"keys with the same meaning disagree: {pairs}", hint="keep the one it was trained with")


def _is_targets(table: "Tensor | None", target_table: "Tensor", own_row: int | None) -> bool:
    """Whether a table is the target's: absent, or equal to it except for the drafter's own row."""
    if table is None:
        return True
    # Compare in the lower of the two precisions: the drafter may be stored in a lower one than the target's.
    dtype = min(table.dtype, target_table.dtype, key=lambda dtype: dtype.itemsize)
    return table.shape == target_table.shape and not num_differing_rows(table, target_table, own_row, dtype)


def num_differing_rows(table: "Tensor", target_table: "Tensor", own_row: int | None, dtype: "torch.dtype") -> int:
    """Rows of a drafter's table that are not the target's in `dtype`, its own row (the mask token's) left out."""
    differs = (table.to(dtype) != target_table.to(table.device, dtype)).any(1)
    if own_row is not None and 0 <= own_row < len(differs):
        differs[own_row] = False
    return int(differs.sum())


def rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings from the current key or the older two, with type and base filled in."""
    found = _mapping(values, "rope_parameters") or _mapping(values, "rope_scaling")
    rest = {key: value for key, value in found.items() if key not in ("rope_type", "type")}
    return {"rope_type": _rope_type(found) or "default", "rope_theta": values.get("rope_theta", 10000.0)} | rest


def _rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """The same, where keys that disagree or differ by layer are refused."""
    new, old = _mapping(values, "rope_parameters"), _mapping(values, "rope_scaling")
    for name, first, second in (
        ("rope_theta", new.get("rope_theta"), values.get("rope_theta")),
        ("rope_type", _rope_type(new), _rope_type(old)),
    ):
        if first is not None and second is not None and first != second:
            raise _disagreement({f"rope_parameters.{name}": first, name: second})
    if any(isinstance(value, dict) for value in (new or old).values()):
        raise ConfigError("rope_parameters per layer are not supported", hint="known: one set for all layers")
    return rope_parameters(values)


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))
