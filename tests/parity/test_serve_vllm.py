"""`peagle serve` on our own engine and on vLLM's CPU build: the same greedy answers, the same acceptance.

Both are processes, asked by the openai client, and tell their acceptance by /metrics. Our engine verifies only drafts
that pay on this CPU; here all steps cost the same, so it verifies all of them, as vLLM does. Both draft without the
pair head, which vLLM does not have. Run by `make parity`; PEAGLE_VLLM_PYTHON names the interpreter of vLLM's
environment.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.checkpoint.layouts import PAIR_HEAD_NAME
from peagle.targets.catalog import ASSETS

pytestmark = pytest.mark.parity

ROWS = json.loads(Path(__file__).with_name("prompts.json").read_text())
PROMPTS = [row["prompt"] for row in ROWS if row["kind"] == "chat"]
NUM_PROMPTS, NUM_TOKENS, NUM_DRAFT_TOKENS = 4, 64, 7
TOLERANCE = 0.02
START_SECONDS = 240
COMMON = f"--port 0 --dtype float32 --max-batch 4 --max-length 512 --num-draft-tokens {NUM_DRAFT_TOKENS}"
ENGINES = {
    "native": "--device cpu",
    "vllm": "--engine vllm --prefill-tokens 512 --no-reuse-prefixes --eager",
}
VERIFY_ALL = """
from peagle.cli.main import main
from peagle.worker import runner
from peagle.worker.step_costs import StepCosts
runner.measure_step_costs = lambda *_: StepCosts({1: 1.0}, {1: 0.0})
main()
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@contextlib.contextmanager
def served(engine, drafter):
    """The URL of a server that is ready; afterwards it must have ended by itself with status 0."""
    command = [
        sys.executable,
        "-c",
        VERIFY_ALL,
        "serve",
        *COMMON.split(),
        *ENGINES[engine].split(),
        "--drafter",
        drafter,
    ]
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT) as process:
        reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
        reader.start()
        try:
            deadline = time.monotonic() + START_SECONDS
            url = None
            while url is None or httpx.get(f"{url}/ping").status_code != 200:
                assert process.poll() is None and time.monotonic() < deadline, "".join(lines[-40:])
                found = re.search(r"listening on (http://\S+)", "".join(lines))
                url = found[1] if found else None
                time.sleep(0.1)
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "".join(lines[-40:])
        finally:
            process.kill()
            reader.join(10)


def counters(url):
    """Drafts, and accepted tokens by position, until now."""
    drafts, accepted = 0, {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == "vllm:spec_decode_num_drafts_total":
                drafts = int(sample.value)
            elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                accepted[int(sample.labels["position"])] = int(sample.value)
    return drafts, [accepted.get(position, 0) for position in range(NUM_DRAFT_TOKENS)]


def measured(engine, drafter):
    started = time.monotonic()
    with served(engine, drafter) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        ready = time.monotonic()
        (model,) = client.models.list().data
        drafts_before, accepted_before = counters(url)
        answers = [
            client.chat.completions.create(
                model=model.id,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            for prompt in PROMPTS[:NUM_PROMPTS]
        ]
        drafts, accepted = counters(url)
    num_drafts = drafts - drafts_before
    by_position = [now - before for now, before in zip(accepted, accepted_before, strict=True)]
    return {
        "engine": model.peagle.get("engine", "native"),
        "texts": [answer.choices[0].message.content for answer in answers],
        "num_tokens": sum(answer.usage.completion_tokens for answer in answers),
        "drafts": num_drafts,
        "accepted": by_position,
        "rates": [round(count / num_drafts, 4) for count in by_position],
        "acceptance_length": round(1 + sum(by_position) / num_drafts, 4),
        "start_seconds": round(ready - started, 1),
        "seconds": round(time.monotonic() - started, 1),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    if not os.environ.get("PEAGLE_VLLM_PYTHON"):
        pytest.skip("PEAGLE_VLLM_PYTHON names no interpreter with vLLM")
    drafter = tmp_path_factory.mktemp("drafter") / "plain"
    shutil.copytree(ASSETS / "smollm2-135m-instruct-p-eagle", drafter, ignore=shutil.ignore_patterns(PAIR_HEAD_NAME))
    found = {engine: measured(engine, str(drafter)) for engine in ENGINES}
    Path("runs/parity").mkdir(parents=True, exist_ok=True)
    Path("runs/parity/serve_vllm.json").write_text(json.dumps(found, indent=2) + "\n")
    for each in found.values():
        rates = " ".join(f"{rate:.3f}" for rate in each["rates"])
        print(
            f"{each['engine']:<14} {each['drafts']:>4} drafts  AL {each['acceptance_length']:.4f}  by position {rates}"
        )
    return found


def test_both_engines_give_the_same_greedy_answers(results):
    assert results["native"]["texts"] == results["vllm"]["texts"]
    assert results["native"]["num_tokens"] == results["vllm"]["num_tokens"] == NUM_PROMPTS * NUM_TOKENS
    assert results["vllm"]["engine"].startswith("vLLM ")


def test_acceptance_by_position_agrees(results):
    native, vllm = results["native"], results["vllm"]
    assert native["accepted"][0] > 0, "a drafter that never hits would agree with anything"
    for position, (ours, theirs) in enumerate(zip(native["rates"], vllm["rates"], strict=True)):
        assert abs(ours - theirs) <= TOLERANCE, f"position {position}: {ours} here, {theirs} on vLLM"
