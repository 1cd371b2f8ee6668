"""The recipes that ship: each is one of settings that exist, and says what it is for."""

from pathlib import Path

import pytest

from peagle.config import from_toml
from peagle.training.config import TrainConfig

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
ABSENT = {"data": Path("data"), "output": Path("drafter")}


def test_there_is_a_recipe_for_each_kind_of_target():
    names = ["dense-8b", "embedded", "gpt-oss-20b", "long-context", "moe-30b"]
    assert [path.stem for path in RECIPES] == names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_leaves_data_and_output_to_the_user(path):
    config = from_toml(TrainConfig, path, absent=ABSENT)
    assert (config.data, config.output) == (ABSENT["data"], ABSENT["output"])
    assert config.num_layers == 4 and config.num_draft_tokens >= 8


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_use_it_on_what_how_long_and_what_to_expect(path):
    text = path.read_text()
    assert f"peagle train --recipe recipes/{path.name}" in text
    for word in ("# Hardware ", "# Time ", "# Expect "):
        assert word in text
