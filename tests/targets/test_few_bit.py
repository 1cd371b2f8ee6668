"""Targets whose layers keep their weights in few bits: rounded while loading, created, refused, and in the engine."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from harness.few_bit_targets import dequantized
from harness.few_bit_targets import may_quantize_on_cpu as may_quantize_on_cpu
from harness.model_families import family_target
from harness.tiny_models import tiny_target, write_target
from peagle.engine.llm import LLM
from peagle.errors import CapacityError, TargetError
from peagle.experts import few_bit as few_bit_experts
from peagle.experts.few_bit import FewBitExperts
from peagle.linears import skinny_linear
from peagle.linears.few_bit import dequantize
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.sampling_params import SamplingParams
from peagle.targets import capacity
from peagle.targets.few_bit import check_quantize, num_bytes, num_parameters, quantize_model, quantized_bytes
from peagle.targets.load import load_target
from peagle.targets.shapes import SHAPES, dummy_target, read_shape
from peagle.worker.linear_layers import join_models

FORM_OF = {"llama": "int4", "qwen3-moe": "fp8", "gpt-oss": "mxfp4", "gemma4": "int8"}
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
OWN_SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"moe_intermediate_size": 64, "num_experts": 16},
    "gpt-oss-20b": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt-oss-120b": {"num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma-4-31b": {
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def quantized_family(family: str) -> Any:
    target = family_target(family)
    quantize_model(target.model, FORM_OF[family])
    return target


@pytest.mark.parametrize("family", FORM_OF)
def test_the_engine_answers_as_transformers_does_with_the_dequantized_weights(family: str) -> None:
    target = quantized_family(family)
    judge = dequantized(target)
    assert target.precision == f"float32, {FORM_OF[family]} weights" and judge.precision == "float32"
    prompts = [[5, 80, 33, 261, 7], [9, 9, 31], [77] * 12]
    with LLM(target, None, max_length=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        logits_TV = judge.forward(torch.tensor([prompt + answer])).logits_BTV[0, len(prompt) - 1 : -1]
        assert logits_TV.argmax(-1).tolist() == answer


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in FORM_OF])
def test_on_a_gpu_layers_are_joined_and_fused_and_given_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    target, ids = quantized_family(family), torch.tensor([[5, 80]])
    names, kinds = list(target.model.state_dict()), [type(module) for module in target.model.modules()]
    expected = target.forward(ids).logits_BTV
    for module in (skinny_linear, few_bit_experts):
        monkeypatch.setattr(module, "reads_codes", lambda _: True)
    undo = join_models(target, None)
    torch.testing.assert_close(target.forward(ids).logits_BTV, expected, atol=2e-3, rtol=2e-3)
    assert list(target.model.state_dict()) == names
    undo()
    assert [type(module) for module in target.model.modules()] == kinds
    torch.testing.assert_close(target.forward(ids).logits_BTV, expected, atol=2e-3, rtol=2e-3)


def test_head_embedding_and_routers_stay_plain() -> None:
    config = Qwen2MoeConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=4, vocab_size=50
    )
    model = Qwen2MoeForCausalLM(config)
    quantize_model(model, "int8")
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert plain == ["model.layers.0.mlp.shared_expert_gate", "lm_head"]
    assert isinstance(model.model.layers[0].mlp.experts, FewBitExperts)
    assert model.model.layers[0].mlp.gate.weight.dtype == torch.float32


def test_mxfp4_is_for_experts() -> None:
    target = quantized_family("gpt-oss")
    kinds = [type(module) for module in target.layers.modules()]
    assert nn.Linear in kinds and FewBitLinear not in kinds
    with pytest.raises(TargetError, match="no layer of LlamaForCausalLM has weights that can be kept in mxfp4"):
        quantize_model(tiny_target(num_layers=1).model, "mxfp4")


def test_experts_with_an_unknown_gate_stay_plain_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", lambda self, gate_up: gate_up.chunk(2, dim=-1)[0])
    quantized_family("qwen3-moe")
    (line,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "Qwen3MoeExperts stay in torch.float32: their gate is unknown"


@pytest.mark.parametrize("family", FORM_OF)
def test_weights_are_counted_as_before(family: str) -> None:
    plain, found = family_target(family).model, quantized_family(family).model
    assert num_parameters(found) == num_parameters(plain) == sum(each.numel() for each in plain.parameters())


@pytest.mark.parametrize(
    "shape",
    [name if name in ("gpt-oss-20b", "gemma-4-31b") else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES],
)
def test_random_weights_are_those_that_transformers_would_create(shape: str, may_quantize_on_cpu: None) -> None:
    options = SMALL | OWN_SMALL.get(shape, {})
    form = "mxfp4" if shape.startswith("gpt") else "int8"
    plain = dummy_target(shape, device="cpu", dtype="float32", **options)
    found = dummy_target(shape, device="cpu", dtype="float32", quantize=form, **options)
    buffers = dict(found.model.named_buffers())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in plain.model.named_buffers())
    wanted = dict(plain.model.named_parameters())
    for name, parameter in found.model.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.shape == wanted[name].shape
        if wanted[name].std() == 0:
            assert torch.equal(parameter, wanted[name]), name
        elif parameter.numel() > 100:
            assert parameter.std() / wanted[name].std() == pytest.approx(1, abs=0.2), name
    for name, module in found.model.named_modules():
        if isinstance(module, FewBitLinear):
            spread = dequantize(module.stored).std() / plain.model.get_parameter(f"{name}.weight").std()
            assert spread == pytest.approx(1, abs=0.1), name
    is_tied = [each.head_VD is each.embedding_VD for each in (plain, found)]
    assert is_tied[0] == is_tied[1]
    assert num_bytes(found.model) < 0.7 * num_bytes(plain.model)
    assert found.forward(torch.tensor([[1, 2, 3]])).logits_BTV.isfinite().all()


def test_the_bytes_of_random_weights_are_checked_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, may_quantize_on_cpu: None
) -> None:
    monkeypatch.setattr("peagle.host_memory.available_bytes", lambda: 5 << 30)
    with pytest.raises(CapacityError, match=r"llama-8b take 5\.3 GiB, but cpu has 5\.0 GiB"):
        dummy_target("llama-8b", dtype="bfloat16", device="cpu", quantize="int4")
    with pytest.raises(CapacityError, match=r"llama-8b take 15\.0 GiB") as caught:
        dummy_target("llama-8b", dtype="bfloat16", device="cpu")
    assert caught.value.hint == "choose a smaller shape, or --quantize int4"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_target(tiny_target(num_layers=2), tmp_path / "target")


def test_a_loaded_target_is_rounded_and_keeps_its_fingerprint(directory: Path, may_quantize_on_cpu: None) -> None:
    plain = load_target(directory, dtype="float32", device="cpu")
    found = load_target(directory, dtype="float32", device="cpu", quantize="int8")
    assert found.fingerprint() == plain.fingerprint(), "its drafters still fit"
    assert found.precision == "float32, int8 weights" and found.source == plain.source
    ids = torch.tensor([[5, 80, 33]])
    expected = plain.forward(ids).logits_BTV
    difference = (found.forward(ids).logits_BTV - expected).norm() / expected.norm()
    assert 0 < difference < 0.1


def test_what_cannot_be_rounded_is_refused(directory: Path, may_quantize_on_cpu: None) -> None:
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(settings))
    with pytest.raises(TargetError, match=r"is already quantized \(fp8\), and --quantize would round it twice"):
        load_target(directory, dtype="float32", device="cpu", quantize="int8")


def test_devices_and_dtypes_without_kernels_are_refused(directory: Path) -> None:
    with pytest.raises(TargetError, match="--quantize int4 needs a GPU") as caught:
        load_target(directory, device="cpu", quantize="int4")
    assert "GGUF" in str(caught.value.hint)
    with pytest.raises(TargetError, match="--quantize fp8 computes in bfloat16, not in float16"):
        check_quantize("fp8", torch.device("cuda"), torch.float16)
    with pytest.raises(TargetError, match="unknown form 'int5'"):
        check_quantize("int5", torch.device("cuda"), torch.bfloat16)


def test_the_check_of_memory_knows_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24_000_000_000, 24_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(capacity, "available_bytes", lambda: 70_000_000_000)

    def check(billions: float, quantize: str | None = None) -> str:
        try:
            capacity.check_fits("it", int(billions * 1e9), torch.bfloat16, torch.device("cuda"), quantize=quantize)
        except CapacityError as error:
            return f"{error.message} / {error.hint}"
        return ""

    assert "or --quantize fp8 (about 14.3 GB)" in check(14) and "or --quantize int4 (about 17.7 GB)" in check(32)
    assert "--quantize" not in check(70) and not check(14, "fp8") and not check(32, "int4")
    assert "32.0 billion parameters in fp8 take about 32.8 GB, but a GPU has 24.0 GB free" in check(32, "fp8")
    assert "or --quantize int4" in check(32, "fp8")
    assert "its plain weights, 72.0 GB, fit neither a GPU nor the 70.0 GB of free host memory" in check(36, "int4")


@pytest.mark.parametrize("form", ["int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_the_bytes_of_a_form_are_known_before_weights_are_rounded(form: str) -> None:
    settings = read_shape("llama-8b")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    num_plain = 2 * settings["vocab_size"] * settings["hidden_size"]
    expected = quantized_bytes(num_parameters(model), form, num_plain)
    quantize_model(model, form)
    assert num_bytes(model) == pytest.approx(expected, rel=0.01)
