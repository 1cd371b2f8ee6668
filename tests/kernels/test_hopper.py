"""Our kernels compile for an H200 on machines without a GPU, with the Triton that is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200_and_fits_into_its_shared_memory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "harness.hopper_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "121 products and kernels"
