"""Targets known by name and the drafters that go with them. Plain data: finding and loading them is `load.py`'s work.

The built-in entries are `catalog.toml` beside this file. A user's own file adds entries of the same form; it can
neither replace nor hide a built-in one.
"""

import os
import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from peagle.config import from_mapping
from peagle.errors import CheckpointError, ConfigError, TargetError, nearest

DEFAULT_TARGET = "smollm2-135m-instruct"
ASSETS = Path(__file__).parent.parent / "assets"
BUILT_IN = Path(__file__).with_name("catalog.toml")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
GB = 1e9
FORM = "docs/guides/models.md explains every key; the built-in entries are examples: `peagle catalog --json`"


@dataclass(frozen=True)
class CarryingPackage:
    """A distribution on the Python package index that carries a target's weights as one GGUF file."""

    name: str
    version: str
    module: str
    """import name of the distribution"""
    file: str


@dataclass(frozen=True)
class CatalogDrafter:
    """One of the drafters of a target."""

    variant: str
    """what `--drafter` calls it: "base", "long-context", ..."""
    where: Literal["hub", "directory", "package", "jumpstart"]
    """on the Hugging Face hub, in a directory, inside peagle, or only inside SageMaker JumpStart's model"""
    source: str | None = None
    """model id, directory, or directory under `peagle/assets`; none for jumpstart"""
    method: Literal["p-eagle", "eagle3"] = "p-eagle"
    min_length: int = 0
    """it serves texts that may grow longer than this better than the variants with a lower one"""
    num_draft_tokens: int | None = None
    """draft tokens a step that its makers recommend"""
    trained_draft_tokens: int | None = None
    num_parameters: int | None = None
    license: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.where == "jumpstart" and self.source is not None:
            raise ConfigError(f"source is {self.source!r}, but a drafter of jumpstart's has none")
        if self.where != "jumpstart" and not self.source:
            raise ConfigError(f"a drafter in a {self.where} needs the key 'source'")
        for key in ("num_draft_tokens", "trained_draft_tokens", "num_parameters"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key} must be at least 1, got {value}")
        if self.min_length < 0:
            raise ConfigError(f"min_length must be 0 or more, got {self.min_length}")
        most = self.trained_draft_tokens
        if most is not None and self.num_draft_tokens is not None and self.num_draft_tokens > most:
            raise ConfigError(
                f"num_draft_tokens is {self.num_draft_tokens}, but the drafter was trained for {most}",
                hint="drafters do not extrapolate",
            )

    @property
    def is_here(self) -> bool:
        """Whether nothing must be downloaded for it: inside the package, or in a directory of this machine."""
        if self.where == "package":
            return (ASSETS / str(self.source)).is_dir()
        return self.where == "directory" and Path(str(self.source)).expanduser().is_dir()

    @property
    def is_public(self) -> bool:
        return self.where != "jumpstart"

    def check_public(self, target: str | None = None) -> None:
        """Refuse a drafter that nobody can download, with the reason."""
        if not self.is_public:
            of = "" if target is None else f" of {target!r}"
            raise CheckpointError(
                f"the published drafter{of} cannot be had: SageMaker JumpStart bundles it with the model, and it is "
                "not on the Hugging Face hub",
                hint="deploy the JumpStart model, train a drafter of your own (`peagle train`) and give it with "
                "--drafter, or decode plainly with --num-draft-tokens 0",
            )

    @property
    def name(self) -> str:
        """What to call it where there is no room for more: the last part of its source."""
        return Path(self.source).name if self.source else self.variant


@dataclass(frozen=True)
class CatalogEntry:
    """A target, and what one must know to run it."""

    name: str
    target: str
    """model id on the Hugging Face hub, or a directory"""
    drafters: tuple[CatalogDrafter, ...]
    num_parameters: int
    title: str = ""
    quantized_target: str | None = None
    """the same target in fewer bits, which vLLM serves as it is"""
    architecture: str | None = None
    weights: Literal["float32", "bfloat16", "float16", "mxfp4", "fp8", "gguf"] = "bfloat16"
    """how `target` is stored"""
    stored_gb: float | None = None
    """what the weights take as they are stored, those of `quantized_target` where there is one: vLLM's need"""
    max_length: int | None = None
    license: str | None = None
    engines: tuple[Literal["native", "vllm"], ...] = ("native", "vllm")
    """the advised one first"""
    hardware: str = ""
    instance: str | None = None
    """smallest SageMaker instance"""
    note: str = ""
    package: CarryingPackage | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is no name: use lower-case letters, digits, '.', '_' and '-'")
        if not self.drafters or not self.engines:
            raise ConfigError(f"{'drafters' if not self.drafters else 'engines'} must name at least one")
        if self.num_parameters < 1:
            raise ConfigError(f"num_parameters must be at least 1, got {self.num_parameters}")
        for key in ("variant", "min_length"):
            chosen = [getattr(drafter, key) for drafter in self.drafters if drafter.method == "p-eagle"]
            if len(set(chosen)) < len(chosen):
                raise ConfigError(f"two of its drafters have the same {key}, {max(chosen, key=chosen.count)!r}")

    def drafter(self, variant: str | None = None, max_length: int | None = None) -> CatalogDrafter:
        """The variant asked for, else the P-EAGLE one for texts of up to `max_length` tokens (None: short ones)."""
        if variant is not None:
            known = {drafter.variant: drafter for drafter in self.drafters}
            if variant not in known:
                raise ConfigError(f"{self.name} has no drafter {variant!r}", hint=nearest(variant, known))
            return known[variant]
        usual = sorted((each for each in self.drafters if each.method == "p-eagle"), key=lambda each: each.min_length)
        return next(
            (each for each in reversed(usual) if each.min_length < (max_length or 1)), (usual or self.drafters)[0]
        )

    def native_gb(self, drafter: CatalogDrafter | None = None) -> float:
        """What weights take on the native engine, which runs them in bfloat16 on a GPU; texts come on top."""
        own = drafter.num_parameters or 0 if drafter is not None else 0
        return 2 * (self.num_parameters + own) / GB

    def vllm_gb(self, drafter: CatalogDrafter | None = None) -> float:
        """What weights take on vLLM, which keeps quantized ones as they are."""
        own = drafter.num_parameters or 0 if drafter is not None else 0
        return (self.stored_gb if self.stored_gb is not None else 2 * self.num_parameters / GB) + 2 * own / GB


def find(name: str) -> CatalogEntry | None:
    """The entry of this name in any case, or of this target or quantized target; None where there is none."""
    known = entries()
    wanted = name.lower()
    for entry in known:
        if entry.name == wanted:
            return entry
    return next((entry for entry in known if wanted in _ids(entry)), None)


def check_spelling(name: str) -> None:
    """Refuse a name that is nearly one of the catalog's: models of the hub have an owner before their name."""
    if "/" in name:
        return
    if close := get_close_matches(name.lower(), [entry.name for entry in entries()], n=1, cutoff=0.75):
        raise TargetError(
            f"no target at {name!r}, and no such name in the catalog",
            hint=f"did you mean {close[0]!r}? A directory is ./{name}, a model of the hub OWNER/{name}",
        )


def entries() -> tuple[CatalogEntry, ...]:
    """All entries: the built-in ones, then those of the user's file."""
    path = user_file()
    if path is None:
        return _built_in()
    own = read_entries(path)
    for entry in own:
        if any(entry.name == other.name for other in _built_in()):
            line = _line(path.read_text(encoding="utf-8"), entry.name, "")
            raise ConfigError(
                f"{path}, line {line}: {entry.name!r} is the name of a built-in entry, which a file cannot replace",
                hint="give the entry another name",
            )
    return _built_in() + own


def user_file() -> Path | None:
    """The user's catalog: PEAGLE_CATALOG, which must exist, or catalog.toml in the configuration directory."""
    given = os.environ.get("PEAGLE_CATALOG")
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ConfigError(f"PEAGLE_CATALOG names {given}, which is no file", hint="correct or unset the variable")
        return path
    path = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "peagle" / "catalog.toml"
    return path if path.is_file() else None


def read_entries(path: Path) -> tuple[CatalogEntry, ...]:
    """The entries of a file. One that is wrong is refused with its line; relative directories are the file's own."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the catalog {path} cannot be read: {error}", hint="it must be a TOML file") from error
    return tuple(_read_entry(name, table, path, text) for name, table in tables.items())


def _read_entry(name: str, table: Any, path: Path, text: str) -> CatalogEntry:
    try:
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: an entry is a table, got {table!r}", hint="begin it with [its-name]")
        if "name" in table:
            raise ConfigError(f"{name}: unknown key 'name'", hint="the table's own name is the entry's")
        return from_mapping(CatalogEntry, {"name": name} | _with_paths(table, path.parent), name)
    except ConfigError as error:
        where = f"{path}, line {_line(text, name, error.message)}"
        raise ConfigError(f"{where}: {error.message}", hint=error.hint or FORM) from error


def _with_paths(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """The table with its relative directories, which begin with a dot, made absolute; the rest is left to be judged."""

    def absolute(value: Any) -> Any:
        return str(base / value) if isinstance(value, str) and value.startswith(("./", "../")) else value

    drafters = table.get("drafters")
    if isinstance(drafters, list):
        table = table | {
            "drafters": [
                each | {"source": absolute(each["source"])}
                if isinstance(each, dict) and each.get("where") == "directory" and "source" in each
                else each
                for each in drafters
            ]
        }
    return table | {"target": absolute(table["target"])} if "target" in table else table


def _line(text: str, name: str, message: str) -> int:
    """The line of the key a message speaks of, or else of its table's head; tomllib keeps no lines of what is valid."""
    lines = text.splitlines()
    head = re.compile(rf'\[\[?\s*"?{re.escape(name)}"?\s*[\].]')
    place = next((index for index, line in enumerate(lines) if head.match(line.strip())), 0)
    if (number := re.search(r"drafters\[(\d+)\]", message)) is not None:
        drafters = re.compile(rf'\[\[\s*"?{re.escape(name)}"?\.drafters\s*\]\]')
        heads = [index for index, line in enumerate(lines) if drafters.match(line.strip())]
        place = heads[int(number[1])] if int(number[1]) < len(heads) else place
    words = set(re.findall(r"\w+", message))
    for index in range(place, len(lines)):
        key = re.match(r"\s*(\w+)\s*=", lines[index])
        if index > place and lines[index].lstrip().startswith("["):
            break
        if key is not None and key[1] in words:
            return index + 1
    return place + 1


@cache
def _built_in() -> tuple[CatalogEntry, ...]:
    return read_entries(BUILT_IN)


def _ids(entry: CatalogEntry) -> set[str]:
    return {each.lower() for each in (entry.target, entry.quantized_target) if each is not None}
