"""What answers requests: our own engine in this process, or vLLM behind it."""

import time
from abc import ABC, abstractmethod
from typing import Any

from peagle.server.errors import HttpError
from peagle.server.metrics import Metrics


class Backend(ABC):
    """Its names, limits and metrics, and what the server's lifecycle calls. It belongs to one event loop."""

    method: str | None
    """how it drafts; None: plain decoding"""
    num_draft_tokens: int
    drafter_name: str | None
    max_length: int | None
    near_tie: float | None = None
    """gap of log-probabilities up to which rounding may decide between two tokens, if known"""
    precision: str | None = None
    """of weights and computation, if known"""
    engine_name: str | None = None
    """name and version of the process behind it, if there is one"""

    def __init__(self, names: tuple[str, ...], target_name: str, metrics: Metrics) -> None:
        self.names, self.target_name, self.metrics = names, target_name, metrics
        self.created = int(time.time())

    @property
    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    async def warm_up(self) -> None:
        """Run one request, so that one-time work is done. A backend that fails here is never ready."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def metrics_text(self) -> bytes: ...

    def describe(self) -> str:
        """How it decodes, for the log."""
        how = f"{self.method} with {self.num_draft_tokens} draft tokens" if self.method else "plain decoding"
        return ", ".join(
            filter(None, (self.engine_name, self.precision, how, f"at most {self.max_length} tokens per sequence"))
        )

    def check_model(self, name: str | None) -> None:
        """Refuse an unknown model name. No name means the only target there is."""
        if name and name not in self.names:
            message = f"the model {name[:200]!r} does not exist; this server serves {', '.join(self.names)}"
            raise HttpError(404, message, param="model", code="model_not_found")

    def model_entry(self, name: str) -> dict[str, Any]:
        """The model object of /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "peagle",
            "root": self.target_name,
            "parent": None,
            "max_model_len": self.max_length,
            "permission": [],
            "peagle": ({"engine": self.engine_name} if self.engine_name else {})
            | {
                "method": self.method,
                "num_draft_tokens": self.num_draft_tokens,
                "max_num_draft_tokens": self.num_draft_tokens,
                "drafter": self.drafter_name,
                "max_length": self.max_length,
            }
            | ({"precision": self.precision} if self.precision else {})
            | ({"near_tie": self.near_tie} if self.near_tie else {}),
        }
