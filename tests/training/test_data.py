"""What a run reads: files told apart by their first row, rows set apart, and what is said about them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.tiny_models import tiny_target
from harness.training_runs import written
from peagle.checkpoint.card import TargetIdentity
from peagle.data.conversations import Conversation, has_answers
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import Row
from peagle.errors import ConfigError, DataError
from peagle.objective.config import TrainConfig
from peagle.training.data import answer_counts, read_text
from peagle.training.distributed import World


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(data, **changes):
    return TrainConfig(data=data, output=data.parent / "out", max_length=40, **changes)


def rows_of_ids(temperatures):
    chance = np.random.default_rng(0)
    for temperature in temperatures:
        ids = chance.integers(3, 260, 20).tolist()
        yield {"prompt_ids": ids[:5], "answer_ids": ids[5:]} | (
            {} if temperature is None else {"temperature": temperature}
        )


ASKED = {"role": "user", "content": "why?"}
TOLD = {"role": "assistant", "content": "so."}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASKED, TOLD]}, True),
        ({"messages": [ASKED]}, False),
        ({"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}]}, True),
        ({"conversations": [{"from": "human", "value": "why?"}]}, False),
        ({"prompt": "why?", "response": "so."}, True),
        ({"prompt": "why?"}, False),
        ({"prompt_ids": [3], "answer_ids": [4]}, True),
        ({"question": "2 + 2?", "answer": "by hand, not by the target"}, False),
        ({"question_id": 1, "turns": ["why?", "and then?"]}, False),
        ({"instruction": "say why"}, False),
        ({"nonsense": 1}, True),
    ],
    ids=str,
)
def test_a_file_is_told_by_its_first_row(tmp_path, row, expected):
    assert has_answers(written(tmp_path / "rows.jsonl", row)) is expected


@pytest.mark.parametrize("name", ["prompts.txt", "PROMPTS.TXT", "prompts.txt.gz"])
def test_a_text_file_holds_prompts(tmp_path, name):
    (tmp_path / name).write_text("why?\n")
    assert not has_answers(tmp_path / name)


def test_a_file_of_rows_may_have_txt_in_its_name(tmp_path):
    assert has_answers(written(tmp_path / "from.txt.jsonl", {"messages": [ASKED, TOLD]}))


@pytest.fixture
def asked(monkeypatch):
    """Replaces the engine: writes four rows, and keeps the settings of each call."""
    found = []

    def answer(target, dialogs, directory, config, settings, **_):
        found.append(config)
        with ShardWriter(directory, "regenerate", TargetIdentity.of(target), settings) as writer:
            writer.append([Row(key, np.arange(3, 30, dtype=np.int32), ((5, 27),), 0.0) for key in range(4)])
            writer.finish()

    monkeypatch.setattr("peagle.training.data.answer_dialogs", answer)
    return found


def test_prompts_are_answered_once(target, tmp_path, asked):
    config = settings(written(tmp_path / "prompts.jsonl", {"prompt": "why?"}), seed=3)
    first = read_text(target, config, World())
    assert [(one.max_length, one.max_answer_tokens, one.seed) for one in asked] == [(40, 40, 3)]
    assert len(read_text(target, config, World()).conversations) == len(first.conversations) == 4
    assert len(asked) == 1


def test_several_processes_do_not_answer_prompts(target, tmp_path, asked):
    config = settings(written(tmp_path / "prompts.jsonl", {"prompt": "why?"}))
    with pytest.raises(DataError, match="holds prompts without answers") as caught:
        read_text(target, config, World(0, 2))
    assert "peagle data regenerate" in caught.value.hint and not asked and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ("why not?", {}, "prompts was"),
        ("why?", {"seed": 1}, "seed was 0, is 1"),
        ("why?", {"max_length": 48}, "max_length was 40, is 48"),
    ],
)
def test_answers_to_something_else_are_not_trained_on(target, tmp_path, asked, prompt, changes, words):
    data = written(tmp_path / "prompts.jsonl", {"prompt": "why?"})
    read_text(target, settings(data), World())
    written(data, {"prompt": prompt})
    with pytest.raises(ConfigError) as caught:
        read_text(target, replace(settings(data), **changes), World())
    assert words in caught.value.message and str(tmp_path / "out" / "data") in caught.value.message
    assert "a new --output" in caught.value.hint


def test_a_held_out_directory_without_rows_is_passed_over_unless_it_was_asked_for(target, tmp_path, caplog):
    identity = TargetIdentity.of(target)
    with ShardWriter(tmp_path / "data", "synthesize", identity, {}) as writer:
        writer.append([Row(key, np.arange(3, 30, dtype=np.int32), ((5, 27),), 0.0) for key in range(12)])
    with ShardWriter(tmp_path / "data" / "held_out", "synthesize", identity, {}):
        pass
    text = read_text(target, settings(tmp_path / "data"), World())
    assert text.facts["held_out"]["name"] == "split off the data"
    assert f"{tmp_path / 'data' / 'held_out'} holds no rows" in caplog.text
    with pytest.raises(DataError, match=r"held_out holds no rows\n"):
        read_text(target, settings(tmp_path / "data", held_out=tmp_path / "data" / "held_out"), World())


def test_rows_of_neither_kind_are_refused_by_their_line(target, tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not a conversation; keys found: nonsense"):
        read_text(target, settings(written(tmp_path / "rows.jsonl", {"nonsense": 1})), World())


def test_held_out_rows_are_greedy_spread_over_the_data_and_never_trained_on(target, tmp_path):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([0, 0.7, 0, 1.0] * 20))
    text = read_text(target, settings(data, num_held_out=3), World())
    assert len(text.held_out) == 3 and len(text.conversations) == 77 == text.facts["num_conversations"]
    assert text.facts["num_answer_tokens"] == 77 * 15
    every = read_text(target, settings(data, num_held_out=0), World())
    assert len(every.conversations) == 80 and every.held_out == () and "held_out" not in every.facts
    place = {row.token_ids.tobytes(): index for index, row in enumerate(every.conversations)}
    apart = [place[row.token_ids.tobytes()] for row in text.held_out]
    assert all(index % 2 == 0 for index in apart), "temperature 0"
    assert apart[0] == 0 and apart[-1] == 78
    assert not {place[row.token_ids.tobytes()] for row in text.conversations} & set(apart)


def test_no_more_than_a_tenth_of_the_greedy_rows_is_set_apart(target, tmp_path):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([0] * 39 + [1.0] * 40))
    assert len(read_text(target, settings(data), World()).held_out) == 3


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_rows_that_are_not_known_to_be_greedy_are_not_set_apart(target, tmp_path, caplog, temperature):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([temperature] * 30))
    assert read_text(target, settings(data), World()).held_out == ()
    assert "acceptance is not measured: 0 of 30 conversations are known to be greedy" in caplog.text


def test_given_answers_that_are_not_greedy_are_warned_of(target, tmp_path, caplog):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([0] * 4))
    held_out = written(tmp_path / "held.jsonl", *rows_of_ids([0, None, 1.0]))
    text = read_text(target, settings(data, held_out=held_out), World())
    assert text.facts["held_out"] == {"name": "held.jsonl", "num": 3, "num_greedy": 1}
    assert "1 of 3 answers are known to be greedy" in caplog.text


def test_tokens_are_counted_in_answers_only():
    rows = [
        Conversation(np.array([1, 2, 2, 3], dtype=np.int32), np.array([False, True, True, True])),
        Conversation(np.array([1, 3], dtype=np.int32), np.array([False, True])),
    ]
    assert torch.equal(answer_counts(rows, 5), torch.tensor([0, 0, 2, 2, 0]))
