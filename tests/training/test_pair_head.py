"""A pair head trained for a finished drafter: what changes, what does not, and what is refused."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from harness.model_families import trained_drafter
from harness.pair_heads import knowing_head
from harness.tiny_models import tiny_target
from harness.tiny_training import ignore, metrics_of
from peagle.checkpoint.card import card_of, read_card
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.compare.gate import Gate
from peagle.data.conversations import read_conversations
from peagle.engine.llm import LLM
from peagle.errors import CheckpointError, ConfigError
from peagle.objective.config import TrainConfig
from peagle.sampling_params import SamplingParams
from peagle.training.replay import replay
from peagle.training.run import train_drafter

DEPTHS, RANK = 4, 8
HEAD, WEIGHTS = "pair_head.safetensors", "model.safetensors"


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=4)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    """Greedy answers of the target to eight prompts, as a file."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    prompts = [target.tokenizer(f"the user asks {n}")["input_ids"] for n in range(8)]
    with LLM(target, None, max_length=64) as llm:
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    rows = [{"prompt_ids": p, "answer_ids": a, "temperature": 0} for p, a in zip(prompts, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rows(target, data):
    return read_conversations(data, target.tokenizer, max_length=64, vocab_size=target.vocab_size).conversations


@pytest.fixture(scope="module")
def earlier(target, rows, tmp_path_factory):
    """A drafter that is right about some of the answers."""
    texts = [row.token_ids.tolist() for row in rows]
    drafter = trained_drafter(target, texts, num_draft_tokens=DEPTHS, num_steps=25)
    directory = tmp_path_factory.mktemp("earlier") / "drafter"
    save_drafter(drafter, directory, card_of(drafter, target), full=False)
    return directory


def settings(data, earlier, output, **changes):
    values = {
        "held_out": data,
        "from_drafter": earlier,
        "pair_head": RANK,
        "num_layers": 1,
        "num_draft_tokens": DEPTHS,
        "max_length": 64,
        "batch_size": 4,
        "num_steps": 40,
        "learning_rate": 3e-2,
        "warmup_steps": 4,
        "log_every": 10,
        "save_every": 20,
        "compile": "off",
    }
    return TrainConfig(data=data, output=output, **(values | changes))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("projected", "free")])
def finished(request, target, data, earlier, tmp_path_factory):
    config = settings(data, earlier, tmp_path_factory.mktemp(request.param) / "drafter", pair_tables=request.param)
    return config, train_drafter(target, config, ignore)


def test_the_drafter_is_the_earlier_one_with_a_head_beside_it(target, earlier, finished):
    config, drafter = finished
    before, after = (load_file(directory / WEIGHTS) for directory in (earlier, config.output))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    stored = load_file(config.output / HEAD)
    assert [list(stored[name].shape) for name in ("left", "right")] == [[288, RANK], [288, RANK]]
    loaded = load_drafter(config.output, target)
    assert torch.equal(loaded.pair_head.left, drafter.pair_head.left)


def test_the_head_learns_and_the_card_says_what_it_gains(target, rows, earlier, finished):
    config, drafter = finished
    losses = [line["loss"] for line in metrics_of(config) if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    card = read_card(config.output)
    plain = replay(target, load_drafter(earlier, target), rows, DEPTHS)
    paired = replay(target, drafter, rows, DEPTHS)
    lengths = [
        card.acceptance[name]["acceptance_length"] for name in ("held_out_replay_without_pair_head", "held_out_replay")
    ]
    assert lengths == pytest.approx([plain.acceptance_length, paired.acceptance_length], abs=1e-4)
    assert lengths[1] > lengths[0] + 0.1
    with_head = {name for name, entry in card.acceptance.items() if entry.get("pair_head") == RANK}
    assert with_head == {"held_out_replay", "baseline", "baseline_sampled"}
    assert card.acceptance.keys() - with_head == {"held_out_replay_without_pair_head"}
    assert card.training["pair_head"] == RANK and card.training["from_drafter"]["name"] == "drafter"
    replayed = [line["replay"]["acceptance_length"] for line in metrics_of(config) if "replay" in line]
    assert replayed[-1] == lengths[1]


def test_replay_counts_what_decoding_with_the_head_counts(target, rows, finished):
    _, drafter = finished
    prompts = [row.token_ids[~row.loss_mask].tolist() for row in rows]
    with LLM(target, drafter, DEPTHS, max_length=80, verify_tokens=0) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
    assert sum((output.metrics.acceptance for output in outputs[1:]), outputs[0].metrics.acceptance) == replay(
        target, drafter, rows, DEPTHS
    )


def test_a_copy_with_a_head_passes_the_gate(target, finished):
    config, _ = finished
    verdict = Gate(config.output, target, "native").run()
    assert verdict.passed and not verdict.unchecked, verdict


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [pytest.param(None, marks=pytest.mark.slow), 120])
def test_an_interrupted_run_ends_with_the_same_head_without_the_earlier_drafter(
    target, data, earlier, tmp_path, vocabulary
):
    copied, short = tmp_path / "drafter", {"num_steps": 6, "save_every": 2, "draft_vocab_size": vocabulary}
    if vocabulary is None:
        shutil.copytree(earlier, copied)
    else:
        plain = {"from_drafter": None, "pair_head": None}
        train_drafter(target, settings(data, None, copied, **short | plain | {"num_steps": 30}), ignore)
    unbroken = settings(data, copied, tmp_path / "unbroken", **short)
    train_drafter(target, unbroken, ignore)
    config = dataclasses.replace(unbroken, output=tmp_path / "resumed")

    def interrupt(step, metrics):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, config, interrupt)
    assert load_drafter(config.output / "run" / "drafter", target).pair_head.rank == RANK
    shutil.rmtree(copied)
    train_drafter(target, config, ignore)
    for name in (WEIGHTS, HEAD):
        assert (config.output / name).read_bytes() == (unbroken.output / name).read_bytes()
    assert metrics_of(config) == metrics_of(unbroken)


@pytest.mark.slow
def test_training_the_drafter_further_drops_its_head(target, data, rows, earlier, tmp_path):
    drafter = load_drafter(earlier, target)
    drafter.pair_head = knowing_head(drafter, [row.token_ids.tolist() for row in rows])
    save_drafter(drafter, tmp_path / "paired", card_of(drafter, target), full=False)
    config = settings(data, tmp_path / "paired", tmp_path / "out", pair_head=None, num_steps=1)
    assert train_drafter(target, config, ignore).pair_head is None
    assert not (config.output / HEAD).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"from_drafter": None}, "pair_head requires a trained drafter"),
        ({"method": "eagle3"}, "pair_head is for p-eagle"),
        ({"loss": "kl"}, "a pair head is trained with ce, got loss kl"),
        ({"pair_head": 0}, "pair_head must be at least 1"),
        ({"pair_head": None, "pair_tables": "free"}, "pair_tables requires pair_head"),
    ],
)
def test_settings_that_make_no_sense_are_refused(data, earlier, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(data, earlier, tmp_path, **changes)


def test_a_head_does_not_change_how_deep_a_drafter_drafts(target, data, earlier, tmp_path):
    with pytest.raises(ConfigError, match="num_draft_tokens was 4, is 3 in the settings"):
        train_drafter(target, settings(data, earlier, tmp_path / "out", num_draft_tokens=3), ignore)
    with pytest.raises(CheckpointError, match="cannot train from"):
        train_drafter(target, settings(data, tmp_path / "nothing", tmp_path / "out"), ignore)
