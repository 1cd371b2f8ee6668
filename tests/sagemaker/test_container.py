"""The container: its start-up script as a process, and its Dockerfile by the rules that SageMaker and we have."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from dockerfile_parse import DockerfileParser

from harness.sagemaker_runtime import IMAGE, ROLE
from peagle.cli.main import run

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "container"
START = CONTAINER / "start"
READY_SECONDS = 120


def dockerfile() -> DockerfileParser:
    return DockerfileParser(path=str(CONTAINER / "Dockerfile"), env_replace=False)


def instructions(name: str) -> list[str]:
    return [each["value"] for each in dockerfile().structure if each["instruction"] == name]


def test_base_images_are_pinned_by_tag_and_digest() -> None:
    (pinned,) = [value for value in instructions("ARG") if value.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", pinned), pinned
    assert {value.split()[0] for value in instructions("FROM")} == {"${PYTHON_IMAGE}"}
    version = re.search(r"python:(\d+\.\d+)", pinned)
    assert version is not None
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {version[1]}" in classifiers


def test_entry_point_is_of_exec_form_so_that_process_1_gets_signals() -> None:
    (entry,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    assert json.loads(entry) == ["/usr/local/bin/start"], "a shell, or tini, would stand between SageMaker and us"
    assert json.loads(command) == ["serve"]
    assert os.access(START, os.X_OK) and START.read_text().startswith("#!/bin/bash\n")
    assert not instructions("USER"), "SageMaker expects root"
    assert instructions("EXPOSE") == ["8080"]


def test_nothing_is_fetched_by_add_and_no_secret_is_built_in() -> None:
    parsed = dockerfile()
    assert not [each for each in parsed.structure if each["instruction"] in ("ADD", "MAINTAINER", "ONBUILD")]
    named = " ".join(instructions("ARG") + instructions("ENV") + instructions("LABEL"))
    assert not re.search(r"(?i)(secret|password|api_?key|credential|_token\b)", named)
    for command in instructions("RUN"):
        assert "curl" not in command and "wget" not in command
        if "apt-get install" in command:
            assert "--no-install-recommends" in command and "rm -rf /var/lib/apt/lists" in command
        if "pip install" in command:
            assert "-c pins.txt" in command, "every package has the version that the tests ran with"


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    copies = [value.split() for value in instructions("COPY") if not value.startswith("--from")]
    sources = [source for words in copies for source in words[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored, "nothing goes to the builder but what is named"
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source.removeprefix('./')}" in ignored, f"{source} is kept from the builder"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == set(sources)


def test_the_extra_that_is_installed_exists_and_the_devices_are_two(tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = [command for command in instructions("RUN") if ".[" in command]
    match = re.search(r"\.\[([\w,]+)\]", install)
    assert match is not None and set(match[1].split(",")) <= extras.keys()
    (torch,) = [command for command in instructions("RUN") if "case" in command]
    script = torch.replace("pip", "echo")
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    for device, expected in (("cuda", 0), ("cpu", 0), ("tpu", 1)):
        result = subprocess.run(
            ["sh", "-c", script],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "DEVICE": device, "CPU_INDEX": "https://index"},
            capture_output=True,
            text=True,
        )
        assert result.returncode == expected, result.stderr
        if not expected:
            assert result.stdout.startswith("install torch==") and ("https://index" in result.stdout) == (
                device == "cpu"
            )


def test_health_check_is_a_program_that_fails_where_nothing_answers() -> None:
    (check,) = instructions("HEALTHCHECK")
    words = json.loads(check[check.index("[") :])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        program = words[2].replace("8080", str(free.getsockname()[1]))
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 1


def test_start_script_hands_words_on(tmp_path: Path) -> None:
    fake = tmp_path / "peagle"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$$" "$@"\n')
    fake.chmod(0o755)

    def words(*argv: str, **variables: str) -> list[str]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        process = subprocess.Popen([str(START), *argv], env=environment, stdout=subprocess.PIPE, text=True)
        out, _ = process.communicate(timeout=20)
        first, *rest = out.splitlines()
        assert int(first) == process.pid, "peagle takes the place of the script: it is process 1 of the container"
        return rest

    assert words("serve") == ["serve", "--host", "0.0.0.0"]
    assert words() == ["serve", "--host", "0.0.0.0"]
    assert words("serve", "--port", "9", "a b") == ["serve", "--host", "0.0.0.0", "--port", "9", "a b"]
    assert words("serve", "--host=::1") == ["serve", "--host=::1"]
    assert words("serve", SM_VLLM_HOST="127.0.0.1") == ["serve"]
    assert words("doctor", "--json") == ["doctor", "--json"]


@dataclass
class Started:
    """A process that was started as SageMaker starts a container."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ping", timeout=2, verify=False).status_code == 200:
                    return
            time.sleep(0.1)


def start_container(cloud: Any, endpoint: str, root: Path) -> Started:
    """Start what an endpoint's model says: its variables, and its files where SageMaker would put them.

    `root` stands for /opt/ml, which this machine may not have.
    """
    sagemaker, s3 = cloud.client("sagemaker"), cloud.client("s3")
    config = sagemaker.describe_endpoint(EndpointName=endpoint)["EndpointConfigName"]
    (variant,) = sagemaker.describe_endpoint_config(EndpointConfigName=config)["ProductionVariants"]
    container = sagemaker.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
    places = {"model": container["ModelDataSource"]}
    places |= {
        f"additional-model-data-sources/{each['ChannelName']}": each for each in container["AdditionalModelDataSources"]
    }
    for place, source in places.items():
        bucket, _, prefix = source["S3DataSource"]["S3Uri"].removeprefix("s3://").partition("/")
        (root / place).mkdir(parents=True)
        for each in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
            s3.download_file(bucket, each["Key"], str(root / place / each["Key"].removeprefix(prefix)))
    variables = {name: value.replace("/opt/ml", str(root)) for name, value in container["Environment"].items()}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PEAGLE_"))}
    environment |= variables | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PEAGLE_ML_ROOT": str(root),
        "SM_VLLM_HOST": "127.0.0.1",
    }
    log = root / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(START), "serve", "--port", str(port)], env=environment, stdout=file, stderr=file
        )
    return Started(process, f"http://127.0.0.1:{port}", log)


@pytest.fixture(scope="module")
def options(models: Path) -> list[str]:
    words = ["chat", "--target", models / "target", "--drafter", models / "drafter", "--max-length", "256"]
    words += ["--num-draft-tokens", "3", "--image", f"{IMAGE}:1", "--instance", "ml.m5.xlarge", "--role", ROLE]
    words += ["--env", "SM_VLLM_DTYPE=float32", "SM_VLLM_MAX_NUM_SEQS=4", "SM_VLLM_SWAP_SPACE=1"]
    return [*map(str, words), "--max-instances", "3"]


@pytest.fixture(scope="module")
def container(stand_ins: Any, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """An endpoint of our own image, deployed by the command line, and the container that it describes."""
    stand_ins.reset()
    assert run(["deploy", "sagemaker", *options, "--no-smoke-test"]) == 0
    started = start_container(stand_ins, "chat", tmp_path_factory.mktemp("ml"))
    try:
        started.wait_ready()
        stand_ins.containers = lambda endpoint: started.url
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait(10)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the user asks"}], "max_tokens": 8, "temperature": 0}


@pytest.mark.slow
def test_container_answers_pings_and_invocations(container: Started) -> None:
    answer = httpx.get(f"{container.url}/ping")
    assert answer.status_code == 200 and answer.content == b""
    body = httpx.post(f"{container.url}/invocations", json=CHAT, timeout=60).json()
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    assert body["model"] == "chat", "the endpoint's name is the first of the target's"
    assert httpx.post(f"{container.url}/invocations", json=CHAT | {"model": "target"}, timeout=60).status_code == 200
    served = httpx.get(f"{container.url}/v1/models").json()["data"][0]["peagle"]
    assert served["num_draft_tokens"] == 3 and served["drafter"] == "draft_model", served
    assert "--swap-space" in container.log.read_text(), "options without a counterpart are told"


@pytest.mark.slow
def test_command_line_asks_the_deployed_endpoint_and_streams(container: Started, peagle: Any) -> None:
    chat = CHAT | {"max_tokens": 40}
    expected = httpx.post(f"{container.url}/invocations", json=chat, timeout=60).json()["choices"][0]["message"]
    asked = ("deploy", "sagemaker", "invoke", "chat", CHAT["messages"][0]["content"], "--max-tokens", 40)
    result = peagle(*asked)
    assert result.status == 0 and result.out == f"{expected['content']}\n"
    assert "num_tokens 40" in result.err or "finish_reason stop" in result.err
    document = peagle(*asked, "--json").json
    assert document["text"] == expected["content"] and document["acceptance_length"] >= 1


@pytest.mark.slow
def test_same_command_again_asks_and_changes_nothing(
    container: Started, peagle: Any, stand_ins: Any, options: Any
) -> None:
    before = stand_ins.state()
    result = peagle("deploy", "sagemaker", *options, "--json")
    assert result.status == 0 and result.json["smoke_test"]["num_tokens"] > 0
    assert stand_ins.state() == before and len(before["objects"]) >= 6
    facts = peagle("deploy", "sagemaker", "status", "chat", "--json").json
    assert facts["status"] == "InService" and facts["scaling"]["max_instances"] == 3
    assert facts["unused"] == {"models": [], "configs": [], "objects": []}
    shown = peagle("deploy", "sagemaker", "status", "chat")
    assert shown.status == 0 and "1 x ml.m5.xlarge" in shown.out and "SM_VLLM_SPECULATIVE_CONFIG=" in shown.out


@pytest.mark.slow
def test_container_finishes_what_it_has_begun_and_the_endpoint_is_removed(
    container: Started, peagle: Any, stand_ins: Any
) -> None:
    """The last test of the module: it ends the process."""
    long = CHAT | {"max_tokens": 200, "stream": True, "ignore_eos": True}
    received: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{container.url}/invocations", json=long, timeout=60) as answer:
            for line in answer.iter_lines():
                received.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    container.process.send_signal(signal.SIGTERM)
    reader.join(30)
    assert "data: [DONE]" in received[-2:], received[-3:]
    assert container.process.wait(30) == 0, container.log.read_text()
    result = peagle("deploy", "sagemaker", "delete", "chat")
    left = stand_ins.state()
    assert result.status == 0 and not any(left.values()), f"nothing is left behind\n{left}\n{result.err}"
