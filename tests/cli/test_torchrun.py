"""`torchrun -m peagle train`: the command line in several processes."""

import json
import os
import subprocess
import sys

import pytest

from peagle.compare import acceptance

RECIPE = "num_layers = 1\nnum_draft_tokens = 3\nmax_length = 48\nbatch_size = 4\nnum_steps = 4\nlog_every = 2\n"


@pytest.fixture
def arguments(models, tmp_path):
    rows = [{"prompt": f"Count to {n}.", "answer": " ".join(map(str, range(1, n + 1)))} for n in range(5, 17)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    data, recipe = str(tmp_path / "data.jsonl"), str(tmp_path / "recipe.toml")
    return ["train", "--recipe", recipe, "--data", data, "--held-out", data, "--target", str(models / "target")]


def losses(output):
    lines = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_two_processes_make_the_drafter_of_one_and_only_the_first_talks(peagle, arguments, tmp_path, monkeypatch):
    # As in the processes, which tests cannot patch.
    monkeypatch.setattr(acceptance, "TRAINING_PROMPTS", 8)
    monkeypatch.setattr(acceptance, "TRAINING_MAX_TOKENS", 32)
    assert peagle(*arguments, "--output", str(tmp_path / "one")).status == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "peagle", *arguments]
    result = subprocess.run(
        [*command, "--output", str(tmp_path / "two"), "--parallel", "fsdp", "--features", "cached"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'two'}\n"
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    cards = [json.loads((tmp_path / name / "drafter_card.json").read_text()) for name in ("one", "two")]
    assert cards[0]["target"] == cards[1]["target"]
    assert cards[0]["acceptance"] == cards[1]["acceptance"]
    assert peagle("doctor", str(tmp_path / "two"), *arguments[-2:]).status == 0
