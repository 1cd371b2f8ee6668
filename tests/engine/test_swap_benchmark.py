"""`benchmarks/swap_in_flight.py`: on a tiny target a swap fails no stream and changes no answer."""

import json
import runpy
from pathlib import Path

import pytest

from harness.tiny_models import tiny_target, write_drafter, write_target

MAIN = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "swap_in_flight.py"))["main"]


@pytest.mark.slow
def test_a_swap_in_flight_fails_no_stream_and_changes_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target(num_layers=4)
    write_target(target, tmp_path / "target")
    write_drafter(target, tmp_path / "drafter")
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": f"ask {n}"}) + "\n" for n in range(3)))
    command = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--streams", "5"]
    assert MAIN([*command, "--prompts", str(tmp_path / "asked.jsonl"), "--max-tokens", "40"]) == 0
    shown = capsys.readouterr().out
    assert "swapped with " in shown and "swapped with 0" not in shown
    assert "5 streams, one swap: 0 failed, 0 changed, 0 differ at a near tie" in shown
