"""JSON schemas made at random: every answer parses and fits, greedy or sampled, with drafts or without.

The target is a random one, which is the hard case: left alone it would never write a brace.
"""

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from harness.engine_runs import serve
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.engine.engine import Engine
from peagle.sampling_params import Grammar, SamplingParams
from peagle.scheduling.config import EngineConfig

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "schema_acceptance.py"))
NUM_SCHEMAS = 24
NAMES = ("a", "the user", "\u00e9t\u00e9", 'say "x"', "as\\er", "Z_9")


def random_schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """Objects, lists, texts, numbers, choices and truths, nested up to three deep and all of bounded size."""
    kinds = ["string", "integer", "boolean", "enum"] + ["object", "array"] * (depth < 2)
    kind = "object" if depth == 0 else dice.choice(kinds)
    match kind:
        case "object":
            names = dice.sample(NAMES, dice.randint(1, 3))
            return dict(BENCHMARK["object_schema"]({name: random_schema(dice, depth + 1) for name in names}))
        case "array":
            least = dice.randint(0, 2)
            most = least + dice.randint(0, 2)
            return {"type": "array", "items": random_schema(dice, depth + 1), "minItems": least, "maxItems": most}
        case "string":
            return {"type": "string", "maxLength": dice.randint(0, 4)}
        case "integer":
            least = dice.randint(-200, 200)
            return {"type": "integer", "minimum": least, "maximum": least + dice.randint(0, 300)}
        case "enum":
            return {"enum": dice.sample(["the", "the user", 7, None, True, "\u4e2d"], dice.randint(1, 4))}
        case _:
            return {"type": "boolean"}


@pytest.mark.parametrize("has_drafts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_answers_by_random_schemas_always_parse_and_fit(has_drafts: bool) -> None:
    dice = random.Random(5)
    schemas = [random_schema(dice) for _ in range(NUM_SCHEMAS)]
    params = [
        SamplingParams(
            max_tokens=400,
            temperature=(0.0, 1.0, 2.0)[index % 3],
            seed=index,
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        for index, schema in enumerate(schemas)
    ]
    target = tiny_target()
    drafter = tiny_drafter(target) if has_drafts else None
    engine = Engine(target, drafter, 4 if has_drafts else 0, EngineConfig(max_batch=8, max_length=450))
    try:
        outputs = serve(engine, [[5 + index, 9, 30] for index in range(NUM_SCHEMAS)], params)
    finally:
        engine.close()
    for schema, output in zip(schemas, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop", f"{schema}: {answer.text}"
        assert BENCHMARK["parses_and_fits"](answer.text, schema), f"{schema}: {answer.text}"


def test_the_judge_of_schemas_can_say_no() -> None:
    fits = BENCHMARK["parses_and_fits"]
    schema = BENCHMARK["object_schema"]({"n": {"type": "integer", "minimum": 1, "maximum": 5}, "t": {"enum": ["a"]}})
    assert fits('{"n": 3, "t": "a"}', schema)
    for wrong in ('{"n": 3}', '{"n": 6, "t": "a"}', '{"n": true, "t": "a"}', '{"n": 3, "t": "b"}', '{"n": 3, "t": "a"'):
        assert not fits(wrong, schema), wrong
