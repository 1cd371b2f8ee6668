"""POST /v1/chat/completions."""

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from peagle.dialects.dialect import Ask
from peagle.dialects.messages import Deltas, message_of
from peagle.dialects.reading import Event, Parser
from peagle.dialects.rendering import effort_variables, template_message, template_tool
from peagle.errors import PeagleError, nearest
from peagle.rows import CHAT_ROLES
from peagle.server.errors import HttpError, as_http_error, invalid, unsupported
from peagle.server.jobs import Choice, Job
from peagle.server.protocol import ChatBody, Message, TokenizeBody, Tool
from peagle.server.sampling import grammar_of, sampling_params
from peagle.server.service import Service
from peagle.server.tools import forced_grammar, tool_use
from peagle.server.writer import Writer, finite
from peagle.tokenizer import chat_text, encode

if TYPE_CHECKING:
    from peagle.engine.outputs import Update


NO_TEMPLATE = "the target has no chat template, so it takes no messages; send the text to /v1/completions"


async def answer_chat(service: Service, body: ChatBody, request: Request) -> Response:
    arrived = time.perf_counter()
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "requires 'logprobs'")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", "and 'max_completion_tokens' differ; omit one of them")
    _check_tool_results(body.messages)
    dialect = service.dialect
    use = tool_use(body, dialect)
    grammar = grammar_of(body)
    if use.is_forced:
        if grammar is not None:
            raise invalid("response_format", "cannot be combined with a forced 'tool_choice'")
        grammar = forced_grammar(body)
    prompt = await service.in_thread(request, lambda: render(service, body.messages, use.tools, body))
    ask = Ask(service.end_of(prompt), use.schemas, use.is_forced)
    if grammar is not None:
        grammar = replace(grammar, openings=dialect.openings(ask.prompt))
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise invalid(param, "must be at least 1, got 0")
    params = sampling_params(
        body,
        max_tokens=service.room([prompt], asked, param),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
        stop=use.stops,
        shown_token_ids=service.token_ids(dialect.marks(has_calls=bool(use.tools))),
    )
    job = service.new_job("chatcmpl", [prompt], params, arrived)
    parsers = [dialect.parser(ask) for _ in job.choices]
    return await service.respond(request, body, ChatWriter(service, job, body, parsers))


def _check_tool_results(messages: list[Message]) -> None:
    """Each message of a tool answers a call of an earlier message, by its id; calls without ids by none."""
    ids: set[str | None] = set()
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id not in ids:
            why = "is missing" if message.tool_call_id is None else "names no call of an earlier assistant message"
            raise invalid(f"messages.{index}.tool_call_id", why)
        ids |= {call.id for call in message.tool_calls or ()}


def render(
    service: Service, messages: list[Message], tools: Sequence[Tool], body: ChatBody | TokenizeBody
) -> list[int]:
    """Token ids of the rendered messages."""
    template = service.chat_template
    if not template:
        raise HttpError(400, NO_TEMPLATE, param="messages", code="no_chat_template")
    for index, role in enumerate(each.role for each in messages):
        if role not in CHAT_ROLES and role not in template:
            what = f"unknown role {role[:100]!r}; {nearest(role, CHAT_ROLES)}"
            raise HttpError(400, what, param=f"messages.{index}.role")
    variables = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        try:
            found = effort_variables(effort, template)
        except ValueError as error:
            raise invalid("reasoning_effort", str(error)) from None
        if found is None:
            raise unsupported("reasoning_effort", "the target's chat template does not use it")
        variables = found | variables
    # Clients must not set parameters of the rendering functions: one of them replaces the template.
    rendering = (chat_text, service.tokenizer.apply_chat_template)
    reserved = {name for each in rendering for name in inspect.signature(each).parameters}
    for name in variables:
        if name in reserved or name not in template:
            message = f"'chat_template_kwargs': the target's chat template has no variable {name[:100]!r}"
            raise HttpError(400, message, param="chat_template_kwargs")
    if tools:
        variables["tools"] = [template_tool(tool.model_dump(exclude_none=True), template) for tool in tools]
    plain = [template_message(message.model_dump(exclude_none=True), template) for message in messages]
    control = service.control_tokens
    try:
        given = control.marked(plain), body.add_generation_prompt is not False
        parts = chat_text(service.tokenizer, *given, **control.marked(variables)).split(control.mark)
    except PeagleError as error:
        raise HttpError(400, as_http_error(error).message.replace(control.mark, ""), param="messages") from None
    except RecursionError:
        raise invalid("messages", "or tools are nested too deeply for the target's chat template") from None
    service.check_length("".join(parts))
    return [token for part in parts for token in encode(service.tokenizer, part)]


class ChatWriter(Writer):
    """Formats a job as chat completions."""

    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    _body: ChatBody

    def __init__(self, service: Service, job: Job, body: ChatBody, parsers: list[Parser]) -> None:
        super().__init__(service, job, body)
        self._parsers, self._deltas = parsers, [Deltas() for _ in parsers]
        self._has_role = [False] * len(job.choices)
        self._num_reasoning_tokens = 0

    def whole(self) -> dict[str, Any]:
        document = super().whole()
        if self._body.return_token_ids:
            document["prompt_token_ids"] = self.job.prompts[0]
        return document

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._service.dialect.thinking != "none":
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage

    def _events(self, index: int, source: "Choice | Update") -> tuple[list[Event], str | None]:
        """What the new tokens say, and the finish reason."""
        parser, events, finish_reason = self._parsers[index], list[Event](), source.finish_reason
        for text in source.texts:
            events += parser.feed(text)
            self._num_reasoning_tokens += parser.is_thinking
        if finish_reason is not None:
            events += parser.feed("", is_last=True, is_cut=finish_reason == "length")
        has_called = finish_reason == "stop" and parser.num_calls
        return events, "tool_calls" if has_called else finish_reason

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self.job.choices[index]
        events, finish_reason = self._events(index, choice)
        entry = {"index": index, "message": message_of(events), "finish_reason": finish_reason}
        return entry | self._token_fields(choice) | self._details(choice)

    def _chunks(self, index: int, update: "Update", is_last: bool) -> list[dict[str, Any]]:
        chunks = []
        if not self._has_role[index]:
            self._has_role[index] = True
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            chunks.append(self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))
            if self._body.return_token_ids and not any(self._has_role[:index]):
                chunks[0]["prompt_token_ids"] = self.job.prompts[0]
        events, finish_reason = self._events(index, update)
        delta = self._deltas[index].of(events)
        if not (delta or finish_reason or (self._wants_all and update.token_ids)):
            return chunks
        delta = delta or {"content": ""}
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason} | self._token_fields(update)
        return [*chunks, self._chunk(choice, update, is_last)]

    def _token_fields(self, source: "Choice | Update") -> dict[str, Any]:
        """Log-probabilities and token ids, if the client wants them."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._service.token_texts[token_id]
            return {"token": text.text, "logprob": finite(logprob), "bytes": list(text.data)}

        content = [
            entry(token_id, row.logprob) | {"top_logprobs": [entry(*each) for each in row.top.items()]}
            for token_id, row in zip(source.token_ids, source.logprobs or (), strict=False)
        ]
        logprobs = {"content": content, "refusal": None} if self._body.logprobs else None
        return {"logprobs": logprobs} | ({"token_ids": source.token_ids} if self._body.return_token_ids else {})
