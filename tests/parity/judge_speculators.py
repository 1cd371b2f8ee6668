"""Judge: speculators' P-EAGLE training forward on given weights and inputs, written down slot by slot.

Runs inside speculators' own environment and imports nothing of peagle.

    python judge_speculators.py TARGET DRAFTER INPUTS.safetensors OUT.safetensors NUM_DEPTHS

DRAFTER is a directory in vLLM's layout. INPUTS holds one text of T tokens: `token_ids` [T], `aux_hidden` [T, A] (the
concatenated target states), `last_hidden` [T, D] (the state BEFORE the target's final norm) and `loss_mask` [T].
OUT holds the slots that speculators itself sampled, `anchor` and `depth` [S], its attention mask `visible` [S, S], its
draft logits [S, U], which slots count in the loss, and the loss.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle import core
from speculators.models.peagle.attention import create_peagle_mask_mod
from transformers import LlamaConfig

# speculators takes these from the target itself; a drafter directory need not repeat the target's head.
TARGET_KEYS = {"lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def build_drafter(target: str, drafter: Path, num_depths: int) -> Any:
    """speculators' model with the directory's weights, every one of them used and none left at a random value."""
    config = json.loads((drafter / "config.json").read_text())
    shape_keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "attention_bias",
    )
    shape = {key: config[key] for key in shape_keys if key in config}
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]}
    weights = {key: value.float() for key, value in load_file(drafter / "model.safetensors").items()}
    d2t, t2d = weights.pop("d2t", None), None
    weights.pop("t2d", None)
    if d2t is not None:
        t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
        t2d[torch.arange(len(d2t)) + d2t.long()] = True
    mask_token_id = next(config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id") if key in config)
    aux_layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    model = core.PEagleDraftModel.from_training_args(
        LlamaConfig(**shape, rope_parameters=rope),
        t2d=t2d,
        d2t=None if d2t is None else d2t.long(),
        verifier_name_or_path=target,
        draft_vocab_size=config["draft_vocab_size"],
        mask_token_id=mask_token_id,
        num_depths=num_depths,
        draft_attn_impl="sdpa",
        target_layer_ids=aux_layer_ids or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        norm_before_residual=config.get("norm_before_residual", False),
        norm_before_fc=config.get("norm_before_fc", False),
        fc_norm=config.get("fc_norm", False),
    )
    outcome = model.load_state_dict(weights, strict=False)
    assert not outcome.unexpected_keys, f"speculators does not know {outcome.unexpected_keys}"
    assert set(outcome.missing_keys) <= TARGET_KEYS, f"speculators misses {outcome.missing_keys}"
    return model.float().eval()


def run_forward(model: Any, inputs: dict[str, torch.Tensor], num_depths: int) -> dict[str, torch.Tensor]:
    """One training forward; what its metrics function is called with is what we want to know."""
    num_tokens = len(inputs["token_ids"])
    batch = shift_batch(
        {
            "input_ids": inputs["token_ids"],
            "hidden_states": inputs["aux_hidden"],
            "verifier_last_hidden_states": inputs["last_hidden"],
            "loss_mask": inputs["loss_mask"],
            "lengths": torch.tensor([num_tokens]),
            "position_ids": torch.arange(num_tokens),
        }
    )
    seen: dict[str, Any] = {}
    compute_metrics = core.compute_metrics

    def recording_metrics(**keywords: Any) -> Any:
        seen.update(keywords)
        return compute_metrics(**keywords)

    core.compute_metrics = recording_metrics
    document_ids = torch.zeros(1, num_tokens - 1, dtype=torch.long)
    with torch.no_grad():
        _, loss, _ = model(
            hidden_states=batch["hidden_states"][None],
            input_ids=batch["input_ids"][None],
            document_ids=document_ids,
            loss_mask=batch["loss_mask"][None],
            verifier_last_hidden_states=batch["verifier_last_hidden_states"][None],
            num_depths=num_depths,
            down_sample_ratio=0.7,
            down_sample_ratio_min=0.2,
            # The default is a kernel for GPUs.
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    anchor, depth = seen["anchor_pos"], seen["depth"]
    is_visible = create_peagle_mask_mod(anchor, depth, document_ids[0])
    index = torch.arange(len(anchor))
    return {
        "anchor": anchor,
        "depth": depth,
        "visible": is_visible(0, 0, index[:, None], index[None, :]),
        "logits": seen["logits"][0],
        "target_tokens": seen["targets"][0].argmax(-1),
        "in_loss": batch["loss_mask"][anchor + depth].bool(),
        "loss": loss.reshape(1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("num_depths", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = build_drafter(arguments.target, arguments.drafter, arguments.num_depths)
    found = run_forward(model, load_file(arguments.inputs), arguments.num_depths)
    from importlib.metadata import version

    versions = {name: version(name) for name in ("speculators", "torch", "transformers")}
    save_file({key: value.contiguous() for key, value in found.items()}, arguments.out, metadata=versions)


if __name__ == "__main__":
    main()
