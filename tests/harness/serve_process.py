"""`peagle serve` as users start it: a process of its own."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

START_SECONDS = 120


class Process:
    """`peagle serve` as users start it; killed at the end of a `with` if it still runs."""

    def __init__(self, *arguments, port=0, **environment):
        command = [str(Path(sys.executable).with_name("peagle")), "serve", "--port", str(port), *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        self.lines = []
        self.url = None
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(START_SECONDS) and self.url, self.lines

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            found = re.match(r"listening on (http://\S+?)(,|$)", line)
            if found:
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        if not self.process.stderr.closed:
            self.end()

    def wait_ready(self):
        return self.wait_for(200)

    def wait_for(self, status):
        deadline = time.monotonic() + START_SECONDS
        while httpx.get(f"{self.url}/ping").status_code != status:
            assert time.monotonic() < deadline and self.process.poll() is None, self.lines
            time.sleep(0.05)
        return self

    def end(self, seconds=60):
        status = self.process.wait(seconds)
        self._reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()
        return status
