"""Tiny random targets of many model families, and drafters that are sometimes right about them.

Every family has what is special about its attention, small enough to matter within a few dozen tokens: windows, sinks,
soft caps, norms of queries and keys, several rotary embeddings, layers that share keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from harness.drafter_passes import training_logits
from harness.tiny_models import tiny_tokenizer
from peagle.drafter.config import DrafterConfig
from peagle.drafter.create import create_drafter
from peagle.drafter.model import Drafter
from peagle.targets.hf import HFTarget

WINDOW = 7
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 272,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a tied random Gemma mostly repeats its last token
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40}
ALTERNATING = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**BASE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**BASE)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**BASE, sliding_window=WINDOW)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **BASE,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            rope_parameters=YARN,
        )
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **BASE,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=30.0,
            attn_implementation="eager",  # transformers' other kinds leave the soft cap out
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**BASE, sliding_window=WINDOW, layer_types=ALTERNATING, query_pre_attn_scalar=8)
    ),
    "gemma4": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **BASE,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            global_head_dim=16,
            vocab_size_per_layer_input=272,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
        )
    ),
}


def family_target(family: str, seed: int = 0) -> HFTarget:
    """A random target in float32; norms and sinks are random too, so that leaving one out is noticed."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("sinks"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return HFTarget(model, tiny_tokenizer(), name=f"tiny-{family}")


def trained_drafter(
    target: HFTarget,
    texts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int = 4,
    num_steps: int = 80,
    deep_every: int = 1,
    **changes: Any,
) -> Drafter:
    """A P-EAGLE drafter of one layer after a short training on `texts`: right about some of them, some of the time.

    Each step trains all depths of every `deep_every`-th anchor, others the next time, and one depth of the rest: long
    drafts of all anchors would be slow to train. `changes` are other settings of its config than the usual ones here.
    """
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=target.aux_layer_ids,
        mask_token_id=target.vocab_size - 1,
        num_draft_tokens=num_draft_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_length=target.max_length,
        fc_norm=True,
        head="own",
    )
    config = replace(config, **changes)
    drafter = create_drafter(target, config, "random", seed=0)
    length = min(map(len, texts))
    token_ids_BT = torch.tensor([list(text[-length:]) for text in texts])
    aux_BTA = target.forward(token_ids_BT).aux_hidden_BTA
    num_anchors = length - 1 - num_draft_tokens
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for step in range(num_steps):
        is_deep_T = (torch.arange(num_anchors) + step) % deep_every == 0
        depths_BT = torch.where(is_deep_T, num_draft_tokens, 1).expand(len(texts), -1)
        slots, logits_BSV = training_logits(drafter, depths_BT, token_ids_BT, aux_BTA)
        loss = functional.cross_entropy(logits_BSV.flatten(0, 1), token_ids_BT.gather(1, slots.label_BS).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def sequential(drafter: Drafter, target: HFTarget) -> Drafter:
    """The same weights drafting one token at a time, as EAGLE-3 does."""
    return twin(drafter, target, parallel=False, mask_token_id=None)


def twin(drafter: Drafter, target: HFTarget, **changes: Any) -> Drafter:
    """The same weights beside `target` where it is now, with other settings."""
    copy = Drafter(replace(drafter.config, **changes), target.embedding_VD, target.head_VD)
    copy = copy.to(target.device, target.dtype)
    wanted = copy.state_dict().keys()
    copy.load_state_dict({name: tensor for name, tensor in drafter.state_dict().items() if name in wanted})
    return copy.eval().requires_grad_(False)
