"""`peagle deploy sagemaker` as users run it: dry runs, refusals before anything exists, interruptions, secrets."""

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from harness.sagemaker_runtime import ACCOUNT, IMAGE, REGION, ROLE, SECRET, frame
from peagle import __version__
from peagle.errors import DeployError
from peagle.sagemaker.aws import Aws
from peagle.sagemaker.invoke import ask, stream

GOLDEN = Path(__file__).with_name("dry_run.jsonl")
PEAGLE = Path(sys.executable).with_name("peagle")
NOTHING = {"models": [], "configs": [], "endpoints": [], "targets": [], "policies": [], "objects": [], "buckets": []}
GPT_OSS = ("deploy", "sagemaker", "gpt-oss-20b", "--role", ROLE)
QUICK = ("--no-smoke-test",)
HUB_TOKEN = "hf_" + "x" * 34


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, no network, no region."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("nowhere")
def test_a_dry_run_prints_the_calls_without_credentials(peagle):
    """To accept a change: write what the message shows into the file."""
    result = peagle(*GPT_OSS, "--region", "us-west-2", "--max-instances", 4, "--dry-run")
    assert result.status == 0, result.err
    shown = result.out.replace(f'"{__version__}"', '"VERSION"')
    assert shown == GOLDEN.read_text(), shown


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("tag", "names"),
    [("server-sagemaker-cuda-v2.2", "chat"), ("server-sagemaker-cuda-v2.4", '["chat", "gpt-oss-20b"]')],
)
def test_requests_may_use_the_target_s_name_too_where_the_image_takes_several(peagle, tag, names):
    words = ("deploy", "sagemaker", "chat", "--target", "gpt-oss-20b", "--role", ROLE, "--region", REGION)
    result = peagle(*words, "--image", tag, "--dry-run")
    model = json.loads(result.out.splitlines()[0])["parameters"]["PrimaryContainer"]
    assert model["Environment"]["SM_VLLM_SERVED_MODEL_NAME"] == names and model["Image"].endswith(tag)


@pytest.mark.usefixtures("nowhere")
def test_a_dry_run_of_directories_names_every_file_and_an_update_differs_in_one_call(peagle, models):
    words = ("chat", "--target", models / "target", "--drafter", models / "drafter", "--image", f"{IMAGE}:1")
    host = ("--instance", "ml.m5.xlarge", "--role", ROLE, "--region", REGION, "--dry-run")
    calls = [json.loads(line) for line in peagle("deploy", "sagemaker", *words, *host).out.splitlines()]
    uploads = [call["parameters"] for call in calls if call["operation"] == "upload_file"]
    files = [path for name in ("target", "drafter") for path in sorted((models / name).iterdir())]
    assert [Path(each["Filename"]) for each in uploads] == files
    assert all(each["ExtraArgs"] == {"ExpectedBucketOwner": ACCOUNT} for each in uploads), "never anybody else's bucket"
    assert calls[0]["operation"] == "create_bucket" and calls[0]["parameters"]["Bucket"].endswith(f"{ACCOUNT}-{REGION}")
    update = [json.loads(line) for line in peagle("deploy", "sagemaker", "update", *words, *host).out.splitlines()]
    assert [each["operation"] for each in update] == [
        each["operation"].replace("create_endpoint", "update_endpoint")
        if each["operation"] == "create_endpoint"
        else each["operation"]
        for each in calls
    ]


REFUSALS: list[tuple[tuple[str, ...], str]] = [
    (("nothing-known", "--role", ROLE), "the catalog has no target 'nothing-known'"),
    (
        ("chat", "--target", "org/name", "--role", ROLE, "--instance", "ml.g5.xlarge"),
        "no drafter is known for org/name",
    ),
    (("chat", "--target", "org/name", "--num-draft-tokens", "0", "--role", ROLE), "no instance type"),
    (("gpt-oss-20b",), "no execution role"),
    (("gpt-oss-20b", "--role", "Execution"), "is not the ARN of a role"),
    (("gpt-oss-20b", "--role", ROLE, "--instance", "ml.g99.large"), "SageMaker endpoints do not support it"),
    (("gpt-oss-20b", "--role", ROLE, "--instance", "ml.m5.xlarge"), "has no GPU, and AWS's vLLM container needs one"),
    (("gpt-oss-20b", "--role", ROLE, "--engine", "native"), "AWS has no image with peagle's own engine"),
    (("gpt-oss-20b", "--role", ROLE, "--network-isolation"), "the container cannot download openai/gpt-oss-20b"),
    (("gpt-oss-20b", "--role", ROLE, "--env", "SM_VLLM_TENSOR_PARALLEL_SIZE=2"), "is 2, but the instance has 1 GPUs"),
    (("gpt-oss-20b", "--role", ROLE, "--num-draft-tokens", "11"), "between 0 and 10"),
    (("gpt-oss-20b", "--role", ROLE, "--env", "HF_TOKEN=x"), "the variable HF_TOKEN looks like a credential"),
    (("gpt-oss-20b", "--role", ROLE, "--env", "x"), "--env takes NAME=VALUE, got 'x'"),
    (
        ("gpt-oss-20b", "--role", ROLE, "--num-instances", "2", "--max-instances", "1"),
        "--max-instances is 1, below --num-instances 2",
    ),
    (("gpt-oss-20b", "--role", ROLE.replace("Execution", "Nobody")), "no role Nobody"),
    (("gpt-oss-20b", "--role", ROLE.replace("Execution", "Lambda")), "its trust policy does not name sagemaker"),
    (("gpt-oss-20b", "--role", ROLE.replace(ACCOUNT, "999999999999")), "but you are signed in to 123456789012"),
    (("gpt-oss-20b", "--role", ROLE, "--instance", "ml.p5.48xlarge"), "the account's quota is 0 x ml.p5.48xlarge"),
    (("gpt-oss-20b", "--role", ROLE, "--instance", "ml.g5.xlarge", "--max-instances", "9"), "but 9 are needed"),
    (("gpt-oss-20b", "--role", ROLE, "--image", "0.99.0-gpu"), "no image 763104351884"),
    (("gemma-4-31b-it", "--role", ROLE), "SageMaker JumpStart bundles it with the model"),
]


@pytest.mark.parametrize(("words", "complaint"), REFUSALS, ids=[complaint[:40] for _, complaint in REFUSALS])
def test_what_cannot_work_is_refused_before_anything_is_created(cloud, peagle, words, complaint):
    result = peagle("deploy", "sagemaker", *words)
    assert result.status == 2 and complaint in result.err and "hint: " in result.err, result.err
    assert cloud.state() == NOTHING


def test_a_drafter_of_another_target_is_refused_before_it_is_uploaded(cloud, peagle, models, tmp_path):
    shutil.copytree(models / "target", tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    words = ("chat", "--target", tmp_path / "other", "--drafter", models / "drafter", "--image", f"{IMAGE}:1")
    result = peagle("deploy", "sagemaker", *words, "--instance", "ml.m5.xlarge", "--role", ROLE)
    assert result.status == 2 and "this target has another chat template" in result.err, result.err
    assert cloud.state() == NOTHING


def test_a_bucket_that_does_not_exist_is_refused(cloud, peagle, models):
    words = ("chat", "--target", models / "target", "--num-draft-tokens", 0, "--image", f"{IMAGE}:1", "--role", ROLE)
    result = peagle("deploy", "sagemaker", *words, "--instance", "ml.m5.xlarge", "--bucket", "no-such-bucket")
    assert result.status == 2 and "no bucket no-such-bucket" in result.err
    assert cloud.state() == NOTHING


@pytest.mark.usefixtures("nowhere")
def test_without_region_and_without_credentials_it_says_so(peagle, monkeypatch):
    assert "no region" in peagle(*GPT_OSS).err
    result = peagle(*GPT_OSS, "--region", REGION)
    assert result.status == 2 and "needs AWS credentials" in result.err and "aws configure" in result.err
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "boto3.exceptions", None)
    missing = peagle(*GPT_OSS, "--region", REGION)
    assert missing.status == 2 and "pip install 'peagle[deploy]'" in missing.err


def test_an_endpoint_that_is_not_ours_is_never_touched(cloud, peagle):
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(ModelName="theirs", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": f"{IMAGE}:1"})
    variant = {"VariantName": "AllTraffic", "ModelName": "theirs", "InstanceType": "ml.g5.xlarge"}
    sagemaker.create_endpoint_config(
        EndpointConfigName="theirs", ProductionVariants=[variant | {"InitialInstanceCount": 1}]
    )
    sagemaker.create_endpoint(EndpointName="gpt-oss-20b", EndpointConfigName="theirs")
    before = cloud.state()
    for words in (GPT_OSS[2:], ("update", *GPT_OSS[2:]), ("delete", "gpt-oss-20b"), ("status", "gpt-oss-20b")):
        result = peagle("deploy", "sagemaker", *words)
        assert result.status == 2 and "was not created by peagle; nothing was changed" in result.err
    after = cloud.state()
    assert [each[::2] for each in after.pop("endpoints")] == [each[::2] for each in before.pop("endpoints")]
    assert after == before


def test_aws_container_gets_the_drafter_in_vllms_form(cloud, peagle, models, tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    words = ("chat", "--target", models / "target", "--drafter", models / "drafter", "--role", ROLE)
    result = peagle("deploy", "sagemaker", *words, "--instance", "ml.g6e.2xlarge", *QUICK, "--json")
    assert result.status == 0, result.err
    assert result.json["image"].endswith("vllm:server-sagemaker-cuda-v2.2")
    objects = cloud.state()["objects"]
    (weights,) = [each for each in objects if "drafter-" in each and each.endswith("model.safetensors")]
    bucket, _, key = weights.partition("/")
    cloud.client("s3").download_file(bucket, key, str(tmp_path / "drafter.safetensors"))
    with safe_open(tmp_path / "drafter.safetensors", framework="np") as file:
        names = set(file.keys())
    assert any("embed_tokens" in name for name in names) and "mask_hidden" in names, sorted(names)
    variables = result.json["environment"]
    assert json.loads(variables["SM_VLLM_SPECULATIVE_CONFIG"]) == {
        "method": "eagle3",
        "model": "/opt/ml/additional-model-data-sources/draft_model",
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }
    assert "SM_VLLM_MODEL" not in variables
    again = peagle("deploy", "sagemaker", *words, "--instance", "ml.g6e.2xlarge", *QUICK, "--json")
    assert again.json["config"] == result.json["config"], "written again, the drafter is the same to the byte"


def test_status_and_delete_tell_what_there_is(cloud, peagle):
    absent = peagle("deploy", "sagemaker", "status", "gpt-oss-20b")
    assert absent.status == 1 and "no such endpoint in us-east-1" in absent.out
    assert "no resources of gpt-oss-20b exist" in peagle("deploy", "sagemaker", "delete", "gpt-oss-20b").err
    assert peagle(*GPT_OSS, "--instance", "ml.g5.xlarge", "--max-instances", 2, *QUICK).status == 0
    before = cloud.state()
    shown = peagle("deploy", "sagemaker", "delete", "gpt-oss-20b", "--dry-run", "--logs")
    calls = [json.loads(line) for line in shown.out.splitlines()]
    assert [call["operation"] for call in calls] == [
        "delete_scaling_policy",
        "deregister_scalable_target",
        "delete_endpoint",
        "describe_endpoint",
        "delete_endpoint_config",
        "delete_model",
        "delete_log_group",
    ]
    assert cloud.state() == before, "a dry run removes nothing"
    cloud.client("logs").create_log_group(logGroupName="/aws/sagemaker/Endpoints/gpt-oss-20b")
    assert peagle("deploy", "sagemaker", "delete", "gpt-oss-20b", "--logs").status == 0
    assert cloud.state() == NOTHING
    assert cloud.client("logs").describe_log_groups()["logGroups"] == []


def test_a_process_killed_while_it_waits_is_resumed_by_a_rerun(cloud, peagle):
    words = [*GPT_OSS, "--instance", "ml.g5.xlarge", "--no-smoke-test"]
    process = subprocess.Popen([PEAGLE, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if "Creating" in line:
                break
        process.kill()
    process.wait()
    assert [status for _, status, _ in cloud.state()["endpoints"]] == ["Creating"]
    assert peagle(*words).status == 0
    assert [status for _, status, _ in cloud.state()["endpoints"]] == ["InService"]


@pytest.mark.slow
def test_an_interruption_says_how_to_resume(cloud):
    words = [*GPT_OSS, "--instance", "ml.g5.xlarge", "--no-smoke-test"]
    process = subprocess.Popen([PEAGLE, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    with process.stderr:
        for line in process.stderr:
            lines.append(line)
            if "Creating" in line:
                process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "rerun the command to resume; `peagle deploy sagemaker delete gpt-oss-20b`" in "".join(lines)


@pytest.mark.slow
def test_no_credential_is_written_logged_or_put_into_an_argument_list(cloud, models, tmp_path):
    """Everything that a deployment leaves anywhere is searched: output, arguments, files, and AWS itself."""
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "PEAGLE_CACHE": str(home / "cache"),
        "HF_TOKEN": HUB_TOKEN,
        "AWS_SESSION_TOKEN": "session-" + SECRET,
    }
    words = ["chat", "--target", models / "target", "--drafter", models / "drafter", "--image", f"{IMAGE}:1"]
    words += ["--instance", "ml.m5.xlarge", "--role", ROLE]
    process = subprocess.Popen(
        [PEAGLE, "deploy", "sagemaker", *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    arguments: set[str] = set()
    watcher = threading.Thread(target=watch_arguments, args=(process.pid, arguments))
    watcher.start()
    out, _ = process.communicate(timeout=120)
    watcher.join()
    assert process.returncode == 0, out
    assert any("sagemaker" in each for each in arguments), "argument lists were seen"
    seen = [out, *arguments]
    seen += [path.read_text(errors="replace") for path in home.rglob("*") if path.is_file()]
    sagemaker, s3 = cloud.client("sagemaker"), cloud.client("s3")
    for model in cloud.state()["models"]:
        seen.append(str(sagemaker.describe_model(ModelName=model)))
    for each in cloud.state()["objects"]:
        bucket, _, key = each.partition("/")
        seen.append(s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode(errors="replace"))
    assert len(seen) > 8
    for secret in (SECRET, HUB_TOKEN):
        assert not [text[:200] for text in seen if secret in text], "a secret is shown"


def watch_arguments(pid: int, found: set[str]) -> None:
    """Collect the argument lists of a process and its children while it lives."""
    while True:
        try:
            tasks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for each in (str(pid), *tasks):
                with contextlib.suppress(FileNotFoundError):
                    found.add(Path(f"/proc/{each}/cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):
            return
        if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.02)


class Broken:
    """A runtime that answers one stream with given bytes, and then ends it or breaks the connection."""

    def __init__(self, payload: bytes, *, is_reset: bool) -> None:
        head = b"HTTP/1.1 200 OK\r\nX-Amzn-SageMaker-Content-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        self._answer, self._is_reset = head + payload, is_reset
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as request:
            length = 0
            while (line := request.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            request.read(length)
            connection.sendall(self._answer)
            if self._is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


PART = {":event-type": "PayloadPart", ":message-type": "event"}
EXCEPTION = {":exception-type": "ModelStreamError", ":message-type": "exception"}


BREAKS = {
    "cut": (frame(PART, b'data: {"choices": []}\n\n'), "ended early"),
    "unfinished": (frame(PART, b'data: {"choices": []}\n\ndata: [DONE]\n\n'), "did not finish its answer"),
    "no-json": (frame(PART, b"data: oops\n\n"), "sent invalid JSON: oops"),
    "error": (frame(PART, b'data: {"error": {"message": "too slow"}}\n\n'), "failed during the answer: too slow"),
    "exception": (
        frame(EXCEPTION, b'{"Message": "time is up", "ErrorCode": "ModelInvocationTimeExceeded"}'),
        "AWS refused invoke_endpoint_with_response_stream: time is up",
    ),
    "reset": (frame(PART, b"data: {")[:9], "invoke_endpoint_with_response_stream failed"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_streams_that_break_say_how(cloud, monkeypatch, kind):
    payload, complaint = BREAKS[kind]
    broken = Broken(payload, is_reset=kind == "reset")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", broken.url)
    with Aws(REGION) as aws, pytest.raises(DeployError) as caught:
        ask(aws, "chat", {"messages": []})
    assert complaint in str(caught.value)
    broken.close()


def test_refusals_of_the_container_reach_the_user(cloud, aws: Any, peagle):
    missing = peagle("deploy", "sagemaker", "invoke", "absent", "Hello")
    assert missing.status == 2 and "Endpoint absent" in missing.err
    assert peagle(*GPT_OSS, "--instance", "ml.g5.xlarge", *QUICK).status == 0
    with pytest.raises(DeployError, match=r"'temperature' must be 0 or more, got -1"):
        next(iter(stream(aws, "gpt-oss-20b", {"messages": [{"role": "user", "content": "x"}], "temperature": -1})))
