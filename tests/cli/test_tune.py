"""`peagle tune`: a measured load becomes a recommendation and a file that `serve` and `deploy` read."""

import json
import re
from dataclasses import replace

import pytest

from peagle.config import from_toml
from peagle.cost import dollars
from peagle.errors import TargetError
from peagle.report.build import report_of
from peagle.report.markdown import markdown_of
from peagle.tuning.recommend import recommend
from peagle.tuning.settings import Settings, with_settings


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_text("the user\nanother\n")
    return path


FEW = ("--max-tokens", 8, "--no-serve", "--concurrency", 1, "--num-draft-tokens", 2)
SMALL = ("--max-tokens", 8, "--no-serve", "--concurrency", "1,2", "--num-draft-tokens", 2)
SERVED = [word for word in SMALL if word != "--no-serve"]


def test_the_document_has_the_sweep_and_the_recommendation_that_follows_from_it(
    peagle, on_models, models, prompts, tmp_path
):
    settings = tmp_path / "tuned.toml"
    command = ("tune", "--prompts", prompts, "--output", settings, *SMALL, *on_models)
    result = peagle(*command, "--json")
    assert result.status == 0, result.err
    document = result.json
    assert {cell["label"] for cell in document["cells"]} == {"plain", "p-eagle K=2"}
    tuned = document["tuned"]
    assert tuned == recommend(document["cells"])
    measured = {cell["output_tokens_per_second"] for cell in document["cells"] if cell["label"] == tuned["label"]}
    assert tuned["expected"]["output_tokens_per_second"] in measured and tuned["expected"]["tpot_p99_ms"] > 0
    written = from_toml(Settings, settings)
    assert written.target == str(models / "target") and written.native.max_batch == tuned["max_batch"]
    text = markdown_of(report_of([document]))
    assert "Recommended: " in text and "With drafts, target decodes" in text, "`peagle report` takes it, too"
    words = with_settings(["--settings", str(settings)], "serve")
    assert ["--target", str(models / "target")] == words[2:4] and "--max-batch" in words


def test_the_engine_verifies_what_that_of_a_server_would(peagle, on_models, models, prompts, monkeypatch):
    from peagle.engine.llm import LLM

    made, start = [], LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda *own, **options: made.append(options) or start(*own, **options))
    words = ("--max-tokens", 8, "--concurrency", 1, "--num-draft-tokens", "auto,2")
    assert peagle("tune", "--prompts", prompts, *words, "--no-serve", "--json", *on_models).status == 0
    tuned = [(each["num_draft_tokens"], each["verify_tokens"]) for each in made]
    assert tuned == [(None, None), (None, None), (2, None)], "plain, auto, a limit of 2"
    made.clear()
    assert peagle("bench", "--prompts", prompts, *words, "--json", *on_models).status == 0
    assert [(each["num_draft_tokens"], each["verify_tokens"]) for each in made][1:] == [(None, None), (2, 0)]


def test_allowed_forms_of_the_weights_are_measured_after_the_weights_as_they_are(
    peagle, on_models, models, prompts, tmp_path, monkeypatch
):
    from peagle.cli import bench

    words = ("tune", "--prompts", prompts, *FEW, *on_models, "--allow-quantize", "int8,fp8")
    assert "--quantize int8 needs a GPU" in peagle(*words).err
    asked, run = [], bench.run_workload

    def pretended(sweep, results, *rest, **options):
        asked.append(sweep.target.quantize)
        if sweep.target.quantize == "fp8":
            raise TargetError("this target has no fp8")
        found = run(replace(sweep, target=replace(sweep.target, quantize=None)), results, *rest, **options)
        for result in results:
            result.seconds /= 1 if sweep.target.quantize is None else 1000
        return found

    monkeypatch.setattr(bench, "run_workload", pretended)
    monkeypatch.setattr("peagle.targets.few_bit.check_quantize", lambda *_: None)
    settings = tmp_path / "tuned.toml"
    result = peagle(*words, "--json", "--output", settings)
    assert result.status == 0 and asked == [None, "int8", "fp8"], result.err
    assert "--quantize fp8 was not measured: this target has no fp8" in result.err
    labels = [cell["label"] for cell in result.json["cells"]]
    assert labels == ["plain", "p-eagle K=2", "plain, int8", "p-eagle K=2, int8"]
    assert result.json["tuned"]["quantize"] == "int8" and 'quantize = "int8"' in settings.read_text()


def test_the_settings_name_the_drafter_of_the_recommended_method():
    from peagle.bench.offline import shipped_eagle3_drafter
    from peagle.cli import bench
    from peagle.cli.tune import drafter_of

    sweep = bench.Arguments()
    assert drafter_of(sweep, {"method": "p-eagle", "vllm": None}) is None, "the target's own"
    shipped = shipped_eagle3_drafter(None)
    assert shipped is not None and drafter_of(sweep, {"method": "eagle3", "vllm": None}) == shipped
    assert drafter_of(sweep, {"method": "none", "vllm": {"method": "eagle3"}}) == shipped


def test_a_price_adds_the_cost_of_every_setting_and_of_the_recommended_one(peagle, on_models, prompts, tmp_path):
    report, words = tmp_path / "tuned.md", ("tune", "--prompts", prompts, *SMALL, *on_models)
    result = peagle(*words, "--price-per-hour", 0.36, "--training-hours", 0.5, "--report", report)
    assert result.status == 0, result.err
    assert "price: $0.36 per hour (given with --price-per-hour, 20" in result.out
    found = re.search(r"Expect ([\d,.]+) tokens/s at concurrency ([\d.]+):", result.out)
    usd = dollars(0.36 / 3600 / float(found[1].replace(",", "")) * 1e6)
    said = re.search(rf"recommended setting at concurrency {found[2]}: (\S+) per million output tokens", result.out)
    assert float(said[1][1:]) == pytest.approx(float(usd[1:]), rel=0.01)
    assert "concurrency 2: $" in result.out and "training took 0.5 hours and cost $0.180" in result.out
    text = report.read_text()
    assert "## Recommendation\n" in text and "## Cost\n" in text and text.count("Recommended: ") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--price-per-hour", 0), "--price-per-hour must be above 0, got 0"),
        (("--price-per-hour", -2), "--price-per-hour must be above 0, got -2"),
        (("--instance", "ml.p9.huge"), "no price of the instance 'ml.p9.huge' is known"),
        (("--training-hours", 1), "--training-hours needs a price"),
        (("--report", "a.pdf"), "the name must end in .html, .md"),
    ],
)
def test_a_cost_without_a_price_is_refused_before_anything_is_loaded(peagle, prompts, options, message):
    result = peagle("tune", "--prompts", prompts, *options)
    assert result.status == 2 and message in result.err, result.err


def test_the_tables_end_with_the_recommendation(peagle, on_models, prompts, tmp_path):
    settings = tmp_path / "tuned.toml"
    result = peagle("tune", "--prompts", prompts, "--output", settings, "--request-rate", 1e6, *FEW, *on_models)
    assert result.status == 0, result.err
    for words in (
        "recommended: ",
        "Expect ",
        "does not keep up",
        "For vLLM: --num-draft-tokens",
        f"--settings {settings}",
    ):
        assert words in result.out, words


def test_what_to_expect_is_measured_on_a_server_with_the_recommended_settings(
    peagle, on_models, prompts, tmp_path, monkeypatch
):
    monkeypatch.setenv("PEAGLE_API_KEY", "of another server")
    settings, report = tmp_path / "tuned.toml", tmp_path / "tuned.md"
    words = ("tune", "--prompts", prompts, "--output", settings, "--report", report, *SERVED, *on_models)
    result = peagle(*words, "--json")
    assert result.status == 0, result.err
    tuned = result.json["tuned"]
    assert [row["concurrency"] for row in tuned["served"]] == [1, 2]
    assert all(row["output_tokens_per_second"] > 0 and row["ttft_p99_ms"] > 0 for row in tuned["served"])
    assert tuned["expected"] in tuned["served"] and tuned["expected"]["concurrency"] == tuned["max_batch"]
    shown = [row["served_tokens_per_second"] for row in tuned["by_concurrency"]]
    assert shown == [row["output_tokens_per_second"] for row in tuned["served"]]
    written = from_toml(Settings, settings).expected
    assert written["output_tokens_per_second"] == tuned["expected"]["output_tokens_per_second"]
    assert "as served" in result.json["verdict"] and "| served |" in report.read_text()


def test_without_a_server_the_recommendation_stays(peagle, on_models, prompts, monkeypatch):
    monkeypatch.setattr("peagle.tuning.served.START_SECONDS", 0)
    result = peagle("tune", "--prompts", prompts, *SERVED, *on_models)
    assert result.status == 0 and "was not served: `peagle serve` was not ready in time" in result.err, result.err
    assert "by the engine alone" in result.out


@pytest.mark.parametrize("is_served", [True, False])
def test_a_recording_is_a_load(peagle, on_models, tmp_path, is_served):
    rows = [
        {"id": str(number), "time": number, "num_answer_tokens": 6, "temperature": 0.0, "prompt_ids": [1, 70 + number]}
        for number in range(3)
    ]
    (tmp_path / "traffic-00000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for word in FEW[2:] if not (is_served and word == "--no-serve")]
    result = peagle("tune", "--recording", tmp_path, "--json", *words, *on_models)
    assert result.status == 0, result.err
    served = result.json["tuned"].get("served")
    assert (len(served) == 1 and served[0]["output_tokens_per_second"] > 0) if is_served else served is None
    assert result.json["num_prompts"] == 3 and result.json["workload"] == "recording"
    assert result.json["max_tokens"] == 6 and result.json["tuned"]["request_rate"] == 1.0


def test_an_interrupted_run_shows_what_was_measured_and_recommends_nothing(
    peagle, on_models, prompts, tmp_path, monkeypatch
):
    from peagle.bench import offline

    def interrupted(llm, cell, *words, **options):
        if cell.method != "none":
            raise KeyboardInterrupt
        return measured(llm, cell, *words, **options)

    measured = offline.run_cell
    monkeypatch.setattr(offline, "run_cell", interrupted)
    result = peagle("tune", "--prompts", prompts, "--output", tmp_path / "tuned.toml", "--json", *FEW, *on_models)
    assert result.status == 130 and result.json["tuned"] is None and len(result.json["cells"]) == 1
    assert not (tmp_path / "tuned.toml").exists()


def test_deploy_reads_the_settings(peagle, models, tmp_path):
    settings = tmp_path / "tuned.toml"
    places = {"target": str(models / "target"), "drafter": str(models / "drafter")}
    lines = [f"{name} = {json.dumps(place)}" for name, place in places.items()]
    settings.write_text("\n".join([*lines, "[vllm]", "num_draft_tokens = 3", "max_num_seqs = 24"]))
    result = peagle("deploy", "vllm", "--settings", settings)
    assert result.status == 0, result.err
    assert "--max-num-seqs 24" in result.out and '"num_speculative_tokens":3' in result.out.replace(": ", ":")
    given = peagle("deploy", "vllm", "--settings", settings, "--num-draft-tokens", 2, "--", "--max-num-seqs", 8)
    assert "--max-num-seqs 8" in given.out and '"num_speculative_tokens":2' in given.out.replace(": ", ":")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "tune needs one load"),
        (("--prompts", "p", "--recording", "d"), "tune needs one load"),
        (("--prompts", "p", "--methods", "p-eagle"), "--methods needs none and a method that drafts"),
        (("--prompts", "p", "--max-tpot", 0), "--max-tpot must be above 0"),
        (("--prompts", "p", "--request-rate", -1), "--request-rate must be above 0"),
        (("--prompts", "p", "--output", "a.json"), "must end in .toml"),
        (("--recording", "nowhere"), "holds no recording"),
        (("--prompts", "p", "--allow-quantize", "fp8", "--quantize", "int8"), "contradicts --quantize"),
    ],
)
def test_what_cannot_be_tuned_is_refused_at_once(peagle, options, message):
    result = peagle("tune", *options)
    assert result.status == 2 and message in result.err, result.err
