"""P-EAGLE: all depths of all anchors in one pass over the slots, or in one for each segment of a row.

Segments save memory: only one has its activations at a time. A later segment reads the keys and values that earlier
ones' depth-0 slots have in each layer, so

1. one pass without gradients runs the depth-0 slots of the whole row and keeps their keys and values;
2. segments are run with gradients from the last to the first, reading those of the columns left of them. Their
   gradients are summed over the segments, and when a segment's turn comes, all later ones have added theirs: they go
   into the backward pass of the segment whose keys and values they are.

Each slot is run with gradients once, and the sum is that of one pass over everything.

Shapes: B rows, T tokens, S slots, N slots with a label, A aux width, D width, E head width.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from peagle.drafter.model import Drafter, KeyValues
from peagle.drafter.slots import Slots, slot_inputs
from peagle.training.attention import attend, block_mask, blocks_seen, dense_mask
from peagle.training.batches import Batch, Part
from peagle.training.config import TrainConfig
from peagle.training.labels import Labels
from peagle.training.losses import LabelLoss
from peagle.training.objective import compiled, is_compiled
from peagle.training.partition import Segment
from peagle.training.reach import num_departures, reached

if TYPE_CHECKING:
    from peagle.training.features import Features

Rotary = tuple[Tensor, Tensor]


class ParallelObjective:
    """Imitate the target's next K distributions from every anchor at once."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        device = next(drafter.parameters()).device
        self.drafter, self.config, self.device = drafter, config, device
        self.label_loss = LabelLoss(drafter, config, device)
        # Uncompiled, FlexAttention would compute all scores, and on a CPU it has no gradients.
        has_blocks = device.type == "cuda" and is_compiled(config, device)
        self._see = self._see_blocks if has_blocks else compiled(dense_mask, config, device)
        self._blocks_seen = compiled(blocks_seen, config, device)
        self._fuse, self._enter, self._layer, self._norm = (
            compiled(part, config, device) for part in (_fused, _slot_inputs, _run_layer, _normed)
        )

    def accumulate(self, batch: Batch, features: "Features", num_labels: float) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        # bfloat16 wherever the target is in half precision, because float16 gradients would need scaling.
        aux_hidden_BTA = features.aux_hidden_BTA
        is_half = aux_hidden_BTA.dtype in (torch.bfloat16, torch.float16)
        aux_hidden_BTA = aux_hidden_BTA.to(torch.bfloat16) if is_half else aux_hidden_BTA
        autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16, enabled=is_half)
        with autocast():
            fused = self._fuse(self.drafter, aux_hidden_BTA)
        leaves = tuple(part.detach().requires_grad_() for part in fused)
        with autocast():
            context = self._read_text(batch, leaves) if len(batch.parts) > 1 else []
        results = []
        for segment, labels in reversed(self._parts(batch, features)):
            with autocast():
                states_BSD, key_values = self._run(batch.token_ids_BT, leaves, segment, context)
                # Not compiled with the norm: batches differ in the number of labels.
                states_ND = _states_of(self._norm(self.drafter.norm, states_BSD), labels)
            gradient_ND, loss, sums = self.label_loss.accumulate(states_ND, labels, features, num_labels)
            results.append((loss, sums))
            outputs, gradients = [states_ND], [gradient_ND]
            for own, earlier in zip(key_values, context, strict=False):
                for tensor, leaf in zip(own, earlier, strict=True):
                    if leaf.grad is not None:
                        outputs.append(tensor)
                        gradients.append(_gradients_of(segment, leaf.grad, tensor.shape[2]))
            torch.autograd.backward(outputs, gradients)
        torch.autograd.backward(fused, [leaf.grad for leaf in leaves])
        loss, sums = (torch.stack(parts).sum(0) for parts in zip(*results, strict=True))
        return loss, sums

    def _parts(self, batch: Batch, features: "Features") -> Sequence[Part]:
        """The batch's segments with those of their labels that the settings want learned."""
        if self.config.labels == "all":
            return batch.parts
        vocabularies = (self.drafter.config.draft_vocab_size, self.drafter.config.vocab_size)
        columns_at_a_time = batch.chunk_shape.num_whole_columns(*vocabularies)
        departures_BT = num_departures(batch.token_ids_BT, features, columns_at_a_time)
        return [Part(segment, reached(labels, departures_BT)) for segment, labels in batch.parts]

    @torch.no_grad()
    def _read_text(self, batch: Batch, fused: tuple[Tensor, Tensor]) -> KeyValues:
        """Keys and values of the depth-0 slots of all columns, ready to gather gradients."""
        column_BT = torch.arange(batch.token_ids_BT.shape[1], device=self.device).expand_as(batch.token_ids_BT)
        # The last column has no token after it; no slot reads what stands in for it.
        slots = Slots(
            column_BT.clamp_max(column_BT.shape[1] - 2), torch.zeros_like(column_BT), column_BT - batch.position_BT
        )
        zeros_B = column_BT[:, 0]
        _, key_values = self._run(batch.token_ids_BT, fused, Segment(slots, zeros_B, zeros_B), [])
        return [(key.detach().requires_grad_(), value.detach().requires_grad_()) for key, value in key_values]

    def _run(
        self, token_ids_BT: Tensor, fused: tuple[Tensor, Tensor], segment: Segment, context: KeyValues
    ) -> tuple[Tensor, KeyValues]:
        """States of the slots after the last layer, and their keys and values in each layer."""
        num_context = context[0][0].shape[2] if context else 0
        seen = self._see(segment, num_context)
        state, embedding, *rotary = self._enter(self.drafter, token_ids_BT, *fused, *segment.slots)
        key_values = []
        for index, layer in enumerate(self.drafter.layers):
            inputs = (layer, state, embedding, (rotary[0], rotary[1]), seen, context[index] if context else None)
            if self.config.checkpoint_activations and torch.is_grad_enabled():
                state, key, value = checkpoint(self._layer, *inputs, use_reentrant=False)
            else:
                state, key, value = self._layer(*inputs)
            key_values.append((key, value))
        return state, key_values

    def _see_blocks(self, segment: Segment, num_context: int) -> BlockMask:
        ranges, blocks = self._blocks_seen(segment, num_context)
        return block_mask(ranges, blocks, num_context)


def _fused(drafter: Drafter, aux_hidden_BTA: Tensor) -> tuple[Tensor, Tensor]:
    """What slots read as states: of each column, and of the placeholders."""
    return drafter.fuse(aux_hidden_BTA), drafter.fuse(drafter.mask_hidden.to(aux_hidden_BTA.dtype))


def _slot_inputs(
    drafter: Drafter,
    token_ids_BT: Tensor,
    fused_BTD: Tensor,
    fused_mask_D: Tensor,
    anchor_BS: Tensor,
    depth_BS: Tensor,
    start_BS: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, embeddings and rotary tables of the slots."""
    slots = Slots(anchor_BS, depth_BS, start_BS)
    mask_token_id = drafter.config.mask_token_id
    assert mask_token_id is not None, "the config of a parallel drafter has one"
    token_ids_BS, fused_BSD = slot_inputs(slots, token_ids_BT, fused_BTD, mask_token_id, fused_mask_D)
    embedding_BSD, rotary = drafter.layer_inputs(token_ids_BS, fused_BSD, slots.position_BS)
    return fused_BSD, embedding_BSD, *rotary


def _run_layer(
    layer: nn.Module,
    state: Tensor,
    embedding: Tensor,
    rotary: Rotary,
    seen: Tensor | BlockMask,
    earlier: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer over the slots and the keys and values of `earlier` columns; also the slots' own keys and values."""
    own: list[Tensor] = []

    def attend_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own.extend((key, value))
        if earlier is not None:
            key, value = torch.cat([earlier[0], key], dim=2), torch.cat([earlier[1], value], dim=2)
        return attend(query, key, value, seen)

    state = layer(state, embedding, rotary, attend_all)
    return state, own[0], own[1]


def _normed(norm: nn.Module, states_BSD: Tensor) -> Tensor:
    normed_BSD: Tensor = norm(states_BSD)
    return normed_BSD


def _states_of(states_BSD: Tensor, labels: Labels) -> Tensor:
    """States of the slots with a label."""
    return states_BSD.flatten(0, 1).index_select(0, labels.row_N * states_BSD.shape[1] + labels.slot_N)


def _gradients_of(segment: Segment, gradient_BHTE: Tensor, num_slots: int) -> Tensor:
    """The columns' gradients that belong to the segment's slots [B, H, S, E]; other slots have none."""
    number_S = torch.arange(num_slots, device=gradient_BHTE.device)
    column_BS = (segment.left_B[:, None] + number_S).clamp_max(gradient_BHTE.shape[2] - 1)
    index = column_BS[:, None, :, None].expand(-1, gradient_BHTE.shape[1], -1, gradient_BHTE.shape[3])
    is_own_BS = number_S < segment.width_B[:, None]
    return torch.where(is_own_BS[:, None, :, None], gradient_BHTE.gather(2, index), 0)
