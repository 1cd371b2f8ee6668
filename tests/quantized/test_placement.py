"""Few-bit weights are placed on the device while they load: the host holds neither their codes nor plain copies."""

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MixtralConfig, MixtralForCausalLM

from harness.few_bit_models import FEW_BIT, WIDE_GROUPS, fp8, set_config, store_in_few_bits
from harness.published_models import GEMMA4, PUBLISHED, QWEN3_CODER, Published
from harness.published_models import write_target as write_published
from harness.tiny_models import tiny_target, write_target
from peagle.experts.few_bit import set_experts
from peagle.experts.fused import gate_of
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.quantized import load
from peagle.quantized.headers import FewBitCheckpoint, read_few_bit
from peagle.quantized.keep import Keep, kept_bytes
from peagle.quantized.load import load_model

ELSEWHERE = Keep(torch.device("meta"), gate_of, set_experts)
"""A device that is not the host; it has shapes and no numbers."""
IDS = torch.tensor([[5, 80, 33, 261, 7]])
HERE = ELSEWHERE._replace(device=torch.device("cpu"))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes on the host."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return made


def dense(directory: Path) -> Path:
    """Every linear layer, also the head, which drafters read."""
    write_target(tiny_target(num_layers=1, intermediate_size=640, tie_word_embeddings=False), directory)
    store_in_few_bits(directory, "packed-4-64")
    tensors = load_file(directory / "model.safetensors")
    head = WIDE_GROUPS["packed-4-64"].store(tensors.pop("lm_head.weight"), random.Random(0), group_size=64)[0]
    tensors |= {f"lm_head.{part}": each for part, each in head.items()}
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def experts(directory: Path, name: str) -> Path:
    """Mixture of experts; in "mixed" our kernels cannot read the groups of gates and up projections."""
    write_published(Published(QWEN3_CODER | {"num_hidden_layers": 1, "moe_intermediate_size": 64}, 8), directory)
    store_in_few_bits(directory, "packed-4-64" if name == "mixed" else name)
    if name == "mixed":
        path, (group,) = directory / "model.safetensors", WIDE_GROUPS["packed-4-64"].config["config_groups"].values()
        scales = {
            key: each.repeat_interleave(2, 1).contiguous() if re.search("(gate|up)_proj.weight_scale", key) else each
            for key, each in load_file(path).items()
        }
        save_file(scales, path, metadata={"format": "pt"})
        narrow = group | {"targets": ["re:.*(gate|up)_proj$"], "weights": group["weights"] | {"group_size": 32}}
        set_config(directory, WIDE_GROUPS["packed-4-64"].config | {"config_groups": {"a": narrow, "b": group}})
    return directory


def checkpoint_of(directory: Path) -> FewBitCheckpoint:
    checkpoint = read_few_bit(directory, with_all=True)
    assert checkpoint is not None
    return checkpoint


def host_numbers(model: nn.Module) -> int:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(each.numel() for name, each in tensors if each.device.type == "cpu" and "inv_freq" not in name)


def plain_numbers(checkpoint: FewBitCheckpoint) -> int:
    return sum(torch.Size(info.shape).numel() for info in checkpoint.plain.values())


@pytest.mark.parametrize("name", ["dense", "packed-4-64", "fp8-block", "mixed", "gpt-oss"])
def test_the_host_never_holds_a_weight_in_its_plain_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "dense":
        directory, limit = dense(tmp_path), 2 * 64 * 640
    elif name == "gpt-oss":
        directory, limit = write_published(PUBLISHED["gpt-oss-20b"], tmp_path), 2 * 8 * 128 * 64
    else:
        directory, limit = experts(tmp_path, name), 2 * 8 * 128 * 64
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the mode does not see other threads
    with Largest() as largest:
        model, _ = load_model(directory, torch.bfloat16, ELSEWHERE)
    assert host_numbers(model) == plain_numbers(checkpoint_of(directory)), "all else is on the device, plain or not"
    assert 0 < largest.num_bytes < limit
    if name == "mixed":
        (stack,) = (each for key, each in model.named_parameters() if key.endswith("experts.gate_up_proj"))
        assert stack.is_meta and stack.dtype == torch.bfloat16, "plain"


def mixtral(directory: Path) -> Path:
    """Experts one by one, under names that transformers renames and stacks."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=288, eos_token_id=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(directory)
    path, stored = directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        is_few_bit = "_proj" in name or ".experts." in name
        parts = fp8(tensor, random.Random(0), (1, 0))[0] if is_few_bit else {"weight": tensor}
        stored |= {f"{module}.{part}": each for part, each in parts.items()}
    save_file(stored, path, metadata={"format": "pt"})
    set_config(directory, FEW_BIT["fp8-channel"].config)
    return directory


def test_experts_that_transformers_stacks_become_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = mixtral(tmp_path)
    plain, _ = load_model(directory, torch.float32)
    with caplog.at_level(logging.INFO, "peagle"):
        kept, report = load_model(directory, torch.float32, HERE)
    assert not report["missing_keys"] and not report["unexpected_keys"] and "dequantizing 12 of them" in caplog.text
    assert [name for name, each in kept.named_modules() if isinstance(each, FewBitLinear)] == [
        f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"
    ]
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)
    checkpoint = checkpoint_of(directory)
    rounded = sum(torch.Size(each.shape).numel() for name, each in checkpoint.weights.items() if "_proj" in name)
    held = 2 * (sum(each.numel() for each in plain.parameters()) - rounded)
    assert held + rounded < kept_bytes(checkpoint, 2) < held + 2 * rounded, "experts count as plain"


def test_a_model_whose_experts_would_fill_the_host_is_loaded_plain_and_straight_to_the_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "total_bytes", lambda: 4 * 12 * 128 * 128)
    with caplog.at_level(logging.INFO, "peagle"):
        kept, _ = load_model(mixtral(tmp_path), torch.float32, HERE, device_map={"": "cpu"})
    assert "not kept quantized: the others would take 0.0 GB of the host's memory" in caplog.text
    assert not any(isinstance(each, FewBitLinear) for each in kept.modules())


def test_layers_that_transformers_renames_are_kept(tmp_path: Path) -> None:
    """Gemma-4: the checkpoint holds a model of images too, with layers of the same names."""
    config = GEMMA4 | {"text_config": GEMMA4["text_config"] | {"num_hidden_layers": 2}}
    config["text_config"]["layer_types"] = ["sliding_attention", "full_attention"]
    directory = write_published(Published(config, 8), tmp_path)
    store_in_few_bits(directory, "fp8-channel")
    plain, _ = load_model(directory, torch.float32)
    kept, _ = load_model(directory, torch.float32, HERE)
    stored = [name for name in checkpoint_of(directory).weights if "language_model" in name]
    assert sum(isinstance(each, FewBitLinear) for each in kept.get_decoder().modules()) == len(stored) > 10
    torch.testing.assert_close(kept(IDS).logits, plain(IDS).logits)
