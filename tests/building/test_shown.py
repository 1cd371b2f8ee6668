"""What a finished build says: whether drafting pays, from which acceptance length, and which command comes next."""

import json

import pytest

from harness.measured_rates import CPU
from peagle.building.config import BuildSettings
from peagle.building.run import Build
from peagle.building.shown import verdict_lines
from peagle.targets.prices import price_of


def verdict(tmp_path, cells, **settings):
    """The verdict on cells of (concurrency, acceptance length, speedup)."""
    asked = BuildSettings(output=tmp_path, **settings)
    price, cost = price_of(None, 2.0), ["--price-per-hour", "2.0"]
    build = Build(asked, ["--target", "smol"], {}, None, None, print, price, cost)
    outcomes = {
        "data": {"num_answer_tokens": 600},
        "train": {"num_steps": 30},
        "eval": {"acceptance_length": 2.0, "workload": "own", "num_draft_tokens": 4},
        "lossless": {"lossless": True},
    }
    for stage, outcome in outcomes.items():
        build.state.begin(stage, [])
        build.state.end(stage, "finished", outcome)
    names = ("label", "concurrency", "acceptance_length", "speedup")
    cells = [dict(zip(names, ("auto", *cell), strict=True)) for cell in cells]
    (tmp_path / "bench.json").write_text(json.dumps({"cells": cells, "recommended": cells}))
    return "\n".join(verdict_lines(build, CPU))


def test_the_acceptance_length_that_is_needed_is_that_of_the_same_concurrency(tmp_path):
    said = verdict(tmp_path, [(1, 3.0, 0.5), (8, 1.8, 0.9)])
    assert "no: 0.90 times plain decoding at concurrency 8; here it would from an acceptance length of 2.00 on" in said


@pytest.mark.parametrize(("budget", "larger"), [(None, "4h"), ("1.5h", "6.0h"), ("20usd", "80usd")])
def test_the_next_command_repeats_the_settings_with_a_larger_budget(tmp_path, budget, larger):
    said = verdict(tmp_path, [(1, 1.8, 0.9)], budget=budget, data=tmp_path / "asked", num_layers=2, seed=3)
    assert (
        f"next: `peagle build --target smol --output {tmp_path} --budget {larger} --data {tmp_path / 'asked'} "
        "--num-layers 2 --seed 3 --price-per-hour 2.0 --from-stage data` adds to the text" in said
    )
