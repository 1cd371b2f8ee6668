"""Thinking over the SDK: `reasoning_content`, effort, and structured answers and forced calls behind it."""

import json

import openai
import pytest

from harness.local_server import running
from harness.tiny_models import CHATML, tiny_drafter, tiny_target
from peagle.decoding.grammar import make_guide
from peagle.engine.llm import LLM
from peagle.sampling_params import Grammar, SamplingParams

MESSAGES = [{"role": "user", "content": "the weather"}]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
THINK = (
    CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    + "{# </think> tools enable_thinking #}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}"
    "{% for tool in tools or [] %}{{ '// ' + tool.function.description + tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}"
    "{% endfor %}{{ '<|start|>assistant' }}{# <|channel|> message.thinking #}"
)
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
GEMMA = CHATML + '{# tools <|channel>thought <|tool_call> <|"|> enable_thinking #}'
GEMMA_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')


def thinking_llm(template, marks, *, is_special=True, **settings):
    """A tiny target whose tokenizer has these control tokens, from id 268 on."""
    target = tiny_target()
    target.tokenizer.chat_template = template
    target.tokenizer.add_tokens(list(marks), special_tokens=is_special)
    return LLM(target, tiny_drafter(target), 4, max_batch=8, max_length=512, page_size=16, verify_tokens=0, **settings)


CASES = {
    "harmony": (HARMONY, MARKS, True, "<|end|>"),
    "gemma": (GEMMA, GEMMA_MARKS, True, "<channel|>"),
    "tags": (THINK, ("<think>", "</think>"), False, "</think>"),
}


@pytest.fixture(scope="module", params=CASES)
def thinking(request):
    template, marks, is_special, end = CASES[request.param]
    with running(lambda: thinking_llm(template, marks, is_special=is_special)) as found:
        yield found, {str(268 + marks.index(end)): 6.0}


def asked(**more):
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "seed": 5} | more


def test_a_structured_answer_comes_after_thinking(thinking):
    server, likely_end = thinking
    client, body = server.client(), asked(logit_bias=likely_end, response_format=FORMAT)
    whole = client.chat.completions.create(**body)
    message = whole.choices[0].message
    assert json.loads(message.content)["color"] in ("red", "blue") and whole.choices[0].finish_reason == "stop"
    assert "<" not in message.content and message.tool_calls is None
    num_reasoning = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 <= num_reasoning < whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**body, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == getattr(message, "reasoning_content", "")


def test_a_forced_call_comes_after_thinking(thinking):
    server, likely_end = thinking
    create = server.client().chat.completions.create
    choice = create(**asked(logit_bias=likely_end, tools=[TOOL], tool_choice="required")).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "paint"
    assert json.loads(call.function.arguments)["color"] in ("red", "blue") and not choice.message.content


def test_text_of_an_unfinished_thought_is_reasoning(thinking):
    server, _ = thinking
    body = asked(max_tokens=12, temperature=0)
    message = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    is_open = "<think>" in server.service.chat_template
    assert bool(message.get("reasoning_content")) == is_open and bool(message["content"]) != is_open


def test_effort_reaches_the_template():
    with running(lambda: thinking_llm(HARMONY, MARKS)) as server:

        def prompt(effort):
            body = {"messages": MESSAGES, "max_tokens": 1, "reasoning_effort": effort, "return_token_ids": True}
            ids = server.http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
            return server.service.tokenizer.decode(ids)

        assert "Reasoning: low" in prompt("low") and "Reasoning: high" in prompt("high")
        with pytest.raises(openai.BadRequestError, match="'reasoning_effort' must be one of low, medium, high"):
            server.client().chat.completions.create(model="tiny", messages=MESSAGES, reasoning_effort="minimal")


def test_openings_are_the_same_with_and_without_drafts():
    openings = (("<|channel|>", "final", "<|message|>"), ("a", "", "<|end|>"), ("b", "", "</end>"))
    params = SamplingParams(
        max_tokens=60,
        grammar=Grammar("choice", ("yes", "no"), openings),
        logit_bias={268 + MARKS.index("<|end|>"): 5.0},
        shown_token_ids=frozenset(range(268, 275)),
    )
    with thinking_llm(HARMONY, MARKS) as llm:
        outputs = [
            llm.generate(["the"], SamplingParams(**{**as_dict(params), "num_draft_tokens": drafts}))[0]
            for drafts in (None, 0)
        ]
    assert outputs[0].text == outputs[1].text
    assert outputs[0].text.endswith(("yes", "no"))
    assert outputs[0].text.startswith(("<|channel|>final<|message|>", "a", "b"))


def as_dict(params):
    return {name: getattr(params, name) for name in params.__slots__}


@pytest.mark.parametrize("text", ["ax<|end|>yes", "b x </en </end>no", "<|channel|>final<|message|>yes"])
def test_an_answer_may_end_after_its_opening_only(text):
    openings = (("<|channel|>", "final", "<|message|>"), ("a", "", "<|end|>"), ("b", "", "</end>"))
    target = tiny_target()
    target.tokenizer.add_tokens(list(MARKS), special_tokens=True)
    ids = target.tokenizer(text)["input_ids"]
    guide = make_guide(target, Grammar("choice", ("yes", "no"), openings))
    may_end = [guide.allowed_after(ids[:count])[2] for count in range(len(ids) + 1)]
    assert may_end == [False] * len(ids) + [True]
