"""Headers and indices of safetensors checkpoints, good ones and damaged ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peagle.errors import CheckpointError
from peagle.safetensors_header import TensorInfo, read_header, read_index, weight_files

INDEX = "model.safetensors.index.json"


def write_header(path: Path, header: object) -> None:
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)


def test_a_header_gives_types_shapes_and_places_of_all_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.arange(4, dtype=torch.float32)}
    save_file(tensors, path, metadata={"format": "pt"})
    found = read_header(path)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("F32", (4,)),
    }
    assert path.read_bytes()[found["b"].start : found["b"].end] == tensors["b"].numpy().tobytes()
    assert max(info.end for info in found.values()) == path.stat().st_size


def test_a_file_without_tensors_has_an_empty_header(tmp_path: Path) -> None:
    save_file({}, tmp_path / "empty.safetensors")
    assert read_header(tmp_path / "empty.safetensors") == {}
    write_header(tmp_path / "scalar.safetensors", {"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}})
    (info,) = read_header(tmp_path / "scalar.safetensors").values()
    assert isinstance(info, TensorInfo) and info.shape == () and info.end - info.start == 4


@pytest.mark.parametrize(
    "write",
    [
        lambda path: None,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1"),
        lambda path: path.write_bytes((2**40).to_bytes(8, "little") + b"{}"),
        lambda path: path.write_bytes((3).to_bytes(8, "little") + b"\xff\xfe{"),
        lambda path: write_header(path, []),
        lambda path: write_header(path, {"a": 3}),
        lambda path: write_header(path, {"a": {"dtype": "F32", "shape": [1]}}),
        lambda path: write_header(path, {"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}),
        lambda path: write_header(path, {"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}}),
        lambda path: write_header(path, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}),
    ],
)
def test_a_damaged_header_is_refused_with_the_file_and_the_fix(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "model.safetensors"
    write(path)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors") as caught:
        read_header(path)
    assert str(path) in caught.value.message and "download it again" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weights": {}}', "is not an index of weight files: it has no key 'weight_map'"),
        ('{"weight_map": ["a"]}', "is not an index of weight files: expected a JSON object, got list"),
        ("[]", "is not an index of weight files"),
        ("{", "is not an index of weight files"),
        ('{"weight_map": {"a": 3}}', "names the file 3, which is not in its directory"),
        ('{"weight_map": {"a": ["b"]}}', "names the file ['b'], which is not in its directory"),
        (
            '{"weight_map": {"a": "../a.safetensors"}}',
            "names the file '../a.safetensors', which is not in its directory",
        ),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors, which is missing"),
    ],
)
def test_a_malformed_index_is_refused_with_the_file_and_the_fix(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        weight_files(tmp_path)
    assert f"{tmp_path / INDEX} {message}" in caught.value.message and "again" in str(caught.value.hint)


def test_the_files_of_an_index_come_sorted_and_once(tmp_path: Path) -> None:
    for name in ("2.safetensors", "1.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert len(weight_files(tmp_path)) == 3
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}})
    )
    assert read_index(tmp_path / INDEX) == weight_files(tmp_path)
    assert [path.name for path in weight_files(tmp_path)] == ["1.safetensors", "2.safetensors"]
