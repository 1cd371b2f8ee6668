"""`peagle eval`: acceptance on prompts, where the report goes, and the baseline on the card."""

import json
import shutil

import pytest

from peagle.checkpoint.card import BASELINE, SAMPLED_BASELINE, baseline_of, read_card


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
    assert document["num_prompts"] == 3 and document["kind"] == "decoded"
    assert len(document["per_position"]) == document["num_draft_tokens"] == 4
    assert document["acceptance_length"] == pytest.approx(1 + sum(document["per_position"]), abs=1e-3)
    assert document["num_tokens"] <= 36 and document["num_drafts"] >= 3
    assert {"workload", "target", "method", "dtype", "device", "max_tokens", "temperature"} <= document.keys()
    assert {"command", "commit", "versions", "hardware"} <= document["provenance"].keys()


def test_no_speed_is_reported_since_bench_measures_it(evaluate):
    assert not any("second" in key or "speed" in key for key in evaluate("--json").json)
    assert "tokens/s" not in evaluate().out


def test_it_ends_with_a_verdict_and_a_number_of_draft_tokens(evaluate):
    assert evaluate().out.splitlines()[-1].startswith("drafting ")
    document = evaluate("--json").json
    assert document["verdict"].startswith("drafting ") and 0 <= document["recommended_num_draft_tokens"] <= 4


def test_limit_takes_the_first_prompts(evaluate):
    assert evaluate("--json", "--limit", 2).json["num_prompts"] == 2


def test_the_table_shows_acceptance(evaluate):
    result = evaluate("--num-draft-tokens", 2)
    assert "acceptance length (K = 2)" in result.out and "accepted, by position" in result.out
    for part in ("prompt", "answer", "text"):
        assert f"acceptance length, by tokens of the {part}" in result.out


def test_acceptance_is_measured_by_length_of_the_text(evaluate):
    document = evaluate("--json").json
    for ranges in document["by_length"].values():
        assert sum(found["num_drafts"] for found in ranges.values()) == document["num_drafts"]
    assert list(document["by_length"]["answer"]) == ["0-127"], "answers of at most 12 tokens"


def test_the_shipped_prompts_are_recorded_as_the_baseline_of_the_drift_alarm(peagle, models, tmp_path):
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    on = ("--target", models / "target", "--drafter", drafter, "--dtype", "float32", "--max-tokens", 8, "--limit", 6)
    result = peagle("eval", *on, "--record", "--json")
    assert result.status == 0, result.err
    card = read_card(drafter)
    assert card is not None
    entry = card.acceptance[BASELINE]
    assert entry["prompts"] == "mixed_prompts" and entry["temperature"] == 0 and entry["num_prompts"] == 6
    assert entry["num_draft_tokens"] == len(entry["per_position"]) == 4
    assert entry.items() <= result.json.items()
    baseline = baseline_of(card.acceptance | {"held_out_replay": {"per_position": [1.0] * 4}}, 4)
    assert baseline is not None and baseline.length == pytest.approx(entry["acceptance_length"], abs=1e-3)
    assert baseline.source == "decoding mixed_prompts at temperature 0"
    assert peagle("eval", *on, "--record", "--temperature", 1).status == 0
    acceptance = read_card(drafter).acceptance
    assert acceptance[BASELINE] == entry and acceptance[SAMPLED_BASELINE]["temperature"] == 1
    assert peagle("doctor", drafter, "--target", models / "target", "--json").json["gate"]["passed"]


def test_sets_of_prompts_stand_beside_the_baseline_on_the_card(peagle, models, prompts, tmp_path):
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    on = ("--target", models / "target", "--drafter", drafter, "--dtype", "float32", "--max-tokens", 8, "--json")
    before = read_card(drafter).acceptance
    chat, code = (prompts.rename(tmp_path / "mt_bench.jsonl"), tmp_path / "code.jsonl")
    code.write_text(chat.read_text())
    named = [peagle("eval", *on, "--record", "--prompts", file).json for file in (chat, code)]
    sampled = peagle("eval", *on, "--record", "--prompts", code, "--temperature", 0.5)
    assert sampled.status == 0, sampled.err
    acceptance = read_card(drafter).acceptance
    added = acceptance.keys() - before.keys()
    assert added == {"mt_bench at temperature 0", "code at temperature 0", "code at temperature 0.5"}
    assert acceptance["code at temperature 0"].items() <= named[1].items()
    assert peagle("eval", *on, "--record", "--limit", 3).status == 0
    card = read_card(drafter)
    assert set(card.acceptance) == {*added, *before, BASELINE}
    assert baseline_of(card.acceptance, 4).source == "decoding mixed_prompts at temperature 0", "not of the sets"
    assert peagle("eval", *on, "--record", "--as-baseline", "--prompts", code).status == 0
    assert baseline_of(read_card(drafter).acceptance, 4).source == "decoding code at temperature 0"
    assert "--as-baseline needs --record" in peagle("eval", *on, "--as-baseline").err
