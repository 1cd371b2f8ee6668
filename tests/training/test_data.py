"""What a run reads: files told apart by their first row, rows set apart, and what is said about them."""

import json

import numpy as np
import pytest
import torch

from peagle.errors import DataError
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation
from peagle.training.data import answer_counts, has_answers, read_text
from tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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


def test_a_text_file_holds_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("why?\n")
    assert not has_answers(tmp_path / "prompts.txt")


def test_rows_of_neither_kind_are_refused_by_their_line(target, tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not a conversation; keys found: nonsense"):
        read_text(target, settings(written(tmp_path / "rows.jsonl", {"nonsense": 1})), None)


def test_held_out_rows_are_greedy_spread_over_the_data_and_never_trained_on(target, tmp_path):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([0, 0.7, 0, 1.0] * 20))
    text = read_text(target, settings(data, num_held_out=3), None)
    assert len(text.held_out) == 3 and len(text.conversations) == 77 == text.facts["num_conversations"]
    assert text.num_answer_tokens == 77 * 15
    every = read_text(target, settings(data, num_held_out=0), None)
    assert len(every.conversations) == 80 and every.held_out == () and "held_out" not in every.facts
    place = {row.token_ids.tobytes(): index for index, row in enumerate(every.conversations)}
    apart = [place[row.token_ids.tobytes()] for row in text.held_out]
    assert all(index % 2 == 0 for index in apart), "temperature 0"
    assert apart[0] == 0 and apart[-1] == 78
    assert not {place[row.token_ids.tobytes()] for row in text.conversations} & set(apart)


def test_no_more_than_a_tenth_of_the_greedy_rows_is_set_apart(target, tmp_path):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([0] * 39 + [1.0] * 40))
    assert len(read_text(target, settings(data), None).held_out) == 3


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_rows_that_are_not_known_to_be_greedy_are_not_set_apart(target, tmp_path, caplog, temperature):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([temperature] * 30))
    assert read_text(target, settings(data), None).held_out == ()
    assert "acceptance is not measured: of 30 conversations 0 are known to be greedy" in caplog.text


def test_given_answers_that_are_not_greedy_are_warned_of(target, tmp_path, caplog):
    data = written(tmp_path / "rows.jsonl", *rows_of_ids([0] * 4))
    held_out = written(tmp_path / "held.jsonl", *rows_of_ids([0, None, 1.0]))
    text = read_text(target, settings(data, held_out=held_out), None)
    assert text.facts["held_out"] == {"name": "held.jsonl", "num": 3, "num_greedy": 1}
    assert "1 of 3 answers are known to be greedy" in caplog.text


def test_tokens_are_counted_in_answers_only():
    rows = [
        Conversation(np.array([1, 2, 2, 3], dtype=np.int32), np.array([False, True, True, True])),
        Conversation(np.array([1, 3], dtype=np.int32), np.array([False, True])),
    ]
    assert torch.equal(answer_counts(rows, 5), torch.tensor([0, 0, 2, 2, 0]))
