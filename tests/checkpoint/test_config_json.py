"""config.json in the forms that drafters are published in."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from harness.drafter_passes import card_for, draft_logits
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.config_json import rope_parameters, write_config
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.drafter.config import DrafterConfig
from peagle.errors import CheckpointError, ConfigError
from peagle.targets.hf import HFTarget

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


class Directory:
    """A full drafter directory without a card, whose config.json a test rewrites."""

    def __init__(self, path: Path, **switches: object) -> None:
        self.path, self.target = path, tiny_target()
        self.drafter = tiny_drafter(self.target, **switches)
        save_drafter(self.drafter, path, card_for(self.target, self.drafter), full=True, dtype=torch.float32)
        (path / "drafter_card.json").unlink()
        self.values = json.loads((path / "config.json").read_text())

    def load(self, values: dict) -> DrafterConfig:
        (self.path / "config.json").write_text(json.dumps(values))
        return load_drafter(self.path, self.target).config

    def refusal(self, values: object) -> CheckpointError:
        before = self.target.aux_layer_ids
        with pytest.raises(CheckpointError) as caught:
            self.load(values)  # type: ignore[arg-type]
        assert self.target.aux_layer_ids == before
        assert str(self.path / "config.json") in caught.value.message
        return caught.value

    def without(self, *keys: str) -> dict:
        return {key: value for key, value in self.values.items() if key not in keys}


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def test_the_written_config_is_vllms_native_one(directory: Directory) -> None:
    values = directory.values
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["model_type"] == "llama"
    assert {values[key] for key in MASK_KEYS} == {directory.drafter.config.mask_token_id}
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert values["num_aux_hidden_states"] == 3 and values["target_hidden_size"] == 64
    assert values["fc_norm"] is True and values["tie_word_embeddings"] is False
    assert values["torch_dtype"] == "float32"


def test_an_eagle3_config_names_no_mask_token(tmp_path: Path) -> None:
    config = Directory(tmp_path, parallel=False, mask_token_id=270).drafter.config
    assert not set(MASK_KEYS) & set(write_config(config, torch.float32))


@pytest.mark.parametrize("key", MASK_KEYS)
def test_the_mask_token_is_read_under_each_of_its_names(directory: Directory, key: str) -> None:
    mask = directory.drafter.config.mask_token_id
    assert directory.load(directory.without(*MASK_KEYS) | {key: mask}).mask_token_id == mask


def test_names_of_one_thing_that_disagree_are_refused(directory: Directory) -> None:
    error = directory.refusal(directory.values | {"pard_token": 3})
    assert "keys with the same meaning disagree" in error.message and "pard_token = 3" in error.message
    nested = directory.values["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    error = directory.refusal(directory.values | {"eagle_config": nested})
    assert "eagle_config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]" in error.message


@pytest.mark.parametrize(
    ("mask", "message"),
    [(None, "needs mask_token_id"), (288, "between 0 and 287, got 288"), (-1, "got -1"), ("x", "token id, got 'x'")],
)
def test_a_mask_token_that_is_no_token_is_refused(directory: Directory, mask: object, message: str) -> None:
    assert message in directory.refusal(directory.values | dict.fromkeys(MASK_KEYS, mask)).message


def test_keys_inside_eagle_config_count_as_top_level_ones(directory: Directory) -> None:
    values = directory.without("fc_norm", "eagle_aux_hidden_state_layer_ids", "norm_before_fc")
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True, "fc_norm": True}
    config = directory.load(values | {"eagle_config": nested, "eagle_aux_hidden_state_layer_ids": None})
    assert config.aux_layer_ids == (1, 3, 6) and config.fc_norm
    assert directory.target.aux_layer_ids == (1, 3, 6)


def test_aux_layers_are_taken_in_ascending_order_and_default_to_the_targets(directory: Directory) -> None:
    values = directory.without("eagle_config")
    assert directory.load(values | {"eagle_aux_hidden_state_layer_ids": [6, 1, 3]}).aux_layer_ids == (1, 3, 6)
    values.pop("eagle_aux_hidden_state_layer_ids")
    assert directory.load(values).aux_layer_ids == (2, 4, 5)
    key = "eagle_aux_hidden_state_layer_ids"
    assert "list of layer numbers" in directory.refusal(values | {key: ["2"]}).message
    error = directory.refusal(values | {key: [-3, 2, 4]})
    assert "reads layers [-3, 2, 4], but those of target 'tiny' are 0 to 7" in error.message


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3,
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3"} | LLAMA3},
            {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3,
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3"} | LLAMA3},
            {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3,
        ),
    ],
)
def test_rotary_settings_are_read_in_the_old_and_the_new_form(directory: Directory, keys: dict, expected: dict) -> None:
    assert directory.load(directory.without("rope_parameters") | keys).rope_parameters == expected


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, None),
        ({"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3, {"rope_type": "llama3"} | LLAMA3),
        (
            {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["default", "llama3", "yarn"],
)
def test_rotary_settings_are_written_for_older_engines_too(
    directory: Directory, rope: dict, scaling: dict | None
) -> None:
    """transformers before 5 knew rope_theta and rope_scaling alone, and took 10000 where they are absent."""
    config = dataclasses.replace(directory.drafter.config, rope_parameters=rope)
    values = write_config(config, torch.float32)
    assert values["rope_parameters"] == rope, "what today's engines read"
    assert (values["rope_theta"], values.get("rope_scaling")) == (rope["rope_theta"], scaling)
    assert directory.load(values).rope_parameters == rope
    old = {key: value for key, value in values.items() if key != "rope_parameters"}
    assert directory.load(old).rope_parameters == rope
    assert rope_parameters(values) == rope_parameters(old) == rope, "vLLM's rules"
    for said in (values, old):
        assert LlamaConfig(**said).rope_parameters == rope, "transformers"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_parameters": {"rope_type": "mrope"}}, "are not supported: 'mrope'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters per layer",
        ),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss', which is not supported"),
        ({"rope_parameters": None, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not"),
        ({"logit_scale": 0.25}, "logit_scale is 0.25, which is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}, which"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer, got '2'"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"draft_vocab_size": 400}, "draft_vocab_size 400 exceeds vocab_size 288"),
        ({"norm_before_fc": True, "eagle_config": None}, "fc_norm and norm_before_fc exclude each other"),
        ({"eagle_config": 3}, "eagle_config must be an object, got 3"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(directory: Directory, keys: dict, message: str) -> None:
    assert message in directory.refusal(directory.values | keys).message


def test_a_narrower_drafter_without_tables_of_its_own_is_refused(directory: Directory) -> None:
    weights = directory.path / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if k != "embed_tokens.weight"}, weights)
    message = "hidden_size 32 differs from the target's 64, so its embeddings cannot be shared"
    assert message in directory.refusal(directory.values | {"hidden_size": 32}).message


def test_a_config_of_a_narrower_drafter_must_own_its_head_too() -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    others = {"vocab_size": 288, "draft_vocab_size": 288, "target_hidden_size": 64, "aux_layer_ids": (2, 4, 5)}
    with pytest.raises(ConfigError, match="its head cannot be shared"):
        DrafterConfig(**sizes, **others, mask_token_id=270, embeddings="own")
    assert DrafterConfig(**sizes, **others, mask_token_id=270, embeddings="own", head="own").aux_size == 192


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[]", "must hold a JSON object, got list"), ("\xff\xfe", "is not valid JSON")],
)
def test_a_corrupt_config_is_refused(directory: Directory, text: str, message: str) -> None:
    (directory.path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(directory.path, directory.target)


def speculators_form(values: dict, kind: str, **top: object) -> dict:
    """The same drafter as the speculators library writes it."""
    top_keys = {"architectures", "model_type", "draft_vocab_size", "target_hidden_size", "fc_norm", "mask_token_id"}
    top_keys |= {"eagle_aux_hidden_state_layer_ids", "eagle_config", "pard_token", "ptd_token_id"}
    top_keys |= {key for key in values if key.startswith("norm_")}
    return {
        "architectures": ["PeagleDraftModel"],
        "model_type": "speculator_model",
        "speculators_model_type": kind,
        "speculators_version": "0.6.0",
        "transformer_layer_config": {key: values[key] for key in values.keys() - top_keys} | {"model_type": "llama"},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": values["draft_vocab_size"],
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": values["eagle_aux_hidden_state_layer_ids"],
        "fc_norm": values["fc_norm"],
        "mask_token_id": values.get("mask_token_id"),
    } | top


def test_the_speculators_form_of_a_p_eagle_drafter_is_read(directory: Directory) -> None:
    config = directory.load(speculators_form(directory.values, "peagle"))
    assert config.parallel and config.num_draft_tokens == 5
    assert config.norm_before_residual is False, "the default of its kind"
    assert (config.hidden_size, config.aux_layer_ids, config.fc_norm) == (64, (2, 4, 5), True)
    loaded = load_drafter(directory.path, directory.target)
    assert torch.equal(draft_logits(directory.target, loaded), draft_logits(directory.target, directory.drafter))


@pytest.mark.parametrize(("said", "expected"), [({}, True), ({"norm_before_residual": False}, False)])
def test_the_speculators_form_of_eagle3_norms_before_the_residual_by_default(
    tmp_path: Path, said: dict, expected: bool
) -> None:
    directory = Directory(tmp_path, parallel=False)
    config = directory.load(speculators_form(directory.values, "eagle3", **said))
    assert not config.parallel and config.norm_before_residual is expected


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not supported"),
        ({"transformer_layer_config": []}, "transformer_layer_config must be an object"),
        ({"speculators_config": {"proposal_methods": ["greedy"]}}, "proposal_methods must be a list of objects"),
        ({"transformer_layer_config": {"model_type": "gpt_oss"}}, "model_type is 'gpt_oss', which is not supported"),
    ],
)
def test_a_speculators_form_that_cannot_be_read_is_refused(directory: Directory, top: dict, message: str) -> None:
    assert message in directory.refusal(speculators_form(directory.values, "peagle") | top).message


def test_a_target_that_is_named_by_another_vocabulary_is_told_from_the_tables(directory: Directory) -> None:
    other: HFTarget = tiny_target(vocab_size=300)
    with pytest.raises(CheckpointError, match="vocab_size is 288, but target 'tiny' has 300"):
        load_drafter(directory.path, other)
