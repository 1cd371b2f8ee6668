"""Conversation files and shards: every row shape, what is cut, dropped and refused, and speed."""

import gzip
import json

import numpy as np
import pytest

from harness.tiny_models import CHATML, tiny_tokenizer
from peagle.checkpoint.card import TargetIdentity
from peagle.data.conversations import read_conversations
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import Row
from peagle.errors import DataError, TargetError
from peagle.tokenizer import chat_template_hash, tokenizer_hash

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
    )
    rows = read(path, max_length=5)
    assert [len(row) for row in rows] == [5, 5]
    assert (rows.num_cut, rows.num_dropped, rows.num_answer_tokens) == (2, 2, 3)
    assert all(row.token_ids.base is None for row in rows), "a cut row does not keep the uncut one in memory"


def test_multi_turn_sharegpt_trains_every_answer(tmp_path):
    turns = [("system", "s"), ("human", "a"), ("gpt", "b"), ("user", "c"), ("chatgpt", "d")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    (conversation,) = read(write(tmp_path / "rows.jsonl", row))
    assert trained(conversation) == "b<|im_end|>d<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"question": "q", "answer": "r"}, "not a conversation; keys found: question, answer", "peagle data regen"),
        ({}, "not a conversation; keys found: none", 'allowed: {"messages"'),
        ({"prompt": "q", "answer": 7}, "'answer' is a number (7); it must be a string", "prompt_ids"),
        ({"messages": []}, "'messages' is a list ([]); it must be a non-empty list of objects", ""),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "no answer"}]},
            "no assistant turn to train on (roles: system, user)",
            "let the target answer the prompts: peagle data regenerate",
        ),
        (
            {"messages": [{"role": "usr", "content": "hi"}]},
            "messages[0]['role'] is 'usr'; allowed: system, developer, user, assistant, tool, function",
            "did you mean 'user'?",
        ),
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
        (b'\n{"prompt": "q" "answer"', ":2: not valid JSON: Expecting ',' delimiter at column 16, found '\"answer\"'"),
        (b"17\n", ":1: a row must be a JSON object, found a number (17)"),
        (b'{"prompt": "a\\ud83d", "answer": "b"}\n', ":1: \\ud83d is a lone surrogate"),
        (b'{"prompt": "\xff"}\n', ":1: not UTF-8 text: byte 0xff at column 13"),
        (b'[\n{"prompt_ids": [1], "answer_ids": [2]},\n{"x": 1}]', ":3: not a conversation; keys found: x"),
        (
            b'[\n{"prompt_ids": [1], "answer_ids": [2]}\n',
            "expected ',' or ']' after a row at column 39, found nothing more",
        ),
        (b'[{"prompt_ids": [1], "answer_ids": [2]}]\n{}', ":2: not valid JSON: expected nothing after the array"),
        (b'[\n\n{"prompt_ids": [1,}]', ":3: not valid JSON: "),
        (b"[" * 100_000, "nested too deeply"),
        (b"\x1f\x8bnot gzip", "is a damaged gzip file"),
        (gzip.compress(json.dumps(IDS_ROW).encode() * 50, mtime=0)[:-12], "is a damaged gzip file"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    error = refusal(path)
    assert str(path) in error.message and message in error.message


def test_missing_files_and_folders_are_refused(tmp_path):
    assert refusal(tmp_path / "none.jsonl").message == f"no file at {tmp_path / 'none.jsonl'}"
    assert refusal(tmp_path).message == f"{tmp_path} is not a shard directory: no manifest.json"


def test_a_file_without_any_trainable_row_is_refused(tmp_path):
    error = refusal(write(tmp_path / "rows.jsonl", IDS_ROW), max_length=3)
    assert "none of its 1 rows has an answer token within max_length = 3" in error.message
    assert "raise max_length" in error.hint


def shards(directory, *rows):
    """Rows as (ids, spans, temperature), in shards of which the first two are sealed and the last one is open."""
    identity = TargetIdentity("tiny", "weights", tokenizer_hash(TOKENIZER), chat_template_hash(TOKENIZER))
    made = [Row(key, np.array(ids, np.int32), spans, heat) for key, (ids, spans, heat) in enumerate(rows)]
    with ShardWriter(directory, "synthesize", identity, {}) as writer:
        writer.append(made[:1])
        writer.seal()
        writer.append(made[1:-1])
        writer.seal()
        writer.append(made[-1:])
    return directory


def test_shards_read_like_the_file_of_the_same_ids(tmp_path):
    ids_rows = [(list(range(10, 10 + length)), prompt, heat) for length, prompt, heat in SHARD_ROWS]
    directory = shards(tmp_path / "shards", *((ids, ((prompt, len(ids)),), heat) for ids, prompt, heat in ids_rows))
    written = [{"prompt_ids": i[:p], "answer_ids": i[p:], "temperature": heat} for i, p, heat in ids_rows]
    path = write(tmp_path / "rows.jsonl", *written)
    for max_length in (1000, 8, 6):
        one, other = read(directory, max_length=max_length), read(path, max_length=max_length)
        assert len(one) == len(other) > 0
        for left, right in zip(one, other, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist() and left.token_ids.dtype == np.int32
            assert left.loss_mask.tolist() == right.loss_mask.tolist() and left.loss_mask.dtype == np.bool_
        assert (one.num_cut, one.num_dropped, one.num_answer_tokens) == (
            other.num_cut,
            other.num_dropped,
            other.num_answer_tokens,
        )
        assert one.is_greedy.tolist() == other.is_greedy.tolist() and len(one.is_greedy) == len(one)


SHARD_ROWS = [(9, 4, 0.0), (5, 2, 0.7), (12, 7, 0.0), (6, 1, 1.0), (20, 3, 0.0)]
"""tokens, tokens of the prompt, temperature"""


def test_rows_of_shards_are_views_of_the_files(tmp_path):
    rows = read(shards(tmp_path, *(([1, 2, 3, 4], ((2, 4),), 0.0) for _ in range(3))))
    assert not any(row.token_ids.flags.owndata for row in rows), "nothing is copied"
    with pytest.raises(ValueError, match="read-only"):
        rows.conversations[0].token_ids[0] = 7


def test_several_answers_of_a_row_are_trained(tmp_path):
    (row, *_) = read(shards(tmp_path, *(([1, 2, 3, 4, 5, 6], ((1, 2), (4, 6)), 0.0) for _ in range(3))))
    assert row.loss_mask.tolist() == [False, True, False, False, True, True]


def test_shards_without_a_trainable_row_are_refused(tmp_path):
    directory = shards(tmp_path, *(([1, 2, 3, 4], ((3, 4),), 0.0) for _ in range(3)))
    assert "none of its 3 rows has an answer token within max_length = 3" in refusal(directory, max_length=3).message


def test_template_trouble_names_the_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", IDS_ROW, {"prompt": "q", "answer": "r"})
    no_end = tiny_tokenizer(chat_template=CHATML.replace("<|im_end|>", ""))
    error = refusal(path, tokenizer=no_end)
    assert error.message.startswith(f"{path}:2: messages[1]: the chat template puts no end-of-turn token")
    with pytest.raises(TargetError) as caught:
        read(path, tokenizer=tiny_tokenizer(chat_template=None))
    assert caught.value.message.startswith(f"{path}:2: the target's tokenizer has no chat template")


def test_rows_of_ids_are_read_as_arrays_and_without_the_tokenizer(tmp_path, monkeypatch):
    row = {"prompt_ids": list(range(3, 103)), "answer_ids": list(range(3, 203))}
    path = write(tmp_path / "rows.jsonl", *[row] * 50)
    monkeypatch.setattr(type(TOKENIZER), "__call__", None)
    monkeypatch.setattr(type(TOKENIZER), "encode", None)
    rows = read(path)
    assert len(rows) == 50 and rows.num_answer_tokens == 50 * 200
    assert all(isinstance(each.token_ids, np.ndarray) for each in rows.conversations)
