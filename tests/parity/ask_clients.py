"""Ask a server through the clients of this environment; what they understood goes to stdout as JSON.

    python ask_clients.py http://127.0.0.1:PORT

Runs in an environment of its own, without peagle. Everything is greedy, so that the same question has one answer.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

import litellm
import openai
from langchain_openai import ChatOpenAI

MESSAGES = [{"role": "user", "content": "the user asks"}]
SCHEMA = {
    "title": "pet",
    "description": "a pet",
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "pet", "description": "Describe a pet.", "parameters": SCHEMA}}
MODEL = "tiny"


def ask_openai(url: str) -> dict[str, Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
        whole = create(**ask)
        stream = list(create(**ask, stream=True, stream_options={"include_usage": True}))
        try:
            create(**(ask | {"temperature": -1}))
        except openai.BadRequestError as error:
            refusal = error.message
        return {
            "whole": whole.choices[0].message.content,
            "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
            "completion_tokens": stream[-1].usage.completion_tokens,
            "models": [model.id for model in client.models.list()],
            "schema": create(**(ask | {"max_tokens": 60}), response_format=FORM).choices[0].message.content,
            "refusal": refusal,
        }


def ask_litellm(url: str) -> dict[str, Any]:
    ask: dict[str, Any] = {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": f"{url}/v1",
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = litellm.completion(**ask)
    stream = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    longer = ask | {"max_tokens": 80}
    called = litellm.completion(**longer, tools=[TOOL], tool_choice="required").choices[0]
    (call,) = called.message.tool_calls
    pieces = list(litellm.completion(**longer, tools=[TOOL], tool_choice="required", stream=True))
    deltas = [part for piece in pieces for part in piece.choices[0].delta.tool_calls or ()]
    try:
        litellm.completion(**(ask | {"max_tokens": 100_000}))
    except litellm.BadRequestError as error:
        refusal = f"{type(error).__name__}: {error}"
    as_openai = litellm.completion(**(ask | {"model": f"openai/{MODEL}", "api_key": "none"}))
    return {
        "whole": whole.choices[0].message.content,
        "completion_tokens": whole.usage.completion_tokens,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        "async": asyncio.run(litellm.acompletion(**ask)).choices[0].message.content,
        "as openai": as_openai.choices[0].message.content,
        "schema": litellm.completion(**longer, response_format=FORM).choices[0].message.content,
        "object": litellm.completion(**(ask | {"max_tokens": 200}), response_format={"type": "json_object"})
        .choices[0]
        .finish_reason,
        "tool": [call.function.name, call.function.arguments, called.finish_reason],
        "streamed tool": [
            "".join(part.function.name or "" for part in deltas),
            "".join(part.function.arguments or "" for part in deltas),
            next(piece.choices[0].finish_reason for piece in pieces if piece.choices[0].finish_reason),
        ],
        "text": litellm.text_completion(
            **{name: ask[name] for name in ("api_base", "max_tokens", "temperature")},
            model=f"hosted_vllm/{MODEL}",
            prompt="the user",
        )
        .choices[0]
        .text,
        "refusal": refusal,
    }


def ask_langchain(url: str) -> dict[str, Any]:
    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=24, max_retries=0)
    question = MESSAGES[0]["content"]
    longer = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=80, max_retries=0)
    message = chat.invoke(question)
    return {
        "whole": message.content,
        "completion_tokens": message.usage_metadata["output_tokens"],
        "stream": "".join(str(chunk.content) for chunk in chat.stream(question)),
        "schema": json.dumps(longer.with_structured_output(SCHEMA, method="json_schema").invoke(question)),
        "tool": [longer.bind_tools([TOOL], tool_choice="required").invoke(question).tool_calls[0]["name"]],
    }


def main() -> None:
    url = sys.argv[1]
    found = {"openai": ask_openai(url), "litellm": ask_litellm(url), "langchain-openai": ask_langchain(url)}
    json.dump({name: {"version": version(name), **each} for name, each in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
