"""The gate with vLLM itself: it drafts the same tokens as the reading rules that we re-state, and a fault is noticed.

Run by `make parity`; PEAGLE_VLLM_PYTHON names the interpreter of vLLM's environment.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from peagle.checkpoint import vllm
from peagle.checkpoint.card import card_of
from peagle.checkpoint.native import load_drafter
from peagle.compare.gate import Gate
from peagle.compare.vllm_parity import find_vllm_python
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    found = find_vllm_python()
    if found is None:
        pytest.skip("no vLLM: PEAGLE_VLLM_PYTHON names no interpreter")
    return found


@pytest.fixture(scope="module")
def target() -> HFTarget:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a real model, unlike those of the other tests
    return load_target(dtype="float32", device="cpu")


def test_the_shipped_drafter_passes_with_vllm_itself(target: HFTarget, vllm_python: Path) -> None:
    verdict = Gate(target.shipped_drafter, target, "vllm", vllm_python=vllm_python).run()
    assert verdict.passed, verdict.failure
    assert verdict.unchecked == []
    print(verdict.checks[-1].found)


def test_vllm_itself_takes_the_mask_token_key_that_we_say_it_takes(
    target: HFTarget, vllm_python: Path, tmp_path: Path
) -> None:
    """Of keys that disagree the first wins, by our rules and, as the draft tokens show, in vLLM."""
    drafter = load_drafter(None, target)
    exported = vllm.write(drafter, target, card_of(drafter, target), tmp_path / "drafter")
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | dict.fromkeys(("pard_token", "ptd_token_id"), 1000)))
    verdict = Gate(exported, target, "vllm", vllm_python=vllm_python).run()
    assert verdict.passed, verdict.failure
    assert verdict.checks[-1].name == "vLLM itself" and verdict.checks[-1].status == "pass"
