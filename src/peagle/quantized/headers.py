"""Find the quantized weights of a checkpoint from its safetensors headers, and check them before any is read.

O outputs and I inputs, in blocks of `block` that share one scale. AutoAWQ and GPTQ store the transpose.
"""

from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from peagle.errors import TargetError
from peagle.quantized.formats import Description, Layout, Scheme, describe, refusal
from peagle.safetensors_header import TensorInfo, read_header, weight_files

CODES: dict[Layout, str] = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "codes": "weight"}
"""The tensor that holds the codes of a module, by layout."""
SCALES = ("weight_scale", "weight_scale_inv", "scales")
FLOATS = ("F16", "BF16", "F32")
UNUSED = {
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "input_scale_ub"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point", "g_idx", "weight_g_idx"),
    "weight_zero_point",
}
"""For rounding activations and the KV cache, which are not rounded here; empty orders; zeros of symmetric weights."""


@dataclass(frozen=True)
class StoredWeight:
    """One quantized weight."""

    module: str
    scheme: Scheme
    shape: tuple[int, ...]
    """Outputs and inputs; of a stack, experts first."""
    block: tuple[int, int]
    """The outputs and inputs that share one scale."""
    parts: tuple[str, ...]
    """Its tensors, without the module."""
    scale_dtype: str


@dataclass(frozen=True)
class FewBitCheckpoint:
    """A directory with quantized weights that can be read."""

    described: Description
    weights: dict[str, StoredWeight]
    """By the name of the plain weight that each stands for."""
    plain: dict[str, TensorInfo]
    """The other tensors."""
    files: dict[str, Path]
    """The file of each tensor."""

    @property
    def num_parameters(self) -> int:
        stored = sum(prod(weight.shape) for weight in self.weights.values())
        return stored + sum(prod(info.shape) for info in self.plain.values())


def read_few_bit(directory: Path, *, with_all: bool = False) -> FewBitCheckpoint | None:
    """The directory's quantized weights, checked; None if it has none, or transformers dequantizes them.

    with_all: also those that transformers would dequantize.
    """
    described = describe(directory, with_all=with_all)
    if described is None:
        return None
    files: dict[str, Path] = {}
    infos: dict[str, TensorInfo] = {}
    for path in weight_files(directory):
        header = read_header(path)
        infos |= header
        files |= dict.fromkeys(header, path)
    check = _Check(described, infos, files)
    weights, used = {}, set()
    for name in infos:
        module, _, part = name.rpartition(".")
        if part in ("qweight", "weight_packed") or (part == "weight" and infos[name].dtype not in (*FLOATS, "F64")):
            weight = check.weight(module, part)
            weights[f"{module}.weight"] = weight
            used |= {f"{module}.{each}" for each in weight.parts}
        elif part.endswith("_blocks") and described.method == "mxfp4":
            weight = check.stack(module, part)
            weights[name.removesuffix("_blocks")] = weight
            used |= {f"{module}.{each}" for each in weight.parts}
    plain = {name: info for name, info in infos.items() if name not in used and name.rpartition(".")[2] not in UNUSED}
    for name, info in plain.items():
        if len(info.shape) > 1 and info.dtype not in (*FLOATS, "F64", "BOOL", "I64"):
            raise refusal(directory, f"{described.method}, {name} as {info.dtype} of {len(info.shape)} dimensions")
    return FewBitCheckpoint(described, weights, plain, files)


@dataclass(frozen=True)
class _Check:
    """Compares the tensors of a module with its scheme."""

    described: Description
    infos: dict[str, TensorInfo]
    files: dict[str, Path]

    def weight(self, module: str, part: str) -> StoredWeight:
        scheme = self.described.scheme(module)
        codes = self._info(module, part)
        form = f"{self.described.method}, {module}.{part} as {codes.dtype} of {len(codes.shape)} dimensions"
        allowed = ("I8", "F8_E4M3") if scheme.layout == "codes" else ("I32",)
        if part != CODES[scheme.layout] or codes.dtype not in allowed or len(codes.shape) != 2:
            raise refusal(self.described.directory, form)
        shape = self._shape(module, scheme, codes)
        block = self._block(module, scheme, shape)
        expected = self._expected(module, scheme, shape, block)
        for each, (wanted, dtypes) in expected.items():
            info = self._info(module, each)
            if info.dtype not in dtypes:
                raise self._contradiction(f"{module}.{each} is stored as {info.dtype}, not as {' or '.join(dtypes)}")
            if _as_matrix(info.shape) != _as_matrix(wanted):
                size = (
                    f"{scheme.bits}-bit weights of {shape[0]} x {shape[1]} that share scales by {block[0]} x {block[1]}"
                )
                raise self._contradiction(
                    f"{module}.{each} has the shape {list(info.shape)}, but {size} need {list(wanted)}"
                )
        (scales,) = (self._info(module, each) for each in expected if each in SCALES)
        return StoredWeight(module, scheme, shape, block, (part, *expected), scales.dtype)

    def stack(self, module: str, part: str) -> StoredWeight:
        """MXFP4: blocks of 16 bytes, two codes in each, and an exponent per block."""
        blocks, other = self._info(module, part), part.replace("_blocks", "_scales")
        scales = self._info(module, other)
        if (blocks.dtype, scales.dtype, blocks.shape) != ("U8", "U8", (*scales.shape, 16)) or len(scales.shape) != 3:
            raise self._contradiction(f"{module}.{part} is not MXFP4 in blocks of 32 with the scales {other}")
        num_experts, num_outputs, num_blocks = scales.shape
        shape = (num_experts, num_outputs, 32 * num_blocks)
        return StoredWeight(module, self.described.scheme(module), shape, (1, 32), (part, other), scales.dtype)

    def _shape(self, module: str, scheme: Scheme, codes: TensorInfo) -> tuple[int, int]:
        """Outputs and inputs of a weight."""
        rows, columns = codes.shape
        per_word = 32 // scheme.bits
        if scheme.layout == "awq":
            return columns * per_word, rows
        if scheme.layout == "gptq":
            return columns, rows * per_word
        if scheme.layout == "codes":
            return rows, columns
        stored = self._info(module, "weight_shape")  # rows are padded to whole words
        with self.files[f"{module}.weight_shape"].open("rb") as file:
            file.seek(stored.start)
            content = file.read(stored.end - stored.start)
        half = len(content) // 2
        outputs, inputs = (int.from_bytes(each, "little") for each in (content[:half], content[half:]))
        if (outputs, ceil(inputs / per_word)) != (rows, columns):
            raise self._contradiction(
                f"{module}.weight_packed has the shape {[rows, columns]}, which cannot hold "
                f"{outputs} x {inputs} numbers of {scheme.bits} bits"
            )
        return outputs, inputs

    def _block(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
        block = scheme.block
        if block is None:
            block = (0, 0) if prod(self._info(module, self._scale(module)).shape) == 1 else (1, 0)
        return block[0] or shape[0], block[1] or shape[1]

    def _expected(
        self, module: str, scheme: Scheme, shape: tuple[int, int], block: tuple[int, int]
    ) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """The shape and the dtypes of each tensor beside the codes."""
        outputs, inputs = shape
        num_rows, num_columns = ceil(outputs / block[0]), ceil(inputs / block[1])
        words = ceil(outputs * scheme.bits / 32)
        if scheme.layout in ("awq", "gptq"):
            expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
                "scales": ((num_columns, outputs), FLOATS),
                "qzeros": ((num_columns, words), ("I32",)),
            }
        else:
            expected = {self._scale(module): ((num_rows, num_columns), FLOATS)}
        if scheme.layout == "packed":
            expected["weight_shape"] = ((2,), ("I64", "I32"))
        if scheme.has_zeros and scheme.layout in ("packed", "codes"):
            is_packed = scheme.layout == "packed" and block[0] == 1
            zeros = ((words, num_columns), ("I32",)) if is_packed else ((num_rows, num_columns), ("I8",))
            expected["weight_zero_point"] = zeros
        order = "g_idx" if scheme.layout == "gptq" else "weight_g_idx"
        stored = self.infos.get(f"{module}.{order}")
        if scheme.has_order or (stored is not None and stored.shape != (0,)):
            expected[order] = ((inputs,), ("I32", "I64"))
        return expected

    def _scale(self, module: str) -> str:
        """transformers' FP8 calls its factors inverse."""
        return "weight_scale_inv" if f"{module}.weight_scale_inv" in self.infos else "weight_scale"

    def _info(self, module: str, part: str) -> TensorInfo:
        info = self.infos.get(f"{module}.{part}")
        if info is None:
            raise TargetError(
                f"{self.described.directory} lacks {module + '.' + part!r}, without which its {self.described.method} "
                "weight cannot be read",
                hint="the weights are incomplete; copy or download them again",
            )
        return info

    def _contradiction(self, what: str) -> TargetError:
        directory = self.described.directory
        return TargetError(
            f"{directory}: {what}",
            hint="quantization_config in config.json does not describe these weights; copy or download both again, "
            f"or try `peagle serve {directory} --engine vllm`",
        )


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of at least two dimensions: makers store one scale, or one per output, with or without them."""
    return (*shape, 1, 1)[: max(2, len(shape))]
