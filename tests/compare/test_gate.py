"""The gate: a sound drafter passes for both engines, and each known fault fails with its own cause.

The table breaks copies of the shipped drafter, one thing at a time; what needs a small vocabulary is broken in a tiny
one. Almost every fault is named before anything is computed, so a row costs about a second.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.measured_gate import MeasuredGate
from harness.tiny_models import CHATML, tiny_drafter, tiny_target
from peagle.checkpoint import vllm
from peagle.checkpoint.card import CARD_NAME, card_of, read_card
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.compare.evidence import record, record_evidence
from peagle.compare.gate import Verdict
from peagle.decoding.acceptance import Acceptance
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target

ENGINES = ("native", "vllm")
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    (directory / WEIGHTS).unlink()  # copies share the file
    save_file(tensors, directory / WEIGHTS)


def set_config(**changes: Any) -> Callable[[Path], None]:
    def change(values: dict[str, Any]) -> None:
        for key, value in changes.items():
            values[key] = value
            if key in values["eagle_config"]:
                values["eagle_config"][key] = value

    return lambda directory: edit_json(directory / CONFIG, change)


def truncate(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).write_bytes(content[: len(content) * 9 // 10])


def shifted_aux_ids(directory: Path) -> None:
    ids = json.loads((directory / CONFIG).read_text())["eagle_aux_hidden_state_layer_ids"]
    set_config(eagle_aux_hidden_state_layer_ids=[index + 1 for index in ids])(directory)
    edit_json(directory / CARD_NAME, lambda card: card.update(aux_layer_ids=[index + 1 for index in ids]))


@dataclass(frozen=True)
class Fault:
    """What is broken, and the words in which each engine's gate must say so."""

    damage: Callable[[Path], None]
    found: str
    cause: str
    check: tuple[str, str] = ("config", "config in vLLM")
    form: str | None = None
    """the form that is broken; by default the compact one for our engine, the exported one for vLLM"""


FAULTS = {
    "aux ids off by one": Fault(shifted_aux_ids, "aux_layer_ids is [", "the ids are off by one"),
    "wrong rope theta": Fault(
        set_config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rope_theta=10000.0),
        "rope_parameters is",
        "rope theta is 10000 instead of 100000",
    ),
    "norm flag flipped": Fault(
        set_config(norm_before_residual=True), "norm_before_residual is True", "the norm flag was flipped"
    ),
    "wrong mask token": Fault(
        set_config(mask_token_id=3, pard_token=3, ptd_token_id=3), "mask_token_id is 3", "another embedding row"
    ),
    "mask_hidden zeroed": Fault(
        lambda directory: edit_tensors(directory, lambda tensors: tensors["mask_hidden"].zero_()),
        "mask_hidden is all zeros",
        "was zeroed",
        ("tensors", "tensors in vLLM"),
    ),
    "embeddings dropped": Fault(
        lambda directory: edit_tensors(directory, lambda tensors: tensors.pop("embed_tokens.weight")),
        "embed_tokens.weight is missing",
        "the trained mask row with them",
        ("tensors", "tensors in vLLM"),
        form="exported",
    ),
    "truncated file": Fault(truncate, "model.safetensors is truncated", "the copy was interrupted", ("files", "files")),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return load_target(None, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def forms(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped drafter as it ships, and as `peagle export` writes it for vLLM."""
    shipped = target.shipped_drafter
    drafter = load_drafter(shipped, target)
    exported = tmp_path_factory.mktemp("exported") / "drafter"
    vllm.write(drafter, target, card_of(drafter, target), exported)
    return {"compact": shipped, "exported": exported}


def copy(source: Path, destination: Path) -> Path:
    """A copy whose weights are the same file until they are edited."""
    destination.mkdir()
    for name in (CONFIG, CARD_NAME):
        shutil.copy(source / name, destination)
    (destination / WEIGHTS).symlink_to((source / WEIGHTS).resolve())
    return destination


def save_with_evidence(drafter: Drafter, target: HFTarget, directory: Path, *, full: bool = True) -> Path:
    card = dataclasses.replace(card_of(drafter, target), evidence=record(target, drafter))
    save_drafter(drafter, directory, card, full=full, dtype=torch.float32)
    return directory


@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAULTS)
def test_one_broken_thing_fails_with_its_cause(
    name: str, engine: str, target: HFTarget, forms: dict[str, Path], tmp_path: Path
) -> None:
    fault = FAULTS[name]
    form = fault.form or {"native": "compact", "vllm": "exported"}[engine]
    directory = copy(forms[form], tmp_path / "drafter")
    fault.damage(directory)
    verdict = MeasuredGate(directory, target, engine).run()
    assert_failed(verdict, fault.check[ENGINES.index(engine)], fault.found, fault.cause)


def assert_failed(verdict: Verdict, check: str, found: str, cause: str) -> None:
    failure = verdict.failure
    assert failure is not None, "a broken drafter passed"
    assert failure.name == check and found in failure.found, failure
    assert failure.cause is not None and cause in failure.cause, failure
    after = verdict.checks[verdict.checks.index(failure) + 1 :]
    assert {each.status for each in after} <= {"not reached"}, "the first difference ends the examination"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_changed_chat_template_fails_with_its_cause(
    engine: str, target: HFTarget, forms: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", CHATML + "\n")
    verdict = MeasuredGate(forms["compact"], target, engine).run()
    assert_failed(verdict, "chat template", "chat template is not the one used in training", "the template was edited")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_shipped_drafter_passes(engine: str, target: HFTarget, forms: dict[str, Path]) -> None:
    # Both engines' readings are compared tensor by tensor and by their logits; decoding twice would tell nothing new.
    measure = None if engine == "native" else as_on_card(forms["compact"])
    verdict = MeasuredGate(forms["compact"], target, engine, measure=measure).run()
    assert verdict.passed, verdict.failure
    assert verdict.unchecked == ([] if engine == "native" else ["vLLM itself"])
    assert {check.status for check in verdict.checks} <= {"pass", "not checked"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[HFTarget, Path]:
    """A tiny target, and a drafter of a small vocabulary in vLLM's form, with evidence."""
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=96)
    drafter.d2t.copy_(torch.arange(96))  # every second token
    return target, save_with_evidence(drafter, target, tmp_path_factory.mktemp("tiny") / "drafter")


@pytest.fixture
def copied(tiny: tuple[HFTarget, Path], tmp_path: Path) -> tuple[HFTarget, Path]:
    """The same, to be broken."""
    target, source = tiny
    return target, copy(source, tmp_path / "drafter")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_small_vocabulary_passes(engine: str, tiny: tuple[HFTarget, Path]) -> None:
    target, directory = tiny
    verdict = MeasuredGate(directory, target, engine, measure=as_on_card(directory)).run()
    assert verdict.passed, verdict.failure


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "found", "cause"),
    [
        (lambda d2t: d2t + torch.arange(96), "d2t holds absolute target ids, not offsets", "subtract the index"),
        (torch.zeros_like, "d2t is all zeros", "before it was filled"),
        (lambda d2t: d2t + 1, "d2t has other values", "another drafter"),
    ],
)
def test_a_wrong_vocabulary_table_fails_with_its_cause(engine, change, found, cause, copied) -> None:
    target, directory = copied
    edit_tensors(directory, lambda tensors: tensors.update(d2t=change(tensors["d2t"])))
    check = "tensors" if engine == "native" else "tensors in vLLM"
    assert_failed(MeasuredGate(directory, target, engine).run(), check, found, cause)


@pytest.mark.parametrize(
    ("damage", "check", "found", "cause"),
    [
        (
            lambda tensors: tensors.update(
                {f"model.{name}": tensors.pop(name) for name in ("fc.weight", "norm.weight")}
            ),
            "vLLM's rules",
            "vLLM has no place for the tensor 'model.fc.weight'",
            "the prefix `model.`",
        ),
        (lambda tensors: tensors.pop("mask_hidden"), "vLLM's rules", "mask_hidden is missing", "vLLM refuses to start"),
        (lambda tensors: tensors.pop("d2t"), "vLLM's rules", "d2t is missing", "silently"),
        (lambda tensors: tensors.pop("lm_head.weight"), "vLLM's rules", "lm_head.weight is missing", "not some rows"),
        (
            lambda tensors: tensors["embed_tokens.weight"][7:9].add_(1),
            "tensors in vLLM",
            "2 rows of embed_tokens.weight are not the target's",
            "another target or revision",
        ),
        (
            lambda tensors: tensors["layers.1.mlp.up_proj.weight"].mul_(1.5),
            "tensors in vLLM",
            "1 of 27 tensors have other values, first 'layers.1.mlp.up_proj.weight'",
            "trained or edited after the card was written",
        ),
    ],
)
def test_what_vllm_would_refuse_or_take_wrongly_is_named(damage, check, found, cause, copied) -> None:
    target, directory = copied
    edit_tensors(directory, damage)
    assert_failed(MeasuredGate(directory, target, "vllm").run(), check, found, cause)


@pytest.mark.parametrize(
    ("changes", "check", "found"),
    [
        ({"dflash_config": {"mask_token_id": 5}}, "config in vLLM", "mask_token_id is 5"),
        ({"pard_token": 5, "ptd_token_id": 5}, None, ""),
        ({"fc_norm": False}, "vLLM's rules", "fc_norm is false as vLLM reads config.json"),
        ({"num_aux_hidden_states": 4}, "vLLM's rules", "3 target states (layers [2, 4, 5]) into an fc built for 4"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 2, 4]}, None, ""),
        ({"architectures": ["LlamaForCausalLMPeagle"]}, "vLLM's rules", "which vLLM does not know"),
        ({"max_position_embeddings": 1024}, None, ""),
    ],
)
def test_vllms_own_reading_of_the_config_decides(changes, check, found, copied) -> None:
    target, directory = copied
    edit_json(directory / CONFIG, lambda values: values.update(changes))
    verdict = MeasuredGate(directory, target, "vllm", measure=as_on_card(directory)).run()
    if check is None:
        assert verdict.passed, f"vLLM reads the same drafter here: {verdict.failure}"
    else:
        assert_failed(verdict, check, found, "")


def sometimes_right(*_: object) -> Acceptance:
    return Acceptance(100, (30, 10, 0, 0))


def as_on_card(directory: Path) -> Callable[..., Acceptance]:
    """Stands in for decoding where that is not the question."""
    recorded = read_card(directory).evidence.acceptance
    return lambda *_: Acceptance(recorded.num_drafts, recorded.accepted_per_position)


def test_a_copy_in_float16_is_left_to_the_logits_but_zeros_are_not(copied) -> None:
    target, directory = copied
    edit_tensors(
        directory, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items() if v.is_floating_point()})
    )
    verdict = MeasuredGate(directory, target, "native", measure=as_on_card(directory)).run()
    assert verdict.passed, verdict.failure
    assert "are left to the logits" in next(check.found for check in verdict.checks if check.name == "tensors")
    edit_tensors(directory, lambda tensors: tensors["mask_hidden"].zero_())
    assert_failed(MeasuredGate(directory, target, "native").run(), "tensors", "mask_hidden is all zeros", "was zeroed")


def test_logits_notice_what_config_and_fingerprints_do_not(copied) -> None:
    target, directory = copied
    set_config(norm_before_residual=True)(directory)
    edit_json(directory / CARD_NAME, lambda card: card["evidence"]["config"].update(norm_before_residual=True))
    verdict = MeasuredGate(directory, target, "native").run()
    assert_failed(
        verdict, "logits by depth", "log-probabilities at depth 0 differ by", "the engine computes differently"
    )


@pytest.mark.parametrize(
    ("accepted", "found"),
    [((20, 0, 0, 0), "at position 0 0.200 of the drafts are accepted"), ((0, 0, 0, 0), "no draft token was accepted")],
)
def test_acceptance_of_the_engine_is_compared_with_the_card(accepted, found, copied) -> None:
    target, directory = copied
    figures = {"num_drafts": 100, "accepted_per_position": [30, 10, 0, 0]}
    edit_json(directory / CARD_NAME, lambda card: card["evidence"]["acceptance"].update(figures))
    assert MeasuredGate(directory, target, "native", measure=sometimes_right).run().passed
    verdict = MeasuredGate(directory, target, "native", measure=lambda *_: Acceptance(100, accepted)).run()
    assert_failed(verdict, "acceptance", found, "")


def test_a_drafter_without_evidence_gets_the_checks_that_are_possible(copied) -> None:
    target, directory = copied
    edit_json(directory / CARD_NAME, lambda card: card.update(evidence=None))
    verdict = MeasuredGate(directory, target, "native", measure=sometimes_right).run()
    assert verdict.passed and verdict.unchecked == ["card", "config", "tensors", "logits by depth", "acceptance"]
    (directory / CARD_NAME).unlink()
    verdict = MeasuredGate(directory, target, "native", measure=sometimes_right).run()
    assert verdict.passed and set(verdict.unchecked) >= {"target weights", "tokenizer", "chat template"}
    edit_tensors(directory, lambda tensors: tensors["mask_hidden"].zero_())
    assert_failed(MeasuredGate(directory, target, "native").run(), "tensors", "mask_hidden is all zeros", "was zeroed")


def test_absolute_ids_are_recognized_without_evidence_too(copied) -> None:
    target, directory = copied
    (directory / CARD_NAME).unlink()
    edit_tensors(directory, lambda tensors: tensors.update(d2t=torch.arange(96) * 3))
    assert_failed(
        MeasuredGate(directory, target, "vllm").run(), "tensors in vLLM", "absolute target ids", "subtract the index"
    )


def test_figures_for_other_prompts_still_show_a_collapse(copied) -> None:
    target, directory = copied
    promised = {"mt_bench": {"acceptance_length": 3.0}}
    edit_json(directory / CARD_NAME, lambda card: card.update(evidence=None, acceptance=promised))
    verdict = MeasuredGate(directory, target, "native", measure=sometimes_right).run()
    assert_failed(verdict, "acceptance", "the lowest acceptance length on the card is 3.000", "aux layers, norms")


def test_another_target_fails_and_may_be_allowed(tiny) -> None:
    _, directory = tiny
    stranger = tiny_target(seed=7)
    verdict = MeasuredGate(directory, stranger, "native").run()
    assert_failed(verdict, "target weights", "not those it was trained on", "another revision")
    verdict = MeasuredGate(directory, stranger, "native", allow_mismatch=True, measure=sometimes_right).run()
    assert [check.name for check in verdict.checks if check.status == "warning"] == ["target weights"]
    assert {"logits by depth", "acceptance"} <= set(verdict.unchecked), "another target's figures are not compared"


@pytest.mark.slow
def test_evidence_is_added_once_and_does_not_vouch_for_other_weights(copied) -> None:
    target, directory = copied
    before = read_card(directory).evidence
    edit_json(directory / CARD_NAME, lambda card: card.update(evidence=None))
    assert record_evidence(directory, target).evidence == before
    assert record_evidence(directory, target).evidence == before, "the same weights may be recorded again"
    (directory / CARD_NAME).unlink()
    assert record_evidence(directory, target).evidence.tensors == before.tensors, "a card is made where there is none"
    content = (directory / CARD_NAME).read_text()
    edit_tensors(directory, lambda tensors: tensors["fc.weight"].mul_(2))
    with pytest.raises(CheckpointError) as caught:
        record_evidence(directory, target)
    assert "has evidence of other weights: 'fc.weight' and 0 more" in caught.value.message
    assert (directory / CARD_NAME).read_text() == content, "a refusal writes nothing"


@pytest.mark.slow
def test_an_eagle3_drafter_has_evidence_of_its_own_chain(tmp_path) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, parallel=False, mask_token_id=None)
    directory = save_with_evidence(drafter, target, tmp_path / "drafter")
    for engine in ENGINES:
        verdict = MeasuredGate(directory, target, engine, measure=as_on_card(directory)).run()
        assert verdict.passed, verdict.failure
    set_config(norm_output=True)(directory)
    assert_failed(MeasuredGate(directory, target, "vllm").run(), "config in vLLM", "norm_output is True", "flipped")


def test_a_target_too_short_for_our_prompts_is_said_and_not_compared(tmp_path) -> None:
    target = tiny_target(max_position_embeddings=48)
    directory = save_with_evidence(tiny_drafter(target), target, tmp_path / "drafter", full=False)
    verdict = MeasuredGate(directory, target, "native").run()
    assert verdict.passed and verdict.unchecked == ["logits by depth", "acceptance"]
    assert "no prompt fits into the target's 48 tokens" in verdict.checks[-1].found
