"""`peagle serve --engine vllm` as users start it, with a stub in vLLM's place: start, crash, drain, no orphans."""

import json
import os
import signal
import threading
import time

import httpx
import openai
import pytest

from harness.model_directories import write_models
from harness.serve_process import START_SECONDS, Process
from harness.stub_vllm import are_gone, stub_python
from peagle.cli.main import run
from peagle.cli.serve import Arguments, check_settings, parse, vllm_settings
from peagle.errors import ConfigError
from peagle.vllm.command import Installed
from peagle.vllm.models import Models

BODY = {"prompt": "slow", "max_tokens": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return stub_python(tmp_path_factory.mktemp("stub"))


class StubbedProcess(Process):
    """With a stub for vLLM, which is told how to behave and writes down how it was started."""

    def __init__(self, models, python, tmp_path, *more, **stub):
        self.report = tmp_path / "report.json"
        words = (models / "target", "--engine", "vllm", "--drafter", models / "drafter", *more)
        super().__init__(
            *words,
            PEAGLE_VLLM_PYTHON=str(python),
            PEAGLE_CACHE=str(tmp_path / "cache"),
            STUB_VLLM=json.dumps({"report": str(self.report)} | stub),
        )

    def pids(self):
        return json.loads(self.report.read_text())["pids"]


@pytest.mark.slow
def test_it_starts_answers_outlives_a_crash_of_vllm_and_leaves_no_orphans(models, python, tmp_path):
    words = ["--num-draft-tokens", "3", "--max-batch", "8", "--", "--kv-cache-dtype", "fp8"]
    with StubbedProcess(models, python, tmp_path, *words) as found:
        found.wait_for(200)
        seen = json.loads(found.report.read_text())["words"]
        config = json.loads(seen[seen.index("--speculative-config") + 1])
        assert config["num_speculative_tokens"] == 3 and config["parallel_drafting"] is True
        assert str(tmp_path / "cache") in config["model"], "the compact drafter was written in vLLM's form first"
        assert seen[seen.index("--kv-cache-dtype") + 1] == "fp8" and seen[1] == str(models / "target")
        with openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(model="target", prompt="x", max_tokens=3)
            assert answer.choices[0].text == "the user asks "
        pids = found.pids()
        os.kill(pids[0], signal.SIGKILL)
        found.wait_for(503)
        assert are_gone(pids), "what the dead vLLM left behind is ended too"
        response = httpx.post(f"{found.url}/v1/completions", json=BODY)
        assert response.status_code == 503 and response.json()["error"]["code"] == "server_dead"
        found.process.send_signal(signal.SIGTERM)
        assert found.end() == 0
    text = "\n".join(found.lines)
    assert "vLLM 0.32.0 ended with status 137; its last lines:" in text and "vllm | serving" in text
    assert "ready: target, vLLM 0.32.0, p-eagle with 3 draft tokens" in text and "Traceback" not in text


@pytest.mark.slow
def test_sigterm_lets_accepted_requests_finish_and_ends_vllm(models, python, tmp_path, monkeypatch):
    # Settings of a SageMaker container that only vLLM has reach it; its API key is ours to check.
    monkeypatch.setenv("SM_VLLM_MODEL", str(models / "target"))
    monkeypatch.setenv("SM_VLLM_KV_CACHE_DTYPE", "fp8")
    monkeypatch.setenv("SM_VLLM_TENSOR_PARALLEL_SIZE", "2")
    monkeypatch.setenv("SM_VLLM_API_KEY", "sk-of-a-client")
    with StubbedProcess(models, python, tmp_path, "--num-draft-tokens", "0") as found:
        found.url = found.url.replace("0.0.0.0", "127.0.0.1")
        found.wait_for(200)
        seen, answers = json.loads(found.report.read_text()), []
        words = seen["words"]
        assert words[words.index("--kv-cache-dtype") + 1] == "fp8" and "sk-of-a-client" not in json.dumps(seen)
        assert words[words.index("--tensor-parallel-size") + 1] == "2"
        url, headers = f"{found.url}/invocations", {"Authorization": "Bearer sk-of-a-client"}
        assert httpx.post(url, json=BODY).status_code == 401
        ask = threading.Thread(target=lambda: answers.append(httpx.post(url, json=BODY, headers=headers, timeout=30)))
        ask.start()
        time.sleep(0.3)
        found.process.send_signal(signal.SIGTERM)
        ask.join()
        assert found.end() == 0
    assert answers[0].status_code == 200 and are_gone(seen["pids"], 1)
    assert found.lines[-1] == "stopped; every accepted request was answered"
    assert not any("not used" in line for line in found.lines)


@pytest.mark.slow
def test_sigterm_while_vllm_starts_ends_it_too(models, python, tmp_path):
    with StubbedProcess(models, python, tmp_path, "--num-draft-tokens", "0", start_seconds=60) as found:
        deadline = time.monotonic() + START_SECONDS
        while not found.report.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        pids = found.pids()
        assert httpx.get(f"{found.url}/ping").status_code == 503
        found.process.send_signal(signal.SIGTERM)
        assert found.end() == 0
    assert are_gone(pids, 1), found.lines


@pytest.mark.slow
def test_a_vllm_that_fails_to_start_ends_the_process_with_its_last_lines(models, python, tmp_path):
    fail = "ValueError: No available memory for the cache blocks."
    with StubbedProcess(models, python, tmp_path, "--num-draft-tokens", "0", fail=fail) as found:
        assert found.end() == 2
    text = "\n".join(found.lines)
    assert "error: vLLM 0.32.0 ended with status 1 before it was ready; its last lines:\n  ValueError" in text
    assert "hint: raise --memory-share" in text and "Traceback" not in text


def refused(*words, status=2, capsys=None):
    assert run(["serve", *words]) == status
    return capsys.readouterr().err


def test_options_for_vllm_need_the_engine(capsys, monkeypatch):
    for words in (["--tensor-parallel-size", "2"], ["--vllm-python", "x"], ["--num-nodes", "2"], ["--", "--seed", "1"]):
        text = refused(*words, capsys=capsys)
        flag = words[1] if words[0] == "--" else words[0]
        assert f"error: {flag} is for vLLM, but this is the native engine\nhint: add --engine vllm" in text


def test_an_old_vllm_is_refused_before_anything_is_loaded(tmp_path, capsys, monkeypatch, models):
    python = stub_python(tmp_path, version="0.15.0")
    words = [str(models / "target"), "--drafter", str(models / "drafter"), "--engine", "vllm", "--port", "0"]
    text = refused(*words, "--vllm-python", str(python), capsys=capsys)
    assert "error: vLLM 0.15.0 does not support P-EAGLE drafters" in text and "that needs 0.16" in text


def test_a_missing_vllm_is_refused_with_how_to_get_it(capsys, monkeypatch):
    monkeypatch.delenv("PEAGLE_VLLM_PYTHON", raising=False)
    text = refused("--engine", "vllm", capsys=capsys)
    assert "no vLLM in the environment of" in text and "--vllm-python" in text


def arguments(*words) -> Arguments:
    return parse(Arguments, "serve", list(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda:1"], "--device is cuda:1, but this vLLM is built for GPUs"),
        (["--device", "cpu"], "CUDA_VISIBLE_DEVICES selects GPUs"),
    ],
)
def test_settings_of_our_engine_without_a_counterpart_are_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        check_settings(arguments(*words), Installed("0.32.0"))
    assert message in str(caught.value)


def test_settings_of_our_engine_are_vllm_s_where_it_has_them():
    words = (
        "--max-batch 4 --max-length 99 --prefill-tokens 64 --memory-share 0.5 "
        "--no-reuse-prefixes --eager --dtype float16 --served-model-name a b "
        "--tensor-parallel-size 2 --data-parallel-size 3 --num-nodes 3"
    )
    settings = vllm_settings(
        arguments(*words.split()), Models("dir", "name", None), ["--seed", "1", "--block-size", "16"]
    )
    assert (settings.max_batch, settings.max_length, settings.prefill_tokens) == (4, 99, 64)
    assert (settings.memory_share, settings.reuse_prefixes, settings.is_eager) == (0.5, False, True)
    assert (settings.dtype, settings.names) == ("float16", ("a", "b"))
    assert settings.extra == {"--seed": ("1",), "--block-size": ("16",)}
    assert (settings.tensor_parallel_size, settings.data_parallel_size, settings.num_nodes) == (2, 3, 3)
    plain = vllm_settings(arguments(), Models("dir", "name", None), [])
    assert plain.names == ("name",) and plain.prefill_tokens is plain.memory_share is None
