"""Answers as the models write them, after their chat templates, and what they say."""

from dataclasses import dataclass, field
from typing import Any

from peagle.dialects.dialect import Ask, Dialect, dialect_of

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hours": {"type": "array", "items": {"type": "number"}},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "is_long": {"type": "boolean"},
            "options": {"type": "object"},
        },
    },
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": None,
}
TEMPLATES = {
    "harmony": "{{ tools }} <|start|>assistant<|channel|>analysis<|message|> reasoning_effort message.thinking",
    "qwen3": "{{ tools }} <think> </think> <tool_call> enable_thinking reasoning_content",
    "coder": "{{ tools }} <tool_call> <function= <parameter=",
    "qwen3.5": "{{ tools }} <think> </think> <tool_call> <function= <parameter=",
    "gemma": '{{ tools }} <|channel>thought\n<channel|> <|tool_call>call: <|"|> enable_thinking',
    "r1": "{{ messages }} </think> <think>\n",
    "mistral": "{{ tools }} [TOOL_CALLS] [ARGS]",
    "llama": "{{ tools }}",
}
CODE = 'def f(a):\n    """Say "hi" \\ {a}."""\n    return {"k": [a]}\n'


@dataclass(frozen=True)
class Transcript:
    dialect: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    prompt: str = ""
    is_forced: bool = False

    @property
    def ask(self) -> Ask:
        return Ask(self.prompt, SCHEMAS, self.is_forced)

    @property
    def own(self) -> Dialect:
        return dialect_of(TEMPLATES[self.dialect])


ROME = ("weather", {"city": "Rome", "days": 3})
TRANSCRIPTS = {
    "harmony answer": Transcript(
        "harmony",
        "<|channel|>analysis<|message|>The user asks: 2 < 3?\n\nYes.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes, 2 < 3.",
        "Yes, 2 < 3.",
        "The user asks: 2 < 3?\n\nYes.",
    ),
    "harmony call": Transcript(
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{\n  "city": "Rome",\n  "days": 3\n}',
        reasoning="Need the weather.",
        calls=[ROME],
    ),
    "harmony preamble and calls": Transcript(
        "harmony",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look it up.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city":"Rome","days":3}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
        "I will look it up.",
        "One.\nTwo.",
        [ROME, ("now", {})],
    ),
    "harmony without a header": Transcript("harmony", " plain text\n", " plain text\n"),
    "qwen3 thinking": Transcript(
        "qwen3", "<think>\nIs 1 < 2?\n\nYes </thin k>.\n</think>\n\nYes.\n", "Yes.", "Is 1 < 2?\n\nYes </thin k>."
    ),
    "qwen3 calls": Transcript(
        "qwen3",
        "<think>\nhm\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "write", "arguments": {"path": "a</tool_call>", "text": '
        '"\\u00e9 \\"x\\" \\ud83d\\ude00\\n"}}\n</tool_call>',
        "Let me see.",
        "hm",
        [ROME, ("write", {"path": "a</tool_call>", "text": 'é "x" 😀\n'})],
    ),
    "qwen3 without thinking": Transcript("qwen3", "  Hello <b>.\n", "  Hello <b>.\n", prompt="<think>\n\n</think>\n\n"),
    "hermes name last": Transcript(
        "qwen3", '<tool_call>{"arguments": {"city": "Rome", "days": 3}, "name": "weather"}</tool_call>', calls=[ROME]
    ),
    "hermes arguments as text": Transcript(
        "qwen3", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>x', "x", calls=[("now", {})]
    ),
    "hermes nested values": Transcript(
        "qwen3",
        '<tool_call>{"name": "weather", "arguments": {"options": {"a": [1, -2.5e3, true, null, {}], "b": []}, '
        '"city": "\\\\ \\/ \\t"}}</tool_call>',
        calls=[("weather", {"options": {"a": [1, -2500.0, True, None, {}], "b": []}, "city": "\\ / \t"})],
    ),
    "coder calls": Transcript(
        "coder",
        "I write it.\n\n<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
        f"{CODE}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=hours>\n[1, 2.5]\n</parameter>\n"
        "<parameter=units>\nnull\n</parameter>\n<parameter=is_long>\nTrue\n</parameter>\n"
        '<parameter=options>\n{"a": "b"}\n</parameter>\n</function>\n</tool_call>',
        "I write it.\n\n",
        calls=[
            ("write", {"path": "a.py", "text": CODE}),
            (
                "weather",
                {
                    "city": "Rome",
                    "days": 3,
                    "hours": [1, 2.5],
                    "units": None,
                    "is_long": True,
                    "options": {"a": "b"},
                },
            ),
        ],
    ),
    "functions with JSON": Transcript(
        "coder",
        'So.<function=weather>{"city": "Rome", "days": 3}</function><function=now>{}</function>',
        "So.",
        calls=[ROME, ("now", {})],
    ),
    "coder without the outer tag": Transcript(
        "coder", "<function=now>\n</function>\n</tool_call>", calls=[("now", {})]
    ),
    "qwen3.5 thinking and call": Transcript(
        "qwen3.5",
        "\nI need <b>it</b>.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        reasoning="I need <b>it</b>.",
        calls=[ROME],
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    "gemma thinking and calls": Transcript(
        "gemma",
        '<|channel>thought\nThe user wants it.\n<channel|>I look.<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}'
        '<tool_call|><|tool_call>call:write{path:<|"|>a "b" \\ {c}, [d]\n<|"|>,text:<|"|><|"|>}<tool_call|>',
        "I look.",
        "The user wants it.",
        [ROME, ("write", {"path": 'a "b" \\ {c}, [d]\n', "text": ""})],
    ),
    "gemma nested values": Transcript(
        "gemma",
        '<|tool_call>call:weather{hours:[1,2.5,-3],is_long:true,options:{a:{b:[<|"|>x<|"|>,None]},c:Rome}}<tool_call|>',
        calls=[
            ("weather", {"hours": [1, 2.5, -3], "is_long": True, "options": {"a": {"b": ["x", None]}, "c": "Rome"}})
        ],
    ),
    "gemma answer": Transcript("gemma", "2 < 3 {a:1}", "2 < 3 {a:1}", prompt="<|channel>thought\n<channel|>"),
    "r1": Transcript("r1", "Okay.\n</think>\n\n**4**", "**4**", "Okay.", prompt="<Assistant><think>\n"),
    "mistral list": Transcript(
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, {"name": "now"}]',
        calls=[ROME, ("now", {})],
    ),
    "mistral names": Transcript(
        "mistral",
        'I see.[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}',
        "I see.",
        calls=[ROME, ("now", {})],
    ),
    "llama": Transcript("llama", '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}', calls=[ROME]),
    "llama text": Transcript("llama", " an answer {}", " an answer {}"),
    "llama other JSON": Transcript("llama", '{"just": "JSON"}', '{"just": "JSON"}'),
    "forced": Transcript(
        "qwen3",
        '<think>\nhm\n</think>\n\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}',
        reasoning="hm",
        calls=[ROME],
        is_forced=True,
    ),
    "forced harmony": Transcript(
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
        '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}',
        reasoning="hm",
        calls=[ROME],
        is_forced=True,
    ),
    "forced gemma": Transcript(
        "gemma",
        '<|channel>thought\nhm\n<channel|>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}',
        reasoning="hm",
        calls=[ROME],
        is_forced=True,
    ),
}
"""By what they show."""

BROKEN = {
    "not JSON": ("qwen3", "<tool_call>not JSON</tool_call> then", "<tool_call>not JSON</tool_call> then", []),
    "a call that never ends": ("qwen3", '<tool_call>{"name": "now", "arg', '<tool_call>{"name": "now", "arg', []),
    "a brace too many": ("qwen3", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', "", [("now", {})]),
    "a line break in a string": (
        "qwen3",
        '<tool_call>{"name": "write", "arguments": {"text": "a\n\tb\\d"}}</tool_call>',
        "",
        [("write", {"text": "a\n\tb\\d"})],
    ),
    "a comma too many": (
        "qwen3",
        '<tool_call>{"name": "weather", "arguments": {"days": 3,}}</tool_call>',
        "",
        [("weather", {"days": 3})],
    ),
    "an open string": (
        "qwen3",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "text": "say "hi" now"}}</tool_call>',
        'hi" now"}}',
        [("write", {"path": "a", "text": "say "})],
    ),
    "a key without a value": (
        "qwen3",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "text": }}</tool_call>',
        ', "text":',
        [("write", {"path": "a"})],
    ),
    "text in a function": ("coder", "<function=now>\nnow!</function>", "now!</function>", [("now", {})]),
    "an empty call": ("coder", "<tool_call>\nhm</tool_call>", "<tool_call>hm</tool_call>", []),
    "gemma without a name": ("gemma", "<|tool_call>hm<tool_call|>!", "<|tool_call>hm!", []),
    "gemma without braces": ("gemma", "<|tool_call>call:write{path:a<tool_call|>", "", [("write", {"path": "a"})]),
    "harmony code": (
        "harmony",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "print(1)",
        [],
    ),
    "harmony header alone": ("harmony", "<|channel|>final no message <|end|>", "<|channel|>final no message ", []),
    "mistral without a list": ("mistral", "[TOOL_CALLS] hm", "[TOOL_CALLS]hm", []),
}
"""Answers that break the form of their dialect: what is shown, and the calls that remain."""
