"""What a job brings, in OpenAI's form: one document, or the chunks of a stream. What routes write alike is here."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar

from peagle import __version__
from peagle.server.jobs import Choice, Job
from peagle.server.protocol import ChatBody, CompletionBody
from peagle.server.streaming import DONE, event

if TYPE_CHECKING:
    from peagle.engine.outputs import Update
    from peagle.server.service import Service

FINGERPRINT = f"peagle-{__version__}"


class Writer(ABC):
    """Puts a job's answers into the form of a route."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    """what `object` is called in a document, and in a chunk"""

    def __init__(self, service: "Service", job: Job, body: ChatBody | CompletionBody) -> None:
        self._service, self._job = service, job
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_running_usage = options is not None and options.continuous_usage_stats
        self._model = body.model or service.names[0]

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """An answer that is finished."""

    @abstractmethod
    def _chunks(self, index: int, update: "Update", is_last: bool) -> list[dict[str, Any]]:
        """What a step of an answer brought to show; `is_last`: no answer goes on after it."""

    def whole(self) -> dict[str, Any]:
        document = self._frame(self.WHOLE, [self._choice(index) for index in range(len(self._job.choices))])
        return document | {"usage": self._usage(), "metrics": self._job.metrics_block()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks, one event for each step of each answer that brought something to show."""
        service, job = self._service, self._job
        service.begin(job)
        num_open = len(job.choices)
        try:
            async with aclosing(job.updates()) as updates:
                async for index, update in updates:
                    num_open -= update.finish_reason is not None
                    chunks = self._chunks(index, update, is_last=not num_open)
                    if chunks:
                        yield b"".join(map(event, chunks))
        finally:
            service.end(job)
        if self._wants_usage:
            yield event(self._frame(self.CHUNK, []) | {"usage": self._usage(), "metrics": job.metrics_block()})
        yield DONE

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.job_id,
            "object": kind,
            "created": self._job.created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage()
        if self._service.num_draft_tokens:
            usage["metrics"] = {"speculative_decoding": self._job.speculative_decoding()}
        return usage

    def _add_usage(self, chunk: dict[str, Any]) -> None:
        """The tokens so far, where they are asked for with every chunk."""
        if self._wants_running_usage:
            chunk["usage"] = self._job.usage()
        elif self._wants_usage:
            chunk["usage"] = None


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot be."""
    return max(logprob, -9999.0)


def details(choice: Choice) -> list[dict[str, str]]:
    """Each token's text and how it came about."""
    return [{"text": text, "kind": kind} for text, kind in zip(choice.texts, choice.kinds, strict=True)]


def step_details(update: "Update") -> dict[str, Any]:
    tokens = [{"text": text, "kind": kind} for text, kind in zip(update.texts, update.kinds, strict=True)]
    return {"tokens": tokens, "num_drafted": update.num_drafts, "num_accepted": update.num_accepted}
