"""POST /v1/completions: texts or token ids, continued."""

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from peagle.server.errors import HttpError
from peagle.server.jobs import Job
from peagle.server.protocol import CompletionBody
from peagle.server.sampling import grammar_of, sampling_params
from peagle.server.service import Service
from peagle.server.writer import Writer, details, finite, step_details

if TYPE_CHECKING:
    from peagle.engine.outputs import TokenLogprobs, Update

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route."""


async def answer_completion(service: Service, body: CompletionBody, request: Request) -> Response:
    """Continue one text or several, whole or as a stream."""
    arrived = time.perf_counter()
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs is not part of streams; ask for echo with logprobs, or do not stream"
        raise HttpError(400, message, param="prompt_logprobs")
    prompts = await service.in_thread(request, lambda: token_ids_of(service, body))
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if body.stream and (body.n or 1) > 1:
            message = "echo with logprobs streams one answer to each prompt; leave out n, or do not stream"
            raise HttpError(400, message, param="n")
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if asked == 0 and not body.echo:
        raise HttpError(400, "max_tokens must be at least 1, got 0; 0 needs echo", param="max_tokens")
    if body.max_tokens is None:
        asked = min(asked, service.room(prompts, None, "max_tokens"))
    grammar = grammar_of(body)
    if grammar is not None:
        await service.prepare(grammar)
    params = sampling_params(
        body.model_copy(update={"prompt_logprobs": num_prompt_logprobs}),
        max_tokens=service.room(prompts, max(asked, 1), "max_tokens"),
        num_logprobs=body.logprobs,
        grammar=grammar,
    )
    job = service.new_job("cmpl", prompts, params, arrived)
    request.state.job, request.state.user = job, body.user
    writer = CompletionWriter(service, job, body, is_echo_alone=asked == 0)
    return await service.respond(request, job, writer, streams=bool(body.stream))


def token_ids_of(service: Service, body: CompletionBody) -> list[list[int]]:
    """Token ids of each prompt of a body."""
    prompt = body.prompt
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    return [service.encode(each, body.add_special_tokens) if isinstance(each, str) else list(each) for each in several]


class CompletionWriter(Writer):
    """Writes what a job brings as text completions; with `is_echo_alone`, the prompt and nothing else.

    One token is made even then, because that is how prompts are run. It is left out, and so is what ended it.
    """

    WHOLE = CHUNK = "text_completion"

    def __init__(self, service: Service, job: Job, body: CompletionBody, *, is_echo_alone: bool = False) -> None:
        super().__init__(service, job, body)
        self._body, self._is_echo_alone = body, is_echo_alone
        self._num_shown = [0] * len(job.choices)
        """characters of each choice so far, the echoed prompt's included: where the next token's offset begins"""
        self._is_begun = [False] * len(job.choices)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._is_echo_alone:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self._job.choices[index]
        text, token_ids, rows, finish_reason = choice.text, choice.token_ids, choice.logprobs, choice.finish_reason
        if self._is_echo_alone:
            text, token_ids, rows, finish_reason = "", [], [], "length"
        entry = self._entry(index, text, finish_reason)
        self._complete(index, entry, token_ids, choice.texts[: len(token_ids)], rows, is_echo=bool(self._body.echo))
        if self._body.return_token_ids:
            entry["token_ids"], entry["prompt_token_ids"] = token_ids, self._prompt(index)
        if self._body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = self._prompt_rows(index)
        if self._body.wants_details:
            entry["speculation"] = {"tokens": details(choice)}
        return entry

    def _chunks(self, index: int, update: "Update", is_last: bool) -> list[dict[str, Any]]:
        body, is_first = self._body, not self._is_begun[index]
        self._is_begun[index] = True
        text, token_ids, texts, rows = update.text, update.token_ids, update.texts, update.logprobs or ()
        finish_reason = update.finish_reason
        if self._is_echo_alone:
            text, token_ids, texts, rows, finish_reason = "", (), (), (), "length"
        wants_all = body.logprobs is not None or body.return_token_ids or body.wants_details
        is_echo = bool(body.echo) and is_first
        if not (text or is_echo or finish_reason or (wants_all and token_ids)):
            return []
        entry = self._entry(index, text, finish_reason)
        self._complete(index, entry, token_ids, texts, rows, is_echo=is_echo)
        if body.return_token_ids:
            entry["token_ids"] = token_ids
            if is_first:
                entry["prompt_token_ids"] = self._prompt(index)
        chunk = self._frame(self.CHUNK, [entry])
        if body.wants_details:
            chunk["speculation"] = step_details(update)
            if is_last:
                chunk["metrics"] = self._job.metrics_block()
        self._add_usage(chunk)
        return [chunk]

    def _entry(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _prompt(self, index: int) -> list[int]:
        return self._job.prompts[index // self._job.params.n]

    # Log-probabilities ------------------------------------------------------------------------------------------------

    def _complete(
        self,
        index: int,
        entry: dict[str, Any],
        token_ids: Sequence[int],
        texts: Sequence[str],
        rows: "Sequence[TokenLogprobs]",
        *,
        is_echo: bool,
    ) -> None:
        """Put the echoed prompt before an entry's text, and add the log-probabilities that are asked for."""
        ids: list[int] = list(token_ids)
        pieces: list[str] = list(texts)
        found: list[TokenLogprobs | None] = list(rows)
        if is_echo:
            prompt = self._prompt(index)
            shown = self._prompt_text(index)
            entry["text"] = shown + entry["text"]
            known = self._job.prompt_logprobs[index // self._job.params.n]
            ids = prompt + ids
            texts_of, special_ids = self._service.token_texts, self._service.token_texts.special_ids
            special = {place for place, token_id in enumerate(prompt) if token_id in special_ids}
            pieces = _split(shown, [texts_of[token_id].text for token_id in prompt], special) + pieces
            found = list(known or [None] * len(prompt)) + found
        offsets = []
        for piece in pieces:
            offsets.append(self._num_shown[index])
            self._num_shown[index] += len(piece)
        if self._body.logprobs is not None:
            entry["logprobs"] = {
                "tokens": [self._service.token_texts[token_id].text for token_id in ids],
                "token_logprobs": [None if row is None else finite(row.logprob) for row in found],
                "top_logprobs": [self._top(row) for row in found],
                "text_offset": offsets,
            }

    def _top(self, row: "TokenLogprobs | None") -> dict[str, float] | None:
        if row is None:
            return None
        return {self._service.token_texts[token_id].text: finite(logprob) for token_id, logprob in row.top.items()}

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], str):
            return str(prompt[index // self._job.params.n])
        return str(self._service.tokenizer.decode(self._prompt(index), clean_up_tokenization_spaces=False))

    def _prompt_rows(self, index: int) -> list[dict[str, Any] | None]:
        """vLLM's form: for each prompt token after the first, the log-probabilities by token id."""
        found = self._job.prompt_logprobs[index // self._job.params.n] or []
        rows: list[dict[str, Any] | None] = []
        for token_id, row in zip(self._prompt(index), found, strict=False):
            if row is None:
                rows.append(None)
                continue
            every = {token_id: row.logprob, **row.top}
            rows.append(
                {
                    str(each): {"logprob": finite(value), "decoded_token": self._service.token_texts[each].text}
                    for each, value in every.items()
                }
            )
        return rows


def _split(text: str, pieces: list[str], special: Collection[int] = ()) -> list[str]:
    """A text in as many parts as there are pieces, each as long as its piece as far as the text goes.

    Pieces at the places `special` may have been added to the text's own: they have a part only where it spells them.

    >>> _split("abc", ["<start>", "a", "bc", "<end>"], special={0, 3})
    ['', 'a', 'bc', '']
    """
    parts, at = [], 0
    for place, piece in enumerate(pieces):
        is_added = place in special and not text.startswith(piece, at)
        parts.append("" if is_added else text[at : at + len(piece)])
        at += len(parts[-1])
    return parts
