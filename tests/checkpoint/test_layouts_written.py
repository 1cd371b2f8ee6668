"""Drafters written for vLLM and for speculators: what is in the files, and that they come back as they were."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.drafter_passes import draft_logits
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint import speculators, vllm
from peagle.checkpoint.card import card_of
from peagle.checkpoint.native import load_drafter
from peagle.drafter.config import DrafterConfig
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.targets.hf import HFTarget

WRITERS = {"vllm": vllm.write, "speculators": speculators.write}
SHAPES: dict[str, dict[str, Any]] = {
    "p-eagle": {},
    "own tables": {"embeddings": "own", "head": "own", "fc_norm": False, "norm_before_fc": True},
    "draft vocabulary": {"draft_vocab_size": 100, "attention_bias": True},
    "qwen3 with windows": {"qk_norm": True, "sliding_window": 5, "sliding_layers": (0, 1)},
    "eagle3": {"parallel": False, "norm_output": True, "norm_before_residual": True},
}


def drafter_of(target: HFTarget, **switches: Any) -> Drafter:
    config = config_for_target(target, num_layers=2, **({"num_draft_tokens": 4, "fc_norm": True} | switches))
    drafter = create_drafter(target, config, "random", seed=1).eval().requires_grad_(False)
    if config.draft_vocab_size < target.vocab_size:
        drafter.d2t.copy_(torch.arange(config.draft_vocab_size))  # every second token
    return drafter


def written(layout: str, directory: Path, target: HFTarget, drafter: Drafter) -> dict[str, Any]:
    """Write a directory in float32 and return its config."""
    WRITERS[layout](drafter, target, card_of(drafter, target), directory, dtype=torch.float32)
    values: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return values


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_written_directory_drafts_the_same(tmp_path: Path, layout: str, shape: str) -> None:
    target = tiny_target()
    drafter = drafter_of(target, **SHAPES[shape])
    written(layout, tmp_path, target, drafter)
    loaded = load_drafter(tmp_path, target)
    assert loaded.repairs == ()
    assert torch.equal(draft_logits(target, loaded), draft_logits(target, drafter))


@pytest.mark.parametrize("layout", WRITERS)
def test_embeddings_travel_with_a_placeholder_and_a_map_only_with_a_part_of_the_vocabulary(
    tmp_path: Path, layout: str
) -> None:
    target = tiny_target()
    drafter = drafter_of(target)
    written(layout, tmp_path / "whole", target, drafter)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"][drafter.config.mask_token_id], drafter.mask_embedding)
    assert not {"d2t", "t2d", "mask_embedding"} & tensors.keys(), "a map of the whole vocabulary only does harm"
    written(layout, tmp_path / "part", target, drafter_of(target, draft_vocab_size=100))
    tensors = load_file(tmp_path / "part" / "model.safetensors")
    assert tensors["d2t"].tolist() == list(range(100)), "offsets: draft id 7 is token 14"
    assert tensors["lm_head.weight"].shape == (100, 64)
    if layout == "speculators":
        assert tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 200, 2))


def test_the_targets_tables_stay_out_of_an_eagle3_directory_for_vllm(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = drafter_of(target, parallel=False)
    written("vllm", tmp_path / "own", target, drafter)
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "own" / "model.safetensors").keys()
    written("speculators", tmp_path / "there", target, drafter)
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"]), "tied in the target"


@pytest.mark.parametrize("layout", WRITERS)
def test_positions_beyond_the_drafters_table_get_room(tmp_path: Path, layout: str) -> None:
    """vLLM makes its rotary table for max_position_embeddings and reads past its end beyond that."""
    target = tiny_target()
    short = rebuilt(drafter_of(target), target, max_length=64)
    values = written(layout, tmp_path / "default", target, short)
    assert values.get("transformer_layer_config", values)["max_position_embeddings"] == target.max_length


def test_a_rotary_table_that_depends_on_its_length_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target()
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    values = written("vllm", tmp_path, target, rebuilt(drafter_of(target), target, max_length=64, rope_parameters=rope))
    assert values["max_position_embeddings"] == 64
    assert "serve with --max-model-len 64 or less" in caplog.text


def rebuilt(drafter: Drafter, target: HFTarget, **changes: Any) -> Drafter:
    """The same weights under a changed config."""
    other = Drafter(dataclasses.replace(drafter.config, **changes), target.embedding_VD, target.head_VD)
    other.load_state_dict(drafter.state_dict())
    return other.eval().requires_grad_(False)


def test_the_speculators_config_says_all_that_vllm_and_speculators_look_for(tmp_path: Path) -> None:
    target = tiny_target()
    target.tap((2, 5))
    values = written("speculators", tmp_path, target, tiny_drafter(target))
    assert values["speculators_model_type"] == "peagle" and values["architectures"] == ["PEagleDraftModel"]
    assert values["mask_token_id"] == 268 and values["eagle_aux_hidden_state_layer_ids"] == [2, 5]
    assert values["norm_before_residual"] is False, "said, although the default differs by method"
    layers = values["transformer_layer_config"]
    assert layers["fc_norm"] is values["fc_norm"] is True, "vLLM reads it here, speculators there"
    assert layers["num_aux_hidden_states"] == 2, "vLLM would take three"
    (proposal,) = values["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 4
    assert values["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_speculators_takes_no_narrower_drafters(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = drafter_of(target, embeddings="own", head="own")
    narrow = dataclasses.replace(drafter.config, hidden_size=32, num_heads=2)
    drafter = Drafter(narrow, target.embedding_VD.new_zeros(288, 32), target.head_VD.new_zeros(288, 32))
    with pytest.raises(ConfigError, match="hidden_size 32 differs from the target's 64") as caught:
        speculators.write(drafter, target, card_of(drafter, target), tmp_path)
    assert "--to vllm" in str(caught.value.hint) and not list(tmp_path.iterdir())


def test_windows_in_some_layers_are_refused_for_vllm_and_said_for_speculators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target()
    drafter = drafter_of(target, sliding_window=5, sliding_layers=(1,))
    with pytest.raises(ConfigError, match="have a sliding window of 5, some full attention; vLLM supports"):
        written("vllm", tmp_path / "own", target, drafter)
    assert not (tmp_path / "own").exists()
    written("speculators", tmp_path / "there", target, drafter)
    assert "vLLM cannot serve this directory" in caplog.text
    assert load_drafter(tmp_path / "there", target).config.sliding_layers == (1,)


def spoilt(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[..., None]:
    def save(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        change(tensors)
        save_file(tensors, path, **options)

    return save


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["fc.weight"].zero_(), "the tensor 'fc.weight' differs"),
        (lambda t: t["embed_tokens.weight"][268].zero_(), "the tensor 'mask_embedding' differs"),
    ],
)
def test_a_directory_that_does_not_read_back_is_not_passed_on(
    tmp_path: Path, change: Callable, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    drafter = drafter_of(target)
    monkeypatch.setattr("peagle.checkpoint.native.save_file", spoilt(change))
    with pytest.raises(CheckpointError, match="does not read back as the drafter it was written from") as caught:
        vllm.write(drafter, target, card_of(drafter, target), tmp_path)
    assert message in caught.value.message


def test_a_setting_that_gets_lost_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    drafter = drafter_of(target)

    def forgetful(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
        from peagle.checkpoint.config_json import write_config

        return write_config(config, dtype) | {"norm_before_residual": True}

    monkeypatch.setattr(vllm, "write_config", forgetful)
    with pytest.raises(CheckpointError, match="norm_before_residual is True there and False here"):
        vllm.write(drafter, target, card_of(drafter, target), tmp_path)


def test_who_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    target = tiny_target()
    written("vllm", tmp_path, target, drafter_of(target))
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert len(modes) == 1, "containers run as another user"
