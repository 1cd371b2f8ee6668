"""SageMaker's conventions: environment variables, directories, /ping and /invocations."""

import json

import pytest

from harness.sagemaker_runtime import vllm_arguments
from peagle.cli.serve import Arguments, with_conventions
from peagle.console.arguments import parse
from peagle.errors import ConfigError, RequestError
from peagle.sagemaker.conventions import Conventions, read_conventions
from peagle.sagemaker.serving import invocation_route

P_EAGLE = '{"method":"eagle3","model":"amazon/head","num_speculative_tokens":3,"parallel_drafting":true}'


def words(**variables):
    return vllm_arguments({f"SM_VLLM_{name}": value for name, value in variables.items()}, None)[2:]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1024", ["--x-y", "1024"]),
        ("true", ["--x-y"]),
        ("TRUE", ["--x-y"]),
        ("", ["--x-y"]),
        ("False", []),
        ('["a", "b c"]', ["--x-y", "a", "b c"]),
        ('[1, true, {"k": [2, 3]}]', ["--x-y", "1", "true", '{"k":[2,3]}']),
        ("[]", []),
        ('{"k": 1,\n "l": 2}', ["--x-y", '{"k": 1,\n "l": 2}']),
        ('{"k": 1} {"l": 2}', ["--x-y", '{"k": 1}', '{"l": 2}']),
        ('{"k": 1', ["--x-y", '{"k": 1']),
        ("[1, 2", ["--x-y", "[1, 2"]),
        ("{{ messages }}", ["--x-y", "{{ messages }}"]),
        ("two words", ["--x-y", "two words"]),
    ],
)
def test_values_become_words_by_the_container_s_rules(value, expected):
    assert words(X_Y=value) == expected


def test_origins_stay_one_word_and_keys_are_sorted():
    assert words(ALLOWED_ORIGINS='["*"]', A="1", Z="2") == ["--a", "1", "--allowed-origins", '["*"]', "--z", "2"]


def test_models_are_looked_for_in_order(tmp_path):
    everything = {"SM_VLLM_MODEL": "named", "HF_MODEL_ID": "hub"}
    assert vllm_arguments(everything, tmp_path)[2:] == ["--model", "named"]
    assert vllm_arguments({"HF_MODEL_ID": "hub"}, tmp_path)[2:] == ["--model", str(tmp_path)]
    assert vllm_arguments({"HF_MODEL_ID": "hub"}, None)[2:] == ["--model", "hub"]
    assert vllm_arguments({}, None) == ["--port", "8080"]


def conventions(tmp_path, **variables):
    environment = {f"SM_VLLM_{name}": value for name, value in variables.items()}
    return read_conventions(environment | {"PEAGLE_ML_ROOT": str(tmp_path)})


def test_no_variables_and_no_directory_mean_no_container(tmp_path):
    assert conventions(tmp_path) == Conventions()
    (tmp_path / "model").mkdir()
    assert not conventions(tmp_path).is_container, "an empty directory is none"
    (tmp_path / "model" / "config.json").write_text("{}")
    found = conventions(tmp_path)
    assert found.is_container and found.target == str(tmp_path / "model")
    assert found.server["host"] == "0.0.0.0" and found.server["port"] == 8080


def test_the_hub_s_variable_alone_names_the_target_and_opens_no_address(tmp_path):
    environment = {"PEAGLE_ML_ROOT": str(tmp_path), "HF_MODEL_ID": "hub"}
    found = read_conventions(environment)
    assert found.target == "hub" and not found.is_container and "host" not in found.server
    merged = with_conventions(parse(Arguments, "serve", ["mine"]), found)
    assert merged.target.target == "mine" and merged.server.host is None
    drafter = tmp_path / "additional-model-data-sources" / "draft_model"
    drafter.mkdir(parents=True)
    found = read_conventions(environment)
    assert found.is_container and found.server["host"] == "0.0.0.0"
    assert (found.target, found.drafter) == ("hub", str(drafter))


def test_settings_of_vllm_become_ours(tmp_path):
    found = conventions(
        tmp_path,
        MODEL="m",
        SPECULATIVE_CONFIG=P_EAGLE,
        MAX_MODEL_LEN="4K",
        MAX_NUM_SEQS="32",
        GPU_MEMORY_UTILIZATION="0.8",
        ENABLE_PREFIX_CACHING="false",
        NO_ENABLE_PREFIX_CACHING="true",
        ENFORCE_EAGER="true",
        DTYPE="half",
        SERVED_MODEL_NAME='["a", "b"]',
        API_KEY="secret",
        TENSOR_PARALLEL_SIZE="1",
    )
    assert (found.target, found.drafter, found.num_draft_tokens, found.dtype) == ("m", "amazon/head", 3, "float16")
    assert found.engine == {
        "max_length": 4096,
        "max_batch": 32,
        "memory_share": 0.8,
        "reuse_prefixes": False,
        "eager": True,
    }
    assert found.server["served_model_name"] == ("a", "b")
    assert found.api_keys == ("secret",) and "secret" not in repr(found)
    assert found.unmatched == ()


def test_options_without_an_equivalent_are_listed_in_one_warning(tmp_path, caplog):
    config = '{"method": "eagle3", "model": "m", "disable_padded_drafter_batch": true}'
    found = conventions(tmp_path, KV_CACHE_DTYPE="fp8", ENABLE_LORA="true", SPECULATIVE_CONFIG=config)
    expected = ("--enable-lora", "--kv-cache-dtype", "--speculative-config disable_padded_drafter_batch")
    assert found.unmatched == expected
    assert [record.message for record in caplog.records if "without an equivalent" in record.message] == [
        f"ignoring vLLM options without an equivalent: {', '.join(expected)}"
    ]


def test_a_drafter_is_found_among_the_additional_data_sources(tmp_path):
    for channel in ("draft_model", "other"):
        (tmp_path / "additional-model-data-sources" / channel).mkdir(parents=True)
    sources = tmp_path / "additional-model-data-sources"
    assert conventions(tmp_path, MODEL="m").drafter == str(sources / "draft_model")
    assert conventions(tmp_path, SPECULATIVE_CONFIG='{"model": "other"}').drafter == str(sources / "other")
    assert conventions(tmp_path, SPECULATIVE_CONFIG="{}").drafter == str(sources / "draft_model")


def test_depth_of_parallel_drafting_sets_the_number_of_draft_tokens(tmp_path):
    config = {"model": "m", "parallel_drafting_spec": {"num_parallel_trees": 1, "prediction_depth": 5}}
    assert conventions(tmp_path, SPECULATIVE_CONFIG=json.dumps(config)).num_draft_tokens == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"parallel_drafting_spec": {"num_parallel_trees": 2}},
            "num_parallel_trees is 2, but draft trees are not supported",
        ),
        ({"parallel_drafting_spec": {"dept": 2}}, "unknown key 'dept'"),
        ({"parallel_drafting_spec": {"depth": 2}, "num_speculative_tokens": 3}, "num_speculative_tokens is 3, but"),
        ({"parallel_drafting_spec": 4}, "parallel_drafting_spec must be a JSON object, got 4"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number of at least 1, got 0"),
        ({"method": "ngram"}, "the method 'ngram' is not supported"),
        ({"model": 5}, "model must be a string, got 5"),
    ],
)
def test_speculation_that_we_do_not_have_is_refused_by_name(tmp_path, config, message):
    with pytest.raises(ConfigError) as caught:
        conventions(tmp_path, SPECULATIVE_CONFIG=json.dumps(config))
    assert message in str(caught.value) and "SM_VLLM_SPECULATIVE_CONFIG" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SPECULATIVE_CONFIG", "{", "SM_VLLM_SPECULATIVE_CONFIG is not valid JSON"),
        ("MAX_MODEL_LEN", "long", "SM_VLLM_MAX_MODEL_LEN must be a whole number, got 'long'"),
        ("GPU_MEMORY_UTILIZATION", "much", "SM_VLLM_GPU_MEMORY_UTILIZATION must be a number, got 'much'"),
        ("ALLOWED_ORIGINS", "*", "SM_VLLM_ALLOWED_ORIGINS must be a JSON list of strings, got '*'"),
        ("DTYPE", "[1, 2]", "SM_VLLM_DTYPE takes one value, got 2"),
    ],
)
def test_values_that_cannot_be_read_are_refused_by_the_variable(tmp_path, name, value, message):
    with pytest.raises(ConfigError) as caught:
        conventions(tmp_path, **{name: value})
    assert message in str(caught.value)


def test_the_command_line_comes_before_the_environment(tmp_path):
    found = conventions(
        tmp_path, MODEL="m", SPECULATIVE_CONFIG=P_EAGLE, MAX_NUM_SEQS="32", MAX_MODEL_LEN="100", PORT="1"
    )
    given = parse(Arguments, "serve", ["mine", "--max-batch", "4", "--num-draft-tokens", "2", "--port", "9000"])
    merged = with_conventions(given, found)
    assert merged.target.target == "mine" and merged.drafter.drafter == "amazon/head"
    assert (merged.engine.max_batch, merged.engine.max_length, merged.engine.max_waiting) == (4, 100, 256)
    assert merged.num_draft_tokens == 2 and merged.server.port == 9000 and merged.server.host == "0.0.0.0"
    plain = parse(Arguments, "serve", ["--num-draft-tokens", "0"])
    assert with_conventions(plain, found).drafter.drafter is None, "no drafts, no drafter"


def test_outside_a_container_only_this_machine_is_listened_to():
    merged = with_conventions(parse(Arguments, "serve", []), Conventions())
    assert merged.server.host is None and merged.target.target is None


def test_a_route_is_named_or_seen_from_the_body():
    known = ["/v1/chat/completions", "/v1/completions"]
    assert invocation_route(None, {"messages": []}, known) == known[0]
    assert invocation_route(None, {"prompt": ""}, known) == known[1]
    assert invocation_route("a=b, route=/v1/completions,c=d", {"messages": []}, known) == known[1]
    with pytest.raises(RequestError) as caught:
        invocation_route("route=/v1/embeddings", {}, known)
    assert "names an unknown route, '/v1/embeddings'" in str(caught.value)
    with pytest.raises(RequestError) as caught:
        invocation_route(None, [], known)
    assert "neither 'messages' nor 'prompt'" in str(caught.value)


def test_invocations_answer_what_the_openai_routes_answer(served, chat_body):
    whole = served.http.post("/v1/chat/completions", json=chat_body).json()
    invoked = served.http.post("/invocations", json=chat_body | {"model": ""}).json()
    assert invoked["choices"] == whole["choices"]
    ask = {"prompt": "the", "max_tokens": 4, "temperature": 0}
    text = served.http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/completions"}
    assert served.http.post("/invocations", json=ask, headers=headers).json()["choices"][0]["text"] == text
    with served.http.stream("POST", "/invocations", json=ask | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == text
    response = served.http.post("/invocations", json={"inputs": "the"})
    assert response.status_code == 400 and "neither 'messages' nor 'prompt'" in response.json()["error"]["message"]


def test_ping_is_a_look_at_a_flag(served):
    before = served.stats().num_steps
    for method in ("GET", "POST"):
        response = served.http.request(method, "/ping")
        assert response.status_code == 200 and response.content == b""
    assert served.stats().num_steps == before
