"""How near plain decoding comes to the limit that memory sets, for any architecture, without its weights.

A decode step has to read every weight it uses once, so it cannot take less than their bytes over the bandwidth of the
device's memory. The model is made of random numbers on the device itself, and the bandwidth is measured in the same
run.
"""

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.cells import CellResult
from peagle.errors import CapacityError, ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from peagle.targets.hf import HFTarget

PROMPT_TOKENS = 128
"""length of the random prompts"""
BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}
"""far beyond any cache between the processor and its memory"""
NUM_PASSES = 12

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
    # the embedded target
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second between the device and its memory: the better of what copying and reading reach."""

    bytes_per_second: float
    copy: float | None
    read: float | None


def read_shape(name: str) -> dict[str, Any]:
    """The settings behind --dummy: a named shape, or a config.json of transformers."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"no shape {name!r}: neither a known name nor a file",
            hint=f"{nearest(name, SHAPES)} or give a model's config.json",
        )
    try:
        settings = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", hint="give a model's config.json") from error
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ConfigError(f"{path} has no model_type", hint="give the config.json of a transformers causal LM")
    return settings


def dummy_target(name: str, *, dtype: str = "auto", device: str = "auto") -> "HFTarget":
    """A target of the shape `name` with random weights, made on the device in the dtype; refused if it cannot fit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from peagle.targets.hf import HFTarget
    from peagle.targets.load import choose_device, choose_dtype

    settings = dict(read_shape(name))
    model_type = settings.pop("model_type")
    chosen_device = choose_device(device)
    try:
        config = AutoConfig.for_model(model_type, **settings)
        with torch.device("meta"):
            empty: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a config that does not hold together breaks in transformers
        raise ConfigError(
            f"transformers cannot make a causal LM of {name}: {error}", hint="it must be the config of a text model"
        ) from error
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    chosen_dtype = choose_dtype(dtype, chosen_device, 4 * num_parameters)
    _check_fits(name, num_parameters * chosen_dtype.itemsize, chosen_device)
    with torch.device(chosen_device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=chosen_dtype)
    return HFTarget(model, _empty_tokenizer(), name=f"{Path(name).stem} (random weights)")


def _check_fits(name: str, num_bytes: int, device: "torch.device") -> None:
    import torch

    from peagle.targets.capacity import memory_bytes

    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_bytes()
    if num_bytes > room:
        raise CapacityError(
            f"the weights of {name} take {num_bytes / 2**30:.1f} GiB, but {device} has {room / 2**30:.1f} GiB",
            hint="choose a smaller shape, or --dtype bfloat16",
        )


def _empty_tokenizer() -> Any:
    """A tokenizer that knows one token: the ids of a random model mean nothing, and every other one is no text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", clean_up_tokenization_spaces=False)


def random_prompts(vocab_size: int, num_prompts: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


def weight_bytes_per_step(model: "PreTrainedModel", concurrency: int = 1) -> int:
    """Bytes of weights that one step must read.

    Of an embedding that is not also the head only single rows are read, which count as nothing. Of experts, those that
    the step's tokens are expected to choose when every choice is equally likely.
    """
    share = _expert_share(model.config.get_text_config(), concurrency)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and embedding is not head:
            continue
        num_bytes = parameter.numel() * parameter.element_size()
        total += num_bytes * share if ".experts." in f".{name}." else num_bytes
    return round(total)


def _expert_share(config: Any, concurrency: int) -> float:
    """The share of a layer's experts that `concurrency` tokens are expected to choose between them."""
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if not num_experts or not chosen:
        return 1.0
    return float(1 - (1 - chosen / num_experts) ** concurrency)


def measure_bandwidth(device: "torch.device", num_bytes: int | None = None) -> Bandwidth:
    """Copy and read a buffer much larger than any cache, several times, and take the median of each."""
    import torch

    if num_bytes is None:
        num_bytes = BUFFER_BYTES[device.type]
        if device.type == "cuda":
            num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    read = num_bytes / _seconds(lambda: source.sum(), device)
    if device.type == "cpu":
        return Bandwidth(read, None, read)
    destination = torch.empty_like(source)
    copy = 2 * num_bytes / _seconds(lambda: destination.copy_(source), device)
    return Bandwidth(max(read, copy), copy, read)


def _seconds(run: Callable[[], Any], device: "torch.device") -> float:
    """Median time of one call, on the device's own clock where it has one."""
    import torch

    for _ in range(2):
        run()
    times = []
    for _ in range(NUM_PASSES):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def bandwidth_report(target: "HFTarget", bandwidth: Bandwidth, results: Sequence[CellResult]) -> dict[str, Any]:
    """A JSON-ready record: for each concurrency the limit of a step, the step, and the fraction of the limit reached.

    The limit counts weights alone; at a high concurrency the cache is read as well, and the fraction falls for it.
    """
    rows = []
    for result in results:
        num_bytes = weight_bytes_per_step(target.model, result.cell.concurrency)
        limit = num_bytes / bandwidth.bytes_per_second
        seconds = step_seconds(result)
        rows.append(
            {
                "concurrency": result.cell.concurrency,
                "weight_bytes": num_bytes,
                "limit_ms": round(1e3 * limit, 4),
                "step_ms": None if seconds is None else round(1e3 * seconds, 4),
                "fraction_of_limit": None if seconds is None else round(limit / seconds, 4),
            }
        )
    return {
        "bytes_per_second": round(bandwidth.bytes_per_second),
        "copy_bytes_per_second": None if bandwidth.copy is None else round(bandwidth.copy),
        "read_bytes_per_second": None if bandwidth.read is None else round(bandwidth.read),
        "num_parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "steps": rows,
    }


def step_seconds(result: CellResult) -> float | None:
    """Wall time of a plain step: of undisturbed ones, or where there were none the mean time per output token."""
    if result.step is not None:
        return result.step.wall
    times = [answer.seconds_per_token for answer in result.answers if answer.seconds_per_token is not None]
    return math.fsum(times) / len(times) if times else None
