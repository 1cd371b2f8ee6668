"""The planner counts what torch really keeps, and chooses what fits."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from peagle.errors import CapacityError
from peagle.training.batches import Batches
from peagle.training.distributed import World
from peagle.training.p_eagle import _run_layer
from peagle.training.planner import GIB, Sizes, estimate, plan, planned, saved_values
from tiny import tiny_drafter, tiny_target
from tiny_runs import conversations, new_trainer, settings

NUM_SLOTS = 37


@pytest.fixture(scope="module")
def target():
    return tiny_target(hidden_size=96, intermediate_size=250, num_attention_heads=4, num_key_value_heads=2, head_dim=40)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, num_layers=2, num_draft_tokens=3).requires_grad_(True)


def kept_by(function, *inputs):
    """What a function, compiled as on a GPU up to its kernels, keeps for its backward pass: tensors, each once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    compiled = torch.compile(function, backend=backend, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = compiled(*inputs)
    return list(kept.values()), output


@pytest.mark.parametrize("index", [0, 1])
def test_a_compiled_layer_keeps_the_values_that_the_planner_counts(drafter, index):
    shape = (2, NUM_SLOTS, drafter.config.hidden_size)
    state, embedding = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    rotary = drafter.rotary(state, torch.arange(NUM_SLOTS)[None].expand(2, -1))
    seen = torch.ones(2, NUM_SLOTS, NUM_SLOTS, dtype=torch.bool)
    kept, _ = kept_by(_run_layer, drafter.layers[index], state, embedding, rotary, seen, None)
    by_slot = [t for t in kept if t.dtype == torch.bfloat16 and t.numel() % (2 * NUM_SLOTS) == 0 and t.dim() > 1]
    values = sum(t.numel() for t in by_slot) // (2 * NUM_SLOTS)
    config = drafter.config
    inner = config.num_heads * config.head_dim
    repeated = 2 * inner  # keys and values of repeated heads, which only the CPU's attention makes
    mask, rotary_tables = NUM_SLOTS, 2 * config.head_dim
    assert values == saved_values(config, index) + repeated + mask + rotary_tables
    copies = [t for t in kept if t.dtype == torch.bfloat16 and not any(t is other for other in by_slot)]
    matrices = sum(p.numel() for p in drafter.layers[index].parameters() if p.dim() == 2)
    assert sum(t.numel() for t in copies) == matrices, "all matrices are kept in the activations' type"


def test_weights_gradients_and_optimizer_are_counted_to_the_byte(target, tmp_path):
    config = settings(tmp_path)
    trainer = new_trainer(target, config)
    trainer.train_step(Batches(conversations(), config).make(0))
    sizes = Sizes.of(target, trainer.drafter, config)
    parameters = list(trainer.drafter.parameters())
    moments = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]
    parts = estimate(sizes, config, 2, 1).parts
    assert parts["drafter weights"] == sum(p.numel() * p.element_size() for p in parameters)
    assert parts["optimizer"] == sum(t.numel() * t.element_size() for t in moments)
    own = {t.data_ptr(): t.numel() * t.element_size() for t in target.model.state_dict().values()}
    buffers = sum(t.numel() * t.element_size() for t in target.model.buffers())
    assert parts["target weights"] == sum(own.values()) + buffers
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in parameters)
    assert estimate(sizes, config, 1, 1).parts["gradients"] == gradients, "they add up over micro-batches"


def test_the_targets_states_are_counted_to_the_byte(target, tmp_path):
    config = settings(tmp_path)
    trainer = new_trainer(target, config)
    features = trainer.features_of(Batches(conversations(), config).make(0))
    sizes = Sizes.of(target, trainer.drafter, config)
    tensors = (features.aux_hidden_BTA, features.last_hidden_BTD)
    assert estimate(sizes, config, 2, 1).parts["target states"] == sum(t.numel() * t.element_size() for t in tensors)


LONG = {"max_length": 20_000, "batch_size": 1, "num_draft_tokens": 8}


def of_shape(drafter, target_weights, width, inner, num_heads, num_kv_heads, head_dim, vocab_size):
    """A target and a drafter of four of its layers, in numbers."""
    config = replace(
        drafter.config,
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=inner,
        num_layers=4,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
    )
    attention = (num_heads + 2 * num_kv_heads) * head_dim * width
    layer = 3 * width * inner + num_heads * head_dim * width + attention
    return Sizes(
        target_weights=target_weights,
        target_transient_values=3 * width + 3 * inner,
        target_width=width,
        keeps_all_logits=False,
        drafter=config,
        num_parameters=4 * layer + attention + 3 * width * width,
        layer_parameters=layer + attention,
        value_bytes=2,
    )


@pytest.fixture(scope="module")
def large(drafter):
    return of_shape(drafter, 16_060_522_496, 4096, 14336, 32, 8, 128, 128256)


@pytest.fixture(scope="module")
def small(drafter):
    return of_shape(drafter, 269_030_016, 576, 1536, 9, 3, 64, 49152)


def test_the_estimate_is_within_15_percent_of_what_was_measured_on_an_h200(large, small, tmp_path):
    """torch.cuda.max_memory_allocated of a step, torch 2.11, bfloat16, K 8, retention 0.8, 2026-11-15."""
    rows = settings(tmp_path, max_length=512, batch_size=64, num_draft_tokens=8)
    assert estimate(small, rows, 64, 1).total == pytest.approx(11.62 * GIB, rel=0.15)
    assert estimate(large, settings(tmp_path, **LONG), 1, 4).total == pytest.approx(49.24 * GIB, rel=0.15)


def test_more_partitions_need_less_memory_until_the_rest_prevails(large, tmp_path):
    config = settings(tmp_path, **LONG)
    totals = [estimate(large, config, 1, number).total for number in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)
    activations = [estimate(large, config, 1, number).parts["drafter activations"] for number in (1, 8)]
    assert activations[1] < activations[0] / 4


def test_activations_computed_again_need_less_memory_than_kept_ones(large, tmp_path):
    kept, again = (estimate(large, settings(tmp_path, **LONG, checkpoint_activations=on), 1, 1) for on in (False, True))
    assert again.total < 0.7 * kept.total


def test_the_plan_takes_as_many_rows_as_fit_then_as_few_segments(large, tmp_path):
    config = settings(tmp_path, max_length=2048, batch_size=64, num_draft_tokens=8)
    roomy = plan(large, config, 10_000 * GIB)
    assert (roomy.micro_batch_size, roomy.num_partitions) == (64, 1)
    usual = plan(large, config, 141 * GIB)
    assert 1 < usual.micro_batch_size < 64 and usual.num_partitions == 1
    assert estimate(large, config, 2 * usual.micro_batch_size, 1).total > 0.94 * 141 * GIB
    tight = plan(large, settings(tmp_path, **LONG), 60 * GIB)
    assert tight.micro_batch_size == 1 and tight.num_partitions > 1
    assert (
        tight.total <= 60 * GIB < estimate(large, settings(tmp_path, **LONG), 1, tight.num_partitions // 2).total / 0.94
    )


def test_a_recorded_pass_of_the_target_keeps_its_memory(small, tmp_path):
    config = settings(tmp_path, max_length=512, batch_size=64, num_draft_tokens=8)
    launched, recorded = (estimate(replace(small, target_is_captured=on), config, 64, 1) for on in (False, True))
    passing = 64 * 512 * 2 * (small.target_transient_values + 3 * 576)
    assert recorded.total - launched.total == recorded.parts["target activations"] == passing


def test_what_the_settings_fix_is_kept(large, tmp_path):
    config = settings(tmp_path, max_length=512, batch_size=16, num_draft_tokens=8, micro_batch_size=4, num_partitions=2)
    found = plan(large, config, 10_000 * GIB)
    assert (found.micro_batch_size, found.num_partitions) == (4, 2)


def test_what_cannot_fit_is_refused_with_the_parts_and_a_remedy(large, tmp_path):
    with pytest.raises(CapacityError) as caught:
        plan(large, settings(tmp_path, **LONG), 24 * GIB)
    assert caught.value.message.startswith("a step needs ") and caught.value.message.endswith("the device has 24.0 GiB")
    assert "target weights 14.96" in caught.value.message and "at 1 rows at once" in caught.value.message
    assert caught.value.hint.startswith("set checkpoint_activations, lower max_length")
    with pytest.raises(CapacityError) as caught:
        plan(large, settings(tmp_path, **LONG, num_partitions=1, checkpoint_activations=True), 24 * GIB)
    assert caught.value.hint.startswith("leave num_partitions out, lower max_length")


def test_sharded_layers_take_their_share_of_memory_in_each_process(target, drafter, tmp_path):
    config = settings(tmp_path, parallel="fsdp")
    alone, shared = (
        estimate(Sizes.of(target, drafter, config, World(0, number)), config, 1, 1).parts for number in (1, 4)
    )
    layer = sum(p.numel() * p.element_size() for p in target.layers[0].parameters())
    num_layers = target.num_layers
    held = num_layers * layer // 4 + layer
    assert shared["target weights"] == alone["target weights"] - num_layers * layer + held, "tables stay whole"
    assert shared["optimizer"] < alone["optimizer"]


def test_quantized_layers_are_counted_whole_because_every_process_keeps_them(drafter, tmp_path):
    target, config = tiny_target(), settings(tmp_path, parallel="fsdp")
    target.layers[0].packed = torch.nn.Parameter(torch.zeros(64, dtype=torch.uint8), requires_grad=False)
    alone, shared = (
        estimate(Sizes.of(target, drafter, config, World(0, number)), config, 1, 1).parts for number in (1, 4)
    )
    assert shared["target weights"] == alone["target weights"]


class Neighbour(World):
    """Another process of the run has less room."""

    def least(self, number):
        return min(number, 60 * GIB)


def test_all_processes_plan_with_the_room_of_the_fullest_one(large, tmp_path, monkeypatch):
    monkeypatch.setattr(Sizes, "of", lambda *_: replace(large, num_processes=2))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * GIB, 1000 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    on_a_gpu = SimpleNamespace(device=torch.device("cuda"))
    config = settings(tmp_path, **LONG | {"batch_size": 2})
    assert planned(on_a_gpu, None, config, World()).num_partitions == 1
    assert planned(on_a_gpu, None, config, Neighbour(0, 2)).num_partitions > 1


def test_on_a_cpu_all_rows_go_at_once_unless_the_settings_say_otherwise(target, drafter, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="peagle"):
        found = planned(target, drafter, settings(tmp_path, batch_size=4), World(0, 2))
    assert (found.micro_batch_size, found.num_partitions, caplog.text) == (2, 1, "")
    found = planned(target, drafter, settings(tmp_path, batch_size=4, micro_batch_size=1, num_partitions=3))
    assert (found.micro_batch_size, found.num_partitions) == (1, 3)


def test_the_chunk_of_labels_is_the_one_that_the_losses_are_cut_into(large, tmp_path):
    found = estimate(large, settings(tmp_path, **LONG), 1, 8)
    assert found.phase == "loss"
    assert found.parts["logits chunk"] > 2 * 2 * 4096 * 128256
