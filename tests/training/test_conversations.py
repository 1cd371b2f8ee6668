"""Conversation files: every row shape, what is cut, dropped and refused, and speed."""

import gzip
import json
import time

import numpy as np
import pytest

from peagle.errors import ConfigError, DataError, TargetError
from peagle.training.conversations import read_conversations
from tiny import CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
IDS_ROW = {"prompt_ids": [10, 11, 12], "answer_ids": [13, 14, 2]}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, max_length=1000, tokenizer=TOKENIZER):
    return read_conversations(path, tokenizer, max_length=max_length)


def refusal(path, **options):
    with pytest.raises(DataError) as caught:
        read(path, **options)
    return caught.value


def trained(conversation):
    return TOKENIZER.decode(conversation.token_ids[conversation.loss_mask].tolist())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "the q"}, {"role": "assistant", "content": "yes"}]},
        {"id": "x", "conversations": [{"from": "human", "value": "the q"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": "the q", "answer": "yes"},
        {"prompt": "the q", "response": "yes"},
        {"prompt": "the q", "completion": "yes"},
    ],
    ids=["messages", "sharegpt", "answer", "response", "completion"],
)
def test_text_rows_of_every_shape_become_the_same_conversation(tmp_path, row):
    (conversation,) = read(write(tmp_path / "rows.jsonl", row)).conversations
    expected = "<|im_start|>user\nthe q<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert TOKENIZER.decode(conversation.token_ids.tolist()) == expected
    assert trained(conversation) == "yes<|im_end|>"


def test_rows_of_ids_are_used_as_they_are_even_beside_text(tmp_path):
    rows = read(write(tmp_path / "rows.jsonl", {**IDS_ROW, "prompt": "for people", "answer": "to read"}))
    (conversation,) = rows
    assert conversation.token_ids.tolist() == [10, 11, 12, 13, 14, 2]
    assert conversation.loss_mask.tolist() == [False, False, False, True, True, True]
    assert conversation.token_ids.dtype == np.int32 and conversation.loss_mask.dtype == np.bool_
    assert len(rows) == 1 and len(conversation) == 6 and rows.num_answer_tokens == 3


def test_the_first_token_of_all_is_never_trained(tmp_path):
    (conversation,) = read(write(tmp_path / "rows.jsonl", {"prompt_ids": [], "answer_ids": [5, 6]}))
    assert conversation.loss_mask.tolist() == [False, True]


def test_arrays_and_gzip_read_like_jsonl(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([IDS_ROW, {"prompt": "q", "answer": "r"}], indent=2))
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(("\ufeff" + json.dumps(IDS_ROW) + "\r\n\r\n").encode()))
    assert len(read(tmp_path / "rows.json")) == 2
    assert len(read(packed)) == 1


def test_long_rows_are_cut_and_rows_without_trained_token_dropped_and_both_counted(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        IDS_ROW,
        {"prompt_ids": [10, 11, 12, 13], "answer_ids": [14, 15]},
        {"prompt_ids": [10, 11, 12, 13, 14], "answer_ids": [15]},
        {"prompt_ids": [10], "answer_ids": []},
        {"messages": [{"role": "user", "content": "no answer"}]},
    )
    rows = read(path, max_length=5)
    assert [len(row) for row in rows] == [5, 5]
    assert (rows.num_cut, rows.num_dropped, rows.num_answer_tokens) == (2, 3, 3)
    assert all(row.token_ids.base is None for row in rows), "a cut row does not keep the uncut one in memory"


def test_multi_turn_sharegpt_trains_every_answer(tmp_path):
    turns = [("system", "s"), ("human", "a"), ("gpt", "b"), ("user", "c"), ("chatgpt", "d")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    (conversation,) = read(write(tmp_path / "rows.jsonl", row))
    assert trained(conversation) == "b<|im_end|>d<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"question": "q", "answer": "r"}, "not a conversation; keys found: question, answer", "target has answered"),
        ({}, "not a conversation; keys found: none", 'allowed: {"messages"'),
        ({"prompt": "q", "answer": 7}, "'answer' is a number (7); it must be a string", "prompt_ids"),
        ({"messages": []}, "'messages' is a list ([]); it must be a non-empty list of objects", ""),
        ({"messages": ["hi"]}, 'messages[0] is a string ("hi"); it must be an object', ""),
        ({"messages": [{"role": "user"}]}, "messages[0]['content'] is missing or null", '"content": "text"'),
        ({"conversations": [{"from": "dog", "value": "w"}]}, "['from'] is 'dog'; allowed: assistant, bard", "messages"),
        ({"conversations": [{"from": "gpt", "value": 1}]}, "['value'] is a number (1)", '"from": "human"'),
        ({"prompt_ids": [1]}, "'answer_ids' is missing or null; it must be a list of token ids", "both keys"),
        ({"prompt_ids": [1], "answer_ids": [1.5]}, "'answer_ids' holds 1.5; every element must be an integer", ""),
        ({"prompt_ids": [1], "answer_ids": [3, "x"]}, "'answer_ids' holds \"x\";", ""),
        ({"prompt_ids": [1], "answer_ids": [3, None]}, "'answer_ids' holds null;", ""),
        ({"prompt_ids": [1], "answer_ids": [[3], [4, 5]]}, "'answer_ids' holds [3];", ""),
        ({"prompt_ids": [1], "answer_ids": [2**70]}, "'answer_ids' holds token id 1180591620717411303424", "another"),
        ({"prompt_ids": [-1], "answer_ids": [2]}, "'prompt_ids' holds token id -1", "another tokenizer"),
        ({"prompt_ids": [1], "answer_ids": [268]}, "holds token id 268; the target's ids are 0 to 267", "another"),
    ],
)
def test_bad_rows_are_refused_with_file_line_reason_and_remedy(tmp_path, row, message, hint):
    path = write(tmp_path / "rows.jsonl", IDS_ROW, row)
    error = refusal(path)
    assert error.message.startswith(f"{path}:2: ") and message in error.message
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows; expected one JSON object per line (JSONL) or one JSON array"),
        (b"\n \n", "has no rows"),
        (b"[ ]\n", "has no rows"),
        (b'{"a": 1}\n{"a": \n', ":1: not a conversation; keys found: a"),
        (b'\n{"prompt": "q" "answer"', ":2: not valid JSON: Expecting ',' delimiter at column 16: '\"answer\"'"),
        (b"17\n", ":1: a row must be a JSON object, found a number (17)"),
        (b'{"prompt": "\xff"}\n', ":1: not UTF-8 text: byte 0xff at column 13"),
        (b'[\n{"prompt_ids": [1], "answer_ids": [2]},\n{"x": 1}]', ":3: not a conversation; keys found: x"),
        (b'[\n{"prompt_ids": [1], "answer_ids": [2]}\n', "expected ',' or ']' after a row, found the end of the file"),
        (b'[{"prompt_ids": [1], "answer_ids": [2]}]\n{}', ":2: not valid JSON: expected nothing after the array"),
        (b'[\n\n{"prompt_ids": [1,}]', ":3: not valid JSON: "),
        (b"[" * 100_000, "nested too deeply"),
        (b"\x1f\x8bnot gzip", "is a damaged gzip file"),
        (gzip.compress(json.dumps(IDS_ROW).encode() * 50)[:-12], "is a damaged gzip file"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    error = refusal(path)
    assert str(path) in error.message and message in error.message


def test_missing_files_and_folders_are_refused(tmp_path):
    assert refusal(tmp_path / "none.jsonl").message == f"no file at {tmp_path / 'none.jsonl'}"
    assert refusal(tmp_path).message == f"cannot read {tmp_path}: Is a directory"


def test_a_file_without_any_trainable_row_is_refused(tmp_path):
    error = refusal(write(tmp_path / "rows.jsonl", IDS_ROW), max_length=3)
    assert "none of its 1 rows has an answer token within max_length = 3" in error.message
    assert "raise max_length" in error.hint


def test_a_max_length_that_cannot_hold_prompt_and_answer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_length must be at least 2, got 1"):
        read(write(tmp_path / "rows.jsonl", IDS_ROW), max_length=1)


def test_template_trouble_names_the_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", IDS_ROW, {"prompt": "q", "answer": "r"})
    no_end = tiny_tokenizer(chat_template=CHATML.replace("<|im_end|>", ""))
    error = refusal(path, tokenizer=no_end)
    assert error.message.startswith(f"{path}:2: messages[1]: the chat template puts no end-of-turn token")
    with pytest.raises(TargetError) as caught:
        read(path, tokenizer=tiny_tokenizer(chat_template=None))
    assert caught.value.message.startswith(f"{path}:2: the target's tokenizer has no chat template")


def test_ids_are_read_at_a_rate_of_seconds_for_fifty_thousand_rows(tmp_path):
    row = {"prompt_ids": list(range(3, 103)), "answer_ids": list(range(3, 203))}
    path = write(tmp_path / "rows.jsonl", *[row] * 5_000)
    start = time.perf_counter()
    rows = read(path)
    seconds = time.perf_counter() - start
    assert len(rows) == 5_000 and rows.num_answer_tokens == 1_000_000
    assert seconds < 4, f"{seconds:.1f} s for a tenth of fifty thousand rows"
