"""SamplingParams and grammars from the fields of a request body."""

import json
import secrets
from typing import Any

from peagle.sampling_params import Grammar, GrammarKind, SamplingParams
from peagle.server.errors import HttpError, as_http_error, invalid
from peagle.server.protocol import SAMPLING_FIELDS, Body, StructuredOutputs

OPENAI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
"""OpenAI's defaults that differ from the engine's."""
MAX_CHARACTERS: dict[GrammarKind, int] = {"json_schema": 200_000, "choice": 200_000, "regex": 20_000}
MAX_CHOICES = 5_000


def sampling_params(
    body: Body, *, max_tokens: int, num_logprobs: int | None, stop: tuple[str, ...] = (), **more: Any
) -> SamplingParams:
    """`max_tokens` is already resolved; `stop` is added to the body's own stop strings; `more` is taken as it is."""
    values: dict[str, Any] = dict(OPENAI_DEFAULTS)
    values |= {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name, None)) is not None}
    values |= {"max_tokens": max_tokens, "logprobs": num_logprobs} | more
    values["seed"] = secrets.randbits(62) if body.seed is None else body.seed % 2**63
    own = [body.stop] if isinstance(body.stop, str) else body.stop or []
    values["stop"] = tuple(dict.fromkeys([*own, *stop]))
    values["stop_token_ids"] = tuple(body.stop_token_ids or ())
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0)  # vLLM writes -1 for all tokens
    for key in body.logit_bias or ():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"must have token ids as keys, got {key[:50]!r}")
    values["logit_bias"] = {int(key): bias for key, bias in (body.logit_bias or {}).items()}
    if body.speculation is not None:
        if body.num_draft_tokens is None:
            values["num_draft_tokens"] = body.speculation.num_draft_tokens if body.speculation.enabled else 0
        elif body.speculation.num_draft_tokens:
            raise invalid("num_draft_tokens", "contradicts 'speculation.num_draft_tokens'; omit one of them")
        values["tolerance"] = body.speculation.tolerance
        if not body.speculation.enabled and body.speculation.num_draft_tokens:
            message = "'speculation.num_draft_tokens' cannot be combined with 'speculation.enabled': false"
            raise HttpError(400, message, param="speculation")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise as_http_error(error, SAMPLING_FIELDS) from None


def grammar_of(body: Body) -> Grammar | None:
    """The grammar that constrains the answer; None if any text will do."""
    formatted, structured = body.response_format, body.structured_outputs
    if formatted is None or formatted.type == "text":
        return None if structured is None else _structured_grammar(structured)
    if structured is not None:
        raise HttpError(400, "'response_format' and 'structured_outputs' cannot be combined")
    schema = formatted.schema_ if formatted.json_schema is None else formatted.json_schema.schema_
    if schema is not None and formatted.schema_ not in (None, schema):
        raise invalid("response_format.schema", "and 'response_format.json_schema' differ; omit one of them")
    if schema is not None:
        return make_grammar("json_schema", schema)
    if formatted.type == "json_schema":
        raise invalid("response_format.json_schema", "is missing")
    return make_grammar("json_object", None)


def _structured_grammar(given: StructuredOutputs) -> Grammar:
    values: dict[GrammarKind, Any] = {"json_schema": given.json_, "regex": given.regex, "choice": given.choice}
    asked = [(kind, value) for kind, value in values.items() if value is not None]
    if len(asked) != 1:
        raise invalid("structured_outputs", f"takes exactly one of json, regex and choice, got {len(asked)}")
    kind, value = asked[0]
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid("structured_outputs.json", "is not valid JSON") from None
    return make_grammar(kind, value, "structured_outputs")


def make_grammar(kind: GrammarKind, value: Any, param: str = "response_format") -> Grammar:
    """The engine's grammar; `value` is a schema, None (json_object), a pattern or a list of strings."""
    try:
        value = json.dumps(value) if kind == "json_schema" else value
    except RecursionError:
        raise HttpError(400, "the schema is nested too deeply", param=param) from None
    if kind == "choice" and len(value) > MAX_CHOICES:
        raise HttpError(400, f"{len(value)} choices exceed the limit of {MAX_CHOICES}", param=param)
    size = len(value) if isinstance(value, str) else sum(map(len, value or ()))
    limit = MAX_CHARACTERS.get(kind, 0)
    if size > limit:
        raise HttpError(400, f"the {kind} has {size} characters, which exceeds the limit of {limit}", param=param)
    try:
        return Grammar(kind, value)
    except ValueError as error:
        raise HttpError(400, as_http_error(error).message, param=param) from None
