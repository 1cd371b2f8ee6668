"""Known shapes, and targets of random weights."""

import json

import pytest
import torch

from harness.dummy_shapes import TINY
from peagle.errors import CapacityError, ConfigError
from peagle.targets.shapes import SHAPES, dummy_target, read_shape


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_a_dummy_target_is_made_in_the_dtype_and_any_token_has_a_text(config_file):
    target = dummy_target(config_file, dtype="bfloat16", device="cpu")
    assert target.dtype == torch.bfloat16 and target.vocab_size == 50 and target.name == "tiny (random weights)"
    assert target.forward(torch.tensor([[1, 2, 3]])).logits_BTV.isfinite().all()
    assert isinstance(target.tokenizer.decode([7, 49]), str)


def test_weights_that_cannot_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("peagle.host_memory.available_bytes", lambda: 10 << 30)
    with pytest.raises(CapacityError, match=r"llama-8b take 15\.0 GiB, but cpu has 10\.0 GiB") as caught:
        dummy_target("llama-8b", dtype="bfloat16", device="cpu")
    assert "smaller shape" in caught.value.hint


def test_named_shapes_are_the_published_sizes():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {}
    for name, settings in SHAPES.items():
        with torch.device("meta"):
            settings = dict(settings)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        sizes[name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e6)
    dense = {"llama-8b": 8030, "llama-1b": 1236, "smollm2-135m": 135, "gemma-4-31b": 30697}
    assert sizes == dense | {"qwen3-30b-a3b": 30532, "gpt-oss-20b": 20915, "gpt-oss-120b": 116829}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "nonesuch"}', "cannot build a causal LM"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        dummy_target(str(path), device="cpu")


def test_an_unknown_shape_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no shape 'llama-8'") as caught:
        read_shape("llama-8")
    assert "did you mean 'llama-8b'?" in caught.value.hint


def test_settings_of_a_shape_can_be_replaced(config_file):
    target = dummy_target(config_file, dtype="float32", device="cpu", num_hidden_layers=1, vocab_size=20)
    assert (target.num_layers, target.vocab_size, target.hidden_size) == (1, 20, 32)
    assert read_shape(config_file) == TINY
