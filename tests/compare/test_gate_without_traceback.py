"""The gate says FAIL, with a cause, where files or numbers are so broken that computing with them would raise."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.card import CARD_NAME, card_of
from peagle.checkpoint.native import save_drafter
from peagle.compare import gate as check
from peagle.compare.evidence import record
from peagle.compare.gate import Check, Gate
from peagle.targets.hf import HFTarget

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def whole(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter in vLLM's form, with evidence."""
    made = tiny_drafter(target, draft_vocab_size=96)
    card = dataclasses.replace(card_of(made, target), evidence=record(target, made))
    directory = tmp_path_factory.mktemp("whole") / "drafter"
    save_drafter(made, directory, card, full=True, dtype=torch.float32)
    return directory


@pytest.fixture
def drafter(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be broken."""
    return shutil.copytree(whole, tmp_path / "drafter")


def failure(directory: Path, target: HFTarget, engine: str) -> Check:
    found = Gate(directory, target, engine).run().failure
    assert found is not None, "a broken drafter passed"
    return found


def narrowed(name: str):
    return lambda tensors: tensors.update({name: tensors[name][..., :-1].contiguous()})


FAULTS = {
    "a missing tensor": (
        lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"),
        "lacks the tensor 'layers.0.mlp.up_proj.weight'",
    ),
    "a misshapen mask_hidden": (narrowed("mask_hidden"), "'mask_hidden' has shape [191]"),
    "a misshapen tensor of a layer": (narrowed("layers.1.mlp.down_proj.weight"), "has shape [64, 127]"),
    "a misshapen table of ids": (narrowed("d2t"), "'d2t' has shape [95]"),
    "a tensor without a place": (
        lambda tensors: tensors.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        "holds the tensor 'layers.0.self_attn.q_proj.bias', which config.json has no place for",
    ),
    "embeddings without the mask row": (
        lambda tensors: tensors.update({"embed_tokens.weight": tensors["embed_tokens.weight"][:8].clone()}),
        "no row for the mask token",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_the_config_fail_without_a_card(name: str, target: HFTarget, drafter: Path) -> None:
    damage, found = FAULTS[name]
    tensors = load_file(drafter / WEIGHTS)
    damage(tensors)
    save_file(tensors, drafter / WEIGHTS)
    (drafter / CARD_NAME).unlink()
    said = failure(drafter, target, "vllm")
    assert said.name == "vLLM's rules" and found in said.found and said.cause, said
    failure(drafter, target, "native")


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_drafter_of_a_target_of_another_width_fails_without_a_card(engine: str, drafter: Path) -> None:
    (drafter / CARD_NAME).unlink()
    said = failure(drafter, tiny_target(hidden_size=32), engine)
    assert "target_hidden_size is 64" in said.found and "another target" in str(said.cause), said


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_pickled_file_that_is_cut_short_fails(engine: str, target: HFTarget, drafter: Path) -> None:
    torch.save(load_file(drafter / WEIGHTS), drafter / PICKLED)
    (drafter / WEIGHTS).unlink()
    content = (drafter / PICKLED).read_bytes()
    (drafter / PICKLED).write_bytes(content[: len(content) // 2])
    said = failure(drafter, target, engine)
    assert said.name == "files" and f"{PICKLED} cannot be read" in said.found and "truncated" in str(said.cause), said


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_logits_that_are_not_numbers_fail(
    engine: str, target: HFTarget, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = check.draft_logprobs
    monkeypatch.setattr(check, "draft_logprobs", lambda *arguments: [each * float("nan") for each in draft(*arguments)])
    said = failure(drafter, target, engine)
    assert said.name == "logits by depth" and "depth 0 differ by inf" in said.found, said
