"""What an inspection reports of shards and of files."""

import json

import numpy as np
import pytest

from harness.tiny_models import tiny_tokenizer
from peagle.checkpoint.card import TargetIdentity
from peagle.data.inspection import inspect, trained_token_counts
from peagle.data.shard_writer import ShardWriter
from peagle.data.shards import Drop, Row
from peagle.errors import ConfigError, DataError
from peagle.tokenizer import chat_template_hash, tokenizer_hash

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def shards(tmp_path):
    identity = TargetIdentity("tiny", "weights", tokenizer_hash(TOKENIZER), chat_template_hash(TOKENIZER))
    rows = [
        Row(key, np.arange(10, 20 + key, dtype=np.int32), ((6, 10 + key),), 0.0 if key % 2 else 0.7) for key in range(9)
    ]
    rows.append(Row(99, np.array([10, 11, 50, 2, 12, 13, 51, 2], np.int32), ((2, 4), (6, 8)), 0.0))
    with ShardWriter(tmp_path / "shards", "synthesize", identity, {"seed": 3}, shard_tokens=40) as writer:
        for row in rows:
            writer.append([row], [Drop("question: cut")])
        writer.finish()
    return tmp_path / "shards"


def test_counts_lengths_and_shares_are_those_of_the_rows(shards):
    report = inspect(shards, TOKENIZER)
    lengths = [*range(10, 19), 8]
    trained = [*range(4, 13), 4]
    assert report["num_conversations"] == 10 and report["num_tokens"] == sum(lengths)
    assert report["num_trained_tokens"] == sum(trained)
    assert report["trained_share"] == pytest.approx(sum(trained) / sum(lengths), abs=1e-4)
    assert report["lengths"]["min"] == 8 and report["lengths"]["max"] == 18
    assert report["lengths"]["median"] == np.median(lengths) and report["trained_lengths"]["mean"] == 7.6
    assert sum(part["count"] for part in report["length_histogram"]) == 10
    assert report["temperatures"] == {"0": 5, "0.7": 5} and report["num_known_greedy"] == 5
    assert report["dropped"] == {"question: cut": 10} and report["settings"] == {"seed": 3}
    assert report["kind"] == "synthesize" and report["is_complete"] and report["num_shards"] > 2
    json.dumps(report)


def test_tokens_are_counted_where_they_are_trained(shards):
    report = inspect(shards, TOKENIZER, num_top_tokens=3)
    assert [token["token_id"] for token in report["top_tokens"]] == [16, 17, 18]
    first = report["top_tokens"][0]
    assert first["count"] == 9 and first["text"] == TOKENIZER.decode([16])
    assert first["share"] == pytest.approx(9 / report["num_trained_tokens"], abs=1e-5)
    assert report["num_distinct_trained_tokens"] == len({*range(16, 28), 50, 51, 2})
    assert report["coverage"] == {"256": 1.0}


def test_ids_beyond_the_tokenizer_are_counted_too():
    row = Row(0, np.array([1, 300, 300], np.int32), ((1, 3),), 0.0)

    class Rows:
        token_ids, loss_mask = row.token_ids, np.array([False, True, True])

    assert trained_token_counts([Rows()], 268)[300] == 2


def test_examples_are_spread_over_the_data_and_split_at_the_trained_parts(shards):
    report = inspect(shards, TOKENIZER, num_examples=10)
    assert len(report["examples"]) == 10
    assert [piece["is_trained"] for piece in report["examples"][-1]] == [False, True, False, True]
    assert report["examples"][-1][1]["text"] == TOKENIZER.decode([50, 2])
    assert inspect(shards, TOKENIZER, num_examples=0)["examples"] == []


def test_files_of_conversations_are_inspected_alike(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "the user", "answer": "the answer"}) + "\n")
    report = inspect(path, TOKENIZER)
    assert report["num_conversations"] == 1 and "kind" not in report
    (pieces,) = report["examples"]
    assert [piece["text"] for piece in pieces] == [
        "<|im_start|>user\nthe user<|im_end|>\n<|im_start|>assistant\n",
        "the answer<|im_end|>",
        "\n",
    ]


def test_bad_wishes_and_bad_data_are_refused(shards, tmp_path):
    with pytest.raises(ConfigError, match="num_examples and num_top_tokens must be 0 or more, got -1 and 20"):
        inspect(shards, TOKENIZER, num_examples=-1)
    with pytest.raises(DataError, match="no file at"):
        inspect(tmp_path / "none", TOKENIZER)


def test_rows_are_shown_by_number(shards, tmp_path):
    report = inspect(shards, TOKENIZER, rows_shown=(10, 2))
    assert report["example_rows"] == [10, 2]
    assert report["examples"][0][1]["text"] == TOKENIZER.decode([50, 2])
    rows = [{"prompt_ids": [5], "answer_ids": [6, token]} for token in (10, 11)]
    (tmp_path / "rows.jsonl").write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    (pieces,) = inspect(tmp_path / "rows.jsonl", TOKENIZER, rows_shown=(3,))["examples"]
    assert pieces[1]["text"] == TOKENIZER.decode([6, 11])
    with pytest.raises(DataError, match="has no row 11 with an answer; rows are 1 to 10"):
        inspect(shards, TOKENIZER, rows_shown=(3, 11))
