"""Settings from a recipe (`--recipe NAME` or `--recipe FILE.toml`) and from options, which override it."""

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from peagle.config import from_toml
from peagle.console.arguments import parse
from peagle.errors import ConfigError
from peagle.targets.catalog import ASSETS

DIRECTORY = ASSETS / "recipes"
"""Recipes for `peagle train` that ship with the package."""

T = TypeVar("T")
C = TypeVar("C")


def parse_with_recipe(
    kind: type[T], command: str, argv: list[str], config: type[C], description: str | None = None
) -> tuple[T, C]:
    """Parse options whose defaults come from the recipe; returns them, and all settings of the recipe and the options.

    A recipe sets any field of `config`. A base class of `config` that is the type of a field of `kind` has options.
    """
    groups = {
        field.name: field.type
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if isinstance(field.type, type) and issubclass(config, field.type)
    }
    options = {name: group for group in groups for name in _names(groups[group])}
    _reject_recipe_only(set(_names(config)) - options.keys(), argv)
    path = _recipe_path(argv, names={each.stem: each for each in DIRECTORY.glob("*.toml") if command == "train"})
    settings = config(**_required(config)) if path is None else from_toml(config, path, absent=_required(config))
    defaults: dict[str, Any] = _required(kind) | {"recipe": path}
    for name, group in groups.items():
        defaults[name] = group(**{option: getattr(settings, option) for option in _names(group)})
    arguments = parse(kind, command, argv, description=description, default=kind(**defaults))
    given = {option: getattr(getattr(arguments, group), option) for option, group in options.items()}
    return arguments, dataclasses.replace(settings, **given)  # type: ignore[type-var]


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _required(kind: Any) -> dict[str, Any]:
    """The fields without a default. The parser asks for those that nobody gives."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return {each.name: tyro.MISSING_NONPROP for each in fields if each.default is each.default_factory is missing}


def _recipe_path(argv: list[str], names: Mapping[str, Path]) -> Path | None:
    """The last --recipe on the command line: a file, or one of the names."""
    paths = [following for word, following in pairwise(argv) if word == "--recipe"]
    paths += [word.removeprefix("--recipe=") for word in argv if word.startswith("--recipe=")]
    if not paths:
        return None
    path = Path(paths[-1]).expanduser()
    if path.exists() or path.suffix or len(path.parts) > 1 or not names:
        return path
    if paths[-1] in names:
        return names[paths[-1]]
    raise ConfigError(f"no recipe {paths[-1]!r}: neither a file nor a name", hint=f"names: {', '.join(sorted(names))}")


def _reject_recipe_only(keys: Iterable[str], argv: list[str]) -> None:
    """Point from an option that does not exist to the recipe key of the same name."""
    for word in argv:
        name = word.partition("=")[0]
        key = name.removeprefix("--").removeprefix("no-").replace("-", "_")
        if name.startswith("--") and key in keys:
            raise ConfigError(f"unknown option {name}", hint=f"set `{key}` in a recipe file: --recipe FILE.toml")
