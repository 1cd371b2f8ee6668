"""Judge: answers questions about speculators' P-EAGLE parts, one JSON line for each line read.

Runs inside speculators' own environment and imports nothing of peagle.

    {"ask": "versions"}
    {"ask": "slots", "loss_mask": [T], "num_depths": K, "retention": r, "floor": f, "seed": s}   -> anchor, depth [S]
    {"ask": "mask", "anchor": [S], "depth": [S], "document": [T]}                                -> visible [S, S]
    {"ask": "loss", "kind": "kl_div" or a JSON dict, "logits": [S, U], "targets": [S, U], "loss_mask": [T],
     "anchor": [S], "depth": [S], "num_depths": K}                                 -> loss, correct and counted by depth
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.peagle.attention import create_peagle_mask_mod
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.models.peagle.metrics import compute_metrics


def versions(_: dict[str, Any]) -> dict[str, Any]:
    return {name: version(name) for name in ("speculators", "torch", "transformers")}


def slots(question: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(question["seed"])
    mask = torch.tensor([question["loss_mask"]])
    numbers = (question["num_depths"], question["retention"], question["floor"])
    anchor, depth = generate_cod_sample_indices(mask.shape[1], mask, *numbers)
    return {"anchor": anchor.tolist(), "depth": depth.tolist()}


def mask(question: dict[str, Any]) -> dict[str, Any]:
    anchor, depth, document = (torch.tensor(question[name]) for name in ("anchor", "depth", "document"))
    index = torch.arange(len(anchor))
    is_visible = create_peagle_mask_mod(anchor, depth, document)(0, 0, index[:, None], index[None, :])
    return {"visible": is_visible.int().tolist()}


def loss(question: dict[str, Any]) -> dict[str, Any]:
    logits, targets = (torch.tensor([question[name]]) for name in ("logits", "targets"))
    anchor, depth = (torch.tensor(question[name]) for name in ("anchor", "depth"))
    found, metrics = compute_metrics(
        logits,
        targets,
        torch.tensor([question["loss_mask"]]),
        anchor,
        depth,
        question["num_depths"],
        resolve_loss_config(question["kind"], "eager"),
    )
    by_depth = range(question["num_depths"])
    return {
        "loss": found.item(),
        "correct": [int(metrics[f"position_{number}_acc_sum"]) for number in by_depth],
        "counted": [int(metrics[f"position_{number}_acc_total"]) for number in by_depth],
    }


def main() -> None:
    answers = {"versions": versions, "slots": slots, "mask": mask, "loss": loss}
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answers[question["ask"]](question)), flush=True)


if __name__ == "__main__":
    main()
