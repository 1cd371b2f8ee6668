"""The memory-bandwidth limit: bytes read per step, and the bandwidth."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.dummy_shapes import TINY
from harness.model_families import family_target
from peagle.bench import bandwidth
from peagle.bench.bandwidth import (
    bandwidth_report,
    experts_read,
    measure_bandwidth,
    random_prompts,
    weight_bytes_per_step,
)
from peagle.bench.cells import Answer, Cell, CellResult, StepSplit
from peagle.bench.dummy import drafter_bytes, dummy_drafter
from peagle.linears.joined_linear import join_linears
from peagle.targets.few_bit import quantize_model
from peagle.targets.shapes import dummy_target


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def llama(**settings):
    return LlamaForCausalLM(LlamaConfig(**({k: v for k, v in TINY.items() if k != "model_type"} | settings)))


def test_an_embedding_is_read_only_where_it_is_also_the_head():
    separate, tied = llama(tie_word_embeddings=False), llama(tie_word_embeddings=True)
    body = sum(parameter.numel() for parameter in separate.model.parameters()) - 50 * 32
    assert weight_bytes_per_step(separate) == weight_bytes_per_step(tied) == 4 * (body + 50 * 32)
    assert weight_bytes_per_step(separate.to(torch.bfloat16)) == 2 * (body + 50 * 32)


def test_of_experts_only_those_count_that_a_step_reads():
    model = family_target("qwen3-moe").model
    experts = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name)
    everything = weight_bytes_per_step(model)
    assert experts > 0 and weight_bytes_per_step(model, 0.25) == everything - round(0.75 * experts)


@pytest.mark.parametrize("depth", [0, 3])
def test_the_experts_that_steady_steps_choose_are_counted(depth):
    target, prompts = family_target("qwen3-moe"), [[5, 6, 7, 8]] * 4 + [[9, 10, 11, 12]]
    drafters = {"p-eagle": dummy_drafter(target, depth)} if depth else {}
    method = "p-eagle" if depth else "none"
    cells = [Cell(method, depth, number) for number in (1, 4, 5)]
    found = experts_read(target, drafters, cells, prompts)
    alone, alike, different = found.values()
    config = target.model.config
    if depth == 0:
        assert alone == alike == config.num_experts_per_tok / config.num_experts, "equal texts choose equal experts"
    assert alone <= different <= 1 and different > config.num_experts_per_tok / config.num_experts


def test_a_dense_model_has_no_experts_to_count(config_file):
    target, cell = dummy_target(config_file, dtype="float32", device="cpu"), Cell("none", 0, 1)
    assert experts_read(target, {}, [cell], [[1]]) == {cell: 1.0}


def test_weights_in_few_bits_count_as_they_are_stored():
    model = family_target("qwen3-moe").model
    plain = weight_bytes_per_step(model)
    inside = sum(weight.nbytes for weight in model.model.layers.parameters() if weight.ndim > 1)
    quantize_model(model, "int8")
    stored = dict(model.model.layers.named_buffers())
    routers = sum(layer.mlp.gate.weight.nbytes for layer in model.model.layers)
    everything = sum(tensor.nbytes for tensor in stored.values())
    assert weight_bytes_per_step(model) == plain - inside + routers + everything
    experts = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
    assert weight_bytes_per_step(model) - weight_bytes_per_step(model, 0.5) == experts // 2
    assert join_linears(model, few_bit=True)
    assert weight_bytes_per_step(model) == plain - inside + routers + everything, "also while an engine joins layers"


def test_bandwidth_is_measured_and_plausible():
    found = measure_bandwidth(torch.device("cpu"), 32 << 20)
    assert 1e8 < found["bytes_per_second"] < 1e13 and found["copy_bytes_per_second"] is None


def test_the_fraction_is_the_limit_over_the_step(config_file):
    target = dummy_target(config_file, dtype="float32", device="cpu")
    num_bytes = weight_bytes_per_step(target.model)
    results = [
        CellResult(Cell("none", 0, 1), step=StepSplit(0.002)),
        CellResult(Cell("none", 0, 2), [Answer(0, (1, 2), 0.1, 0.004), Answer(1, (1,), 0.1, None)]),
        CellResult(Cell("none", 0, 4), failure="no room"),
    ]
    shares = {result.cell: 1.0 for result in results}
    report = bandwidth_report(target, {"bytes_per_second": num_bytes / 0.001}, results, shares)
    assert not bandwidth_report(target, {"bytes_per_second": 1.0}, results, {})["steps"], "nobody counted its experts"
    assert [row["fraction_of_limit"] for row in report["steps"]] == [0.5, 0.25, None]
    assert report["steps"][0] == {
        "label": "plain",
        "concurrency": 1,
        "weight_bytes": num_bytes,
        "expert_share": 1.0,
        "limit_ms": 1.0,
        "step_ms": 2.0,
        "fraction_of_limit": 0.5,
        "verify_limit_ms": 1.0,
        "verify_ms": None,
        "verify_fraction_of_limit": None,
    }


def test_a_step_with_drafts_reads_the_drafter_too(config_file):
    target = dummy_target(config_file, dtype="float32", device="cpu")
    drafter = dummy_drafter(target, 3)
    num_bytes, own = weight_bytes_per_step(target.model), drafter_bytes(drafter)
    assert own == 4 * (sum(parameter.numel() for parameter in drafter.parameters()) + target.head_VD.numel())
    results = [CellResult(Cell("p-eagle", 3, 1), step=StepSplit(0.004, 0.004, 0.002, 0.002))]
    shares, speed = {results[0].cell: 1.0}, {"bytes_per_second": num_bytes / 0.001}
    (row,) = bandwidth_report(target, speed, results, shares, drafter)["steps"]
    assert row["weight_bytes"] == num_bytes + own and row["label"] == "p-eagle K=3"
    assert row["fraction_of_limit"] == pytest.approx((num_bytes + own) / num_bytes / 4, abs=1e-4)
    assert row["verify_fraction_of_limit"] == 0.5


def test_random_prompts_are_the_same_every_time_and_differ_from_each_other():
    prompts = random_prompts(50, 3, 8)
    assert prompts == random_prompts(50, 3, 8) and len({tuple(prompt) for prompt in prompts}) == 3
    assert all(len(prompt) == 8 and max(prompt) < 50 for prompt in prompts)
    assert len(random_prompts(50, 1)[0]) == bandwidth.PROMPT_TOKENS
