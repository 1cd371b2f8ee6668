"""Tokenizer functions: chat rendering, identity hashes, incremental detokenization, answer masks.

The tokenizer is passed in and never changed. This module imports neither torch nor transformers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peagle.errors import DataError, RequestError, TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

PROBE_ANSWER = "probe0answer"
"""A placeholder answer, to find the text that a template puts after answers."""
REPLACEMENT = "\ufffd"
MAX_HELD_CHARACTERS = 3
"""An incomplete UTF-8 character has at most three bytes, shown as one to three replacement characters."""
MAX_WINDOW = 32
"""Tokens after which invalid UTF-8 is emitted, to bound the cost per token."""


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of `messages` through the target's chat template."""
    return encode(tokenizer, chat_text(tokenizer, messages, add_generation_prompt))


def prompt_text(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """The text of a prompt, with special tokens: through the chat template up to the start of the answer.

    A base model has no chat template: it continues the text of the messages.
    """
    if tokenizer.chat_template:
        return chat_text(tokenizer, messages, add_generation_prompt=True)
    added = tokenizer("", verbose=False)["input_ids"]
    start = tokenizer.bos_token if added and added[0] == tokenizer.bos_token_id else ""
    return str(start) + "\n\n".join(message["content"] for message in messages)


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Token ids of a prompt; a base model continues its text."""
    return encode(tokenizer, prompt_text(tokenizer, messages))


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """sha256 of the vocabulary and of the merges or scores of the segmentation model.

    Excludes paths, versions, padding and truncation, and the pipeline around the model, which differs between a GGUF
    file and a tokenizer.json of the same tokenizer.
    """
    content: dict[str, Any] = {"vocabulary": tokenizer.get_vocab()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        model = json.loads(backend.to_str())["model"]
        content["model"] = model.get("type")
        # Older tokenizer.json files write a merge as one string "a b", newer ones as a pair.
        content["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or ()]
        if isinstance(model.get("vocab"), list):
            content["scores"] = model["vocab"]
    return _sha256(content)


def chat_template_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """sha256 of the chat template, or of all named ones; of the empty string without one."""
    template = tokenizer.chat_template or ""
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else _sha256(template)


def detokenize(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """The text of a finished token sequence, without special tokens."""
    return _decode(tokenizer, list(token_ids), skip_special_tokens=True)


class IncrementalDetokenizer:
    """Text of a growing token sequence, in whole characters.

    Each `add` decodes only a short window of recent tokens, so the cost is linear. Emitted text never changes; all of
    it, with `finish()` at the end, equals `tokenizer.decode` of the whole sequence. `shown_ids` are special tokens that
    keep their text where the others are skipped.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens, self._shown_ids = skip_special_tokens, shown_ids
        # The tokens to decode: those of the last emitted text as context, because some decoders treat the first token
        # differently, and those whose text is held back.
        self._window: list[int] = []
        self._num_context = 0
        self._shown = ""  # the part of the window's text that was emitted

    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the new text, which may be empty."""
        if not self._shown_ids.isdisjoint(token_ids):
            return "".join(self._show(each) if each in self._shown_ids else self.add([each]) for each in token_ids)
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        decoded = self._decode(self._window)
        if not decoded.startswith(self._shown):
            # A byte-fallback decoder shows a run of bytes as invalid until its last character is complete.
            return self._emit_pending() if len(self._window) - self._num_context > MAX_WINDOW else ""
        num_held = min(len(decoded) - len(decoded.rstrip(REPLACEMENT)), MAX_HELD_CHARACTERS)
        certain = decoded[: max(len(decoded) - num_held, len(self._shown))]
        if certain == decoded:
            return self._emit(decoded)
        new, self._shown = certain[len(self._shown) :], certain
        if len(self._window) > MAX_WINDOW:
            self._shorten_window(decoded[len(certain) :])
        return new

    def finish(self) -> str:
        """Emit the text held back, with replacement characters for incomplete bytes."""
        decoded = self._decode(self._window)
        return self._emit(decoded) if decoded.startswith(self._shown) else self._emit_pending()

    def _show(self, token_id: int) -> str:
        return self.finish() + _decode(self._tokenizer, [token_id], skip_special_tokens=False)

    def _emit(self, decoded: str) -> str:
        """Emit the rest of the window's text. The newest tokens become the context; drop tokens without text."""
        new = decoded[len(self._shown) :]
        if new:
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._shown = self._decode(self._window)
        else:
            del self._window[self._num_context :]
        return new

    def _shorten_window(self, held: str) -> None:
        """Drop old tokens of a long run of invalid bytes, keeping those that may belong to `held`."""
        kept = self._window[-MAX_WINDOW // 2 :]
        decoded = self._decode(kept)
        if decoded.endswith(held):
            self._window, self._num_context = kept, 0
            self._shown = decoded[: len(decoded) - len(held)]

    def _emit_pending(self) -> str:
        pending = self._window[self._num_context :]
        self._window, self._num_context, self._shown = pending, len(pending), self._decode(pending)
        return self._shown

    def _decode(self, token_ids: list[int]) -> str:
        return _decode(self._tokenizer, token_ids, self._skip_special_tokens)


def answer_spans(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and a 0/1 mask of the tokens that the assistant wrote.

    An assistant turn is marked from the token after its generation prompt through its end-of-turn token. Turns before
    the first user message stay 0, and so does a token merged from the end of the prompt and the start of an answer.
    Raises DataError for templates without such boundaries, and for those that rewrite earlier turns.
    """
    try:
        return _answer_spans(tokenizer, messages)
    except RequestError as error:
        raise DataError(error.message, hint=error.hint) from error


def _answer_spans(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    whole_text = chat_text(tokenizer, messages, add_generation_prompt=False)
    ids = encode(tokenizer, whole_text)
    mask = [0] * len(ids)
    has_question = False
    for index, message in enumerate(messages):
        has_question = has_question or message.get("role") == "user"
        if not has_question or message.get("role") != "assistant":
            continue
        prompt_text = chat_text(tokenizer, messages[:index], add_generation_prompt=True)
        is_last = index + 1 == len(messages)
        turn_text = whole_text if is_last else chat_text(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if not (turn_text.startswith(prompt_text) and whole_text.startswith(turn_text)):
            raise _no_boundary(index, prompt_text, turn_text, whole_text)
        start = _answer_start(tokenizer, prompt_text, ids, index)
        turn_ids = ids if is_last else encode(tokenizer, turn_text)
        closing = _closing_ids(tokenizer, messages[:index], index)
        # Excludes the tokens after the end-of-turn token, which may merge with the next turn.
        end = len(turn_ids) - len(closing) + 1
        if turn_ids[end - 1 :] != closing or ids[:end] != turn_ids[:end] or start >= end:
            raise _no_answer(
                index,
                "the chat template does not end this answer with its end-of-turn token "
                f"{tokenizer.convert_ids_to_tokens(closing[0])!r}, so the end of the answer cannot be found",
            )
        mask[start:end] = [1] * (end - start)
    return ids, mask


def _no_answer(index: int, reason: str) -> DataError:
    hint = 'use single-turn rows, or generated token ids: {"prompt_ids": [...], "answer_ids": [...]} needs no template'
    return DataError(f"messages[{index}]: {reason}", hint=hint)


def _no_boundary(index: int, prompt_text: str, turn_text: str, whole_text: str) -> DataError:
    if not turn_text.startswith(prompt_text):
        expected, found = prompt_text, turn_text
        reason = "does not put the answer after its generation prompt"
    else:
        expected, found = turn_text, whole_text
        reason = "rewrites this answer when later messages follow (templates drop old thinking that way)"
    position = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(found))
    return _no_answer(
        index,
        f"the chat template {reason}, so the tokens of the answer cannot be found: after "
        f"{expected[max(0, position - 30) : position]!r} expected {expected[position : position + 30]!r}, "
        f"the whole conversation has {found[position : position + 30]!r}",
    )


def _answer_start(tokenizer: "PreTrainedTokenizerBase", prompt_text: str, ids: list[int], index: int) -> int:
    """Index in `ids` of the first token that lies entirely after `prompt_text`."""
    prompt_ids = encode(tokenizer, prompt_text)
    if ids[: len(prompt_ids)] == prompt_ids:
        return len(prompt_ids)
    common = next(i for i, token_id in enumerate(prompt_ids) if ids[i : i + 1] != [token_id])
    # The prompt's last tokens merged with the answer, as in "\n" + "\n\nHello": skip the merged ones.
    rest = _decode(tokenizer, prompt_ids[common:], skip_special_tokens=False)
    for start in range(common + 1, min(len(ids), len(prompt_ids) + 1) + 1):
        if _decode(tokenizer, ids[common:start], skip_special_tokens=False).startswith(rest):
            return start
    raise _no_answer(
        index,
        "the tokens of the prompt change when the answer follows, so the answer cannot be found among them: the prompt "
        f"ends in {prompt_text[-30:]!r}",
    )


def _closing_ids(tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[Message], index: int) -> list[int]:
    """The end-of-turn token that the template puts after an answer, and the tokens after it (often a newline)."""
    probe = chat_text(tokenizer, [*prompt, {"role": "assistant", "content": PROBE_ANSWER}], add_generation_prompt=False)
    _, found, closing_text = probe.rpartition(PROBE_ANSWER)
    closing = encode(tokenizer, closing_text) if found and closing_text else []
    controls = control_ids(tokenizer)
    for position, token_id in enumerate(closing):
        if token_id in controls:
            return closing[position:]
    raise _no_answer(
        index,
        f"the chat template puts no end-of-turn token after an answer, only {closing_text!r}; a drafter cannot learn "
        "where answers end",
    )


def control_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Special and added tokens, such as turn ends and headers."""
    return set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)


def chat_text(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], add_generation_prompt: bool, **variables: Any
) -> str:
    """Text of `messages` through the target's chat template, with special tokens.

    `variables` are further inputs of the template, such as `tools`.
    """
    if not tokenizer.chat_template:
        raise TargetError(
            "the target's tokenizer has no chat template, so it cannot render messages",
            hint="use an instruction-tuned target, or pass text or token ids instead of messages",
        )
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise RequestError(
            f"the target's chat template refuses these messages (roles: {roles}): {error}",
            hint="most templates take an optional system message, then user and assistant in turn",
        ) from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text that contains its special tokens."""
    # verbose=False: the caller checks the length.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


def encode_all(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """`encode` of each text, in parallel."""
    return list(tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]) if texts else []


def _decode(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int], skip_special_tokens: bool) -> str:
    # The clean-up would change text across tokens ("a ." to "a.").
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
