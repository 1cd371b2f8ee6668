"""Checks of the engine's settings before it starts, and of a request before it is queued."""

import logging
import operator
from collections.abc import Sequence
from dataclasses import replace

from peagle.drafter.model import Drafter
from peagle.errors import ConfigError, RequestError
from peagle.kernels.candidate_tree import MAX_NODES
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import CPU_MAX_LENGTH, GPU_MAX_LENGTH, TREE_DEPTH, TREE_NODES, EngineConfig
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)


def as_ids(prompt_ids: Sequence[int]) -> list[int]:
    """Token ids as a list of ints, from any sequence of integers."""
    try:
        return [operator.index(token) for token in prompt_ids]
    except TypeError as error:
        raise RequestError(f"the prompt must be a list of token ids: {error}", hint="tokenize text first") from error


def check_types(params: SamplingParams) -> None:
    """Raise RequestError for values that would otherwise fail inside a step, and with it every request."""
    for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs", "num_draft_tokens"):
        value = getattr(params, name)
        if value is not None and not isinstance(value, int):
            raise RequestError(f"{name} must be a whole number, got {value!r}")
    for name in ("logit_bias", "stop_token_ids"):
        if not all(isinstance(token, int) for token in getattr(params, name)):
            raise RequestError(f"{name} must contain token ids, got {getattr(params, name)!r}")
    stop: object = params.stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise RequestError(f"stop must be a list of strings, got {params.stop!r}")


def check_drafts(
    drafter: Drafter | None, num_draft_tokens: int | None, config: EngineConfig
) -> tuple[int, EngineConfig]:
    """Draft tokens per step, and the settings. By default a drafter drafts a tree, if it can."""
    if drafter is None:
        if num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens={num_draft_tokens} needs a drafter",
                hint="pass a drafter, or omit num_draft_tokens",
            )
        return 0, config
    if num_draft_tokens is None:
        num_draft_tokens = drafter.config.usual_num_draft_tokens
        if drafter.config.parallel and config.tree_nodes is None and not config.assumed_acceptance:
            num_draft_tokens = min(TREE_DEPTH, drafter.config.num_draft_tokens or num_draft_tokens)
            config = replace(config, tree_nodes=TREE_NODES)
        return num_draft_tokens, config
    if num_draft_tokens < 0:
        raise ConfigError(f"num_draft_tokens must be at least 0, got {num_draft_tokens}")
    if num_draft_tokens == 0:
        raise ConfigError(
            "num_draft_tokens=0 contradicts the given drafter", hint="omit the drafter, or use at least 1"
        )
    if num_draft_tokens > MAX_NODES:
        raise ConfigError(f"num_draft_tokens={num_draft_tokens} exceeds the limit of {MAX_NODES}")
    drafter.check_num_draft_tokens(num_draft_tokens)
    return num_draft_tokens, config


def check_max_length(config: EngineConfig, target: HFTarget, is_gpu: bool) -> int:
    if config.max_length is None:
        return min(target.max_length, GPU_MAX_LENGTH if is_gpu else CPU_MAX_LENGTH)
    if config.max_length > target.max_length:
        raise ConfigError(
            f"max_length={config.max_length} exceeds the {target.max_length} tokens of target {target.name!r}",
            hint=f"use at most {target.max_length}",
        )
    return config.max_length


class TrainedLength:
    """Warns of the first sequence that is longer than the texts the drafter was trained on, as its card says."""

    def __init__(self, drafter: Drafter | None) -> None:
        card = None if drafter is None else drafter.card
        self._max_length = None if card is None else card.max_length

    def check(self, num_tokens: int) -> None:
        if self._max_length is None or num_tokens <= self._max_length:
            return
        log.warning(
            "a sequence of %d tokens exceeds the %d that the drafter was trained for, so fewer drafts may be accepted; "
            "measure it with `peagle eval --prompts FILE`, or train on longer rows with `peagle train --max-length %d`",
            num_tokens,
            self._max_length,
            1 << (num_tokens - 1).bit_length(),
        )
        self._max_length = None
