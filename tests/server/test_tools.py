"""Tool calls: the forms that templates write them in, whole and cut into any pieces, and over the SDK."""

import json

import pytest

from harness.local_server import running, tiny_llm
from harness.tiny_models import CHATML
from peagle.server.chat import _message
from peagle.server.errors import HttpError
from peagle.server.protocol import ChatBody, Message, validated
from peagle.server.tools import ToolReader, tool_format

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


def read(form, text, size):
    """Text and calls of an answer that comes in pieces of `size` characters."""
    reader = ToolReader(form)
    shown, calls = "", []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for index, piece in enumerate(pieces):
        more, found = reader.add(piece, is_last=index + 1 == len(pieces))
        shown, calls = shown + more, calls + found
    return shown, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


CASES = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", {"a": 1})]),
    (
        "hermes",
        'Let me see.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "Let me see.",
        [("f", {}), ("g", {})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<b>"}}', "", [("f", {"a": "<b>"})]),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("hermes", "<tool_call>not JSON</tool_call> then", "<tool_call>not JSON</tool_call> then", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", None),
    ("mistral", "plain [TOOL", "plain [TOOL", []),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("mistral", ' [{"name": "f", "arguments": {}}]', "", [("f", {})]),
    ("mistral", "[1] is a footnote", "[1] is a footnote", []),
    ("llama", '{"just": "JSON"}', '{"just": "JSON"}', []),
    ("llama", "an answer {}", "an answer {}", []),
    ("forced", '{"name": "f", "arguments": {"a": [1, 2]}}', "", [("f", {"a": [1, 2]})]),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_calls_are_told_from_text_in_pieces_of_any_size(form, text, shown, calls, size):
    found_text, found_calls = read(form, text, size)
    assert found_calls == ([("f", {"a": 1}), ("g", {})] if calls is None else calls)
    assert found_text.strip() == shown.strip()


def test_the_template_decides_the_form():
    body = validated(ChatBody, {"messages": MESSAGES, "tools": TOOLS})
    assert tool_format(body, "{{ tools }} <tool_call>").form == "hermes"
    assert tool_format(body, "{{ tools }} [TOOL_CALLS]").form == "mistral"
    assert tool_format(body, "{{ tools }}").form == "llama"
    with pytest.raises(HttpError) as caught:
        tool_format(body, "{{ messages }}")
    assert caught.value.param == "tools"


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
        tool_format(validated(ChatBody, {"messages": MESSAGES} | more), HERMES)
    assert caught.value.message == message


def test_calls_that_clients_send_back_have_objects_for_templates():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert _message(message, "")["tool_calls"][0]["function"]["arguments"] == {"a": 1}


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
    assert [call.function.name for call in calls] == ["weather"] and calls[0].index == 0
    assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


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
