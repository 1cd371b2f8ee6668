"""`peagle export`: a directory that loads again, and the command that serves it."""

import json
import shlex
import shutil

from safetensors.torch import load_file

from peagle.drafter.checkpoint import load_drafter
from peagle.targets.load import load_target


def test_the_directory_loads_again_and_drafts_the_same(peagle, on_models, tmp_path):
    result = peagle("export", tmp_path / "out", *on_models)
    assert result.status == 0, result.err
    target = load_target(on_models[1], dtype="float32")
    assert load_drafter(tmp_path / "out", target).config == load_drafter(on_models[3], target).config
    assert "embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors"), "vLLM reads the table from here"
    card = json.loads((tmp_path / "out" / "drafter_card.json").read_text())
    assert card["provenance"]["command"] and card["target"]["name"] == "tiny"


def test_stdout_is_the_command_to_serve_it_with_and_survives_odd_paths(peagle, on_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = peagle("export", "it's here", *on_models)
    assert result.out.count("\n") == 1
    program, verb, target, flag, settings = shlex.split(result.out)
    assert (program, verb, target, flag) == ("vllm", "serve", on_models[1], "--speculative-config")
    assert json.loads(settings) == {
        "method": "eagle3",
        "model": str(tmp_path / "it's here"),
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }


def test_a_drafter_without_a_card_is_exported_with_what_is_known(peagle, models, tmp_path):
    drafter = shutil.copytree(models / "drafter", tmp_path / "drafter")
    (drafter / "drafter_card.json").unlink()
    chosen = ("--target", models / "target", "--drafter", drafter, "--dtype", "float32")
    assert peagle("export", tmp_path / "out", *chosen).status == 0
    target = load_target(models / "target", dtype="float32")
    assert load_drafter(tmp_path / "out", target).config.num_draft_tokens is None


def test_an_empty_directory_is_filled_and_anything_else_is_refused(peagle, on_models, tmp_path):
    (tmp_path / "out").mkdir()
    assert peagle("export", tmp_path / "out", *on_models).status == 0
    before = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    result = peagle("export", tmp_path / "out", *on_models)
    assert result.status == 2 and result.out == ""
    assert f"error: {tmp_path / 'out'} is not empty\nhint: give a new directory" in result.err
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before
