"""Settings from a recipe file (`--recipe FILE.toml`) and from options, which override it."""

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from peagle.config import from_toml
from peagle.errors import ConfigError

T = TypeVar("T")


def recipe_path(argv: list[str]) -> Path | None:
    """The last --recipe on the command line."""
    paths = [following for word, following in pairwise(argv) if word == "--recipe"]
    paths += [word.removeprefix("--recipe=") for word in argv if word.startswith("--recipe=")]
    return Path(paths[-1]) if paths else None


def recipe_settings(kind: type[T], argv: list[str], absent: Mapping[str, Any] = {}) -> T:
    """The recipe's settings, or the defaults. `absent` are values for required settings that it omits."""
    path = recipe_path(argv)
    return kind(**absent) if path is None else from_toml(kind, path, absent=absent)


def part(group: type[T], settings: Any) -> T:
    """The fields of `settings` that `group`, one of its base classes, has options for."""
    return group(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(group)})  # type: ignore[arg-type]


def merged(settings: T, *groups: Any) -> T:
    """`settings` with the fields of `groups` replaced."""
    values = {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}
    return dataclasses.replace(settings, **values)  # type: ignore[type-var]


def reject_recipe_only(kind: type, groups: tuple[type, ...], argv: list[str]) -> None:
    """Point from an option that does not exist to the recipe key of the same name."""
    options = {field.name for group in groups for field in dataclasses.fields(group)}
    keys = {field.name for field in dataclasses.fields(kind)} - options
    for word in argv:
        name = word.partition("=")[0]
        key = name.removeprefix("--").removeprefix("no-").replace("-", "_")
        if name.startswith("--") and key in keys:
            raise ConfigError(f"unknown option {name}", hint=f"set `{key}` in a recipe file: --recipe FILE.toml")
