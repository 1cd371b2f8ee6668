"""Blocks of GGUF files, quantized for real by the gguf package, give exactly the converted checkpoint."""

from pathlib import Path

import gguf
import pytest
import torch

from harness.gguf_files import tiny_gguf_target, write_gguf
from peagle.native.gguf_blocks import blocks_path, write_blocks
from peagle.native.packed_linear import blocks_of
from peagle.targets.load import convert_gguf, load_target


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_every_kind_give_the_weights_bit_for_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp reorders the rows of queries and keys, so their blocks come in another order than the weight."""
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tiny_gguf_target(), gguf.GGMLQuantizationType[kind])
    target = load_target(tmp_path / "tiny.gguf", dtype="float32", device="cpu")
    num_matrices = 0
    for name, weight in target.model.named_parameters():
        blocks = blocks_of(weight)
        assert (blocks is None) == (weight.dim() == 1), name
        if blocks is not None:
            num_matrices += 1
            assert torch.equal(blocks.weight(), weight), name
            assert (blocks.offset_OG is None) == (kind == "Q8_0")
    assert num_matrices == 2 * 7 + 1


def test_a_file_without_blocks_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tiny_gguf_target())
    target = load_target(tmp_path / "tiny.gguf", dtype="float32", device="cpu")
    assert all(blocks_of(weight) is None for weight in target.model.parameters())


def test_blocks_that_give_other_numbers_than_the_checkpoint_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    for name, seed in (("tiny", 0), ("other", 1)):
        write_gguf(tmp_path / f"{name}.gguf", tiny_gguf_target(seed), gguf.GGMLQuantizationType.Q4_1)
    directory = convert_gguf(tmp_path / "tiny.gguf", "tiny")
    write_blocks(tmp_path / "other.gguf", directory)
    target = load_target(tmp_path / "tiny.gguf", dtype="float32", device="cpu")
    assert blocks_path(directory).is_file()
    assert all(blocks_of(weight) is None for weight in target.model.parameters())
