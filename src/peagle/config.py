"""Strict loading of frozen dataclasses from dictionaries and TOML: the one place where "unknown key" is decided."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from peagle.errors import ConfigError, nearest

T = TypeVar("T")


def from_mapping(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build dataclass `kind` from `values`; nested dataclasses take nested mappings.

    `where` is the dotted path or file name used in messages. An unknown key is refused with the nearest known one.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}", hint=nearest(key, fields))
        field_type = fields[key].type
        if isinstance(field_type, type) and dataclasses.is_dataclass(field_type) and isinstance(value, Mapping):
            value = from_mapping(field_type, value, f"{where}.{key}")
        arguments[key] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def from_toml(kind: type[T], path: Path) -> T:
    """Read dataclass `kind` from a TOML recipe."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no recipe at {path}", hint="give the path of a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return from_mapping(kind, values, str(path))
