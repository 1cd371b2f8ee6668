"""Weights in 4 or 8 bits: packing, rounding, and the kernels against the dequantized weight.

Without a GPU the kernels run in Triton's interpreter, in float32.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from peagle.linears.few_bit import (
    FORMS,
    FewBitWeight,
    code_values,
    dequantize,
    group_limit,
    pack_codes,
    quantize,
    unpack_words,
)
from peagle.linears.skinny_linear import ACTIVATIONS, FEW_BIT_ROWS, few_bit_product

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
CLOSE = {"atol": 3e-2, "rtol": 3e-2} if ON_GPU else {"atol": 1e-4, "rtol": 1e-4}
every_form = pytest.mark.parametrize("form", FORMS)
LARGEST_ERROR = {"int4": 1 / 13.9, "int8": 1 / 250, "fp8": 1 / 28, "mxfp4": 1 / 4}
"""of a weight, in units of the largest of its group"""


def few_bit(num_outputs: int, size: int, form: str, seed: int = 0) -> FewBitWeight:
    draw = torch.Generator().manual_seed(seed)
    return on_device(quantize(torch.randn(num_outputs, size, generator=draw) / size**0.5, form))


def on_device(weight: FewBitWeight) -> FewBitWeight:
    zero = None if weight.zero is None else weight.zero.to(DEVICE)
    return weight._replace(words=weight.words.to(DEVICE), scale=weight.scale.to(DEVICE), zero=zero)


def rows(num_rows: int, size: int) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows)).to(DEVICE, DTYPE)


def linear(x: Tensor, weight: FewBitWeight, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    words, scale, zero = weight.words, weight.scale, weight.zero
    return few_bit_product(x, words, bias, None, activation, scale, zero, weight.form, weight.group)


def product(x: Tensor, weight: FewBitWeight) -> Tensor:
    return functional.linear(x.float(), dequantize(weight))


@every_form
@pytest.mark.parametrize("size", [1, 64, 100, 384])
def test_codes_come_back_from_their_words(form: str, size: int) -> None:
    codes = torch.randint(0, 1 << FORMS[form].bits, (5, 3, size), dtype=torch.uint8)
    words = pack_codes(codes, form)
    assert words.dtype == torch.int16 and words.shape[:2] == (5, 3)
    assert words.nbytes * 8 == 15 * FORMS[form].bits * group_limit(form, size)
    assert torch.equal(unpack_words(words, form, size), codes)


def test_codes_stand_for_the_numbers_of_their_format() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(code_values(codes, "int8"), torch.arange(-128.0, 128.0))
    assert torch.equal(code_values(codes[:16], "int4"), torch.arange(-8.0, 8.0))
    assert code_values(codes[:16], "mxfp4").tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert code_values(codes, "fp8")[0x7E] == 448 and code_values(codes, "fp8")[0x01] == 2**-9


@every_form
def test_rounding_is_to_the_nearest_number_that_the_form_has(form: str) -> None:
    weight = torch.randn(6, 300)
    weight[2] = 0
    rounded = quantize(weight, form)
    found = dequantize(rounded)
    padded = functional.pad(weight, (0, -300 % min(rounded.group, 300)))
    largest = padded.unflatten(-1, (-1, min(rounded.group, 300))).abs().amax(-1)
    limit = largest.repeat_interleave(min(rounded.group, 300), 1)[:, :300] * LARGEST_ERROR[form] + 1e-6
    assert bool(((found - weight).abs() <= limit).all())
    assert torch.equal(dequantize(quantize(found, form)), found), "rounded weights stay"
    assert rounded.num_bytes <= 300 * 6 * (0.75 + 0.2 * (form == "int4") if FORMS[form].bits == 4 else 1.4)


@every_form
@pytest.mark.parametrize(
    "shape", [(40, 128), (24, 100), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((16, 64), (70, 320)))]
)
def test_products_are_those_of_the_dequantized_weight(form: str, shape: tuple[int, int]) -> None:
    weight = few_bit(*shape, form)
    for num_rows in (1, 3, 17, FEW_BIT_ROWS, FEW_BIT_ROWS + 1):
        x = rows(num_rows, shape[1])
        torch.testing.assert_close(linear(x, weight).float(), product(x, weight), **CLOSE)


@pytest.mark.parametrize(
    ("form", "group", "splits", "activation"),
    [
        ("int4", 64, 1, None),
        ("int4", 128, 1, "silu"),
        ("int8", 128, 2, None),
        ("int8", 0, 1, "silu"),
        ("fp8", 0, 1, None),
        ("mxfp4", 32, 1, "silu"),
        ("mxfp4", 32, 8, None),
    ],
)
def test_warps_that_split_inputs_and_warps_that_share_columns_agree(
    form: str, group: int, splits: int, activation: str | None
) -> None:
    from peagle.linears.few_bit_triton import FewBitTiling, few_bit_product_triton

    weight = few_bit(32, 320, form)
    if form.startswith("int") and group:
        num_groups, draw = -(-320 // group), torch.Generator().manual_seed(1)
        scale = (torch.rand(32, num_groups, generator=draw) + 0.5).to(DEVICE) / 100
        zero = torch.randint(-3, 4, (32, num_groups), generator=draw).to(DEVICE, torch.int8)
        weight = weight._replace(group=group, scale=scale, zero=zero)
    x = rows(9, 320)
    if form == "mxfp4":  # exponents on both sides of 128
        weight, x = weight._replace(scale=weight.scale + 7), x / 128
        assert bool((weight.scale >= 128).any()) and bool((weight.scale < 128).any())
    expected = product(x, weight)
    if activation is not None:
        gate, up = expected.chunk(2, dim=-1)
        expected = functional.silu(gate) * up
    tiling = FewBitTiling(16, splits, num_warps=splits, num_stages=2, rows=8)
    found = few_bit_product_triton(x, weight, None, None, activation, tiling)
    torch.testing.assert_close(found.float(), expected, **CLOSE)


@every_form
@pytest.mark.parametrize("shared_kib", [100, 228])
def test_usual_tilings_fit_the_gpu(form: str, shared_kib: int) -> None:
    from peagle.linears.few_bit_triton import few_bit_tiling, most_stages

    for num_outputs, size in ((576, 576), (4096, 14336), (6144, 4096), (28672, 4096)):
        for num_rows, is_gated in itertools.product((1, 8, 16, 32, FEW_BIT_ROWS), (False, True)):
            tiling = few_bit_tiling(form, num_outputs, size, num_rows, is_gated)
            assert tiling.splits in (1, tiling.num_warps)
            assert tiling.rows >= num_rows or num_rows > 32
            assert most_stages(tiling, form, is_gated, shared_kib << 10) >= (
                2 if shared_kib == 100 else tiling.num_stages
            )


def test_stages_fit_shared_memory() -> None:
    from peagle.linears.few_bit_triton import FewBitTiling, most_stages

    tiling = FewBitTiling(32, splits=8, num_warps=8, num_stages=5, rows=8)  # needs 257 KiB: out of resources on an H200
    assert most_stages(tiling, "int4", False, 228 << 10) == 4
    assert most_stages(tiling._replace(columns=16), "int4", True, 228 << 10) == 4


@every_form
@pytest.mark.parametrize("num_rows", [2, pytest.param(20, marks=pytest.mark.slow), FEW_BIT_ROWS + 3])
@pytest.mark.parametrize("activation", [None, "silu", pytest.param("gelu_tanh", marks=pytest.mark.slow)])
def test_bias_gate_and_residual_are_added(form: str, num_rows: int, activation: str | None) -> None:
    weight, x = few_bit(48, 192, form), rows(num_rows, 192)
    bias, residual = rows(1, 48)[0], rows(num_rows, 48 if activation is None else 24)
    expected = product(x, weight) + bias.float()
    if activation is not None:
        gate, up = expected.chunk(2, dim=-1)
        expected = ACTIVATIONS[activation](gate) * up
    found = linear(x, weight, bias, activation)
    torch.testing.assert_close(found.float(), expected, **CLOSE)
    found = few_bit_product(x, weight.words, bias, residual, activation, weight.scale, None, form, weight.group)
    torch.testing.assert_close(found.float(), expected + residual.float(), **CLOSE)


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("group", [64, 128, 512])
@pytest.mark.parametrize("num_rows", [3, FEW_BIT_ROWS + 1])
def test_zeros_and_groups_of_other_sizes(form: str, group: int, num_rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    limit = 1 << (FORMS[form].bits - 1)
    codes = torch.randint(0, 2 * limit, (32, 384), dtype=torch.uint8, generator=draw)
    num_groups = -(-384 // group)
    scale = (torch.rand(32, num_groups, generator=draw) + 0.5) / limit / 20
    zero = torch.randint(-limit, limit, (32, num_groups), generator=draw).to(torch.int8)
    weight = on_device(FewBitWeight(form, 384, group, pack_codes(codes, form), scale.half(), zero))
    values = (
        codes.float() - limit - zero.repeat_interleave(group, 1)[:, :384]
    ) * scale.half().float().repeat_interleave(group, 1)[:, :384]
    torch.testing.assert_close(dequantize(weight).cpu(), values)
    x = rows(num_rows, 384)
    torch.testing.assert_close(linear(x, weight).float(), product(x, weight), **CLOSE)


@pytest.mark.parametrize("size", [96, 128, 130])
def test_exponents_of_mxfp4_are_whole_words(size: int) -> None:
    weight = few_bit(4, size, "mxfp4")
    assert weight.scale.dtype == torch.uint8 and weight.scale.shape == (4, 4 * -(-size // 128))


def test_scales_behind_the_last_group_are_not_read() -> None:
    """257 inputs are two blocks of 256, and the last of four groups of 128 is padding. An overflow is an error here."""
    weight = few_bit(16, 257, "int4")
    behind = torch.full((16 * 3 + 1,), 3e38, device=DEVICE, dtype=weight.scale.dtype)
    behind[: 16 * 3] = weight.scale.flatten()
    inside = weight._replace(scale=behind[: 16 * 3].view(16, 3))
    x = rows(FEW_BIT_ROWS + 1, 257)
    torch.testing.assert_close(linear(x, inside).float(), product(x, weight), **CLOSE)


@every_form
def test_every_code_is_exact(form: str) -> None:
    """One input at a time, so that nothing is rounded but the output."""
    num_codes, size = 1 << FORMS[form].bits, group_limit(form, 1)
    codes = torch.arange(num_codes, dtype=torch.uint8)[:, None].repeat(1, size)
    if form == "fp8":
        codes[[0x7F, 0xFF]] = 0  # NaN
    scale = torch.full((num_codes, size // 32), 127, dtype=torch.uint8) if form == "mxfp4" else torch.ones(num_codes, 1)
    group = 32 if form == "mxfp4" else size
    weight = on_device(FewBitWeight(form, size, group, pack_codes(codes, form), scale))
    expected = code_values(codes, form).T.to(DEVICE)
    for first in range(0, size, 32):
        x = torch.eye(size, device=DEVICE, dtype=DTYPE)[first : first + 32]
        assert torch.equal(linear(x, weight).float(), expected[first : first + 32])
    assert torch.equal(
        linear(torch.eye(size + FEW_BIT_ROWS, size, device=DEVICE, dtype=DTYPE), weight)[:size].float(), expected
    )


def test_the_operator_keeps_the_rules_of_torch_library() -> None:
    weight, x = few_bit(16, 64, "int8"), rows(2, 64)
    args = (x, weight.words, None, None, None, weight.scale, None, "int8", weight.group)
    torch.library.opcheck(torch.ops.peagle.few_bit.default, args, test_utils=("test_schema", "test_faketensor"))
    args = (x, weight.words, None, None, "silu", weight.scale, None, "int8", weight.group)
    torch.library.opcheck(torch.ops.peagle.few_bit.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("shape", [(6144, 4096), (28672, 4096), (4096, 14336), (2880, 2880), (5376, 8192)])
def test_products_at_true_widths(form: str, shape: tuple[int, int]) -> None:
    weight = few_bit(*shape, form)
    for num_rows in (1, 8, 16, 32, 64, 65):
        x = rows(num_rows, shape[1])
        torch.testing.assert_close(linear(x, weight).float(), product(x, weight), **CLOSE)
        gate, up = product(x, weight).chunk(2, dim=-1)
        found = linear(x, weight, None, "silu").float()
        torch.testing.assert_close(found, functional.silu(gate) * up, atol=5e-2, rtol=5e-2)
