"""What config.json says about quantized weights.

A `Scheme` describes one weight; a `Description` gives the scheme of each module. An unknown format is refused by name,
with what reads it instead.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peagle.errors import TargetError

Layout = Literal["awq", "gptq", "packed", "codes", "mxfp4"]

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json; the second is compressed-tensors' older one."""
VLLM_READS = {
    "auto-round",
    "awq",
    "compressed-tensors",
    "experts_int8",
    "fp_quant",
    "gptq",
    "modelopt",
    "quark",
    "torchao",
}
"""Methods that vLLM reads, in some or all of their forms."""


@dataclass(frozen=True)
class Scheme:
    """How one weight of O outputs and I inputs is stored."""

    layout: Layout
    """Codes of 4 or 8 bits in int32, as AutoAWQ, GPTQ or compressed-tensors pack them; one code per element; or stacks
    of MXFP4."""
    bits: int
    block: tuple[int, int] | None
    """The outputs and inputs that share one scale; 0 stands for all. None: one scale per output, or one for all."""
    has_zeros: bool = False
    """Whether codes may have a zero other than the middle one."""
    zero_offset: int = 0
    """What is added to a stored zero."""
    has_order: bool = False
    """Whether a tensor gives the group of each input."""


@dataclass(frozen=True)
class Description:
    """The schemes of a checkpoint, each with its modules. The tensors decide which of these are quantized."""

    directory: Path
    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    rounds_activations: bool
    """Whether the format also rounds activations, which we do not."""

    def scheme(self, module: str) -> Scheme:
        """The scheme of a module: of the group that names it, else of the first group that names a class."""
        for targets, scheme in self.groups:
            if any(re.match(t[3:], module) if t.startswith("re:") else t == module for t in targets):
                return scheme
        for targets, scheme in self.groups:
            if any(target[:1].isupper() for target in targets):  # "Linear": the class of a module is not stored
                return scheme
        raise TargetError(
            f"{self.directory}: no group of quantization_config has {module!r} among its targets",
            hint="config.json does not describe these weights; copy or download the directory again",
        )


def quantization_config(directory: Path) -> dict[str, Any]:
    """The directory's quantization_config; empty if there is none. ModelOpt may store it in a file of its own."""
    config = _object(directory / "config.json")
    nested = config.get("text_config")
    for holder in (config, nested if isinstance(nested, dict) else {}):
        for key in CONFIG_KEYS:
            if isinstance(holder.get(key), dict):
                return dict(holder[key])
    stored = _object(directory / "hf_quant_config.json").get("quantization")
    return {"quant_method": "modelopt"} | stored if isinstance(stored, dict) else {}


def is_read_by_transformers(config: dict[str, Any]) -> bool:
    """Whether transformers dequantizes this format right: MXFP4, and FP8 in blocks. It drops other scales of FP8."""
    return config.get("quant_method") == "mxfp4" or (
        config.get("quant_method") == "fp8" and bool(config.get("weight_block_size"))
    )


def describe(directory: Path, *, with_all: bool = False) -> Description | None:
    """How the directory stores quantized weights; None if it has none, or transformers dequantizes them.

    with_all: describe also those that transformers would dequantize.
    """
    config = quantization_config(directory)
    if not config or (is_read_by_transformers(config) and not with_all):
        return None
    method = str(config.get("quant_method"))
    read = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "mxfp4": lambda _: _everywhere(Scheme("mxfp4", 4, (1, 32))),
        "modelopt": _modelopt,
    }.get(method)
    if read is None:
        raise refusal(directory, method, method in VLLM_READS)
    try:
        groups = read(config)
        rounds = method in ("fp8", "fbgemm_fp8", "modelopt") or any(
            group.get("input_activations") for group in config.get("config_groups", {}).values()
        )
    except _UnknownFormError as unknown:
        raise refusal(directory, f"{method}, {unknown}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TargetError(
            f"{directory}: quantization_config of method {method!r} cannot be read: {error!r}",
            hint="config.json is damaged; copy or download it again",
        ) from error
    return Description(directory, method, groups, rounds)


def refusal(directory: Path, form: str, vllm_reads: bool = True) -> TargetError:
    """The error for a format that is not read."""
    hint = "use the model it was made from, or a copy stored as awq, gptq, compressed-tensors or fp8"
    if vllm_reads:
        hint = f"vLLM may read them: `peagle serve {directory} --engine vllm`; or {hint}"
    return TargetError(f"{directory} stores its weights as {form}, which the native engine does not read", hint=hint)


class _UnknownFormError(Exception):
    """A form of a known method that is not read."""


Groups = tuple[tuple[tuple[str, ...], Scheme], ...]


def _awq(config: dict[str, Any]) -> Groups:
    version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
    bits = config.get("bits", config.get("w_bit"))
    if version != "gemm":
        raise _UnknownFormError(f"version {version}")
    if bits != 4:
        raise _UnknownFormError(f"{bits} bits")
    return _everywhere(Scheme("awq", 4, _group(config.get("group_size", config.get("q_group_size"))), has_zeros=True))


def _gptq(config: dict[str, Any]) -> Groups:
    form, bits = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower(), config["bits"]
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise _UnknownFormError(f"checkpoint_format {'marlin' if config.get('is_marlin_format') else form}")
    if bits not in (4, 8):
        raise _UnknownFormError(f"{bits} bits")
    offset = 1 if form == "gptq" else 0
    group, has_zeros, has_order = _group(config["group_size"]), not config.get("sym", True), config.get("desc_act")
    return _everywhere(Scheme("gptq", bits, group, has_zeros, offset, bool(has_order)))


def _fp8(config: dict[str, Any]) -> Groups:
    block = config.get("weight_block_size")
    return _everywhere(Scheme("codes", 8, (int(block[0]), int(block[1])) if block else None))


def _modelopt(config: dict[str, Any]) -> Groups:
    algorithm = config.get("quant_algo")
    if algorithm not in (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN"):  # None: only the KV cache is rounded
        raise _UnknownFormError(str(algorithm))
    return _fp8(config)


def _compressed_tensors(config: dict[str, Any]) -> Groups:
    for key, plain in (("sparsity_config", "dense"), ("transform_config", None)):
        part = config.get(key) or {}
        if part and (plain is None or part.get("format", plain) != plain):
            raise _UnknownFormError(f"{key} {part.get('format', '')}".strip())
    groups = []
    for group in config["config_groups"].values():
        if (weights := group.get("weights")) is not None:
            form = group.get("format") or config.get("format")
            groups.append((tuple(group["targets"]), _compressed_scheme(form, weights)))
    return tuple(groups)


def _compressed_scheme(form: Any, weights: dict[str, Any]) -> Scheme:
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    known = {"pack-quantized": ("int", (4, 8)), "int-quantized": ("int", (8,)), "float-quantized": ("float", (8,))}
    known["naive-quantized"] = (kind, (8,))
    if form not in known:
        raise _UnknownFormError(f"format {form}")
    if known[form][0] != kind or bits not in known[form][1]:
        raise _UnknownFormError(f"format {form} with {bits} bits of type {kind}")
    order = weights.get("actorder")
    return Scheme(
        "packed" if form == "pack-quantized" else "codes",
        bits,
        _compressed_block(weights),
        has_zeros=not weights.get("symmetric", True),
        has_order=order is True or str(order).lower() == "group",
    )


def _compressed_block(weights: dict[str, Any]) -> tuple[int, int]:
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy in ("tensor", "channel"):
        return (0, 0) if strategy == "tensor" else (1, 0)
    if strategy == "group":
        return _group(size)
    if strategy == "block":
        block = weights["block_structure"]
        rows, columns = block.split("x") if isinstance(block, str) else block
        return int(rows), int(columns)
    raise _UnknownFormError(f"strategy {strategy}")


def _group(size: Any) -> tuple[int, int]:
    """The block of a group size; -1 is all inputs."""
    if not isinstance(size, int) or not (size == -1 or size > 0):
        raise _UnknownFormError(f"group size {size}")
    return 1, max(size, 0)


def _everywhere(scheme: Scheme) -> Groups:
    return ((("Linear",), scheme),)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or damaged, which loading reports."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
