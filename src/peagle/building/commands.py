"""The command of each stage: what a user would type to run it alone."""

from pathlib import Path
from typing import Any

from peagle.building.config import BuildSettings, Stage, option_words
from peagle.building.plan import GREEDY_HELD_OUT, Measured, Plan

FILES: dict[Stage, str] = {
    "data": "data",
    "train": "drafter",
    "eval": "eval.json",
    "gate": "gate.json",
    "lossless": "lossless.json",
    "bench": "bench.json",
    "report": "report.html",
}
"""What a stage writes into OUTPUT."""
PROMPTS_NAME, SYNTHESIS_NAME = "prompts.jsonl", "synthesis.toml"
SHORT_ROW = 256
"""Rows below this length need shorter questions than `peagle data synthesize` lets the target write."""
LEAST_PROMPTS = 8
HELD_OUT, AMOUNTS = "--num-held-out", ("--num-tokens", "--limit")
GROWING = (*AMOUNTS, HELD_OUT, "--seconds")
"""Options of the text that may change while more is added; of those, what is held out stays as it was begun."""
MOST_CUT = 512
"""Rows up to this length keep answers that are cut at it: most are."""


def stage_path(settings: BuildSettings, stage: Stage) -> Path:
    return settings.output / FILES[stage]


def commands_of(
    settings: BuildSettings, target: list[str], measured: Measured, plan: Plan, cost: list[str]
) -> dict[Stage, list[str]]:
    """Command lines without the leading `peagle`. `target` and `cost` are options that are passed on."""
    drafter = [*target, "--drafter", str(stage_path(settings, "train"))]
    effort, given = plan.effort, [] if settings.prompts is None else ["--prompts", str(settings.prompts)]
    compared = settings.prompts or settings.output / PROMPTS_NAME
    results = [str(stage_path(settings, stage)) for stage in ("bench", "eval", "lossless")]
    concurrency = ",".join(map(str, effort.concurrency))
    return {
        "data": _data(settings, target, measured, plan),
        "train": _train(settings, target, measured, plan),
        "eval": [
            "eval",
            *drafter,
            *given,
            *option_words(limit=effort.eval_prompts, max_tokens=effort.max_tokens),
            "--record",
            "--as-baseline",
            "--json",
        ],
        "gate": ["doctor", *drafter, "--json"],
        "lossless": ["lossless", *drafter, *option_words(prompts=compared, **effort.lossless), "--json"],
        "bench": [
            "bench",
            *drafter,
            *option_words(prompts=compared, limit=effort.bench_prompts, max_tokens=effort.max_tokens),
            *option_words(max_turns=1, concurrency=concurrency),
            *cost,
            "--json",
        ],
        "report": ["report", *results, "--markdown", "--output", str(stage_path(settings, "report"))],
    }


def with_option(command: list[str], name: str, value: Any) -> list[str]:
    """The command with the option set to another value, or added.

    >>> with_option(["data", "--seconds", "60", "--json"], "--seconds", 5)
    ['data', '--seconds', '5', '--json']
    """
    if name not in command:
        return [*command, name, str(value)]
    place = command.index(name) + 1
    return [*command[:place], str(value), *command[place + 1 :]]


def option_of(command: list[str], name: str) -> str | None:
    """The value of an option.

    >>> option_of(["data", "--seconds", "60"], "--seconds"), option_of(["data"], "--seconds")
    ('60', None)
    """
    return command[command.index(name) + 1] if name in command else None


def added_tokens(earlier: list[str], now: list[str]) -> int | None:
    """How much more text (or prompts) a command asks for than an earlier one; None if it differs in other options.

    >>> added_tokens(["data", "--num-tokens", "500"], ["data", "--num-tokens", "800", "--seconds", "60"])
    300
    """
    amounts, others = [], []
    for command in (earlier, now):
        amounts += [int(amount) for name in AMOUNTS if (amount := option_of(command, name)) is not None]
        places = {command.index(name) for name in GROWING if name in command}
        others.append([word for place, word in enumerate(command) if not places & {place, place - 1}])
    return amounts[1] - amounts[0] if others[0] == others[1] else None


def _data(settings: BuildSettings, target: list[str], measured: Measured, plan: Plan) -> list[str]:
    output, length = stage_path(settings, "data"), measured.max_length
    plain = ["--drafter", "none"] if measured.device == "cpu" else []
    common = [*target, *option_words(output=output, max_length=length, seed=settings.seed), *plain, "--json"]
    if settings.data is not None:
        limit = max(LEAST_PROMPTS, round(plan.num_tokens / answer_tokens(measured)))
        own = option_words(prompts=settings.data, limit=limit, max_answer_tokens=length)
        return ["data", "regenerate", *own, *common]
    held_out = max(4, min(GREEDY_HELD_OUT, plan.num_tokens // (10 * answer_tokens(measured))))
    own = option_words(num_tokens=plan.num_tokens, num_held_out=held_out)
    if measured.has_chat_template and length <= MOST_CUT:
        own.append("--keep-cut")
    if length < SHORT_ROW:
        own += option_words(recipe=settings.output / SYNTHESIS_NAME)
    return ["data", "synthesize", *own, *common]


def synthesis_recipe(measured: Measured) -> str:
    """A recipe for short rows: a question that takes more than 0.6 of one is given up."""
    return f"max_question_tokens = {int(0.6 * measured.max_length)}\n"


def answer_tokens(measured: Measured) -> int:
    """Tokens of a usual answer."""
    return max(1, measured.max_length // 2)


def _train(settings: BuildSettings, target: list[str], measured: Measured, plan: Plan) -> list[str]:
    recipe = [] if measured.recipe is None else ["--recipe", measured.recipe]
    steps = {"num_steps": plan.num_steps, "warmup_steps": max(1, min(200, plan.num_steps // 20))}
    paths = {"data": stage_path(settings, "data"), "output": stage_path(settings, "train")}
    own = measured.options | {"seed": settings.seed} | steps
    return ["train", *target, *recipe, *option_words(**paths, **own, save_every=plan.save_every)]
