"""Hourly prices of cloud instances, from the dated lists in `prices.toml` or from the user."""

import math
import re
import tomllib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from peagle.errors import ConfigError, nearest

LISTS = Path(__file__).with_name("prices.toml")
GIVEN = "given with --price-per-hour"
HOURS_A_MONTH = 730


@dataclass(frozen=True)
class Price:
    """What an hour costs, and where that number comes from."""

    usd_per_hour: float
    date: str
    """when the price was read, YYYY-MM-DD"""
    source: str
    instance: str | None = None
    gpu: str | None = None
    num_gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.usd_per_hour < math.inf:
            raise ConfigError(
                f"--price-per-hour must be above 0, got {self.usd_per_hour:g}", hint="in US dollars, for example 4.50"
            )

    @property
    def text(self) -> str:
        what = "" if self.instance is None else f" for {self.instance}"
        share = f", ${self.usd_per_gpu_hour:,.2f} for each of its {self.num_gpus} GPUs" if self.num_gpus > 1 else ""
        return f"${self.usd_per_hour:,.2f} per hour{what}{share} ({self.source}, {self.date})"

    @property
    def usd_per_gpu_hour(self) -> float:
        return self.usd_per_hour / self.num_gpus

    def check(self, accelerator: str | None) -> None:
        """Refuse an instance with another GPU than the one measured."""
        if self.gpu is not None and not re.search(rf"\b{re.escape(self.gpu)}\b", accelerator or ""):
            raise ConfigError(
                f"{self.instance} has {self.gpu} GPUs, but this was measured on {accelerator or 'a CPU'}",
                hint="measure on such an instance, or give the price of this machine with --price-per-hour",
            )


def price_of(instance: str | None, usd_per_hour: float | None = None) -> Price | None:
    """The price of an instance, from the user or the lists; None if neither is given."""
    if usd_per_hour is not None:
        today = datetime.now(UTC).date().isoformat()
        listed = None if instance is None else known_prices().get(instance)
        if listed is not None:
            return replace(listed, usd_per_hour=usd_per_hour, date=today, source=GIVEN)
        return Price(usd_per_hour, today, GIVEN, instance)
    if instance is None:
        return None
    known = known_prices()
    if instance not in known:
        raise ConfigError(
            f"no price of the instance {instance!r} is known",
            hint=f"pass --price-per-hour; {nearest(instance, known)}",
        )
    return known[instance]


@cache
def known_prices() -> dict[str, Price]:
    """All listed prices by instance."""
    lists = tomllib.loads(LISTS.read_text(encoding="utf-8")).values()
    return {
        name: Price(date=each["date"], source=each["source"], instance=name, **facts)
        for each in lists
        for name, facts in each["instances"].items()
    }
