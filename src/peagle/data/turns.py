"""Turn boundaries of a chat template, in tokens.

A base model has no chat template. It continues plain text: a document begins with a line, which takes the place of the
question, and ends with the end token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peagle.data.prompts import Dialog
from peagle.errors import DataError, RequestError
from peagle.tokenizer import answer_spans, chat_text, control_ids, detokenize, encode, prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "PLACE-OF-THE-WORDS"
PROBE = ({"role": "user", "content": "probe0question"}, {"role": "assistant", "content": "probe0answer"})


def answer_end(tokenizer: "PreTrainedTokenizerBase", *, num_turns: int = 1) -> int:
    """The token that ends an answer in the chat template, or a document of a base model.

    Raises a DataError if answers cannot be located in a conversation of `num_turns`.
    """
    if not tokenizer.chat_template:
        return _document_end(tokenizer)
    token_ids, mask = answer_spans(tokenizer, PROBE * num_turns)
    return token_ids[max(index for index, is_answer in enumerate(mask) if is_answer)]


def question_opening(tokenizer: "PreTrainedTokenizerBase", system_prompt: str) -> tuple[list[int], int]:
    """Token ids up to the start of a user's first message, and the token that ends it.

    An empty system prompt uses the template's default. Raises a RequestError if the template rejects the messages, a
    DataError if the user's message cannot be located. A base model writes the first line of a document.
    """
    if not tokenizer.chat_template:
        if system_prompt:
            raise RequestError(
                "the target has no chat template, so it takes no system prompts", hint='keep "" in system_prompts'
            )
        start = tokenizer.bos_token_id
        return [_document_end(tokenizer) if start is None else start], encode(tokenizer, "\n")[-1]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    text = chat_text(tokenizer, [*system, {"role": "user", "content": MARK}], add_generation_prompt=True)
    head, found, tail = text.rpartition(MARK)
    closing = encode(tokenizer, tail) if found else []
    controls = control_ids(tokenizer)
    end = next((token_id for token_id in closing if token_id in controls), None)
    # The target would write text before the end token as part of the question.
    before_end = closing[: closing.index(end)] if end is not None else closing
    if end is None or detokenize(tokenizer, before_end).strip():
        raise DataError(
            f"the chat template puts no end-of-turn token after a user message, only {tail!r}, so the target cannot "
            "write questions",
            hint="answer your own prompts instead: peagle data regenerate --prompts FILE",
        )
    return encode(tokenizer, head), end


def opening_text(tokenizer: "PreTrainedTokenizerBase", dialog: Dialog) -> str:
    """A dialog rendered up to the start of the answer. Errors name its file and line."""
    try:
        return prompt_text(tokenizer, dialog.messages)
    except RequestError as error:
        raise DataError(f"{dialog.where}: {error.message}", hint=error.hint) from error


def following_turn(
    tokenizer: "PreTrainedTokenizerBase",
    history: Sequence[dict[str, Any]],
    answer_ids: Sequence[int],
    messages: Sequence[dict[str, Any]],
) -> tuple[dict[str, Any], list[int]] | None:
    """The answer as a message, and the token ids from its end to the start of the next answer.

    `history` precedes the answer, `messages` follow it. Returns None if the template would render other tokens: it
    rewrites the answer, or ends answers with another token. Nothing follows a document.
    """
    found = _after_answer(tokenizer, history, answer_ids, messages)
    return None if found is None else (found[0], found[1])


def following_question(
    tokenizer: "PreTrainedTokenizerBase", history: Sequence[dict[str, Any]], answer_ids: Sequence[int]
) -> list[int] | None:
    """The token ids from the end of an answer to the start of the user's next message; None as above."""
    found = _after_answer(tokenizer, history, answer_ids, [{"role": "user", "content": MARK}], until=MARK)
    return None if found is None else found[1]


def _after_answer(
    tokenizer: "PreTrainedTokenizerBase",
    history: Sequence[dict[str, Any]],
    answer_ids: Sequence[int],
    messages: Sequence[dict[str, Any]],
    until: str | None = None,
) -> tuple[dict[str, Any], list[int]] | None:
    if not tokenizer.chat_template:
        return None
    *words, end = answer_ids
    answer = {"role": "assistant", "content": detokenize(tokenizer, words)}
    if set(words) & set(tokenizer.all_special_ids):
        return None  # a client sends the text back without them
    end_text = str(tokenizer.decode([end], skip_special_tokens=False))
    before = chat_text(tokenizer, [*history, answer], add_generation_prompt=False)
    whole = chat_text(tokenizer, [*history, answer, *messages], add_generation_prompt=True)
    start = f"{chat_text(tokenizer, history, add_generation_prompt=True)}{answer['content']}{end_text}"
    if not (before.startswith(start) and whole.startswith(start)):
        return None
    rest = whole[len(start) :]
    if until is not None:
        rest = rest.rpartition(until)[0]
    # Encode with the end token: some tokenizers treat the start of a text differently.
    following = encode(tokenizer, end_text + rest)
    return (answer, following[1:]) if following[:1] == [end] else None


def _document_end(tokenizer: "PreTrainedTokenizerBase") -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the target's tokenizer has neither a chat template nor an end token, so no text ends",
            hint="set eos_token in its tokenizer_config.json",
        )
    return int(tokenizer.eos_token_id)
