"""Runs generation jobs on the engine and keeps it full; new jobs may depend on finished answers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from peagle.data.progress import RunProgress
from peagle.engine.engine import Engine
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

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
    """whether it ended by itself, not at a limit"""


NextJobs = Callable[[int], Sequence[Job]]
"""Returns up to the given number of jobs; an empty result means none at the moment."""


class Generator(contextlib.AbstractContextManager["Generator"]):
    """An engine without drafts, for large batches where drafting does not pay. Holds the target while it is open."""

    def __init__(
        self, target: HFTarget, *, max_length: int, max_batch: int | None = None, progress: RunProgress | None = None
    ) -> None:
        if max_batch is None and target.device.type == "cuda":
            max_batch = GPU_BATCH
        config = EngineConfig(max_batch=max_batch, max_length=max_length)
        self.target = target
        self.engine = Engine(target, None, 0, config, (progress or RunProgress()).engine_starting)
        max_batch = self.engine.scheduler.config.max_batch
        self._max_jobs = max_batch + max_batch // WAITING_SHARE

    def __exit__(self, *_: object) -> None:
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


def check_max_length(max_length: int, target: HFTarget) -> None:
    if max_length > target.max_length:
        raise ConfigError(
            f"max_length {max_length} exceeds the target's {target.max_length}",
            hint=f"use at most {target.max_length}",
        )
