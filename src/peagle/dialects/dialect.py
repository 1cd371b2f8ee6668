"""Which dialect a target speaks, by its chat template; the parser of an answer, and what precedes a constrained one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.dialects import gemma, harmony
from peagle.dialects.json_calls import (
    ARGS,
    CALL,
    CALL_END,
    CALL_ID,
    TOOL_CALLS,
    read_forced,
    read_hermes,
    read_llama,
    read_mistral,
)
from peagle.dialects.reading import Parser, Reader, Steps
from peagle.dialects.thinking import THINK, THINK_END, read_thinking
from peagle.dialects.xml_calls import FUNCTION, read_xml
from peagle.sampling_params import ANY_TEXT

Thinking = Literal["none", "tags", "gemma", "harmony"]
Calls = Literal["hermes", "xml", "mistral", "llama", "gemma", "harmony"]

CALL_ENDS: dict[Calls, str] = {"hermes": CALL_END, "xml": CALL_END, "gemma": gemma.CALL_END}
MARKS: dict[Thinking | Calls, tuple[str, ...]] = {
    "tags": (THINK, THINK_END),
    "hermes": (CALL, CALL_END),
    "xml": (CALL, CALL_END),
    "mistral": (TOOL_CALLS, CALL_ID, ARGS),
    "gemma": gemma.MARKS,
    "harmony": harmony.MARKS,
}


@dataclass(frozen=True)
class Ask:
    """What one request means for its answers."""

    prompt: str = ""
    """the end of the rendered prompt"""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """the parameters of each tool that may be called, as JSON schemas"""
    is_forced: bool = False
    """whether a grammar makes the answer a call in JSON"""


@dataclass(frozen=True)
class Dialect:
    """How a target writes thinking and calls."""

    thinking: Thinking
    calls: Calls
    has_tools: bool
    """whether the chat template shows tools to the target"""

    def marks(self, *, has_calls: bool) -> frozenset[str]:
        """Control tokens that answers are parsed by."""
        return frozenset(MARKS.get(self.thinking, ()) + (MARKS.get(self.calls, ()) if has_calls else ()))

    @property
    def call_end(self) -> str:
        """The text behind a call; "" if nothing ends a call but the answer."""
        return CALL_ENDS.get(self.calls, "")

    def parser(self, ask: Ask) -> Parser:
        return Parser(lambda reader: self._read(reader, ask))

    def _read(self, reader: Reader, ask: Ask) -> Steps[None]:
        has_calls = bool(ask.schemas)
        if self.thinking == "harmony":
            yield from harmony.read_harmony(reader, has_calls=has_calls, is_forced=ask.is_forced)
            return
        if self.thinking == "gemma":
            is_open = self._is_open(ask.prompt)
            yield from gemma.read_gemma(reader, is_open=is_open, has_calls=has_calls, is_forced=ask.is_forced)
            return
        if self.thinking == "tags":
            yield from read_thinking(reader, is_open=self._is_open(ask.prompt))
        if ask.is_forced:
            yield from read_forced(reader)
        elif not has_calls:
            yield from reader.copy_until("content")
        elif self.calls == "xml":
            yield from read_xml(reader, ask.schemas)
        elif self.calls == "mistral":
            yield from read_mistral(reader)
        else:
            yield from (read_hermes if self.calls == "hermes" else read_llama)(reader)

    def _is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside of thinking."""
        opening = THINK if self.thinking == "tags" else gemma.CHANNEL + gemma.THOUGHT.strip()
        return prompt.rstrip().endswith(opening)

    def openings(self, prompt: str) -> tuple[tuple[str, ...], ...]:
        """What may come before an answer that a grammar constrains, for `Grammar.openings`."""
        if self.thinking == "harmony":
            start = harmony.CHANNEL, "final", harmony.MESSAGE
            thinking = harmony.CHANNEL, "analysis", harmony.MESSAGE, ANY_TEXT, "<|end|>", harmony.START, "assistant"
            return start, (*thinking, *start)
        opening: tuple[str, ...]
        rest: tuple[str, ...]
        if self.thinking == "tags":
            opening, rest = (THINK,), (ANY_TEXT, THINK_END, "\n\n")
            is_closed = prompt.rstrip().endswith(THINK_END)
        elif self.thinking == "gemma":
            opening, rest = (gemma.CHANNEL, gemma.THOUGHT), (ANY_TEXT, gemma.CHANNEL_END)
            is_closed = prompt.rstrip().endswith(gemma.CHANNEL_END)
        else:
            return ()
        if self._is_open(prompt):
            return (rest,)
        return () if is_closed else ((), opening + rest)


def dialect_of(template: str) -> Dialect:
    """The dialect of a chat template: of the marks that it writes around thinking and calls."""
    has_tools = "tools" in template
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return Dialect("harmony", "harmony", has_tools)
    if gemma.CALL in template or gemma.CHANNEL in template:
        return Dialect("gemma", "gemma", has_tools)
    calls: Calls = "xml" if FUNCTION in template else "hermes" if CALL in template else "llama"
    if TOOL_CALLS in template:
        calls = "mistral"
    return Dialect("tags" if THINK_END in template else "none", calls, has_tools)
