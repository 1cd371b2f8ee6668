"""Options that take several values between commas."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from tyro.constructors import PrimitiveConstructorSpec

from peagle.errors import ConfigError

T = TypeVar("T")


def comma_list(read: Callable[[str], T], metavar: str) -> PrimitiveConstructorSpec[tuple[T, ...]]:
    """One word with values between commas, each of them once."""

    def values(words: list[str]) -> tuple[T, ...]:
        found = tuple(read(word.strip()) for word in words[0].split(",") if word.strip())
        if not found:
            raise ValueError(f"{words[0]!r} names nothing")
        if len(set(found)) < len(found):
            raise ConfigError(f"{words[0]}: a value is given twice", hint="give each of them once")
        return found

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=values,
        is_instance=lambda instance: isinstance(instance, tuple),
        str_from_instance=lambda instance: [",".join(map(str, instance))],
    )


Files = Annotated[tuple[Path, ...], comma_list(Path, "FILE[,FILE...]")]
Names = Annotated[tuple[str, ...], comma_list(str, "NAME[,NAME...]")]
Numbers = Annotated[tuple[int, ...], comma_list(int, "INT[,INT...]")]
