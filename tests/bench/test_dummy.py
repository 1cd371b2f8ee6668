"""Random drafters and the acceptance that is assumed for them."""

import json

import pytest
import torch

from harness.dummy_shapes import TINY
from peagle.bench.dummy import (
    assumed_shares,
    drafter_bytes,
    dummy_drafter,
    published_drafter,
    published_shares,
)
from peagle.errors import ConfigError
from peagle.targets.catalog import entries
from peagle.targets.shapes import SHAPES, dummy_target


def test_every_shape_of_the_catalog_exists():
    shapes = [entry.shape for entry in entries() if entry.shape]
    assert len(shapes) == 4 and set(shapes) <= SHAPES.keys()


def test_published_lengths_are_met_at_the_published_depth():
    for shape, depth, length in (("gpt-oss-20b", 7, 3.70), ("gpt-oss-120b", 5, 2.68), ("qwen3-30b-a3b", 10, 3.25)):
        shares = published_shares(shape, depth)
        assert 1 + sum(shares) == pytest.approx(length) and published_shares(shape, depth - 1) == shares[:-1]
        assert published_drafter(shape).acceptance_source.startswith("MT-Bench")
    assert 1 + sum(published_shares("gpt-oss-20b", 3)) == pytest.approx(2.87, abs=0.1), "published at 3 drafts"


def test_a_shape_without_a_published_length_is_refused():
    with pytest.raises(ConfigError, match="no acceptance length is published for the shape gemma-4-31b") as caught:
        published_shares("gemma-4-31b", 7)
    assert "gpt-oss-20b, gpt-oss-120b, qwen3-30b-a3b" in caught.value.hint


@pytest.mark.parametrize("shape", ["gpt-oss-20b", "gpt-oss-120b"])
def test_a_dummy_drafter_has_the_published_size(shape):
    published = published_drafter(shape)
    with torch.device("meta"):
        target = Shape(SHAPES[shape])
        drafter = dummy_drafter(target, 7, published=published)
    table = target.head_VD.numel()
    own = sum(parameter.numel() for parameter in drafter.parameters())
    assert own + 2 * table == pytest.approx(published.num_parameters, rel=0.01)
    if shape == "gpt-oss-20b":
        assert own == pytest.approx(0.64e9, rel=0.01) and drafter.config.intermediate_size == 14336


class Shape:
    """What a drafter takes from a target, without its weights."""

    def __init__(self, settings):
        from transformers import AutoConfig

        settings = dict(settings)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        self.model = torch.nn.Module()
        self.model.config = config
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.max_length, self.aux_layer_ids = config.max_position_embeddings, (2, 12, 21)
        self.embedding_VD = self.head_VD = torch.empty(self.vocab_size, self.hidden_size, dtype=torch.bfloat16)
        self.dtype, self.device = torch.bfloat16, torch.device("meta")


def test_a_slimmer_drafter_reads_less(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    target = dummy_target(str(path), dtype="float32", device="cpu")
    usual, short, small = (dummy_drafter(target, 3, *size) for size in ((), (1,), (None, 20)))
    assert len(usual.layers) == 4 and len(short.layers) == 1
    assert drafter_bytes(usual) - drafter_bytes(small) == 4 * (50 - 20) * 32
    assert small.logits(torch.zeros(1, 32)).shape == (1, 20)


def test_shares_that_are_given_are_taken():
    assert assumed_shares([0.9, 0.5, 0.1], 2) == (0.9, 0.5)
