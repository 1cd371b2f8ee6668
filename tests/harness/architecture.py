"""The rules of docs/architecture.md that a machine can check: functions from sources to complaints."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

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
        paths = [[module]]
        seen: set[str] = set()
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
