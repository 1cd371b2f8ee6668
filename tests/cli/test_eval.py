"""`peagle eval`: the report's keys, the comparison with plain decoding, and where the report goes."""

import json

import pytest


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the user", "another", "a third one")))
    return path


@pytest.fixture
def evaluate(peagle, on_models, prompts):
    def call(*argv):
        result = peagle("eval", "--prompts", prompts, "--max-tokens", 12, *on_models, *argv)
        assert result.status == 0, result.err
        return result

    return call


def test_the_document_is_the_last_line_of_stdout_and_complete(evaluate):
    result = evaluate("--json")
    document = result.json
    assert result.out.count("\n") == 1, "stdout is data"
    assert document["num_prompts"] == document["num_compared"] == document["num_identical"] == 3
    assert document["identical_to_plain"] is True and document["divergences"] == []
    assert len(document["per_position"]) == document["num_draft_tokens"] == 4
    assert document["acceptance_length"] == pytest.approx(1 + sum(document["per_position"]), abs=1e-3)
    assert document["num_tokens"] <= 36 and document["num_drafts"] >= 3
    assert document["speedup"] > 0 and document["tokens_per_second"] > 0
    assert {"workload", "target", "method", "dtype", "device", "max_tokens", "temperature"} <= document.keys()
    assert {"command", "commit", "versions", "hardware"} <= document["provenance"].keys()


def test_without_comparison_nothing_is_claimed_about_it(evaluate):
    document = evaluate("--json", "--no-compare").json
    assert document["identical_to_plain"] is None and document["speedup"] is None
    assert document["num_compared"] == 0 and document["plain_tokens_per_second"] is None


def test_seeded_samples_are_those_of_plain_decoding(evaluate):
    assert evaluate("--json", "--temperature", 1, "--seed", 5).json["identical_to_plain"] is True


def test_limit_takes_the_first_prompts(evaluate):
    assert evaluate("--json", "--limit", 2).json["num_prompts"] == 2


def test_the_table_has_the_comparison_only_where_there_was_one(evaluate):
    result = evaluate("--num-draft-tokens", 2)
    assert "acceptance length (K = 2)" in result.out and "3 of 3" in result.out and "speed-up" in result.out
    assert result.err == "", "quiet where stderr is no terminal"
    alone = evaluate("--no-compare").out
    assert "acceptance length (K = 4)" in alone and "speed-up" not in alone
