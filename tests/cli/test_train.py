"""`peagle train`: recipes and flags, a finished drafter that serves, and runs that are stopped and go on."""

import json
import re
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from peagle.training.trainer import Trainer

RECIPE = """
num_layers = 1
num_draft_tokens = 2
num_steps = 4
batch_size = 2
max_length = 48
warmup_steps = 1
save_every = 100
log_every = 2
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "conversations.jsonl"
    rows = [{"prompt": f"the user {index}", "answer": "the answer of the user"} for index in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def train(peagle, models, data, recipe):
    def call(output, *argv):
        chosen = ("--target", models / "target", "--dtype", "float32", "--recipe", recipe, "--data", data)
        return peagle("train", *chosen, "--output", output, *argv)

    return call


def test_a_recipe_and_flags_make_a_drafter_that_answers(train, peagle, models, tmp_path):
    result = train(tmp_path / "drafter")
    assert result.status == 0, result.err
    assert result.out == f"{tmp_path / 'drafter'}\n", "stdout is where the drafter is"
    assert "training on 6 conversations" in result.err and "step 4/4: loss " in result.err
    ending = result.err.splitlines()[-4:]
    assert ending[0].startswith("acceptance length ") and " on mixed_prompts; by position " in ending[0]
    drafter = tmp_path / "drafter"
    assert ending[1:] == [
        f"the drafter is in {drafter}. Next:",
        f"  peagle eval --drafter {drafter}",
        f"  peagle serve --drafter {drafter}",
    ]
    assert ", acc@depth 0." in result.err and " tokens/s, " in result.err and " steps/s, ETA 0:00:00" in result.err
    card = json.loads((tmp_path / "drafter" / "drafter_card.json").read_text())
    assert card["num_draft_tokens"] == 2 and card["training"]["num_steps"] == 4
    chosen = ("--target", models / "target", "--dtype", "float32", "--drafter", tmp_path / "drafter")
    answered = peagle("generate", "the user", *chosen, "--compare", "--json", "--max-tokens", 8)
    assert answered.status == 0 and answered.json["identical_to_plain"] is True


@pytest.mark.slow
def test_a_flag_beside_the_recipe_wins(train, tmp_path):
    assert train(tmp_path / "drafter", "--num-steps", 1).status == 0
    card = json.loads((tmp_path / "drafter" / "drafter_card.json").read_text())
    assert card["training"]["num_steps"] == 1 and card["training"]["batch_size"] == 2


def test_an_option_that_only_recipes_have_names_the_key(train, tmp_path):
    for option in ("--weight-decay=0.1", "--no-fc-norm"):
        result = train(tmp_path / "drafter", option)
        key = option.removeprefix("--no-").removeprefix("--").partition("=")[0].replace("-", "_")
        assert result.status == 2 and f"error: unknown option {option.partition('=')[0]}\n" in result.err
        assert f"hint: set `{key}` in a recipe file: --recipe FILE.toml" in result.err


@pytest.mark.slow
def test_a_recipe_can_hold_everything(peagle, models, data, recipe, tmp_path):
    recipe.write_text(f"data = '{data}'\noutput = '{tmp_path / 'out'}'\n{RECIPE}")
    result = peagle("train", f"--recipe={recipe}", "--target", models / "target", "--dtype", "float32")
    assert result.status == 0 and result.out == f"{tmp_path / 'out'}\n"


def test_what_neither_recipe_nor_flags_give_is_asked_for(peagle, recipe):
    result = peagle("train", "--recipe", recipe)
    assert result.status == 2 and "--data" in result.err and "--output" in result.err


def test_the_recipe_shows_in_the_help_as_the_defaults(peagle, recipe):
    recipe.write_text(RECIPE + "checkpoint_activations = true\n")
    text = peagle("train", "--recipe", recipe, "--help-all").out
    assert "(default: 4)" in text.split("--num-steps")[1].splitlines()[0]
    assert "to save memory (default: True)" in re.sub(r"[│\s]+", " ", text)


def test_a_recipe_that_ships_is_taken_by_name(peagle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = peagle("train", "--recipe", "dense-8b", "--help").out
    assert "(default: 40000)" in shown.split("--num-steps")[1].splitlines()[0], "its settings are the defaults"
    refused = peagle("train", "--recipe", "nosuch", "--data", "data", "--output", "out")
    assert refused.status == 2 and "no recipe 'nosuch'" in refused.err
    assert "names: dense-8b, embedded, embedded-32, embedded-long, gpt-oss-20b, long-context, moe-30b" in refused.err


def test_an_unknown_key_is_refused_with_the_nearest_name_and_nothing_is_written(train, recipe, tmp_path):
    recipe.write_text(RECIPE + "learning_rat = 0.1\n")
    result = train(tmp_path / "drafter")
    assert result.status == 2 and result.out == ""
    assert result.err == (f"error: {recipe}: unknown key 'learning_rat'\nhint: did you mean 'learning_rate'?\n")
    assert not (tmp_path / "drafter").exists()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_ends_where_an_undisturbed_one_does(train, tmp_path, monkeypatch):
    assert train(tmp_path / "undisturbed").status == 0
    steps = []
    train_step = Trainer.train_step

    def interrupt_before_the_third(self, batch):
        if len(steps) == 2:
            raise KeyboardInterrupt
        steps.append(train_step(self, batch))

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupt_before_the_third)
        stopped = train(tmp_path / "drafter")
    assert stopped.status == 130 and "interrupted; progress is saved" in stopped.err and stopped.out == ""
    assert not (tmp_path / "drafter" / "model.safetensors").exists()

    refused = train(tmp_path / "drafter", "--learning-rate", 0.5)
    assert refused.status == 2 and "learning_rate was 0.001, is 0.5" in refused.err

    result = train(tmp_path / "drafter")
    assert result.status == 0 and "resuming at step 2" in result.err
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("undisturbed", "drafter"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_sigterm_saves_the_state_and_exits_with_143(models, data, recipe, tmp_path):
    output = tmp_path / "drafter"
    options = ("--target", models / "target", "--dtype", "float32", "--recipe", recipe, "--data", data)
    argv = ["train", *options, "--output", output, "--num-steps", 100_000]
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle", *map(str, argv)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    with process.stderr:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("step "):
                process.send_signal(signal.SIGTERM)
    assert process.wait() == 143, lines
    assert "terminated; progress is saved, rerun the command to resume" in lines[-1]
    assert (output / "run" / "state.pt").exists()


@pytest.mark.slow
def test_held_out_conversations_give_an_acceptance_on_the_card(train, data, tmp_path):
    assert train(tmp_path / "drafter", "--held-out", data, "--num-steps", 1).status == 0
    card = json.loads((tmp_path / "drafter" / "drafter_card.json").read_text())
    assert card["acceptance"]["held_out_replay"]["acceptance_length"] >= 1


@pytest.mark.slow
def test_one_command_goes_from_prompts_to_a_checked_drafter(peagle, models, recipe, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the user {index}"}) + "\n" for index in range(60)))
    chosen = ("--target", models / "target", "--dtype", "float32", "--recipe", recipe, "--max-length", 64)
    result = peagle("train", *chosen, "--data", prompts, "--output", tmp_path / "drafter", "--num-held-out", 2)
    assert result.status == 0, result.err
    assert result.out == f"{tmp_path / 'drafter'}\n"
    assert "holds prompts: the target answers them first" in result.err
    card = json.loads((tmp_path / "drafter" / "drafter_card.json").read_text())
    assert card["data"]["made_by"] == "regenerate" and card["data"]["held_out"]["num"] == 2
    assert card["data"]["num_conversations"] <= 58 and card["data"]["settings"]["max_length"] == 64
    record = card["acceptance"]["held_out_replay"]
    assert record["num_drafts"] > 0 and record["num_draft_tokens"] == 2

    again = peagle(
        "train", *chosen, "--data", tmp_path / "drafter" / "data", "--output", tmp_path / "other", "--num-held-out", 2
    )
    assert again.status == 0, again.err
    other = json.loads((tmp_path / "other" / "drafter_card.json").read_text())
    assert other["data"] == card["data"] | {"name": "data"} and other["acceptance"] == card["acceptance"]


@pytest.mark.slow
def test_the_control_can_be_trained_and_gone_on_with(train, peagle, models, tmp_path):
    chosen = ("--method", "eagle3", "--num-layers", 1)
    assert train(tmp_path / "control", *chosen).status == 0
    further = train(tmp_path / "further", *chosen, "--from", tmp_path / "control")
    assert further.status == 0, further.err
    card = json.loads((tmp_path / "further" / "drafter_card.json").read_text())
    assert card["method"] == "eagle3" and card["training"]["from_drafter"]["name"] == "control"
    served = ("--target", models / "target", "--dtype", "float32", "--drafter", tmp_path / "further")
    answered = peagle("generate", "the user", *served, "--compare", "--json", "--max-tokens", 8)
    assert answered.status == 0 and answered.json["identical_to_plain"] is True


@pytest.mark.slow
def test_a_pair_head_is_trained_beside_a_drafter_and_served_with_it(train, peagle, models, tmp_path):
    shape = ("--num-layers", 2, "--num-draft-tokens", 4)
    result = train(tmp_path / "paired", "--from", models / "drafter", "--pair-head", 8, *shape)
    assert result.status == 0, result.err
    assert load_file(tmp_path / "paired" / "pair_head.safetensors")["left"].shape == (288, 8)
    served = ("--target", models / "target", "--dtype", "float32", "--drafter", tmp_path / "paired")
    answered = peagle("generate", "the user", *served, "--compare", "--json", "--max-tokens", 8)
    assert answered.status == 0 and answered.json["identical_to_plain"] is True
    refused = train(tmp_path / "other", "--pair-head", 8)
    assert refused.status == 2 and "pair_head requires a trained drafter" in refused.err and "--from" in refused.err


def test_what_cannot_be_gone_on_from_is_explained(train, tmp_path, models):
    refused = train(tmp_path / "drafter", f"--from={models / 'drafter'}")
    assert refused.status == 2 and "num_layers was 2, is 1 in the settings" in refused.err
    refused = train(tmp_path / "drafter", "--from", models / "stranger")
    assert refused.status == 2 and "cannot train from" in refused.err
    assert not (tmp_path / "drafter").exists()
