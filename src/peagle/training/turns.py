"""Where the turns of a chat template begin and end, in tokens: what a target that writes conversations must know."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peagle.errors import DataError, RequestError
from peagle.tokenizer import answer_spans, chat_text, control_ids, detokenize, encode
from peagle.training.generation import Dialog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "PLACE-OF-THE-WORDS"
PROBE = ({"role": "user", "content": "probe0question"}, {"role": "assistant", "content": "probe0answer"})


def answer_end(tokenizer: "PreTrainedTokenizerBase", *, num_turns: int = 1) -> int:
    """The token that the chat template ends an answer with.

    A template in which answers cannot be found, or not in a conversation of `num_turns`, is a DataError that says why.
    """
    token_ids, mask = answer_spans(tokenizer, PROBE * num_turns)
    return token_ids[max(index for index, is_answer in enumerate(mask) if is_answer)]


def question_opening(tokenizer: "PreTrainedTokenizerBase", system_prompt: str) -> tuple[list[int], int]:
    """Token ids up to where a user's first words would begin, and the token with which the template ends them.

    An empty system prompt leaves it to the template. A template that refuses the messages is a RequestError, one in
    which the user's words cannot be found a DataError.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    text = chat_text(tokenizer, [*system, {"role": "user", "content": MARK}], add_generation_prompt=True)
    head, found, tail = text.rpartition(MARK)
    closing = encode(tokenizer, tail) if found else []
    controls = control_ids(tokenizer)
    end = next((token_id for token_id in closing if token_id in controls), None)
    # Words before the end token would be written by the target, as part of the question.
    before_end = closing[: closing.index(end)] if end is not None else closing
    if end is None or detokenize(tokenizer, before_end).strip():
        raise DataError(
            f"the chat template puts no end-of-turn token behind a user's words, only {tail!r}, so the target cannot "
            "write questions of its own",
            hint="let it answer prompts that you have: peagle data regenerate",
        )
    return encode(tokenizer, head), end


def opening_text(tokenizer: "PreTrainedTokenizerBase", dialog: Dialog) -> str:
    """A dialog's messages as the template shows them, up to where the answer begins; refusals name its place."""
    try:
        return chat_text(tokenizer, dialog.messages, add_generation_prompt=True)
    except RequestError as error:
        raise DataError(f"{dialog.where}: {error.message}", hint=error.hint) from error


def following_turn(
    tokenizer: "PreTrainedTokenizerBase",
    history: Sequence[dict[str, Any]],
    answer_ids: Sequence[int],
    messages: Sequence[dict[str, Any]],
) -> tuple[dict[str, Any], list[int]] | None:
    """The answer as a message, and the token ids that lead from its last token to the start of the next answer.

    `history` is what the answer answers, `messages` what is said next. None where the template would not show the
    tokens as they stand: it rewrites the answer, or ends answers with another token than this one ended with.
    """
    *words, end = answer_ids
    answer = {"role": "assistant", "content": detokenize(tokenizer, words)}
    if set(words) & set(tokenizer.all_special_ids):
        return None  # a caller who has the text alone would send it back without them
    end_text = str(tokenizer.decode([end], skip_special_tokens=False))
    before = chat_text(tokenizer, [*history, answer], add_generation_prompt=False)
    whole = chat_text(tokenizer, [*history, answer, *messages], add_generation_prompt=True)
    start = f"{chat_text(tokenizer, history, add_generation_prompt=True)}{answer['content']}{end_text}"
    if not (before.startswith(start) and whole.startswith(start)):
        return None
    # With the end token, because some tokenizers treat the beginning of a text differently.
    following = encode(tokenizer, end_text + whole[len(start) :])
    return (answer, following[1:]) if following[:1] == [end] else None
