"""`peagle.LLM`: a target, its drafter and an engine in one object, for offline generation.

llm = peagle.LLM()                                  # the embedded target and its drafter
outputs = llm.generate(["Once upon a time"], peagle.SamplingParams(max_tokens=64))
print(outputs[0].text)
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from peagle.checkpoint.native import load_drafter
from peagle.checkpoint.pairing import target_of
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import RequestOutput
from peagle.errors import ConfigError, PeagleError, RequestError, nearest
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.tokenizer import render_chat
from peagle.worker.captured_steps import Progress, StepTimes

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Completes prompts, many at a time. It owns the engine.

    `close` (or `with`) frees its memory; on a GPU nothing else does.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | HFTarget | None = None,
        drafter: str | os.PathLike[str] | Drafter | Literal["auto"] | None = "auto",
        num_draft_tokens: int | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantize: str | None = None,
        allow_mismatch: bool = False,
        progress: Progress = lambda *_: None,
        **settings: Any,
    ) -> None:
        """Load the models, unless they are loaded already, and start the engine.

        target: None takes the target on the drafter's card, or the embedded default without a drafter.
        quantize: the form of the target's weights, as for `load_target`.
        drafter: "auto" takes the drafter that ships with the target, or the catalog's for the target and `max_length`,
        if there is one. None: plain decoding.
        num_draft_tokens: the most draft tokens per step, as a chain. Default: a tree of 31 candidates, up to 8 deep, or
        the drafter's usual chain if it cannot draft trees. Each step verifies those that pay.
        settings: fields of `EngineConfig`.
        """
        known = EngineConfig.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}", hint=nearest(name, known))
        config = EngineConfig(**settings)
        if target is None and isinstance(drafter, str | os.PathLike) and drafter != "auto" and num_draft_tokens != 0:
            target = target_of(os.fspath(drafter))
        if not isinstance(target, HFTarget):
            target = load_target(target, dtype=dtype, device=device, quantize=quantize)
        if num_draft_tokens == 0:
            if drafter not in ("auto", None):
                raise ConfigError("num_draft_tokens=0 contradicts the given drafter", hint="omit one of them")
            drafter = None
        if drafter == "auto":
            drafter = target.drafter_for(config.max_length)
            if drafter is None and num_draft_tokens is not None:
                raise ConfigError(f"no drafter ships for {target.name!r}", hint="pass one, or train one: peagle train")
        if drafter is not None and not isinstance(drafter, Drafter):
            drafter = load_drafter(os.fspath(drafter), target, allow_mismatch=allow_mismatch)
        self.target, self.drafter = target, drafter
        self.engine = Engine(target, drafter, num_draft_tokens, config, progress)

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, given as text or token ids; one output per prompt, in order."""
        rendered = [self._token_ids(prompt) for prompt in _as_list(prompts)]
        return self._run(rendered, params)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete conversations, each a list of {"role", "content"}, with the target's chat template."""
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        several: list[Any] = [conversations] if is_one else list(conversations)
        rendered = [render_chat(self.tokenizer, list(messages)) for messages in several]
        return self._run(rendered, params)

    def step_times(self, batch: int) -> StepTimes | None:
        """Device time per decode step of `batch` requests, and of its halves; None on a CPU."""
        return self.engine.step_times(batch)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt, verbose=False)["input_ids"])
        return list(prompt)

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        each = list(_params_of(prompts, params))
        ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for prompt_ids, own in zip(prompts, each, strict=True):
                ids.append(self.engine.add(prompt_ids, own))
            while self.engine.has_work:
                outputs |= {output.request_id: output for output in self.engine.step()}
        except PeagleError:
            for request_id in ids:  # if one prompt is refused, abort the others
                self.engine.abort(request_id)
            raise
        except BaseException:
            self.engine.reset()
            raise
        return [outputs[request_id] for request_id in ids]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_of(
    prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        yield from [params or SamplingParams()] * len(prompts)
        return
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(prompts)} prompts but {len(params)} sampling parameters",
            hint="pass one for all, or one per prompt",
        )
    yield from params
