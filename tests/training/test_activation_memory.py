"""What the planner counts of the drafter's passes is what torch really keeps."""

import weakref
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.packed_sequences import packed_batch, settings
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.drafter.create import config_for_target, create_drafter
from peagle.objective.attention import dense_mask
from peagle.objective.eagle3 import UnrolledObjective, slots_by_depth
from peagle.objective.losses import judge_slots
from peagle.objective.p_eagle import ParallelObjective, _fused, _run_layer
from peagle.training.activation_memory import (
    eager_saved_values,
    parallel_activations,
    saved_values,
    unrolled_activations,
)
from peagle.training.planner import CHUNK_BYTES, Sizes

pytestmark = pytest.mark.slow

NUM_SLOTS = 37
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def target():
    return tiny_target(hidden_size=96, intermediate_size=250, num_attention_heads=4, num_key_value_heads=2, head_dim=40)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, num_layers=NUM_LAYERS, num_draft_tokens=4).requires_grad_(True)


def kept_by(function, *inputs, compiles=True):
    """What a function, compiled as on a GPU up to its kernels, keeps for its backward pass: tensors, each once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    if compiles:
        backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        function = torch.compile(function, backend=backend, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return list(kept.values())


def num_bytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def layer_inputs(drafter):
    shape = (2, NUM_SLOTS, drafter.config.hidden_size)
    state, embedding = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    rotary = drafter.rotary(state, torch.arange(NUM_SLOTS)[None].expand(2, -1))
    return state, embedding, rotary, torch.ones(2, NUM_SLOTS, NUM_SLOTS, dtype=torch.bool), None


def without_weights(drafter, kept, layers):
    """What is kept without the layers' weights, of which all matrices are kept in the activations' type."""
    own = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    shapes = [parameter.shape for layer in layers for parameter in layer.parameters() if parameter.dim() == 2]
    copies, rest = [], []
    for tensor in kept:
        if tensor.untyped_storage().data_ptr() in own or tensor.dim() < 2:
            continue
        is_copy = any(sorted(tensor.shape) == sorted(shape) for shape in shapes)
        (copies if is_copy else rest).append(tensor)
    assert num_bytes(copies) == 2 * sum(shape.numel() for shape in shapes)
    return rest


@pytest.fixture(params=[(0, False), (1, True)], ids=["first layer", "a later one with normed heads"])
def layer_of(request, target):
    """A layer, its number and its drafter."""
    index, qk_norm = request.param
    config = config_for_target(target, num_layers=2, num_draft_tokens=4, fc_norm=True, qk_norm=qk_norm)
    drafter = create_drafter(target, config, "random", seed=1).requires_grad_(True)
    return drafter.layers[index], index, drafter


def test_a_compiled_layer_keeps_the_values_that_the_planner_counts(layer_of):
    layer, index, drafter = layer_of
    config = drafter.config
    kept = without_weights(drafter, kept_by(_run_layer, layer, *layer_inputs(drafter)), [layer])
    values = sum(t.numel() for t in kept if t.dtype == torch.bfloat16) / (2 * NUM_SLOTS)
    repeated = 2 * config.num_heads * config.head_dim  # keys and values of all heads, which only dense attention makes
    mask, rotary_tables = NUM_SLOTS, 2 * config.head_dim
    assert values == saved_values(config, index) + repeated + mask + rotary_tables


def test_a_layer_that_is_not_compiled_keeps_the_values_that_the_planner_counts(layer_of):
    layer, index, drafter = layer_of
    config = drafter.config
    kept = without_weights(drafter, kept_by(_run_layer, layer, *layer_inputs(drafter), compiles=False), [layer])
    kept = [t for t in kept if t.numel() > 2 * NUM_SLOTS * config.num_heads]  # without the sums of softmax and norms
    repeated = 2 * config.num_heads * config.head_dim
    mask, rotary_tables = NUM_SLOTS, 2 * config.head_dim
    values = eager_saved_values(config, index, 2) + repeated + mask + rotary_tables
    assert num_bytes(kept) == 2 * 2 * NUM_SLOTS * values


def sizes_of(target, drafter, config):
    """As if the target were in bfloat16."""
    return replace(Sizes.of(target, drafter, config), value_bytes=2)


def half_states(target, batch):
    shape = (*batch.token_ids_BT.shape, len(target.aux_layer_ids) * target.hidden_size)
    return torch.randn(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_p_eagle_keeps_a_mask_of_slots_times_keys_in_each_layer_unless_it_is_compiled(target, drafter, num_partitions):
    config = settings(max_length=150, batch_size=2, num_partitions=num_partitions, num_layers=NUM_LAYERS)
    batch = packed_batch(**{name: getattr(config, name) for name in ("max_length", "batch_size", "num_partitions")})
    objective, segment = ParallelObjective(drafter, config), batch.parts[0].segment
    fused = [part.detach().bfloat16() for part in _fused(drafter, half_states(target, batch).float())]
    fused = tuple(part.requires_grad_() for part in fused)
    with torch.autocast("cpu", torch.bfloat16):
        context = objective._read_text(batch, fused) if num_partitions > 1 else []
    kept = kept_by(objective._run, batch.token_ids_BT, fused, segment, context, compiles=False)
    num_slots = segment.slots.anchor_BS.shape[1]
    num_keys = num_slots + (150 if context else 0)
    masks = [t for t in kept if t.shape[-2:] == (num_slots, num_keys)]
    sizes = sizes_of(target, drafter, config)
    found = parallel_activations(sizes, config, 2, num_partitions)
    assert found.masks == num_bytes(masks) == NUM_LAYERS * 2 * 2 * num_slots * num_keys
    values = sum(eager_saved_values(drafter.config, index, 2) for index in range(NUM_LAYERS))
    layers = 2 * 2 * (num_slots * (values + 2 * 40) + NUM_LAYERS * num_keys * 2 * 160)
    kept = [t for t in without_weights(drafter, kept, drafter.layers) if t.numel() > 2 * num_slots * 4]
    kept = [t for t in kept if t.is_floating_point() and t.data_ptr() != fused[0].data_ptr()]
    assert num_bytes(kept) == layers + found.masks
    own_keys, of_labels, of_fc = NUM_LAYERS * num_slots * 160, num_slots * 5 * 96, 150 * (2 * 96 + 2 * 288)
    context_keys = 2 * NUM_LAYERS * 150 * 160 if context else 0
    weights = (NUM_LAYERS * sizes.layer_parameters + 288 * 96) * 2
    numbers = 2 * num_slots * 12 * 8
    assert found.kept == layers + 2 * 2 * (own_keys + of_labels + of_fc + context_keys) + weights + numbers
    compiled = parallel_activations(sizes, replace(config, compile="auto"), 2, num_partitions)
    assert compiled.masks == 0 and compiled.kept < found.kept


class MostBytes(TorchDispatchMode):
    """The most bytes that tensors made inside had at one time."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = function(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(made) if isinstance(t, Tensor)]:
            if storage._cdata not in given | self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
        return made

    def drop(self, number, size):
        self.known.discard(number)
        self.now -= size


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_masks_need_more_while_they_are_made(target, drafter, num_partitions):
    config = settings(max_length=300, batch_size=2, num_partitions=num_partitions)
    batch = packed_batch(max_length=300, batch_size=2, num_partitions=num_partitions)
    with MostBytes() as seen:
        dense_mask(batch.parts[0].segment, 300 if num_partitions > 1 else 0)
    counted = parallel_activations(sizes_of(target, drafter, config), config, 2, num_partitions).masks_in_making
    assert seen.most == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("loss", ["ce", "kl", "kl+ce", "tv+ce", "lk"])
def test_a_loss_that_is_not_compiled_needs_the_bytes_a_logit_that_the_planner_counts(loss):
    draft, target = torch.randn(256, 4096).bfloat16(), torch.randn(64, 4096).bfloat16()
    with MostBytes() as seen:
        judge_slots(draft, target, torch.arange(256) // 4, None, loss, torch.full((256,), 1 / 256))
    assert seen.most / draft.numel() == pytest.approx(CHUNK_BYTES[loss], rel=0.01)


def test_a_compiled_fusing_layer_keeps_what_it_reads_normed(target, drafter):
    aux = torch.randn(2, NUM_SLOTS, 288, dtype=torch.bfloat16)
    kept = kept_by(_fused, drafter, aux)
    by_token = [t for t in kept if t.numel() == aux.numel() and t.data_ptr() != aux.data_ptr()]
    assert num_bytes(by_token) == num_bytes([aux])
    config = settings(max_length=NUM_SLOTS, batch_size=2, compile="auto")
    sizes = sizes_of(target, drafter, config)
    plain = replace(sizes, drafter=replace(drafter.config, fc_norm=False))
    normed, bare = (parallel_activations(each, config, 2, 1).kept for each in (sizes, plain))
    assert normed - bare == num_bytes([aux])


@pytest.mark.parametrize(("compiles", "num_layers", "num_draft_tokens"), [(False, 2, 3), (True, 1, 2)])
def test_eagle3_keeps_keys_and_values_of_all_depths_so_far_at_every_depth(
    target, compiles, num_layers, num_draft_tokens
):
    changes = {"max_length": 150, "batch_size": 3, "num_draft_tokens": num_draft_tokens}
    config = settings(method="eagle3", num_layers=num_layers, **changes)
    drafter = tiny_drafter(target, num_layers=num_layers, parallel=False, norm_output=True).requires_grad_(True)
    batch = packed_batch(**changes)
    aux, states_of = half_states(target, batch), UnrolledObjective(drafter, config)._slot_states
    kept = kept_by(states_of, batch.token_ids_BT, aux, *batch.slots, compiles=compiles)
    kept = [t for t in without_weights(drafter, kept, drafter.layers) if t.data_ptr() != aux.data_ptr()]
    config = replace(config, compile="auto" if compiles else "off")
    sizes = sizes_of(target, drafter, config)
    found = unrolled_activations(sizes, config, 3, 1)
    slots = slots_by_depth(config, 150)
    keys = list(accumulate(slots))
    for depth, (num_slots, num_keys) in enumerate(zip(slots, keys, strict=True)):
        repeated = [t for t in kept if t.shape == (3, 4, num_keys, 40)]
        assert len(repeated) == num_layers * (2 if depth else 3 if compiles else 4), "at depth 0 queries and outputs"
        masks = [t for t in kept if t.shape == (3, 1, num_slots, num_keys)]
        assert len(masks) == (1 if compiles else num_layers)
    pairs = sum(num_slots * num_keys for num_slots, num_keys in zip(slots, keys, strict=True))
    assert found.masks == 3 * 2 * pairs * (1 if compiles else num_layers)
    # Not kept by the pass: the layers' weights, left out above; the states of slots and labels, and what numbers them.
    besides = 2 * num_layers * sizes.layer_parameters + batch.slots.depth_BS.numel() * (2 * 3 * 96 + 12 * 8)
    assert num_bytes(kept) == pytest.approx(found.kept + found.masks - besides, rel=0.01)


def test_eagle3_computed_again_keeps_the_activations_of_one_depth(target):
    drafter = tiny_drafter(target, num_layers=1, parallel=False)
    config = settings(method="eagle3", num_layers=1, max_length=150, compile="auto")
    sizes = sizes_of(target, drafter, config)
    kept, again = (
        unrolled_activations(sizes, replace(config, checkpoint_activations=on), 3, 1) for on in (False, True)
    )
    slots = slots_by_depth(config, 150)
    keys = list(accumulate(slots))
    values = saved_values(drafter.config, 0)
    largest = max(num * values + num_keys * 2 * 160 for num, num_keys in zip(slots, keys, strict=True))
    entering = sum(slots) * 96 + sum(keys[:-1]) * 160
    every = sum(slots) * values + sum(keys) * 2 * 160
    assert kept.kept - again.kept == 3 * 2 * (every - largest - entering) > 0
    assert again.masks == 3 * 2 * max(num * num_keys for num, num_keys in zip(slots, keys, strict=True))
