"""Real answers of each dialect: read whole, in pieces of any size, and cut anywhere."""

import json
import random
import re

import pytest

from harness.transcripts import BROKEN, TRANSCRIPTS, Transcript
from peagle.dialects.messages import Deltas, message_of
from peagle.dialects.reading import Event

STRUCTURE = {"name", "arguments", "parameters", "call", "thought", "None", "True"}
"""words that belong to a form, or that JSON writes otherwise"""


def read(transcript, pieces, *, is_cut=False):
    """The events of an answer in pieces; events of one kind that follow each other are joined."""
    parser = transcript.own.parser(transcript.ask)
    found = [event for piece in pieces for event in parser.feed(piece)]
    joined: list[Event] = []
    for event in found + parser.feed("", is_last=True, is_cut=is_cut):
        if joined and joined[-1].kind == event.kind != "name":
            event = Event(event.kind, joined.pop().text + event.text)
        joined.append(event)
    return joined


def parts(events):
    """Content, reasoning and calls, arguments still as text."""
    message = message_of(events)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning_content", ""), calls


def sizes(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_transcript_says_what_its_model_meant(name):
    transcript = TRANSCRIPTS[name]
    content, reasoning, calls = parts(read(transcript, [transcript.text]))
    assert (content, reasoning) == (transcript.content, transcript.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == transcript.calls


ALL = TRANSCRIPTS | {name: Transcript(dialect, text) for name, (dialect, text, _, _) in BROKEN.items()}


@pytest.mark.parametrize("name", ALL)
def test_pieces_of_any_size_say_the_same_as_the_whole(name):
    transcript, rng = ALL[name], random.Random(name)
    text = transcript.text
    whole = read(transcript, [text])
    for size in (1, 2, 3, 7):
        assert read(transcript, sizes(text, size)) == whole
    for at in range(len(text)):
        assert read(transcript, [text[:at], text[at:]]) == whole
    for _ in range(10):
        cuts = sorted(rng.choices(range(len(text) + 1), k=5))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(transcript, pieces) == whole


@pytest.mark.parametrize("name", ALL)
def test_an_answer_cut_anywhere_loses_no_word_and_its_finished_calls_are_json(name):
    transcript = ALL[name]
    text = transcript.text
    for at in range(len(text)):
        for is_cut in (True, False):
            whole = read(transcript, [text[:at]], is_cut=is_cut)
            if at % 17 == 0:
                assert read(transcript, text[:at], is_cut=is_cut) == whole
            *_, calls = parts(whole)
            for _, arguments in calls[:-1] if is_cut else calls:
                assert isinstance(json.loads(arguments), dict), (text[:at], arguments)
            assert not calls or calls[-1][1].startswith("{"), "what a cut call has of its arguments is their start"
            said = " ".join(event.text for event in whole)
            assert not [word for word in words_of(text[:at]) if word not in said], (text[:at], whole)


HEADER = re.compile(r"(<\|start\|>assistant|<\|channel\|>)[^<]*(<\|channel\|>[^<]*)?(<\|constrain\|>json)?(<[^>]*>|$)")
TAG = re.compile(r"</?\|?(start|function|parameter|think|tool_call|channel|call|end|message)[^<>]*(>|$)|\[[A-Z_]+\]\d*")


def words_of(text):
    """The words outside of headers, tags and escapes, without a last one that may be the start of a mark."""
    text = re.sub(r"<[^<>\s]*$|[\[\w]*$", "", text)
    text = TAG.sub(" ", HEADER.sub(" ", re.sub(r"\\u[0-9a-f]{4}|\\.", " ", text)))
    return set(re.findall(r"\w{3,}", text)) - STRUCTURE


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_form_stays_text_and_arguments_stay_json(name):
    dialect, text, content, calls = BROKEN[name]
    found, _, found_calls = parts(read(Transcript(dialect, text), [text]))
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in found_calls] == calls


@pytest.mark.parametrize("name", ["harmony call", "qwen3 calls", "coder calls", "gemma thinking and calls", "forced"])
def test_arguments_are_streamed_in_pieces(name):
    transcript = TRANSCRIPTS[name]
    parser, deltas = transcript.own.parser(transcript.ask), Deltas()
    found = [deltas.of(parser.feed(piece)) for piece in transcript.text]
    found.append(deltas.of(parser.feed("", is_last=True)))
    pieces = [call for delta in found for call in delta.get("tool_calls", ())]
    assert len(pieces) > 5 * len(transcript.calls)
    for index, (name, arguments) in enumerate(transcript.calls):
        own = [call for call in pieces if call["index"] == index]
        assert own[0]["id"].startswith("call_") and own[0]["function"]["name"] == name
        assert all("id" not in call and "name" not in call["function"] for call in own[1:])
        assert json.loads("".join(call["function"]["arguments"] for call in own)) == arguments


def test_depth_is_limited():
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 500
    _, _, ((_, arguments),) = parts(read(Transcript("qwen3", text), [text]))
    assert json.loads(arguments)["a"]
