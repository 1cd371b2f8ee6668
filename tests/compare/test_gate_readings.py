"""The gate and what two engines read differently: maps of a whole vocabulary, and aux ids that look like another's."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.measured_gate import MeasuredGate
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint import vllm
from peagle.checkpoint.card import CARD_NAME, card_of, read_card
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.compare.evidence import record
from peagle.compare.gate import Engine, Verdict
from peagle.decoding.acceptance import Acceptance
from peagle.drafter.model import Drafter
from peagle.targets.hf import HFTarget

WEIGHTS = "model.safetensors"
WHOLE = torch.arange(288)
AUX_KEY = "eagle_aux_hidden_state_layer_ids"


def save(drafter: Drafter, target: HFTarget, directory: Path, *, full: bool) -> Path:
    card = dataclasses.replace(card_of(drafter, target), evidence=record(target, drafter))
    save_drafter(drafter, directory, card, full=full, dtype=torch.float32)
    return directory


def check(directory: Path, target: HFTarget, engine: Engine) -> Verdict:
    """The gate, decoding left out: it is not the question here."""
    card = read_card(directory)
    recorded = None if card is None or card.evidence is None else card.evidence.acceptance
    known = Acceptance(100, (30, 10, 0, 0))
    if recorded is not None:
        known = Acceptance(recorded.num_drafts, recorded.accepted_per_position)
    return MeasuredGate(directory, target, engine, measure=lambda *_: known).run()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[HFTarget, Path]:
    target = tiny_target()
    drafter = tiny_drafter(target)
    return target, save(drafter, target, tmp_path_factory.mktemp("whole") / "drafter", full=True)


def with_map(made: tuple[HFTarget, Path], directory: Path, d2t: torch.Tensor, *, has_card: bool) -> Path:
    for path in made[1].iterdir():
        if has_card or path.name != CARD_NAME:
            (directory / path.name).write_bytes(path.read_bytes())
    save_file(load_file(made[1] / WEIGHTS) | {"d2t": d2t}, directory / WEIGHTS)
    return directory


@pytest.mark.parametrize("has_card", [True, False], ids=["card", "no card"])
@pytest.mark.parametrize(
    ("d2t", "found", "cause"),
    [
        (WHOLE, "d2t holds absolute target ids, not offsets", "`peagle export` drops the table"),
        (WHOLE.flip(0) - WHOLE, "d2t is not all zeros, although the draft vocabulary is the full", "remove"),
        (torch.zeros(96, dtype=torch.long), "d2t has shape [96], config.json asks for [288]", "different drafters"),
    ],
    ids=["list of ids", "permutation", "of another size"],
)
def test_a_map_of_the_whole_vocabulary_that_vllm_would_apply_fails(
    made, tmp_path: Path, d2t: torch.Tensor, found: str, cause: str, has_card: bool
) -> None:
    directory = with_map(made, tmp_path, d2t, has_card=has_card)
    failure = check(directory, made[0], "vllm").failure
    assert failure is not None, "vLLM would draft other tokens"
    assert failure.name == "vLLM's rules" and found in failure.found and cause in str(failure.cause), failure


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_map_of_the_whole_vocabulary_that_changes_nothing_passes(made, tmp_path: Path, engine: Engine) -> None:
    directory = with_map(made, tmp_path, torch.zeros_like(WHOLE), has_card=True)
    verdict = check(directory, made[0], engine)
    assert verdict.passed, verdict.failure


def test_an_export_leaves_a_list_of_ids_out_and_passes(made, tmp_path: Path) -> None:
    target = made[0]
    (tmp_path / "listed").mkdir()
    drafter = load_drafter(with_map(made, tmp_path / "listed", WHOLE, has_card=True), target)
    vllm.write(drafter, target, card_of(drafter, target), tmp_path / "exported", dtype=torch.float32)
    verdict = check(tmp_path / "exported", target, "vllm")
    assert verdict.passed, verdict.failure


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["compact", "full"])
@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_drafter_trained_one_layer_before_the_default_is_not_taken_for_sglangs(
    tmp_path: Path, engine: Engine, full: bool
) -> None:
    target = tiny_target()
    target.tap(tuple(index - 1 for index in target.default_aux_layer_ids))
    directory = save(tiny_drafter(target), target, tmp_path, full=full)
    verdict = check(directory, target, engine)
    assert verdict.passed, verdict.failure
    assert "warning" not in {each.status for each in verdict.checks}


def test_ids_that_were_lowered_by_one_fail_where_the_card_says_otherwise(made, tmp_path: Path) -> None:
    directory = with_map(made, tmp_path, torch.zeros_like(WHOLE), has_card=True)
    values = json.loads((directory / "config.json").read_text())
    lowered = {AUX_KEY: [1, 3, 4]}
    (directory / "config.json").write_text(
        json.dumps(values | lowered | {"eagle_config": values["eagle_config"] | lowered})
    )
    for engine, name in (("native", "config"), ("vllm", "config in vLLM")):
        failure = check(directory, made[0], engine).failure
        assert failure is not None and failure.name == name, failure
        assert "aux_layer_ids is [1, 3, 4], recorded was [2, 4, 5]" in failure.found
        assert "off by one" in str(failure.cause)
