"""Blocks of GGUF files, quantized for real by the gguf package, give exactly the converted checkpoint."""

from pathlib import Path

import gguf
import pytest
import torch

from harness.gguf_files import tiny_gguf_target, write_gguf
from peagle.linears.joined_linear import Joined
from peagle.native.gguf_blocks import blocks_path, write_blocks
from peagle.native.linear_kernels import blocks_of
from peagle.native.products import BlockWeight, pack
from peagle.targets.load import convert_gguf, load_target
from peagle.worker.linear_layers import _joined_linear


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


def test_a_cache_without_room_for_blocks_costs_speed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tiny_gguf_target(), gguf.GGMLQuantizationType.Q4_1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peagle.native.gguf_blocks.write_atomically", full)
    with caplog.at_level("INFO"):
        target = load_target(tmp_path / "tiny.gguf", dtype="float32", device="cpu")
    assert all(blocks_of(weight) is None for weight in target.model.parameters())
    assert "the blocks of tiny.gguf are not kept: [Errno 28] No space left" in caplog.text


def test_parts_with_blocks_of_different_forms_are_joined_as_bfloat16() -> None:
    parts = [torch.nn.Linear(64, 32, bias=False) for _ in range(2)]
    for part, is_four_bit in zip(parts, (True, False), strict=True):
        codes_OI = torch.arange(32 * 64).view(32, 64) % 16
        scale_OG = torch.full((32, 2), 0.5).half()
        blocks = BlockWeight(
            codes_OI.to(torch.uint8 if is_four_bit else torch.int8), scale_OG, -scale_OG if is_four_bit else None
        )
        part.weight = torch.nn.Parameter(blocks.weight(), requires_grad=False)
        part.weight.blocks = blocks
    linear = _joined_linear(Joined(parts))
    assert blocks_of(linear.weight) is None
    assert pack(linear.weight).form == "bfloat16"
