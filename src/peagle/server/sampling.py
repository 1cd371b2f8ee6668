"""From the fields of a body to the engine's SamplingParams."""

import json
import secrets
from typing import Any

from peagle.sampling_params import Grammar, GrammarKind, SamplingParams
from peagle.server.errors import HttpError, as_http_error, unsupported
from peagle.server.protocol import SAMPLING_FIELDS, Body, ResponseFormat, StructuredOutputs

OPENAI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
"""Where OpenAI's defaults are not the engine's."""
MAX_SCHEMA_CHARACTERS = 200_000

PASSED_ON = (
    "temperature",
    "top_p",
    "n",
    "min_p",
    "ignore_eos",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "prompt_logprobs",
)
"""Fields of bodies that are fields of SamplingParams under the same name and with the same meaning."""
NEUTRAL_VALUES: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": {},
}
"""What asks for nothing: accepted even by an engine without the field."""


def sampling_params(
    body: Body, *, max_tokens: int, num_logprobs: int | None, grammar: Grammar | None = None, stop: tuple[str, ...] = ()
) -> SamplingParams:
    """What the engine is asked for; `max_tokens` is resolved already, `stop` comes on top of the body's own."""
    values: dict[str, Any] = dict(OPENAI_DEFAULTS)
    values |= {name: value for name in PASSED_ON if (value := getattr(body, name, None)) is not None}
    values |= {"max_tokens": max_tokens, "logprobs": num_logprobs}
    values["seed"] = secrets.randbits(62) if body.seed is None else body.seed % 2**63
    own = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    values["stop"] = tuple(dict.fromkeys([*own, *stop]))
    values["stop_token_ids"] = tuple(body.stop_token_ids or ())
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0)  # -1 is vLLM's word for all tokens
    if body.logit_bias:
        values["logit_bias"] = _biases(body.logit_bias)
    if body.speculation is not None:
        values["num_draft_tokens"] = body.speculation.num_draft_tokens if body.speculation.enabled else 0
        if not body.speculation.enabled and body.speculation.num_draft_tokens is not None:
            message = "speculation.num_draft_tokens is given, but speculation.enabled is false; leave one of them out"
            raise HttpError(400, message, param="speculation")
    if grammar is not None:
        values["grammar"] = grammar
    for name in sorted(values.keys() - SAMPLING_FIELDS):
        if name not in NEUTRAL_VALUES or values.pop(name) != NEUTRAL_VALUES[name]:
            raise unsupported(name, "this engine does not have it")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise as_http_error(error, SAMPLING_FIELDS) from None


def grammar_of(body: Body) -> Grammar | None:
    """The grammar that a body asks for, in the engine's form; None where any text will do."""
    asked = _of_response_format(body.response_format)
    other = _of_structured_outputs(body.structured_outputs)
    if asked and other:
        raise HttpError(400, "response_format and structured_outputs are both given; leave one of them out")
    found = asked or other
    return None if found is None else make_grammar(*found)


def make_grammar(kind: GrammarKind, value: Any, param: str = "response_format") -> Grammar:
    """A grammar of the engine: "json_schema" of a dict, "json_object", "regex" of a pattern, "choice" of strings."""
    if kind == "json_schema":
        value = json.dumps(value)
        if len(value) > MAX_SCHEMA_CHARACTERS:
            raise HttpError(
                400, f"the schema has {len(value)} characters, at most {MAX_SCHEMA_CHARACTERS} are taken", param=param
            )
    try:
        return Grammar(kind, value)
    except ValueError as error:
        raise HttpError(400, as_http_error(error).message, param=param) from None


def _of_response_format(given: ResponseFormat | None) -> tuple[GrammarKind, Any, str] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return "json_object", None, "response_format"
    if given.json_schema is None:
        raise HttpError(400, "'response_format.json_schema' is missing", param="response_format.json_schema")
    return "json_schema", given.json_schema.schema_, "response_format"


def _of_structured_outputs(given: StructuredOutputs | None) -> tuple[GrammarKind, Any, str] | None:
    if given is None:
        return None
    num_asked = sum(each is not None for each in (given.json_, given.regex, given.choice))
    if num_asked != 1:
        message = f"structured_outputs takes exactly one of json, regex and choice, got {num_asked}"
        raise HttpError(400, message, param="structured_outputs")
    if given.regex is not None:
        return "regex", given.regex, "structured_outputs"
    if given.choice is not None:
        return "choice", given.choice, "structured_outputs"
    schema = given.json_
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise HttpError(400, "structured_outputs.json is not JSON", param="structured_outputs.json") from None
    return "json_schema", schema, "structured_outputs"


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise HttpError(400, f"logit_bias takes token ids as keys, got {key[:50]!r}", param="logit_bias")
        biases[int(key)] = bias
    return biases
