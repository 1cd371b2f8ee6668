"""The gate with a target whose weights are rounded: it says what that does to acceptance, and does not refuse it."""

import json
from pathlib import Path

import pytest
import torch

from harness.measured_gate import MeasuredGate
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.card import CARD_NAME, card_of
from peagle.checkpoint.native import save_drafter
from peagle.compare.evidence import record_evidence
from peagle.compare.gate import Check
from peagle.decoding.acceptance import Acceptance
from peagle.targets.few_bit import quantize_model
from peagle.targets.hf import HFTarget


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    target, directory = tiny_target(), tmp_path / "drafter"
    drafter = tiny_drafter(target)
    save_drafter(drafter, directory, card_of(drafter, target), full=True, dtype=torch.float32)
    record_evidence(directory, target)
    card = directory / CARD_NAME
    content = json.loads(card.read_text())
    content["evidence"]["acceptance"] |= {"num_drafts": 100, "accepted_per_position": [80, 40, 20, 10]}
    card.write_text(json.dumps(content))
    return directory


def rounded_target(*, is_quantized_directory: bool, directory: Path) -> HFTarget:
    target = tiny_target()
    if is_quantized_directory:
        (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
        target.directory = directory
    else:
        target.keep_fingerprint()
        target.rounded_to = "int4"
    quantize_model(target.model, "int4")
    return target


def checks(drafter: Path, target: HFTarget, *accepted: int) -> dict[str, Check]:
    verdict = MeasuredGate(drafter, target, "native", measure=lambda *_: Acceptance(100, accepted)).run()
    return {check.name: check for check in verdict.checks}


@pytest.mark.parametrize("is_quantized_directory", [False, True])
def test_the_effect_on_acceptance_is_a_line_and_no_refusal(
    drafter: Path, tmp_path: Path, is_quantized_directory: bool
) -> None:
    target = rounded_target(is_quantized_directory=is_quantized_directory, directory=tmp_path)
    found = checks(drafter, target, 70, 35, 20, 10)
    assert {check.status for check in found.values()} == {"pass", "warning", "not checked"}
    said = "their fingerprint differs" if is_quantized_directory else "as in training before they were rounded to int4"
    assert found["target weights"].status == "warning" and said in found["target weights"].found
    assert "the golden drafts belong to the plain target" in found["logits by depth"].found
    assert "acceptance length 2.350 here, 2.500 on the card" in found["acceptance"].found
    assert "(-6%)" in found["acceptance"].found and found["acceptance"].status == "warning"


def test_too_little_acceptance_is_not_blamed_on_rounding(drafter: Path, tmp_path: Path) -> None:
    target = rounded_target(is_quantized_directory=True, directory=tmp_path)
    failed = checks(drafter, target, 20, 5, 0, 0)["acceptance"]
    assert failed.status == "FAIL" and failed.cause is not None and "another model" in failed.cause


def test_another_tokenizer_still_fails(drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = rounded_target(is_quantized_directory=True, directory=tmp_path)
    monkeypatch.setattr(target.tokenizer, "chat_template", "another")
    assert checks(drafter, target, 80, 40, 20, 10)["chat template"].status == "FAIL"
