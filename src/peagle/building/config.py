"""Settings of a build. Imports no torch, so the command line can be built from them.

>>> Budget.parse("90s").seconds, Budget.parse("30m").seconds, Budget.parse("1.5h").seconds, Budget.parse("20usd").usd
(90.0, 1800.0, 5400.0, 20.0)
"""

import math
import re
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args

from peagle.data.config import describe_file, require_at_least
from peagle.errors import ConfigError
from peagle.targets.prices import Price

Stage = Literal["check", "data", "train", "eval", "gate", "lossless", "bench", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
FIRST_STAGE: dict[str, Stage] = {
    "target": "check",
    "dtype": "check",
    "device": "check",
    "budget": "data",
    "data": "data",
    "max_length": "data",
    "recipe": "data",
    "seed": "data",
    "num_draft_tokens": "train",
    "num_layers": "train",
    "prompts": "eval",
    "instance": "bench",
    "price_per_hour": "bench",
}
"""The first stage that a setting changes."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """A limit of time, or of money, which is time at the price of one GPU, or of a machine without one."""

    text: str
    seconds: float | None = None
    usd: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|usd)", text.strip().lower())
        value = float(found[1]) if found else 0.0
        if found is None or not 0 < value < math.inf:
            raise ConfigError(f"--budget {text!r} is no limit", hint="pass a time (90s, 30m, 2h) or a price (20usd)")
        if found[2] == "usd":
            return cls(text, usd=value)
        return cls(text, seconds=value * UNITS[found[2]])

    @property
    def larger(self) -> str:
        """Four times as much.

        >>> Budget.parse("1.5h").larger, Budget.parse("20usd").larger
        ('6.0h', '80usd')
        """
        text = self.text.strip().lower()
        value = text.rstrip("smhud")
        return f"{4 * Decimal(value)}{text[len(value) :]}"

    def at(self, price: Price | None) -> "Budget":
        """The budget in seconds."""
        if self.usd is None:
            return self
        if price is None:
            raise ConfigError(
                f"--budget {self.text} needs the price of this machine",
                hint="pass --price-per-hour, or --instance with its name; or give a time, as in --budget 30m",
            )
        return replace(self, seconds=self.usd / price.usd_per_gpu_hour * 3600)


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What to build, and within which limit."""

    output: Path
    """directory of the build: text, drafter, results, report, and build.json with what was done"""
    budget: str | None = None
    """limit of the whole build: a time (90s, 30m, 2h) or a price (20usd); default: the recipe's amount of text and
    steps on a GPU, 1h on a CPU"""
    data: Path | None = None
    """file of prompts like those of your users, which the target answers; default: the target writes questions too"""
    prompts: Path | None = None
    """your own prompts for evaluation and comparison; never trained on; default: mixed prompts that ship"""
    recipe: str | None = None
    """recipe of `peagle train`, a name or a file; default: by the model's size on a GPU, a small drafter on a CPU"""
    max_length: int | None = None
    """tokens per row of text; default: the recipe's"""
    num_draft_tokens: int | None = None
    """depths to train; default: the recipe's"""
    num_layers: int | None = None
    """layers of the drafter; default: the recipe's"""
    seed: int = 0
    """random seed of the text and the training"""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_draft_tokens", "num_layers")
        require_at_least(self, 32, "max_length")
        require_at_least(self, 0, "seed")
        if self.budget is not None:
            Budget.parse(self.budget)
        if self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"{self.output} is a file, not a directory", hint="pass a new --output")

    @property
    def words(self) -> list[str]:
        """The options that give these settings."""
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return option_words(**{name: getattr(self, name) for name in changed})

    def described(self, **others: str | float | None) -> dict[str, Any]:
        """The settings that a rerun must repeat, files with their contents. `others` name the target and the price."""
        own = {name: value for name, value in vars(self).items() if name != "output"}
        files = {
            name: describe_file(value) if isinstance(value, Path) else value
            for name, value in own.items()
            if name in ("data", "prompts")
        }
        return others | own | files


def option_words(**values: Any) -> list[str]:
    """Options of a command line; not those whose value is None or chosen automatically.

    >>> option_words(max_length=64, seed=None)
    ['--max-length', '64']
    """
    given = {name: value for name, value in values.items() if value not in (None, "auto")}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
