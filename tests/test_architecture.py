"""The rules of docs/architecture.md that a machine can check: layers, torch-free files, budgets and names.

Each rule is a function from sources to complaints. It is run on the real tree, and once on a small made-up source
that breaks it, so that a rule which stops seeing anything is noticed.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A package imports only from lower floors.
FLOORS = {
    "cli": 15,
    "console": 14,
    "adaptation": 14,
    "building": 14,
    "sagemaker": 14,
    "report": 14,
    "tuning": 14,
    "training": 13,
    "bench": 13,
    "vllm": 13,
    "responses": 13,
    "objective": 12,
    "server": 12,
    "compare": 12,
    "data": 11,
    "engine": 10,
    "worker": 9,
    "scheduling": 8,
    "checkpoint": 7,
    "decoding": 7,
    "drafter": 6,
    "cost": 6,
    "targets": 5,
    "experts": 4,
    "native": 4,
    "quantized": 4,
    "linears": 3,
    "kernels": 2,
    "dialects": 2,
    "cache": 1,
    "config": 1,
    "host_memory": 1,
    "sampling_params": 1,
    "tokenizer": 1,
    "provenance": 1,
    "rows": 1,
    "safetensors_header": 1,
    "errors": 0,
}
TORCH_FREE_AREAS = {
    "bench",
    "cli",
    "config",
    "console",
    "dialects",
    "cost",
    "errors",
    "host_memory",
    "provenance",
    "responses",
    "report",
    "rows",
    "safetensors_header",
    "sagemaker",
    "sampling_params",
    "scheduling",
    "server",
    "tokenizer",
    "tuning",
    "vllm",
}
TORCH_FREE_MODULES = {
    "peagle",
    "peagle.checkpoint.card",
    "peagle.checkpoint.config_json",
    "peagle.checkpoint.layouts",
    "peagle.checkpoint.pairing",
    "peagle.data.prompts",
    "peagle.drafter.config",
    "peagle.objective.config",
    "peagle.quantized.formats",
    "peagle.quantized.headers",
    "peagle.targets.catalog",
    "peagle.targets.catalog_report",
    "peagle.targets.hub",
    "peagle.targets.prices",
}
# transformers is slow to import and loads torch; safetensors itself is light, its torch half is not.
HEAVY = ("torch", "transformers", "accelerate", "triton", "safetensors.torch")
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
FILE_LINES = (400, 600)
FUNCTION_LINES = (60, 100)
PACKAGE_LINES, PACKAGE_FILES = 3000, 20
README_LINES = 150


@dataclass(frozen=True)
class Source:
    """One Python file: its dotted module name, whether it is a package's `__init__`, and its text."""

    module: str
    text: str
    is_package: bool = False

    @property
    def area(self) -> str:
        """The entry of FLOORS it belongs to: "drafter" for peagle.drafter.slots, "" for peagle itself."""
        return area_of(self.module)


@dataclass(frozen=True)
class Import:
    """One imported module. `names` are what `from module import names` takes; they may be submodules."""

    module: str
    names: tuple[str, ...]
    line: int
    at_module_scope: bool


def area_of(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def read_tree(root: Path) -> list[Source]:
    sources = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        sources.append(Source(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return sources


@cache
def imports_of(source: Source) -> list[Import]:
    """Every import that can happen at run time, wherever it stands; what is under `if TYPE_CHECKING:` is left out."""
    return list(_walk_imports(ast.parse(source.text), source, at_module_scope=True))


def _walk_imports(node: ast.AST, source: Source, at_module_scope: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).split(".")[-1] == "TYPE_CHECKING":
            for statement in child.orelse:
                yield from _walk_imports(ast.Module([statement], []), source, at_module_scope)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), child.lineno, at_module_scope)
        elif isinstance(child, ast.ImportFrom):
            module = _absolute(child, source)
            yield Import(module, tuple(alias.name for alias in child.names), child.lineno, at_module_scope)
        else:
            if (name := _import_module_argument(child)) is not None:
                yield Import(name, (), child.lineno, at_module_scope)  # type: ignore[attr-defined]
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk_imports(child, source, at_module_scope and not is_function)


def _absolute(node: ast.ImportFrom, source: Source) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    base = parts[: len(parts) - node.level + source.is_package]
    return ".".join([*base, node.module] if node.module else base)


def _import_module_argument(node: ast.AST) -> str | None:
    """The module named in a call like `import_module("peagle.engine")`."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return None
    is_import = ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}
    return node.args[0].value if is_import and isinstance(node.args[0].value, str) else None


def layer_complaints(sources: list[Source]) -> list[str]:
    complaints = []
    for source in sources:
        if source.module in {"peagle", "peagle.__main__"}:  # the two doors into the package; nothing imports them
            continue
        if source.area not in FLOORS:
            complaints.append(f"{source.module}: {source.area!r} has no floor; give it one or move the file")
            continue
        for found in imports_of(source):
            complaints += _layer_complaints_of_import(source, found)
    return complaints


def _layer_complaints_of_import(source: Source, found: Import) -> Iterator[str]:
    where = f"{source.module}:{found.line}"
    if found.module == "peagle":
        imported = [name for name in found.names if name != "__version__"] if found.names else ["peagle"]
        for name in imported:
            if name not in FLOORS:
                yield f"{where}: takes {name!r} through the package's front door; import it from its own module"
    elif found.module.startswith("peagle."):
        imported = [area_of(found.module)]
    else:
        return
    for area in imported:
        if area == source.area or (area not in FLOORS and found.module == "peagle"):
            continue
        if area not in FLOORS:
            yield f"{where}: imports peagle.{area}, which has no floor"
        elif FLOORS[area] == FLOORS[source.area]:
            yield f"{where}: imports {area!r}, which is on the same floor ({FLOORS[area]})"
        elif FLOORS[area] > FLOORS[source.area]:
            yield f"{where}: floor {FLOORS[source.area]} imports {area!r} of floor {FLOORS[area]}; imports go down only"


def torch_complaints(sources: list[Source]) -> list[str]:
    """Torch-free files from which a chain of module-scope imports reaches torch, with the chain."""
    by_module = {source.module: source for source in sources}
    loaded = {module: sorted(_loaded_by(source, by_module)) for module, source in by_module.items()}
    complaints = []
    for source in sources:
        if source.module in TORCH_FREE_MODULES or source.is_package or source.area in TORCH_FREE_AREAS:
            chain = _chain_to_heavy(source.module, loaded)
            if chain:
                complaints.append(f"{source.module} must not load torch: {' -> '.join(chain)}")
    return complaints


def _loaded_by(source: Source, by_module: dict[str, Source]) -> set[str]:
    """Modules of the package and heavy third parties that importing `source` loads directly."""
    loaded = set()
    for found in imports_of(source):
        if not found.at_module_scope:
            continue
        candidates = [found.module, *(f"{found.module}.{name}" for name in found.names)]
        for name in candidates:
            parts = name.split(".")
            loaded |= {prefix for i in range(len(parts)) if (prefix := ".".join(parts[: i + 1])) in by_module}
            loaded |= {heavy for heavy in HEAVY if name == heavy or name.startswith(f"{heavy}.")}
    return loaded - {source.module}


def _chain_to_heavy(module: str, loaded: dict[str, list[str]]) -> list[str]:
    paths, seen = [[module]], {module}
    while paths:
        path = paths.pop(0)
        for name in loaded.get(path[-1], []):
            if name in HEAVY:
                return [*path, name]
            if name not in seen:
                seen.add(name)
                paths.append([*path, name])
    return []


def size_complaints(sources: list[Source]) -> tuple[list[str], list[str]]:
    """What is over the soft limit (to be printed) and over the hard limit (to fail)."""
    soft, hard = [], []

    def measure(what: str, lines: int, limits: tuple[int, int]) -> None:
        if lines > limits[1]:
            hard.append(f"{what}: {lines} lines, the hard limit is {limits[1]}")
        elif lines > limits[0]:
            soft.append(f"{what}: {lines} lines, the budget is {limits[0]}")

    for source in sources:
        measure(source.module, len(source.text.splitlines()), FILE_LINES)
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                measure(f"{source.module}.{node.name}", length, FUNCTION_LINES)
    return soft, hard


def package_complaints(sources: list[Source]) -> list[str]:
    """Packages with more lines or files than a reader can hold in mind; subpackages count as part of theirs."""
    complaints = []
    for area in sorted({source.area for source in sources if source.module.count(".") > 1}):
        members = [source for source in sources if source.area == area]
        lines = sum(len(source.text.splitlines()) for source in members)
        if lines > PACKAGE_LINES:
            complaints.append(f"peagle.{area}: {lines} lines, the limit is {PACKAGE_LINES}")
        if len(members) > PACKAGE_FILES:
            complaints.append(f"peagle.{area}: {len(members)} files, the limit is {PACKAGE_FILES}")
    return complaints


def circle_complaints(sources: list[Source]) -> list[str]:
    """Files that import each other, directly or through others, wherever the import stands."""
    by_module = {source.module: source for source in sources}
    imported = {
        source.module: {
            name
            for found in imports_of(source)
            for name in (found.module, *(f"{found.module}.{name}" for name in found.names))
            if name in by_module and not by_module[name].is_package
        }
        for source in sources
        if not source.is_package
    }
    complaints = []
    for module in imported:
        paths, seen = [[module]], set()
        while paths:
            path = paths.pop(0)
            if module in imported[path[-1]]:
                if module == min(path):
                    complaints.append(f"circle of imports: {' -> '.join([*path, module])}")
                break
            for name in sorted(imported[path[-1]] - seen):
                seen.add(name)
                paths.append([*path, name])
    return complaints


def name_complaints(sources: list[Source]) -> list[str]:
    return [
        f"{source.module}: {part!r} says nothing; name the thing it is about"
        for source in sources
        for part in source.module.split(".")
        if part in VAGUE_NAMES
    ]


def readme_complaints(text: str) -> list[str]:
    lines = len(text.splitlines())
    return [f"README.md: {lines} lines, the limit is {README_LINES}"] if lines > README_LINES else []


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
