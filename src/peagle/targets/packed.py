"""A target over packed rows, for training: several documents concatenated in one row, each computed as if alone.

transformers' modules run with our attention, which builds its mask from the document numbers and each layer's window:
some models build no mask for packed rows. A model that does not use transformers' attention interface runs one
document per row instead.

Shapes: B rows, T tokens, D width, A concatenated aux width, N chosen tokens, V vocabulary, H query and G key-value
heads, E head width, Q blocks of `BLOCK` tokens.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

from peagle.errors import TargetError
from peagle.kernels.compiler import Compile, compiled
from peagle.targets.hf import HFTarget
from peagle.targets.probing import Probe, check_layer_types, no_mask, window_as_mask

log = logging.getLogger(__name__)

PACKED, PROBE = "peagle_packed", "peagle_packed_probe"
BLOCK = 128  # tokens per block of FlexAttention; shorter rows use a dense mask
MIN_HEAD_WIDTH = 16  # of FlexAttention's kernels


class PackedOutput(NamedTuple):
    """`last_hidden_BTD` is the input of `PackedTarget.head`; `aux_hidden_BTA` as in `TargetOutput`."""

    last_hidden_BTD: Tensor
    aux_hidden_BTA: Tensor


class PackedRows(NamedTuple):
    """The document of each token, and a block mask per window (0: none); None to use a dense mask."""

    document_BT: Tensor
    blocks: dict[int, BlockMask] | None


class PackedTarget:
    """Runs a target over packed rows. The target is patched only during `forward`, so others can use it in between.

    `compile` is applied once per class of layer, so a model of any depth starts in the time of one layer.
    """

    def __init__(self, target: HFTarget, compile: Compile | None = None) -> None:
        self.target = target
        AttentionInterface.register(PACKED, _attend_packed)
        AttentionMaskInterface.register(PACKED, no_mask)
        AttentionInterface.register(PROBE, _attend_packed)
        AttentionMaskInterface.register(PROBE, window_as_mask)
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._windows: set[int] = {0}
        head = TargetHead(target)
        self.head: Callable[[Tensor], Tensor] = head if head.is_exact else _identity
        """Logits of any rows of `last_hidden_BTD`."""
        if not head.is_exact:
            log.warning(
                "the head of %s is not a plain projection; computing the logits of all tokens, which takes more memory",
                type(target.model).__name__,
            )
        self.can_pack = self._probe()
        if compile is not None:
            parts = target.compilable_modules()
            by_kind = {kind: compile(kind.forward) for kind in {type(module) for module in parts}}
            self._forwards = {module: functools.partial(by_kind[type(module)], module) for module in parts}

    @torch.no_grad()
    def forward(self, token_ids_BT: Tensor, document_BT: Tensor, position_BT: Tensor) -> PackedOutput:
        """States of every token. A document is a run of equal numbers in `document_BT`; -1 is padding.

        `position_BT` restarts with each document.
        """
        self.target.check_not_lent()
        if not self.can_pack:
            return self._forward_separately(token_ids_BT, document_BT, position_BT)
        rows = packed_rows(document_BT, self._windows)
        with self._installed():
            return self._run(token_ids_BT, position_ids=position_BT, packed_rows=rows)

    def _run(self, token_ids_BT: Tensor, **kwargs: Any) -> PackedOutput:
        model = self.target.model if self.head is _identity else self.target.model.get_decoder()
        output = model(input_ids=token_ids_BT, use_cache=False, **kwargs)
        read_BTD = output.logits if self.head is _identity else output.last_hidden_state
        aux_hidden_BTA = self.target.captured_aux()
        self.target.forget_captured()
        return PackedOutput(read_BTD, aux_hidden_BTA)

    def _forward_separately(self, token_ids_BT: Tensor, document_BT: Tensor, position_BT: Tensor) -> PackedOutput:
        """One document per row, padded on the right, where causal attention ignores it."""
        row, column = (document_BT >= 0).nonzero(as_tuple=True)
        position = position_BT[row, column]
        number = (position == 0).cumsum(0) - 1
        separate_DT = token_ids_BT.new_zeros(int(number[-1]) + 1, int(position.max()) + 1)
        separate_DT[number, position] = token_ids_BT[row, column]
        parts = self._run(separate_DT)
        outputs = [part.new_zeros(*token_ids_BT.shape, part.shape[-1]) for part in parts]
        for whole, part in zip(outputs, parts, strict=True):
            whole[row, column] = part[number, position]
        return PackedOutput(*outputs)

    @contextlib.contextmanager
    def _installed(self, attention: str = PACKED) -> Iterator[None]:
        model = self.target.model
        earlier: str = model.config._attn_implementation
        model.set_attn_implementation(attention)
        for module, forward in self._forwards.items():
            module.forward = forward
        try:
            yield
        finally:
            model.set_attn_implementation(earlier)
            for module in self._forwards:
                module.__dict__.pop("forward", None)

    @torch.no_grad()
    def _probe(self) -> bool:
        """Run three tokens to learn the layers' windows, and whether all layers use our attention."""
        probe = Probe(type(self.target.model).__name__, self.target.max_length)
        tokens = torch.zeros(1, 3, dtype=torch.long, device=self.target.device)
        rows = PackedRows(torch.zeros_like(tokens), None)
        position = torch.arange(3, device=tokens.device)[None]
        try:
            check_layer_types(self.target)
            with self._installed(PROBE):
                self._run(tokens, position_ids=position, packed_rows=rows, packed_probe=probe)
            if len(probe.windows) < self.target.num_layers:
                raise TargetError(f"{self.target.num_layers - len(probe.windows)} layers have their own attention")
        except (TargetError, TypeError, NotImplementedError) as error:
            log.warning(
                "documents of %s cannot share a row (%s); one document per row takes more time and memory",
                type(self.target.model).__name__,
                error,
            )
            return False
        self._windows = set(probe.windows.values())
        return True


class TargetHead:
    """The target's logits from the input of its head, for selected tokens only.

    Heads may apply a scale or a soft cap after the projection. We read both from the config and compare a few tokens
    with the model's own logits: `is_exact`.
    """

    def __init__(self, target: HFTarget) -> None:
        config = target.model.config.get_text_config()
        self._head = target.model.get_output_embeddings()
        self._softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.is_exact = self._matches(target)

    @torch.no_grad()
    def __call__(self, last_hidden_ND: Tensor) -> Tensor:
        logits_NV: Tensor = self._head(last_hidden_ND)
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap:
            logits_NV = self._softcap * torch.tanh(logits_NV / self._softcap)
        return logits_NV

    @torch.no_grad()
    def _matches(self, target: HFTarget) -> bool:
        tokens = torch.arange(8, device=target.device)[None] % target.vocab_size
        expected = target.model(input_ids=tokens, use_cache=False).logits[0].float()
        hidden = target.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0]
        tolerance = 2 * torch.finfo(target.dtype).eps ** 0.75 if target.dtype.is_floating_point else 1e-2
        difference = (self(hidden).float() - expected).abs().max()
        return bool(difference <= tolerance * expected.abs().max())


def _identity(logits_NV: Tensor) -> Tensor:
    return logits_NV


def packed_rows(document_BT: Tensor, windows: set[int]) -> PackedRows:
    """The rows with block masks on a GPU, so that no memory grows with the square of T."""
    if document_BT.device.type != "cuda" or document_BT.shape[1] < BLOCK:
        return PackedRows(document_BT, None)
    return PackedRows(document_BT, {window: block_mask(document_BT, window) for window in windows})


def block_mask(document_BT: Tensor, window: int) -> BlockMask:
    """Block mask of causal attention inside documents and inside `window` (0: no window).

    Documents are runs, so the first and last document of two blocks tell whether they share one.
    """
    num_tokens = document_BT.shape[1]
    padding = -num_tokens % BLOCK
    runs_BT = (document_BT.diff(dim=1, prepend=document_BT[:, :1]) != 0).cumsum(1)
    runs_BQt = torch.cat([runs_BT, runs_BT[:, -1:].expand(-1, padding)], dim=1).unflatten(1, (-1, BLOCK))
    first_BQ, last_BQ = runs_BQt[..., 0], runs_BQt[..., -1]
    index_Q = torch.arange(first_BQ.shape[1], device=document_BT.device)
    distance_QQ = (index_Q[:, None] - index_Q) * BLOCK
    is_past_QQ = distance_QQ >= 0
    is_full_QQ = distance_QQ > 0
    if window:
        is_past_QQ = is_past_QQ & (distance_QQ - BLOCK + 1 < window)
        is_full_QQ = is_full_QQ & (distance_QQ + BLOCK - 1 < window)
    is_seen_BQQ = is_past_QQ & (last_BQ[:, None, :] >= first_BQ[:, :, None])
    is_full_BQQ = is_full_QQ & (first_BQ[:, None, :] == last_BQ[:, :, None])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (runs_BT[b, q] == runs_BT[b, k])
        return seen & (q - k < window) if window else seen

    return BlockMask.from_kv_blocks(
        *_listed(is_seen_BQQ & ~is_full_BQQ),
        *_listed(is_full_BQQ),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(num_tokens, num_tokens),
        compute_q_blocks=False,
    )


def _listed(chosen_BQQ: Tensor) -> tuple[Tensor, Tensor]:
    """The number of key blocks of each query block, int32 [B, 1, Q], and their indices first in [B, 1, Q, Q]."""
    order_BQQ = chosen_BQQ.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_BQQ.sum(-1, dtype=torch.int32)[:, None], order_BQQ.to(torch.int32)[:, None].contiguous()


def _attend_packed(
    module: nn.Module,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows,
    packed_probe: Probe | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    window = sliding_window or 0
    if packed_probe is not None:
        index: int = module.layer_idx  # type: ignore[assignment]  # an int in transformers
        packed_probe.record(index, attention_mask, sliding_window, kwargs)
    scale = query_BHTE.shape[-1] ** -0.5 if scaling is None else scaling
    is_dense = packed_rows.blocks is None or query_BHTE.shape[-1] < MIN_HEAD_WIDTH
    attend = _attend_dense if is_dense else _attend_blocks
    attended_BHTE = attend(query_BHTE, key_BGTE, value_BGTE, packed_rows, window, scale, softcap, s_aux)
    return attended_BHTE.transpose(1, 2), None


@functools.cache
def _compiled_attention() -> Callable[..., Any]:
    """FlexAttention for layers that are not compiled: in eager mode it would compute all scores."""
    return compiled(flex_attention, dynamic=False)


def _attend_blocks(
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    rows: PackedRows,
    window: int,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap) if softcap else score

    assert rows.blocks is not None, "chosen by the caller"
    attention: Any = flex_attention if torch.compiler.is_compiling() else _compiled_attention()
    attended_BHTE, aux = attention(
        query_BHTE,
        key_BGTE,
        value_BGTE,
        score_mod=cap if softcap else None,
        block_mask=rows.blocks[window],
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is not None:
        # A sink takes exp(sink) / (exp(sink) + sum of exp(score)) of the attention weight and has no value.
        kept_BHT = torch.sigmoid(aux.lse - sinks_H.float()[:, None])
        attended_BHTE = attended_BHTE * kept_BHT[..., None]
    attended: Tensor = attended_BHTE.to(query_BHTE.dtype)
    return attended


def _attend_dense(
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    rows: PackedRows,
    window: int,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    document_BT = rows.document_BT
    index_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    distance_TT = index_T[:, None] - index_T
    is_near_TT = (distance_TT >= 0) & (distance_TT < window) if window else distance_TT >= 0
    seen_B1TT = (is_near_TT & (document_BT[:, :, None] == document_BT[:, None, :]))[:, None]
    group_size = query_BHTE.shape[1] // key_BGTE.shape[1]
    key_BHTE, value_BHTE = (part.repeat_interleave(group_size, 1) for part in (key_BGTE, value_BGTE))
    if not softcap and sinks_H is None:
        return functional.scaled_dot_product_attention(
            query_BHTE, key_BHTE, value_BHTE, attn_mask=seen_B1TT, scale=scale
        )
    scores_BHTT = query_BHTE @ key_BHTE.transpose(2, 3) * scale
    if softcap:
        scores_BHTT = softcap * torch.tanh(scores_BHTT / softcap)
    scores_BHTT = scores_BHTT.float().masked_fill(~seen_B1TT, -torch.inf)
    if sinks_H is not None:
        sinks_BHT1 = sinks_H.float()[:, None, None].expand(*scores_BHTT.shape[:3], 1)
        scores_BHTT = torch.cat([scores_BHTT, sinks_BHT1], dim=-1)
    probs_BHTT = scores_BHTT.softmax(-1)[..., : document_BT.shape[1]]
    return probs_BHTT.to(value_BHTE.dtype) @ value_BHTE
