"""The P-EAGLE objective: all depths of all anchors in one pass, or in one pass per segment.

Segments save memory: only one holds its activations at a time. A segment reads the keys and values of the depth-0
slots of earlier segments, so

1. one pass without gradients computes the keys and values of the depth-0 slots of the whole sequence (the context);
2. the segments run with gradients from last to first, reading the context to their left. Gradients of the context
   accumulate; when a segment runs, all later ones have added theirs, and they enter its backward.

Each slot runs with gradients once, and the result equals one pass over everything.

Shapes: B sequences, T tokens, S slots, N labels, A aux width, D width, E head width.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from peagle.drafter.model import Drafter, KeyValues
from peagle.drafter.slots import Slots, slot_inputs
from peagle.objective.attention import attend, block_mask, dense_mask, find_blocks
from peagle.objective.batches import Batch, Part
from peagle.objective.config import TrainConfig
from peagle.objective.labels import Labels
from peagle.objective.losses import LabelLoss
from peagle.objective.objective import Features, compiled, is_compiled
from peagle.objective.partition import Segment
from peagle.objective.reach import likeliest_tokens, num_departures, on_policy, reached, until_failure

Rotary = tuple[Tensor, Tensor]
WEIGHTED = {"until-failure": until_failure, "on-policy": on_policy}
"""`TrainConfig.labels` that depend on what the drafter guesses."""


class ParallelObjective:
    """Trains the target's next K tokens from every anchor at once."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        device = next(drafter.parameters()).device
        self.drafter, self.config, self.device = drafter, config, device
        self.label_loss = LabelLoss(drafter, config, device)
        # FlexAttention computes all scores if uncompiled, and has no gradients on a CPU.
        has_blocks = device.type == "cuda" and is_compiled(config, device)
        self._see = self._see_blocks if has_blocks else compiled(dense_mask, config, device)
        self._find_blocks = compiled(find_blocks, config, device)
        self._fuse, self._enter, self._layer, self._norm = (
            compiled(part, config, device) for part in (_fused, _slot_inputs, _run_layer, _normed)
        )

    def accumulate(self, batch: Batch, features: Features, num_labels: float) -> tuple[Tensor, Tensor]:
        """Add the gradients of sum(loss) / num_labels to the drafter's parameters.

        `num_labels` counts the labels of the whole optimizer step; `batch` may be a micro-batch of it. Returns the
        loss, and the sums of loss, correct guesses and slots by depth: float [3, num_draft_tokens].
        """
        aux_hidden_BTA, is_half = features.half_as_bfloat16()
        autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16, enabled=is_half)
        with autocast():
            fused = self._fuse(self.drafter, aux_hidden_BTA)
        leaves = tuple(part.detach().requires_grad_() for part in fused)
        with autocast():
            context = self._read_text(batch, leaves) if len(batch.parts) > 1 else []
        results = []
        parts, likeliest_BT = self._parts(batch, features)
        for segment, labels in reversed(parts):
            with autocast():
                states_ND, key_values = self._label_states(batch, leaves, Part(segment, labels), context)
            if likeliest_BT is not None and (weighted := WEIGHTED.get(self.config.labels or "")):
                labels = weighted(labels, self._guesses(states_ND, labels), likeliest_BT)
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

    @torch.no_grad()
    def _guesses(self, states_ND: Tensor, labels: Labels) -> Tensor:
        """The drafter's likeliest token (target id) at each label."""
        parts = (self.drafter.logits(part).argmax(-1) for part in states_ND.chunk(labels.num_chunks))
        return torch.cat([self.drafter.to_target_ids(guess_n) for guess_n in parts])

    def _parts(self, batch: Batch, features: Features) -> tuple[Sequence[Part], Tensor | None]:
        """The segments with the labels to train on, and the target's argmax after each column, if it was computed."""
        if self.config.labels == "all":
            return batch.parts, None
        vocabularies = (self.drafter.config.draft_vocab_size, self.drafter.config.vocab_size)
        columns_at_a_time = batch.chunk_shape.num_whole_columns(*vocabularies)
        likeliest_BT = likeliest_tokens(batch.token_ids_BT, features, columns_at_a_time)
        departures_BT = num_departures(batch.token_ids_BT, likeliest_BT)
        return [Part(segment, reached(labels, departures_BT)) for segment, labels in batch.parts], likeliest_BT

    @torch.no_grad()
    def _read_text(self, batch: Batch, fused: tuple[Tensor, ...]) -> KeyValues:
        """Keys and values of the depth-0 slots of all columns, as leaves that accumulate gradients."""
        column_BT = torch.arange(batch.token_ids_BT.shape[1], device=self.device).expand_as(batch.token_ids_BT)
        # The last column has no next token; no slot reads its stand-in.
        slots = Slots(
            column_BT.clamp_max(column_BT.shape[1] - 2), torch.zeros_like(column_BT), column_BT - batch.position_BT
        )
        zeros_B = column_BT[:, 0]
        _, key_values = self._run(batch.token_ids_BT, fused, Segment(slots, zeros_B, zeros_B), [])
        return [(key.detach().requires_grad_(), value.detach().requires_grad_()) for key, value in key_values]

    def _label_states(
        self, batch: Batch, fused: tuple[Tensor, ...], part: Part, context: KeyValues
    ) -> tuple[Tensor, KeyValues]:
        """The normed states of the labels of a segment, and the keys and values of its slots per layer."""
        states_BSD, key_values = self._run(batch.token_ids_BT, fused, part.segment, context)
        # Not compiled with the norm: the number of labels varies.
        normed_BSD = self._norm(self.drafter.norm, states_BSD)
        slot_N = part.labels.row_N * normed_BSD.shape[1] + part.labels.slot_N
        return normed_BSD.flatten(0, 1).index_select(0, slot_N), key_values

    def _run(
        self, token_ids_BT: Tensor, fused: tuple[Tensor, ...], segment: Segment, context: KeyValues
    ) -> tuple[Tensor, KeyValues]:
        """States of the slots after the last layer, and their keys and values per layer."""
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
        ranges, blocks = self._find_blocks(segment, num_context)
        return block_mask(ranges, blocks, num_context)


def _fused(drafter: Drafter, aux_hidden_BTA: Tensor) -> tuple[Tensor, Tensor]:
    """Fused states of each column, and of the placeholders."""
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
    assert mask_token_id is not None, "a parallel drafter has one"
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
    """Run a layer over the slots and `earlier` keys and values. Also returns the slots' own keys and values."""
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


def _gradients_of(segment: Segment, gradient_BHTE: Tensor, num_slots: int) -> Tensor:
    """The context gradients of the segment's depth-0 slots [B, H, S, E]; zero for the others."""
    number_S = torch.arange(num_slots, device=gradient_BHTE.device)
    column_BS = (segment.left_B[:, None] + number_S).clamp_max(gradient_BHTE.shape[2] - 1)
    index = column_BS[:, None, :, None].expand(-1, gradient_BHTE.shape[1], -1, gradient_BHTE.shape[3])
    is_own_BS = number_S < segment.width_B[:, None]
    return torch.where(is_own_BS[:, None, :, None], gradient_BHTE.gather(2, index), 0)
