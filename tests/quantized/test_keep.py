"""Few-bit weights that stay as they are stored: the same numbers, in layers that read codes; and what becomes plain."""

import gc
import json
import logging
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from harness.few_bit_models import FEW_BIT, WIDE_GROUPS, set_config, store_in_few_bits
from harness.few_bit_models import awq as store_awq
from harness.few_bit_targets import dequantized
from harness.published_models import PUBLISHED, QWEN3_CODER, Published
from harness.published_models import write_target as write_published
from harness.tiny_models import tiny_target, write_target
from peagle.engine.llm import LLM
from peagle.experts.few_bit import FewBitExperts, plain_experts, set_experts
from peagle.experts.fused import gate_of
from peagle.linears import few_bit
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.quantized import keep, unpack
from peagle.quantized.formats import Scheme
from peagle.quantized.headers import FewBitCheckpoint, StoredWeight, read_few_bit
from peagle.quantized.keep import Keep, kept_bytes
from peagle.quantized.load import load_model
from peagle.sampling_params import SamplingParams
from peagle.targets import load
from peagle.targets.fingerprint import fingerprint
from peagle.targets.load import load_target
from peagle.training.distributed import can_shard

KEEP = Keep(torch.device("cpu"), gate_of, set_experts)
NARROW = {"awq", "gptq", "packed-4", "packed-4-asymmetric", "packed-8", "packed-8-asymmetric", "float-block"}
PLAIN = NARROW | {"gptq-v2-ordered", "packed-4-ordered"}
"""Formats whose groups, of fewer than 64 inputs or in another order, our kernels cannot read."""
IDS = torch.tensor([[5, 80, 33, 261, 7]])


def checkpoint_of(directory: Path) -> FewBitCheckpoint:
    checkpoint = read_few_bit(directory, with_all=True)
    assert checkpoint is not None
    return checkpoint


def one_weight(directory: Path, name: str, **changed: Tensor) -> tuple[StoredWeight, dict[str, Tensor]]:
    """A weight of the format, and its tensors, of which some are changed."""
    torch.manual_seed(0)
    module = "model.layers.1.mlp.down_proj"
    (directory / "config.json").write_text("{}")
    save_file({f"{module}.weight": torch.randn(48, 128)}, directory / "model.safetensors")
    store_in_few_bits(directory, name)
    weight = checkpoint_of(directory).weights[f"{module}.weight"]
    stored = load_file(directory / "model.safetensors") | {f"{module}.{part}": each for part, each in changed.items()}
    return weight, {part: stored[f"{module}.{part}"] for part in weight.parts}


@pytest.mark.parametrize("name", FEW_BIT | WIDE_GROUPS)
def test_what_is_kept_stands_for_the_same_numbers(name: str, tmp_path: Path) -> None:
    weight, tensors = one_weight(tmp_path, name)
    kept = unpack.keep(weight, tensors)
    assert (kept is None) == (name in PLAIN)
    if kept is not None:
        assert torch.equal(few_bit.dequantize(kept), unpack.dequantize(weight, tensors))
        assert kept.num_bytes == kept_bytes(checkpoint_of(tmp_path), 2) or kept.zero is not None or "8" in name


def test_zeros_and_orders_that_the_kernels_cannot_read_are_seen_in_the_tensors(tmp_path: Path) -> None:
    group = torch.arange(128, dtype=torch.int32) // 64
    for changes, is_kept in (
        ({}, True),
        ({"g_idx": group.flip(0)}, False),
        ({"g_idx": group, "qzeros": torch.full((2, 12), -1, dtype=torch.int32)}, False),
    ):
        weight, tensors = one_weight(tmp_path, "gptq-8-64", **changes)
        assert (unpack.keep(weight, tensors) is not None) == is_kept, changes.keys()
    weight, tensors = one_weight(tmp_path, "gptq-64", qzeros=torch.full((2, 6), 0x77777777, dtype=torch.int32))
    kept = unpack.keep(weight, tensors)
    assert kept is not None and kept.zero is None, "symmetric: the stored zeros say nothing"


@pytest.mark.parametrize(("bits", "read"), [(4, {64, 128, 256, 512, 1024}), (8, {64, 128, 256, 384, 512, 640, 1024})])
def test_only_groups_that_end_where_blocks_of_the_kernels_do_are_kept(bits: int, read: set[int]) -> None:
    def fits(group: int) -> bool:
        scheme = Scheme("packed", bits, (1, group))
        return unpack.fits_kernels(StoredWeight("m", scheme, (8, 1000), (1, group), (), "BF16"))

    assert {group for group in (32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 1024) if fits(group)} == read


def little(directory: Path, name: str) -> dict[str, Tensor]:
    write_target(tiny_target(num_layers=2, tie_word_embeddings=False), directory)
    return store_in_few_bits(directory, name)


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model with plain weights, and the one that keeps them."""
    models = []
    for options in (None, KEEP):
        model, report = load_model(directory, dtype, options)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        models.append(model.eval().requires_grad_(False))
    return models[0], models[1]


def few_bit_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FewBitLinear | FewBitExperts)}


@pytest.mark.parametrize(
    "name", ["awq-64", "gptq-64", "packed-4-64-asymmetric", "int8-channel", "fp8-tensor", "fp8-block"]
)
def test_a_model_that_keeps_its_weights_answers_as_the_plain_one(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    little(tmp_path, name)
    with caplog.at_level(logging.INFO, "peagle"):
        plain, kept = loaded(tmp_path)
    method = (FEW_BIT | WIDE_GROUPS)[name].config["quant_method"]
    assert f"keeping {method} weights in {8 if '8' in name else 4} bits" in caplog.text
    assert ("activations are not quantized here" in caplog.text) == ("8" in name)
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)
    assert fingerprint(kept) == fingerprint(plain), "drafters of one fit the other"
    stored = {key.removesuffix(".weight") for key in checkpoint_of(tmp_path).weights}
    assert few_bit_names(kept) == stored and len(stored) == 13
    assert {type(kept.get_submodule(name)) for name in ("lm_head", "model.layers.0.self_attn.q_proj")} == {nn.Linear}
    held = sum(each.numel() for each in kept.parameters())
    assert held == sum(torch.Size(each.shape).numel() for each in checkpoint_of(tmp_path).plain.values())
    assert kept.config.name_or_path == str(tmp_path) and kept.generation_config.eos_token_id == 2


def test_some_weights_may_become_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = little(tmp_path, "gptq-8-64")
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(path)
    order = tensors[f"{name}.g_idx"].flip(0).contiguous()
    save_file(tensors | {f"{name}.g_idx": order}, path, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "peagle"):
        plain, kept = loaded(tmp_path)
    assert "dequantizing 1 of them, which our kernels cannot read" in caplog.text
    assert type(kept.get_submodule(name)) is nn.Linear and len(few_bit_names(kept)) == 12
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)
    assert not torch.equal(plain.get_parameter(f"{name}.weight"), numbers[f"{name}.weight"])


@pytest.mark.parametrize("name", sorted({"awq", "packed-4-ordered"}))
def test_formats_that_the_kernels_cannot_read_become_plain(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = little(tmp_path, name)
    with caplog.at_level(logging.INFO, "peagle"):
        _, kept = loaded(tmp_path)
    assert "weights are not kept quantized: our kernels cannot read them" in caplog.text
    assert all(torch.equal(each, numbers[key]) for key, each in kept.state_dict().items())


def store_too(directory: Path, module: str) -> None:
    """Store one more module as AWQ does."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    weight = tensors.pop(f"{module}.weight").float() + 0.01  # the padding token's row is zero
    parts, _ = store_awq(weight, random.Random(0), group_size=64)
    tensors |= {f"{module}.{part}": each for part, each in parts.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_head_becomes_plain_because_drafters_read_it(tmp_path: Path) -> None:
    little(tmp_path, "awq-64")
    store_too(tmp_path, "lm_head")
    plain, kept = loaded(tmp_path)
    assert len(few_bit_names(kept)) == 13 and torch.equal(kept.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(kept(IDS).logits, plain(IDS).logits)


def test_a_head_of_another_name_becomes_plain_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little(tmp_path, "awq-64")
    store_too(tmp_path, "lm_head")
    monkeypatch.setattr(keep, "TABLES", ())
    plain, kept = loaded(tmp_path)
    assert torch.equal(kept.lm_head.weight, plain.lm_head.weight)


def test_a_weight_that_is_not_of_a_linear_layer_becomes_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    little(tmp_path, "awq-64")
    store_too(tmp_path, "model.embed_tokens")
    with caplog.at_level(logging.INFO, "peagle"):
        plain, kept = loaded(tmp_path)
    assert "dequantizing 1 of them" in caplog.text and len(few_bit_names(kept)) == 13
    assert torch.equal(kept.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)


def test_weights_that_transformers_casts_make_all_plain_and_no_code_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the plain model needs the memory of the codes."""
    little(tmp_path, "awq-64")
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"down_proj"})
    codes = []

    def packed(*arguments: Any) -> few_bit.FewBitWeight | None:
        weight = unpack.keep(*arguments)
        codes.extend([] if weight is None else [weakref.ref(weight.words)])
        return weight

    monkeypatch.setattr(keep, "keep", packed)
    gc.disable()
    try:
        with caplog.at_level(logging.INFO, "peagle"):
            model, _ = load_model(tmp_path, torch.bfloat16, KEEP)
        assert codes and not any(code() is not None for code in codes)
    finally:
        gc.enable()
    assert "not kept quantized: transformers merges or transforms some of them" in caplog.text
    assert not few_bit_names(model)


def write_experts(directory: Path, name: str) -> Path:
    write_published(Published(QWEN3_CODER | {"num_hidden_layers": 2}, 8), directory)
    store_in_few_bits(directory, name)
    return directory


@pytest.mark.parametrize("name", ["packed-4-64", "int8-channel", "fp8-tensor", "fp8-block"])
def test_experts_stored_one_by_one_are_kept_in_stacks(name: str, tmp_path: Path) -> None:
    plain, kept = loaded(write_experts(tmp_path / "stored", name))
    assert {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"} < few_bit_names(kept)
    for index in range(2):
        path = f"model.layers.{index}.mlp.experts"
        own = plain_experts(kept.get_submodule(path), torch.float32)
        for projection in ("gate_up_proj", "down_proj"):
            assert torch.equal(own.get_parameter(projection), plain.get_parameter(f"{path}.{projection}"))
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)
    assert fingerprint(kept) == fingerprint(plain)


def test_experts_with_zeros_become_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "peagle"):
        plain, kept = loaded(write_experts(tmp_path / "stored", "awq-64"))
    assert "dequantizing 48 of them" in caplog.text
    assert len(few_bit_names(kept)) == 7 and not any("experts" in name for name in few_bit_names(kept))
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)


def test_zeros_of_experts_that_are_said_to_have_none_make_them_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_experts(tmp_path / "stored", "gptq-64")
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"]["sym"] = True
    (directory / "config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.INFO, "peagle"):
        plain, kept = loaded(directory)
    assert "dequantizing 48 of them" in caplog.text
    assert len(few_bit_names(kept)) == 7 and not any("experts" in name for name in few_bit_names(kept))
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)


def mix_bits(directory: Path) -> Path:
    """Experts with gates and up projections in 4 bits and down projections in 8."""
    eight = write_experts(directory / "eight", "packed-8-64")
    four = write_experts(directory / "four", "packed-4-64")
    down = {name: each for name, each in load_file(eight / "model.safetensors").items() if "down_proj" in name}
    tensors = {name: each for name, each in load_file(four / "model.safetensors").items() if "down_proj" not in name}
    save_file(tensors | down, four / "model.safetensors", metadata={"format": "pt"})
    groups = [WIDE_GROUPS[name].config["config_groups"]["group_0"] for name in ("packed-8-64", "packed-4-64")]
    groups[0] = groups[0] | {"targets": ["re:.*down_proj$"]}
    set_config(four, WIDE_GROUPS["packed-4-64"].config | {"config_groups": dict(zip("ab", groups, strict=True))})
    return four


def test_experts_of_two_forms_become_plain(tmp_path: Path) -> None:
    plain, kept = loaded(mix_bits(tmp_path))
    assert len(few_bit_names(kept)) == 7 and not any("experts" in name for name in few_bit_names(kept))
    for name, parameter in plain.named_parameters():
        if "experts" in name:
            assert torch.equal(kept.get_parameter(name), parameter)
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_kept_as_transformers_dequantizes_it(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = write_published(PUBLISHED["gpt-oss-20b"], tmp_path / "stored")
    plain, kept = loaded(directory, dtype)
    names = few_bit_names(kept)
    assert names == {f"model.layers.{index}.mlp.experts" for index in range(8)}
    for name in names:
        own = plain_experts(kept.get_submodule(name), dtype)
        for key, parameter in plain.get_submodule(name).named_parameters():
            assert torch.equal(own.get_parameter(key), parameter), key
    assert torch.equal(kept(IDS).logits, plain(IDS).logits) and fingerprint(kept) == fingerprint(plain)
    assert not getattr(kept.config, "quantization_config", None)


def test_mxfp4_of_experts_with_an_unknown_gate_is_left_to_transformers(tmp_path: Path) -> None:
    directory = write_published(PUBLISHED["gpt-oss-20b"], tmp_path / "stored")
    model, _ = load_model(directory, torch.float32, KEEP._replace(gate_of=lambda _: None))
    assert not few_bit_names(model)


def test_blocks_that_do_not_fit_are_left_to_transformers(tmp_path: Path) -> None:
    directory = write_published(PUBLISHED["qwen3-coder-30b-a3b-instruct-fp8"], tmp_path / "stored")
    plain, kept = loaded(directory)  # blocks of 16 x 16
    assert not few_bit_names(kept) and torch.equal(kept(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("name", ["awq-64", "gpt-oss", "experts"])
def test_a_target_that_keeps_its_weights_answers_as_the_dequantized_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gpt-oss":
        config = PUBLISHED["gpt-oss-20b"].config | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
        write_published(replace(PUBLISHED["gpt-oss-20b"], config=config), tmp_path)
    elif name == "experts":
        write_experts(tmp_path, "fp8-block")
    else:
        little(tmp_path, name)
    prompts, params = [[5, 80, 33, 261, 7], [9, 9, 31]], SamplingParams(max_tokens=6, ignore_eos=True)
    targets, answers = [], []
    for keeps in (False, True):
        monkeypatch.setattr(load, "keeps_few_bits", lambda *_, keeps=keeps: keeps)
        targets.append(load_target(tmp_path, dtype="float32", device="cpu"))
        with LLM(targets[-1], None, max_length=64) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert "weights" in targets[1].precision and "weights" not in targets[0].precision
    assert answers[0] == answers[1] and targets[0].fingerprint() == targets[1].fingerprint()
    assert [can_shard(target) for target in targets] == [True, False], "each process trains with all of it"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["awq-64", "gpt-oss", "experts"])
def test_on_a_gpu_the_engine_answers_from_what_is_stored(name: str, tmp_path: Path) -> None:
    if name == "gpt-oss":
        write_published(PUBLISHED["gpt-oss-20b"], tmp_path / "stored")
    elif name == "experts":
        write_experts(tmp_path / "stored", "fp8-block")
    else:
        little(tmp_path / "stored", name)
    target = load_target(tmp_path / "stored", device="cuda")
    assert "weights" in target.precision and {each.device.type for each in target.model.buffers()} == {"cuda"}
    judge = dequantized(target)
    prompts = [[5, 80, 33, 261, 7], [9, 9, 31], [77] * 12]
    with LLM(target, None, max_length=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = torch.tensor(output.outputs[0].token_ids, device="cuda")
        row = torch.cat([torch.tensor(prompt, device="cuda"), answer])[None]
        logits_TV = judge.forward(row).logits_BTV[0, len(prompt) - 1 : -1].float()
        behind = logits_TV.amax(-1) - logits_TV.gather(1, answer[:, None])[:, 0]
        assert behind.max() < 0.05 * logits_TV.std(), "the best token, up to rounding"
