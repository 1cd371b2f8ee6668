"""A job's answers in OpenAI's format, one document or a stream of chunks: what chat and completions share."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar

from peagle import __version__
from peagle.server.jobs import Choice, Job
from peagle.server.protocol import ChatBody, CompletionBody, StreamOptions
from peagle.server.sse import DONE, event

if TYPE_CHECKING:
    from peagle.engine.outputs import Update
    from peagle.server.service import Service

FINGERPRINT = f"peagle-{__version__}"


class Writer(ABC):
    """Formats a job's answers for one route."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    """value of `object` in a document and in a chunk"""

    def __init__(self, service: "Service", job: Job, body: ChatBody | CompletionBody) -> None:
        self._service, self.job, self._body = service, job, body
        self._options = body.stream_options or StreamOptions()
        self._wants_details = body.speculation is not None and body.speculation.details
        self._wants_all = job.params.logprobs is not None or body.return_token_ids or self._wants_details
        """whether every token needs a chunk, even one without text"""

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """The entry of a finished answer."""

    @abstractmethod
    def _chunks(self, index: int, update: "Update", is_last: bool) -> list[dict[str, Any]]:
        """The chunks for one step of an answer. `is_last`: it ends the last open answer."""

    def whole(self) -> dict[str, Any]:
        document = self._frame(self.WHOLE, [self._choice(index) for index in range(len(self.job.choices))])
        return document | {"usage": self._usage(), "metrics": self.job.metrics_block()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: one per step and answer that has something to show."""
        job, num_open = self.job, len(self.job.choices)
        with self._service.running(job):
            async with aclosing(job.updates()) as updates:
                async for index, update in updates:
                    num_open -= update.finish_reason is not None
                    chunks = self._chunks(index, update, is_last=not num_open)
                    if chunks:
                        yield b"".join(map(event, chunks))
        if self._options.include_usage:
            yield event(self._frame(self.CHUNK, []) | {"usage": self._usage(), "metrics": job.metrics_block()})
        yield DONE

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.job.job_id,
            "object": kind,
            "created": self.job.created,
            "model": self._body.model or self._service.names[0],
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.job.usage()
        if self._service.num_draft_tokens:
            usage["metrics"] = {"speculative_decoding": self.job.speculative_decoding()}
        return usage

    def _details(self, source: "Choice | Update") -> dict[str, Any]:
        """Text and kind (accepted, tolerated, recovered, bonus) of each token, if the client wants them."""
        if not self._wants_details:
            return {}
        tokens = zip(source.texts, source.kinds, strict=True)
        return {"speculation": {"tokens": [{"text": text, "kind": kind} for text, kind in tokens]}}

    def _chunk(self, choice: dict[str, Any], update: "Update | None" = None, is_last: bool = False) -> dict[str, Any]:
        """A chunk with one choice, and the details and token counts that the client wants with every chunk."""
        chunk = self._frame(self.CHUNK, [choice])
        if update is not None and self._wants_details:
            counts = {"num_drafted": update.num_drafts, "num_accepted": update.num_accepted}
            chunk["speculation"] = self._details(update)["speculation"] | counts
            if is_last:
                chunk["metrics"] = self.job.metrics_block()
        if self._options.continuous_usage_stats:
            chunk["usage"] = self.job.usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for an impossible token."""
    return max(logprob, -9999.0)
