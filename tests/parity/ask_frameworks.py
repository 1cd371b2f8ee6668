"""Ask a server through Instructor, the OpenAI Agents SDK and DSPy; what they understood goes to stdout as JSON.

    python ask_frameworks.py http://127.0.0.1:PORT

Runs in an environment of its own, without peagle. Everything is greedy, so that the same question has one answer.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any, Literal

import dspy
import instructor
import litellm
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel, Field

QUESTION = "the user asks"
MODEL = "tiny"


class Pet(BaseModel):
    """Describe a pet."""

    animal: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)


class Describe(dspy.Signature):
    """Describe a pet."""

    question: str = dspy.InputField()
    animal: Literal["cat", "dog"] = dspy.OutputField()
    legs: Literal[2, 4] = dspy.OutputField()


def ask_instructor(url: str) -> dict[str, Any]:
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    ask |= {"response_model": Pet, "max_tokens": 200, "temperature": 0, "max_retries": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        pet, answer = tools.create_with_completion(**ask)
        return {
            "tool": pet.model_dump_json(),
            "completion_tokens": answer.usage.completion_tokens,
            "schema": schema.create(**ask).model_dump_json(),
            "stream": [each.model_dump_json() for each in schema.create_partial(**ask)],
        }


async def ask_agents(url: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    calls = []

    @function_tool
    def pet(animal: Literal["cat", "dog"], legs: Literal[2, 4]) -> str:
        """Describe a pet."""
        calls.append([animal, legs])
        return "a fine pet"

    def agent(max_tokens: int, tool_choice: str | None = None, **options: Any) -> Agent:
        settings = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=tool_choice)
        return Agent(name="asked", model=model, model_settings=settings, **options)

    stream = Runner.run_streamed(agent(24), QUESTION)
    events = [event.data async for event in stream.stream_events() if event.type == "raw_response_event"]
    whole = await Runner.run(agent(24), QUESTION)
    called = await Runner.run(agent(200, "required", tools=[pet]), QUESTION)
    found = {
        "whole": whole.final_output,
        "completion_tokens": whole.context_wrapper.usage.output_tokens,
        "stream": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "schema": (await Runner.run(agent(200, output_type=Pet), QUESTION)).final_output.model_dump_json(),
        "calls": calls,
        "turns": [item.type for item in called.new_items],
    }
    await client.close()
    return found


def ask_dspy(url: str) -> dict[str, Any]:
    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "cache": False}
    short = dspy.LM(f"openai/{MODEL}", max_tokens=24, num_retries=0, **options)
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}
    # An adapter asks for a schema only from models that are known to support it, here from LiteLLM.
    facts = {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}
    litellm.register_model({f"openai/{MODEL}": facts})
    by_litellm = dspy.LM(f"openai/{MODEL}", max_tokens=400, num_retries=0, engine="litellm", **options)
    with dspy.context(lm=by_litellm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Describe)(question=QUESTION)
    return {
        "whole": short(QUESTION)[0],
        "completion_tokens": short.history[-1]["usage"]["completion_tokens"],
        "schema": short(QUESTION, response_format=form, max_tokens=200)[0],
        "program": json.dumps({"animal": found.animal, "legs": found.legs}),
    }


def main() -> None:
    url = sys.argv[1]
    found = {"instructor": ask_instructor(url), "openai-agents": asyncio.run(ask_agents(url)), "dspy": ask_dspy(url)}
    json.dump({name: {"version": version(name), **each} for name, each in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
