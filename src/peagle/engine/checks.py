"""What an engine refuses before it starts, and a request before it is queued."""

import operator
from collections.abc import Sequence

from peagle.drafter.model import Drafter
from peagle.engine.config import CPU_MAX_LENGTH, GPU_MAX_LENGTH, EngineConfig
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget


def as_ids(prompt_ids: Sequence[int]) -> list[int]:
    """Token ids as plain numbers, whatever holds them."""
    try:
        return [operator.index(token) for token in prompt_ids]
    except TypeError as error:
        raise RequestError(
            f"a prompt is a list of token ids here: {error}", hint="turn text into tokens first"
        ) from error


def check_types(params: SamplingParams) -> None:
    """Refuse what would only fail in the middle of a step, where it would hit every request."""
    for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs", "num_draft_tokens"):
        value = getattr(params, name)
        if value is not None and not isinstance(value, int):
            raise RequestError(f"{name} must be a whole number, got {value!r}")
    for name in ("logit_bias", "stop_token_ids"):
        if not all(isinstance(token, int) for token in getattr(params, name)):
            raise RequestError(f"{name} must name tokens by their ids, got {getattr(params, name)!r}")
    stop: object = params.stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise RequestError(f"stop must be a list of strings, got {params.stop!r}")


def check_drafts(drafter: Drafter | None, num_draft_tokens: int | None, target: HFTarget) -> int | None:
    if num_draft_tokens is None:
        if drafter is None:
            return 0
        if target.device.type != "cpu":
            raise ConfigError("num_draft_tokens None is measured on a CPU only", hint="give a number")
        return None
    if num_draft_tokens < 0:
        raise ConfigError(f"num_draft_tokens must be 0 or more, got {num_draft_tokens}")
    if drafter is None:
        if num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens is {num_draft_tokens}, but there is no drafter",
                hint="give a drafter, or leave num_draft_tokens out",
            )
        return 0
    if num_draft_tokens == 0:
        raise ConfigError(
            "num_draft_tokens is 0, but a drafter is given", hint="leave the drafter out, or use at least 1"
        )
    drafter.check_num_draft_tokens(num_draft_tokens)
    return num_draft_tokens


def check_device(config: EngineConfig, target: HFTarget) -> None:
    for name, value in (("pack", config.pack), ("quantize", config.quantize)):
        if value and target.device.type != "cpu":
            raise ConfigError(f"{name} is {value!r}, but the target is on {target.device}", hint="it is for CPUs only")
    for name, value in (("compile", config.compile), ("capture", config.capture)):
        if value and target.device.type == "cpu":
            raise ConfigError(
                f"{name} is on, but the target is on a CPU",
                hint="it is for GPUs only; on a CPU packed weights are as fast and start at once",
            )


def check_max_length(config: EngineConfig, target: HFTarget, is_gpu: bool) -> int:
    if config.max_length is None:
        return min(target.max_length, GPU_MAX_LENGTH if is_gpu else CPU_MAX_LENGTH)
    if config.max_length > target.max_length:
        raise ConfigError(
            f"max_length is {config.max_length}, but target {target.name!r} holds {target.max_length} tokens",
            hint=f"use at most {target.max_length}",
        )
    return config.max_length
