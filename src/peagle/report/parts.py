"""What a report consists of, whether HTML or Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Table:
    """Columns after the first `num_left` hold numbers."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1


@dataclass(frozen=True)
class Chart:
    """`draw` draws into axes and returns the values at its points, as `peagle.bench.plot` does."""

    title: str
    description: str
    """what the picture shows, for screen readers"""
    draw: "Callable[[Axes], list[Any]]"


@dataclass(frozen=True)
class Section:
    title: str
    text: Sequence[str] = ()
    """paragraphs"""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    code: str | None = None
    """a command to run"""


@dataclass(frozen=True)
class Report:
    title: str
    summary: str
    """three sentences"""
    sections: Sequence[Section] = field(default=())
