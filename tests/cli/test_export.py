"""`peagle export`: a directory that loads again, and the command that serves it."""

import json
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.checkpoint.native import load_drafter
from peagle.checkpoint.pair_head import stored_tables
from peagle.drafter.pair_head import PairHead
from peagle.targets.load import load_target


@pytest.fixture
def given(models):
    """The drafter and the options that name its target."""
    return models / "drafter", "--target", models / "target", "--dtype", "float32"


@pytest.mark.parametrize("layout", [(), ("--to", "vllm"), ("--to", "speculators")], ids=str)
def test_the_directory_loads_again_and_drafts_the_same(peagle, given, tmp_path, layout):
    result = peagle("export", *given, *layout, "--output", tmp_path / "out")
    assert result.status == 0, result.err
    target = load_target(given[2], dtype="float32")
    assert load_drafter(tmp_path / "out", target).config == load_drafter(given[0], target).config
    assert "embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors"), "vLLM reads the table from here"
    card = json.loads((tmp_path / "out" / "drafter_card.json").read_text())
    assert card["provenance"]["command"] and card["target"]["name"] == "tiny"


def test_a_pair_head_is_left_out_with_a_word(peagle, given, tmp_path):
    shutil.copytree(given[0], tmp_path / "paired")
    head = PairHead(torch.ones(288, 2), torch.ones(288, 2))
    save_file(stored_tables(head), tmp_path / "paired" / "pair_head.safetensors")
    result = peagle("export", tmp_path / "paired", *given[1:], "--output", tmp_path / "out")
    assert result.status == 0 and "leaving out the pair head of rank 2, which only peagle reads" in result.err
    assert not (tmp_path / "out" / "pair_head.safetensors").exists()


def test_stdout_is_the_command_to_serve_it_with_and_survives_odd_paths(peagle, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = peagle("export", *given, "--output", "it's here")
    assert result.out.count("\n") == 1
    variable, program, verb, target, flag, settings = shlex.split(result.out)
    assert variable == "VLLM_USE_V2_MODEL_RUNNER=0", "vLLM's second model runner cannot draft in parallel"
    assert (program, verb, target, flag) == ("vllm", "serve", str(given[2]), "--speculative-config")
    assert json.loads(settings) == {
        "method": "eagle3",
        "model": str(tmp_path / "it's here"),
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }


def test_a_directory_of_speculators_is_served_by_its_own_name(peagle, given, tmp_path):
    result = peagle("export", *given, "--to", "speculators", "--output", tmp_path / "out")
    assert shlex.split(result.out)[1:] == ["vllm", "serve", str(tmp_path / "out")]
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == str(given[2])


def test_what_was_exported_can_be_exported_again_into_the_other_layout(peagle, given, tmp_path):
    assert peagle("export", *given, "--to", "speculators", "--output", tmp_path / "there").status == 0
    result = peagle("export", tmp_path / "there", *given[1:], "--output", tmp_path / "back")
    assert result.status == 0, result.err
    target = load_target(given[2], dtype="float32")
    assert load_drafter(tmp_path / "back", target).config == load_drafter(given[0], target).config


def test_a_drafter_without_a_card_is_exported_with_what_is_known(peagle, given, tmp_path):
    drafter = shutil.copytree(given[0], tmp_path / "drafter")
    (drafter / "drafter_card.json").unlink()
    assert peagle("export", drafter, *given[1:], "--output", tmp_path / "out").status == 0
    target = load_target(given[2], dtype="float32")
    assert load_drafter(tmp_path / "out", target).config.num_draft_tokens is None


def test_without_a_drafter_the_targets_own_is_meant(peagle, given, tmp_path):
    result = peagle("export", *given[1:], "--output", tmp_path / "out")
    assert result.status == 2 and "no drafter ships for target" in result.err


def test_an_empty_directory_is_filled_and_anything_else_is_refused(peagle, given, tmp_path):
    (tmp_path / "out").mkdir()
    assert peagle("export", *given, "--output", tmp_path / "out").status == 0
    before = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    result = peagle("export", *given, "--output", tmp_path / "out")
    assert result.status == 2 and result.out == ""
    assert f"error: {tmp_path / 'out'} is not empty\nhint: give a new directory" in result.err
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before


def test_a_layout_that_nobody_reads_is_refused(peagle, given, tmp_path):
    result = peagle("export", *given, "--to", "sglang", "--output", tmp_path / "out")
    assert result.status == 2 and "speculators" in result.err and not (tmp_path / "out").exists()
