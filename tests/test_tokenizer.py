"""Chat rendering, identity hashes, streaming text and answer masks."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from harness.tiny_models import CHATML, SPECIAL_TOKENS, tiny_tokenizer
from peagle.errors import DataError, RequestError, TargetError
from peagle.tokenizer import IncrementalDetokenizer, answer_spans, chat_template_hash, render_chat, tokenizer_hash

IM_END = 2
TOKENIZER = tiny_tokenizer()

# Turns of the past lose what stands before </think>, as in several published reasoning templates.
DROPS_THINKING = CHATML.replace(
    "message['content'] +", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +"
)


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from texts that begin with "u:", "a:" or "s:"."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def trained_texts(ids: list[int], mask: list[int]) -> list[str]:
    """The text of each run of trained tokens."""
    assert len(ids) == len(mask)
    texts, run = [], []
    for token_id, is_trained in [*zip(ids, mask, strict=True), (0, 0)]:
        if is_trained:
            run.append(token_id)
        elif run:
            texts.append(TOKENIZER.decode(run))
            run = []
    return texts


def test_chat_is_rendered_with_the_generation_prompt_and_without_a_second_bos():
    ids = render_chat(TOKENIZER, chat("s:be brief", "u:the user"))
    assert TOKENIZER.decode(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe user<|im_end|>\n<|im_start|>assistant\n"
    )
    without = render_chat(TOKENIZER, chat("s:be brief", "u:the user"), add_generation_prompt=False)
    assert ids[: len(without)] == without and without[-2] == IM_END


def test_a_tokenizer_without_chat_template_is_refused_with_a_remedy():
    with pytest.raises(TargetError) as caught:
        render_chat(tiny_tokenizer(chat_template=None), chat("u:hello"))
    assert "no chat template" in caught.value.message
    assert "hint: use an instruction-tuned target" in str(caught.value)


def test_messages_that_the_template_refuses_are_a_request_error_with_its_words():
    strict = CHATML + "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError) as caught:
        render_chat(tiny_tokenizer(chat_template=strict), chat("u:one", "u:two"))
    assert "roles must alternate" in caught.value.message and "(roles: user, user)" in caught.value.message
    with pytest.raises(RequestError) as caught:
        render_chat(TOKENIZER, [{"role": "user", "content": None}])
    assert "chat template refuses these messages" in caught.value.message


def test_hashes_do_not_depend_on_the_place_or_state_of_the_tokenizer(tmp_path):
    expected = tokenizer_hash(TOKENIZER)
    assert re.fullmatch("[0-9a-f]{64}", expected)
    TOKENIZER.save_pretrained(tmp_path)
    moved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer_hash(moved) == expected and chat_template_hash(moved) == chat_template_hash(TOKENIZER)
    moved(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(moved) == expected, "padding state is not part of what ids mean"


def test_hashes_change_with_tokens_merges_and_template():
    more_tokens = tiny_tokenizer()
    more_tokens.add_tokens(["<tool>"])
    assert tokenizer_hash(more_tokens) != tokenizer_hash(TOKENIZER)
    state = json.loads(TOKENIZER.backend_tokenizer.to_str())
    state["model"]["merges"].reverse()
    other_merges = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert tokenizer_hash(other_merges) != tokenizer_hash(TOKENIZER)
    assert chat_template_hash(TOKENIZER) == hashlib.sha256(CHATML.encode()).hexdigest()
    assert chat_template_hash(tiny_tokenizer(chat_template=None)) == hashlib.sha256(b"").hexdigest()


class Streamed(IncrementalDetokenizer):
    """Keeps all text that was emitted."""

    text = ""

    def add(self, token_ids):
        new = super().add(token_ids)
        self.text += new
        return new

    def finish(self):
        new = super().finish()
        self.text += new
        return new


def test_emoji_of_several_tokens_is_streamed_whole():
    ids = TOKENIZER.encode("a\U0001f917b")
    assert len(ids) == 5, "the emoji takes three tokens: one merged pair and two bytes"
    detokenizer = Streamed(TOKENIZER)
    assert [detokenizer.add([token_id]) for token_id in ids] == ["a", "", "", "\U0001f917", "b"]
    assert detokenizer.text == "a\U0001f917b" and detokenizer.finish() == ""


def test_text_before_an_unfinished_character_is_not_held_back():
    ids = TOKENIZER.encode("the \u20ac")
    detokenizer = Streamed(TOKENIZER)
    assert detokenizer.add(ids[:-1]) == "the "
    assert detokenizer.add([]) == ""
    assert detokenizer.add(ids[-1:]) == "\u20ac"


def test_an_answer_cut_inside_a_character_ends_in_a_replacement_sign_only_when_finished():
    ids = TOKENIZER.encode("ok \U0001f917")[:-1]
    detokenizer = Streamed(TOKENIZER)
    assert "".join(detokenizer.add([token_id]) for token_id in ids) == "ok "
    assert detokenizer.finish() == "\ufffd" and detokenizer.text == TOKENIZER.decode(ids)
    assert detokenizer.finish() == "", "finishing twice gives nothing twice"


def test_special_tokens_are_left_out_unless_asked_for():
    ids = TOKENIZER.encode("hi<|im_end|>there")
    assert Streamed(TOKENIZER).add(ids) == "hithere"
    assert Streamed(TOKENIZER, skip_special_tokens=False).add(ids) == "hi<|im_end|>there"


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_streamed_text_equals_decoding_any_tokens_at_once(ids, sizes):
    detokenizer = Streamed(TOKENIZER)
    parts, position = [], 0
    while position < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(detokenizer.add(ids[position : position + size]))
        position += size
    parts.append(detokenizer.finish())
    assert "".join(parts) == TOKENIZER.decode(ids, skip_special_tokens=True) == detokenizer.text


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40))
def test_streaming_valid_text_never_shows_half_a_character(text):
    detokenizer = Streamed(TOKENIZER, skip_special_tokens=False)
    for token_id in TOKENIZER.encode(text):
        detokenizer.add([token_id])
        assert text.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == text


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids, **options):
        self.num_decoded += len(token_ids)
        return TOKENIZER.decode(token_ids, **options)


@pytest.mark.parametrize(
    "ids",
    [
        TOKENIZER.encode("the \U0001f917 user " * 100),
        TOKENIZER.encode("\U0001f917")[:1] * 1000,
        TOKENIZER.encode("a") + [IM_END] * 1000,
    ],
    ids=["text", "invalid bytes", "special tokens"],
)
def test_cost_of_streaming_is_linear(ids):
    counting = CountingTokenizer()
    detokenizer = Streamed(counting)
    for token_id in ids:
        detokenizer.add([token_id])
    detokenizer.finish()
    assert counting.num_decoded < 50 * len(ids)
    assert detokenizer.text == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_byte_fallback_tokens_and_leading_spaces_stream_correctly():
    bytes_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["\u2581Hello", "\u2581world", "!"]
    vocabulary = {token: index for index, token in enumerate([*bytes_tokens, *pieces])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    emoji = list("\U0001f917".encode())
    ids = [256, 257, *emoji, *emoji, 258, 257]
    detokenizer = Streamed(tokenizer)
    shown = [detokenizer.add([token_id]) for token_id in ids]
    assert shown == ["Hello", " world", "", "", "", "\U0001f917", "", "", "", "\U0001f917", "!", " world"]
    assert detokenizer.text == tokenizer.decode(ids)


def test_mask_covers_exactly_the_answers_with_their_end_of_turn_tokens():
    messages = chat("s:rules", "u:one?", "a:the one", "u:two?", "a:two \U0001f917")
    ids, mask = answer_spans(TOKENIZER, messages)
    assert trained_texts(ids, mask) == ["the one<|im_end|>", "two \U0001f917<|im_end|>"]
    assert ids == render_chat(TOKENIZER, messages, add_generation_prompt=False)


def test_a_conversation_that_ends_with_a_question_trains_the_answers_before_it():
    ids, mask = answer_spans(TOKENIZER, chat("u:q", "a:r", "u:more?"))
    assert trained_texts(ids, mask) == ["r<|im_end|>"]


def test_a_greeting_before_the_first_question_is_not_trained():
    ids, mask = answer_spans(TOKENIZER, chat("a:Welcome!", "u:q", "a:r"))
    assert trained_texts(ids, mask) == ["r<|im_end|>"]


def test_a_conversation_without_answers_has_an_empty_mask():
    ids, mask = answer_spans(TOKENIZER, chat("u:q"))
    assert len(ids) == len(mask) and not any(mask)


def test_a_token_merged_from_prompt_and_answer_is_not_trained():
    ids, mask = answer_spans(TOKENIZER, chat("u:q", "a:\nfirst", "u:again", "a:\n\nsecond"))
    # The newline of "assistant\n" joins the first of two newlines, but stays alone before a single one.
    assert trained_texts(ids, mask) == ["\nfirst<|im_end|>", "\nsecond<|im_end|>"]


def test_end_of_turn_spelled_inside_an_answer_does_not_end_the_mask_early():
    ids, mask = answer_spans(TOKENIZER, chat("u:q", "a:say <|im_end|> now", "u:q", "a:r"))
    assert trained_texts(ids, mask) == ["say <|im_end|> now<|im_end|>", "r<|im_end|>"]


def test_a_template_that_drops_old_thinking_is_refused_where_it_would_be_masked_wrongly():
    tokenizer = tiny_tokenizer(chat_template=DROPS_THINKING)
    ids, mask = answer_spans(tokenizer, chat("u:q", "a:hm</think>r"))
    assert trained_texts(ids, mask) == ["hm</think>r<|im_end|>"], "a single turn is not rewritten"
    with pytest.raises(DataError) as caught:
        answer_spans(tokenizer, chat("u:q", "a:hm</think>r", "u:q", "a:s"))
    assert "messages[1]: the chat template rewrites this answer" in caught.value.message
    assert "expected 'hm</think>r" in caught.value.message
    assert "hint: use single-turn rows, or generated token ids" in str(caught.value)


def test_a_template_whose_generation_prompt_is_not_in_the_conversation_is_refused():
    tokenizer = tiny_tokenizer(chat_template=CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>bot\n'"))
    with pytest.raises(DataError) as caught:
        answer_spans(tokenizer, chat("u:q", "a:r"))
    assert "does not put the answer after its generation prompt" in caught.value.message
    assert "expected 'bot\\n'" in caught.value.message


def test_a_template_without_end_of_turn_token_is_refused():
    tokenizer = tiny_tokenizer(chat_template=CHATML.replace("<|im_end|>", ""))
    with pytest.raises(DataError) as caught:
        answer_spans(tokenizer, chat("u:q", "a:r"))
    assert "puts no end-of-turn token after an answer, only '\\n'" in caught.value.message


def test_a_template_that_ends_only_the_last_answer_differently_is_refused():
    ends_text = CHATML.replace(
        "'<|im_end|>'", "('<|endoftext|>' if loop.last and message['role'] == 'assistant' else '<|im_end|>')"
    )
    with pytest.raises(DataError, match="rewrites this answer"):
        answer_spans(tiny_tokenizer(chat_template=ends_text), chat("u:q", "a:r", "u:q", "a:s"))


def test_messages_that_the_template_refuses_are_a_data_error_in_a_conversation():
    strict = tiny_tokenizer(chat_template=CHATML + "{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match="no system role"):
        answer_spans(strict, chat("s:x", "u:q", "a:r"))


def test_reading_modules_import_neither_torch_nor_transformers():
    source = Path(sys.modules["peagle.tokenizer"].__file__).parents[1]
    program = (
        "import sys, peagle.rows, peagle.tokenizer, peagle.data.conversations, peagle.data.prompts\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_special_tokens_of_the_tiny_tokenizer_have_the_first_ids():
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, IM_END]


def test_shown_special_tokens_keep_their_text_in_a_stream():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the <|im_start|>user\u00e9<|endoftext|> as<|im_end|>\U0001f600", add_special_tokens=False)[
        "input_ids"
    ]
    detokenizer = IncrementalDetokenizer(tokenizer, shown_ids=frozenset({1}))
    text = "".join(detokenizer.add([token_id]) for token_id in ids) + detokenizer.finish()
    assert text == "the <|im_start|>user\u00e9 as\U0001f600", "others have none"
