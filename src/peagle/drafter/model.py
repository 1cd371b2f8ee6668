"""The drafter network: a Llama-style decoder whose first layer also reads the target's hidden states.

    target's aux states [S, A]  -- fuse  -->  states [S, D]      --+
                                                                   +-->  layer 0  -->  ...  -->  norm  -->  head
    token ids [S]               -- embed -->  embeddings [S, D]  --+

Each of the S rows is a slot (`slots.py`). Slots of depth 0 read real tokens and states. In a P-EAGLE drafter deeper
slots read two learned placeholders, `mask_embedding` and `mask_hidden`, so one pass predicts all draft tokens. An
EAGLE-3 drafter has the same network without placeholders and runs once per draft token.

Module and parameter names are those of vLLM's checkpoints, so the state dict needs no renaming.

Shapes: B rows or requests, S slots (query rows), C cached plus new slots (key rows), D width, H heads, E head width,
A concatenated aux width, V draft vocabulary, N rows of logits, W likeliest tokens.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter.config import DrafterConfig
from peagle.drafter.pair_head import PairHead
from peagle.errors import ConfigError
from peagle.kernels.candidate_tree import TREE_WIDTH
from peagle.kernels.likeliest import likeliest_tokens

if TYPE_CHECKING:
    from peagle.checkpoint.card import DrafterCard

KeyValues = list[tuple[Tensor, Tensor]]
"""The KV cache: one (key, value) pair per layer, each [B, H_kv, C, E]."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer over its KV cache, [B, H, S, E], given queries and the new keys and values."""


class DrafterOutput(NamedTuple):
    """`normed_BSD` goes to the head. EAGLE-3 feeds `carried_BSD` to its next pass."""

    normed_BSD: Tensor
    carried_BSD: Tensor
    cache: KeyValues


class Rotary(LlamaRotaryEmbedding):
    """transformers' rotary embedding with all its scalings. Frequencies stay float32 in any dtype.

    Rounded to bfloat16, position 1000 would be several positions off. `inspect.unwrap` removes transformers' dynamic
    update, which rescales by the longest sequence of a batch: a sequence must not depend on its neighbors.
    """

    forward = inspect.unwrap(LlamaRotaryEmbedding.forward)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_float = x if x.dtype == torch.float64 else x.float()
        normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (proj(x).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = attend(rotate(query, rotary), rotate(key, rotary), value)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class DenseMemory:
    """Attention over a dense KV cache and the slots of this pass. `new_cache` collects the extended cache.

    Layers in `windowed` have a mask of their own.
    """

    def __init__(self, visible_BSC: Tensor, cache: KeyValues | None, windowed: dict[int, Tensor] | None = None) -> None:
        self.visible_BSC, self.cache, self.windowed = visible_BSC, cache, windowed or {}
        self.new_cache: KeyValues = []

    def layer(self, index: int) -> Attend:
        return partial(self._attend, index)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.cache is not None:
            cached_key, cached_value = self.cache[layer]
            key, value = torch.cat([cached_key, key], dim=2), torch.cat([cached_value, value], dim=2)
        self.new_cache.append((key, value))
        # Repeat heads explicitly: torch's fused kernels take a mask or grouped heads, not both.
        group_size = query.shape[1] // key.shape[1]
        mask = self.windowed.get(layer, self.visible_BSC)[:, None]
        return functional.scaled_dot_product_attention(
            query, key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1), attn_mask=mask
        )


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer. The first one (`is_first`) reads [embedding, state]; its residual is the state alone."""

    def __init__(self, config: DrafterConfig, is_first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, 2 * size if is_first else size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if is_first else None
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, state: Tensor, embedding: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        state, attention_input = self.inputs(state, embedding)
        state = state + self.self_attn(attention_input, rotary, attend)
        return state + self.mlp(self.post_attention_layernorm(state))

    def inputs(self, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """The residual, and the input of the attention."""
        if self.hidden_norm is None:
            return state, self.input_layernorm(state)
        normed = self.hidden_norm(state)
        attention_input = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return normed if self.norm_before_residual else state, attention_input


class Drafter(nn.Module):
    """A drafter for one target. Shared embedding and head are the target's tensors: never trained, never saved."""

    d2t: Tensor

    def __init__(self, config: DrafterConfig, target_embedding: Tensor, target_head: Tensor) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.aux_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layer_ids
            )
        self.fc = nn.Linear(config.aux_size, size, bias=False)
        self.layers = nn.ModuleList(Layer(config, is_first=index == 0) for index in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        if config.parallel:
            self.mask_hidden = nn.Parameter(torch.randn(config.aux_size))
            self.mask_embedding = nn.Parameter(target_embedding.detach().float().mean(0))
        if config.embeddings == "own":
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.head == "own":
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        # Plain tensors, not parameters: the target's tables must not appear in the state dict.
        self._target_embedding, self._target_head = target_embedding.detach(), target_head.detach()
        self.card: DrafterCard | None = None
        """Its drafter card, if it was loaded with one."""
        self.repairs: tuple[str, ...] = ()
        """Messages about files that were repaired on loading, which other engines would misread."""
        self.pair_head: PairHead | None = None
        """Scores neighboring drafts, if there is one; a file of its own, which only we read."""
        self._served_head: Callable[[Tensor], Tensor] | None = None
        self.rotary = _rotary(config)

    @property
    def embedding_VD(self) -> Tensor:
        return self.embed_tokens.weight if self.config.embeddings == "own" else self._target_embedding

    @property
    def head_VD(self) -> Tensor:
        """The head's weight; rows follow the draft vocabulary."""
        if self.config.head == "own":
            return self.lm_head.weight
        if self.config.draft_vocab_size < self.config.vocab_size:
            return self._target_head[self.to_target_ids(torch.arange(len(self.d2t), device=self.d2t.device))]
        return self._target_head

    def embed(self, token_ids_BS: Tensor) -> Tensor:
        """Token embeddings. The mask token reads `mask_embedding` wherever it appears, as in vLLM."""
        embedding_BSD = functional.embedding(token_ids_BS, self.embedding_VD)
        if not self.config.parallel:
            return embedding_BSD
        mask_token_id = self.config.mask_token_id
        assert mask_token_id is not None, "the config of a parallel drafter has one"
        is_mask_BS = token_ids_BS == mask_token_id
        return torch.where(is_mask_BS[..., None], self.mask_embedding.to(embedding_BSD.dtype), embedding_BSD)

    def fuse(self, aux_hidden_BSA: Tensor) -> Tensor:
        """Project concatenated aux states (or `mask_hidden`) to the drafter's width, through the configured norms."""
        if self.config.norm_before_fc:
            aux_hidden_BSA = self.input_norm(aux_hidden_BSA)
        if self.config.fc_norm:
            chunks = aux_hidden_BSA.chunk(len(self.fc_norm), dim=-1)
            aux_hidden_BSA = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(aux_hidden_BSA)

    def forward(
        self,
        token_ids_BS: Tensor,
        fused_BSD: Tensor,
        position_BS: Tensor,
        visible_BSC: Tensor,
        cache: KeyValues | None = None,
        key_position_BC: Tensor | None = None,
    ) -> DrafterOutput:
        """One pass over S slots. Keys are the cached slots followed by these; the returned cache holds both.

        `key_position_BC` are the positions of the keys, for layers with a sliding window. By default cached keys have
        positions 0, 1, 2, ...
        """
        memory = DenseMemory(visible_BSC, cache, self._windowed(visible_BSC, position_BS, key_position_BC))
        layer_inputs = self.layer_inputs(token_ids_BS, fused_BSD, position_BS)
        normed, carried = self.layer_outputs(self.run_layers(fused_BSD, *layer_inputs, memory.layer))
        return DrafterOutput(normed, carried, memory.new_cache)

    def _windowed(
        self, visible_BSC: Tensor, position_BS: Tensor, key_position_BC: Tensor | None
    ) -> dict[int, Tensor] | None:
        """The mask of each sliding-window layer; None if there are none."""
        if not self.config.sliding_layers:
            return None
        if key_position_BC is None:
            num_cached = visible_BSC.shape[2] - position_BS.shape[1]
            cached_BC = torch.arange(num_cached, device=position_BS.device).expand(len(position_BS), -1)
            key_position_BC = torch.cat([cached_BC, position_BS], dim=1)
        is_near_BSC = key_position_BC[:, None] > position_BS[:, :, None] - self.config.sliding_window
        return dict.fromkeys(self.config.sliding_layers, visible_BSC & is_near_BSC)

    def layer_inputs(
        self, token_ids_BS: Tensor, fused_BSD: Tensor, position_BS: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The other inputs of the layers: embeddings, and (cos, sin) of the rotary embedding."""
        return self.embed(token_ids_BS).to(fused_BSD.dtype), self.rotary(fused_BSD, position_BS)

    def run_layers(
        self,
        fused_BSD: Tensor,
        embedding_BSD: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend_in: Callable[[int], Attend],
    ) -> Tensor:
        """Run all layers. `attend_in(index)` gives the attention, with its KV cache, of each layer."""
        state_BSD = fused_BSD
        for index, layer in enumerate(self.layers):
            state_BSD = layer(state_BSD, embedding_BSD, rotary, attend_in(index))
        return state_BSD

    def layer_outputs(self, state_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The states for the head, and those that EAGLE-3 feeds to its next pass."""
        normed_BSD = self.norm(state_BSD)
        return normed_BSD, normed_BSD if self.config.norm_output else state_BSD

    def logits(self, normed_BSD: Tensor) -> Tensor:
        """Logits over the draft vocabulary; `to_target_ids` maps its ids to the target's."""
        if self._served_head is not None:
            return self._served_head(normed_BSD)
        return functional.linear(normed_BSD, self.head_VD.to(normed_BSD.dtype))

    def serve_head(self, head: Callable[[Tensor], Tensor] | None) -> None:
        """Let the engine's faster form of the head compute the logits; None restores the plain one."""
        # `partial` hides a module from nn.Module: its weight must not enter the state dict.
        self._served_head = head if head is None else partial(head)

    @property
    def num_candidates(self) -> int:
        """Tokens per depth that a tree or a pair head chooses from."""
        return min(TREE_WIDTH, self.config.draft_vocab_size)

    def candidates(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens [N, W], by draft id, and their log-probabilities."""
        return likeliest_tokens(logits_NV, self.num_candidates)

    def without_pair_head(self) -> "Drafter":
        """The same weights, not copied, without the pair head: the drafter that other engines serve."""
        if self.pair_head is None:
            return self
        plain = copy.copy(self)
        plain._modules = dict(self._modules)
        plain.pair_head = None
        return plain

    def check_num_draft_tokens(self, num_draft_tokens: int) -> None:
        self.config.check_num_draft_tokens(num_draft_tokens)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return draft_ids
        return draft_ids + self.d2t[draft_ids]


def rotate(x_BHSE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding in the half-split form of the Llama family."""
    cos_BSE, sin_BSE = rotary
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_BSE[:, None] + torch.cat([-second, first], dim=-1) * sin_BSE[:, None]


def _rotary(config: DrafterConfig) -> Rotary:
    """The rotary embedding of a config. Refuses settings that transformers does not know, and partial rotation."""
    try:
        rotary = Rotary(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_length,
                rope_parameters=dict(config.rope_parameters),
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"rope_parameters {config.rope_parameters} are not supported: {error}",
            hint="known rope types: default, linear, dynamic, yarn, longrope, llama3, each with its own keys",
        ) from error
    if 2 * len(rotary.inv_freq) != config.head_dim or config.rope_parameters.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"rope_parameters {config.rope_parameters} rotate only a part of each head",
            hint="drafters rotate whole heads",
        )
    return rotary
