"""Runs generation jobs on the engine and keeps it full; new jobs may depend on finished answers."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from peagle.checkpoint.native import load_drafter
from peagle.data.config import NO_DRAFTER
from peagle.data.progress import RunProgress
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

GPU_BATCH = 1024
WAITING_SHARE = 8
"""One request waits per this many running ones, so that a freed row is refilled in the next step."""


class Job(NamedTuple):
    """A prompt to continue. `tag` is returned with the answer."""

    tag: Any
    prompt_ids: list[int]
    params: SamplingParams


class Answer(NamedTuple):
    job: Job
    token_ids: Sequence[int]
    """including the end token, if any"""
    is_ended: bool
    """whether it ended on its own, not at a limit"""


NextJobs = Callable[[int], Sequence[Job]]
"""Returns up to the given number of jobs; an empty result means none at the moment."""


class Generator(contextlib.AbstractContextManager["Generator"]):
    """An engine, which drafts where that pays. Holds the target while it is open."""

    def __init__(
        self,
        target: HFTarget,
        drafter: Drafter | None = None,
        *,
        max_length: int,
        max_batch: int | None = None,
        progress: RunProgress | None = None,
    ) -> None:
        if max_batch is None and target.device.type == "cuda":
            max_batch = GPU_BATCH
        config = EngineConfig(max_batch=max_batch, max_length=max_length)
        self.target = target
        num_draft_tokens = 0 if drafter is None else None
        self.engine = Engine(target, drafter, num_draft_tokens, config, (progress or RunProgress()).engine_starting)
        max_batch = self.engine.scheduler.config.max_batch
        self._max_jobs = max_batch + max_batch // WAITING_SHARE

    def __exit__(self, *_: object) -> None:
        stats = self.engine.stats()
        found = stats.acceptance
        if found.num_drafts:
            log.info(
                "drafts: %d verified, acceptance length %.2f; by measured step times decoding took %.1f s, and would "
                "have taken %.1f s without drafts",
                found.num_drafts,
                found.acceptance_length,
                stats.decode_seconds,
                stats.plain_decode_seconds,
            )
        self.engine.close()

    def run(self, next_jobs: NextJobs) -> Iterator[list[Answer]]:
        """Yield the answers of each step, often none, until `next_jobs` returns none and none is running.

        Leaving early, by an error or a `break`, aborts the running jobs.
        """
        running: dict[str, Job] = {}
        try:
            while True:
                room = self._max_jobs - len(running)
                for job in next_jobs(room) if room else ():
                    running[self.engine.add(job.prompt_ids, job.params, wants_text=False)] = job
                if not running:
                    return
                yield [
                    Answer(
                        running.pop(output.request_id),
                        output.outputs[0].token_ids,
                        output.outputs[0].finish_reason == "stop",
                    )
                    for output in self.engine.step()
                ]
        finally:
            if running:
                self.engine.reset()


def drafter_for(target: HFTarget, name: str | None, max_length: int) -> Drafter | None:
    """The drafter to generate with. None names the target's own, if it has one; "none" decodes without drafts."""
    path = target.drafter_for(max_length) if name is None else None if name == NO_DRAFTER else name
    return None if path is None else load_drafter(path, target)


def check_max_length(max_length: int, target: HFTarget) -> None:
    if max_length > target.max_length:
        raise ConfigError(
            f"max_length {max_length} exceeds the target's {target.max_length}",
            hint=f"use at most {target.max_length}",
        )
