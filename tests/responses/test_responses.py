"""The Responses API over the SDK's own client: whole and streamed, with tools, schemas and thinking."""

import json

import openai
import pytest

from harness.local_server import chat_body as chat_body
from harness.local_server import running, tiny_llm
from harness.local_server import served as served
from harness.tiny_models import CHATML
from peagle.responses.output import Output
from peagle.responses.protocol import as_chat, parse

TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHATML
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def with_tools():
    with running(lambda: tiny_llm(chat_template=TOOLS_TEMPLATE, max_length=500)) as found:
        yield found


def test_a_response_says_what_the_chat_completion_says(served, chat_body):
    text = served.http.post("/v1/chat/completions", json=chat_body).json()["choices"][0]["message"]["content"]
    found = served.client().responses.create(
        model="tiny", input=chat_body["messages"][0]["content"], max_output_tokens=8, temperature=0
    )
    assert found.output_text == text and found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens" and found.output[0].status == "incomplete"
    assert found.usage.output_tokens == 8 and found.usage.total_tokens == found.usage.input_tokens + 8
    assert found.id.startswith("resp_") and found.model == "tiny" and found.temperature == 0


def test_a_stream_is_the_whole_response(served):
    asked = {
        "model": "tiny",
        "input": [{"role": "user", "content": "the user asks"}],
        "max_output_tokens": 20,
        "seed": 1,
    }
    asked["extra_body"] = {"seed": asked.pop("seed")}
    whole = served.client().responses.create(**asked)
    events = list(served.client().responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.output_tokens == 20 and events[0].response.output == []


def test_the_sdks_stream_helper_reads_a_call(with_tools):
    asked = {
        "model": "tiny",
        "input": "the weather",
        "tools": [TOOL],
        "tool_choice": "required",
        "max_output_tokens": 60,
    }
    with with_tools.client().responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    (call,) = found.output
    assert call.type == "function_call" and call.name == "weather" and found.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert kinds.count("response.function_call_arguments.delta") > 1
    whole = with_tools.client().responses.create(**asked)
    assert whole.output[0].type == "function_call" and json.loads(whole.output[0].arguments)["city"] in ("Rome", "Oslo")


def test_a_schema_is_followed(served):
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    found = served.client().responses.create(model="tiny", input="the city", text={"format": form})
    assert json.loads(found.output_text)["city"] in ("Rome", "Oslo") and found.status == "completed"


def test_a_conversation_goes_back_as_it_came(with_tools):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "the weather"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": "sun in Rome"},
        {"role": "user", "content": "thanks"},
    ]
    found = with_tools.client().responses.create(
        model="tiny", input=items, instructions="be brief", max_output_tokens=4
    )
    assert found.usage.output_tokens <= 4
    body, rest = parse({"input": items, "instructions": "be brief", "top_k": 3})
    chat = as_chat(body, rest)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the weather"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "assistant", "content": "sun in Rome"},
        {"role": "user", "content": "thanks"},
    ]
    assert chat["top_k"] == 3


def test_thinking_text_and_calls_are_items_in_their_order():
    body, rest = parse({"input": "hi"})
    output = Output(body, as_chat(body, rest), {"id": "chatcmpl-1", "created": 1, "model": "tiny"})
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    deltas = [
        {"reasoning_content": "a"},
        {"reasoning_content": "b", "content": "c"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]
    kinds = [event["type"] for delta in deltas for event in output.add(delta)]
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    kinds += [event["type"] for event in output.end("tool_calls", usage)]
    reasoning, message, called = output.response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "ab"}] and message["content"][0]["text"] == "c"
    assert called["arguments"] == "{}" and called["call_id"] == "call_1"
    assert {item["status"] for item in output.response["output"]} == {"completed"} == {output.response["status"]}
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"extra_body": {"max_tokens": 3}}, "'max_tokens' is not supported: this route takes 'max_output_tokens'"),
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is not supported: the server stores nothing"),
        ({"tools": [{"type": "web_search"}]}, "'tools.0.type' is not supported: 'web_search'"),
        ({"background": True}, "'background'"),
        ({"reasoning": {"effort": "low"}}, "'reasoning_effort' is not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "schema"),
        ({"extra_body": {"no_such_field": 1}}, "unknown field 'no_such_field'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served, more, message):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().responses.create(model="tiny", input="hi", **more)
    assert message in caught.value.message


def test_a_refusal_before_the_first_event_has_its_status(served):
    with pytest.raises(openai.BadRequestError, match="exceed the context"):
        served.client().responses.create(model="tiny", input="hi", max_output_tokens=4000, stream=True)
    with pytest.raises(openai.NotFoundError):
        served.client().responses.create(model="other", input="hi")
