"""A whole run on a tiny target: from conversations to a drafter that loads, and from one drafter to the next."""

import importlib.util
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.tiny_models import tiny_target
from harness.tiny_training import ignore
from harness.training_runs import greedy_answers, metrics_of, settings, shards, written
from peagle.checkpoint.card import read_card
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.data.conversations import read_conversations
from peagle.errors import CheckpointError, ConfigError
from peagle.training import initial_drafter
from peagle.training.replay import replay
from peagle.training.run import train_drafter

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[2] / "recipes" / "embedded_drafter.py"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return greedy_answers(target, tmp_path_factory.mktemp("data") / "answers.jsonl")


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
    found = sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())
    assert found[:6] == [
        "config.json",
        "curves.png",
        "drafter_card.json",
        "model.safetensors",
        "run/metrics.jsonl",
        "run/settings.json",
    ]
    assert len(found) == 7 and found[6].startswith("run/tensorboard/events.out.tfevents")


def test_the_card_says_what_was_trained_on_what_and_how_well_it_does(target, data, finished):
    output, _, _ = finished
    card = read_card(output)
    assert card.target.name == "tiny" and card.target.weights == target.fingerprint()
    assert card.method == "p-eagle" and card.num_draft_tokens == 3 and card.max_length == 40
    assert card.aux_layer_ids == target.default_aux_layer_ids
    assert card.data["name"] == "answers.jsonl" and card.data["num_conversations"] == 6
    assert card.data["num_cut"] == card.data["num_dropped"] == 0
    assert card.training["num_steps"] == 4 and "data" not in card.training
    assert card.provenance["versions"]["torch"]
    rows = read_conversations(data, target.tokenizer, max_length=64, vocab_size=target.vocab_size).conversations
    result = replay(target, load_drafter(output, target), rows, 3)
    record = card.acceptance["held_out_replay"]
    assert record["num_drafts"] == result.num_drafts > 0 and record["num_draft_tokens"] == 3
    assert record["acceptance_length"] == pytest.approx(result.acceptance_length, abs=1e-4)
    assert card.data["held_out"] == {"name": "answers.jsonl", "num": 6, "num_greedy": 6}
    for ranges in record["by_length"].values():
        assert sum(found["num_drafts"] for found in ranges.values()) == record["num_drafts"]
    assert record["by_length"].keys() == {"prompt", "answer", "text"}
    saved = [line["replay"] for line in metrics_of(output) if "replay" in line]
    assert saved[-1] == record and all("by_length" in line for line in saved), "measured at every save"


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


def test_a_run_without_held_out_conversations_has_the_baseline_alone(target, data, tmp_path):
    train_drafter(target, settings(data, tmp_path, held_out=None, num_steps=1), ignore)
    entries = read_card(tmp_path).acceptance
    assert {name: entry["temperature"] for name, entry in entries.items()} == {"baseline": 0, "baseline_sampled": 1}
    for entry in entries.values():
        assert entry["kind"] == "decoded" and entry["num_draft_tokens"] == len(entry["per_position"])
    assert [list(line)[:2] for line in metrics_of(tmp_path)] == [["step", "loss"]]


def test_the_control_is_trained_with_the_same_command(target, data, tmp_path):
    drafter = train_drafter(target, settings(data, tmp_path, method="eagle3"), ignore)
    card, loaded = read_card(tmp_path), load_drafter(tmp_path, target)
    assert card.method == loaded.config.method == drafter.config.method == "eagle3"
    assert loaded.config.norm_output and loaded.config == drafter.config
    assert card.acceptance["held_out_replay"]["num_drafts"] > 0
    raw = tmp_path / "raw"
    train_drafter(target, settings(data, raw, method="eagle3", norm_output=False, num_steps=1), ignore)
    assert not load_drafter(raw, target).config.norm_output


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_own_embeddings_are_trained_written_and_loaded(target, data, tmp_path, method):
    config = settings(data, tmp_path, embeddings="own", method=method, weight_decay=0.0)
    drafter = train_drafter(target, config, ignore)
    table = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    moved = (table != target.embedding_VD.to(torch.bfloat16)).any(1)
    rows = read_conversations(data, target.tokenizer, max_length=64, vocab_size=target.vocab_size).conversations
    seen = {int(token) for row in rows for token in row.token_ids}
    assert 0 < moved.sum() <= len(seen) + 1, "rows of the text's tokens and of the placeholder's, no others"
    loaded = load_drafter(tmp_path, target)
    assert loaded.config.embeddings == "own"
    assert torch.equal(loaded.embedding_VD[:268], drafter.embedding_VD[:268])
    exported = tmp_path / "exported"
    save_drafter(loaded, exported, read_card(tmp_path), full=True)
    assert torch.equal(load_file(exported / "model.safetensors")["embed_tokens.weight"], table)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_small_draft_vocabulary_is_chosen_from_the_answers_and_its_coverage_told(
    target, data, tmp_path, method, caplog
):
    caplog.set_level("INFO")
    train_drafter(target, settings(data, tmp_path, draft_vocab_size=20, method=method), ignore)
    rows = read_conversations(data, target.tokenizer, max_length=40, vocab_size=target.vocab_size).conversations
    counts = Counter(int(token) for row in rows for token in row.token_ids[row.loss_mask])
    most = sorted(sorted(counts, key=lambda token: (-counts[token], token))[:20])
    loaded = load_drafter(tmp_path, target)
    assert loaded.to_target_ids(torch.arange(20)).tolist() == most
    assert load_file(tmp_path / "model.safetensors")["d2t"].tolist() == [id - n for n, id in enumerate(most)]
    coverage = sum(counts[token] for token in most) / counts.total()
    assert read_card(tmp_path).data["draft_vocab"] == {"size": 20, "coverage": pytest.approx(coverage, abs=1e-5)}
    assert f"20 of 288 tokens, covers {100 * coverage:.2f}% of the answers" in caplog.text


def test_a_directory_that_does_not_accept_as_it_did_in_memory_is_reported_and_nothing_is_lost(
    target, data, tmp_path, monkeypatch
):
    def damaged(drafter, directory, card, *, full):
        save_drafter(drafter, directory, card, full=full)
        tensors = load_file(directory / "model.safetensors")
        tensors["norm.weight"] = tensors["norm.weight"].flip(0) * torch.linspace(-9, 9, 64).to(torch.bfloat16)
        save_file(tensors, directory / "model.safetensors")

    config = settings(data, tmp_path, num_steps=40, learning_rate=5e-3, save_every=40)
    with monkeypatch.context() as patch:
        patch.setattr("peagle.training.run.save_drafter", damaged)
        with pytest.raises(CheckpointError, match="differs from the trained drafter") as caught:
            train_drafter(target, config, ignore)
    assert "rerun the command to write the directory again" in caught.value.hint
    steps = []
    train_drafter(target, config, lambda step, metrics: steps.append(step))
    assert steps == [] and read_card(tmp_path).acceptance["held_out_replay"]["acceptance_length"] > 1


def test_training_goes_on_from_a_drafter(target, data, finished, tmp_path):
    changes = {"from_drafter": finished[0], "init": "random", "num_draft_tokens": 4, "num_steps": 2, "log_every": 1}
    first = []
    train_drafter(target, settings(data, tmp_path, **changes), lambda step, metrics: first.append(metrics["loss"]))
    anew = []
    fresh = changes | {"from_drafter": None, "init": "target"}
    train_drafter(target, settings(data, tmp_path / "new", **fresh), lambda step, metrics: anew.append(metrics["loss"]))
    assert first[0] < anew[0], "it begins better than a new one"
    card = read_card(tmp_path)
    assert card.training["from_drafter"]["name"] == "drafter" and len(card.training["from_drafter"]["weights"]) == 32
    assert card.num_draft_tokens == load_drafter(tmp_path, target).config.num_draft_tokens == 4
    assert card.training["from_drafter"]["training"] == read_card(finished[0]).training, "the whole way is on the card"
    assert "init" not in card.training, "nothing was initialized"


def test_the_earlier_drafter_is_hashed_once_and_may_go_away_during_the_run(
    target, data, finished, tmp_path, monkeypatch
):
    earlier, hashed = tmp_path / "earlier", []
    shutil.copytree(finished[0], earlier)
    facts_of = initial_drafter.earlier_facts
    monkeypatch.setattr("peagle.training.run.earlier_facts", lambda *args: hashed.append(args) or facts_of(*args))

    def remove_after_the_first_step(step, metrics):
        shutil.rmtree(earlier, ignore_errors=True)

    config = settings(data, tmp_path / "out", from_drafter=earlier, num_steps=2, save_every=1)
    train_drafter(target, config, remove_after_the_first_step)
    assert len(hashed) == 1
    assert read_card(tmp_path / "out").training["from_drafter"]["name"] == "earlier"


def test_settings_without_effect_are_told(target, data, tmp_path, caplog):
    train_drafter(target, settings(data, tmp_path, num_steps=1, parallel="fsdp"), ignore)
    assert "--parallel fsdp has no effect in a single process" in caplog.text
    assert "warmup_steps 1 >= num_steps 1: the learning rate never reaches its peak" in caplog.text


def test_training_goes_on_with_the_drafter_of_a_target_that_was_tuned_since(data, finished, tmp_path, caplog):
    tuned = tiny_target(seed=5)
    changes = {"from_drafter": finished[0], "num_steps": 1}
    train_drafter(tuned, settings(data, tmp_path, **changes), ignore)
    assert "its weights are not the ones the drafter was trained on" in caplog.text
    assert read_card(tmp_path).target.weights == tuned.fingerprint()


@pytest.mark.parametrize("held_out", [True, False])
def test_the_drafter_of_the_last_save_can_be_used_before_the_run_is_finished(target, data, tmp_path, held_out):
    def interrupt(step, metrics):
        if step == 3:
            raise KeyboardInterrupt

    changes = {"held_out": data} if held_out else {"held_out": None, "num_held_out": 0}
    config = settings(data, tmp_path / "unfinished", **changes)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, config, interrupt)
    saved = config.output / "run" / "drafter"
    assert read_card(saved).training["num_steps_done"] == 2
    if held_out:
        rows = read_conversations(data, target.tokenizer, vocab_size=target.vocab_size).conversations
        record = metrics_of(config.output)[1]["replay"]
        assert replay(target, load_drafter(saved, target), rows, 3).num_drafts == record["num_drafts"]
    other = settings(data, tmp_path / "other", from_drafter=saved, num_steps=1, **changes)
    train_drafter(target, other, ignore)
    train_drafter(target, config, ignore)
    assert not saved.exists() and "num_steps_done" not in read_card(config.output).training


def test_layers_tapped_for_another_drafter_do_not_become_the_default(data, tmp_path):
    target = tiny_target()
    target.tap((0, 1))
    train_drafter(target, settings(data, tmp_path, num_steps=1, held_out=None), ignore)
    assert read_card(tmp_path).aux_layer_ids == target.default_aux_layer_ids == target.aux_layer_ids
    other = tmp_path / "other"
    train_drafter(target, settings(data, other, num_steps=1, held_out=None, aux_layer_ids=(1, 3)), ignore)
    assert read_card(other).aux_layer_ids == (1, 3)


def test_greedy_rows_are_set_apart_where_none_are_given(target, tmp_path):
    data = shards(tmp_path / "data", target, [0.0, 0.7] * 40)
    train_drafter(target, settings(data, tmp_path / "out", held_out=None, num_held_out=3, num_steps=1), ignore)
    card = read_card(tmp_path / "out")
    assert card.data["held_out"] == {"name": "split off the data", "num": 3, "num_greedy": 3}
    assert card.data["num_conversations"] == 77 and card.data["num_answer_tokens"] == 77 * 18
    assert card.data["made_by"] == "synthesize" and card.data["settings"] == {"seed": 0}
    assert card.acceptance["held_out_replay"]["num_drafts"] > 0


def test_a_drafter_that_cannot_be_gone_on_from_is_refused(target, data, finished, tmp_path):
    output = tmp_path / "out"
    stranger = tiny_target(seed=5)
    stranger.tokenizer.add_tokens(["stranger"])
    cases = [
        ({"num_layers": 2}, target, ConfigError, "num_layers was 1, is 2 in the settings"),
        ({"method": "eagle3"}, target, ConfigError, "method was 'p-eagle', is 'eagle3'"),
        ({"fc_norm": False}, target, ConfigError, "fc_norm was True, is False in the settings"),
        ({"draft_vocab_size": 20}, target, ConfigError, "draft_vocab_size was 288, is 20 in the settings"),
        ({"aux_layer_ids": (0, 1, 2)}, target, ConfigError, "aux_layer_ids was (2, 4, 5), is (0, 1, 2)"),
        ({}, stranger, CheckpointError, "its tokenizer is another one"),
        ({"from_drafter": tmp_path / "no"}, target, CheckpointError, f"no directory {tmp_path / 'no'}"),
    ]
    for changes, chosen, kind, words in cases:
        values = {"data": data, "output": output, "from_drafter": finished[0]} | changes
        with pytest.raises(kind) as caught:
            train_drafter(chosen, settings(**values), ignore)
        assert "cannot train from" in caught.value.message and words in caught.value.message, changes
        assert not output.exists(), changes


def test_the_recipe_goes_from_prompts_to_a_replayed_drafter(data, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("embedded_drafter", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    monkeypatch.setattr(recipe, "load_target", lambda name: tiny_target())
    monkeypatch.setattr(recipe, "NUM_HELD_OUT", 2)
    monkeypatch.setattr(recipe, "NUM_ANSWER_TOKENS", 16)
    given = written(tmp_path / "given.jsonl", *({"prompt": f"the user asks {n}"} for n in range(40)))
    work = tmp_path / "work"
    common = ["--work", str(work), "--max-batch", "8", "--max-length", "240"]
    recipe.main(["synthesize", *common, "--given", str(given), "--num-tokens", "400"])
    recipe.main(["answer", *common, "--prompts", f"asked={given}"])
    few = ["num_steps=2", "batch_size=2", "num_layers=1", 'compile="off"']
    recipe.main(["train", "replay", *common, "--settings", *few])
    output = capsys.readouterr().out
    assert "asked: 40 answers of 40 prompts" in output
    assert "answers-asked K=7 AL=" in output and "held_out K=3 AL=" in output
