"""GGUF files of tiny targets."""

from pathlib import Path

import gguf
from torch import Tensor

from harness.tiny_models import MERGES, tiny_target, tiny_tokenizer
from peagle.targets.hf import HFTarget


def write_gguf(path: Path, target: HFTarget, kind: gguf.GGMLQuantizationType | None = None) -> None:
    """The target as llama.cpp would store it: matrices quantized as `kind`, or in float32."""
    config, weights = target.model.config, target.model.state_dict()
    tokenizer = tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)

    def interleaved(weight: Tensor, num_heads: int) -> Tensor:
        """llama.cpp rotates neighbours, transformers halves: rows of a head change places."""
        return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    inside = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for index in range(config.num_hidden_layers):
        names |= {
            f"model.layers.{index}.{ours}.weight": f"blk.{index}.{theirs}.weight" for ours, theirs in inside.items()
        }
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for ours, theirs in names.items():
        weight = weights[ours]
        for part, num_heads in heads.items():
            if part in ours:
                weight = interleaved(weight, num_heads)
        numbers = weight.contiguous().numpy()
        if kind is None or numbers.ndim == 1:
            writer.add_tensor(theirs, numbers)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_gguf_target(seed: int = 0) -> HFTarget:
    return tiny_target(num_layers=2, vocab_size=268, seed=seed)
