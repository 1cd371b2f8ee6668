"""Stands between peagle and a server that it started, so that the server never outlives it.

Run as a script: `python -I guard.py GRACE_SECONDS COMMAND...`. The command runs in a session of its own. It is ended,
with every process of its session's group, when this process gets SIGTERM, when standard input closes (whoever holds
the other end has gone, in whatever way), or when the command itself has ended and left children behind.

It uses the standard library alone and imports nothing of the package: it must start in milliseconds and not fail.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

SIGNALLED = 128
NOT_STARTED = 127


class Guard:
    def __init__(self, grace_seconds: float, command: list[str]) -> None:
        self._grace_seconds, self._command = grace_seconds, command
        self._asked = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)
        try:
            self._child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            print(f"cannot start {self._command[0]}: {error.strerror}", file=sys.stderr)
            return NOT_STARTED
        threading.Thread(target=self._watch_input, daemon=True).start()
        threading.Thread(target=self._end_when_asked, daemon=True).start()
        status = self._child.wait()
        self._signal_group(signal.SIGKILL)
        return SIGNALLED - status if status < 0 else status

    def _ask(self, _: int, __: FrameType | None) -> None:
        self._asked.set()

    def _watch_input(self) -> None:
        while os.read(0, 4096):
            pass
        self._asked.set()

    def _end_when_asked(self) -> None:
        self._asked.wait()
        assert self._child is not None
        self._child.terminate()
        deadline = time.monotonic() + self._grace_seconds
        while self._child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


if __name__ == "__main__":
    sys.exit(Guard(float(sys.argv[1]), sys.argv[2:]).run())
