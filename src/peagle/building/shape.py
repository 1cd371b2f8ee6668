"""The shape of a drafter and of its training, chosen from the target's size and the device.

On a GPU it is that of the recipe for such a model. On a CPU it is what an hour of two cores can train: one layer, four
draft tokens, the most frequent tokens, short rows, and hidden states that the target computes only once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.building.config import BuildSettings
from peagle.config import from_toml
from peagle.errors import ConfigError, nearest
from peagle.objective.config import TrainConfig
from peagle.targets.catalog import ASSETS

RECIPES = ASSETS / "recipes"
SMALL = 1_000_000_000
"""Parameters below which a model is trained for like the embedded one."""
FULL_TOKENS = {"embedded": 30_000_000}
MOST_TOKENS = 100_000_000
"""Answer tokens of a build without a budget; the comments of the recipes say where they come from."""
ON_CPU: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 4, "learning_rate": 1e-3, "features": "cached"}
CPU_DRAFT_VOCAB = 4096
TOKENS_PER_STEP = 512
"""of training on a CPU"""
ROWS = (128, 256)
"""shortest and longest row on a CPU"""
ROW_TIME = 0.1
"""Share of the budget in which a CPU writes one batch of rows."""


@dataclass(frozen=True)
class TargetFacts:
    """What the shape depends on."""

    num_parameters: int
    architecture: str
    has_experts: bool
    is_gpu: bool
    max_length: int
    vocab_size: int
    budget: float
    """in seconds"""
    seconds_per_token: float
    """of each request of a batch"""


@dataclass(frozen=True)
class Shape:
    """What `peagle train` is told. `options` are those that differ from the recipe."""

    recipe: str | None
    options: dict[str, Any]
    num_tokens: int
    """answer tokens of a build without a budget"""

    def train_config(self, data: Path, output: Path, **changes: Any) -> TrainConfig:
        own = {"data": data, "output": output} | self.options | changes
        if self.recipe is None:
            return TrainConfig(**own)
        config = from_toml(TrainConfig, _recipe_path(self.recipe), absent={"data": data, "output": output})
        return TrainConfig(**vars(config) | own)


def cpu_row(budget: float, seconds_per_token: float) -> int:
    """Tokens of a row of text on a CPU, for a budget in seconds.

    >>> cpu_row(60, 0.3), cpu_row(600, 0.3), cpu_row(3600, 0.3)
    (128, 192, 256)
    """
    fitting = int(ROW_TIME * budget / seconds_per_token) // 32 * 32
    return max(ROWS[0], min(ROWS[1], fitting))


def recipe_for(num_parameters: int, architecture: str, has_experts: bool) -> str:
    """
    >>> recipe_for(135_000_000, "LlamaForCausalLM", False), recipe_for(8_000_000_000, "LlamaForCausalLM", False)
    ('embedded', 'dense-8b')
    >>> recipe_for(21_000_000_000, "GptOssForCausalLM", True), recipe_for(30_000_000_000, "Qwen3MoeForCausalLM", True)
    ('gpt-oss-20b', 'moe-30b')
    """
    if architecture.startswith("GptOss"):
        return "gpt-oss-20b"
    if has_experts:
        return "moe-30b"
    return "embedded" if num_parameters < SMALL else "dense-8b"


def shape_of(settings: BuildSettings, facts: TargetFacts) -> Shape:
    """The shape for a target, in rows that its context holds."""
    given = {name: getattr(settings, name) for name in ("max_length", "num_draft_tokens", "num_layers")}
    options = {name: value for name, value in given.items() if value is not None}
    recipe = settings.recipe
    if recipe is None and facts.is_gpu:
        recipe = recipe_for(facts.num_parameters, facts.architecture, facts.has_experts)
    if recipe is None:
        options = ON_CPU | {"max_length": cpu_row(facts.budget, facts.seconds_per_token)} | options
        if facts.vocab_size > 2 * CPU_DRAFT_VOCAB:
            options["draft_vocab_size"] = CPU_DRAFT_VOCAB
    shape = Shape(recipe, options, FULL_TOKENS.get(recipe or "embedded", MOST_TOKENS))
    length = min(facts.max_length, shape.train_config(Path("data"), Path("drafter")).max_length)
    options["max_length"] = length
    if recipe is None:
        options["batch_size"] = max(1, TOKENS_PER_STEP // length)
    return shape


def check_recipe(settings: BuildSettings) -> None:
    """Refuse a recipe that is not there, before anything is loaded."""
    if settings.recipe is not None:
        Shape(settings.recipe, {}, 1).train_config(Path("data"), settings.output)


def _recipe_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix or path.exists():
        return path
    names = {each.stem: each for each in RECIPES.glob("*.toml")}
    if name not in names:
        raise ConfigError(f"no recipe {name!r}: neither a file nor a name", hint=nearest(name, names))
    return names[name]
