"""Prompt files: every benchmark's row shape, names for reports, and what is refused."""

import gzip
import json
import sys

import pytest

from peagle.data.prompts import (
    HUMANEVAL_INSTRUCTION,
    Prompt,
    read_dialogs,
    read_prompts,
    workload_name,
)
from peagle.errors import ConfigError, DataError, MissingExtraError


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text):
    return ({"role": "user", "content": text},)


def refusal(path):
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    return caught.value


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
            Prompt("81", user("first"), "turns", category="writing", later=user("second")),
        ),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "x"},
            Prompt("HumanEval/0", user("Complete this Python function:\ndef f():\n"), "humaneval"),
        ),
        ({"question": "How many?", "answer": "#### 4"}, Prompt("1", user("How many?"), "gsm8k")),
        (
            {"conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "q"}], "id": "identity_0"},
            Prompt("identity_0", user("q"), "sharegpt"),
        ),
        ({"prompt": "plain"}, Prompt("1", user("plain"), "prompt")),
        (
            {"id": "t", "instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]},
            Prompt("t", user("Sort.\n\nb a"), "instruction"),
        ),
        ({"instruction": "Sort.", "input": "", "output": "x"}, Prompt("1", user("Sort."), "instruction")),
    ],
    ids=["turns", "humaneval", "gsm8k", "sharegpt", "plain", "self-instruct", "alpaca"],
)
def test_rows_are_recognized_by_their_keys(tmp_path, row, expected):
    assert read_prompts(write(tmp_path / "rows.jsonl", row)) == [expected]


def test_messages_are_kept_up_to_the_last_user_turn(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (prompt,) = read_prompts(write(tmp_path / "rows.jsonl", {"messages": messages, "prompt": "a"}))
    assert prompt.messages == tuple(messages[:4]) and prompt.kind == "messages"


def test_messages_without_answers_are_turns_as_in_speed_bench(tmp_path):
    said = [("system", "s"), ("user", "a"), ("user", "b"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in said]
    (prompt,) = read_prompts(write(tmp_path / "rows.jsonl", {"messages": messages, "category": "qa"}))
    assert prompt.messages == tuple(messages[:2]) and prompt.later == tuple(messages[2:]) and prompt.num_turns == 3
    second = prompt.following("yes")
    assert [message["content"] for message in second.messages] == ["s", "a", "yes", "b"] and second.category == "qa"
    assert second.following("no").following("end") is None


SPEED_BENCH = [
    {
        "question_id": f"{number:032x}",
        "category": category,
        "sub_category": None,
        "turns": turns,
        "source": "made by hand",
        "src_id": str(number),
        "difficulty": None,
        "multiturn": len(turns) > 1,
    }
    for number, (category, turns) in enumerate(
        [
            ("coding", ["Write f.", "Now test it."]),
            ("rag", ["Who?"]),
            ("low_entropy", ["Sort.", "Again.", "Once more."]),
        ]
    )
]


def test_speed_bench_is_read_alike_from_jsonl_and_parquet(tmp_path):
    """In its published columns: all turns and all categories are kept."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "qualitative"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(SPEED_BENCH), folder / "test-00000-of-00001.parquet")
    prompts = read_prompts(folder / "test-00000-of-00001.parquet")
    assert prompts == read_prompts(write(tmp_path / "qualitative.jsonl", *SPEED_BENCH))
    assert [(each.category, each.num_turns) for each in prompts] == [("coding", 2), ("rag", 1), ("low_entropy", 3)]
    assert prompts[0].where.endswith(".parquet:1") and prompts[1].id == SPEED_BENCH[1]["question_id"]
    assert workload_name(folder / "test-00000-of-00001.parquet") == "qualitative/test-00000-of-00001"
    assert [dialog.kind for dialog in read_dialogs(folder / "test-00000-of-00001.parquet", limit=1)] == ["coding"]
    (tmp_path / "cut.parquet").write_bytes((folder / "test-00000-of-00001.parquet").read_bytes()[:-40])
    assert "cannot read" in refusal(tmp_path / "cut.parquet").message
    assert "no file at" in refusal(tmp_path / "none.parquet").message


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError) as caught:
        read_prompts(tmp_path / "rows.parquet")
    assert "reading rows.parquet needs" in caught.value.message and "peagle[parquet]" in caught.value.hint


@pytest.mark.parametrize("place", [0, 1])
def test_a_placeholder_of_speed_bench_is_refused(tmp_path, place):
    turns = ["Who?", "Why?"]
    turns[place] = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    error = refusal(write(tmp_path / "rows.jsonl", {"turns": ["a"]}, {"turns": turns}))
    assert "rows.jsonl:2: the file has a placeholder" in error.message and "prepare_data.py" in error.hint


def test_text_files_hold_one_prompt_per_line_and_json_and_gzip_read_alike(tmp_path):
    (tmp_path / "ask.txt").write_text("first prompt\n\n  second\u2028prompt \n")
    expected = [Prompt("1", user("first prompt"), "text"), Prompt("3", user("second\u2028prompt"), "text")]
    assert read_prompts(tmp_path / "ask.txt") == expected
    (tmp_path / "ask.txt.gz").write_bytes(gzip.compress((tmp_path / "ask.txt").read_bytes()))
    assert read_prompts(tmp_path / "ask.txt.gz") == expected
    (tmp_path / "rows.json").write_text('[\n {"prompt": "a"},\n {"prompt":\n "b"}, {"prompt": "c"}]\n')
    assert [(prompt.id, prompt.messages) for prompt in read_prompts(tmp_path / "rows.json")] == [
        ("2", user("a")),
        ("3", user("b")),
        ("4", user("c")),
    ]
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"task_id": "H/1", "prompt": "def g"}).encode()))
    assert read_prompts(packed)[0].messages == user(HUMANEVAL_INSTRUCTION + "def g")


def test_limit_takes_the_first_prompts_and_reads_no_further(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\nbroken\n')
    assert [prompt.messages for prompt in read_prompts(path, limit=2)] == [user("a"), user("b")]
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        read_prompts(path, limit=0)


def test_workloads_are_named_by_file_or_by_folder_where_the_file_says_nothing(tmp_path):
    assert workload_name("data/humaneval/HumanEval.jsonl.gz") == "HumanEval"
    assert workload_name("data/mt_bench/question.jsonl") == "mt_bench/question"
    assert workload_name(tmp_path / "gsm8k" / "test.jsonl") == "gsm8k/test"


def test_each_prompt_has_the_kind_of_its_row(tmp_path):
    prompts = read_prompts(write(tmp_path / "r.jsonl", {"prompt": "a"}, {"question": "b"}, {"prompt": "c"}))
    assert [prompt.kind for prompt in prompts] == ["prompt", "gsm8k", "prompt"]


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        (
            {"text": "x", "label": 1},
            "no prompt found; keys found: text, label",
            '"turns" (MT-Bench, Spec-Bench, SPEED-Bench)',
        ),
        ({}, "no prompt found; keys found: none", "a row needs one of"),
        ({"prompt": " \n"}, "the prompt is empty (prompt row)", "remove the row"),
        ({"prompt": "", "task_id": "x"}, "the prompt is empty (humaneval row)", "remove the row"),
        ({"turns": [""]}, "the prompt is empty (turns row)", "remove the row"),
        ({"turns": []}, "'turns' is a list ([]); it must be a non-empty list of strings", ""),
        ({"turns": "hello"}, "'turns' is a string (\"hello\")", ""),
        ({"prompt": ["a"]}, "'prompt' is a list ([\"a\"]); it must be a string", "messages"),
        ({"question": None}, "'question' is missing or null; it must be a string", ""),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user message (messages row)", '"role": "user"'),
        ({"messages": "hi"}, "'messages' is a string (\"hi\"); it must be a non-empty list", ""),
        ({"conversations": [{"from": "gpt", "value": "s"}]}, "no user message (sharegpt row)", '"from": "human"'),
        ({"instruction": 3}, "'instruction' is a number (3)", ""),
    ],
)
def test_bad_rows_are_refused_with_file_line_reason_and_remedy(tmp_path, row, message, hint):
    path = write(tmp_path / "rows.jsonl", {"prompt": "fine"}, row)
    error = refusal(path)
    assert error.message.startswith(f"{path}:2: ") and message in error.message
    assert hint in (error.hint or "")


def test_empty_missing_and_damaged_files_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "has no rows; expected one prompt per line" in refusal(tmp_path / "empty.txt").message
    (tmp_path / "empty.jsonl").write_text("")
    assert "has no rows; expected one JSON object per line" in refusal(tmp_path / "empty.jsonl").message
    assert refusal(tmp_path / "none.jsonl").message == f"no file at {tmp_path / 'none.jsonl'}"
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:-9])
    error = refusal(tmp_path / "bad.jsonl.gz")
    assert "is a damaged gzip file" in error.message and "download or copy it again" in error.hint
    (tmp_path / "plain").write_text("Tell me a story\n")
    error = refusal(tmp_path / "plain")
    assert f"{tmp_path / 'plain'}:1: not valid JSON" in error.message and ".txt file with one prompt" in error.hint


def test_dialogs_keep_all_turns_and_name_their_line(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        {"question_id": 81, "turns": ["first", "second"]},
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b"},
                {"from": "human", "value": "c"},
            ]
        },
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
    )
    dialogs = read_dialogs(path)
    assert [dialog.where for dialog in dialogs] == [f"{path}:{line}" for line in range(1, 5)]
    spoken = [[(message["role"], message["content"]) for message in dialog.messages] for dialog in dialogs]
    assert spoken == [
        [("user", "first"), ("user", "second")],
        [("user", "a"), ("assistant", "b"), ("user", "c")],
        [("system", "s"), ("user", "u")],
        [("user", HUMANEVAL_INSTRUCTION + "def f():\n")],
    ]
    assert read_dialogs(path, limit=2) == dialogs[:2]
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        read_dialogs(path, limit=0)


def test_a_dialog_with_an_empty_later_turn_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"turns": ["first", "  "]})
    for read in (read_prompts, read_dialogs):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: the prompt is empty \(turns row\)"):
            read(path)
