"""Request bodies of the HTTP interface, and what becomes of their fields.

Every field that a client sends has an effect, or has the one value that asks for none, or is refused by its name.
`null` is the same as leaving a field out.
"""

from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peagle.errors import nearest
from peagle.sampling_params import SamplingParams
from peagle.server.errors import HttpError, as_bad_body, unsupported

SAMPLING_FIELDS = frozenset(field.name for field in dataclass_fields(SamplingParams))

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAX_STOPS = 64


class Part(BaseModel):
    """A piece of a body: unknown keys are refused with the path to them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculation(Part):
    """How one request wants its tokens drafted; an extension."""

    enabled: bool = True
    num_draft_tokens: Annotated[int, Field(ge=1)] | None = None
    details: bool = False
    """tell with each chunk, or with the answer, how every token came about"""


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


class StructuredOutputs(Part):
    """vLLM's extension: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None


class Body(BaseModel):
    """Fields that chat and completion requests share. Unknown ones are kept, to be refused by name."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
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
    """put into the request log"""
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

    @property
    def wants_details(self) -> bool:
        return self.speculation is not None and self.speculation.details


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
    """One message; keys beyond these reach the chat template as they are."""

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


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


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

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(BaseModel):
    """POST /tokenize: of a text, or of messages through the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: list[TokenId]


B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Neutral:
    """A field we do not have: the values that ask for nothing, and why others are refused."""

    values: tuple[Any, ...]
    why: str


_STORED = "nothing is stored"
_OTHER = "use response_format, or structured_outputs with json, regex or choice"
NEUTRAL = {
    "best_of": Neutral((1,), "ask for n answers and choose among them"),
    "suffix": Neutral(("",), "the target continues texts and does not fill gaps"),
    "store": Neutral((False,), _STORED),
    "metadata": Neutral(({},), _STORED),
    "service_tier": Neutral(("auto", "default"), "there is one service tier"),
    "modalities": Neutral((["text"],), "answers are text"),
    "audio": Neutral((), "answers are text"),
    "prediction": Neutral((), "the drafter predicts; see 'speculation'"),
    "functions": Neutral(([],), "use tools"),
    "function_call": Neutral(("none",), "use tool_choice"),
    "web_search_options": Neutral((), "the server has no access to the web"),
    "verbosity": Neutral(("medium",), "say it in the prompt"),
    "use_beam_search": Neutral((False,), "answers are sampled"),
    "length_penalty": Neutral((1, 1.0), "it belongs to beam search"),
    "skip_special_tokens": Neutral((True,), "special tokens are never part of the text; return_token_ids has them"),
    "spaces_between_special_tokens": Neutral((True,), "special tokens are never part of the text"),
    "include_stop_str_in_output": Neutral((False,), "a stop string is never part of the text"),
    "truncate_prompt_tokens": Neutral((), "prompts are not shortened; shorten it yourself"),
    "continue_final_message": Neutral((False,), "use /v1/completions to continue a text"),
    "echo": Neutral((False,), "use /v1/completions"),
    "chat_template": Neutral((), "the target's own template is used"),
    "documents": Neutral(([],), "put them into a message"),
    "priority": Neutral((0,), "requests are served in the order of their arrival"),
    "return_tokens_as_token_ids": Neutral((False,), "use return_token_ids"),
    "prompt_logprobs": Neutral((), "use /v1/completions with echo and logprobs"),
    "allowed_token_ids": Neutral((), _OTHER),
    "bad_words": Neutral(([],), "use logit_bias"),
    "logits_processors": Neutral(([],), "they would run foreign code"),
    "guided_json": Neutral((), _OTHER),
    "guided_regex": Neutral((), _OTHER),
    "guided_choice": Neutral((), _OTHER),
    "guided_grammar": Neutral((), _OTHER),
    "guided_decoding_backend": Neutral((), "there is one"),
}
LABELS = frozenset({"safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Names that OpenAI's service keeps books by. There are none here, and no answer depends on them."""


def validated(kind: type[B], data: Any) -> B:
    """The body of a request, or a 400 that names the field at fault."""
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
                hint = "see /docs for what there is"
            raise HttpError(400, f"unknown field {name[:100]!r}; {hint}", param=name[:100], code="unknown_parameter")
        if not any(type(value) is type(allowed) and value == allowed for allowed in NEUTRAL[name].values):
            raise unsupported(name, NEUTRAL[name].why)
    return body
