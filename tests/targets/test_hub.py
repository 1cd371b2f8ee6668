"""Which of a model's files make it complete, where its makers keep the weights in two forms."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from peagle.errors import CheckpointError, TargetError
from peagle.targets.hub import What, _check_complete, cached, count_parameters, fetch, few_bit_bytes


def put(directory: Path, *names: str) -> Path:
    """Files by these names; an index names the one shard that its form has."""
    for name in names:
        shard = "shard.bin" if ".bin." in name else "shard.safetensors"
        (directory / name).write_text(json.dumps({"weight_map": {"weight": shard}}))
    return directory


@pytest.mark.parametrize("what", ["target", "drafter"])
@pytest.mark.parametrize("weights", [("model.safetensors",), ("model.safetensors.index.json", "shard.safetensors")])
def test_an_index_of_pickled_shards_beside_safetensors_does_not_matter(
    tmp_path: Path, what: What, weights: tuple[str, ...]
) -> None:
    """The shards themselves are not fetched for a target, so they were always missing."""
    _check_complete(put(tmp_path, "config.json", "pytorch_model.bin.index.json", *weights), what)


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_where_there_is_one_form_its_own_index_counts(tmp_path: Path, kind: str) -> None:
    names = {"bin": "pytorch_model.bin.index.json", "safetensors": "model.safetensors.index.json"}
    put(tmp_path, "config.json", names[kind])
    with pytest.raises(CheckpointError, match=f"names shard.{kind}, which is missing"):
        _check_complete(tmp_path, "drafter")
    _check_complete(put(tmp_path, f"shard.{kind}"), "drafter")


def test_shards_that_are_missing_are_not_made_up_for_by_the_other_form(tmp_path: Path) -> None:
    put(tmp_path, "config.json", "model.safetensors.index.json", "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"shard\.safetensors, which is missing"):
        _check_complete(tmp_path, "drafter")


@pytest.mark.parametrize("what", ["target", "drafter"])
def test_a_config_alone_is_not_complete(tmp_path: Path, what: What) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        _check_complete(put(tmp_path, "config.json"), what)


def test_a_downloaded_model_with_a_malformed_index_is_refused_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "config.json")
    (tmp_path / "model.safetensors.index.json").write_text('{"weights": []}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert cached("some/model", "target") is None
    with pytest.raises(TargetError, match="'some/model' is not a complete target") as caught:
        fetch("some/model", "target")
    assert f"{tmp_path / 'model.safetensors.index.json'} is not an index of weight files" in caught.value.message


@pytest.mark.parametrize(
    ("counts", "config", "num_parameters", "num_bytes"),
    [
        ({"BF16": 8_000_000_000}, {}, 8_000_000_000, None),
        ({"BF16": 1_804_459_584, "U8": 19_707_494_400}, {"quant_method": "mxfp4"}, 41_219_448_384, 23_316_413_568),
        ({"F16": 700, "I32": 800}, {"quant_method": "awq", "bits": 4}, 7_100, 4_600),
        ({"BF16": 100, "F8_E4M3": 900, "F32": 10}, {"quant_method": "fp8"}, 1_010, 1_120),
    ],
)
def test_the_hub_tells_sizes_before_a_download(
    counts: dict[str, int],
    config: dict[str, object],
    num_parameters: int,
    num_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = SimpleNamespace(safetensors=SimpleNamespace(parameters=counts), config={"quantization_config": config})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: about)
    assert count_parameters("some/model") == num_parameters
    assert few_bit_bytes("some/model") == num_bytes


def test_an_unreachable_hub_tells_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    assert count_parameters("some/model") is None and few_bit_bytes("some/model") is None
