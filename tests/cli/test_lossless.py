"""`peagle lossless`: the report, and its exit status."""

import json

import pytest

from peagle.compare import lossless
from peagle.decoding.verify import Verification

QUICK = "--max-tokens 12 --num-seeds 1 --num-samples 80 --temperature 0.2"


@pytest.fixture
def quick(on_models):
    return ["lossless", *on_models, *QUICK.split()]


def test_the_report_says_lossless_in_float32_with_every_number_and_its_provenance(peagle, quick, tmp_path):
    result = peagle(*quick, "--json", "--output", tmp_path / "report.md", "--report", tmp_path / "page.md")
    assert "Decoding with drafts is lossless" in (tmp_path / "page.md").read_text()
    document, kept = result.json, (tmp_path / "report.md").read_text()
    assert result.status == 0 and document["lossless"] is True, kept
    assert [each["num_identical"] for each in document["comparisons"]] == [4, 4, 4, 4]
    assert all(each["differences"] == [] for each in document["comparisons"])
    assert [each["limit"] is None for each in document["comparisons"]] == [True, True, True, False], "greedy is exact"
    distribution, _ = document["distributions"]
    assert distribution["num_samples"] == 80 == sum(distribution["observed"]) and distribution["num_cells"] > 2
    assert document["num_drafts"] > 0 and document["acceptance_length"] > 1
    drafts = [document["settings"][name] for name in ("num_draft_tokens", "tree_nodes", "verify_tokens")]
    assert drafts == [4, 31, None], "the default of an engine, and a drafter trained for four"
    assert "drafts as trees of 31 nodes, up to 4 deep, of which each pass verifies what pays." in kept
    assert document["provenance"]["versions"]["torch"] and len(document["drafter"]["tensors"]) == 32
    assert kept.startswith("# Losslessness of p-eagle decoding for target\n")
    assert "**LOSSLESS.** Every comparison below holds. In float32 no greedy token may differ," in kept
    for compared in (
        "reference decoder with drafts, plain",
        "engine with drafts, transformers.generate",
        "seeded sampling",
    ):
        assert compared in kept
    assert "p of the control" in kept and "## Provenance" in kept and document["target"]["weights"] in kept


@pytest.mark.slow
def test_without_json_the_report_is_shown_and_its_document_can_be_kept(peagle, quick, tmp_path):
    result = peagle(*quick, "--num-samples", "50", "--num-draft-tokens", 3, "--output", tmp_path / "report.json")
    assert result.status == 0 and result.out.startswith("# Losslessness of p-eagle decoding for target\n")
    assert "3 draft tokens per step. The" in result.out
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["lossless"] is True and document["settings"]["tree_nodes"] is None


@pytest.mark.slow
def test_a_decoder_that_keeps_a_wrong_token_is_not_lossless(peagle, quick, monkeypatch):
    def keep_all(wanted_BL, drafts_BK, num_draft_B):
        return Verification(num_draft_B, wanted_BL.gather(1, num_draft_B[:, None])[:, 0])

    monkeypatch.setattr("peagle.decoding.reference.keep_matches", keep_all)
    result = peagle(*quick, "--json")
    assert result.status == 1 and result.json["lossless"] is False
    first = result.json["comparisons"][0]
    assert not first["holds"] and first["differences"][0]["gap"] > 0, (
        "each difference is shown with the target's own gap"
    )


@pytest.mark.slow
def test_an_engine_that_samples_from_another_distribution_is_not_lossless(peagle, quick, monkeypatch):
    answer = lossless.answer_with_engine

    def answer_hotter(target, drafter, num_draft_tokens, prompts, params, **settings):
        hotter = [each if each.is_greedy else lossless_params(each) for each in params]
        return answer(target, drafter, num_draft_tokens, prompts, hotter, **settings)

    monkeypatch.setattr(lossless, "answer_with_engine", answer_hotter)
    result = peagle(*quick, "--json", "--num-samples", "120")
    assert result.status == 1
    assert [each["holds"] for each in result.json["comparisons"]] == [True, True, True, False], "greedy is untouched"
    assert not result.json["distributions"][0]["holds"], result.json["distributions"]


def lossless_params(params):
    import dataclasses

    return dataclasses.replace(params, temperature=params.temperature * lossless.CONTROL_TEMPERATURE)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--output", "report.txt"], "--output report.txt: the name must end in .md, .json"),
        (["--output", "none/report.md"], "there is no directory none"),
        (["--num-samples", "3"], "num_samples must be at least 50, got 3"),
        (["--temperature", "0"], "temperature must be more than 0, got 0.0"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--num-draft-tokens", "9"], "between 1 and 4, the depth it was trained for, got 9"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--tolerance", "0.9"], "answers with a tolerance are not lossless"),
    ],
)
def test_settings_that_cannot_be_are_refused(peagle, on_models, argv, message):
    result = peagle("lossless", *on_models, *argv)
    assert result.status == 2 and message in result.err and result.out == ""
