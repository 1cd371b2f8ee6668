"""Products with stored weights against float64; the kernels are compiled and run for real."""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.native import amx, jit, products
from peagle.native.builder import Builder
from peagle.native.linear_kernels import KERNELS
from peagle.native.packed_linear import PackedLinear
from peagle.native.products import BlockWeight, make_product, missing, new_scratch, pack, product

NUM_OUTPUTS, NUM_INPUTS = 96, 128
KERNEL_CACHES = ((products, "_kernel"), (amx, "_split_kernel"), (amx, "_product_kernel"))
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 64)

pytestmark = pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))


@pytest.fixture(params=["vectors", "tiles"])
def registers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The registers that the products use. CPUs without tiles run the tests of vectors only."""
    if request.param == "vectors":
        monkeypatch.setattr(amx, "takes", lambda *_: False)
    elif (reason := amx.missing()) is not None:
        pytest.skip(reason)
    return request.param


def random_blocks(form: str) -> BlockWeight:
    draw = torch.Generator().manual_seed(0)
    groups = (NUM_OUTPUTS, NUM_INPUTS // 32)
    scale_OG = (torch.rand(groups, generator=draw) + 0.5).half()
    if form == "8-bit":
        codes_OI = torch.randint(-128, 128, (NUM_OUTPUTS, NUM_INPUTS), generator=draw, dtype=torch.int8)
        return BlockWeight(codes_OI, scale_OG, None)
    codes_OI = torch.randint(0, 16, (NUM_OUTPUTS, NUM_INPUTS), generator=draw, dtype=torch.uint8)
    return BlockWeight(codes_OI, scale_OG, (-8 * torch.rand(groups, generator=draw)).half())


def example(form: str) -> tuple[Tensor, BlockWeight | None]:
    blocks = random_blocks(form)
    return blocks.weight(), None if form == "bfloat16" else blocks


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("form", ["bfloat16", "4-bit", "8-bit"])
def test_products_are_those_of_the_float32_weight_and_rows_do_not_depend_on_their_company(form: str) -> None:
    weight_OI, blocks = example(form)
    packed = pack(weight_OI, blocks)
    assert packed.form == form
    x_NI = torch.randn(max(ROW_COUNTS), NUM_INPUTS, generator=torch.Generator().manual_seed(1))
    expected_NO = x_NI.double() @ weight_OI.double().t()
    scale_NO = x_NI.abs().double() @ weight_OI.abs().double().t()
    bias_O, residual_NO = torch.randn(NUM_OUTPUTS), torch.randn(len(x_NI), NUM_OUTPUTS)
    together_NO = product(x_NI, packed)
    for size in ROW_COUNTS:
        own_NI = x_NI[-size:].contiguous()
        found_NO = product(own_NI, packed)
        assert ((found_NO - expected_NO[-size:]).abs() <= 4e-6 * scale_NO[-size:]).all(), f"{size} rows"
        assert torch.equal(found_NO, together_NO[-size:]), f"{size} rows: another sum"
        assert torch.equal(product(own_NI, packed, bias_O), found_NO + bias_O)
        residual = residual_NO[:size].contiguous()
        assert torch.equal(product(own_NI, packed, residual), found_NO + residual)


@pytest.mark.usefixtures("registers")
def test_four_bits_take_a_sixth_of_the_memory_of_float32() -> None:
    weight_OI, blocks = example("4-bit")
    assert pack(weight_OI, blocks).num_bytes == weight_OI.numel() * (4 + 1) // 8
    assert pack(weight_OI).num_bytes == weight_OI.numel() * 2


@pytest.mark.usefixtures("registers")
def test_weights_are_rounded_to_bfloat16_as_torch_rounds_them_ties_included() -> None:
    """With a scale of 1, codes and offsets of these sizes hit ties, which go to the even neighbor."""
    codes_OI = torch.arange(16, dtype=torch.uint8).repeat(NUM_OUTPUTS, NUM_INPUTS // 16)
    num_groups = NUM_INPUTS // 32
    offset_OG = torch.arange(NUM_OUTPUTS * num_groups).view(NUM_OUTPUTS, num_groups) + 256
    blocks = BlockWeight(codes_OI, torch.ones_like(offset_OG).half(), offset_OG.half())
    packed = pack(blocks.weight(), blocks)
    assert torch.equal(product(torch.eye(NUM_INPUTS), packed), blocks.weight().t())
    exact_OI = codes_OI.float() + offset_OG.float().repeat_interleave(32, dim=1)
    assert (exact_OI != blocks.weight()).any(), "some were rounded"


def test_every_significand_is_rounded_to_bfloat16_as_torch_rounds_it() -> None:
    def write(b: Builder) -> None:
        values, num_vectors = b.address(0), b.number(1)
        with b.loop(*b.share(num_vectors)) as index:
            place = b.ir.mul(index, b.integer(b.lanes))
            b.store_vector(products._to_bfloat16(b, b.load_vector(values, place, b.float)), values, place)

    kernel = jit.compile_kernel("test-rounding", write, products.lanes())
    for exponent in (1, 100, 127, 200):
        bits = (exponent << 23) + torch.arange(2**23, dtype=torch.int32)
        for values in (bits.view(torch.float32), -bits.view(torch.float32)):
            expected = values.bfloat16().float()
            jit.Calls([jit.call(kernel, values, len(values) // products.lanes())]).run()
            assert torch.equal(values, expected)


@pytest.mark.parametrize(
    ("weight_OI", "reason"),
    [
        (torch.full((32, 32), 0.1), "bfloat16 does not hold"),
        (torch.ones(33, 32), "33 outputs are no multiple"),
        (torch.ones(32, 32, dtype=torch.float64), "not in torch.float64"),
    ],
)
def test_weights_that_the_kernels_cannot_hold_are_named(weight_OI: Tensor, reason: str) -> None:
    assert reason in str(missing(weight_OI))


def test_without_llvmlite_nothing_is_native_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "llvm", None)
    monkeypatch.setattr(jit, "missing", jit.missing.__wrapped__)
    assert jit.missing() == "llvmlite is not installed"
    assert products.missing(torch.ones(32, 32)) == "llvmlite is not installed"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of compiled kernels, empty, in a process that has no product kernels."""
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    forget_kernels(monkeypatch)
    return tmp_path / "kernels"


def forget_kernels(monkeypatch: pytest.MonkeyPatch, use: Callable[[Any], Any] = lambda kernel: kernel) -> None:
    for module, name in KERNEL_CACHES:
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, use(getattr(kernel, "__wrapped__", kernel)))


@pytest.mark.usefixtures("registers")
def test_compiled_kernels_are_kept_for_the_next_process(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x_NI = pack(*example("4-bit")), torch.randn(1, NUM_INPUTS)
    expected_NO = product(x_NI, packed)
    assert list(empty_cache.glob("product-4-bit-1-*.o")) or list(empty_cache.glob("amx-4-bit-1-*.o"))
    monkeypatch.setattr(jit, "_object_code", lambda *_: pytest.fail("compiled again"))
    assert torch.equal(product(x_NI, pack(*example("4-bit"))), expected_NO)


@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize("size", [0, 20, 400])
def test_a_kernel_whose_cached_file_was_cut_short_is_compiled_again(size: int, empty_cache: Path) -> None:
    """Running half a kernel would end the process."""
    packed, x_NI = pack(*example("4-bit")), torch.randn(1, NUM_INPUTS)
    expected_NO = product(x_NI, packed)
    files = {file: file.read_bytes() for file in empty_cache.glob("*.o") if not file.name.startswith("driver")}
    assert files
    for file, whole in files.items():
        file.write_bytes(whole[:size])
    assert torch.equal(product(x_NI, pack(*example("4-bit"))), expected_NO)
    assert all(file.read_bytes() == whole for file, whole in files.items())


@pytest.mark.usefixtures("registers")
def test_kernels_that_read_each_others_results_give_the_same_with_any_number_of_threads() -> None:
    """A list of products, each of which needs all of the one before it; threads wait for each other between two."""
    weight_II = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16().float() / 8
    packed, states = pack(weight_II), [torch.randn(3, 64), *(torch.empty(3, 64) for _ in range(12))]
    scratch = new_scratch(packed, 3)
    made = [make_product(x, packed, y, None, scratch) for x, y in itertools.pairwise(states)]
    calls = jit.Calls([call for product in made for call in product.calls])
    num_threads, expected = torch.get_num_threads(), None
    try:
        for turn in range(1500):
            torch.set_num_threads(1 + turn % 4)
            states[-1].zero_()
            calls.run()
            expected = states[-1].clone() if expected is None else expected
            assert torch.equal(states[-1], expected), f"{torch.get_num_threads()} threads"
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("registers")
def test_packed_layers_have_the_kernels_for_any_number_of_rows_before_the_first_step(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_kernels(monkeypatch, use=cache)
    weight_OI, _ = example("bfloat16")
    linear = PackedLinear(as_linear(weight_OI), KERNELS["stored"])
    monkeypatch.setattr(jit, "_object_code", lambda *_: pytest.fail("compiled in a step"))
    for num_rows in range(1, 65):
        x_NI = torch.randn(num_rows, NUM_INPUTS)
        torch.testing.assert_close(linear(x_NI).double(), x_NI.double() @ weight_OI.double().t(), rtol=1e-5, atol=1e-4)


def test_inputs_may_be_part_of_a_wider_tensor() -> None:
    weight_OI, _ = example("bfloat16")
    linear = PackedLinear(as_linear(weight_OI), KERNELS["stored"])
    wide_NI = torch.randn(3, 2 * NUM_INPUTS)
    assert torch.equal(linear(wide_NI[:, :NUM_INPUTS]), linear(wide_NI[:, :NUM_INPUTS].clone()))


def as_linear(weight_OI: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=False)
    linear.weight = torch.nn.Parameter(weight_OI, requires_grad=False)
    return linear


def test_a_cache_that_cannot_be_written_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").write_text("in the way")
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    forget_kernels(monkeypatch)
    weight_OI, blocks = example("8-bit")
    x_NI = torch.randn(1, NUM_INPUTS)
    torch.testing.assert_close(product(x_NI, pack(weight_OI, blocks)), x_NI @ weight_OI.t(), rtol=1e-4, atol=1e-2)
