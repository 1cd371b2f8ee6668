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

SIGNALLED = 128
NOT_STARTED = 127


def run(grace_seconds: float, command: list[str]) -> int:
    """Run the command, and return its exit status as a shell would."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED

    def watch_input() -> None:
        while os.read(0, 4096):
            pass
        asked.set()

    def end_when_asked() -> None:
        asked.wait()
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
        kill_group()

    def kill_group() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=watch_input, daemon=True).start()
    threading.Thread(target=end_when_asked, daemon=True).start()
    status = child.wait()
    kill_group()
    return SIGNALLED - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
