"""A pair head beside the weights: written, read back, replaced, refused if it does not fit, and left out of exports."""

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.drafter_passes import card_for
from harness.pair_heads import random_head
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint import speculators, vllm
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.checkpoint.pair_head import as_stored
from peagle.compare.evidence import fingerprints, own_tensors
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError
from peagle.targets.hf import HFTarget
from peagle.vllm.command import Installed
from peagle.vllm.form import reason_to_convert
from peagle.vllm.models import facts_of

NAME = "pair_head.safetensors"


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(num_layers=4)


@pytest.fixture
def drafter(target: HFTarget) -> Drafter:
    drafter = tiny_drafter(target)
    drafter.pair_head = random_head(drafter, rank=3)
    return drafter


def save(drafter: Drafter, target: HFTarget, directory: Path, *, full: bool = False) -> Path:
    save_drafter(drafter, directory, card_for(target, drafter), full=full, dtype=torch.float32)
    return directory


def test_a_head_comes_back_and_the_weights_are_those_of_a_drafter_without(
    target: HFTarget, drafter: Drafter, tmp_path: Path
) -> None:
    loaded = load_drafter(save(drafter, target, tmp_path / "with"), target)
    assert drafter.pair_head is not None and loaded.pair_head is not None and loaded.pair_head.rank == 3
    for name, table in drafter.pair_head.state_dict().items():
        loaded_table = loaded.pair_head.state_dict()[name]
        assert torch.equal(loaded_table, as_stored(drafter.pair_head).state_dict()[name])
        assert ((loaded_table - table).abs() <= table.abs().amax(1, keepdim=True) / 127).all()
        assert torch.equal(loaded_table, as_stored(loaded.pair_head).state_dict()[name])
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    save(drafter.without_pair_head(), target, tmp_path / "without")
    assert not (tmp_path / "without" / NAME).exists()
    weights, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    assert weights.keys() == plain.keys() and all(torch.equal(weights[name], plain[name]) for name in plain)


def test_saving_a_drafter_without_a_head_removes_the_earlier_one(
    target: HFTarget, drafter: Drafter, tmp_path: Path
) -> None:
    save(drafter, target, tmp_path)
    save(drafter.without_pair_head(), target, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "drafter_card.json", "model.safetensors"]
    assert load_drafter(tmp_path, target).pair_head is None


def table(num_tokens: int, rank: int = 3) -> torch.Tensor:
    return torch.zeros(num_tokens, rank, dtype=torch.int8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"left": table(287)}, r"'left' has shape \[287, 3\], but .* \[288, 3\]"),
        ({"right": table(288, 4)}, r"'right' has shape \[288, 4\].* require \[288, 3\]"),
        ({"left": table(288, 0), "right": table(288, 0)}, r"'left' has shape \[288, 0\]"),
        ({"left": table(288)[:, 0]}, r"'left' has shape \[288\]"),
        ({"right": torch.zeros(288, 3)}, "'right' must be torch.int8, found torch.float32"),
        (
            {"more": table(1)},
            "must hold the tensors left, left_scale, right, right_scale, found left, left_scale, more",
        ),
        ({"right_scale": torch.ones(287, 1)}, r"'right_scale' has shape \[287, 1\]"),
        ({"right_scale": torch.full((288, 1), float("nan"))}, "'right_scale' holds NaN"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    target: HFTarget, drafter: Drafter, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    save(drafter, target, tmp_path)
    save_file(load_file(tmp_path / NAME) | {name: part.contiguous() for name, part in tensors.items()}, tmp_path / NAME)
    with pytest.raises(CheckpointError, match=message) as error:
        load_drafter(tmp_path, target)
    assert NAME in error.value.message and "delete it to serve the drafter without" in str(error.value.hint)


def test_a_drafter_that_drafts_token_by_token_has_no_use_for_a_head(
    target: HFTarget, drafter: Drafter, tmp_path: Path
) -> None:
    save(drafter, target, tmp_path / "parallel")
    sequential = tiny_drafter(target, parallel=False, norm_output=True)
    save(sequential, target, tmp_path / "sequential")
    shutil.copy(tmp_path / "parallel" / NAME, tmp_path / "sequential")
    with pytest.raises(CheckpointError, match="needs a parallel drafter, but this one drafts token by token"):
        load_drafter(tmp_path / "sequential", target)


@pytest.mark.parametrize("write", [vllm.write, speculators.write], ids=["vllm", "speculators"])
def test_an_export_leaves_the_head_out_and_says_so(
    target: HFTarget, drafter: Drafter, tmp_path: Path, write, caplog: pytest.LogCaptureFixture
) -> None:
    acceptance = {"baseline": {"pair_head": 3, "per_position": [0.9]}, "replay": {"per_position": [0.5]}}
    card = dataclasses.replace(card_for(target, drafter), acceptance=acceptance)
    with caplog.at_level(logging.INFO):
        write(drafter, target, card, tmp_path / "out", dtype=torch.float32)
    assert "leaving out the pair head of rank 3, which only peagle reads" in caplog.text
    assert not (tmp_path / "out" / NAME).exists()
    exported = load_drafter(tmp_path / "out", target)
    assert exported.pair_head is None
    assert exported.card is not None and exported.card.acceptance == {"replay": {"per_position": [0.5]}}


def test_vllm_is_never_given_a_directory_with_a_head(target: HFTarget, drafter: Drafter, tmp_path: Path) -> None:
    """vLLM would read the tables as weights of the network."""
    newest = Installed("0.32.0")
    save(drafter.without_pair_head(), target, tmp_path / "plain", full=True)
    assert reason_to_convert(tmp_path / "plain", facts_of(tmp_path / "plain"), newest) is None
    save(drafter, target, tmp_path / "paired", full=True)
    assert "pair head" in str(reason_to_convert(tmp_path / "paired", facts_of(tmp_path / "paired"), newest))


def test_a_card_identifies_a_drafter_without_its_head(target: HFTarget, drafter: Drafter) -> None:
    assert fingerprints(own_tensors(target, drafter)) == fingerprints(own_tensors(target, drafter.without_pair_head()))
