"""Load frozen dataclasses from dictionaries and TOML, refusing unknown keys and wrong types."""

import contextlib
import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from peagle.errors import ConfigError, nearest

T = TypeVar("T")


def from_mapping(
    kind: type[T], values: Mapping[str, Any], where: str, *, absent: Mapping[str, Any] = types.MappingProxyType({})
) -> T:
    """Build dataclass `kind` from `values`; nested dataclasses take nested mappings.

    `where` is the dotted path or file name for messages. Unknown keys and values of the wrong type are refused. Only
    types that a file cannot express are converted: text to a path, a list to a tuple, a whole number to a float.
    `absent` has values for required keys that may be missing.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}", hint=nearest(key, fields))
        arguments[key] = _converted(hints[key], value, f"{where}.{key}")
    arguments = {**absent, **arguments}
    for name, field in fields.items():
        has_default = not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        if name not in arguments and not has_default:
            raise ConfigError(f"{where}: the key {name!r} is missing", hint=f"it takes {_allowed(hints[name])}")
    try:
        return kind(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error


def from_toml(kind: type[T], path: Path, *, absent: Mapping[str, Any] = types.MappingProxyType({})) -> T:
    """Read dataclass `kind` from a TOML recipe; `absent` as for `from_mapping`."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no recipe at {path}", hint="pass the path of a TOML file") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint="pass the path of a file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return from_mapping(kind, values, str(path), absent=absent)


def json_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in `text`, the value of the option or variable `name`."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text!r}")
    return values


def check_choices(config: Any) -> None:
    """Reject values of `Literal` fields that are not among the choices, in a dataclass built by hand."""
    for name, kind in typing.get_type_hints(type(config)).items():
        if any(get_origin(part) is Literal for part in (kind, *get_args(kind))):
            _converted(kind, getattr(config, name), name)


def _converted(kind: Any, value: Any, where: str) -> Any:
    """`value` converted to the annotation `kind`, or a ConfigError that names the dotted key `where`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _converted_to_one_of(arguments, value, where)
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            raise ConfigError(
                f"{where} must be {_allowed(kind)}, got {value!r}", hint=_nearest_choice(arguments, value)
            )
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return _converted_tuple(arguments, value, where)
    if origin is list and isinstance(value, list):
        return [_converted(arguments[0], element, f"{where}[{index}]") for index, element in enumerate(value)]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_mapping(kind, value, where)
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    plain = origin or kind
    is_bool_for_number = isinstance(value, bool) and plain in (int, float)
    if isinstance(plain, type) and isinstance(value, plain) and not is_bool_for_number:
        return value
    raise ConfigError(f"{where} must be {_allowed(kind)}, got {value!r}")


def _converted_to_one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        # Its own error (an unknown key, an element) is more precise.
        return _converted(kinds[0], value, where)
    for kind in kinds:
        with contextlib.suppress(ConfigError):
            return _converted(kind, value, where)
    raise ConfigError(f"{where} must be {' or '.join(map(_allowed, kinds))}, got {value!r}")


def _converted_tuple(kinds: tuple[Any, ...], value: list[Any] | tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ConfigError(f"{where} must have {len(kinds)} elements, got {len(value)}")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_converted(kind, element, f"{where}[{index}]") for index, (kind, element) in pairs)


def _allowed(kind: Any) -> str:
    """The allowed values of an annotation, in the words of a TOML file."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_allowed(part) for part in arguments if part is not type(None))
    words = {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        Path: "a path",
        tuple: "a list",
        list: "a list",
        dict: "a table",
    }
    plain = origin or kind
    if plain is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"a list whose elements are each {_allowed(arguments[0])}"
    return "a table" if dataclasses.is_dataclass(plain) else words.get(plain, str(getattr(plain, "__name__", plain)))


def _nearest_choice(choices: tuple[Any, ...], value: Any) -> str | None:
    return nearest(value, choices) if isinstance(value, str) and all(isinstance(c, str) for c in choices) else None
