"""`peagle doctor`: the machine, a drafter's fit to a target, and the gate as a command."""

import json
import shutil

import pytest
import torch

from peagle import __version__
from peagle.compare.evidence import PROMPTS_PATH


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
    assert result.json["target"]["num_layers"] == 3
    by_flag = peagle("doctor", "--json", *on_models).json
    assert by_flag["drafter"] == drafter


def test_the_tables_say_the_same(peagle, on_models):
    result = peagle("doctor", *on_models)
    assert "fits the target" in result.out and "p-eagle" in result.out
    assert result.out.startswith("PASS for native"), "the verdict comes first"
    assert peagle("doctor").out.startswith("READY on cpu")


def test_a_target_without_a_shipped_drafter_is_described_alone(peagle, models):
    document = peagle("doctor", "--target", models / "target", "--json").json
    assert document["target"]["vocab_size"] == 288 and "drafter" not in document


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ('where = "jumpstart"', "none: the published drafter of 'house-model' cannot be downloaded"),
        ('where = "directory"\nsource = "./gone"', "none: no drafter at"),
    ],
    ids=["jumpstart", "directory"],
)
def test_a_target_whose_drafter_cannot_be_had_is_still_described(peagle, models, tmp_path, monkeypatch, where, found):
    catalog = tmp_path / "catalog.toml"
    entry = f'[house-model]\ntarget = "{models / "target"}"\nnum_parameters = 1_000_000\ntitle = "our own"\n'
    catalog.write_text(f'{entry}[[house-model.drafters]]\nvariant = "base"\n{where}\n')
    monkeypatch.setenv("PEAGLE_CATALOG", str(catalog))
    result = peagle("doctor", "--target", "house-model", "--json")
    assert result.status == 0, result.err
    assert result.json["target"]["name"] == "house-model"
    assert result.json["drafter"]["found"].startswith(found) and result.json["drafter"]["hint"]
    assert "none:" in peagle("doctor", "--target", "house-model").out


def test_a_mismatch_fails_and_one_that_is_allowed_is_still_said(peagle, models):
    argv = ("doctor", models / "drafter", "--target", models / "stranger", "--json")
    refused = peagle(*argv)
    assert refused.status == 1 and "drafter" not in refused.json, "it is not loaded for another target"
    assert refused.json["gate"]["first_difference"]["name"] == "target weights"
    allowed = peagle(*argv, "--allow-mismatch").json["drafter"]
    assert allowed["fits_the_target"] == "its weights are not the ones the drafter was trained on"


def test_measured_acceptance_is_shown_and_a_missing_card_is_said(peagle, models, tmp_path):
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    edit_card(drafter, lambda card: card.update(acceptance={"mt_bench": {"acceptance_length": 1.01}}))
    argv = ("doctor", drafter, "--target", models / "target")
    assert peagle(*argv, "--json").json["drafter"]["acceptance_length_mt_bench"] == 1.01
    (drafter / "drafter_card.json").unlink()
    result = peagle(*argv)
    assert "no card, so weights and tokenizer are not checked" in result.out and "unknown" in result.out
    assert "PASS for native; not checked: card, target weights, tokenizer" in result.out


def edit_card(drafter, change):
    card = json.loads((drafter / "drafter_card.json").read_text())
    change(card)
    (drafter / "drafter_card.json").write_text(json.dumps(card))


@pytest.mark.slow
def test_recorded_evidence_makes_every_check_possible(peagle, models, tmp_path):
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    argv = ("doctor", drafter, "--target", models / "target", "--dtype", "float32")
    before = peagle(*argv, "--json")
    assert before.status == 0 and "logits by depth" in before.json["gate"]["not_checked"]
    recorded = peagle(*argv, "--record", "--json").json["gate"]
    assert recorded["passed"] and recorded["not_checked"] == []
    assert {check["status"] for check in recorded["checks"]} == {"pass"}
    result = peagle(*argv)
    assert result.status == 0 and result.out.splitlines()[0] == "PASS for native"


@pytest.mark.parametrize(
    ("name", "damage", "found"),
    [
        ("model.safetensors", lambda content: content[:-100], "model.safetensors is truncated"),
        ("config.json", lambda content: content[:-100], "config.json is not valid JSON"),
        ("drafter_card.json", lambda content: content[:-100], "drafter_card.json cannot be read"),
    ],
)
def test_a_damaged_file_fails_with_status_1_and_the_cause_on_stdout(peagle, models, tmp_path, name, damage, found):
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    (drafter / name).write_bytes(damage((drafter / name).read_bytes()))
    result = peagle("doctor", drafter, "--target", models / "target")
    assert result.status == 1 and "error" not in result.err, "it is the answer, not a mistake of the user"
    failure, cause = result.out.splitlines()[:2]
    assert failure.startswith("FAIL: ") and found in failure and cause.startswith("likely cause: ")


def test_vllm_that_is_not_there_is_said_and_its_rules_are_checked(peagle, models, tmp_path, monkeypatch):
    monkeypatch.delenv("PEAGLE_VLLM_PYTHON", raising=False)
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    result = peagle(
        "doctor", drafter, "--target", models / "target", "--engine", "vllm", "--dtype", "float32", "--json"
    )
    assert result.status == 0
    checks = {check["name"]: check for check in result.json["gate"]["checks"]}
    assert checks["vLLM's rules"]["status"] == "pass" and checks["export"]["status"] == "pass"
    assert checks["vLLM itself"]["status"] == "not checked"
    assert "only its reading rules were checked" in checks["vLLM itself"]["found"]


def test_a_vllm_that_is_not_a_program_is_refused(peagle, models, monkeypatch):
    monkeypatch.setenv("PEAGLE_VLLM_PYTHON", "none")
    result = peagle("doctor", models / "drafter", "--target", models / "target", "--engine", "vllm")
    assert result.status == 2 and "none is not an executable" in result.err


def test_vllm_that_cannot_run_the_directory_fails_the_gate(peagle, models, tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_VLLM_PYTHON", "/bin/false")
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    argv = ("doctor", drafter, "--target", models / "target", "--engine", "vllm")
    result = peagle(*argv, "--json")
    failure = result.json["gate"]["first_difference"]
    assert result.status == 1 and failure["name"] == "vLLM itself"
    assert (
        failure["found"].startswith("vLLM did not run it: the vLLM judge failed")
        and "exit status 1" in failure["found"]
    )


def test_given_prompts_are_measured_but_have_no_figure_on_the_card(peagle, models, tmp_path):
    prompts = [*json.loads(PROMPTS_PATH.read_text()), "the user"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    argv = ("doctor", models / "drafter", "--target", models / "target", "--prompts", tmp_path / "prompts.jsonl")
    checks = {check["name"]: check for check in peagle(*argv, "--json").json["gate"]["checks"]}
    assert checks["acceptance"]["found"].endswith("the card has no figure for these prompts")
