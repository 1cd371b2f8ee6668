"""Training that goes on from a drafter in another maker's layout."""

from pathlib import Path

import pytest
import torch

from harness.drafter_layouts import nemo, speculators_peagle, speculators_qwen3
from harness.drafter_passes import draft_logits
from harness.tiny_models import tiny_target, write_drafter
from harness.tiny_training import settings
from peagle.errors import ConfigError
from peagle.training.initial_drafter import earlier_facts, initial_drafter


@pytest.mark.parametrize("layout", [nemo, speculators_peagle])
def test_training_goes_on_from_another_makers_drafter(tmp_path: Path, layout) -> None:
    made = layout(tmp_path / "theirs")
    shape = {"num_layers": 2, "num_draft_tokens": 4, "fc_norm": True, "embeddings": "own", "draft_vocab_size": 100}
    config = settings(tmp_path / "ours", from_drafter=tmp_path / "theirs", **shape)
    drafter = initial_drafter(made.target, config, None)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    with torch.no_grad():
        assert torch.equal(draft_logits(made.target, drafter), draft_logits(made.target, made.drafter))
    assert earlier_facts(made.target, tmp_path / "theirs")["name"] == "theirs"


def test_training_does_not_go_on_where_layers_see_a_window(tmp_path: Path) -> None:
    made = speculators_qwen3(tmp_path / "theirs")
    config = settings(tmp_path / "ours", from_drafter=tmp_path / "theirs", num_layers=2, fc_norm=False)
    with pytest.raises(ConfigError, match=r"sliding-window attention \(5 tokens\)"):
        initial_drafter(made.target, config, None)


def test_a_drafter_that_reads_more_layers_drafts_as_before_and_learns_from_them(tmp_path: Path) -> None:
    target = tiny_target()
    write_drafter(target, tmp_path / "earlier")
    shape = {"num_layers": 2, "num_draft_tokens": 4, "from_drafter": tmp_path / "earlier"}
    before = initial_drafter(target, settings(tmp_path / "same", **shape), None)
    assert before.config.aux_layer_ids == (2, 4, 5)
    with torch.no_grad():
        expected = draft_logits(target, before)
    wider = initial_drafter(target, settings(tmp_path / "wider", aux_layer_ids=(1, 2, 3, 4, 5), **shape), None)
    assert wider.config.aux_layer_ids == target.aux_layer_ids == (1, 2, 3, 4, 5)
    found = draft_logits(target, wider)
    torch.testing.assert_close(found, expected)
    found.square().mean().backward()
    gradients = wider.fc.weight.grad.view(64, 5, 64).abs().amax((0, 2))
    assert (gradients > 0).all()


def test_a_drafter_cannot_read_other_layers_than_before(tmp_path: Path) -> None:
    target = tiny_target()
    write_drafter(target, tmp_path / "earlier")
    shape = {"num_layers": 2, "num_draft_tokens": 4, "from_drafter": tmp_path / "earlier"}
    with pytest.raises(ConfigError, match="aux_layer_ids"):
        initial_drafter(target, settings(tmp_path / "other", aux_layer_ids=(1, 2, 5), **shape), None)
