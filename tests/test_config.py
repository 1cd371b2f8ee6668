"""Dataclasses from files: what is converted, what is refused, and in which words."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from peagle.config import from_mapping, from_toml
from peagle.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    size: int
    name: str = "inner"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size must be at least 1, got {self.size}", hint="use 1")


@dataclass(frozen=True)
class Settings:
    path: Path
    ratio: float = 0.5
    count: int = 1
    is_on: bool = False
    kind: Literal["kl", "ce"] = "kl"
    other: Path | None = None
    ids: tuple[int, ...] | None = None
    pair: tuple[int, float] = (1, 2.0)
    names: list[str] = field(default_factory=list)
    limit: int | str = 0
    inner: Inner | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    anything: Any = None


def built(**values):
    return from_mapping(Settings, {"path": "a/b", **values}, "recipe")


def refusal(**values):
    with pytest.raises(ConfigError) as caught:
        built(**values)
    return caught.value


def test_what_a_file_cannot_write_is_converted():
    settings = built(
        ratio=1, other="c", ids=[1, 2], pair=[3, 4], names=["x"], limit="all", inner={"size": 2}, extra={"a": [1]}
    )
    assert settings.path == Path("a/b") and settings.other == Path("c")
    assert settings.ratio == 1.0 and type(settings.ratio) is float
    assert settings.ids == (1, 2) and settings.pair == (3, 4.0) and settings.names == ["x"]
    assert settings.limit == "all" and settings.inner == Inner(2)
    assert settings.extra == {"a": [1]}, "a free table is left as it is"


def test_null_is_taken_where_a_field_may_be_empty():
    settings = built(other=None, ids=None, inner=None, anything=None)
    assert settings.other is None and settings.ids is None and settings.inner is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": 3}, "recipe.path must be a path, got 3"),
        ({"path": ""}, "recipe.path must be a path, got ''"),
        ({"path": None}, "recipe.path must be a path, got None"),
        ({"ratio": "0.5"}, "recipe.ratio must be a number, got '0.5'"),
        ({"ratio": True}, "recipe.ratio must be a number, got True"),
        ({"count": 1.0}, "recipe.count must be a whole number, got 1.0"),
        ({"count": True}, "recipe.count must be a whole number, got True"),
        ({"is_on": 1}, "recipe.is_on must be true or false, got 1"),
        ({"is_on": "yes"}, "recipe.is_on must be true or false, got 'yes'"),
        ({"kind": "mse"}, "recipe.kind must be one of 'kl', 'ce', got 'mse'"),
        ({"other": 1}, "recipe.other must be a path, got 1"),
        ({"ids": 3}, "recipe.ids must be a list whose elements are each a whole number, got 3"),
        ({"ids": [1, "2"]}, "recipe.ids[1] must be a whole number, got '2'"),
        ({"pair": [1]}, "recipe.pair must have 2 elements, got 1"),
        ({"names": "x"}, "recipe.names must be a list, got 'x'"),
        ({"limit": 1.5}, "recipe.limit must be a whole number or text, got 1.5"),
        ({"inner": 3}, "recipe.inner must be a table, got 3"),
        ({"inner": {"size": "2"}}, "recipe.inner.size must be a whole number, got '2'"),
        ({"extra": [1]}, "recipe.extra must be a table, got [1]"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_dotted_key(values, message):
    assert refusal(**values).message == message


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    error = refusal(rato=1.0)
    assert error.message == "recipe: unknown key 'rato'"
    assert error.hint == "did you mean 'ratio'?"
    assert refusal(inner={"size": 1, "nam": "x"}).message == "recipe.inner: unknown key 'nam'"


def test_a_near_miss_of_a_choice_is_named():
    assert refusal(kind="kll").hint == "did you mean 'kl'?"


def test_a_missing_key_is_named_with_what_it_takes():
    with pytest.raises(ConfigError) as caught:
        from_mapping(Settings, {}, "recipe")
    assert caught.value.message == "recipe: the key 'path' is missing"
    assert caught.value.hint == "it takes a path"
    assert refusal(inner={}).message == "recipe.inner: the key 'size' is missing"


def test_a_refusal_of_the_dataclass_itself_says_where():
    error = refusal(inner={"size": 0})
    assert error.message == "recipe.inner: size must be at least 1, got 0"
    assert error.hint == "use 1"


def test_a_recipe_is_read_from_toml(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('path = "data"\nratio = 2\n[inner]\nsize = 3\n')
    assert from_toml(Settings, recipe) == Settings(Path("data"), ratio=2.0, inner=Inner(3))


def test_a_recipe_that_cannot_be_read_is_refused_with_its_path(tmp_path):
    cases = {"absent.toml": "no recipe at", "directory": "cannot read", "broken.toml": "is not valid TOML"}
    (tmp_path / "directory").mkdir()
    (tmp_path / "broken.toml").write_text("path = ")
    for name, words in cases.items():
        with pytest.raises(ConfigError) as caught:
            from_toml(Settings, tmp_path / name)
        assert words in caught.value.message and name in caught.value.message
    (tmp_path / "broken.toml").write_bytes(b"path = '\xff'")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        from_toml(Settings, tmp_path / "broken.toml")
