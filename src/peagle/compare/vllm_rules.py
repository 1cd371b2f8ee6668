"""How vLLM reads a drafter directory, so that it can be checked without vLLM.

The rules are those of vLLM 0.32, for native and speculators configs of EAGLE-3 and P-EAGLE drafters:

    architecture  one of `VLLM_ARCHITECTURES`; the speculators form is mapped to one
    aux ids       `eagle_aux_hidden_state_layer_ids`, else the same key in `eagle_config`, else 2, L/2, L-3; then sorted
                  and deduplicated. The width of `fc` follows `num_aux_hidden_states`, not the ids.
    mask token    the first of `VLLM_MASK_TOKEN_KEYS`; later keys are ignored, even if they disagree
    norms         `eagle_config.norm_before_fc` before the top-level key; `fc_norm`, `norm_before_residual` and
                  `norm_output` at the top level, all false by default. Of a speculators config of type peagle,
                  `fc_norm` and `norm_output` are read inside `transformer_layer_config` only.
    tensors       every name gets the prefix `model.` (a name that already has it is refused), except `lm_head`, `d2t`
                  and `mask_hidden`; unknown names are refused; `t2d` is skipped
    d2t           offsets, also applied to a full vocabulary. If a reduced one lacks it, vLLM silently uses zeros
    embeddings    the file's table if it has one, else the target's, mask row included
    head          likewise
    lengths       `max_position_embeddings` is raised to the target's; older releases crash on longer texts
"""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.checkpoint.config_json import (
    AUX_KEY,
    VLLM_ARCHITECTURES,
    VLLM_MASK_TOKEN_KEYS,
    plain_settings,
    rope_parameters,
    vllm_mask_token_id,
)
from peagle.checkpoint.layouts import weights_files
from peagle.checkpoint.native import COMPACT_TENSOR, check_fit, check_state, state_of
from peagle.checkpoint.reading import Difference, Files, Reading
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

LAYER_TENSOR = re.compile(
    r"layers\.(\d+)\.("
    r"self_attn\.(?:[qkvo]_proj\.(?:weight|bias)|[qk]_norm\.weight)"
    r"|mlp\.(?:gate|up|down)_proj\.weight|(?:input|post_attention)_layernorm\.weight|hidden_norm\.weight)"
)
TOP_TENSORS = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "mask_hidden"}
NEVER_NULL = {"max_position_embeddings", "rms_norm_eps"}
"""Keys at whose null vLLM fails; elsewhere null means "not set"."""


def read_as_vllm(files: Files, target: "HFTarget", *, parallel: bool) -> Reading:
    """The drafter that vLLM would run. What it refuses, or silently reads wrong, is a Difference.

    `parallel` is `parallel_drafting` of the speculative config.
    """
    values = _vllm_values(files.config)
    tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in files.tensors.items()}
    _check_architecture(values)
    _check_names(tensors, values)
    config = _config(values, tensors, target, parallel)
    check_fit(config, target, files.directory)
    _check_tensors(config, values, tensors)
    state = state_of(config, tensors, target)
    with torch.device("meta"):  # nothing is allocated
        drafter = Drafter(config, target.embedding_VD, target.head_VD)
    check_state(state, drafter, weights_files(files.directory)[0])
    return Reading(config, state)


def _vllm_values(values: dict[str, Any]) -> dict[str, Any]:
    """The flat config vLLM works with; of the speculators form only the keys vLLM copies."""
    kind = values.get("speculators_model_type")
    if kind is None:
        return values
    if kind not in ("peagle", "eagle3"):
        raise Difference(f"speculators_model_type is {kind!r}", "vLLM runs the types peagle and eagle3")
    inner = values.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise Difference("transformer_layer_config is missing", "vLLM takes the layers' sizes from it")
    taken = inner | {key: values[key] for key in ("target_hidden_size", AUX_KEY) if values.get(key)}
    taken["draft_vocab_size"] = values.get("draft_vocab_size")
    taken["norm_before_residual"] = values.get("norm_before_residual", kind == "eagle3")
    taken["norm_before_fc"] = values.get("norm_before_fc", False)
    if kind == "eagle3":
        taken |= {key: values.get(key, False) for key in ("fc_norm", "norm_output")}
    elif "mask_token_id" not in values:
        raise Difference("mask_token_id is missing", "vLLM reads it at the top level of a speculators config")
    else:
        taken["pard_token"] = values["mask_token_id"]
    family = "Qwen3" if taken.get("model_type") == "qwen3" else "Llama"
    taken["architectures"] = [f"{'Peagle' if kind == 'peagle' else 'Eagle3'}{family}ForCausalLM"]
    return taken


def _check_architecture(values: dict[str, Any]) -> None:
    names = values.get("architectures") or []
    if not any(name in VLLM_ARCHITECTURES for name in names):
        raise Difference(
            f"architectures is {names}, which vLLM does not know",
            f"the config was written for another framework; vLLM's names: {', '.join(VLLM_ARCHITECTURES)}",
        )


def _check_names(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    num_layers = values.get("num_hidden_layers", 0)
    for name in sorted(tensors):
        layer = LAYER_TENSOR.fullmatch(name)
        is_layer = layer is not None and int(layer[1]) < num_layers
        is_norm = re.fullmatch(r"fc_norm\.\d+\.weight|input_norm\.weight", name) is not None
        if is_layer or is_norm or name in TOP_TENSORS:
            continue
        if name.startswith("model."):
            cause = "the keys carry the prefix `model.`, which vLLM adds itself; strip it, or use `peagle export`"
        elif name == COMPACT_TENSOR:
            cause = "this is the compact form, which only peagle reads; `peagle export` writes vLLM's"
        elif layer is not None:
            cause = f"num_hidden_layers is {num_layers} in config.json"
        else:
            cause = "the file is from another framework; vLLM refuses unknown names"
        raise Difference(f"vLLM has no place for the tensor {name!r}", cause)


def _config(values: dict[str, Any], tensors: dict[str, Tensor], target: "HFTarget", parallel: bool) -> DrafterConfig:
    eagle = values.get("eagle_config") or {}
    values = {key: value for key, value in values.items() if value is not None or key in NEVER_NULL}
    values["norm_before_fc"] = eagle.get("norm_before_fc", values.get("norm_before_fc", False))
    try:
        sliding = [kind == "sliding_attention" for kind in values.get("layer_types") or ()]
        layers = tuple(index for index, is_sliding in enumerate(sliding) if is_sliding)
        return DrafterConfig(
            **plain_settings(values, target),
            aux_layer_ids=_aux_layer_ids(values, eagle, target),
            parallel=parallel,
            mask_token_id=_mask_token_id(values) if parallel else None,
            qk_norm="Qwen3" in str(values.get("architectures")),
            sliding_window=int(values.get("sliding_window") or 0) if layers else 0,
            sliding_layers=layers,
            rope_parameters=rope_parameters(values),
            embeddings="own" if "embed_tokens.weight" in tensors else "shared",
            head="own" if "lm_head.weight" in tensors else "shared",
        )
    except KeyError as error:
        raise Difference(
            f"config.json lacks {error.args[0]!r}", "it is not a drafter's config, or is truncated"
        ) from error
    except (TypeError, ValueError) as error:
        message = error.message if isinstance(error, ConfigError) else str(error)
        raise Difference(f"config.json: {message}", "the config was edited or converted wrongly") from error


def _aux_layer_ids(values: dict[str, Any], eagle: dict[str, Any], target: "HFTarget") -> tuple[int, ...]:
    found = values.get(AUX_KEY) or eagle.get(AUX_KEY)
    ids = tuple(sorted(set(found or (2, target.num_layers // 2, target.num_layers - 3))))
    count = values.get("num_aux_hidden_states") or len(eagle.get(AUX_KEY) or ()) or 3
    if count != len(ids):
        raise Difference(
            f"vLLM would read {len(ids)} target states (layers {list(ids)}) into an fc built for {count}",
            "num_aux_hidden_states and the ids disagree, or ids repeat; vLLM deduplicates them",
        )
    return ids


def _mask_token_id(values: dict[str, Any]) -> int:
    found = vllm_mask_token_id(values)
    if found is None:
        raise Difference(
            f"no mask token: config.json has none of {', '.join(VLLM_MASK_TOKEN_KEYS)}",
            "the key was lost or renamed in a conversion; vLLM refuses to draft in parallel without it",
        )
    return int(found)


def _check_tensors(config: DrafterConfig, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Faults with a specific cause; `check_state` finds the rest."""
    for name, switch in (("fc_norm.0.weight", "fc_norm"), ("input_norm.weight", "norm_before_fc")):
        if name in tensors and not getattr(config, switch):
            cause = f"the norm flag {switch} was flipped or lost in a conversion"
            if switch == "fc_norm" and "Peagle" in str(values.get("architectures")):
                cause = "vLLM ignores fc_norm in a speculators config of type peagle; use `peagle export --to vllm`"
            raise Difference(f"{switch} is false as vLLM reads config.json, but the file holds {name!r}", cause)
    if config.parallel and "mask_hidden" not in tensors:
        raise Difference("mask_hidden is missing", "the learned placeholder state was lost; vLLM refuses to start")
    if config.draft_vocab_size < config.vocab_size and "d2t" not in tensors:
        raise Difference(
            f"d2t is missing although the draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens",
            "vLLM would silently take draft ids for target ids; export the table with the weights",
        )
    if config.draft_vocab_size < config.vocab_size and config.head == "shared":
        raise Difference(
            f"lm_head.weight is missing although the draft vocabulary has only {config.draft_vocab_size} tokens",
            "vLLM can share the target's whole head, not some rows; `peagle export` stores them",
        )
    if config.draft_vocab_size == config.vocab_size and "d2t" in tensors:
        _check_whole_map(tensors["d2t"].long(), config.vocab_size)


def _check_whole_map(d2t: Tensor, vocab_size: int) -> None:
    """Refuse a map of a full vocabulary that is not zero: vLLM adds it to draft ids, which are target ids already.

    verl stores target ids there, with which vLLM would read draft token i as token 2i.
    """
    if d2t.shape != (vocab_size,):
        raise Difference(
            f"d2t has shape {list(d2t.shape)}, config.json asks for [{vocab_size}]",
            "config.json and the weights belong to different drafters",
        )
    if torch.equal(d2t, torch.arange(vocab_size)):
        raise Difference(
            "d2t holds absolute target ids, not offsets",
            "another framework's convention; vLLM adds them to the draft ids. `peagle export` drops the table",
        )
    if bool(d2t.any()):
        raise Difference(
            "d2t is not all zeros, although the draft vocabulary is the full vocabulary",
            "the map belongs to another drafter; remove it if draft ids are target ids",
        )
