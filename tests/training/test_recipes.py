"""The recipes that ship: each is one of settings that exist, and says what it is for."""

import importlib.util
from pathlib import Path

import pytest

from harness.tiny_models import tiny_target
from peagle.config import from_toml
from peagle.console.recipe import DIRECTORY
from peagle.data.config import describe_file
from peagle.data.shards import read_manifest
from peagle.errors import ConfigError
from peagle.objective.config import TrainConfig

RECIPES = sorted(DIRECTORY.glob("*.toml"))
SCRIPT = Path(__file__).parents[2] / "recipes" / "embedded_drafter.py"
ABSENT = {"data": Path("data"), "output": Path("drafter")}


def test_there_is_a_recipe_for_each_kind_of_target():
    names = ["dense-8b", "embedded", "embedded-32", "embedded-long", "gpt-oss-20b", "long-context", "moe-30b"]
    assert sorted(path.stem for path in RECIPES) == names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_leaves_data_and_output_to_the_user(path):
    config = from_toml(TrainConfig, path, absent=ABSENT)
    assert (config.data, config.output) == (ABSENT["data"], ABSENT["output"])
    assert config.num_layers == 4 and config.num_draft_tokens >= 8


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_use_it_on_what_how_long_and_what_to_expect(path):
    text = path.read_text()
    assert f"peagle train --recipe {path.stem} " in text
    for word in ("# Hardware ", "# Time ", "# Expect "):
        assert word in text


def test_the_script_tells_which_prompt_files_were_answered_and_refuses_others(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("embedded_drafter", SCRIPT)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    monkeypatch.setattr(recipe, "load_target", lambda name: tiny_target(num_layers=2))
    monkeypatch.setattr(recipe, "NUM_ANSWER_TOKENS", 4)
    asked, changed = tmp_path / "asked.txt", tmp_path / "changed.txt"
    asked.write_text("".join(f"the user asks {number}\n" for number in range(9)))
    changed.write_text("the user asks something else\n")
    work = tmp_path / "work"
    common = ["--work", str(work), "--max-batch", "4", "--max-length", "240", "--num-tokens", "20"]
    recipe.main(["synthesize", "answer", *common, "--given", str(asked), "--prompts", f"set={asked}"])
    for directory in (work / "data", work / "data" / "held_out"):
        assert read_manifest(directory)["settings"]["given"] == [describe_file(asked)]
    answered = read_manifest(work / "answers-set")["settings"]["prompts"]
    assert answered == [describe_file(asked) | {"limit": recipe.NUM_REPLAYED}]
    with pytest.raises(ConfigError, match=r"given was .*asked\.txt.*, is .*changed\.txt"):
        recipe.main(["synthesize", *common, "--given", str(changed)])
    with pytest.raises(ConfigError, match=r"prompts was .*asked\.txt.*, is .*changed\.txt"):
        recipe.main(["answer", *common, "--prompts", f"set={changed}"])
