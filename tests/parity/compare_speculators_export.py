"""Drafters of ours written in both layouts, loaded by speculators and served by vLLM: the same drafts as here.

    python compare_speculators_export.py --speculators-python PY --vllm-python PY [--json OUT.json]

Together the two drafters have what goes wrong on such ways: norms of each aux state, two aux layers instead of three,
a sliding window, embeddings with a trained mask row, heads with normed queries and keys, a draft vocabulary.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.model_families import trained_drafter
from parity.agreement_table import table
from parity.compare_speculators_trained import MAX_TOKENS, NUM_DRAFT_TOKENS, PROMPT_LENGTH, make_target, write_inputs
from peagle.checkpoint import speculators, vllm
from peagle.checkpoint.card import card_of
from peagle.checkpoint.native import load_drafter
from peagle.compare.vllm_parity import JUDGE, OurSide, compare, run_judge
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import choose_draft_vocab
from peagle.targets.hf import HFTarget

HERE = Path(__file__).resolve().parent
SIZES: dict[str, Any] = {"num_layers": 2, "head_dim": 32, "intermediate_size": 256, "mask_token_id": 280}


def run(command: list[Any]) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:2])} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def windowed_drafter(target: HFTarget, texts: list[list[int]]) -> Drafter:
    """Norms of each aux state, two of these, and a window of 8 positions."""
    target.tap((2, 5))
    window = {"sliding_window": 8, "sliding_layers": (0, 1)}
    return trained_drafter(target, texts, **SIZES, **window, fc_norm=True, embeddings="own", aux_layer_ids=(2, 5))


def qwen3_drafter(target: HFTarget, texts: list[list[int]]) -> Drafter:
    """Normed queries and keys, and a draft vocabulary of 200 tokens; learned as tokens of the whole one first."""
    target.tap((2, 4, 5))
    switches: dict[str, Any] = {"qk_norm": True, "norm_before_fc": True, "fc_norm": False}
    whole = trained_drafter(target, texts, **SIZES, **switches, aux_layer_ids=(2, 4, 5))
    offsets_U = choose_draft_vocab(torch.bincount(torch.tensor(texts).flatten(), minlength=target.vocab_size), 200)
    part = Drafter(dataclasses.replace(whole.config, draft_vocab_size=200), target.embedding_VD, target.head_VD)
    state = whole.state_dict()
    state["d2t"] = offsets_U
    state["lm_head.weight"] = state["lm_head.weight"][torch.arange(200) + offsets_U]
    part.load_state_dict(state)
    return part.eval().requires_grad_(False)


def judge_alone(python: Path, target: Path, drafter: Path, prompts: list[list[int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="peagle-judge-") as name:
        files = Path(name) / "prompts.json", Path(name) / "out.json"
        files[0].write_text(json.dumps(prompts))
        given = [target, drafter, NUM_DRAFT_TOKENS, files[0], MAX_TOKENS, files[1]]
        run([python, HERE / "judge_vllm_alone.py", JUDGE, *given])
        judged: dict[str, Any] = json.loads(files[1].read_text())
        return judged


def report(name: str, target: HFTarget, drafter: Path, judged: dict[str, Any]) -> dict[str, Any]:
    """Compare what vLLM did with what the directory does here."""
    agreement = compare(OurSide(target, load_drafter(drafter, target), NUM_DRAFT_TOKENS), judged, MAX_TOKENS)
    print(name, judged["loaded"], "\n" + "\n".join(table(agreement)))
    for line in agreement.faults[:10]:
        print(f"FAULT {line}")
    return {"loaded": judged["loaded"], "counters": judged["counters"], "faults": agreement.faults}


def check_loaded(python: Path, drafter: Path) -> dict[str, Any]:
    """What speculators' classes make of an exported directory, and what is wrong with it."""
    found: dict[str, Any] = json.loads(run([python, HERE / "load_speculators.py", drafter]).splitlines()[-1])
    expected = {
        "model": "PEagleDraftModel",
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "not_taken": [],
        "not_found": ["verifier_lm_head.weight", "verifier_norm.weight"],
        "difference": 0.0,
        "sliding_layers": [0, 1],
    }
    faults = [
        f"speculators has {key} {found[key]!r}, not {value!r}" for key, value in expected.items() if found[key] != value
    ]
    print("speculators:", found, *faults, sep="\n  ")
    return found | {"faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators-python", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="write what was found")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peagle-parity-") as name:
        folder = Path(name)
        target = make_target(folder / "target")
        prompts = write_inputs(target, folder / "inputs.safetensors")
        answers = target.model.generate(
            torch.tensor(prompts), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None
        )
        texts = answers.tolist()
        assert len(texts[0]) == PROMPT_LENGTH + MAX_TOKENS, "greedy texts are as long as asked for"
        found = {}

        drafter = windowed_drafter(target, texts)
        there = speculators.write(drafter, target, card_of(drafter, target), folder / "there", dtype=torch.float32)
        found["speculators"] = check_loaded(arguments.speculators_python.absolute(), there)
        judged = judge_alone(arguments.vllm_python.absolute(), folder / "target", there, prompts)
        found["vllm, speculators' layout"] = report("speculators' layout as vLLM's model", target, there, judged)

        drafter = qwen3_drafter(target, texts)
        own = vllm.write(drafter, target, card_of(drafter, target), folder / "own", dtype=torch.float32)
        vllm_python = arguments.vllm_python.absolute()
        judged = run_judge(
            vllm_python, folder / "target", own, prompts, MAX_TOKENS, NUM_DRAFT_TOKENS, parallel=drafter.config.parallel
        )
        found["vllm, its own layout"] = report("vLLM's own layout, Qwen3's layers", target, own, judged)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if any(case["faults"] for case in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
