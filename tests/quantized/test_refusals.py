"""Few-bit formats that are not read, and damaged ones, are refused from their headers, by name and with the way out."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.few_bit_models import FEW_BIT, compressed, set_config, store_in_few_bits
from harness.tiny_models import tiny_target, write_target
from peagle.errors import CapacityError, TargetError
from peagle.quantized import load
from peagle.targets.load import load_target

VLLM = "peagle serve {} --engine vllm"
ELSEWHERE = "a copy stored as awq, gptq, compressed-tensors or fp8"
GATE = "model.layers.1.mlp.gate_proj"


@pytest.fixture(autouse=True)
def _nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "_load_few_bit", read)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tiny_target(num_layers=2), tmp_path_factory.mktemp("plain"))


def refused(directory: Path) -> TargetError:
    with pytest.raises(TargetError) as caught:
        load_target(directory, dtype="float32", device="cpu")
    return caught.value


def changed(name: str, **keys: Any) -> dict[str, Any]:
    return FEW_BIT[name].config | keys


def weights(form: str, **keys: Any) -> dict[str, Any]:
    return compressed(form, **keys)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (changed("awq", version="gemv"), "awq, version gemv"),
        (changed("awq", bits=3), "awq, 3 bits"),
        (changed("awq", group_size=0), "awq, group size 0"),
        (changed("gptq", bits=3), "gptq, 3 bits"),
        (changed("gptq", checkpoint_format="marlin"), "gptq, checkpoint_format marlin"),
        (changed("gptq", is_marlin_format=True), "gptq, checkpoint_format marlin"),
        (weights("nvfp4-pack-quantized"), "compressed-tensors, format nvfp4-pack-quantized"),
        (weights("marlin-24"), "compressed-tensors, format marlin-24"),
        (weights("pack-quantized", num_bits=3), "compressed-tensors, format pack-quantized with 3 bits of type int"),
        (weights("float-quantized"), "compressed-tensors, format float-quantized with 4 bits of type int"),
        (weights("pack-quantized", strategy="tensor_group"), "compressed-tensors, strategy tensor_group"),
        (
            weights("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors, sparsity_config sparse-24-bitmask",
        ),
        (
            weights("pack-quantized") | {"transform_config": {"config_groups": {"u": {}}}},
            "compressed-tensors, transform_config",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, NVFP4"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "auto-round", "bits": 4}, "auto-round"),
    ],
)
def test_a_format_that_vllm_may_read_is_refused_with_its_command(
    plain: Path, config: dict[str, Any], form: str
) -> None:
    set_config(plain, config)
    error = refused(plain)
    assert error.message == f"{plain} stores its weights as {form}, which the native engine does not read"
    assert VLLM.format(plain) in str(error.hint) and ELSEWHERE in str(error.hint)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "eetq", "quanto", "aqlm"])
def test_a_method_that_vllm_does_not_read_either_is_refused_without_it(plain: Path, method: str) -> None:
    set_config(plain, {"quant_method": method, "load_in_4bit": True})
    error = refused(plain)
    assert error.message == f"{plain} stores its weights as {method}, which the native engine does not read"
    assert error.hint == f"use the model it was made from, or {ELSEWHERE}"


def test_modelopts_own_file_is_read_too(plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    config.pop("quantization_config", None)  # another test may have set it
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    message = refused(plain).message
    (plain / "hf_quant_config.json").unlink()
    assert "modelopt, NVFP4" in message


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq"},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {}}}},
    ],
)
def test_a_damaged_quantization_config_is_refused(plain: Path, config: dict[str, Any]) -> None:
    set_config(plain, config)
    error = refused(plain)
    assert "quantization_config of method" in error.message and "cannot be read" in error.message
    assert "download it again" in str(error.hint)


Change = Callable[[dict[str, torch.Tensor]], object]


def refused_after(change: Change, directory: Path, name: str) -> TargetError:
    """The error for a tiny target in the few-bit format `name` whose tensors were changed."""
    write_target(tiny_target(num_layers=2), directory)
    store_in_few_bits(directory, name)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return refused(directory)


def without(part: str) -> Change:
    return lambda tensors: tensors.pop(f"{GATE}.{part}")


def replaced(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{GATE}.{part}": change(tensors[f"{GATE}.{part}"]).contiguous()})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq", without("scales"), f"lacks '{GATE}.scales', without which its awq weight cannot be read"),
        ("awq", without("qzeros"), f"lacks '{GATE}.qzeros', without which its awq weight cannot be read"),
        ("gptq", without("qzeros"), f"lacks '{GATE}.qzeros', without which its gptq weight"),
        ("gptq-v2-ordered", without("g_idx"), f"lacks '{GATE}.g_idx', without which its gptq weight"),
        ("packed-4", without("weight_shape"), f"lacks '{GATE}.weight_shape', without which its compressed-tensors"),
        ("packed-4-asymmetric", without("weight_zero_point"), f"lacks '{GATE}.weight_zero_point'"),
        ("packed-4-ordered", without("weight_g_idx"), f"lacks '{GATE}.weight_g_idx'"),
        ("int8-channel", without("weight_scale"), f"lacks '{GATE}.weight_scale', without which"),
        ("fp8-tensor", without("weight_scale"), f"lacks '{GATE}.weight_scale', without which its fp8 weight"),
        (
            "awq",
            replaced("scales", lambda each: each[:1]),
            f"{GATE}.scales has the shape [1, 128], but 4-bit weights of 128 x 64 that share scales by 1 x 32 need "
            "[2, 128]",
        ),
        ("gptq-8", replaced("qzeros", lambda each: each[:, :8]), f"{GATE}.qzeros has the shape [1, 8], but 8-bit"),
        ("gptq", replaced("g_idx", lambda each: each[:60]), f"{GATE}.g_idx has the shape [60], but 4-bit weights"),
        ("packed-8", replaced("weight_scale", lambda each: each[:, :1]), f"{GATE}.weight_scale has the shape [128, 1]"),
        (
            "packed-4",
            replaced("weight_packed", lambda each: each[:, :6]),
            f"{GATE}.weight_packed has the shape [128, 6], which cannot hold 128 x 64 numbers of 4 bits",
        ),
        (
            "packed-4",
            replaced("weight_scale", lambda each: each.to(torch.float8_e4m3fn)),
            f"{GATE}.weight_scale is stored as F8_E4M3, not as F16 or BF16 or F32",
        ),
        ("fp8-channel", replaced("weight_scale", lambda each: each[:3]), f"{GATE}.weight_scale has the shape [3]"),
        ("float-block", replaced("weight_scale", lambda each: each[:, :1]), "share scales by 48 x 24 need [3, 3]"),
    ],
)
def test_tensors_that_lack_or_contradict_are_refused_by_name(
    tmp_path: Path, name: str, change: Change, message: str
) -> None:
    error = refused_after(change, tmp_path, name)
    assert message in error.message and str(tmp_path) in error.message
    assert "download" in str(error.hint)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("awq", changed("awq", group_size=64), "4-bit weights of 64 x 128 that share scales by 1 x 64 need [2, 64]"),
        ("gptq", changed("gptq", bits=8), "8-bit weights of 64 x 64 that share scales by 1 x 32 need [2, 64]"),
        ("packed-4", weights("pack-quantized", strategy="group", group_size=16), "share scales by 1 x 16 need [64, 8]"),
        ("packed-4", weights("pack-quantized", num_bits=8), "which cannot hold 64 x 128 numbers of 8 bits"),
    ],
)
def test_a_config_that_contradicts_the_shapes_is_refused(
    tmp_path: Path, name: str, config: dict[str, Any], message: str
) -> None:
    write_target(tiny_target(num_layers=2), tmp_path)
    store_in_few_bits(tmp_path, name)
    set_config(tmp_path, config)
    error = refused(tmp_path)
    assert message in error.message
    assert "quantization_config in config.json does not describe these weights" in str(error.hint)


@pytest.mark.parametrize(
    ("name", "change", "form"),
    [
        ("awq", replaced("qweight", lambda each: each.to(torch.int16)), f"awq, {GATE}.qweight as I16 of 2 dimensions"),
        (
            "packed-4",
            replaced("weight_packed", lambda each: each.to(torch.uint8)),
            "weight_packed as U8 of 2 dimensions",
        ),
        ("fp8-tensor", replaced("weight", lambda each: each.float().to(torch.float8_e5m2)), "weight as F8_E5M2 of 2"),
        ("fp8-tensor", replaced("weight", lambda each: each[None]), f"{GATE}.weight as F8_E4M3 of 3 dimensions"),
        (
            "fp8-tensor",
            lambda tensors: tensors.update({"model.experts.gate_up_proj": tensors[f"{GATE}.weight"][None].clone()}),
            "model.experts.gate_up_proj as F8_E4M3 of 3 dimensions",
        ),
    ],
)
def test_a_tensor_of_another_packing_is_refused(tmp_path: Path, name: str, change: Change, form: str) -> None:
    error = refused_after(change, tmp_path, name)
    assert form in error.message and VLLM.format(tmp_path) in str(error.hint)


def test_a_module_that_no_group_targets_is_refused(tmp_path: Path) -> None:
    write_target(tiny_target(num_layers=2), tmp_path)
    store_in_few_bits(tmp_path, "packed-4")
    config = weights("pack-quantized", strategy="group", group_size=32)
    config["config_groups"]["group_0"]["targets"] = ["lm_head"]
    set_config(tmp_path, config)
    assert "no group of quantization_config has 'model.layers." in refused(tmp_path).message


def test_weights_that_fit_only_in_few_bits_are_refused_with_the_engine_that_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_target(tiny_target(num_layers=2), tmp_path)
    store_in_few_bits(tmp_path, "awq")
    monkeypatch.setattr("peagle.targets.capacity.available_bytes", lambda: 4 * 90_000)
    with pytest.raises(CapacityError, match="does not fit") as caught:
        load_target(tmp_path, dtype="float32", device="cpu")
    assert f"vLLM runs its quantized weights as they are: `{VLLM.format(tmp_path)}`" in str(caught.value.hint)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    write_target(tiny_target(num_layers=2), tmp_path)
    store_in_few_bits(tmp_path, "packed-4")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    path.write_bytes(content[: 8 + length])
    assert f"{path} is truncated: it has" in refused(tmp_path).message
