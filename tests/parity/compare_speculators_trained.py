"""Drafters trained and saved by speculators' own code, run here and in vLLM: the same drafts, the same acceptance.

    python compare_speculators_trained.py --speculators-python PY --vllm-python PY [--cases ...] [--json OUT.json]

Nothing of ours has touched the drafter directories: speculators makes them (`train_speculators.py`), vLLM serves them
by their own layout, and `load_drafter` reads them. Draft tokens are compared one by one with the reference decoder's,
and acceptance per position with the engine's. The target is small and random; the drafters learn a few of its texts by
heart, so that deep drafts are accepted as well as refused.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.tiny_models import tiny_target
from parity.agreement_table import table
from peagle.checkpoint.native import load_drafter
from peagle.compare.vllm_parity import Agreement, OurSide, compare, run_judge
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target

logging.set_verbosity_error()
logging.disable_progress_bar()

HERE = Path(__file__).resolve().parent
CASES = ("p-eagle", "p-eagle-qwen3", "eagle3")
NUM_DRAFT_TOKENS, NUM_STEPS, PROMPT_LENGTH, MAX_TOKENS = 4, 100, 8, 48
CLOSE = 0.02
"""how far the engine's acceptance at a position may be from vLLM's: a near-tie may go the other way"""


def make_target(directory: Path) -> HFTarget:
    """A random target whose heads are of a width that vLLM's kernels for CPUs have."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    target = tiny_target(**sizes)
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return load_target(str(directory), dtype="float32", device="cpu")


def write_inputs(target: HFTarget, path: Path) -> list[list[int]]:
    """Greedy texts with the target's states, for the trainer; returns their prompts."""
    prompts_NT = torch.randint(3, 260, (6, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    token_ids_NT = target.model.generate(
        prompts_NT, max_new_tokens=MAX_TOKENS + 8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    last: list[torch.Tensor] = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda module, arguments: last.append(arguments[0]))
    aux_hidden_NTA = target.forward(token_ids_NT).aux_hidden_BTA
    hook.remove()
    tensors = {"token_ids": token_ids_NT, "aux_hidden": aux_hidden_NTA, "last_hidden": last[0]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return prompts_NT.tolist()


def train(python: Path, target: Path, inputs: Path, out: Path, case: str) -> dict[str, float]:
    """Let speculators train and save a drafter; what it says is shown only when it fails."""
    command = [python, HERE / "train_speculators.py", target, inputs, out, case, NUM_DRAFT_TOKENS, NUM_STEPS]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    if done.returncode:
        raise SystemExit(f"speculators failed on {case}:\n{done.stderr[-4000:]}")
    losses: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def engine_rates(target: HFTarget, drafter: Path, prompts: list[list[int]]) -> list[float]:
    """Acceptance per position when the engine serves all prompts at once."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(target, drafter, NUM_DRAFT_TOKENS, max_batch=len(prompts), max_length=128, verify_tokens=0) as llm:
        found = [output.metrics.acceptance for output in llm.generate(prompts, params)]
    num_drafts = sum(acceptance.num_drafts for acceptance in found)
    return [
        sum(acceptance.accepted_per_position[position] for acceptance in found) / num_drafts
        for position in range(NUM_DRAFT_TOKENS)
    ]


def judged_rates(judged: dict[str, Any]) -> list[float]:
    """vLLM's acceptance per position, without what it accepted beyond the last token asked for."""
    accepted = []
    for request in judged["requests"]:
        num_emitted = 1
        for step in request["steps"]:
            accepted.append(min(step["num_accepted"], MAX_TOKENS - num_emitted))
            num_emitted += step["num_accepted"] + 1
    return [sum(count > position for count in accepted) / len(accepted) for position in range(NUM_DRAFT_TOKENS)]


def misread(drafter: Path, target: HFTarget) -> Drafter:
    """The drafter as somebody reads it who overlooks its rotary base: the comparison must see that."""
    copy = shutil.copytree(drafter, drafter.with_name(f"{drafter.name}-misread"))
    values = json.loads((copy / "config.json").read_text())
    values["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 100.0
    (copy / "config.json").write_text(json.dumps(values))
    return load_drafter(copy, target)


def run_peers(
    case: str, folder: Path, prompts: list[list[int]], arguments: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
    """Let speculators train one case and vLLM run it: the losses, and what vLLM did."""
    drafter = folder / case
    losses = train(arguments.speculators_python, folder / "target", folder / "inputs.safetensors", drafter, case)
    judged = run_judge(
        arguments.vllm_python,
        folder / "target",
        drafter,
        prompts,
        MAX_TOKENS,
        NUM_DRAFT_TOKENS,
        parallel=case != "eagle3",
    )
    return losses, judged


def judge(
    case: str, folder: Path, prompts: list[list[int]], losses: dict[str, float], judged: dict[str, Any]
) -> dict[str, Any]:
    """Run here what vLLM has run, and compare."""
    drafter = folder / case
    target = load_target(str(folder / "target"), dtype="float32", device="cpu")
    loaded = load_drafter(drafter, target)
    agreement = compare(OurSide(target, loaded, NUM_DRAFT_TOKENS), judged, MAX_TOKENS)
    if not compare(OurSide(target, misread(drafter, target), NUM_DRAFT_TOKENS), judged, MAX_TOKENS).faults:
        agreement.faults.append("the same drafter read with another rotary base was not noticed")
    if loaded.repairs:
        agreement.faults.append(f"it was read otherwise than it says: {loaded.repairs}")
    ours, theirs = engine_rates(target, drafter, prompts), judged_rates(judged)
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if abs(mine - other) > CLOSE:
            agreement.faults.append(f"the engine accepts {mine:.4f} of drafts {position + 1}, vLLM {other:.4f}")
    show(case, losses, agreement, ours, theirs)
    return {"losses": losses, "engine": ours, "vllm": theirs, "faults": agreement.faults, "ties": agreement.ties}


def show(case: str, losses: dict[str, float], agreement: Agreement, ours: list[float], theirs: list[float]) -> None:
    print(f"{case}: loss {losses['first_loss']:.2f} to {losses['last_loss']:.2f} in {NUM_STEPS} steps of speculators")
    print("\n".join(table(agreement)))
    rates = " ".join(f"{mine:.4f}/{other:.4f}" for mine, other in zip(ours, theirs, strict=True))
    print(f"engine/vLLM acceptance per position: {rates}")
    for line in agreement.faults[:10]:
        print(f"FAULT {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators-python", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="write what was found")
    arguments = parser.parse_args()
    for name in ("speculators_python", "vllm_python"):
        setattr(arguments, name, getattr(arguments, name).absolute())
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peagle-parity-") as name:
        folder = Path(name)
        prompts = write_inputs(make_target(folder / "target"), folder / "inputs.safetensors")
        with ThreadPoolExecutor(2) as pool:
            peers = pool.map(lambda case: run_peers(case, folder, prompts, arguments), arguments.cases)
            runs = dict(zip(arguments.cases, peers, strict=True))
        found = {case: judge(case, folder, prompts, *run) for case, run in runs.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if any(case["faults"] for case in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
