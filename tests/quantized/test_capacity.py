"""Whether few-bit weights fit is told from headers, the catalog or the hub, before any is downloaded or loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.few_bit_models import store_in_few_bits
from harness.published_models import PUBLISHED
from harness.published_models import write_target as write_published
from harness.tiny_models import tiny_target, write_target
from peagle.errors import CapacityError, TargetError
from peagle.experts.few_bit import set_experts
from peagle.experts.fused import gate_of
from peagle.quantized.headers import FewBitCheckpoint, read_few_bit
from peagle.quantized.keep import Keep, kept_bytes
from peagle.quantized.load import load_model
from peagle.targets import capacity, hub, load
from peagle.targets.catalog import GB, CatalogEntry, find
from peagle.targets.load import load_target


def checkpoint_of(directory: Path) -> FewBitCheckpoint:
    checkpoint = read_few_bit(directory, with_all=True)
    assert checkpoint is not None
    return checkpoint


def little(directory: Path, name: str) -> Path:
    write_target(tiny_target(num_layers=2, tie_word_embeddings=False), directory)
    store_in_few_bits(directory, name)
    return directory


def test_the_bytes_of_a_kept_model_are_known_from_its_headers(tmp_path: Path) -> None:
    directory = write_published(PUBLISHED["gpt-oss-20b"], tmp_path / "stored")
    kept, _ = load_model(directory, torch.bfloat16, Keep(torch.device("cpu"), gate_of, set_experts))
    rotary = kept.model.rotary_emb
    held = sum(each.nbytes for each in [*kept.parameters(), *kept.buffers()])
    held -= sum(each.nbytes for each in rotary.buffers())
    assert kept_bytes(checkpoint_of(directory), 2) == held


def check(name: str, free_gb: float, **options: Any) -> str:
    """What the check of memory says on a GPU with so much of it."""
    gpu = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free_gb * GB), int(free_gb * GB)))
        patch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        try:
            capacity.check_fits(name, options.pop("num_parameters", 0), torch.bfloat16, gpu, **options)
        except CapacityError as error:
            return f"{error.message} / {error.hint}"
    return ""


def test_the_check_of_memory_counts_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = find("gpt-oss-120b")
    assert entry is not None
    size: dict[str, Any] = {"num_parameters": entry.num_parameters, "entry": entry}
    assert not check("gpt-oss-120b", 80, **size)
    refused = check("gpt-oss-120b", 48, **size)
    assert "116.8 billion parameters in their quantized form take 65.2 GB, but a GPU has 48.0 GB" in refused
    assert "vLLM spreads it over several GPUs" in refused and "--quantize" not in refused
    monkeypatch.setattr(hub, "few_bit_bytes", lambda name: 5 * 10**9 if name == "some/awq" else None)
    assert not check("some/awq", 6, num_parameters=8 * 10**9)
    assert "of 2 bytes (bfloat16) take 16.0 GB" in check("some/plain", 6, num_parameters=8 * 10**9)
    little(tmp_path, "awq-64")
    size = {"num_parameters": capacity.count_parameters(tmp_path), "directory": tmp_path}
    stored = kept_bytes(checkpoint_of(tmp_path), 2) / GB
    assert stored < 0.95 * 2 * size["num_parameters"] / GB
    assert not check("it", stored, **size) and "in their quantized form" in check("it", 0.99 * stored, **size)
    little(tmp_path, "awq")
    assert "of 2 bytes (bfloat16)" in check("it", stored, **size)


def test_catalog_entries_know_which_of_their_targets_is_stored_in_few_bits() -> None:
    def fits(name: str, entry: CatalogEntry) -> bool:
        return not check(name, 1.5 * entry.stored_gb, num_parameters=entry.num_parameters, entry=entry)

    coder = find("qwen3-coder-30b-a3b-instruct")
    assert coder is not None and coder.quantized_target is not None
    assert fits(coder.quantized_target, coder) and fits(coder.quantized_target.lower(), coder)
    assert not fits(coder.name, coder) and not fits(coder.target, coder)
    smaller = replace(coder, weights="fp8", quantized_target="some/copy-in-4-bits", stored_gb=16)
    assert fits("some/copy-in-4-bits", smaller) and not fits(smaller.target, smaller), "the size is that of the copy"


def test_a_catalog_target_in_few_bits_is_not_downloaded_to_be_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cached", lambda *_: None)
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("downloaded"))
    monkeypatch.setattr(load.few_bit, "check_quantize", lambda *_: None)
    with pytest.raises(TargetError, match=r"gpt-oss-20b is already quantized \(mxfp4\)"):
        load_target("gpt-oss-20b", dtype="bfloat16", device="cpu", quantize="int4")
