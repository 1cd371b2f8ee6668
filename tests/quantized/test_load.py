"""Targets stored in few bits hold exactly the numbers that their codes stand for, and answer with them."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.few_bit_models import FEW_BIT, set_config, store_in_few_bits
from harness.published_models import QWEN3_CODER, Published, as_bfloat16
from harness.published_models import write_target as write_published
from harness.tiny_models import tiny_drafter, tiny_target, write_target
from peagle.engine.llm import LLM
from peagle.quantized.load import load_model
from peagle.sampling_params import SamplingParams
from peagle.targets.capacity import count_parameters
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target

PROMPTS = [[5, 6, 7, 30, 41], list(range(20, 50)), [100]]
MAX_TOKENS = 16
SHAPE: dict[str, Any] = {"num_layers": 3, "tie_word_embeddings": False}


def little(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """A tiny target of the format in `directory`, and the numbers that it holds."""
    write_target(tiny_target(**SHAPE), directory)
    return store_in_few_bits(directory, name)


def plain_twin(numbers: dict[str, torch.Tensor]) -> HFTarget:
    """The same model, built by transformers from plain numbers."""
    target = tiny_target(**SHAPE)
    target.model.load_state_dict(numbers)
    return target


def generate(model: Any, prompt: list[int]) -> list[int]:
    row = torch.tensor([prompt])
    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False}
    return model.generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FEW_BIT)
def test_weights_are_the_numbers_that_the_codes_stand_for(name: str, tmp_path: Path) -> None:
    numbers = little(tmp_path, name)
    target = load_target(tmp_path, dtype="float32", device="cpu")
    held = target.model.state_dict()
    assert held.keys() == numbers.keys()
    assert not [key for key, value in numbers.items() if not torch.equal(held[key], value)]
    lowered = load_target(tmp_path, dtype="bfloat16", device="cpu")
    assert all(torch.equal(value, numbers[key].bfloat16()) for key, value in lowered.model.state_dict().items())
    assert lowered.fingerprint() == target.fingerprint()
    assert count_parameters(tmp_path) == sum(value.numel() for value in numbers.values())
    assert target.model.generation_config.eos_token_id == 2 and target.model.config.name_or_path == str(tmp_path)


QUICK = ("gptq", "packed-4-asymmetric", "fp8-tensor")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FEW_BIT]
)
def test_answers_are_those_of_the_plain_numbers_with_and_without_drafts(name: str, tmp_path: Path) -> None:
    twin = plain_twin(little(tmp_path, name))
    expected = [generate(twin.model, prompt) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for drafter in (None, tiny_drafter(twin, num_layers=1)):
        target = load_target(tmp_path, dtype="float32", device="cpu")
        with LLM(target, drafter, max_batch=3, page_size=8, max_length=128) as llm:
            outputs = llm.generate(PROMPTS, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize("name", ["awq", "gptq-v2-ordered", "packed-4-asymmetric", "int8-channel", "fp8-tensor"])
def test_experts_stored_one_by_one_are_joined(name: str, tmp_path: Path) -> None:
    config = QWEN3_CODER | {"num_hidden_layers": 2}
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    write_published(Published(config, 8, as_bfloat16), plain)
    shutil.copytree(plain, stored)
    numbers = store_in_few_bits(stored, name)
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    held = load_target(stored, dtype="float32", device="cpu").model.state_dict()
    assert held.keys() == expected.keys() and any("experts" in key for key in held)
    assert not [key for key, value in expected.items() if not torch.equal(held[key], value)]
    assert count_parameters(stored) == sum(value.numel() for value in numbers.values())


@pytest.mark.parametrize("config", [FEW_BIT["gptq"].config, {"quant_method": "modelopt", "quant_algo": None}])
def test_plain_weights_under_a_quantization_config_are_read_as_they_are(config: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint that was dequantized, or of which only the KV cache is rounded, has a quantization_config too."""
    target = tiny_target(**SHAPE)
    write_target(target, tmp_path)
    set_config(tmp_path, config)
    assert load_target(tmp_path, dtype="float32", device="cpu").fingerprint() == target.fingerprint()


def test_rows_that_do_not_fill_their_words_are_read(tmp_path: Path) -> None:
    write_target(tiny_target(**SHAPE, intermediate_size=132), tmp_path)
    numbers = store_in_few_bits(tmp_path, "packed-4-channel")
    held = load_target(tmp_path, dtype="float32", device="cpu").model.state_dict()
    assert not [key for key, value in numbers.items() if not torch.equal(held[key], value)]
    assert count_parameters(tmp_path) == sum(value.numel() for value in numbers.values())


def test_groups_have_their_own_bits(tmp_path: Path) -> None:
    """As llm-compressor writes mixed precision: a group by pattern before the one for all linear layers."""
    eight, four = tmp_path / "eight", tmp_path / "four"
    wide, narrow = little(eight, "packed-8"), little(four, "packed-4")
    tensors = load_file(four / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if "down_proj" not in name}
    tensors |= {name: each for name, each in load_file(eight / "model.safetensors").items() if "down_proj" in name}
    save_file(tensors, four / "model.safetensors", metadata={"format": "pt"})
    groups = [FEW_BIT[name].config["config_groups"]["group_0"] for name in ("packed-4", "packed-8")]
    groups[1] = groups[1] | {"targets": ["re:.*down_proj$"], "format": "pack-quantized"}
    merged = {"config_groups": {"group_0": groups[0], "group_1": groups[1]}}
    set_config(four, FEW_BIT["packed-4"].config | merged)
    held = load_target(four, dtype="float32", device="cpu").model.state_dict()
    for key, value in held.items():
        assert torch.equal(value, (wide if "down_proj" in key else narrow)[key]), key


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_weights_are_placed_while_they_are_loaded(place: str, tmp_path: Path) -> None:
    """As for large targets on a GPU, which might not fit in the machine's memory."""
    numbers = little(tmp_path, "awq")
    model, report = load_model(tmp_path, torch.float16, device_map={"": torch.device(place)})
    assert not report["missing_keys"] and {each.device for each in model.parameters()} == {torch.device(place)}
    assert all(torch.equal(value.cpu(), numbers[key].half()) for key, value in model.state_dict().items())


def test_shards_may_part_a_weight_from_its_scales(tmp_path: Path) -> None:
    numbers = little(tmp_path, "gptq")
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    shards = {name: f"{'a' if name.endswith('qweight') else 'b'}.safetensors" for name in tensors}
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, tmp_path / shard)
    index = str({"weight_map": shards}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(index)
    held = load_target(tmp_path, dtype="float32", device="cpu").model.state_dict()
    assert not [key for key, value in numbers.items() if not torch.equal(held[key], value)]


def test_the_log_says_what_is_dequantized_and_that_activations_are_not_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    little(tmp_path, "int8-channel")
    with caplog.at_level(logging.INFO, "peagle"):
        load_target(tmp_path, dtype="float32", device="cpu")
    assert "dequantizing compressed-tensors weights while loading" in caplog.text
    assert "activations are not quantized here" in caplog.text
