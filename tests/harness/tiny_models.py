"""A target's parts small enough to be made in a test, without files or network."""

from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.checkpoint.native import save_drafter
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.targets.hf import HFTarget

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Byte-level spelling: G-with-dot is a space, C-with-dot a newline, "\u00f0\u0141" the first two bytes of most emoji.
MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("\u0120", "the"),
    ("e", "r"),
    ("u", "s"),
    ("us", "er"),
    ("a", "s"),
    ("\u010a", "\u010a"),
    ("\u00f0", "\u0141"),
)


@cache
def _backend_json() -> str:
    vocabulary = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    model = models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=list(MERGES))
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return backend.to_str()


def tiny_tokenizer(*, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 268 tokens: any text round-trips. `<|im_end|>` (id 2) ends a turn; a new object each time."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend_json()),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_target(*, num_layers: int = 8, vocab_size: int = 288, seed: int = 0, **overrides: object) -> HFTarget:
    """A random Llama of width 64 in float32, with spare vocabulary rows beyond the tokenizer's."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides)))
    return HFTarget(model, tiny_tokenizer(), name="tiny")


def tiny_drafter(target: HFTarget, *, num_layers: int = 2, num_draft_tokens: int = 4, **switches: object) -> Drafter:
    """An untrained drafter whose layers start as the target's, so that some of its drafts are accepted."""
    settings: dict[str, object] = {"num_draft_tokens": num_draft_tokens, "fc_norm": True} | switches
    config = config_for_target(target, num_layers=num_layers, **settings)
    return create_drafter(target, config, "target", seed=1).eval().requires_grad_(False)


def write_target(target: HFTarget, directory: Path) -> Path:
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return directory


def write_drafter(target: HFTarget, directory: Path, drafter: Drafter | None = None) -> Path:
    """A drafter for the target, by default a tiny one, as a directory with its card."""
    drafter = drafter or tiny_drafter(target)
    config = drafter.config
    card = DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    save_drafter(drafter, directory, card, full=False, dtype=torch.float32)
    return directory
