"""How close plain decoding comes to the memory-bandwidth limit, for any architecture, with random weights.

A decode step reads every weight it uses once, so it takes at least weight bytes / memory bandwidth. The bandwidth is
measured in the same run.
"""

import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.cells import CellResult, rounded
from peagle.errors import CapacityError, ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from peagle.targets.hf import HFTarget

PROMPT_TOKENS = 128
"""length of the random prompts"""
BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}
"""far larger than any cache"""
MEASURED_SECONDS = 0.5

_LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
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


def dummy_target(name: str, *, dtype: str = "auto", device: str = "auto") -> "HFTarget":
    """A target with random weights, created on the device; refused if it does not fit."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from peagle.host_memory import available_bytes
    from peagle.targets.hf import HFTarget
    from peagle.targets.load import choose_device, choose_dtype

    settings = dict(read_shape(name))
    model_type = settings.pop("model_type")
    chosen_device = choose_device(device)
    try:
        config = AutoConfig.for_model(model_type, **settings)
        with torch.device("meta"):
            empty: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers may raise anything for an inconsistent config
        raise ConfigError(
            f"transformers cannot build a causal LM from {name}: {error}", hint="pass the config of a text model"
        ) from error
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    chosen_dtype = choose_dtype(dtype, chosen_device, 4 * num_parameters)
    num_bytes = num_parameters * chosen_dtype.itemsize
    room = torch.cuda.mem_get_info(chosen_device)[0] if chosen_device.type == "cuda" else available_bytes()
    if num_bytes > room:
        raise CapacityError(
            f"the weights of {name} take {num_bytes / 2**30:.1f} GiB, but {chosen_device} has {room / 2**30:.1f} GiB",
            hint="choose a smaller shape, or --dtype bfloat16",
        )
    with torch.device(chosen_device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=chosen_dtype)
    one_token = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=one_token, unk_token="?", clean_up_tokenization_spaces=False)
    return HFTarget(model, tokenizer, name=f"{Path(name).stem} (random weights)")


def random_prompts(vocab_size: int, num_prompts: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


def weight_bytes_per_step(model: "PreTrainedModel", concurrency: int = 1) -> int:
    """Bytes of weights that one step reads.

    An untied embedding does not count: only single rows are read. Of experts, counts the expected number that the
    step's tokens select if all are equally likely.
    """
    config: Any = model.config.get_text_config()
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = 1 - (1 - chosen / num_experts) ** concurrency if num_experts and chosen else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and embedding is not head:
            continue
        num_bytes = parameter.numel() * parameter.element_size()
        total += num_bytes * share if ".experts." in f".{name}." else num_bytes
    return round(total)


def measure_bandwidth(device: "torch.device", num_bytes: int | None = None) -> dict[str, Any]:
    """Bytes per second of copying and reading a buffer much larger than any cache, and the higher of the two."""
    import torch
    from torch.utils.benchmark import Timer

    if num_bytes is None:
        num_bytes = BUFFER_BYTES[device.type]
        if device.type == "cuda":
            num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)

    def per_second(num_bytes: int, run: Callable[[], Any]) -> int:
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        with torch.cuda.device_of(source):
            return round(num_bytes / timer.blocked_autorange(min_run_time=MEASURED_SECONDS).median)

    read, copy = per_second(num_bytes, source.sum), None
    if device.type == "cuda":
        destination = torch.empty_like(source)
        copy = per_second(2 * num_bytes, lambda: destination.copy_(source))
    return {
        "bytes_per_second": max(read, copy or 0),
        "copy_bytes_per_second": copy,
        "read_bytes_per_second": read,
    }


def bandwidth_report(target: "HFTarget", bandwidth: dict[str, Any], results: Sequence[CellResult]) -> dict[str, Any]:
    """`bandwidth`, and per concurrency: the limit of a step, its time, and the fraction of the limit reached.

    The limit counts weights only. At high concurrency the KV cache is read as well, which lowers the fraction.
    If no step was steady, the mean TPOT stands in for its time.
    """
    rows = []
    for result in results:
        num_bytes = weight_bytes_per_step(target.model, result.cell.concurrency)
        limit = num_bytes / bandwidth["bytes_per_second"]
        times = [answer.seconds_per_token for answer in result.answers if answer.seconds_per_token is not None]
        seconds = result.step.wall if result.step else statistics.fmean(times) if times else None
        rows.append(
            {
                "concurrency": result.cell.concurrency,
                "weight_bytes": num_bytes,
                "limit_ms": round(1e3 * limit, 4),
                "step_ms": rounded(seconds, 4, 1e3),
                "fraction_of_limit": None if seconds is None else round(limit / seconds, 4),
            }
        )
    num_parameters = sum(parameter.numel() for parameter in target.model.parameters())
    return bandwidth | {"num_parameters": num_parameters, "steps": rows}
