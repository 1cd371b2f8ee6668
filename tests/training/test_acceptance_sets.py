"""Acceptance by set: categories become sets, every form of drafts is measured, and the figures agree."""

import json
import runpy
from pathlib import Path

import pytest

from harness.tiny_models import tiny_target, write_drafter, write_target

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "acceptance_sets.py"))


def test_large_categories_are_sets_and_small_ones_belong_to_the_file(tmp_path: Path) -> None:
    categories = ["long"] * 20 + ["short"] * 3
    rows = [{"turns": [f"question {number}"], "category": name} for number, name in enumerate(categories)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = BENCHMARK["read_sets"]([str(tmp_path / "asked.jsonl")])
    assert {name: len(prompts) for name, prompts in sets.items()} == {
        "long": 20,
        "asked": 3,
        "lists": 20,
        "code": 20,
        "tables": 20,
        "copies": 20,
    }


@pytest.mark.slow
def test_every_form_is_measured_by_set_depth_and_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target(num_layers=4)
    write_target(target, tmp_path / "target")
    write_drafter(target, tmp_path / "drafter")
    command = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--limit", "2"]
    command += ["--chains", "3", "16"]
    command += ["--max-tokens", "12", "--max-batch", "8", "--json", str(tmp_path / "out.json")]
    BENCHMARK["main"]([*command, "--plot", str(tmp_path / "out.svg")])
    forms = json.loads((tmp_path / "out.json").read_text())["forms"]
    assert list(forms) == ["chain, K = 3", "tree, 31 nodes"], "the drafter was trained for 4"
    for sets in forms.values():
        assert list(sets) == ["lists", "code", "tables", "copies"]
        for own in sets.values():
            assert own["num_prompts"] == 2
            assert own["acceptance_length"] == pytest.approx(1 + sum(own["per_position"]), abs=1e-3)
            assert own["per_position"][0] == own["after_the_one_before"][0]
            assert sum(each["num_drafts"] for each in own["by_length"]["text"].values()) == own["num_drafts"]
    table = capsys.readouterr().out.splitlines()
    assert table[-5] == "acceptance length\tchain, K = 3\ttree, 31 nodes"
    assert "<svg" in (tmp_path / "out.svg").read_text()
