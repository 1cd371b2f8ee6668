"""Real processes: starting, readiness, SIGTERM under load, a second signal, kill -9 and a restart."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from harness.local_server import running, tiny_llm
from harness.serve_process import Process
from harness.tiny_models import tiny_target, write_target
from peagle.errors import ConfigError
from peagle.server.lifecycle import bind
from peagle.server.service import Service
from peagle.server.settings import ServerSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tiny target."""
    return write_target(tiny_target(num_layers=3), tmp_path_factory.mktemp("target"))


BODY = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def test_a_server_says_503_until_it_is_ready_and_why(caplog):
    release = threading.Event()

    def load():
        release.wait(30)
        return tiny_llm()

    with running(load, wait=False) as served:
        for path in ("/ping", "/health", "/v1/models"):
            response = served.http.get(path)
            assert response.status_code == 503 and "still loading" in response.json()["error"]["message"]
        assert served.http.post("/v1/completions", json=BODY).headers["retry-after"] == "1"
        assert served.http.get("/metrics").status_code == 200
        release.set()
        while served.http.get("/ping").status_code != 200:
            time.sleep(0.02)
        assert served.http.get("/health").status_code == 200


def test_a_service_that_is_ended_while_it_warms_up_is_closed(monkeypatch):
    is_warming, closed, close = threading.Event(), [], Service.close

    async def warm_up(service):
        is_warming.set()
        await asyncio.Event().wait()

    async def note_and_close(service):
        closed.append(service)
        await close(service)

    monkeypatch.setattr(Service, "warm_up", warm_up)
    monkeypatch.setattr(Service, "close", note_and_close)
    with running(wait=False) as served:
        assert is_warming.wait(30) and served.http.get("/ping").status_code == 503
    assert len(closed) == 1 and not closed[0].is_alive


def test_a_dead_engine_makes_ping_fail():
    with running() as served:
        assert served.http.get("/ping").status_code == 200
        engine = served.service.engine._engine
        engine.step = lambda: (_ for _ in ()).throw(RuntimeError("the device is lost"))
        response = served.http.post("/v1/completions", json=BODY)
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
        assert "device is lost" not in response.text, "clients are told in general words"
        response = served.http.get("/ping")
        assert response.status_code == 503 and response.json()["error"]["code"] == "server_dead"
        assert served.http.post("/v1/completions", json=BODY).status_code == 503
        assert served.http.get("/metrics").status_code == 200


def test_a_busy_port_is_found_out_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind(ServerSettings(port=port))
    assert f"cannot listen on 127.0.0.1:{port}" in str(caught.value) and "--port" in str(caught.value)


@pytest.mark.slow
def test_a_target_that_cannot_be_loaded_ends_the_process_with_its_error(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    with Process(tmp_path / "broken") as found:
        assert found.end() == 2
    assert any(line.startswith("error: ") and "broken" in line for line in found.lines), found.lines
    assert any(line.startswith("hint: ") for line in found.lines) and not any(
        "Traceback" in each for each in found.lines
    )


def test_sigterm_lets_accepted_requests_finish_and_the_status_is_0(model):
    with Process(model, "--max-batch", "2") as found:
        found.wait_ready()
        answers = []

        def ask():
            answers.append(httpx.post(f"{found.url}/v1/completions", json=BODY | {"max_tokens": 100}, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while "vllm:num_requests_running" not in (text := httpx.get(f"{found.url}/metrics").text) or not re.search(
            r"num_requests_waiting\{.*\} 2.0", text
        ):
            assert not answers, "the answers were too short for this test"
        found.process.send_signal(signal.SIGTERM)
        refused = httpx.post(f"{found.url}/v1/completions", json=BODY, timeout=60)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_draining"
        assert httpx.get(f"{found.url}/ping").status_code == 503
        for thread in threads:
            thread.join()
        assert found.end() == 0
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {len(answer.json()["choices"][0]["text"]) for answer in answers} != {0}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert found.lines[-1] == "stopped; every accepted request was answered"
    logged = [json.loads(line) for line in found.lines if line.startswith('{"time"')]
    assert [entry["completion_tokens"] for entry in logged if entry["status"] == 200] == [100] * 4


HANGS = """
import sys, time
from starlette.applications import Starlette
from peagle.server.backend import Backend
from peagle.server.lifecycle import Lifecycle, bind, serve
from peagle.server.settings import ServerSettings

class Stuck(Backend):
    is_alive, metrics_text, method, max_length = True, None, None, 1
    async def warm_up(self):
        print("warm", flush=True)
    async def close(self):
        time.sleep(60)

settings = ServerSettings(port=0, drain_seconds=0.2)
lifecycle = Lifecycle(settings, lambda: None, lambda _: Stuck(("a",), "a", None))
sys.exit(serve(Starlette(lifespan=lifecycle.lifespan), lifecycle, bind(settings)))
"""


def test_sigterm_ends_a_process_that_hangs_while_it_closes():
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "warm\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, "closing takes 60 s"
        finally:
            process.kill()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(model):
    with Process(model, "--max-length", "500") as found:
        found.wait_ready()
        body = BODY | {"max_tokens": 490, "n": 8}

        statuses = []

        def ask():
            with contextlib.suppress(httpx.HTTPError):
                statuses.append(httpx.post(f"{found.url}/v1/completions", json=body, timeout=60).status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while not re.search(r"num_requests_running\{.*\} [1-9]", httpx.get(f"{found.url}/metrics").text):
            pass
        found.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        started = time.monotonic()
        found.process.send_signal(signal.SIGINT)
        status = found.end(15)
        for thread in threads:
            thread.join()
    assert status == 128 + signal.SIGINT and time.monotonic() - started < 10
    assert not any("Traceback" in line for line in found.lines), "it is what was asked for"
    assert all(status >= 500 for status in statuses), "no answer was given out as if it were whole"
    assert "stopped without draining" in found.lines[-1]


@pytest.mark.slow
def test_clients_outlive_kill_9_and_a_restart(model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Process(model, port=port) as first:
        first.wait_ready()
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=60)
        ask = {"model": "", "prompt": "the", "max_tokens": 100, "temperature": 0, "extra_body": {"ignore_eos": True}}
        expected = client.completions.create(**ask).choices[0].text
        answers = []

        def many():
            for _ in range(2):
                answers.append(client.completions.create(**ask).choices[0].text)

        threads = [threading.Thread(target=many) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(answers) < 2:
            time.sleep(0.01)
        first.process.kill()
        first.end()
        with Process(model, port=port) as second:
            for thread in threads:
                thread.join(120)
            second.process.send_signal(signal.SIGTERM)
            assert second.end() == 0
        client.close()
    assert answers == [expected] * 8


@pytest.mark.slow
def test_sagemaker_s_environment_starts_the_same_server(model, tmp_path):
    root = tmp_path / "ml"
    root.mkdir()
    (root / "model").symlink_to(model)
    with Process(
        PEAGLE_ML_ROOT=str(root), SM_VLLM_SERVED_MODEL_NAME="mine", SM_VLLM_API_KEY="key", SM_VLLM_KV_CACHE_DTYPE="fp8"
    ) as found:
        assert found.url.startswith("http://0.0.0.0:")
        found.url = found.url.replace("0.0.0.0", "127.0.0.1")
        found.wait_ready()
        headers = {"Authorization": "Bearer key"}
        assert httpx.get(f"{found.url}/v1/models", headers=headers).json()["data"][0]["id"] == "mine"
        assert httpx.post(f"{found.url}/invocations", json=BODY).status_code == 401
        answer = httpx.post(f"{found.url}/invocations", json=BODY | {"max_tokens": 3}, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 3
        found.process.send_signal(signal.SIGTERM)
        assert found.end() == 0
    assert any("without an equivalent: --kv-cache-dtype" in line for line in found.lines)
    assert not any("Bearer" in line or '"key"' in line for line in found.lines)
