"""Keeps an engine full from a source of jobs that may depend on earlier answers: the way training text is made."""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from peagle.engine.config import EngineConfig
from peagle.engine.engine import Engine
from peagle.engine.recorded_steps import Progress
from peagle.targets.hf import HFTarget

if TYPE_CHECKING:
    from peagle.training.generation import Job, NextJobs

log = logging.getLogger(__name__)

GPU_BULK_BATCH = 1024
WAITING_SHARE = 8
"""One more request for so many running ones waits, so that a row that gets free is taken in the next step."""


class FedAnswer(NamedTuple):
    """An answer as `peagle.training.generation` wants it."""

    job: "Job"
    token_ids: Sequence[int]
    is_ended: bool


class Feed:
    """An engine of its own for one target, without drafts: where every row of the batch is taken, they do not pay.

    The target is lent to it until `close` (or the end of `with`).
    """

    def __init__(
        self,
        target: HFTarget,
        *,
        max_length: int,
        max_batch: int | None = None,
        progress: Progress = lambda *_: None,
        **settings: Any,
    ) -> None:
        if max_batch is None and target.device.type == "cuda":
            max_batch = GPU_BULK_BATCH
        config = EngineConfig(max_batch=max_batch, max_length=max_length, **settings)
        self.target = target
        self.engine = Engine(target, None, 0, config, progress)
        self.max_length = self.engine.max_length
        max_batch = self.engine.scheduler.config.max_batch
        self._max_jobs = max_batch + max_batch // WAITING_SHARE

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, next_jobs: "NextJobs") -> Iterator[list[FedAnswer]]:
        """Yield what each step finished, often nothing, until `next_jobs` gives no jobs and none is running.

        Left early, by an error or a `break`, it drops what is still running.
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
                    FedAnswer(
                        running.pop(output.request_id),
                        output.outputs[0].token_ids,
                        output.outputs[0].finish_reason == "stop",
                    )
                    for output in self.engine.step()
                ]
        finally:
            if running:
                self.engine.reset()
