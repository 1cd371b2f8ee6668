"""Effect of a JSON schema on acceptance: the same prompts with and without it, on the embedded target and its drafter.

    python benchmarks/schema_acceptance.py [--num-draft-tokens 5] [--temperature 0] [--json OUT.json]

Every prompt shows an example of the object, so that a good plain completion is JSON too. The acceptance length is
reported per schema, over all prompts, and over the prompts whose plain completion matches the schema: there the two
outputs are almost the same, and the comparison is strictest. The exit status is 1 if a completion with a schema does
not match it, or if the schema lowers the acceptance length over all prompts or over the strict ones.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import peagle
from peagle.decoding.acceptance import Acceptance
from peagle.sampling_params import Grammar

Schema = dict[str, Any]


def object_schema(properties: Schema) -> Schema:
    """An object of exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def integer_schema(most: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": most}


def string_schema(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


SUBJECTS: dict[str, tuple[Schema, str, tuple[str, ...]]] = {
    "city": (
        object_schema(
            {
                "city": string_schema(30),
                "country": string_schema(30),
                "population": integer_schema(99_999_999),
                "is_capital": {"type": "boolean"},
            }
        ),
        '{"city": "Rome", "country": "Italy", "population": 2800000, "is_capital": true}',
        ("Paris", "New York", "Tokyo", "Sydney", "Cairo", "Berlin"),
    ),
    "animal": (
        object_schema(
            {
                "animal": string_schema(30),
                "legs": integer_schema(99),
                "habitat": {"enum": ["land", "water", "air"]},
                "foods": {"type": "array", "items": string_schema(20), "minItems": 1, "maxItems": 3},
            }
        ),
        '{"animal": "cow", "legs": 4, "habitat": "land", "foods": ["grass", "hay"]}',
        ("a cat", "a shark", "an eagle", "a horse", "a spider", "a frog"),
    ),
    "review": (
        object_schema(
            {
                "rating": {"enum": ["good", "bad"]},
                "stars": {"type": "integer", "minimum": 1, "maximum": 5},
                "reason": string_schema(80),
            }
        ),
        '{"rating": "good", "stars": 4, "reason": "It works well and is easy to clean."}',
        (
            "The phone broke after a day.",
            "The best coffee that I ever had.",
            "The room was dirty and loud.",
            "A wonderful film with great music.",
            "The shoes are comfortable and cheap.",
            "The battery is empty within an hour.",
        ),
    ),
    "event": (
        object_schema(
            {
                "title": string_schema(40),
                "date": object_schema(
                    {"day": {"type": "integer", "minimum": 1, "maximum": 31}, "month": string_schema(9)}
                ),
                "people": {"type": "array", "items": string_schema(20), "minItems": 1, "maxItems": 4},
            }
        ),
        '{"title": "Dinner", "date": {"day": 3, "month": "March"}, "people": ["Ann", "Bob"]}',
        (
            "Lunch with Tom and Mary on the 12th of May.",
            "John plays chess with Peter on June 1st.",
            "The team of Eva, Max and Leo meets on the 30th of October.",
            "Alice sees her doctor on the 7th of January.",
            "A concert on the 21st of August with Sam and Kim.",
            "Paul's birthday party is on February 14th; Nina comes too.",
        ),
    ),
}


@dataclass
class Totals:
    """Totals over the completions of some prompts."""

    acceptance: Acceptance
    num_prompts: int = 0
    num_fitting: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass
class Comparison:
    """The same prompts with and without a schema."""

    plain: Totals
    schema: Totals

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(self.plain + other.plain, self.schema + other.schema)


def prompt_of(example: str, subject: str) -> list[dict[str, str]]:
    content = f"Answer with one line of JSON and nothing else, in this form:\n{example}\nDescribe: {subject}"
    return [{"role": "user", "content": content}]


def parses_and_fits(answer: str, schema: Schema) -> bool:
    try:
        return fits(json.loads(answer), schema)
    except ValueError:
        return False


def fits(found: Any, schema: Schema) -> bool:
    """Whether a value matches a schema; supports the keywords used above."""
    if "enum" in schema:
        return found in schema["enum"]
    match schema["type"]:
        case "object":
            inside = schema["properties"]
            return (
                isinstance(found, dict)
                and list(found) == list(inside)
                and all(fits(found[k], inside[k]) for k in inside)
            )
        case "array":
            is_right_size = isinstance(found, list) and schema["minItems"] <= len(found) <= schema["maxItems"]
            return is_right_size and all(fits(item, schema["items"]) for item in found)
        case "integer":
            return type(found) is int and schema["minimum"] <= found <= schema["maximum"]
        case "boolean":
            return isinstance(found, bool)
        case _:
            return isinstance(found, str) and len(found) <= schema["maxLength"]


def answer(llm: peagle.LLM, messages: list[dict[str, str]], schema: Schema, params: peagle.SamplingParams) -> Totals:
    started = time.perf_counter()
    (output,) = llm.chat(messages, params)
    return Totals(
        output.metrics.acceptance,
        num_prompts=1,
        num_fitting=int(parses_and_fits(output.text, schema)),
        num_tokens=len(output.outputs[0].token_ids),
        seconds=time.perf_counter() - started,
    )


def compare(llm: peagle.LLM, max_tokens: int, temperature: float) -> dict[str, Comparison]:
    """A comparison per schema, for the prompts whose plain completion matches, and for all."""
    nothing = Totals(Acceptance(0, (0,) * llm.engine.num_draft_tokens))
    found = {name: Comparison(nothing, nothing) for name in (*SUBJECTS, "plain fits", "all")}
    for name, (schema, example, subjects) in SUBJECTS.items():
        free = peagle.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        held = replace(free, grammar=Grammar("json_schema", json.dumps(schema)))
        for subject in subjects:
            messages = prompt_of(example, subject)
            one = Comparison(answer(llm, messages, schema, free), answer(llm, messages, schema, held))
            found[name] += one
            found["all"] += one
            if one.plain.num_fitting:
                found["plain fits"] += one
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    options = parser.parse_args()
    with peagle.LLM(num_draft_tokens=options.num_draft_tokens, max_batch=1, max_length=512, verify_tokens=0) as llm:
        found = compare(llm, options.max_tokens, options.temperature)
    print(
        f"{'prompts':<12}{'number':>7}{'plain: fit':>12}{'tokens':>8}{'AL':>6}{'schema: fit':>13}{'tokens':>8}{'AL':>6}"
    )
    for name, each in found.items():
        plain, held = each.plain, each.schema
        print(
            f"{name:<12}{plain.num_prompts:>7}"
            f"{plain.num_fitting:>12}{plain.num_tokens:>8}{plain.acceptance.acceptance_length:>6.2f}"
            f"{held.num_fitting:>13}{held.num_tokens:>8}{held.acceptance.acceptance_length:>6.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(each) for name, each in found.items()}, indent=1) + "\n")
    is_held = all(each.schema.num_fitting == each.schema.num_prompts for each in found.values())
    judged = (found["all"], found["plain fits"])
    is_lower = any(
        each.schema.acceptance.acceptance_length < each.plain.acceptance.acceptance_length for each in judged
    )
    return int(not is_held or is_lower)


if __name__ == "__main__":
    sys.exit(main())
