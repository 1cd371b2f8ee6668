"""`peagle doctor`: the machine, and a drafter's fit to a target."""

import json
import shutil

import torch

from peagle import __version__


def test_without_a_directory_the_machine_is_described(peagle):
    result = peagle("doctor")
    assert result.status == 0
    assert torch.__version__ in result.out and __version__ in result.out
    assert "fits the target" not in result.out


def test_the_machine_as_json(peagle):
    result = peagle("doctor", "--json", "--device", "cpu", "--dtype", "float32")
    assert result.out.count("\n") == 1
    machine = result.json["machine"]
    assert list(result.json) == ["machine"]
    assert machine["torch"] == torch.__version__ and machine["dtype"] == "float32" and machine["device"] == "cpu"


def test_a_drafter_that_fits_is_described(peagle, models, on_models):
    result = peagle("doctor", models / "drafter", "--target", models / "target", "--json")
    assert result.status == 0, result.err
    drafter = result.json["drafter"]
    assert drafter["fits_the_target"] == "yes" and drafter["method"] == "p-eagle"
    assert drafter["num_layers"] == 2 and drafter["most_draft_tokens"] == 4
    assert result.json["target"]["num_layers"] == 8
    by_flag = peagle("doctor", "--json", *on_models).json
    assert by_flag["drafter"] == drafter


def test_the_tables_say_the_same(peagle, on_models):
    result = peagle("doctor", *on_models)
    assert "fits the target" in result.out and "p-eagle" in result.out and result.err == ""


def test_a_target_without_a_shipped_drafter_is_described_alone(peagle, models):
    document = peagle("doctor", "--target", models / "target", "--json").json
    assert document["target"]["vocab_size"] == 288 and "drafter" not in document


def test_a_mismatch_that_is_allowed_is_still_said(peagle, models):
    argv = ("doctor", models / "drafter", "--target", models / "stranger", "--json")
    refused = peagle(*argv)
    assert refused.status == 2 and "its weights are not the ones the drafter was trained on" in refused.err
    allowed = peagle(*argv, "--allow-mismatch").json["drafter"]
    assert allowed["fits_the_target"] == "its weights are not the ones the drafter was trained on"


def test_measured_acceptance_is_shown_and_a_missing_card_is_said(peagle, models, tmp_path):
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    card = json.loads((drafter / "drafter_card.json").read_text())
    card["acceptance"] = {"mt_bench": {"acceptance_length": 2.5}}
    (drafter / "drafter_card.json").write_text(json.dumps(card))
    argv = ("doctor", drafter, "--target", models / "target")
    assert peagle(*argv, "--json").json["drafter"]["acceptance_length_mt_bench"] == 2.5
    (drafter / "drafter_card.json").unlink()
    result = peagle(*argv)
    assert "it has no card to check weights and tokenizer by" in result.out and "unknown" in result.out
