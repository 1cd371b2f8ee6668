"""POST /v1/chat/completions."""

import contextlib
import inspect
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from peagle.data.json_rows import CHAT_ROLES
from peagle.errors import PeagleError, nearest
from peagle.server.errors import HttpError, as_http_error, invalid, unsupported
from peagle.server.jobs import Choice, Job
from peagle.server.protocol import ChatBody, Message, TokenizeBody, Tool
from peagle.server.sampling import grammar_of, sampling_params
from peagle.server.service import Service
from peagle.server.tools import Form, ToolReader, forced_grammar, tool_format
from peagle.server.writer import Writer, finite
from peagle.tokenizer import chat_text, encode

if TYPE_CHECKING:
    from peagle.engine.outputs import Update


async def answer_chat(service: Service, body: ChatBody, request: Request) -> Response:
    arrived = time.perf_counter()
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "requires 'logprobs'")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", "and 'max_completion_tokens' differ; omit one of them")
    _check_tool_results(body.messages)
    tools = tool_format(body, service.chat_template)
    grammar = grammar_of(body)
    if tools.form == "forced":
        if grammar is not None:
            raise invalid("response_format", "cannot be combined with a forced 'tool_choice'")
        grammar = forced_grammar(body)
    prompt = await service.in_thread(request, lambda: render(service, body.messages, tools.tools, body))
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise invalid(param, "must be at least 1, got 0")
    params = sampling_params(
        body,
        max_tokens=service.room([prompt], asked, param),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
        stop=tools.stops,
    )
    job = service.new_job("chatcmpl", [prompt], params, arrived)
    return await service.respond(request, body, ChatWriter(service, job, body, tools.form))


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
    for index, role in enumerate(each.role for each in messages):
        if role not in CHAT_ROLES and role not in template:
            what = f"unknown role {role[:100]!r}; {nearest(role, CHAT_ROLES)}"
            raise HttpError(400, what, param=f"messages.{index}.role")
    variables = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        if "reasoning_effort" not in template:
            raise unsupported("reasoning_effort", "the target's chat template does not use it")
        variables["reasoning_effort"] = effort
    # Clients must not set parameters of the rendering functions: one of them replaces the template.
    rendering = (chat_text, service.tokenizer.apply_chat_template)
    reserved = {name for each in rendering for name in inspect.signature(each).parameters}
    for name in variables:
        if name in reserved or name not in template:
            message = f"'chat_template_kwargs': the target's chat template has no variable {name[:100]!r}"
            raise HttpError(400, message, param="chat_template_kwargs")
    if tools:
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    plain = [_message(message, template) for message in messages]
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


def _message(message: Message, template: str) -> dict[str, Any]:
    """A message as chat templates expect it: plain text, and tool calls with their arguments as objects."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    plain.setdefault("content", "")
    if message.role == "developer" and "developer" not in template:
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        with contextlib.suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return plain


class ChatWriter(Writer):
    """Formats a job as chat completions."""

    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    _body: ChatBody

    def __init__(self, service: Service, job: Job, body: ChatBody, form: Form) -> None:
        super().__init__(service, job, body)
        self._readers = [ToolReader(form) for _ in job.choices]
        self._has_role = [False] * len(job.choices)

    def whole(self) -> dict[str, Any]:
        document = super().whole()
        if self._body.return_token_ids:
            document["prompt_token_ids"] = self.job.prompts[0]
        return document

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self.job.choices[index]
        content, calls = self._readers[index].add(choice.text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        finish_reason = choice.finish_reason
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        entry = {"index": index, "message": message, "finish_reason": finish_reason}
        return entry | self._token_fields(choice) | self._details(choice)

    def _chunks(self, index: int, update: "Update", is_last: bool) -> list[dict[str, Any]]:
        chunks, reader = [], self._readers[index]
        if not self._has_role[index]:
            self._has_role[index] = True
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            chunks.append(self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))
            if self._body.return_token_ids and not any(self._has_role[:index]):
                chunks[0]["prompt_token_ids"] = self.job.prompts[0]
        finish_reason: str | None = update.finish_reason
        text, calls = reader.add(update.text, is_last=finish_reason is not None)
        if finish_reason == "stop" and reader.num_calls:
            finish_reason = "tool_calls"
        if not (text or calls or finish_reason or (self._wants_all and update.token_ids)):
            return chunks
        delta = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = calls
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
