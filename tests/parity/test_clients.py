"""Clients as their users install them, against `peagle serve` in a process of its own.

LiteLLM, LangChain, Instructor, the OpenAI Agents SDK, DSPy, the `llm` command and an older openai SDK come from the
environment of PEAGLE_CLIENTS_PYTHON, GuideLLM, AIPerf and lm-eval from that of PEAGLE_EVALUATORS_PYTHON, `vllm bench
serve` from that of PEAGLE_VLLM_PYTHON; `make parity` makes them and runs this.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.model_families import trained_drafter
from harness.serve_process import Process
from harness.tiny_models import CHATML, tiny_target, write_drafter, write_target
from peagle.targets.hf import HFTarget

pytestmark = pytest.mark.parity

HERE = Path(__file__).parent
TEMPLATE = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}use <tool_call>{% endif %}" + CHATML
QUESTION = "the user asks"
SECONDS = 240


def interpreter(variable: str) -> Path:
    found = os.environ.get(variable)
    if found is None:
        pytest.skip(f"{variable} is not set; `make parity` sets it")
    return Path(found).absolute()


def talk(*command: object, **environment: str) -> str:
    """What a client prints."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    offline |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | offline | environment,
        check=False,
    )
    assert result.returncode == 0, f"{command[:3]}: {result.stdout[-500:]} {result.stderr[-2000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    target = tiny_target(max_position_embeddings=2048)  # DSPy's prompts are long
    target.tokenizer.chat_template = TEMPLATE
    write_target(target, root / "target")
    texts = [text_of(target, f"the user {number}") for number in range(8)]
    write_drafter(target, root / "drafter", trained_drafter(target, texts))
    return root


def text_of(target: HFTarget, question: str) -> list[int]:
    """The question and its greedy answer, for a drafter some of whose drafts are accepted."""
    chat = [{"role": "user", "content": question}]
    row = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.model.generate(**row, max_new_tokens=24, do_sample=False)
    return [int(token) for token in output[0]]


def start(models: Path) -> Process:
    names = ("--served-model-name", "tiny", "--num-draft-tokens", 4, "--max-length", 2000, "--max-batch", 4)
    return Process(models / "target", "--drafter", models / "drafter", *names)


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[Process]:
    with start(models) as found:
        yield found.wait_ready()


@pytest.fixture
def fresh(models: Path) -> Iterator[Process]:
    """A server that still drafts: it stops once it has seen that drafts do not pay for so small a model."""
    with start(models) as found:
        yield found.wait_ready()


@pytest.fixture(scope="module")
def expected(served: Process) -> str:
    """The greedy answer, asked for by hand."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    return str(httpx.post(f"{served.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def answers(served: Process) -> dict[str, dict[str, Any]]:
    said = talk(interpreter("PEAGLE_CLIENTS_PYTHON"), HERE / "ask_clients.py", served.url)
    found = json.loads(said.splitlines()[-1])  # LiteLLM talks to stdout too
    for name, each in found.items():
        print(f"{name} {each['version']}")
    return dict(found)


@pytest.fixture(scope="module")
def frameworks(served: Process) -> dict[str, dict[str, Any]]:
    said = talk(interpreter("PEAGLE_CLIENTS_PYTHON"), HERE / "ask_frameworks.py", served.url)
    found = json.loads(said.splitlines()[-1])
    print(", ".join(f"{name} {each['version']}" for name, each in found.items()))
    return dict(found)


def check_pet(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == {"animal", "legs"} and found["animal"] in ("cat", "dog") and 0 <= found["legs"] <= 9


@pytest.mark.parametrize("client", ["openai", "litellm", "langchain-openai"])
def test_clients_get_the_same_answer_whole_and_in_a_stream(
    answers: dict[str, dict[str, Any]], expected: str, client: str
) -> None:
    found = answers[client]
    assert found["whole"] == found["stream"] == expected
    assert found["completion_tokens"] == 24
    check_pet(found["schema"])


def test_litellm_calls_tools_and_sees_refusals(answers: dict[str, dict[str, Any]], expected: str) -> None:
    found = answers["litellm"]
    assert found["async"] == found["as openai"] == expected
    for name, arguments, finish_reason in (found["tool"], found["streamed tool"]):
        assert name == "pet" and finish_reason == "tool_calls"
        check_pet(arguments)
    assert found["object"] in ("stop", "length")
    assert "max_tokens" in found["refusal"] and "100000" in found["refusal"]
    assert answers["langchain-openai"]["tool"] == ["pet"]
    assert "'temperature' must be 0 or more, got -1" in answers["openai"]["refusal"]
    assert answers["openai"]["models"] == ["tiny"]


def test_instructor_fills_a_model_by_tool_by_schema_and_in_a_stream(frameworks: dict[str, dict[str, Any]]) -> None:
    found = frameworks["instructor"]
    for text in (found["tool"], found["schema"], found["stream"][-1]):
        check_pet(text)
    assert found["stream"][-1] == found["schema"] and len(found["stream"]) > 1 and found["completion_tokens"] > 0


def test_an_agent_answers_streams_calls_its_tool_and_goes_on(
    frameworks: dict[str, dict[str, Any]], expected: str
) -> None:
    found = frameworks["openai-agents"]
    assert found["whole"] == found["stream"] == expected and found["completion_tokens"] == 24
    check_pet(found["schema"])
    (call,) = found["calls"]
    assert call[0] in ("cat", "dog") and call[1] in (2, 4)
    assert found["turns"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]


def test_dspy_answers_and_keeps_to_a_signature(frameworks: dict[str, dict[str, Any]], expected: str) -> None:
    found = frameworks["dspy"]
    assert found["whole"] == expected and found["completion_tokens"] == 24
    check_pet(found["schema"])
    check_pet(found["program"])


def test_lm_eval_gets_the_log_likelihoods_of_the_target(served: Process, models: Path, tmp_path: Path) -> None:
    """Choices are judged by echoed log-probabilities, answers are generated; both from a task of our own."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"the user {n}"}) + "\n" for n in range(3)))
    task = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1},
    }
    choose = {"task": "choose", "output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": ["cat", "dog"]}
    write = {"task": "write", "output_type": "generate_until", "doc_to_target": "cat"}
    write["generation_kwargs"] = {"until": ["\n\n\n"], "max_gen_toks": 16, "temperature": 0}
    for each, metric in ((choose, "acc"), (write, "exact_match")):
        facts = {"metric": metric, "aggregation": "mean", "higher_is_better": True}
        (tmp_path / f"{each['task']}.yaml").write_text(
            json.dumps(task | each | {"metric_list": [facts]})
        )  # JSON is YAML
    asked = f"model=tiny,base_url={served.url}/v1/completions,tokenizer={models / 'target'},max_length=400"
    talk(
        interpreter("PEAGLE_EVALUATORS_PYTHON").with_name("lm-eval"),
        *("run", "--model", "local-completions", "--model_args", asked, "--tasks", "choose,write"),
        *("--include_path", tmp_path, "--output_path", tmp_path / "found", "--log_samples"),
        HF_HOME=str(tmp_path),
    )
    rows = {}
    for name in ("choose", "write"):
        (path,) = tmp_path.rglob(f"samples_{name}_*.jsonl")
        rows[name] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows["choose"]) == len(rows["write"]) == 3
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    judge = AutoModelForCausalLM.from_pretrained(models / "target")
    for row in rows["choose"]:
        for arguments, ((found, _),) in zip(row["arguments"].values(), row["resps"], strict=True):
            text = arguments["arg_0"]
            start = len(tokenizer(text, add_special_tokens=False).input_ids)
            ids = torch.tensor([tokenizer(text + arguments["arg_1"], add_special_tokens=False).input_ids])
            with torch.no_grad():
                logprobs = judge(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
            assert float(found) == pytest.approx(float(logprobs[start - 1 :].sum()), abs=1e-3)
    for row in rows["write"]:
        body = {"prompt": row["doc"]["question"], "max_tokens": 16, "temperature": 0, "stop": ["\n\n\n"]}
        answer = httpx.post(f"{served.url}/v1/completions", json=body).json()["choices"][0]["text"]
        assert row["resps"] == [[answer]]


def test_guidellm_counts_what_the_server_counts(fresh: Process, models: Path, tmp_path: Path) -> None:
    before = counters(fresh.url)
    talk(
        interpreter("PEAGLE_EVALUATORS_PYTHON").with_name("guidellm"),
        *("run", "--backend", f"kind=openai_http,target={fresh.url},model=tiny"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={models / 'target'}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=16"),
        *("--output", f"kind=json,path={tmp_path / 'found.json'}", "--disable-console"),
        HF_HOME=str(tmp_path),
    )
    after = counters(fresh.url)
    (benchmark,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    requests = benchmark["requests"]["successful"]
    assert [each["output_tokens"] for each in requests] == [16] * 8
    assert all(each["prompt_tokens"] > 24 and each["time_to_first_token_ms"] > 0 for each in requests)
    steps = sum(each["response_metrics"]["speculative_decoding"]["num_spec_steps"] for each in requests)
    name = "vllm:spec_decode_num_drafts_total"
    assert steps == after[name] - before[name] > 0


def test_aiperf_shows_the_acceptance_that_the_server_counts(fresh: Process, models: Path, tmp_path: Path) -> None:
    before = counters(fresh.url)
    said = talk(
        interpreter("PEAGLE_EVALUATORS_PYTHON").with_name("aiperf"),
        *("profile", "--model", "tiny", "--url", fresh.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", models / "target", "--isl", 24, "--osl", 16, "--extra-inputs", "temperature:0"),
        *("--extra-inputs", "ignore_eos:true", "--concurrency", 2, "--request-count", 8, "--workers-max", 1),
        *("--record-processor-service-count", 1, "--ui", "none", "--no-gpu-telemetry"),
        *("--output-artifact-dir", tmp_path),
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="",  # else AIPerf 0.13 takes a directory for a name on the Hub
    )
    after = counters(fresh.url)
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 8 and found["output_sequence_length"]["avg"] > 0
    assert found["time_to_first_token"]["avg"] > 0 and found["inter_token_latency"]["avg"] > 0
    records = [json.loads(line)["metrics"] for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    assert [each["usage_completion_tokens"]["value"] for each in records] == [16] * 8
    drafts, accepted = (
        after[name] - before[name]
        for name in ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    assert sum(each["spec_decode_steps"]["value"] for each in records) == drafts > 0
    assert found["spec_decode_token_weighted_acceptance_length"]["avg"] == pytest.approx(1 + accepted / drafts)
    assert "Spec Decode" in said and "Acceptance Length" in said


def test_the_llm_command_streams_answers_and_keeps_to_a_schema(served: Process, expected: str, tmp_path: Path) -> None:
    command = interpreter("PEAGLE_CLIENTS_PYTHON").with_name("llm")
    entry = {"model_id": "mine", "model_name": "tiny", "api_base": f"{served.url}/v1", "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML

    def llm(*words: str) -> str:
        return talk(command, *words, LLM_USER_PATH=str(tmp_path))

    ask = ("-m", "mine", "-o", "temperature", "0")
    assert llm(*ask, "-o", "max_tokens", "24", QUESTION) == f"{expected}\n", "streamed, which is its habit"
    assert llm(*ask, "-o", "max_tokens", "24", "--no-stream", QUESTION) == f"{expected}\n"
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    check_pet(llm(*ask, "-o", "max_tokens", "80", "--schema", json.dumps(schema), QUESTION))
    usage = json.loads(llm("logs", "-n", "1", "--json"))[0]
    assert usage["output_tokens"] > 0 and usage["input_tokens"] > 0, "the usage chunk was understood"


def counters(url: str) -> dict[str, float]:
    """The counters of speculation, by their names without labels; those of each position by it."""
    found = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("vllm:spec_decode") and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            position = name.split('position="')[1].split('"')[0] if "position=" in name else ""
            found[name.split("{")[0] + position] = float(value)
    return found


def test_vllm_bench_serve_prints_the_acceptance_that_metrics_show(fresh: Process, models: Path, tmp_path: Path) -> None:
    python = interpreter("PEAGLE_VLLM_PYTHON")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the user {n}"}) + "\n" for n in range(8)))
    before = counters(fresh.url)
    said = talk(
        python.with_name("vllm"),
        *("bench", "serve", "--backend", "openai-chat", "--base-url", fresh.url, "--endpoint", "/v1/chat/completions"),
        *("--model", "tiny", "--tokenizer", models / "target", "--dataset-name", "custom", "--dataset-path", prompts),
        *("--custom-output-len", 24, "--skip-chat-template", "--num-prompts", 8, "--max-concurrency", 2),
        *("--temperature", 0, "--ignore-eos", "--num-warmups", 0, "--ready-check-timeout-sec", 0),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "found.json"),
        VLLM_NO_USAGE_STATS="1",
    )
    after = counters(fresh.url)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    drafts = grown["vllm:spec_decode_num_drafts_total"]
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["completed"] == 8 and found["failed"] == 0 and found["total_output_tokens"] == 8 * 24
    assert drafts > 0 and accepted > 0
    assert (found["spec_decode_num_drafts"], found["spec_decode_accepted_tokens"]) == (drafts, accepted)
    length = 1 + accepted / drafts
    assert found["spec_decode_acceptance_length"] == pytest.approx(length)
    rates = [grown[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{depth}"] / drafts for depth in range(4)]
    assert found["spec_decode_per_position_acceptance_rates"] == pytest.approx(rates)
    assert f"{length:.2f}" in said and "Acceptance length" in said
