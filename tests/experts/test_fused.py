"""Fused experts: equal to transformers' own, in every family, and given back as they were. Triton is interpreted."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma4TextConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from harness.model_families import family_target
from peagle.experts import fused
from peagle.experts.fused import FusedExperts, fuse_experts
from peagle.worker.linear_layers import join_models

product_triton = pytest.importorskip("peagle.experts.product_triton", reason="needs triton", exc_type=ImportError)

NUM_EXPERTS, TOP = 6, 2
SIZES = {"hidden_size": 40, "num_experts_per_tok": TOP}
FAMILIES = {
    "qwen3-moe": (Qwen3MoeExperts, Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=20)),
    "gpt-oss": (GptOssExperts, GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=24)),
    "mixtral": (MixtralExperts, MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS, intermediate_size=24)),
    "gemma4": (
        Gemma4TextExperts,
        Gemma4TextConfig(hidden_size=40, num_experts=NUM_EXPERTS, top_k_experts=TOP, moe_intermediate_size=20),
    ),
}
GATES = {"qwen3-moe": "silu", "gpt-oss": "clamped", "mixtral": "silu", "gemma4": "gelu_tanh"}


def experts_of(family: str) -> nn.Module:
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
    return torch.randn(num_rows, 40, generator=draw), chosen.indices, chosen.values


@pytest.fixture
def runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_few", lambda x: len(x) <= 12)
    monkeypatch.setattr(product_triton, "MOST_UNSORTED", 16)


@pytest.mark.parametrize(
    "family", [family if family == "gpt-oss" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_few_rows_are_computed_as_transformers_does(family: str, runs_kernels: None) -> None:
    module = experts_of(family)
    expected = {num_rows: module(*rows_for(num_rows)) for num_rows in (1, 11, 13)}
    restore = fuse_experts(module)
    assert isinstance(module, FusedExperts) and module.fused_gate == GATES[family]
    for num_rows, wanted in expected.items():  # 11 rows are sorted first, 13 are too many
        found = module(*rows_for(num_rows))
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())), f"{num_rows} rows"
    restore()


def test_an_expert_that_nobody_chose_is_not_read(runs_kernels: None) -> None:
    module = experts_of("qwen3-moe")
    x, index, weight = rows_for(3)
    index = index.clamp(max=3)
    expected = module(x, index, weight)
    fuse_experts(module)
    module.gate_up_proj[4:], module.down_proj[4:] = torch.nan, torch.nan
    assert torch.allclose(module(x, index, weight), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_a_model_with_fused_experts_has_the_logits_of_transformers(family: str, runs_kernels: None) -> None:
    target = family_target(family)
    ids = torch.tensor([[5, 80, 33, 261, 7]])
    expected = target.forward(ids).logits_BTV
    names, kinds = list(target.model.state_dict()), [type(module) for module in target.model.modules()]
    restore = fuse_experts(target.model)
    assert sum(isinstance(module, FusedExperts) for module in target.model.modules()) == target.num_layers
    assert list(target.model.state_dict()) == names
    assert torch.allclose(target.forward(ids).logits_BTV, expected, atol=2e-4)
    restore()
    assert [type(module) for module in target.model.modules()] == kinds
    assert torch.equal(target.forward(ids).logits_BTV, expected)


def test_an_engine_on_a_gpu_fuses_experts_and_gives_them_back() -> None:
    target = family_target("gpt-oss")
    kinds = [type(module) for module in target.model.modules()]
    undo = join_models(target, None)  # the modules are prepared in the same way on a CPU
    assert sum(isinstance(module, FusedExperts) for module in target.model.modules()) == target.num_layers
    undo()
    assert [type(module) for module in target.model.modules()] == kinds


def test_on_a_cpu_the_models_own_code_runs() -> None:
    module = experts_of("gpt-oss")
    expected = module(*rows_for(5))
    fuse_experts(module)
    assert torch.equal(module(*rows_for(5)), expected)


def test_a_kernel_that_fails_or_differs_is_not_used_and_said_once(
    runs_kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory\nand more")

    for products, reason in (
        (broken, "RuntimeError: out of resource: shared memory"),
        (lambda x, index, *_: x[:, None].expand(-1, index.shape[1], -1), "its output differs by"),
    ):
        caplog.clear()
        monkeypatch.setattr(fused, "expert_products", products)
        both = nn.ModuleList([experts_of("qwen3-moe"), experts_of("qwen3-moe")])
        fuse_experts(both)
        assert not any(isinstance(module, FusedExperts) for module in both)
        shown = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(shown) == 1 and shown[0].startswith("Qwen3MoeExperts is not fused, which is slower: " + reason)


def test_other_gates_and_other_modules_are_left_alone() -> None:
    class OtherGate(Qwen3MoeExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up.chunk(2, dim=-1)[0]

    module = OtherGate(FAMILIES["qwen3-moe"][1])
    root = nn.ModuleList([module, nn.Linear(4, 4)])
    kinds = [type(part) for part in root.modules()]
    fuse_experts(root)
    assert [type(part) for part in root.modules()] == kinds


@pytest.mark.slow
def test_the_operator_is_traced_for_any_number_of_rows(runs_kernels: None) -> None:
    module = experts_of("gpt-oss")
    fuse_experts(module)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(module.few_rows, dynamic=True, backend=backend)
    for num_rows in (3, 5, 4):
        assert torch.allclose(run(*rows_for(num_rows)), module.few_rows(*rows_for(num_rows)), atol=1e-4)
    assert len(graphs) == 1
