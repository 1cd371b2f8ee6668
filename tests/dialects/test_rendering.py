"""What chat templates get: messages that clients send back, tools, and the effort of thinking."""

import pytest

from harness.transcripts import TEMPLATES
from peagle.dialects.dialect import dialect_of
from peagle.dialects.rendering import effort_variables, template_message, template_tool


@pytest.mark.parametrize(
    ("name", "thinking", "calls"),
    [
        ("harmony", "harmony", "harmony"),
        ("qwen3", "tags", "hermes"),
        ("coder", "none", "xml"),
        ("qwen3.5", "tags", "xml"),
        ("gemma", "gemma", "gemma"),
        ("r1", "tags", "llama"),
        ("mistral", "none", "mistral"),
        ("llama", "none", "llama"),
    ],
)
def test_the_template_decides_the_dialect(name, thinking, calls):
    found = dialect_of(TEMPLATES[name])
    assert (found.thinking, found.calls, found.has_tools) == (thinking, calls, name != "r1")


def test_calls_that_clients_send_back_have_objects_for_templates():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = template_message({"role": "assistant", "tool_calls": [call]}, "")
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1} and message["content"] == ""


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_that_clients_send_back_goes_under_the_templates_name(key):
    message = {"role": "assistant", "content": "", key: "hm"}
    assert template_message(message, TEMPLATES["harmony"])["thinking"] == "hm"
    assert template_message(message, TEMPLATES["qwen3"])["reasoning_content"] == "hm"
    call = {"function": {"name": "f", "arguments": "{}"}}
    both = template_message(message | {"content": "I look.", "tool_calls": [call]}, TEMPLATES["harmony"])
    assert "thinking" not in both, "the template of GPT-OSS takes one of them with a call"


def test_effort_is_the_templates_own_variable():
    assert effort_variables("low", TEMPLATES["harmony"]) == {"reasoning_effort": "low"}
    assert effort_variables("none", TEMPLATES["qwen3"]) == {"enable_thinking": False}
    assert effort_variables("high", TEMPLATES["gemma"]) == {"enable_thinking": True}
    assert effort_variables("high", TEMPLATES["coder"]) is None
    with pytest.raises(ValueError, match="must be one of low, medium, high, got 'extreme'"):
        effort_variables("extreme", TEMPLATES["harmony"])


def test_tools_of_gpt_oss_have_a_description():
    assert template_tool({"function": {"name": "f"}}, TEMPLATES["harmony"])["function"]["description"] == ""
    assert template_tool({"function": {"name": "f"}}, TEMPLATES["qwen3"]) == {"function": {"name": "f"}}


def test_mistrals_templates_get_the_short_ids_that_they_ask_for():
    template = "[TOOL_CALLS] Tool call IDs should be alphanumeric strings with length 9!"
    call = {"id": "call_0123456789abcdef", "function": {"name": "f", "arguments": "{}"}}
    called = template_message({"role": "assistant", "tool_calls": [dict(call)]}, template)
    result = template_message({"role": "tool", "content": "x", "tool_call_id": call["id"]}, template)
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "789abcdef"
    assert template_message({"role": "tool", "tool_call_id": call["id"]}, "")["tool_call_id"] == call["id"]
