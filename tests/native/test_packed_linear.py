"""Packed linear layers against plain ones; no test here looks at a clock."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.tiny_models import tiny_target
from peagle.errors import ConfigError
from peagle.native.linear_kernels import KERNELS, LinearKernel, available_kernels
from peagle.native.packed_linear import MOST_ROWS, PackedLinear, pack_linears, unpack_linears

ROW_COUNTS = (1, 2, 3, 5, 8, 16, 33, 100)


@pytest.fixture(autouse=True)
def no_weight_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.native.packed_linear.MIN_BYTES", 1)


def packed_or_skip(name: str, linear: nn.Linear) -> PackedLinear:
    if (reason := available_kernels(linear.weight)[name]) is not None:
        pytest.skip(f"{name}: {reason}")
    return PackedLinear(linear, KERNELS[name])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("num_outputs", "num_inputs", "bias"), [(48, 64, False), (33, 65, True), (256, 16, True)])
@torch.no_grad()
def test_every_kernel_gives_plains_result_for_any_number_of_rows(
    name: str, num_outputs: int, num_inputs: int, bias: bool
) -> None:
    linear = nn.Linear(num_inputs, num_outputs, bias=bias)
    packed = packed_or_skip(name, linear)
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, num_inputs)
        torch.testing.assert_close(packed(x), linear(x), msg=lambda text, rows=num_rows: f"{rows} rows: {text}")
        x_batched = torch.randn(2, num_rows, num_inputs)
        torch.testing.assert_close(packed(x_batched), linear(x_batched))


@pytest.mark.parametrize("name", KERNELS)
@torch.no_grad()
def test_every_kernel_that_takes_bfloat16_gives_plains_result(name: str) -> None:
    linear = nn.Linear(64, 48).bfloat16()
    packed = packed_or_skip(name, linear)
    x = torch.randn(5, 64).bfloat16()
    torch.testing.assert_close(packed(x), linear(x))


@torch.no_grad()
def test_rows_of_mkl_do_not_depend_on_their_company() -> None:
    packed = packed_or_skip("mkl", nn.Linear(576, 192))
    x = torch.randn(16, 576)
    together = packed(x)
    for first, size in itertools.product((0, 3, 8), (1, 2, 7)):
        assert torch.equal(packed(x[first : first + size]), together[first : first + size])


@torch.no_grad()
def test_packing_keeps_parameters_names_results_and_the_way_back() -> None:
    target = tiny_target(num_layers=2)
    x = torch.arange(12)[None]
    before = target.forward(x).logits_BTV
    state, fingerprint = dict(target.model.state_dict()), target.fingerprint()
    report = pack_linears(target.model, num_rows=4, kernels=("transposed", "onednn", "mkl"))
    assert sum(choice.num_modules for choice in report.choices) == 2 * 7 + 1
    assert target.fingerprint() == fingerprint
    assert target.head_VD is target.embedding_VD, "the head stays tied to the embedding"
    packed_state = target.model.state_dict()
    assert list(packed_state) == list(state)
    assert all(packed_state[name].data_ptr() == state[name].data_ptr() for name in state), "no weight was copied"
    torch.testing.assert_close(target.forward(x).logits_BTV, before, atol=1e-4, rtol=1e-4)
    assert unpack_linears(target.model) == report.num_packed
    assert not any(isinstance(module, PackedLinear) for module in target.model.modules())
    assert torch.equal(target.forward(x).logits_BTV, before)


def test_report_names_shapes_kernels_times_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_fastest(monkeypatch, "transposed")
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 32))
    report = pack_linears(module, num_rows=4, most_rows=16, kernels=("transposed",))
    assert report.num_packed == 3 and report.extra_bytes == 3 * 64 * 32 * 4
    assert [(choice.out_features, choice.in_features) for choice in report.choices] == [(32, 64), (64, 32)]
    line = report.lines()[0]
    assert line.startswith("2 x linear 32x64: transposed for 1 to 16 rows (plain ") and "us for 4" in line
    assert "packed 3 linear layers in" in report.lines()[-1]
    assert "kernel=transposed" in repr(module[0])


def test_plain_runs_where_it_was_faster_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(trials: list, row_counts: list[int]) -> None:
        for trial, num_rows in itertools.product(trials, row_counts):
            is_fast = trial.kernel.name == ("transposed" if 4 <= num_rows <= 40 else "plain")
            trial.seconds[num_rows] = 0.5 if is_fast else 1.0

    monkeypatch.setattr("peagle.native.packed_linear.time_in_turn", pretend)
    module = nn.Sequential(nn.Linear(64, 32))
    report = pack_linears(module, num_rows=4, kernels=("transposed",))
    assert (module[0].min_rows, module[0].max_rows) == (2, 32)
    assert report.lines()[0].startswith("1 x linear 32x64: transposed for 2 to 32 rows (plain ")


def test_packed_form_is_timed_up_to_a_full_batch_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_fastest(monkeypatch, "transposed")
    for most_rows, served in ((40, 40), (4, 4), (None, MOST_ROWS), (10 * MOST_ROWS, MOST_ROWS)):
        module = nn.Sequential(nn.Linear(64, 32))
        pack_linears(module, num_rows=4, most_rows=most_rows, kernels=("transposed",))
        assert module[0].max_rows == served


def test_only_the_preferred_kernel_is_timed_against_plain() -> None:
    weight = torch.randn(32, 64)
    *_, preferred = (name for name, reason in available_kernels(weight).items() if reason is None)
    report = pack_linears(nn.Sequential(nn.Linear(64, 32)), num_rows=4)
    assert list(report.choices[0].seconds) == ["plain", preferred]


def test_packed_form_is_not_used_where_plain_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_fastest(monkeypatch, "plain")
    module = nn.Sequential(nn.Linear(64, 32))
    assert pack_linears(module, kernels=("transposed",)).num_packed == 0
    assert type(module[0]) is nn.Linear


def test_on_a_machine_too_busy_to_tell_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_fastest(monkeypatch, "none of them")
    module = nn.Sequential(nn.Linear(64, 32))
    assert pack_linears(module, kernels=("transposed",)).num_packed == 1


def test_small_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.native.packed_linear.MIN_BYTES", 64 * 33 * 4)
    _make_fastest(monkeypatch, "transposed")
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 33))
    pack_linears(module, kernels=("transposed",))
    assert [isinstance(part, PackedLinear) for part in module] == [False, True]


def test_memory_budget_leaves_the_smaller_weights_plain_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_fastest(monkeypatch, "transposed")
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32))
    report = pack_linears(module, memory_budget=(64 * 64 + 64 * 32) * 4, kernels=("transposed",))
    assert [isinstance(part, PackedLinear) for part in module] == [True, True, False]
    assert report.skipped == ("1 x linear 32x64 stay plain: the budget for packed copies is 0 MiB",)
    assert report.lines()[-1].startswith("packed 2 linear layers in"), "the total comes last: it is logged as INFO"


def test_modules_that_cannot_be_replaced_are_left_alone_and_named() -> None:
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(8, 8), Own(8, 8), nn.Linear(8, 8, device="meta"))
    module[0].register_forward_hook(lambda *_: None)
    report = pack_linears(module)
    assert report.num_packed == 0
    assert report.skipped == ("0 stays plain: hooks are registered on it", "2 stays plain: its weight is on meta")


def test_shared_module_is_packed_once_and_stays_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_fastest(monkeypatch, "transposed")
    shared = nn.Linear(8, 8)
    module = nn.ModuleDict({"first": shared, "second": shared})
    assert pack_linears(module, kernels=("transposed",)).num_packed == 1
    assert module["first"] is module["second"] and isinstance(module["first"], PackedLinear)
    unpack_linears(module)
    assert module["first"] is module["second"] and type(module["first"]) is nn.Linear


def test_kernel_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias) * 1.001

    wrong = LinearKernel("wrong", lambda weight, _: weight, run)
    monkeypatch.setitem(KERNELS, "wrong", wrong)
    report = pack_linears(nn.Sequential(nn.Linear(64, 64)), kernels=("wrong",))
    assert report.num_packed == 0
    assert "linear kernel wrong gives wrong results: not used" in caplog.text


def test_kernel_that_is_wrong_for_many_rows_serves_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias) * (1 if x.numel() // x.shape[-1] <= 16 else 1.001)

    monkeypatch.setitem(KERNELS, "wrong", LinearKernel("wrong", lambda weight, _: weight, run))
    _make_fastest(monkeypatch, "wrong")
    module = nn.Sequential(nn.Linear(64, 64))
    pack_linears(module, num_rows=4, most_rows=64, kernels=("wrong",))
    assert module[0].max_rows == 16


@torch.no_grad()
def test_fewer_and_more_rows_than_the_limits_run_plain() -> None:
    def run(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.zeros(*x.shape[:-1], len(weight))

    zeros = LinearKernel("zeros", lambda weight, _: weight, run)
    packed = PackedLinear(nn.Linear(8, 8), zeros, min_rows=2, max_rows=4)
    assert packed(torch.randn(1, 8)).any()
    assert not packed(torch.randn(2, 2, 8)).any()
    assert packed(torch.randn(5, 8)).any()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        pack_linears(nn.Sequential(), num_rows=0)
    assert "num_rows must be at least 1, got 0" in str(error.value)
    with pytest.raises(ConfigError) as error:
        pack_linears(nn.Sequential(), kernels=("mlk",))
    assert "unknown linear kernels ['mlk']\nhint: known: plain, transposed, onednn, mkl" in str(error.value)


def _make_fastest(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the timing say that one kernel takes half the time of the others."""

    def pretend(trials: list, row_counts: list[int]) -> None:
        for trial, num_rows in itertools.product(trials, row_counts):
            trial.seconds[num_rows] = 0.5 if trial.kernel.name == name else 1.0

    monkeypatch.setattr("peagle.native.packed_linear.time_in_turn", pretend)


def test_weights_with_a_few_large_entries_are_packed_like_others() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1728, 576, bias=False))
    with torch.no_grad():
        module[0].weight[:, :3] *= 2000
    x = torch.randn(8, 1728)
    expected = module(x)
    pack_linears(module, 8)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-2)
