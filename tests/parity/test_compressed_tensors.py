"""Few-bit weights as the official compressed-tensors package decompresses them, run in vLLM's environment.

It also converts AutoAWQ's. It computes in the dtype of the scales, so for 16 bits its numbers are ours, rounded.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.few_bit_models import FEW_BIT, store_in_few_bits
from harness.tiny_models import tiny_target, write_target
from peagle.targets.load import load_target

pytestmark = pytest.mark.parity

PYTHON = os.environ.get("PEAGLE_VLLM_PYTHON", ".venv-vllm/bin/python")
JUDGE = Path(__file__).with_name("decompress_compressed_tensors.py")
NAMES = [name for name, form in FEW_BIT.items() if form.config["quant_method"] == "compressed-tensors"] + ["awq"]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each format, with what the package makes of it in `judged.out`."""
    root = tmp_path_factory.mktemp("few-bit")
    for name in NAMES:
        write_target(tiny_target(num_layers=2, tie_word_embeddings=False), root / name)
        store_in_few_bits(root / name, name)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [PYTHON, str(JUDGE), *(str(root / name) for name in NAMES)],
        capture_output=True,
        text=True,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return root


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_compressed_tensors_decompresses(name: str, judged: Path) -> None:
    theirs = load_file(judged / name / "judged.out")
    ours = load_target(judged / name, dtype="float32", device="cpu").model.state_dict()
    assert len(theirs) == 13
    assert not [key for key, value in theirs.items() if not torch.equal(ours[key].to(value.dtype), value)]
