"""Records finished requests of a server, to adapt a drafter to its traffic. Off by default, and bounded on disk."""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.engine.outputs import RequestOutput
    from peagle.sampling_params import SamplingParams

log = logging.getLogger(__name__)

WARM_UP = "warm-up"
"""Id of the request that a server sends itself."""
NUM_FILES = 8
"""Files that share the limit; the oldest is deleted as a whole."""


@dataclass(frozen=True)
class RecordOptions:
    """Recording of traffic."""

    record: Path | None = None
    """directory to record finished requests in: id, time, lengths and acceptance, no text; default: none is recorded"""
    record_text: bool = False
    """record the token ids of prompts and answers, too. They are your users' text; `peagle adapt --data` takes them"""
    record_mb: int = 256
    """most megabytes on disk; the oldest records are deleted"""

    def __post_init__(self) -> None:
        if self.record_mb < 1:
            raise ConfigError(f"record_mb must be at least 1, got {self.record_mb}")
        if self.record is None and self.record_text:
            raise ConfigError("--record-text requires --record", hint="pass --record DIR")


class Recorder:
    """Appends a JSON line per answer. Call it with each finished request.

    Files and directory are for the owner alone. A disk that fails ends the recording with a warning, never a request.
    """

    def __init__(self, directory: Path, *, with_text: bool = False, max_bytes: int = 256 * 2**20) -> None:
        self.directory, self._with_text, self._max_bytes = directory, with_text, max_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot record to {directory}: {error.strerror}", hint="pass another --record"
            ) from error
        numbers = [int(path.stem.rpartition("-")[2]) for path in self.files()]
        self._number = max(numbers, default=-1)
        self._size = max_bytes  # begin a new file
        self._is_on = True

    def files(self) -> list[Path]:
        """The files, oldest first. `peagle adapt` takes the directory if they have text."""
        return sorted(self.directory.glob("traffic-*.jsonl"))

    def __call__(self, output: "RequestOutput", params: "SamplingParams") -> None:
        if not self._is_on or output.request_id == WARM_UP:
            return
        try:
            self._append("".join(json.dumps(row) + "\n" for row in self._rows(output, params)).encode())
        except OSError as error:
            self._is_on = False
            log.warning("recording to %s ended: %s; requests are served as before", self.directory, error.strerror)

    def _rows(self, output: "RequestOutput", params: "SamplingParams") -> list[dict[str, Any]]:
        # A drafter's acceptance can be measured only where the target's argmax is unchanged.
        is_own = not params.adjusts_logits and params.tolerance >= 1
        common = {
            "id": output.request_id,
            "time": round(time.time(), 3),
            "num_prompt_tokens": len(output.prompt_token_ids),
            "temperature": params.temperature if is_own else None,
            "acceptance_length": round(output.metrics.acceptance.acceptance_length, 3),
        }
        rows = []
        for answer in output.outputs:
            row = common | {"num_answer_tokens": len(answer.token_ids), "finish_reason": answer.finish_reason}
            if self._with_text:
                row |= {"prompt_ids": list(output.prompt_token_ids), "answer_ids": list(answer.token_ids)}
            rows.append(row)
        return rows

    def _append(self, content: bytes) -> None:
        most = self._max_bytes // NUM_FILES
        if len(content) > most:
            return
        if self._size + len(content) > most:
            self._number, self._size = self._number + 1, 0
            for path in self.files()[: -(NUM_FILES - 1)]:
                path.unlink()
        path = self.directory / f"traffic-{self._number:08d}.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        self._size += len(content)
