"""The planner counts what torch really keeps, and chooses what fits."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from harness.tiny_models import tiny_drafter, tiny_target
from harness.tiny_training import conversations, new_trainer
from harness.tiny_training import settings as cpu_settings
from peagle.errors import CapacityError
from peagle.objective.batches import Batches
from peagle.objective.labels import CHUNK_VALUES, ChunkShape
from peagle.targets.packed import TargetHead
from peagle.training.distributed import World
from peagle.training.features import OnlineFeatures, features_for
from peagle.training.planner import GIB, Sizes, estimate, phases, plan, planned
from peagle.training.resume import RunState
from peagle.training.run import OBJECTIVES
from peagle.training.trainer import Trainer


@pytest.fixture(scope="module")
def target():
    return tiny_target(hidden_size=96, intermediate_size=250, num_attention_heads=4, num_key_value_heads=2, head_dim=40)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, num_layers=2, num_draft_tokens=3).requires_grad_(True)


def settings(output, **changes):
    """Those of a run on a GPU, which is compiled unless it is asked not to."""
    return cpu_settings(output, **{"compile": "auto"} | changes)


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


METHODS = [
    ({}, {}),
    ({"embeddings": "own"}, {"embeddings": "own"}),
    ({}, {"head": "own"}),
    ({}, {"head": "own", "embeddings": "own"}),
    ({"method": "eagle3"}, {"parallel": False, "norm_output": True}),
    ({"method": "eagle3"}, {"parallel": False, "norm_before_fc": True, "fc_norm": False}),
]


@pytest.mark.parametrize(("changes", "switches"), METHODS, ids=str)
def test_weights_gradients_and_optimizer_are_counted_to_the_byte(target, tmp_path, changes, switches):
    config = cpu_settings(tmp_path, num_layers=2, **changes)
    drafter = tiny_drafter(target, num_layers=2, num_draft_tokens=3, **switches).requires_grad_(True)
    objective = OBJECTIVES[config.method](drafter, config)
    trainer = Trainer(drafter, objective, OnlineFeatures(target), config, RunState(config))
    trainer.train_step(Batches(conversations(), config).make(0))
    sizes, parameters = Sizes.of(target, drafter, config), list(drafter.parameters())
    moments = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]
    for phase, parts in phases(sizes, config, 2, 1).items():
        assert parts["drafter weights"] == num_bytes(parameters), phase
        assert parts["optimizer"] == num_bytes(moments), phase
        own = {t.data_ptr(): num_bytes([t]) for t in target.model.state_dict().values()}
        assert parts["target weights"] == sum(own.values()) + num_bytes(target.model.buffers()), phase
    gradients = num_bytes(parameter.grad for parameter in parameters)
    assert phases(sizes, config, 2, 1)["update"]["gradients"] == gradients
    accumulated = phases(sizes, config, 1, 1)
    assert accumulated["target"]["gradients"] == gradients, "they add up over micro-batches"
    assert all(parts["gradients"] >= gradients for parts in accumulated.values())


def test_an_own_head_has_gradients_before_the_backward_pass(target, tmp_path):
    config = cpu_settings(tmp_path)
    drafter = tiny_drafter(target, num_layers=1, num_draft_tokens=3, head="own").requires_grad_(True)
    objective = OBJECTIVES["p-eagle"](drafter, config)
    batch = Batches(conversations(), config).make(0)
    states = torch.randn(len(batch.labels.row_N), drafter.config.hidden_size)
    objective.label_loss.accumulate(states, batch.labels, OnlineFeatures(target)(batch), 1.0)
    gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    found = phases(Sizes.of(target, drafter, config), config, 2, 1)
    assert found["loss"]["gradients"] == num_bytes(gradients) > 0
    layer = num_bytes(drafter.layers[0].parameters())
    assert found["backward"]["gradients"] == num_bytes(gradients) + layer


def states_counted(target, config, features):
    drafter = tiny_drafter(target, num_layers=1, num_draft_tokens=3)
    tensors = (features.aux_hidden_BTA, features.last_hidden_BTD)
    found = phases(Sizes.of(target, drafter, config), config, 2, 1)
    assert {parts["target states"] for parts in found.values()} == {num_bytes(tensors)}
    return found


def test_the_targets_states_are_counted_to_the_byte(target, tmp_path):
    config = cpu_settings(tmp_path)
    features = new_trainer(target, config).features_of(Batches(conversations(), config).make(0))
    assert states_counted(target, config, features)["target"]["target activations"] > 0


def test_states_read_from_disk_take_as_much_and_the_target_does_not_run(target, tmp_path):
    config, rows = cpu_settings(tmp_path, features="cached"), conversations()
    source, batch = features_for(target, config, rows, World()), Batches(rows, config).make(0)
    source.prepare(batch)
    found = states_counted(target, config, source(batch))
    assert not any(parts.get("target activations") for parts in found.values())


def test_logits_of_all_tokens_are_counted_where_a_head_cannot_be_applied_alone(target, tmp_path, monkeypatch):
    monkeypatch.setattr(TargetHead, "_matches", lambda *_: False)
    config = cpu_settings(tmp_path)
    features = OnlineFeatures(target)(Batches(conversations(), config).make(0))
    assert features.last_hidden_BTD.shape == (2, 16, target.vocab_size), "or the test shows nothing"
    states_counted(target, config, features)


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


SHORT = {"max_length": 512, "batch_size": 64, "num_draft_tokens": 8}


@pytest.mark.parametrize(("num_partitions", "measured"), [(1, 78.5), (4, 49.2), (8, 41.8)])
def test_the_estimate_of_a_long_row_is_near_what_was_measured_on_an_h200(large, tmp_path, num_partitions, measured):
    """torch.cuda.max_memory_allocated of a step, torch 2.11, bfloat16, retention 0.8, 2026-11-15; also below."""
    assert estimate(large, settings(tmp_path, **LONG), 1, num_partitions).total / GIB == pytest.approx(
        measured, rel=0.1
    )


def test_the_estimates_of_both_methods_are_near_what_was_measured_on_an_h200(small, tmp_path):
    small = replace(small, target_is_captured=True)
    assert estimate(small, settings(tmp_path, **SHORT), 64, 1).total / GIB == pytest.approx(12.6, rel=0.1)
    attention = (9 + 2 * 3) * 64 * 576
    one_layer = replace(
        small,
        drafter=replace(small.drafter, num_layers=1, parallel=False),
        num_parameters=small.layer_parameters + 3 * 576 * 576,
    )
    assert one_layer.layer_parameters == 2 * attention + 576 * 576 + 3 * 576 * 1536
    config = settings(tmp_path, **SHORT | {"num_draft_tokens": 5}, method="eagle3", num_layers=1)
    assert estimate(one_layer, config, 64, 1).total / GIB == pytest.approx(6.4, rel=0.1)


def test_without_a_compiler_masks_and_the_loss_need_more(small, large, tmp_path):
    compiled, eager = (estimate(small, settings(tmp_path, **SHORT, compile=on), 64, 1) for on in ("auto", "off"))
    num_slots = 2176  # 512 anchors, K 8, retention 0.8, in blocks of 128
    assert eager.parts["attention masks"] == 64 * num_slots**2 * 2 * 4
    assert compiled.parts["attention masks"] == 0
    logits = 10240 * 49152
    assert eager.parts["logits chunk"] - compiled.parts["logits chunk"] == logits * (4 * 5 + 1 - 2)
    one_layer = replace(small, drafter=replace(small.drafter, num_layers=1))
    found = estimate(one_layer, settings(tmp_path, **LONG, compile="off"), 1, 1)
    assert found.phase == "masks", "the fullest moment is while they are made"
    again = phases(large, settings(tmp_path, **LONG, compile="off", checkpoint_activations=True), 1, 1)
    assert again["loss"]["attention masks"] == 83328**2 * (1 + 2), "one layer's, and the marks they are made from"


def test_judging_every_column_fits_into_the_counted_logits_of_a_small_draft_vocabulary(small, tmp_path):
    """65,536 labels of 8,192 tokens are a chunk; as many columns of all tokens would be 18.5 GiB."""
    config = settings(tmp_path, **SHORT, labels="reached", draft_vocab_size=8192)
    drafter = replace(small.drafter, vocab_size=151936, draft_vocab_size=8192)
    chunk = ChunkShape.of(config, 8192)
    assert chunk.num_labels == 65536
    judged = chunk.num_whole_columns(8192, 151936) * 151936
    assert 0.99 * CHUNK_VALUES < judged <= CHUNK_VALUES
    counted = phases(replace(small, drafter=drafter), config, 64, 1)["loss"]["logits chunk"]
    judges, head = chunk.num_judges * 151936, 8192 * 576
    assert counted == 2 * (2 * CHUNK_VALUES + judges + head) > 2 * judged


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
    assert caught.value.message.startswith("a training step needs ") and caught.value.message.endswith(
        "the device has 24.0 GiB"
    )
    assert "target weights 14.96" in caught.value.message and "micro_batch_size 1," in caught.value.message
    assert caught.value.hint.startswith("set checkpoint_activations, lower max_length")
    with pytest.raises(CapacityError) as caught:
        plan(large, settings(tmp_path, **LONG, num_partitions=1, checkpoint_activations=True), 24 * GIB)
    assert caught.value.hint.startswith("omit num_partitions, lower max_length")


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
