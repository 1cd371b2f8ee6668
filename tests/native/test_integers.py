"""Products of rounded weights and inputs against their definition in exact numbers; the kernels are run for real."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from peagle.native import integers, jit
from peagle.native.builder import Builder
from peagle.native.integers import MOST_INPUTS, missing_for, missing_integers, rounded_codes
from peagle.native.packed_linear import PackedLinear, unpack_linears
from peagle.native.products import lanes, pack_integers, product
from peagle.native.rounded_linear import round_linears

NUM_OUTPUTS, NUM_INPUTS = 96, 80
MOST_ROWS = 40

runs = pytest.mark.skipif(missing_integers() is not None, reason=str(missing_integers()))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_definition(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Sums in float64, which hold every sum of codes exactly."""
    codes_OI, scale_O = rounded_codes(weight_OI)
    most_N1 = x_NI.abs().amax(1, keepdim=True).clamp_min(integers.SMALLEST)
    row_NI = (x_NI * (integers.CODES / most_N1)).round()
    sum_NO = row_NI.double() @ codes_OI.double().t()
    return sum_NO.float() * (scale_O * (most_N1 * torch.tensor(1 / integers.CODES)))


@runs
@pytest.mark.parametrize("shape", [(NUM_OUTPUTS, NUM_INPUTS), (16, 16), (64, 1536)])
def test_products_are_those_of_the_codes_to_the_bit_for_any_number_of_rows(shape: tuple[int, int]) -> None:
    weight_OI, x_NI, bias_O = random(*shape), random(MOST_ROWS, shape[1], seed=1), random(shape[0], seed=2)
    packed, expected_NO = pack_integers(weight_OI), by_definition(x_NI, weight_OI)
    for size in (*range(1, 18), 31, MOST_ROWS):
        own_NI, wanted_NO = x_NI[-size:].contiguous(), expected_NO[-size:]
        assert torch.equal(product(own_NI, packed), wanted_NO), f"{size} rows"
        assert torch.equal(product(own_NI, packed, bias_O), wanted_NO + bias_O), f"{size} rows and a bias"
        residual_NO = random(size, shape[0], seed=3)
        assert torch.equal(product(own_NI, packed, residual_NO), wanted_NO + residual_NO), f"{size} rows added to"


@runs
def test_rounding_loses_about_a_hundredth_of_the_results_deviation() -> None:
    weight_OI, x_NI = random(256, 576), random(64, 576, seed=1)
    exact_NO = x_NI @ weight_OI.t()
    error_NO = product(x_NI, pack_integers(weight_OI)) - exact_NO
    assert 0.003 < error_NO.std() / exact_NO.std() < 0.015


@runs
@pytest.mark.parametrize("size", [1e-38, 1e-34, 1e-20, 1.0, 1e18])
def test_zeros_and_numbers_of_any_size(size: float) -> None:
    weight_OI, x_NI = random(NUM_OUTPUTS, NUM_INPUTS), size * random(5, NUM_INPUTS, seed=1)
    weight_OI[1::3] = 0.0
    weight_OI[2::3] *= 1e15
    x_NI[2] = 0.0
    found_NO = product(x_NI, pack_integers(weight_OI))
    assert torch.equal(found_NO, by_definition(x_NI, weight_OI))
    assert found_NO.isfinite().all() and not found_NO[2].any() and not found_NO[:, 1::3].any()
    assert found_NO[[0, 1, 3, 4]][:, ::3].any() == (size > integers.SMALLEST)


@runs
def test_the_most_inputs_overflow_neither_a_sum_nor_the_stack() -> None:
    weight_OI = torch.ones(lanes(), MOST_INPUTS)
    weight_OI[1::2] = -1.0
    x_NI = torch.ones(16, MOST_INPUTS)
    x_NI[1::2] = -1.0
    expected_NO = x_NI @ weight_OI.t()
    torch.testing.assert_close(product(x_NI, pack_integers(weight_OI)), expected_NO)


@runs
@pytest.mark.parametrize(
    ("weight_OI", "reason"),
    [
        (torch.ones(33, 32), f"33 outputs and 32 inputs are not both multiples of {lanes()}"),
        (torch.ones(32, 36), f"32 outputs and 36 inputs are not both multiples of {lanes()}"),
        (torch.ones(16, MOST_INPUTS + 16), "32784 inputs are more than 32768"),
        (torch.ones(32, 32, dtype=torch.bfloat16), "in float32 on a CPU, not in torch.bfloat16 on cpu"),
    ],
)
def test_weights_that_are_not_rounded_are_named_and_all_layers_stay_plain(weight_OI: Tensor, reason: str) -> None:
    assert reason in str(missing_for(weight_OI, lanes()))
    other = nn.Linear(32, 32, bias=False)
    odd = nn.Linear(*weight_OI.t().shape, bias=False, dtype=weight_OI.dtype)
    model = nn.Sequential(other, odd)
    assert reason in str(round_linears(model))
    assert list(model) == [other, odd]


@pytest.mark.parametrize(("is_x86", "is_wide", "name"), [(1, 1, "avx512vnni"), (1, 0, "avxvnni"), (0, 0, "dotprod")])
def test_a_cpu_without_products_of_bytes_is_named(
    is_x86: bool, is_wide: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features: dict[str, bool] = {}
    monkeypatch.setattr(integers, "missing", lambda: None)
    monkeypatch.setattr(integers, "IS_X86", is_x86)
    monkeypatch.setattr(integers, "has_wide_registers", lambda: is_wide)
    monkeypatch.setattr(integers, "llvm", SimpleNamespace(get_host_cpu_features=lambda: features))
    assert missing_integers() == f"the CPU lacks {name}"
    assert missing_for(torch.ones(32, 32), 16) == f"the CPU lacks {name}"
    features[name] = True
    assert missing_integers() is None


def test_without_llvmlite_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "missing", lambda: "llvmlite is not installed")
    assert round_linears(nn.Sequential(nn.Linear(32, 32))) == "llvmlite is not installed"


@runs
def test_layers_are_rounded_and_restored_and_the_state_dict_stays() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 16, bias=False)))
    state, x = {name: value.clone() for name, value in model.state_dict().items()}, random(3, 64)
    plain = model(x)
    assert round_linears(model) is None
    assert [each.kernel.name for each in model.modules() if isinstance(each, PackedLinear)] == ["integers"] * 2
    rounded = model(x)
    assert 0 < (rounded - plain).abs().max() < 0.05
    assert torch.equal(model(x[None])[0], rounded), "any leading dimensions"
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }
    assert unpack_linears(model) == 2
    assert torch.equal(model(x), plain)


@runs
def test_copies_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.native.rounded_linear.available_bytes", lambda: 2**22 - 2)
    model = nn.Sequential(nn.Linear(2048, 1024, bias=False))
    assert round_linears(model) == "2 MiB of copies are more than half of the available memory"
    assert type(model[0]) is nn.Linear


@pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))
@pytest.mark.parametrize(("tile", "step"), [(1, 4), (8, 1)])
def test_on_arm_the_kernel_adds_products_of_bytes_with_sdot(
    tile: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled only, also on x86-64: what it computes is tested where it runs."""
    llvm = integers.llvm
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    try:
        target = llvm.Target.from_triple(triple)
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(integers, "IS_X86", False)
    builder = Builder(8)
    builder.module.triple = triple
    integers.write_integer_product(builder, tile, step, is_added=True)
    builder.ir.ret_void()
    module = llvm.parse_assembly(str(builder.module))
    module.verify()
    machine = target.create_target_machine(cpu="neoverse-n1", opt=3)
    assert machine.emit_assembly(module).count("sdot") == 2 * tile * step
