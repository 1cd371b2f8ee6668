"""Experts with weights in few bits: equal to transformers' own with the dequantized weights, in every family."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma4TextConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from peagle.experts import few_bit
from peagle.experts.few_bit import FewBitExperts, few_bit_expert_products, plain_experts, quantize_experts
from peagle.experts.fused import fuse_experts
from peagle.linears.few_bit import FORMS

pytest.importorskip("triton")

NUM_EXPERTS, TOP, WIDTH = 6, 2, 72
SIZES = {"hidden_size": WIDTH, "num_experts_per_tok": TOP}
FAMILIES = {
    "qwen3-moe": (Qwen3MoeExperts, Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=40)),
    "gpt-oss": (GptOssExperts, GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=40)),
    "mixtral": (MixtralExperts, MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=40)),
    "gemma4": (
        Gemma4TextExperts,
        Gemma4TextConfig(hidden_size=WIDTH, num_experts=NUM_EXPERTS, top_k_experts=TOP, moe_intermediate_size=40),
    ),
}


def experts_of(family: str) -> Any:
    torch.manual_seed(0)
    kind, config = FAMILIES[family]
    config._experts_implementation = "batched_mm"
    module: nn.Module = kind(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(False)


def rows_for(num_rows: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(num_rows)
    chosen = torch.rand(num_rows, NUM_EXPERTS, generator=draw).topk(TOP)
    return torch.randn(num_rows, WIDTH, generator=draw), chosen.indices, chosen.values


@pytest.fixture
def runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_bit, "reads_codes", lambda _: True)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("gpt-oss", "mxfp4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("qwen3-moe", "fp8"), ("mixtral", "int4"), ("gemma4", "int8"))
        ),
    ],
)
def test_every_family_computes_with_the_dequantized_weights(family: str, form: str, runs_kernels: None) -> None:
    module = experts_of(family)
    before = module(*rows_for(5))
    assert quantize_experts(module, form)
    assert isinstance(module, FewBitExperts) and not list(module.parameters())
    plain = plain_experts(module, torch.float32)
    assert type(plain) is FAMILIES[family][0]
    for num_rows in (1, 11):
        expected = plain(*rows_for(num_rows))
        torch.testing.assert_close(module(*rows_for(num_rows)), expected, atol=1e-4, rtol=1e-4)
    difference = (plain(*rows_for(5)) - before).norm() / before.norm()
    assert difference < {"int8": 0.05, "fp8": 0.1}.get(form, 0.35), "nothing is in the wrong place"


def test_each_product_has_a_tiling_of_its_own(runs_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.experts import few_bit_triton

    module = experts_of("gpt-oss")
    quantize_experts(module, "mxfp4")
    expected = plain_experts(module, torch.float32)(*rows_for(1))
    gated: list[bool] = []

    def tiling(num_pairs: int, num_experts: int, size: int, is_gated: bool) -> few_bit_triton.FewBitExpertTiling:
        gated.append(is_gated)
        splits = 1 if is_gated else 2
        return few_bit_triton.FewBitExpertTiling(16 * splits, splits, splits, num_stages=2, rows=8)

    monkeypatch.setattr(few_bit_triton, "few_bit_expert_tiling", tiling)
    torch.testing.assert_close(module(*rows_for(1)), expected, atol=1e-4, rtol=1e-4)
    assert gated == [True, False]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_on_a_cpu_the_models_own_code_runs(family: str, form: str) -> None:
    module = experts_of(family)
    quantize_experts(module, form)
    x, index, weight = rows_for(3)
    expected = plain_experts(module, torch.float32)(x, index, weight)
    assert torch.equal(module(x, index, weight), expected)


def test_fused_and_unknown_experts_are_left_alone() -> None:
    class OtherGate(Qwen3MoeExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up.chunk(2, dim=-1)[0]

    assert not quantize_experts(OtherGate(FAMILIES["qwen3-moe"][1]), "int8")
    assert not quantize_experts(nn.Linear(4, 4), "int8")
    module = experts_of("gpt-oss")
    quantize_experts(module, "mxfp4")
    kind = type(module)
    fuse_experts(module)
    assert type(module) is kind


def test_rounding_a_few_experts_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = experts_of("gpt-oss"), experts_of("gpt-oss")
    quantize_experts(whole, "int4")
    monkeypatch.setattr(few_bit, "MOST_WEIGHTS", 1)
    quantize_experts(parts, "int4")
    assert all(torch.equal(tensor, parts.get_buffer(name)) for name, tensor in whole.named_buffers())


@pytest.mark.slow
def test_the_operator_is_compiled_once_for_layers_and_numbers_of_rows(runs_kernels: None) -> None:
    modules = [experts_of("gpt-oss"), experts_of("gpt-oss")]
    for module in modules:
        quantize_experts(module, "mxfp4")
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(lambda module, *rows: module(*rows), dynamic=True, backend=backend)
    for module, num_rows in ((modules[0], 3), (modules[1], 5), (modules[0], 4)):
        torch.testing.assert_close(run(module, *rows_for(num_rows)), module(*rows_for(num_rows)))
    assert len(graphs) == 1


@pytest.mark.slow
def test_the_operator_keeps_the_rules_of_torch_library() -> None:
    module = experts_of("gpt-oss")
    quantize_experts(module, "mxfp4")
    weights = (getattr(module, f"{name}_{part}") for name in ("gate_up", "down") for part in ("words", "scale", "bias"))
    args = (*rows_for(1), *weights, "mxfp4", *module.groups, "clamped", *module.gate_numbers)
    assert few_bit_expert_products(*args).shape == (1, TOP, WIDTH)
    torch.library.opcheck(
        torch.ops.peagle.few_bit_expert_products.default, args, test_utils=("test_schema", "test_faketensor")
    )
