"""Layers, torch-free files, budgets and names.

Each rule of `harness/architecture.py` is run on the real tree, and once on a small made-up source that breaks it, so
that a rule which stops seeing anything is noticed.
"""

import pytest

from harness.architecture import (
    ROOT,
    Source,
    circle_complaints,
    layer_complaints,
    name_complaints,
    package_complaints,
    read_tree,
    readme_complaints,
    size_complaints,
    torch_complaints,
)


def expect_none(complaints: list[str]) -> None:
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.fixture(scope="module")
def package() -> list[Source]:
    sources = read_tree(ROOT / "src")
    assert any(source.module == "peagle.errors" for source in sources), "the source tree was not found"
    return sources


@pytest.fixture(scope="module")
def everything(package: list[Source]) -> list[Source]:
    return package + read_tree(ROOT / "tests")


def test_imports_go_down_only(package: list[Source]) -> None:
    expect_none(layer_complaints(package))


def test_torch_free_files_do_not_load_torch(package: list[Source]) -> None:
    expect_none(torch_complaints(package))


def test_files_and_functions_keep_to_their_budgets(
    everything: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = size_complaints(everything)
    with capsys.disabled():
        print(*(f"\nover budget: {line}" for line in soft), sep="", end="")
    expect_none(hard)


def test_packages_keep_to_their_size(package: list[Source]) -> None:
    expect_none(package_complaints(package))


def test_no_files_import_each_other(package: list[Source]) -> None:
    expect_none(circle_complaints(package))


def test_no_file_has_a_name_that_says_nothing(everything: list[Source]) -> None:
    expect_none(name_complaints(everything))


def test_readme_fits_its_limit() -> None:
    expect_none(readme_complaints((ROOT / "README.md").read_text()))


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("peagle.drafter.model", "import peagle.training.trainer", "floor 6 imports 'training' of floor 13"),
        ("peagle.drafter.model", "def f():\n    from peagle.cli import main", "peagle.drafter.model:2: floor 6"),
        ("peagle.decoding.verify", "import peagle.checkpoint.native", "'checkpoint', which is on the same floor"),
        ("peagle.drafter.model", "from peagle import training", "floor 6 imports 'training' of floor 13"),
        ("peagle.drafter.model", "from peagle import decode", "'decode' through the package's front door"),
        ("peagle.drafter.model", "from ..engine import step", "floor 6 imports 'engine' of floor 10"),
        ("peagle.drafter.model", "f = lambda: import_module('peagle.cli.main')", "floor 6 imports 'cli' of floor 15"),
        ("peagle.drafter.model", "import peagle.gadgets", "imports peagle.gadgets, which has no floor"),
        ("peagle.gadgets.model", "", "'gadgets' has no floor"),
        ("peagle.config", "from peagle import provenance", "'provenance', which is on the same floor"),
    ],
)
def test_layer_rule_catches(module: str, text: str, complaint: str) -> None:
    (found,) = layer_complaints([Source(module, text)])
    assert complaint in found


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nfrom peagle import __version__, errors\nfrom peagle.kernels.attention import attend",
        "from peagle.drafter.slots import Slots\nfrom .config import DrafterConfig\nfrom . import vocab",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from peagle.targets.hf import HFTarget",
        "import typing\nif typing.TYPE_CHECKING:\n    import peagle.training.trainer",
    ],
)
def test_layer_rule_allows_lower_floors_its_own_package_and_type_checking(text: str) -> None:
    assert layer_complaints([Source("peagle.drafter.model", text)]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.nn as nn",
        "from torch import nn",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "class Report:\n    import torch",
        "from safetensors.torch import load_file",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch",
    ],
)
def test_torch_rule_catches_a_direct_import(text: str) -> None:
    (found,) = torch_complaints([Source("peagle.bench.report", text)])
    assert found.startswith("peagle.bench.report must not load torch: peagle.bench.report -> ")


def test_torch_rule_catches_an_import_through_other_modules_and_shows_the_chain() -> None:
    sources = [
        Source("peagle.cli.train", "from peagle.drafter import slots"),
        Source("peagle.drafter", "", is_package=True),
        Source("peagle.drafter.slots", "import torch"),
    ]
    (found,) = torch_complaints(sources)
    assert found.endswith("peagle.cli.train -> peagle.drafter.slots -> torch")


def test_torch_rule_catches_a_package_whose_init_is_not_light() -> None:
    (found,) = torch_complaints([Source("peagle.drafter", "import torch", is_package=True)])
    assert found.startswith("peagle.drafter must not load torch")


def test_torch_rule_allows_lazy_imports_and_files_that_compute() -> None:
    sources = [
        Source("peagle.cli.train", "def main():\n    import torch\n    from peagle.drafter import slots"),
        Source("peagle.bench.report", "import numpy\nif TYPE_CHECKING:\n    import torch"),
        Source("peagle.drafter.slots", "import torch"),
    ]
    assert torch_complaints(sources) == []


def test_size_rule_tells_soft_from_hard() -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    pass\n" * (lines - 1)

    cases = {400: (0, 0), 401: (1, 0), 600: (1, 0), 601: (0, 1)}
    for lines, expected in cases.items():
        soft, hard = size_complaints([Source("peagle.config", "x = 1\n" * lines)])
        assert (len(soft), len(hard)) == expected, f"a file of {lines} lines"
    cases = {60: (0, 0), 61: (1, 0), 100: (1, 0), 101: (0, 1)}
    for lines, expected in cases.items():
        soft, hard = size_complaints([Source("peagle.config", function(lines))])
        assert (len(soft), len(hard)) == expected, f"a function of {lines} lines"


def test_package_rule_catches_too_many_lines_and_files() -> None:
    lines = [Source("peagle.engine.a", "x = 1\n" * 2000), Source("peagle.engine.b.c", "x = 1\n" * 1001)]
    assert package_complaints(lines) == ["peagle.engine: 3001 lines, the limit is 3000"]
    files = [Source(f"peagle.engine.f{i}", "") for i in range(21)]
    assert package_complaints(files) == ["peagle.engine: 21 files, the limit is 20"]
    assert package_complaints([*lines[:1], *files[1:]]) == ["peagle.engine: 21 files, the limit is 20"]
    assert package_complaints([Source("peagle.tokenizer", "x = 1\n" * 4000)]) == []


def test_circle_rule_catches_two_files_and_a_longer_way_round() -> None:
    two = [Source("peagle.a.x", "from peagle.a import y"), Source("peagle.a.y", "def f():\n    import peagle.a.x")]
    assert circle_complaints(two) == ["circle of imports: peagle.a.x -> peagle.a.y -> peagle.a.x"]
    three = [
        Source("peagle.a.x", "import peagle.a.y"),
        Source("peagle.a.y", "import peagle.a.z"),
        Source("peagle.a.z", "import peagle.a.x"),
    ]
    (found,) = circle_complaints(three)
    assert found == "circle of imports: peagle.a.x -> peagle.a.y -> peagle.a.z -> peagle.a.x"
    assert circle_complaints([*three[:2], Source("peagle.a.z", "import torch")]) == []


def test_name_rule_catches_vague_files_and_folders() -> None:
    sources = [
        Source("peagle.drafter.utils", ""),
        Source("peagle.common.slots", ""),
        Source("peagle.drafter.slots", ""),
    ]
    complaints = name_complaints(sources)
    assert [line.split(":")[0] for line in complaints] == ["peagle.drafter.utils", "peagle.common.slots"]


def test_readme_rule_catches_the_line_too_many() -> None:
    assert readme_complaints("line\n" * 150) == []
    assert readme_complaints("line\n" * 151) == ["README.md: 151 lines, the limit is 150"]
