"""Models stored in few bits, as their makers store them, and the plain numbers that they stand for.

Everything is written from the formats' definitions in loops over Python numbers, without the code under test: what a
stored weight stands for, `(code - zero) * scale`, is computed beside the codes, before they are packed.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that AutoAWQ puts at each place of a word."""
E4M3 = [float(code) for code in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()]
"""What each byte means as an 8-bit float; two of them are not numbers."""


@dataclass(frozen=True)
class Codes:
    """A quantized weight of O outputs and I inputs, before it is packed."""

    code: list[list[int]]
    """[O][I]"""
    zero: list[list[int]]
    """[O][G]"""
    scale: np.ndarray
    """[O, G]"""
    group: list[int]
    """The group of each input, [I]"""

    def plain(self) -> Tensor:
        rows = range(len(self.code))
        numbers = [
            [
                (code - self.zero[o][g]) * float(self.scale[o, g])
                for code, g in zip(self.code[o], self.group, strict=True)
            ]
            for o in rows
        ]
        return torch.from_numpy(np.array(numbers, dtype=np.float64).astype(np.float32))


def quantize(weight: Tensor, bits: int, group: list[int], middle: bool, rng: random.Random) -> Codes:
    """Codes from 0 to 2 ** bits - 1; zeros are in the middle, or anywhere but 0, which GPTQ cannot store."""
    num_outputs, num_inputs = weight.shape
    num_groups, most = max(group) + 1, 2**bits - 1
    zero = [
        [(most + 1) // 2 if middle else rng.randrange(1, most + 1) for _ in range(num_groups)]
        for _ in range(num_outputs)
    ]
    largest = np.zeros((num_outputs, num_groups))
    values = weight.tolist()
    for o in range(num_outputs):
        for i in range(num_inputs):
            largest[o, group[i]] = max(largest[o, group[i]], abs(values[o][i]))
    scale = (largest / (most / 2)).astype(np.float16)
    code = [
        [
            min(most, max(0, round(values[o][i] / float(scale[o, group[i]])) + zero[o][group[i]]))
            for i in range(num_inputs)
        ]
        for o in range(num_outputs)
    ]
    return Codes(code, zero, scale, group)


def words(rows: list[list[int]], bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Each row packed into int32, lowest bits first; rows are padded with zeros. `order`: the number of each place."""
    per_word, packed = 32 // bits, []
    for row in rows:
        padded = row + [0] * (-len(row) % per_word)
        packed.append([])
        for start in range(0, len(padded), per_word):
            word = 0
            for place in range(per_word):
                word |= padded[start + (order[place] if order else place)] << (bits * place)
            packed[-1].append(word - 2**32 if word >= 2**31 else word)
    return torch.tensor(packed, dtype=torch.int32)


def transpose(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def groups_of(num_inputs: int, size: int, rng: random.Random | None = None) -> list[int]:
    """The group of each input; in random order with an `rng`."""
    group = [i // size if size > 0 else 0 for i in range(num_inputs)]
    if rng is not None:
        rng.shuffle(group)
    return group


Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by name, and its plain weight."""


def awq(weight: Tensor, rng: random.Random, group_size: int = 32) -> Stored:
    codes = quantize(weight, 4, groups_of(weight.shape[1], group_size), False, rng)
    return {
        "qweight": words(transpose(codes.code), 4, AWQ_OUTPUTS),
        "qzeros": words(transpose(codes.zero), 4, AWQ_OUTPUTS),
        "scales": torch.from_numpy(codes.scale.T.copy()),
    }, codes.plain()


def gptq(
    weight: Tensor, rng: random.Random, bits: int = 4, group_size: int = 32, minus: int = 1, ordered: bool = False
) -> Stored:
    codes = quantize(weight, bits, groups_of(weight.shape[1], group_size, rng if ordered else None), False, rng)
    zero = [[each - minus for each in row] for row in codes.zero]
    return {
        "qweight": words(codes.code, bits).T.contiguous(),
        "qzeros": words(transpose(zero), bits),
        "scales": torch.from_numpy(codes.scale.T.copy()),
        "g_idx": torch.tensor(codes.group, dtype=torch.int32),
    }, codes.plain()


def packed(
    weight: Tensor,
    rng: random.Random,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
) -> Stored:
    codes = quantize(weight, bits, groups_of(weight.shape[1], group_size, rng if ordered else None), symmetric, rng)
    tensors = {
        "weight_packed": words(codes.code, bits),
        "weight_scale": torch.from_numpy(codes.scale).to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(transpose(codes.zero), bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = torch.tensor(codes.group, dtype=torch.int32)
    rounded = Codes(codes.code, codes.zero, tensors["weight_scale"].float().numpy(), codes.group)
    return tensors, rounded.plain()


def int8(weight: Tensor, rng: random.Random, strategy: str = "channel", symmetric: bool = True) -> Stored:
    codes = quantize(weight, 8, [0] * weight.shape[1], symmetric, rng)
    scale, zero = codes.scale.astype(np.float32), codes.zero
    if strategy == "tensor":
        scale[:] = scale.max()
    tensors = {
        "weight": torch.tensor([[code - 128 for code in row] for row in codes.code], dtype=torch.int8),
        "weight_scale": torch.from_numpy(scale) if strategy == "channel" else torch.tensor([float(scale[0, 0])]),
    }
    if not symmetric or strategy == "channel":  # older versions store the zeros of symmetric weights too
        tensors["weight_zero_point"] = torch.tensor([[each - 128 for each in row] for row in zero], dtype=torch.int8)
    return tensors, Codes(codes.code, zero, scale, codes.group).plain()


def fp8(
    weight: Tensor,
    rng: random.Random,
    block: tuple[int, int] = (0, 0),
    shape: str = "matrix",
    scale: str = "weight_scale",
) -> Stored:
    """8-bit floats that share a factor by blocks of outputs and inputs; 0 stands for all."""
    num_outputs, num_inputs = weight.shape
    rows, columns = block[0] or num_outputs, block[1] or num_inputs
    factor = np.zeros((-(-num_outputs // rows), -(-num_inputs // columns)), dtype=np.float32)
    for index in np.ndindex(*factor.shape):
        factor[index] = np.float32(rng.uniform(0.001, 0.002))
    bytes_OI = np.zeros((num_outputs, num_inputs), dtype=np.uint8)
    plain = np.zeros((num_outputs, num_inputs), dtype=np.float32)
    coded = (
        (
            weight
            / torch.from_numpy(factor)
            .repeat_interleave(rows, 0)
            .repeat_interleave(columns, 1)[:num_outputs, :num_inputs]
        )
        .clamp(-448, 448)
        .to(torch.float8_e4m3fn)
    )
    bytes_OI[:] = coded.view(torch.uint8).numpy()
    for o, i in np.ndindex(num_outputs, num_inputs):
        plain[o, i] = np.float32(E4M3[bytes_OI[o, i]] * float(factor[o // rows, i // columns]))
    stored = torch.from_numpy(factor)
    stored = {"matrix": stored, "vector": stored.flatten(), "scalar": stored.flatten()[0].clone()}[shape]
    tensors = {"weight": coded, scale: stored}
    if scale == "weight_scale":
        tensors["input_scale"] = torch.tensor(0.02)
    return tensors, torch.from_numpy(plain)


def compressed(form: str, activations: bool = False, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    rounded = {"num_bits": 8, "type": weights.get("type", "int"), "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"} | weights,
        "input_activations": rounded if activations else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


@dataclass(frozen=True)
class FewBit:
    """One format: what config.json says, and how a weight is stored."""

    config: dict[str, Any]
    store: Callable[..., Stored]
    options: dict[str, Any] = field(default_factory=dict)


def _awq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True} | changes


def _gptq(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    return config | {"checkpoint_format": "gptq"} | changes


def _group(size: int, **weights: Any) -> dict[str, Any]:
    return compressed("pack-quantized", strategy="group", group_size=size, **weights)


def _floats(form: str, **weights: Any) -> dict[str, Any]:
    return compressed(form, activations=True, num_bits=8, type="float", **weights)


_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
_INT8 = {"num_bits": 8, "activations": True}
FEW_BIT: dict[str, FewBit] = {
    "awq": FewBit(_awq(), awq),
    "awq-one-group": FewBit(_awq(group_size=-1), awq, {"group_size": -1}),
    "gptq": FewBit(_gptq(), gptq),
    "gptq-8": FewBit(_gptq(bits=8, group_size=-1), gptq, {"bits": 8, "group_size": -1}),
    "gptq-v2-ordered": FewBit(_gptq(checkpoint_format="gptq_v2", desc_act=True), gptq, {"minus": 0, "ordered": True}),
    "packed-4": FewBit(_group(32), packed),
    "packed-4-asymmetric": FewBit(_group(16, symmetric=False), packed, {"group_size": 16, "symmetric": False}),
    "packed-4-ordered": FewBit(_group(32, actorder="group"), packed, {"ordered": True}),
    "packed-4-channel": FewBit(
        compressed("pack-quantized", symmetric=False), packed, {"group_size": -1, "symmetric": False}
    ),
    "packed-8": FewBit(_group(32, num_bits=8), packed, {"bits": 8}),
    "packed-8-asymmetric": FewBit(_group(32, num_bits=8, symmetric=False), packed, {"bits": 8, "symmetric": False}),
    "int8-channel": FewBit(compressed("int-quantized", **_INT8), int8),
    "int8-asymmetric": FewBit(compressed("int-quantized", symmetric=False, **_INT8), int8, {"symmetric": False}),
    "int8-tensor": FewBit(compressed("int-quantized", strategy="tensor", **_INT8), int8, {"strategy": "tensor"}),
    "float-channel": FewBit(_floats("float-quantized"), fp8, {"block": (1, 0)}),
    "float-tensor": FewBit(_floats("float-quantized", strategy="tensor"), fp8, {"shape": "vector"}),
    "float-block": FewBit(
        _floats("float-quantized", strategy="block", block_structure=[48, 24]), fp8, {"block": (48, 24)}
    ),
    "naive": FewBit(_floats("naive-quantized"), fp8, {"block": (1, 0)}),
    "fp8-tensor": FewBit(_FP8, fp8, {"shape": "scalar"}),
    "fp8-channel": FewBit(_FP8 | {"activation_scheme": "dynamic"}, fp8, {"block": (1, 0), "shape": "vector"}),
    "fbgemm": FewBit({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8, {"block": (1, 0)}),
    "modelopt": FewBit({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8, {"shape": "scalar"}),
}

_BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
WIDE_GROUPS: dict[str, FewBit] = {
    "awq-64": FewBit(_awq(group_size=64), awq, {"group_size": 64}),
    "gptq-64": FewBit(_gptq(group_size=64, sym=False), gptq, {"group_size": 64}),
    "gptq-8-64": FewBit(_gptq(bits=8, group_size=64, sym=False), gptq, {"bits": 8, "group_size": 64}),
    "packed-4-64": FewBit(_group(64), packed, {"group_size": 64}),
    "packed-8-64": FewBit(_group(64, num_bits=8), packed, {"bits": 8, "group_size": 64}),
    "packed-4-64-asymmetric": FewBit(_group(64, symmetric=False), packed, {"group_size": 64, "symmetric": False}),
    "fp8-block": FewBit(_BLOCK_FP8, fp8, {"block": (64, 64), "scale": "weight_scale_inv"}),
}
"""Formats with groups that our kernels can read."""


def store_in_few_bits(directory: Path, name: str, seed: int = 0) -> dict[str, Tensor]:
    """Rewrite a plain model's directory in a format of FEW_BIT, or of WIDE_GROUPS; the plain float32 numbers by name
    that it now holds.

    Layers' projections are quantized, but one, as makers leave out sensitive ones.
    """
    form, rng = (FEW_BIT | WIDE_GROUPS)[name], random.Random(seed)
    (weights,) = directory.glob("*.safetensors")
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in load_file(weights).items():
        module = key.removesuffix(".weight")
        if "_proj" in module and module != key and "layers.0.self_attn.q_proj" not in module:
            parts, plain[key] = form.store(tensor.float(), rng, **form.options)
            stored |= {f"{module}.{part}": each for part, each in parts.items()}
        else:
            stored[key], plain[key] = tensor.clone(), tensor.float()
    save_file(stored, weights, metadata={"format": "pt"})
    set_config(directory, form.config)
    return plain


def set_config(directory: Path, quantization: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
