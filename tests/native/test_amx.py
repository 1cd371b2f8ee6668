"""Products on tile registers: what the tests of all products (`test_products.py`) do not show."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from peagle.native import amx, jit, products
from peagle.native.products import BlockWeight, pack, product

needs_tiles = pytest.mark.skipif(amx.missing() is not None, reason=str(amx.missing()))


def random_weight(num_outputs: int, num_inputs: int) -> Tensor:
    draw = torch.Generator().manual_seed(num_inputs)
    return torch.randn(num_outputs, num_inputs, generator=draw).bfloat16().float()


@needs_tiles
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 64), (48, 576), (32, 1536), (32, 2**14)])
@pytest.mark.parametrize("num_rows", [1, 5, 6, 10, 11, 16, 17, 300])
def test_results_are_as_near_to_the_exact_ones_as_those_of_float32(
    num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    weight_OI, x_NI = random_weight(num_outputs, num_inputs), torch.randn(num_rows, num_inputs)
    packed = pack(weight_OI)
    assert packed.is_tiled
    exact_NO = x_NI.double() @ weight_OI.double().t()
    error = (product(x_NI, packed) - exact_NO).abs().max()
    assert error <= 4 * (x_NI @ weight_OI.t() - exact_NO).abs().max()


@needs_tiles
def test_an_input_is_the_sum_of_its_parts_to_the_last_bit() -> None:
    """Products with one are the inputs: of any sign and size, with all bits of the significand in use."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200, 64), generator=draw).int()
    exponent = bits >> 23 & 255
    x_NI = torch.where((exponent > 40) & (exponent < 250), bits, 0).view(torch.float32)
    assert (x_NI != 0).float().mean() > 0.7
    assert torch.equal(product(x_NI, pack(torch.eye(64))), x_NI)


@needs_tiles
@pytest.mark.parametrize("form", ["4-bit", "8-bit"])
def test_many_rows_read_the_weights_that_the_first_rows_unpacked(form: str) -> None:
    draw = torch.Generator().manual_seed(0)
    least, most = (0, 16) if form == "4-bit" else (-128, 128)
    codes_OI = torch.randint(least, most, (64, 640), generator=draw).to(torch.uint8 if form == "4-bit" else torch.int8)
    scale_OG = torch.rand(64, 20, generator=draw).half()
    packed = pack(
        torch.empty(64, 640), blocks := BlockWeight(codes_OI, scale_OG, -scale_OG if form == "4-bit" else None)
    )
    x_NI = torch.randn(100, 640)
    together_NO = product(x_NI, packed)
    assert torch.equal(together_NO, torch.cat([product(x_I[None], packed) for x_I in x_NI]))
    torch.testing.assert_close(together_NO.double(), x_NI.double() @ blocks.weight().double().t(), rtol=1e-5, atol=1e-3)


@needs_tiles
def test_weights_of_other_sizes_are_multiplied_in_vectors() -> None:
    for num_outputs, num_inputs in ((16, 32), (16, 96), (16, 2**14 + 64)):
        weight_OI = random_weight(num_outputs, num_inputs)
        packed, x_NI = pack(weight_OI), torch.randn(3, num_inputs)
        assert not packed.is_tiled
        torch.testing.assert_close(product(x_NI, packed), x_NI @ weight_OI.t(), rtol=1e-4, atol=1e-2)


@needs_tiles
def test_calls_for_prompts_are_not_kept() -> None:
    packed = pack(random_weight(16, 64))
    for num_rows in (1, 64, 65, 500):
        product(torch.randn(num_rows, 64), packed)
    assert {num_rows for num_rows, _ in packed._products} == {1, 64}


def pretend_features(monkeypatch: pytest.MonkeyPatch, features: dict[str, bool]) -> None:
    monkeypatch.setattr(amx, "llvm", SimpleNamespace(get_host_cpu_features=lambda: features))
    monkeypatch.setattr(amx, "missing", amx.missing.__wrapped__)


@pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))
def test_a_cpu_without_tiles_is_named_and_uses_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_features(monkeypatch, {name: name != "amx-bf16" for name in amx.FEATURES})
    assert amx.missing() == "the CPU lacks amx-bf16"
    assert not products.pack(random_weight(16, 64)).is_tiled


@pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))
def test_a_system_that_keeps_its_tiles_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_features(monkeypatch, dict.fromkeys(amx.FEATURES, True))
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    assert amx.missing() == "the operating system does not lend tile registers"
