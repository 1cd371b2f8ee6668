"""The other maker: a small drafter trained by speculators' own model, loss and checkpoint code, on the CPU.

Runs inside speculators' own environment and imports nothing of peagle.

    python train_speculators.py TARGET INPUTS.safetensors OUT CASE NUM_DEPTHS NUM_STEPS

INPUTS holds N texts of T tokens: `token_ids` [N, T], `aux_hidden` [N, T, A] (the concatenated target states), and
`last_hidden` [N, T, D] (the state BEFORE the target's final norm). CASE names what is trained: the P-EAGLE or EAGLE-3
model, with Llama's or Qwen3's layers, with the whole vocabulary or a part of it. OUT is what `save_pretrained` makes
of it, and the last line of stdout the loss at the start and at the end.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle.core import PEagleDraftModel
from transformers import AutoConfig, LlamaConfig, Qwen3Config

CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "p-eagle": (PEagleDraftModel, LlamaConfig, {}),
    "p-eagle-qwen3": (PEagleDraftModel, Qwen3Config, {"draft_vocab_size": 200, "norm_before_fc": True}),
    "eagle3": (Eagle3DraftModel, LlamaConfig, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
}
MASK_TOKEN_ID = 280


def build(target: str, case: str, num_depths: int, token_ids_NT: torch.Tensor) -> Any:
    """A new model of speculators for the target, two layers deep."""
    kind, layer_config, switches = CASES[case]
    its = AutoConfig.from_pretrained(target)
    layers = layer_config(
        vocab_size=its.vocab_size,
        hidden_size=its.hidden_size,
        intermediate_size=2 * its.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=its.num_attention_heads,
        num_key_value_heads=its.num_key_value_heads,
        head_dim=its.head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=its.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        attention_bias=False,
    )
    d2t = t2d = None
    draft_vocab_size = switches.get("draft_vocab_size", its.vocab_size)
    if draft_vocab_size < its.vocab_size:
        counts = torch.bincount(token_ids_NT.flatten(), minlength=its.vocab_size)
        chosen = counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
        d2t = chosen - torch.arange(draft_vocab_size)
        t2d = torch.zeros(its.vocab_size, dtype=torch.bool)
        t2d[chosen] = True
    return kind.from_training_args(
        layers,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=target,
        draft_vocab_size=draft_vocab_size,
        mask_token_id=MASK_TOKEN_ID,
        num_depths=num_depths,
        ttt_steps=num_depths,
        draft_attn_impl="sdpa",
        embed_requires_grad=True,
        **{key: value for key, value in switches.items() if key != "draft_vocab_size"},
    )


def batch_of(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One text as the model's forward takes it, shifted by speculators' own rule."""
    num_tokens = inputs["token_ids"].shape[1]
    loss_mask = torch.ones(num_tokens)
    loss_mask[:2] = 0
    batch = shift_batch(
        {
            "input_ids": inputs["token_ids"][row],
            "hidden_states": inputs["aux_hidden"][row],
            "verifier_last_hidden_states": inputs["last_hidden"][row],
            "loss_mask": loss_mask,
            "lengths": torch.tensor([num_tokens]),
            "position_ids": torch.arange(num_tokens),
        }
    )
    batch.pop("lengths")
    return {key: value[None] for key, value in batch.items()} | {
        "document_ids": torch.zeros(1, num_tokens - 1, dtype=torch.long)
    }


def train(model: Any, inputs: dict[str, torch.Tensor], num_depths: int, num_steps: int) -> list[float]:
    """AdamW over one text a step, in an order of its own; the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    options = {"num_depths": num_depths, "ttt_steps": num_depths, "down_sample_ratio": 0.8}
    # The default is a kernel for GPUs.
    options["loss_config"] = resolve_loss_config("kl_div", "eager")
    losses = []
    for _ in range(num_steps):
        _, loss, _ = model(**batch_of(inputs, random.randrange(len(inputs["token_ids"]))), **options)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("inputs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("num_depths", type=int)
    parser.add_argument("num_steps", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    inputs = load_file(arguments.inputs)
    model = build(arguments.target, arguments.case, arguments.num_depths, inputs["token_ids"]).float().train()
    losses = train(model, inputs, arguments.num_depths, arguments.num_steps)
    model.save_pretrained(arguments.out)
    print(json.dumps({"first_loss": sum(losses[:4]) / 4, "last_loss": sum(losses[-4:]) / 4}))


if __name__ == "__main__":
    main()
