"""Runs a command so that it never outlives peagle.

As a script: `python -I guard.py GRACE_SECONDS COMMAND...`. The command runs in its own session. Its whole process
group is ended when the guard gets SIGTERM, when standard input closes (peagle has died, however that happened), or
when the command ends and leaves children behind.

Standard library only: it must start in milliseconds.
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
