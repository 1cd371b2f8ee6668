"""`peagle data`: written, killed, gone on with, and looked at, as a user does it."""

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

from harness.tiny_models import tiny_target, write_target
from peagle.data.prompts import Dialog
from peagle.data.shards import open_shards

NUM_PROMPTS = 24
SHORT = ("--max-length", 100, "--max-answer-tokens", 12)
QUICK = 'min_answer_tokens = 1\nsystem_prompts = ["Be."]\ngiven_share = 1.0\nquestion_temperature = 1.0\n'


@pytest.fixture
def on_target(models):
    return ("--target", models / "target", "--dtype", "float32")


@pytest.fixture
def quick(tmp_path):
    path = tmp_path / "quick.toml"
    path.write_text(QUICK)
    return ("--recipe", path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"the user asks {n}"}) + "\n" for n in range(NUM_PROMPTS)))
    return path


def rows_of(directory):
    """By key: token ids and temperature; a key that comes twice fails."""
    rows = {}
    for shard in open_shards(directory).shards:
        for key, heat, (start, end) in zip(
            shard.keys.tolist(), shard.temperatures.tolist(), itertools.pairwise(shard.offsets.tolist()), strict=True
        ):
            assert key not in rows, f"row {key} comes twice"
            rows[key] = (shard.token_ids[start:end].tolist(), shard.loss_mask[start:end].tolist(), heat)
    return rows


def start_and_kill(argv, lines, number, mark=b"\n"):
    """Run a command in a process of its own and kill it, as `kill -9` does, once its open shard has so many lines.

    `mark` is what is counted: in a line of a row, not in one of a drop, there is "ids".
    """
    code = "from peagle.cli.main import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, argv)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if lines.exists() and lines.read_bytes().count(mark) >= number:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
        return process.wait(10)
    finally:
        process.kill()
        process.stderr.close()


def test_regenerate_answers_every_prompt_and_inspect_shows_them(peagle, on_target, prompts, tmp_path):
    result = peagle("data", "regenerate", "--prompts", prompts, "--output", tmp_path / "out", *SHORT, *on_target)
    assert result.status == 0, result.err
    assert "conversations" in result.out and str(NUM_PROMPTS) in result.out and "disk: at most about" in result.err
    assert sorted(rows_of(tmp_path / "out")) == list(range(NUM_PROMPTS))
    shown = peagle("data", "inspect", tmp_path / "out", "--target", on_target[1], "--num-examples", 2)
    assert shown.status == 0 and shown.err == ""
    for words in ("written by", "regenerate, target target", "trained tokens", "row 1", "[[", "]]", "1, complete"):
        assert words in shown.out, words
    document = peagle("data", "inspect", tmp_path / "out", "--target", on_target[1], "--json").json
    assert document["num_conversations"] == NUM_PROMPTS and document["target"]["name"] == "target"
    assert len(document["examples"]) == 3 and document["length_histogram"]


@pytest.mark.slow
def test_regenerate_killed_in_the_middle_resumes_without_loss_or_repetition(peagle, on_target, prompts, tmp_path):
    command = ("data", "regenerate", "--prompts", prompts, *SHORT, "--max-batch", 2, *on_target)
    status = start_and_kill((*command, "--output", tmp_path / "killed"), tmp_path / "killed" / "shard-00000.jsonl", 5)
    assert status == -signal.SIGKILL
    saved = rows_of(tmp_path / "killed")
    assert 5 <= len(saved) < NUM_PROMPTS, "it was killed in the middle"
    result = peagle(*command, "--output", tmp_path / "killed", "--json")
    assert result.status == 0 and result.json["num_rows"] == NUM_PROMPTS
    finished = rows_of(tmp_path / "killed")
    assert sorted(finished) == list(range(NUM_PROMPTS)) and saved.items() <= finished.items()
    assert peagle(*command, "--output", tmp_path / "whole").status == 0
    assert finished == rows_of(tmp_path / "whole"), "the same as if it had not been killed"


@pytest.mark.slow
def test_synthesize_killed_in_the_middle_resumes_without_loss_or_repetition(
    peagle, on_target, prompts, tmp_path, quick
):
    limits = ("--num-answers", 16, "--max-length", 64, "--keep-cut", *quick)
    command = ("data", "synthesize", "--given", prompts, *limits, "--temperatures", 2.0, "--max-batch", 2, *on_target)
    output = ("--output", tmp_path / "out")
    assert start_and_kill((*command, *output), tmp_path / "out" / "shard-00000.jsonl", 4) == -signal.SIGKILL
    saved = rows_of(tmp_path / "out")
    assert 1 <= len(saved) < 16
    result = peagle(*command, *output, "--json")
    assert result.status == 0 and result.json["num_rows"] == 16
    finished = rows_of(tmp_path / "out")
    assert len(finished) == 16 and saved.items() <= finished.items()
    asked = {Dialog("", [{"role": "user", "content": f"the user asks {n}"}]).key() for n in range(NUM_PROMPTS)}
    assert finished.keys() <= asked, "different prompts of those given"


def concise_target(directory):
    """A random target that ends its texts after a dozen tokens."""
    target = tiny_target(num_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        # A number that dominates every state, and that only the end token listens to.
        target.model.get_input_embeddings().weight[:, 0] = 100.0
        head = target.model.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[2, 0] = 0.4
    return write_target(target, directory)


@pytest.mark.slow
def test_synthesize_killed_while_it_invents_questions_goes_on_without_loss_or_repetition(peagle, tmp_path, quick):
    limits = ("--num-answers", 30, "--max-length", 160, "--temperatures", 1, *quick)
    where = ("--output", tmp_path / "out", "--target", concise_target(tmp_path / "target"), "--dtype", "float32")
    command = ("data", "synthesize", *limits, "--max-batch", 4, *where)
    lines = tmp_path / "out" / "shard-00000.jsonl"
    assert start_and_kill(command, lines, 5, mark=b'"ids"') == -signal.SIGKILL
    saved, dropped = rows_of(tmp_path / "out"), open_shards(tmp_path / "out").counts()["dropped"]
    assert 4 <= len(saved) < 30
    result = peagle(*command, "--json")
    assert result.status == 0 and result.json["num_rows"] == 30
    finished = rows_of(tmp_path / "out")
    assert len(finished) == 30 and saved.items() <= finished.items()
    assert all(number <= result.json["dropped"][reason] for reason, number in dropped.items())


def test_a_full_disk_in_the_middle_is_explained_and_the_same_command_goes_on(peagle, on_target, prompts, tmp_path):
    command = ("data", "regenerate", "--prompts", prompts, "--output", tmp_path / "out", *SHORT, *on_target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))  # no file may grow beyond this
    try:
        result = peagle(*command, "--max-batch", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    saved = rows_of(tmp_path / "out")
    assert result.status == 2 and 0 < len(saved) < NUM_PROMPTS
    assert f"cannot write to {tmp_path / 'out'}: " in result.err and f"the {len(saved)} finished rows" in result.err
    assert "rerun the command to resume" in result.err
    assert peagle(*command).status == 0
    finished = rows_of(tmp_path / "out")
    assert sorted(finished) == list(range(NUM_PROMPTS)) and saved.items() <= finished.items()


def test_a_finished_command_given_again_does_nothing_and_says_the_same(peagle, on_target, prompts, tmp_path):
    command = ("data", "regenerate", "--prompts", prompts, "--output", tmp_path / "out", *SHORT, *on_target, "--json")
    first, again = peagle(*command).json, peagle(*command).json
    same = ("num_rows", "num_tokens", "num_answer_tokens", "dropped")
    assert [first[name] for name in same] == [again[name] for name in same] and again["seconds"] == 0


def test_greedy_answers_are_set_apart_for_measuring(peagle, on_target, prompts, tmp_path, quick):
    limits = ("--num-answers", 8, "--max-length", 64, "--keep-cut", *quick)
    heats = ("--temperatures", 0, 2, "--num-held-out", 1)
    result = peagle("data", "synthesize", "--given", prompts, *limits, *heats, "--output", tmp_path / "out", *on_target)
    assert result.status == 0, result.err
    trained, apart = rows_of(tmp_path / "out"), rows_of(tmp_path / "out" / "held_out")
    assert len(trained) + len(apart) == 8 and not trained.keys() & apart.keys()
    assert all(heat == 0 for _, _, heat in apart.values())


def test_the_rate_of_a_run_that_goes_on_counts_its_own_answers_alone(peagle, on_target, prompts, tmp_path, quick):
    limits = ("--max-length", 64, "--keep-cut", *quick)
    quick[1].write_text(QUICK + "keep_loops = true\n")
    heats = ("--temperatures", 0, "--num-held-out", 8)
    output = ("--output", tmp_path / "out", "--json")
    command = ("data", "synthesize", "--given", prompts, *limits, *heats, *output, *on_target)
    first, second = (peagle(*command, "--num-answers", number).json for number in (8, 9))
    num_new = second["num_answer_tokens"] - first["num_answer_tokens"]
    assert second["tokens_per_second"] * second["seconds"] == pytest.approx(num_new, rel=0.5)


def test_given_prompts_that_repeat_are_in_the_final_table(peagle, on_target, tmp_path, quick):
    path = tmp_path / "prompts.txt"
    path.write_text("the user asks\nthe user asks\nthe user asks more\n")
    limits = ("--num-answers", 1, "--max-length", 64, "--keep-cut", *quick)
    result = peagle("data", "synthesize", "--given", path, *limits, "--output", tmp_path / "out", *on_target)
    assert result.status == 0 and re.search(r"dropped, prompt: given before\D+1 ", result.out)
    assert re.search(r"^\d+ kept, \d+ dropped \(\d+ \w+: [a-z ]+\)$", result.out.splitlines()[-1]), result.out


def test_an_interrupt_keeps_what_is_finished(peagle, on_target, prompts, tmp_path, monkeypatch):
    from peagle.engine.engine import Engine

    step, finished = Engine.step, []

    def interrupted(self):
        if len(finished) > 3:
            raise KeyboardInterrupt
        outputs = step(self)
        finished.extend(outputs)
        return outputs

    command = ("data", "regenerate", "--prompts", prompts, "--output", tmp_path / "out", *SHORT, *on_target)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        assert peagle(*command).status == 130
    assert len(rows_of(tmp_path / "out")) == len(finished)
    shown = peagle("data", "inspect", tmp_path / "out", "--target", on_target[1])
    assert "unfinished: rerun the command to resume" in shown.out
    assert peagle(*command).status == 0 and len(rows_of(tmp_path / "out")) == NUM_PROMPTS


MULTI_TURN = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "b"},
    ]
}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "dog", "content": "w"}]}, "['role'] is 'dog'; allowed: system, developer, user"),
        ({"messages": [{"role": "assistant", "content": "w"}]}, "no user message (messages row)"),
        ({"conversations": [{"from": "gpt", "value": "w"}]}, "no user message (sharegpt row)"),
        ({"prompt": " "}, "the prompt is empty (prompt row)"),
        ({"text": "x"}, "no prompt found; keys found: text"),
        ({"turns": ["a", 3]}, "'turns' is a list"),
    ],
)
def test_bad_prompt_rows_are_refused_with_file_and_line(peagle, tmp_path, row, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(MULTI_TURN) + "\n" + json.dumps(row) + "\n")
    result = peagle("data", "regenerate", "--prompts", path, "--output", tmp_path / "out")
    assert result.status == 2 and f"error: {path}:2: " in result.err and words in result.err
    assert not (tmp_path / "out").exists()


def test_broken_json_is_refused_with_file_and_line(peagle, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    result = peagle("data", "regenerate", "--prompts", path, "--output", tmp_path / "out")
    assert result.status == 2 and f"{path}:2: not valid JSON" in result.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("synthesize",), "no stopping condition"),
        (("synthesize", "--num-answers", 0), "num_answers must be above 0, got 0"),
        (("synthesize", "--num-answers", 3, "--max-length", 9999), "max_length 9999 exceeds the target's 512"),
        (("synthesize", "--num-answers", 10**15, "--max-length", 500), "the disk is too small: at most about"),
        (("regenerate", "--prompts", "none.jsonl"), "no file at none.jsonl"),
        (("regenerat",), "no command 'data regenerat'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(peagle, on_target, tmp_path, argv, words):
    result = peagle("data", *argv, "--output", tmp_path / "out", *on_target)
    assert result.status == 2 and words in result.err, result.err
    assert not (tmp_path / "out").exists()


def test_other_settings_and_other_targets_are_refused(peagle, on_target, models, prompts, tmp_path):
    command = ("data", "regenerate", "--prompts", prompts, "--output", tmp_path / "out", *SHORT)
    assert peagle(*command, *on_target, "--limit", 3).status == 0
    refused = peagle(*command, *on_target, "--limit", 3, "--temperatures", 0)
    assert refused.status == 2 and "temperatures was [0.0, 0.0, 0.7, 1.0], is [0.0]" in refused.err
    stranger = peagle(*command, "--limit", 3, "--target", models / "stranger", "--dtype", "float32")
    assert stranger.status == 2 and "the target's weights: was 'target'" in stranger.err
    changed = peagle(*command, *on_target, "--limit", 2)
    assert changed.status == 2 and "prompts was" in changed.err


def test_a_larger_limit_adds_the_next_prompts_of_the_file(peagle, on_target, prompts, tmp_path):
    command = ("data", "regenerate", *on_target, *SHORT, "--prompts", prompts)
    for output, limit in (("grown", 3), ("grown", 4), ("fresh", 4)):
        assert peagle(*command, "--output", tmp_path / output, "--limit", limit).status == 0
    assert len(rows_of(tmp_path / "grown")) == 4 and rows_of(tmp_path / "grown") == rows_of(tmp_path / "fresh")


def test_a_larger_limit_is_refused_with_several_files_because_it_numbers_prompts_anew(
    peagle, on_target, prompts, tmp_path
):
    more = prompts.with_name("more.jsonl")
    more.write_text(prompts.read_text())
    command = ("data", "regenerate", *on_target, *SHORT, "--prompts", prompts, more, "--output", tmp_path / "out")
    assert peagle(*command, "--limit", 3).status == 0
    refused = peagle(*command, "--limit", 4)
    assert refused.status == 2 and "prompts was" in refused.err


def test_the_overview_names_every_command(peagle):
    for argv in ((), ("--help",), ("-h",)):
        result = peagle("data", *argv)
        assert result.status == 0 and all(
            f"\n  {name}" in result.out for name in ("synthesize", "regenerate", "inspect")
        )


def test_a_setting_of_the_recipe_given_as_an_option_names_its_key(peagle, tmp_path):
    result = peagle("data", "synthesize", "--output", tmp_path / "out", "--num-answers", 1, "--top-k", 5)
    assert result.status == 2
    assert result.err == "error: unknown option --top-k\nhint: set `top_k` in a recipe file: --recipe FILE.toml\n"
