"""A save that is killed at any moment leaves the old drafter or the new one, never a mix of both."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.drafter_passes import card_for
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.card import read_card
from peagle.checkpoint.layouts import complete_directory
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.vllm.models import facts_of, find_models

CHANGES = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
KILLED = 7
MOST_CHANGES = 60


def save(target, directory: Path, generation: int) -> None:
    """Write generation 1 or 2, each of which can be told in all three files."""
    drafter = tiny_drafter(target, num_draft_tokens=2 + generation, fc_norm=generation == 1)
    with torch.no_grad():
        drafter.fc.weight.fill_(generation)
    save_drafter(drafter, directory, card_for(target, drafter), full=False, dtype=torch.float32)


def save_and_die(target, directory: Path, after: int) -> bool:
    """Save generation 2 in a child that is killed before its `after`th change to the directory; True if it was."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    seen = 0

    def count(event: str, _: tuple) -> None:
        nonlocal seen
        if event in CHANGES:
            seen += 1
            if seen > after:
                os._exit(KILLED)

    sys.addaudithook(count)
    try:
        save(target, directory, 2)
    finally:
        os._exit(0)


def generation_of_files(directory: Path) -> set[int]:
    """The generations that the plain files of a directory are of."""
    values = json.loads((directory / "config.json").read_text())
    card = read_card(directory)
    assert card is not None
    weights = load_file(directory / "model.safetensors")["fc.weight"]
    return {1 if values["fc_norm"] else 2, (card.num_draft_tokens or 0) - 2, int(weights[0, 0])}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_between_any_two_changes_leaves_the_old_or_the_new_drafter(tmp_path: Path) -> None:
    target = tiny_target()
    found = []
    for after in range(MOST_CHANGES):
        directory = tmp_path / str(after)
        save(target, directory, 1)
        was_killed = save_and_die(target, directory, after)
        loaded = load_drafter(directory, target)
        generation = int(loaded.fc.weight[0, 0])
        assert (
            loaded.card is not None and loaded.card.num_draft_tokens == 2 + generation == loaded.config.num_draft_tokens
        )
        assert loaded.config.fc_norm == (generation == 1)
        assert generation_of_files(complete_directory(directory)) == {generation}
        if (directory / "config.json").exists():
            assert len(generation_of_files(directory)) == 1, "another program must not see a mix"
        found.append(generation)
        save(target, directory, 1)
        names = sorted(path.name for path in directory.iterdir())
        assert names == ["config.json", "drafter_card.json", "model.safetensors"], "the next save cleans up"
        assert generation_of_files(directory) == {1}
        if not was_killed:
            break
    assert not was_killed and found[0] == 1 and found[-2:] == [2, 2] and found == sorted(found)


def test_vllm_is_given_the_complete_save(tmp_path: Path) -> None:
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save(target, tmp_path / "drafter", 2)
    (tmp_path / "drafter").rename(tmp_path / "complete")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "complete").rename(tmp_path / "drafter" / ".saved")
    found = find_models(str(tmp_path / "target"), str(tmp_path / "drafter")).drafter
    assert found is not None and found == facts_of(tmp_path / "drafter" / ".saved")


def test_a_malformed_weight_index_is_named(tmp_path: Path) -> None:
    from peagle.errors import CheckpointError

    target = tiny_target()
    save(target, tmp_path, 1)
    (tmp_path / "model.safetensors").unlink()
    for content in ("{}", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"fc.weight": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        for read in (lambda: load_drafter(tmp_path, target), lambda: facts_of(tmp_path)):
            with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
                read()
