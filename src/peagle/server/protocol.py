"""Request bodies of the HTTP API.

The server honours every field a client sends, or refuses the request and names the field. Fields of OpenAI or vLLM
that it does not implement are accepted with their neutral value only. `null` is the same as omitting a field.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peagle.errors import nearest
from peagle.sampling_params import SamplingParams
from peagle.server.errors import SEE_DOCS, HttpError, as_bad_body, unsupported

SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
MAX_STOPS = 64


class Part(BaseModel):
    """A nested object; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculation(Part):
    """Speculation settings of one request; our extension."""

    enabled: bool = True
    num_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    tolerance: float = 1.0
    """as in `SamplingParams`; below 1 the answer is not lossless"""
    details: bool = False
    """report with each chunk, or with the answer, how each token was produced"""


class StreamOptions(Part):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """what Together and llama.cpp take instead of `json_schema`; instructor's JSON_SCHEMA mode sends it"""


class StructuredOutputs(Part):
    """vLLM's extension: exactly one of these fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None


class NamedBody(BaseModel):
    """What every request body shares. Unknown fields are kept, so that `validated` can name them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = None


class Body(NamedBody):
    """Fields that chat and completion requests share."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    """written to the request log"""
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    speculation: Speculation | None = None
    num_draft_tokens: Literal[0] | None = None
    """0: the same as `speculation.enabled: false`"""


class TextPart(Part):
    type: Literal["text"]
    text: str


class FunctionCall(Part):
    name: str
    arguments: str


class ToolCall(Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(BaseModel):
    """One message; further keys are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Part):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function


class NamedTool(Part):
    class Named(Part):
        name: str

    type: Literal["function"]
    function: Named


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(NamedBody):
    """POST /tokenize: a text, or messages rendered by the chat template."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(NamedBody):
    """POST /detokenize."""

    tokens: list[TokenId]


B = TypeVar("B", bound=BaseModel)

_OTHER = "use response_format, or structured_outputs with json, regex or choice"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "set n and choose among the answers"),
    "suffix": (("",), "the target cannot fill in the middle"),
    "service_tier": (("auto", "default"), "there is one service tier"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "the drafter predicts; see 'speculation'"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "web_search_options": ((), "the server has no web access"),
    "verbosity": (("medium",), "put it in the prompt"),
    "use_beam_search": ((False,), "there is no beam search"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "skip_special_tokens": ((True,), "text never contains special tokens; set return_token_ids to see them"),
    "spaces_between_special_tokens": ((True,), "text never contains special tokens"),
    "include_stop_str_in_output": ((False,), "text never contains the stop string"),
    "truncate_prompt_tokens": ((), "the server does not truncate prompts"),
    "continue_final_message": ((False,), "use /v1/completions"),
    "echo": ((False,), "use /v1/completions"),
    "chat_template": ((), "the target's own template is used"),
    "documents": (([],), "put them in a message"),
    "priority": ((0,), "requests are served in order of arrival"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "prompt_logprobs": ((), "use /v1/completions with echo and logprobs"),
    "allowed_token_ids": ((), _OTHER),
    "bad_words": (([],), "use logit_bias"),
    "logits_processors": (([],), "clients cannot run code here"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ((), _OTHER)),
    "guided_decoding_backend": ((), "there is only one"),
}
"""Fields we do not implement: the values that change nothing, and why others are refused."""
LABELS = frozenset({"store", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields for OpenAI's own accounting. They are ignored: nothing is stored."""


def validated(kind: type[B], data: Any) -> B:
    """Parse a request body, or raise a 400 that names the field at fault."""
    if not isinstance(data, dict):
        raise HttpError(400, f"the body must be a JSON object, got {type(data).__name__}")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise as_bad_body(error) from None
    for name, value in (body.model_extra or {}).items():
        if value is None or name in LABELS:
            continue
        if name not in NEUTRAL:
            hint = nearest(name, [*kind.model_fields, *NEUTRAL])
            if hint.startswith("known"):
                hint = SEE_DOCS
            raise HttpError(400, f"unknown field {name[:100]!r}; {hint}", param=name[:100], code="unknown_parameter")
        neutral, why = NEUTRAL[name]
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            raise unsupported(name, why)
    return body
