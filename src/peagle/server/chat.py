"""POST /v1/chat/completions: messages through the target's template, answers as messages."""

import inspect
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from peagle.errors import PeagleError, nearest
from peagle.json_rows import CHAT_ROLES
from peagle.server.errors import HttpError, as_http_error, unsupported
from peagle.server.jobs import Job
from peagle.server.protocol import ChatBody, Message, Tool
from peagle.server.sampling import grammar_of, sampling_params
from peagle.server.service import Service
from peagle.server.tools import ToolFormat, ToolReader, forced_grammar, tool_format
from peagle.server.writer import Writer, details, finite, step_details
from peagle.tokenizer import chat_text, encode

if TYPE_CHECKING:
    from peagle.engine.outputs import TokenLogprobs, Update


async def answer_chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    arrived = time.perf_counter()
    service.check_model(body.model)
    _check_options(body)
    template = template_of(service)
    tools = tool_format(body, template)
    grammar = grammar_of(body)
    if tools is not None and tools.is_forced:
        if grammar is not None:
            raise HttpError(400, "tool_choice forces a call, so response_format has no place", param="response_format")
        grammar = forced_grammar(body)
    if grammar is not None:
        await service.prepare(grammar)
    prompt = await service.in_thread(request, lambda: render(service, body.messages, tools, body, template))
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise HttpError(400, f"{param} must be at least 1, got 0", param=param)
    params = sampling_params(
        body,
        max_tokens=service.room([prompt], asked, param),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
        stop=tools.stops if tools is not None else (),
    )
    job = service.new_job("chatcmpl", [prompt], params, arrived)
    request.state.job, request.state.user = job, body.user
    writer = ChatWriter(service, job, body, tools)
    return await service.respond(request, job, writer, streams=bool(body.stream))


def _check_options(body: ChatBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream", param="stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        message = "max_tokens and max_completion_tokens differ; they mean the same, so leave one of them out"
        raise HttpError(400, message, param="max_tokens")


def template_of(service: Service) -> str:
    """The source of the target's chat template; of all of them, where it has several."""
    template = service.tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def render(
    service: Service,
    messages: list[Message],
    tools: "ToolFormat | None",
    body: Any,
    template: str,
) -> list[int]:
    """Token ids of messages, with the tools and variables that the template is given."""
    for index, role in enumerate(each.role for each in messages):
        if role not in CHAT_ROLES and role not in template:
            what = f"unknown role {role[:100]!r}; {nearest(role, CHAT_ROLES)}"
            raise HttpError(400, what, param=f"messages.{index}.role")
    variables = dict(body.chat_template_kwargs or {})
    if getattr(body, "reasoning_effort", None) is not None:
        if "reasoning_effort" not in template:
            raise unsupported("reasoning_effort", "the target's chat template does not know it")
        variables["reasoning_effort"] = body.reasoning_effort
    # Parameters of what renders are not for clients: one of them is another template.
    rendering = (chat_text, service.tokenizer.apply_chat_template)
    reserved = {name for each in rendering for name in inspect.signature(each).parameters}
    for name in variables:
        if name in reserved or name not in template:
            message = f"chat_template_kwargs: the target's chat template has no variable {name[:100]!r} to be set"
            raise HttpError(400, message, param="chat_template_kwargs")
    if tools is not None and tools.is_shown:
        variables["tools"] = [_plain(tool) for tool in tools.tools]
    wants_prompt = body.add_generation_prompt is not False
    plain = [_message(message, template) for message in messages]
    try:
        text = chat_text(service.tokenizer, plain, wants_prompt, **variables)
    except PeagleError as error:
        raise HttpError(400, as_http_error(error).message, param="messages") from None
    return encode(service.tokenizer, service.check_length(text))


def _plain(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _message(message: Message, template: str) -> dict[str, Any]:
    """A message as templates expect it: plain text, and calls with their arguments as objects."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    plain.setdefault("content", "")
    if message.role == "developer" and "developer" not in template:
        plain["role"] = "system"
    if message.tool_calls is not None:
        plain["tool_calls"] = [ToolReader.as_template_call(call) for call in message.tool_calls]
    return plain


class ChatWriter(Writer):
    """Writes what a job brings as chat completions."""

    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, job: Job, body: ChatBody, tools: ToolFormat | None) -> None:
        super().__init__(service, job, body)
        self._body, self._tools = body, tools
        self._readers = [None if tools is None or not tools.is_read else ToolReader(tools) for _ in job.choices]
        self._has_role = [False] * len(job.choices)

    # Whole ------------------------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        document = super().whole()
        if self._body.return_token_ids:
            document["prompt_token_ids"] = self._job.prompts[0]
        return document

    def _choice(self, index: int) -> dict[str, Any]:
        choice, reader = self._job.choices[index], self._readers[index]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finish_reason = choice.finish_reason
        if reader is not None:
            content, calls = reader.add(choice.text, is_last=True)
            message["content"] = content or None if calls else content
            if calls:
                message["tool_calls"] = calls
                finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        entry: dict[str, Any] = {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}
        if self._body.logprobs:
            entry["logprobs"] = self._logprobs(choice.token_ids, choice.logprobs)
        if self._body.return_token_ids:
            entry["token_ids"] = choice.token_ids
        if self._body.wants_details:
            entry["speculation"] = {"tokens": details(choice)}
        return entry

    # Stream -----------------------------------------------------------------------------------------------------------

    def _chunks(self, index: int, update: "Update", is_last: bool) -> list[dict[str, Any]]:
        chunks = []
        if not self._has_role[index]:
            self._has_role[index] = True
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
            if self._body.return_token_ids and not any(self._has_role[:index]):
                chunks[0]["prompt_token_ids"] = self._job.prompts[0]
        body, reader = self._body, self._readers[index]
        text = update.text
        calls: list[dict[str, Any]] = []
        finish_reason: str | None = update.finish_reason
        if reader is not None:
            text, calls = reader.add(text, is_last=finish_reason is not None)
            if finish_reason == "stop" and reader.num_calls:
                finish_reason = "tool_calls"
        wants_all = body.logprobs or body.return_token_ids or body.wants_details
        if not (text or calls or finish_reason or (wants_all and update.token_ids)):
            return chunks
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = calls
        chunk = self._chunk(index, delta, finish_reason)
        entry = chunk["choices"][0]
        if body.logprobs:
            entry["logprobs"] = self._logprobs(update.token_ids, update.logprobs or ())
        if body.return_token_ids:
            entry["token_ids"] = update.token_ids
        if body.wants_details:
            chunk["speculation"] = step_details(update)
            if is_last:
                chunk["metrics"] = self._job.metrics_block()
        return [*chunks, chunk]

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = self._frame(self.CHUNK, [choice])
        self._add_usage(chunk)
        return chunk

    def _logprobs(self, token_ids: "Any", rows: "Any") -> dict[str, Any]:
        pairs = zip(token_ids, rows, strict=False)
        return {"content": [self._token_entry(token_id, row) for token_id, row in pairs], "refusal": None}

    def _token_entry(self, token_id: int, row: "TokenLogprobs") -> dict[str, Any]:
        top = [self._one(each, logprob) for each, logprob in row.top.items()]
        return {**self._one(token_id, row.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._service.token_texts[token_id]
        return {"token": text.text, "logprob": finite(logprob), "bytes": list(text.data)}
