"""`peagle catalog`: the list, one model in full, JSON, and names that are not there."""

import pytest

NAMES = ["smollm2-135m-instruct", "gpt-oss-20b", "gpt-oss-120b", "qwen3-coder-30b-a3b-instruct", "gemma-4-31b-it"]


@pytest.fixture(autouse=True)
def _no_catalog_of_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("PEAGLE_CATALOG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_list_has_what_one_chooses_by(peagle):
    result = peagle("catalog")
    assert result.status == 0 and not result.err
    for name in NAMES:
        assert name in result.out
    for fact in (
        "openai/gpt-oss-20b",
        "amazon/GPT-OSS-20B-P-EAGLE",
        "amazon/gpt-oss-20b-p-eagle-long-context",
        "up to 10000 tokens",
        "above 10000 tokens",
        "61.1 GB native",
        "17.4 GB native",
        "17.4 GB vLLM",
        "ml.g7e.2xlarge",
        "Apache-2.0",
        "not public (JumpStart only)",
    ):
        assert fact in result.out, fact


def test_one_model_is_shown_in_full(peagle):
    out = peagle("catalog", "Qwen/Qwen3-Coder-30B-A3B-Instruct").out
    for fact in (
        "for vLLM Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8",
        "Qwen3MoeForCausalLM",
        "30.5 billion",
        "262144 tokens",
        "10 draft tokens recommended; trained for 18",
        "peagle serve qwen3-coder-30b-a3b-instruct --engine vllm",
    ):
        assert fact in out, fact
    assert "peagle serve gemma-4-31b-it --num-draft-tokens 0" in peagle("catalog", "gemma-4-31b-it").out


def test_json_has_every_entry_and_one_alone(peagle):
    document = peagle("catalog", "--json").json
    assert [entry["name"] for entry in document["entries"]] == NAMES and document["file"] is None
    one = peagle("catalog", "--json", "gpt-oss-120b").json
    assert one in document["entries"]
    assert (one["native_gb"], one["vllm_gb"]) == (68.6, 68.6)
    assert [drafter["min_length"] for drafter in one["drafters"]] == [0, 10_000]
    gemma = document["entries"][-1]
    assert [drafter["is_public"] for drafter in gemma["drafters"]] == [False]


def test_a_model_of_the_users_own_file_is_listed_with_it(peagle, tmp_path, monkeypatch):
    path = tmp_path / "own.toml"
    path.write_text(
        '[mine]\ntarget = "me/mine"\nnum_parameters = 1000000000\n'
        '[[mine.drafters]]\nvariant = "base"\nwhere = "hub"\nsource = "me/mine-p-eagle"\n'
    )
    monkeypatch.setenv("PEAGLE_CATALOG", str(path))
    document = peagle("catalog", "--json").json
    assert document["file"] == str(path) and document["entries"][-1]["name"] == "mine"
    assert "me/mine-p-eagle" in peagle("catalog", "mine").out
    path.write_text(path.read_text().replace("where", "were"))
    result = peagle("catalog")
    assert result.status == 2 and f"{path}, line 6: mine.drafters[0]: unknown key 'were'" in result.err
    assert "did you mean 'where'?" in result.err


def test_a_name_that_is_not_there_is_refused_with_the_nearest(peagle):
    result = peagle("catalog", "gpt-os-20b")
    assert result.status == 2 and "did you mean 'gpt-oss-20b'?" in result.err


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--target", "gemma-4-31b-it", "hello"],
        ["eval", "--target", "google/gemma-4-31B-it", "--prompts", "PROMPTS"],
        ["serve", "gemma-4-31b-it", "--port", "0"],
        ["serve", "gemma-4-31b-it", "--drafter", "base", "--port", "0"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_head_that_nobody_can_have_is_refused_before_its_target_is_asked_for(peagle, tmp_path, words):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    result = peagle(*(str(tmp_path / "prompts.jsonl") if word == "PROMPTS" else word for word in words))
    assert result.status == 2
    assert "JumpStart bundles it with the model" in result.err and "--num-draft-tokens 0" in result.err
    assert "downloading" not in result.err and "does not fit" not in result.err


def test_a_model_too_large_for_this_machine_is_refused_by_name_and_numbers(peagle, monkeypatch):
    monkeypatch.setattr("peagle.targets.capacity.available_bytes", lambda: 64_000_000_000)
    result = peagle("generate", "--target", "gpt-oss-120b", "--dtype", "bfloat16", "--device", "cpu", "hello")
    assert result.status == 2 and "116.8 billion parameters of 2 bytes (bfloat16) take 233.7 GB" in result.err
    assert "peagle serve gpt-oss-120b --engine vllm" in result.err
