"""What users of AWS type: `serve`, `deploy sagemaker` and `deploy vllm` read the same speculative config."""

import json
import shlex

import pytest

from harness.sagemaker_runtime import IMAGE, REGION, ROLE
from peagle.cli import serve
from peagle.cli.serve import Arguments, load, with_conventions
from peagle.console.arguments import parse
from peagle.errors import ConfigError
from peagle.sagemaker.conventions import read_conventions

VARIABLE = "SM_VLLM_SPECULATIVE_CONFIG"
HEAD = "amazon/GPT-OSS-20B-P-EAGLE"
GPT_OSS = ("deploy", "sagemaker", "gpt-oss-20b", "--role", ROLE, "--region", REGION, "--dry-run")
CONFIGS = [
    ({"parallel_drafting_spec": {"num_parallel_trees": 1, "prediction_depth": 5}}, 5),
    ({"parallel_drafting_spec": {"depth": 5}, "num_speculative_tokens": 5}, 5),
    ({"method": "eagle3", "model": HEAD, "num_speculative_tokens": 4, "parallel_drafting": True}, 4),
    ({"method": "eagle3", "model": HEAD, "parallel_drafting": True}, 3),
    ({"parallel_drafting_spec": {"num_parallel_trees": 1}}, 3),
]


def environment_of(result):
    assert result.status == 0, result.err
    return json.loads(result.out.splitlines()[0])["parameters"]["PrimaryContainer"]["Environment"]


@pytest.mark.parametrize(("config", "number"), CONFIGS)
def test_all_three_commands_read_the_same_drafter_and_number(peagle, tmp_path, config, number):
    text = json.dumps(config)
    found = read_conventions({VARIABLE: text, "PEAGLE_ML_ROOT": str(tmp_path)})
    assert found.num_draft_tokens == number and found.drafter == config.get("model")
    variables = environment_of(peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}"))
    expected = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": number, "parallel_drafting": True}
    assert json.loads(variables[VARIABLE]) == expected
    shown = peagle("deploy", "vllm", "gpt-oss-20b", "--", "--speculative-config", text)
    assert shown.status == 0, shown.err
    words = shlex.split(shown.out.replace("\\\n", " "), comments=True)
    assert json.loads(words[words.index("--speculative-config") + 1]) == expected


def test_a_number_on_the_command_line_comes_before_the_usual_one_but_contradicts_another(peagle):
    text = json.dumps({"model": HEAD})
    variables = environment_of(peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}", "--num-draft-tokens", 6))
    assert json.loads(variables[VARIABLE])["num_speculative_tokens"] == 6
    words = ("--", "--speculative-config", text)
    assert '"num_speculative_tokens": 6' in peagle("deploy", "vllm", "gpt-oss-20b", "--num-draft-tokens", 6, *words).out
    text = json.dumps({"num_speculative_tokens": 5})
    for result in (
        peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}", "--num-draft-tokens", 6),
        peagle("deploy", "vllm", "gpt-oss-20b", "--num-draft-tokens", 6, "--", "--speculative-config", text),
    ):
        assert result.status == 2 and "asks for 5 draft tokens, but num_draft_tokens is 6" in result.err


def test_two_drafters_are_refused_and_the_place_of_the_uploaded_one_is_none(peagle):
    text = json.dumps({"model": HEAD, "num_speculative_tokens": 2})
    for result in (
        peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}", "--drafter", "my/head"),
        peagle("deploy", "vllm", "gpt-oss-20b", "--drafter", "my/head", "--", "--speculative-config", text),
    ):
        assert result.status == 2 and f"names the drafter {HEAD}, but --drafter is my/head" in result.err
    text = json.dumps({"model": "/opt/ml/additional-model-data-sources/draft_model", "num_speculative_tokens": 2})
    config = json.loads(environment_of(peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}"))[VARIABLE])
    assert (config["model"], config["num_speculative_tokens"]) == (HEAD, 2), "the catalog's: nothing is uploaded"


def test_keys_of_vllm_only_stay_in_the_variable(peagle):
    text = json.dumps({"model": HEAD, "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1})
    assert json.loads(environment_of(peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}"))[VARIABLE]) == {
        "method": "eagle3",
        "model": HEAD,
        "num_speculative_tokens": 2,
        "parallel_drafting": True,
        "draft_tensor_parallel_size": 1,
    }
    result = peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}", "--image", f"{IMAGE}:1")
    assert result.status == 2 and f"--env {VARIABLE} conflicts with the options of this command" in result.err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"parallel_drafting_spec": {"num_trees": 2}}, "num_trees is 2, but draft trees are not supported"),
        ({"parallel_drafting_spec": {}, "parallel_drafting": False}, "but parallel_drafting_spec is given"),
        ({"parallel_drafting": "no"}, "parallel_drafting must be true or false, got 'no'"),
        ({"method": "ngram"}, "the method 'ngram' is not supported"),
    ],
)
def test_what_we_do_not_have_is_refused_by_all_three(peagle, tmp_path, config, message):
    text = json.dumps(config)
    with pytest.raises(ConfigError) as caught:
        read_conventions({VARIABLE: text, "PEAGLE_ML_ROOT": str(tmp_path)})
    assert message in str(caught.value)
    assert message in peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}").err
    assert message in peagle("deploy", "vllm", "gpt-oss-20b", "--", "--speculative-config", text).err


def test_parallel_drafting_false_is_obeyed_by_vllm(peagle, tmp_path):
    text = json.dumps({"parallel_drafting": False})
    variables = environment_of(peagle(*GPT_OSS, "--env", f"{VARIABLE}={text}"))
    assert json.loads(variables[VARIABLE])["parallel_drafting"] is False
    assert "VLLM_USE_V2_MODEL_RUNNER" not in variables
    found = read_conventions({VARIABLE: text, "PEAGLE_ML_ROOT": str(tmp_path)}, for_vllm=True)
    assert found.unmatched_words[-2:] == ("--speculative-config", text) and found.unmatched == ()


def test_parallel_drafting_false_is_refused_by_peagle_s_engine_for_a_p_eagle_drafter(
    peagle, models, tmp_path, monkeypatch
):
    text = json.dumps({"model": str(models / "drafter"), "parallel_drafting": False})
    message = "parallel_drafting is false, but the drafter is P-EAGLE"
    words = ("chat", "--target", models / "target", "--image", f"{IMAGE}:1", "--instance", "ml.m5.xlarge")
    result = peagle("deploy", "sagemaker", *words, "--role", ROLE, "--region", REGION, "--env", f"{VARIABLE}={text}")
    assert result.status == 2 and message in result.err
    found = read_conventions({VARIABLE: text, "PEAGLE_ML_ROOT": str(tmp_path)})
    arguments = with_conventions(parse(Arguments, "serve", [str(models / "target"), "--max-batch", "1"]), found)
    with pytest.raises(ConfigError, match=message):
        load(arguments, found.speculation, None)
    monkeypatch.setattr(serve, "load", lambda *_: pytest.fail("it is refused before anything is loaded"))
    monkeypatch.setattr(serve, "listen", lambda *_: pytest.fail("and before the port is bound"))
    for drafter in ([], ["--drafter", "base"]):
        monkeypatch.setenv(VARIABLE, text if not drafter else json.dumps({"parallel_drafting": False}))
        monkeypatch.setenv("PEAGLE_ML_ROOT", str(tmp_path))
        result = peagle("serve", *([] if drafter else ["--target", models / "target"]), *drafter, "--port", 0)
        assert result.status == 2 and message in result.err, result.err


def test_parallel_drafting_false_reaches_the_command_of_deploy_vllm(peagle):
    text = json.dumps({"parallel_drafting": False})
    result = peagle("deploy", "vllm", "gpt-oss-20b", "--", "--speculative-config", text)
    assert result.status == 0 and '"parallel_drafting": false' in result.out, "vLLM decides, as it does on SageMaker"


def test_gemma_without_its_drafter_is_deployed_plainly_when_asked(peagle):
    words = ("gemma-4-31b-it", "--num-draft-tokens", 0)
    variables = environment_of(peagle("deploy", "sagemaker", *words, *GPT_OSS[3:]))
    assert variables["SM_VLLM_MODEL"] == "google/gemma-4-31B-it" and VARIABLE not in variables
    shown = peagle("deploy", "vllm", *words)
    assert shown.status == 0 and "vllm serve google/gemma-4-31B-it" in shown.out and "speculative" not in shown.out
