"""Base models, which have no chat template: they continue plain text in `data`, `eval`, `generate` and the server."""

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from harness.local_server import running, tiny_llm
from harness.tiny_models import tiny_target, tiny_tokenizer
from peagle.compare.answers import render_prompt
from peagle.data.config import RegenerationConfig, SynthesisConfig, Until
from peagle.data.conversations import read_conversations
from peagle.data.prompts import Dialog, Prompt
from peagle.data.regeneration import answer_dialogs
from peagle.data.synthesis import write_synthesis
from peagle.data.turns import answer_end, question_opening
from peagle.errors import ConfigError, DataError, RequestError
from peagle.tokenizer import prompt_ids

START, END = 1, 2
NEWLINE = tiny_tokenizer()("\n")["input_ids"][-1]


@pytest.fixture(scope="module")
def base():
    target = tiny_target(num_layers=2, tie_word_embeddings=False)
    target.tokenizer.chat_template = None
    with torch.no_grad():
        target.model.lm_head.weight[NEWLINE] *= 4  # random lines seldom end
    return target


def test_a_base_model_gets_rows_of_its_own_text(base, tmp_path):
    given = {"keep_loops": True, "question_temperature": 1.5}  # random texts loop
    config = SynthesisConfig(max_length=64, temperatures=(1.0,), **given).for_base_model()
    assert config.keep_cut, "texts seldom end within a row"
    counts = write_synthesis(base, tmp_path, config, Until(num_answers=4), (), {}, max_batch=8)
    assert counts["num_rows"] == 4
    for row in read_conversations(tmp_path, base.tokenizer):
        first = int(np.argmax(row.loss_mask))
        assert row.loss_mask[first:].all() and not row.loss_mask[:first].any(), "a line, then its continuation"
        assert NEWLINE not in row.token_ids[:first] and len(row) - first >= config.min_answer_tokens


def test_kinds_that_need_a_chat_template_are_refused():
    with pytest.raises(ConfigError, match="kinds 'chat=1,summary=1' need a chat template"):
        SynthesisConfig(kinds="chat=1,summary=1").for_base_model()
    with pytest.raises(RequestError, match="takes no system prompts"):
        question_opening(tiny_tokenizer(chat_template=None), "Be brief.")


def test_a_base_model_continues_the_texts_of_a_file(base, tmp_path):
    dialogs = [
        Dialog("file:1", [{"role": "user", "content": "the user"}]),
        Dialog("file:2", [{"role": "user", "content": "as the"}, {"role": "user", "content": "never asked"}]),
    ]
    config = RegenerationConfig(max_length=64, max_answer_tokens=10, temperatures=(0.0,))
    assert answer_dialogs(base, dialogs, tmp_path, config, {}, max_batch=2)["num_rows"] == 2
    rows = read_conversations(tmp_path, base.tokenizer)
    texts = sorted(base.tokenizer.decode(row.token_ids[~row.loss_mask].tolist()) for row in rows)
    assert texts == ["as the", "the user"], "the first text, without a template; nothing follows a document"


def test_prompts_are_rendered_as_text_and_start_as_the_tokenizer_starts_texts(base):
    prompt = Prompt("1", ({"role": "user", "content": "the user"},), "prompt")
    assert render_prompt(base, prompt) == base.tokenizer("the user")["input_ids"]
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
    )
    assert prompt_ids(tokenizer, prompt.messages) == tokenizer("the user")["input_ids"]
    assert prompt_ids(tokenizer, prompt.messages)[0] == START


def test_a_document_begins_with_a_line_and_ends_with_the_end_token():
    tokenizer = tiny_tokenizer(chat_template=None)
    opening, end = question_opening(tokenizer, "")
    assert opening == [START] and tokenizer.decode([end]) == "\n" and answer_end(tokenizer, num_turns=2) == END
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither a chat template nor an end token"):
        answer_end(tokenizer)


def test_a_base_model_is_served_and_says_what_to_send():
    def load():
        llm = tiny_llm()
        llm.target.tokenizer.chat_template = None
        return llm

    with running(load) as served:
        text = served.client().completions.create(model="tiny", prompt="the", max_tokens=5, temperature=0)
        assert text.usage.completion_tokens == 5
        body = {"messages": [{"role": "user", "content": "hi"}]}
        expected = "the target has no chat template, so it takes no messages; send the text to /v1/completions"
        for path, data in (("/v1/chat/completions", body), ("/tokenize", body), ("/v1/responses", {"input": "hi"})):
            response = served.http.post(path, json=data)
            assert response.status_code == 400 and response.json()["error"]["message"] == expected
