"""The benchmarks of training: their tables, on a tiny target."""

import json
import runpy
from pathlib import Path

import pytest

from harness.tiny_models import tiny_target, write_drafter, write_target
from peagle.checkpoint.card import read_card

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MAIN = runpy.run_path(str(BENCHMARKS / "training.py"))["main"]
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "vocab_size": 300,
}


def test_memory_is_planned_for_each_number_of_segments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    options = ["--length", "64", "--partitions", "1", "3", "--num-layers", "1", "--num-draft-tokens", "8", "16"]
    options += ["--batch-size", "2"]
    MAIN(["memory", "--shape", str(tmp_path / "shape.json"), *options])
    table = [line.split() for line in capsys.readouterr().out.rpartition("\n\n")[2].splitlines()]
    assert table[0] == ["depths", "segments", "planned", "measured", "s/step"]
    assert [(row[0], row[1], row[3], row[4]) for row in table[1:]] == [
        (depths, segments, "GiB", "-") for depths in ("8", "16") for segments in ("1", "3")
    ]


@pytest.mark.slow
def test_each_change_is_trained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_target(tiny_target(), tmp_path / "target")
    rows = [{"prompt_ids": [5, 6, 7 + n], "answer_ids": list(range(20, 50)), "temperature": 0} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["ablations", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "rows.jsonl")]
    command += ["--output", str(tmp_path / "out"), "--num-steps", "2", "--batch-size", "2", "--max-length", "40"]
    MAIN([*command, "--only", "base", "--settings", "num_layers=1"])
    written = (tmp_path / "out" / "base" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    changes = ["retention", "tv-decay", "five-target-layers"]
    MAIN([*command, "--only", "base", *changes, "--settings", "num_layers=1"])
    assert (tmp_path / "out" / "base" / "model.safetensors").stat().st_mtime_ns == written
    table = capsys.readouterr().out.rstrip().rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table] == ["change", "base", *changes]
    settings = json.loads((tmp_path / "out" / "retention" / "run" / "settings.json").read_text())
    assert settings["retention"] == 0.6 and settings["num_layers"] == 1
    assert all(float(line.split()[2]) >= 1 for line in table[1:]), "acceptance was replayed"
    written = {name: read_card(tmp_path / "out" / name) for name in changes}
    assert written["five-target-layers"].aux_layer_ids == (2, 3, 4, 5)
    assert written["tv-decay"].training["loss"] == "tv+ce" and written["tv-decay"].training["depth_weights"][1] == 0.8


@pytest.mark.slow
def test_a_pair_head_is_trained_once_and_compared_as_chain_and_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    main = runpy.run_path(str(BENCHMARKS / "pair_head.py"))["main"]
    target = tiny_target(num_layers=4)
    write_target(target, tmp_path / "target")
    write_drafter(target, tmp_path / "drafter")
    rows = [{"prompt_ids": [5, 6, 7 + n], "answer_ids": list(range(20, 50)), "temperature": 0} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "asked.jsonl").write_text('{"prompt": "the user"}\n{"prompt": "as the"}\n')
    command = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--dtype", "float32"]
    command += [
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--tables",
        "projected",
        "free",
    ]
    command += ["--prompts", str(tmp_path / "asked.jsonl"), "--ranks", "4", "--num-steps", "2", "--batch-size", "2"]
    command += ["--max-length", "40", "--max-tokens", "12", "--chain", "3", "--depth", "4", "--nodes", "6"]
    main(command)
    written = (tmp_path / "out" / "free-4" / "pair_head.safetensors").stat().st_mtime_ns
    first = capsys.readouterr().out
    main(command)
    assert (tmp_path / "out" / "free-4" / "pair_head.safetensors").stat().st_mtime_ns == written
    table = capsys.readouterr().out.splitlines()[-7:]
    assert table == first.splitlines()[-7:]
    assert [tuple(line.split("\t")[:3]) for line in table] == [
        ("prompts", "drafts", "pair head"),
        *(
            ("asked", form, head)
            for form in ("chain, K = 3", "6 nodes")
            for head in ("no", "rank 4 projected", "rank 4 free")
        ),
    ]
    assert all(line.split("\t")[-1] == "0" for line in table[1:]), "answers differ"
    for name in ("held_out_replay_without_pair_head", "held_out_replay", "baseline"):
        assert f"rank 4 free, {name}: " in first


@pytest.mark.slow
def test_changes_of_the_training_start_from_a_trained_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target()
    write_target(target, tmp_path / "target")
    write_drafter(target, tmp_path / "drafter")
    rows = [{"prompt_ids": [5, 6, 7 + n], "answer_ids": list(range(20, 50)), "temperature": 0} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["ablations", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "rows.jsonl")]
    command += ["--output", str(tmp_path / "out"), "--num-steps", "1", "--batch-size", "2", "--max-length", "40"]
    MAIN([*command, "--from-drafter", str(tmp_path / "drafter"), "--only", "lk", "--settings", "num_layers=2"])
    capsys.readouterr()
    settings = json.loads((tmp_path / "out" / "lk" / "run" / "settings.json").read_text())
    assert settings["from_drafter"] == str(tmp_path / "drafter")
    assert settings["learning_rate"] == 3e-4 and settings["loss"] == "lk"
