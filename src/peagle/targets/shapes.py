"""The shapes of known models, and targets of any shape with random weights: for measurements without a download."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import CapacityError, ConfigError, nearest

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

_LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3.1 8B and Llama 3.2 1B
    "llama-8b": _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "llama-1b": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    # the built-in target
    "smollm2-135m": _LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    # the models of the catalog, text only
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "gemma-4-31b": {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
    },
}


def read_shape(name: str) -> dict[str, Any]:
    """The config for --dummy: a named shape, or a config.json."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"no shape {name!r}: neither a known name nor a file",
            hint=f"{nearest(name, SHAPES)} or pass a model's config.json",
        )
    try:
        settings = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", hint="pass a model's config.json") from error
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ConfigError(f"{path} has no model_type", hint="pass the config.json of a transformers causal LM")
    return settings


def dummy_target(
    name: str, *, dtype: str = "auto", device: str = "auto", quantize: str | None = None, **others: Any
) -> "HFTarget":
    """A target with random weights, created on the device; refused if it does not fit.

    `others` replace settings of the config, such as the number of layers.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from peagle.host_memory import available_bytes
    from peagle.targets import few_bit
    from peagle.targets.hf import HFTarget
    from peagle.targets.load import choose_device, choose_dtype

    settings = read_shape(name) | others
    model_type = settings.pop("model_type")
    chosen_device = choose_device(device)

    def create(place: torch.device, dtype: torch.dtype) -> Any:
        with place:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)

    nowhere = torch.device("meta")
    try:
        config = AutoConfig.for_model(model_type, **settings)
        empty = create(nowhere, torch.float32)
    except Exception as error:  # transformers may raise anything for an inconsistent config
        raise ConfigError(
            f"transformers cannot build a causal LM from {name}: {error}", hint="pass the config of a text model"
        ) from error
    chosen_dtype = choose_dtype(dtype, chosen_device, few_bit.num_bytes(empty))
    empty.to(chosen_dtype)
    if quantize is not None:
        few_bit.check_quantize(quantize, chosen_device, chosen_dtype)
        few_bit.quantize_model(empty, quantize)
    num_bytes = few_bit.num_bytes(empty)
    room = torch.cuda.mem_get_info(chosen_device)[0] if chosen_device.type == "cuda" else available_bytes()
    if num_bytes > room:
        raise CapacityError(
            f"the weights of {name} take {num_bytes / 2**30:.1f} GiB, but {chosen_device} has {room / 2**30:.1f} GiB",
            hint="choose a smaller shape, or "
            + ("--dtype bfloat16" if chosen_dtype.itemsize > 2 else "--quantize int4"),
        )
    if quantize is None:
        model = create(chosen_device, chosen_dtype)
    else:
        model = few_bit.create_quantized(create(nowhere, chosen_dtype), quantize, chosen_device)
    one_token = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=one_token, unk_token="?", clean_up_tokenization_spaces=False)
    return HFTarget(model, tokenizer, name=f"{Path(name).stem} (random weights)")
