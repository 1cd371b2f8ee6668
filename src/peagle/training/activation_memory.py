"""Counts the activations that the drafter saves for backward, in bytes. Used by the memory planner.

A compiled layer saves what torch.compile selects (a test compares). An uncompiled layer also saves attention masks of
queries x keys and the inputs of every operation. Temporaries inside an operation are not counted.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from peagle.drafter.config import DrafterConfig
from peagle.objective.batches import SLOT_MULTIPLE
from peagle.objective.cod import max_num_slots
from peagle.objective.config import TrainConfig
from peagle.objective.eagle3 import slots_by_depth
from peagle.objective.partition import segment_size

if TYPE_CHECKING:
    from peagle.training.planner import Sizes


class Activations(NamedTuple):
    """Bytes of the drafter's forward and backward."""

    kept: int
    """saved for backward, without masks"""
    in_passing: int
    """added by the backward of one layer"""
    masks: int
    """attention masks saved for backward"""
    masks_in_making: int = 0
    """temporaries while masks are built"""


def saved_values(drafter: DrafterConfig, index: int) -> int:
    """Values per slot that a compiled layer saves for backward, including its input state.

    Input state, attention input (plus the embedding in the first layer), attention query and output, the state
    after attention, its norm, and three values of MLP width; with qk_norm also queries and keys before the norm.
    The caller counts keys and values.
    """
    width, inner = drafter.hidden_size, drafter.num_heads * drafter.head_dim
    read = 3 * width if index == 0 else width  # embedding and both halves of the attention input
    return width + read + _normed_heads(drafter) + 2 * inner + 2 * width + 3 * drafter.intermediate_size


def eager_saved_values(drafter: DrafterConfig, index: int, value_bytes: int) -> int:
    """The same for an uncompiled layer, without its input state.

    For each norm its output before the weight and its float32 input (unless that is a frozen embedding); the inputs
    of attention and MLP, attention query and output, and four values of MLP width.
    """
    width, inner = drafter.hidden_size, drafter.num_heads * drafter.head_dim
    num_norms, read = (3, 3 * width) if index == 0 else (2, 2 * width)
    num_inputs = num_norms if index or drafter.parallel or drafter.embeddings == "own" else num_norms - 1
    normed = (num_norms + num_inputs * 4 // value_bytes) * width + (1 + 4 // value_bytes) * _normed_heads(drafter)
    return normed + read + 2 * inner + 4 * drafter.intermediate_size


def _normed_heads(drafter: DrafterConfig) -> int:
    """Values per slot of the normed queries and keys."""
    return (drafter.num_heads + drafter.num_kv_heads) * drafter.head_dim if drafter.qk_norm else 0


def parallel_activations(
    sizes: "Sizes", config: TrainConfig, micro_batch_size: int, num_partitions: int
) -> Activations:
    """P-EAGLE: one pass over the slots of a segment."""
    drafter, value, num_layers = sizes.drafter, sizes.value_bytes, sizes.drafter.num_layers
    slots, tokens = _num_slots(config, micro_batch_size, num_partitions), micro_batch_size * config.max_length
    key_values = 2 * drafter.num_kv_heads * drafter.head_dim
    context = tokens if num_partitions > 1 else 0
    is_dense = config.compile == "off"
    by_layer = [slots * values for values in _values_by_layer(sizes, config)]
    copies = sizes.layer_parameters * value  # weights cast to the activations' dtype
    # Keys and values are saved concatenated with the context's, and once more for the slots alone.
    joined = (slots + 2 * context if context else slots) * key_values
    if is_dense:
        joined = (slots + context) * 2 * drafter.num_heads * drafter.head_dim + slots * key_values
    pairs = slots * (slots + context) // micro_batch_size if is_dense else 0
    if config.checkpoint_activations:
        kept = num_layers * slots * (drafter.hidden_size + key_values) + max(by_layer) + joined
        num_bytes, masks = value * kept + copies, pairs * (1 + value)
    else:
        kept = sum(by_layer) + num_layers * joined
        num_bytes, masks = value * kept + num_layers * copies, num_layers * pairs * value
    # Context: keys and values of all columns and their gradients.
    num_bytes += value * 2 * num_layers * context * key_values
    num_bytes += _beside_layers(sizes, config, slots, tokens)
    in_passing = value * slots * (2 * drafter.intermediate_size + 2 * drafter.hidden_size) + copies
    # Bool tensors of two key ranges (three with context): both bounds and their conjunction. Reading the context
    # builds its own mask.
    in_making = max(9 * pairs, 6 * tokens * config.max_length) if context else 6 * pairs
    return Activations(num_bytes, in_passing, masks, in_making if is_dense else 0)


def unrolled_activations(
    sizes: "Sizes", config: TrainConfig, micro_batch_size: int, num_partitions: int
) -> Activations:
    """EAGLE-3: one pass per depth over the keys and values of all depths so far.

    Each pass saves the concatenated keys and values repeated for all heads, and a mask of slots x keys (one per layer
    if uncompiled). With checkpointing only one depth holds its activations, but the inputs of all depths are saved,
    including keys and values of earlier depths.
    """
    drafter, value, num_layers = sizes.drafter, sizes.value_bytes, sizes.drafter.num_layers
    width, inner = drafter.hidden_size, drafter.num_heads * drafter.head_dim
    key_values = 2 * drafter.num_kv_heads * drafter.head_dim
    is_eager = config.compile == "off"
    slots_by_pass = [micro_batch_size * number for number in slots_by_depth(config, config.max_length)]
    keys_by_pass = list(accumulate(slots_by_pass))
    by_slot = sum(_values_by_layer(sizes, config))
    by_pass = [
        slots * by_slot + keys * num_layers * 2 * inner for slots, keys in zip(slots_by_pass, keys_by_pass, strict=True)
    ]
    pairs = [slots * keys // micro_batch_size for slots, keys in zip(slots_by_pass, keys_by_pass, strict=True)]
    num_masks = num_layers if is_eager else 1
    copies = num_layers * sizes.layer_parameters * value
    if config.checkpoint_activations:
        kept = sum(slots_by_pass) * width + sum(keys_by_pass[:-1]) * num_layers * key_values + max(by_pass)
        masks = num_masks * value * max(pairs) + (sum(pairs) if is_eager else 0)
    else:
        kept, masks = sum(by_pass), num_masks * value * sum(pairs)
    slots, tokens = _num_slots(config, micro_batch_size, 1), micro_batch_size * config.max_length
    num_bytes = value * kept + copies + _beside_layers(sizes, config, slots, tokens)
    # Plus the gradients of the concatenated keys and values.
    in_passing = slots_by_pass[0] * (2 * drafter.intermediate_size + 2 * width) + keys_by_pass[-1] * 2 * inner
    return Activations(num_bytes, value * in_passing + sizes.layer_parameters * value, masks)


def _num_slots(config: TrainConfig, micro_batch_size: int, num_partitions: int) -> int:
    row_slots = max_num_slots(config.max_length, config.kept_shares)
    return micro_batch_size * segment_size(row_slots, num_partitions, config.num_draft_tokens, SLOT_MULTIPLE)


def _values_by_layer(sizes: "Sizes", config: TrainConfig) -> list[int]:
    """Values per slot that each layer saves."""
    layers = range(sizes.drafter.num_layers)
    if config.compile == "off":
        return [eager_saved_values(sizes.drafter, index, sizes.value_bytes) for index in layers]
    return [saved_values(sizes.drafter, index) for index in layers]


def _beside_layers(sizes: "Sizes", config: TrainConfig, slots: int, tokens: int) -> int:
    """Bytes saved outside the layers."""
    drafter, value, width = sizes.drafter, sizes.value_bytes, sizes.drafter.hidden_size
    is_eager, is_unrolled = config.compile == "off", config.method == "eagle3"
    # The last norm, the states of labels and their gradients; EAGLE-3 also holds those of all slots.
    num_states = (4 // value + 1 if is_eager else 1) + (3 if is_unrolled else 2)
    num_fused = 0 if is_unrolled else 2  # states of all columns and their gradients
    if is_unrolled and is_eager:
        # A gather saves its source: fused states, states carried to the next depth, states of all depths.
        num_states, num_fused = num_states + 2, 1
    # Rotary tables; positions and key ranges of slots as int64.
    num_bytes = slots * (value * (num_states * width + 2 * drafter.head_dim) + 12 * 8)
    # The normed input of `fc`, before and after the norm's weight, and the cast weight of `fc`.
    is_normed = drafter.fc_norm or drafter.norm_before_fc
    num_normed = (2 if is_eager else 1) if is_normed else 0
    return num_bytes + value * (num_fused * tokens * width + drafter.aux_size * (num_normed * tokens + width))
