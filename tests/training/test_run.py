"""A whole run on a tiny target: from a file of conversations to a drafter that loads, and what is refused before."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from peagle.drafter.card import read_card
from peagle.drafter.checkpoint import load_drafter
from peagle.errors import ConfigError, DataError
from peagle.training.config import TrainConfig
from peagle.training.conversations import read_conversations
from peagle.training.replay import replay
from peagle.training.run import train_drafter
from peagle.training.synthesis import SeatedGenerator, SynthesisConfig, answer_greedily
from tiny import tiny_target

RECIPE = Path(__file__).parents[2] / "recipes" / "embedded_drafter.py"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    """Greedy answers of the target to six prompts, as a file."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    prompts = [target.tokenizer(f"the user asks {n}")["input_ids"] for n in range(6)]
    with SeatedGenerator(target, 6, 48) as generator:
        path.write_text("".join(json.dumps(row) + "\n" for row in answer_greedily(generator, prompts, 20)))
    return path


def settings(data, output, **changes):
    values = {
        "held_out": data,
        "num_layers": 1,
        "num_draft_tokens": 3,
        "max_length": 40,
        "batch_size": 2,
        "num_steps": 4,
        "warmup_steps": 1,
        "log_every": 2,
        "save_every": 2,
        "compile": "off",
    }
    return TrainConfig(data=data, output=output, **(values | changes))


def ignore(step, metrics):
    pass


def metrics_of(output):
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(target, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished") / "drafter"
    calls = []
    drafter = train_drafter(target, settings(data, output), lambda step, metrics: calls.append((step, metrics)))
    return output, drafter, calls


def test_the_finished_directory_loads_and_drafts_as_trained(target, data, finished):
    output, drafter, _ = finished
    loaded = load_drafter(output, target)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-2, rtol=1e-2, msg=name)
    rows = read_conversations(data, target.tokenizer, max_length=64, vocab_size=target.vocab_size).conversations
    assert replay(target, loaded, rows, 3).num_drafts > 0


def test_the_directory_holds_the_drafter_and_the_runs_settings_and_metrics_only(finished):
    output, _, _ = finished
    assert sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()) == [
        "config.json",
        "drafter_card.json",
        "model.safetensors",
        "run/metrics.jsonl",
        "run/settings.json",
    ]


def test_the_card_says_what_was_trained_on_what_and_how_well_it_does(target, data, finished):
    output, _, _ = finished
    card = read_card(output)
    assert card.target.name == "tiny" and card.target.weights == target.fingerprint()
    assert card.method == "p-eagle" and card.num_draft_tokens == 3 and card.max_length == 40
    assert card.aux_layer_ids == target.default_aux_layer_ids
    assert card.data["file"] == "answers.jsonl" and card.data["num_conversations"] == 6
    assert card.data["num_cut"] == card.data["num_dropped"] == 0
    assert card.training["num_steps"] == 4 and "data" not in card.training
    assert card.provenance["versions"]["torch"]
    assert card.acceptance["held_out_replay"] == metrics_of(output)[-1]["replay"]


def test_metrics_hold_the_losses_and_a_replay_at_every_save(finished):
    output, _, calls = finished
    lines = metrics_of(output)
    assert [(line["step"], "loss" in line) for line in lines] == [(2, True), (2, False), (4, True), (4, False)]
    assert len(lines[0]["accuracy_by_depth"]) == 3 and lines[0]["learning_rate"] > 0
    record = lines[1]["replay"]
    assert record["num_drafts"] > 0 and len(record["per_position"]) == 3
    assert record["acceptance_length"] == pytest.approx(1 + sum(record["per_position"]), abs=1e-3)
    assert [step for step, _ in calls] == [1, 2, 3, 4]
    assert [metrics is not None for _, metrics in calls] == [False, True, False, True]
    assert calls[1][1] == lines[0]


def test_an_interrupted_run_ends_with_the_same_drafter_and_card(target, data, finished, tmp_path):
    def interrupt(step, metrics):
        if step == 3:
            raise KeyboardInterrupt

    output = tmp_path / "drafter"
    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, settings(data, output), interrupt)
    assert not (output / "model.safetensors").exists()
    train_drafter(target, settings(data, output), ignore)
    assert (output / "model.safetensors").read_bytes() == (finished[0] / "model.safetensors").read_bytes()
    assert read_card(output).acceptance == read_card(finished[0]).acceptance
    assert [line.get("loss") for line in metrics_of(output)] == [line.get("loss") for line in metrics_of(finished[0])]


@pytest.mark.parametrize("place", ["replay", "save_drafter"])
def test_a_run_stopped_after_its_last_step_is_only_finished(target, data, finished, tmp_path, monkeypatch, place):
    output = tmp_path / "drafter"

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"peagle.training.run.{place}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(target, settings(data, output, save_every=100), ignore)
    steps = []
    train_drafter(target, settings(data, output, save_every=100), lambda step, metrics: steps.append(step))
    assert steps == [], "no step is run again"
    assert read_card(output).acceptance == read_card(finished[0]).acceptance


def test_a_run_without_held_out_conversations_claims_no_acceptance(target, data, tmp_path):
    train_drafter(target, settings(data, tmp_path, held_out=None, num_steps=1), ignore)
    assert read_card(tmp_path).acceptance == {}
    assert [list(line)[:2] for line in metrics_of(tmp_path)] == [["step", "loss"]]


def test_layers_tapped_for_another_drafter_do_not_become_the_default(data, tmp_path):
    target = tiny_target()
    target.tap((0, 1))
    train_drafter(target, settings(data, tmp_path, num_steps=1, held_out=None), ignore)
    assert read_card(tmp_path).aux_layer_ids == target.default_aux_layer_ids == target.aux_layer_ids
    other = tmp_path / "other"
    train_drafter(target, settings(data, other, num_steps=1, held_out=None, aux_layer_ids=(1, 3)), ignore)
    assert read_card(other).aux_layer_ids == (1, 3)


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_bad_settings_and_data_are_refused_before_anything_is_written(target, data, tmp_path):
    prompt_only = written(tmp_path / "prompt_only.jsonl", {"prompt_ids": list(range(3, 60)), "answer_ids": [5, 6]})
    one_token = written(tmp_path / "one_token.jsonl", {"prompt_ids": [4, 5, 6], "answer_ids": [7]})
    cases = [
        ({"max_length": 513}, ConfigError, "max_length 513 exceeds the target's 512", "use at most 512"),
        ({"num_layers": 9}, ConfigError, "num_layers 9 exceeds the target's 8", "init = random"),
        ({"data": tmp_path / "no.jsonl"}, DataError, "no file at", "existing file"),
        ({"held_out": tmp_path / "no.jsonl"}, DataError, "no file at", "existing file"),
        ({"data": prompt_only}, DataError, "none of its 1 rows has an answer token", "raise max_length"),
        ({"data": one_token}, DataError, "no row has an answer of two tokens or more", "longer answers"),
        ({"aux_layer_ids": (2, 8)}, ConfigError, "aux_layer_ids must", "default"),
        ({"mask_token_id": 288}, ConfigError, "mask_token_id must be between 0 and 287", ""),
    ]
    output = tmp_path / "drafter"
    for changes, kind, words, hint in cases:
        values = {"data": data, "output": output} | changes
        with pytest.raises(kind) as caught:
            train_drafter(target, settings(**values), ignore)
        assert words in caught.value.message, changes
        assert hint in (caught.value.hint or ""), changes
        assert not output.exists(), changes


def test_an_unfinished_run_of_another_target_is_refused(target, data, tmp_path):
    def interrupt(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, settings(data, tmp_path), interrupt)
    with pytest.raises(ConfigError, match="target_weights was"):
        train_drafter(tiny_target(seed=5), settings(data, tmp_path), ignore)


def test_the_recipe_goes_from_prompts_to_a_replayed_drafter(data, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("embedded_drafter", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    monkeypatch.setattr(recipe, "load_target", lambda name: tiny_target())
    short = SynthesisConfig(system_prompts=("Be brief.",), given_share=1.0, max_question_tokens=8)
    monkeypatch.setattr(recipe, "SynthesisConfig", lambda: short)
    monkeypatch.setattr(recipe, "NUM_ANSWER_TOKENS", 16)
    given = written(tmp_path / "given.jsonl", *({"prompt": f"the user asks {n}"} for n in range(40)))
    work = tmp_path / "work"
    common = ["--work", str(work), "--num-seats", "8", "--max-length", "80"]
    recipe.main(["synthesize", *common, "--given", str(given), "--seconds", "2"])
    rows = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    assert rows and all(len(row["prompt_ids"]) + len(row["answer_ids"]) <= 80 for row in rows)
    recipe.main(["answer", *common, "--prompts", f"asked={given}"])
    (work / "held_out.jsonl").write_text((work / "answers-asked.jsonl").read_text())
    recipe.main(["train", "replay", *common, "--num-steps", "2", "--batch-size", "2", "--num-layers", "1"])
    output = capsys.readouterr().out
    assert "asked: 40 answers of 40 prompts" in output
    assert "answers-asked K=7 AL=" in output and "held_out K=3 AL=" in output
