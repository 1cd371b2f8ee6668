"""Tool calls over the SDK: choices, forced calls, calls in the target's own form, conversations with results."""

import json

import pytest

from harness.local_server import running, tiny_llm
from harness.tiny_models import CHATML
from peagle.dialects.dialect import dialect_of
from peagle.server.errors import HttpError
from peagle.server.protocol import ChatBody, validated
from peagle.server.tools import tool_use

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}}},
]
HERMES = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}use <tool_call>{% endif %}" + CHATML
MESSAGES = [{"role": "user", "content": "the weather"}]


def test_a_template_without_tools_is_refused():
    body = validated(ChatBody, {"messages": MESSAGES, "tools": TOOLS})
    with pytest.raises(HttpError) as caught:
        tool_use(body, dialect_of("{{ messages }}"))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(("mark", "stops"), [("<tool_call>", ("</tool_call>",)), ("<|tool_call>", ("<tool_call|>",))])
def test_one_call_alone_ends_at_its_mark(mark, stops):
    body = validated(ChatBody, {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False})
    assert tool_use(body, dialect_of("{{ tools }} " + mark)).stops == stops
    with pytest.raises(HttpError, match="writes all calls as one list"):
        tool_use(body, dialect_of("{{ tools }} [TOOL_CALLS]"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, "'tool_choice' requires 'tools'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "'tool_choice' names 'x', which is not in 'tools'",
        ),
    ],
)
def test_a_choice_without_its_tool_is_refused(more, message):
    with pytest.raises(HttpError) as caught:
        tool_use(validated(ChatBody, {"messages": MESSAGES} | more), dialect_of(HERMES))
    assert caught.value.message == message


@pytest.fixture(scope="module")
def with_tools():
    with running(lambda: tiny_llm(chat_template=HERMES, max_length=500)) as found:
        yield found


def test_a_forced_call_is_one_of_the_tools_with_fitting_arguments(with_tools):
    client = with_tools.client()
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=100
        )
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        arguments = json.loads(call.function.arguments)
        assert call.function.name in ("weather", "time") and call.id.startswith("call_")
        assert arguments == {} if call.function.name == "time" else arguments["city"] in ("Rome", "Oslo")


def test_a_named_call_is_streamed(with_tools):
    stream = with_tools.client().chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=100,
        stream=True,
    )
    chunks = list(stream)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function.name] == ["weather"] and calls[0].index == 0
    assert len(calls) > 2, "arguments come in pieces"
    assert json.loads("".join(call.function.arguments for call in calls))["city"] in ("Rome", "Oslo")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


OWN_CALL = r'so: <tool_call>\n\{"name": "weather", "arguments": \{"city": "[RO][a-z]{3}"\}\}\n</tool_call>'


def test_calls_in_the_targets_own_form_are_the_same_streamed_and_whole(with_tools):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150, "seed": 3}
    asked["extra_body"] = {"structured_outputs": {"regex": OWN_CALL}}
    whole = with_tools.client().chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content == "so: " and call.function.name == "weather"
    chunks = list(with_tools.client().chat.completions.create(**asked, stream=True))
    pieces = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert json.loads(call.function.arguments)["city"][0] in "RO" and len(pieces) > 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "so: "


def test_a_call_that_the_limit_cuts_is_a_start_of_its_arguments(with_tools):
    body = {"messages": MESSAGES, "tools": TOOLS, "structured_outputs": {"regex": OWN_CALL}, "seed": 3}
    for max_tokens in range(40, 64, 5):
        choice = with_tools.http.post("/v1/chat/completions", json=body | {"max_tokens": max_tokens}).json()["choices"][
            0
        ]
        message = choice["message"]
        assert choice["finish_reason"] == "length"
        assert ("tool_calls" in message) != ("<tool_call>" in (message["content"] or "")), message
        for call in message.get("tool_calls", ()):
            assert call["function"]["arguments"].startswith("{")


def test_tools_are_shown_to_the_target_unless_none_may_be_called(with_tools):
    def num_prompt_tokens(**more):
        body = {"messages": MESSAGES, "max_tokens": 2} | more
        return with_tools.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]

    assert num_prompt_tokens() == num_prompt_tokens(tools=TOOLS, tool_choice="none") < num_prompt_tokens(tools=TOOLS)


def test_a_conversation_with_calls_and_results_is_rendered(with_tools):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    answer = with_tools.client().chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=3)
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("call_id", "result_id", "why"),
    [
        ("c1", "c2", "names no call of an earlier assistant message"),
        ("c1", None, "is missing"),
        (None, "c1", "names no call of an earlier assistant message"),
    ],
)
def test_a_result_of_no_call_is_refused(with_tools, call_id, result_id, why):
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": result_id, "content": "sun"}
    for messages, index in (([*MESSAGES, {"role": "assistant", "tool_calls": [call]}, result], 2), ([result], 0)):
        response = with_tools.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == f"messages.{index}.tool_call_id"
        assert why in error["message"] or index == 0


def test_results_of_calls_without_ids_need_none(with_tools):
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sun"}]
    response = with_tools.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert response.status_code == 200, response.text
