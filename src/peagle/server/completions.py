"""POST /v1/completions."""

import time
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from peagle.server.errors import HttpError, invalid
from peagle.server.jobs import Choice, Job
from peagle.server.protocol import CompletionBody
from peagle.server.sampling import grammar_of, sampling_params
from peagle.server.service import Service
from peagle.server.writer import Writer, finite

if TYPE_CHECKING:
    from peagle.engine.outputs import Update
    from peagle.scheduling.request import TokenLogprobs

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


async def answer_completion(service: Service, body: CompletionBody, request: Request) -> Response:
    arrived = time.perf_counter()
    service.check_model(body.model)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "cannot be streamed; use 'echo' with 'logprobs', or do not stream")
    given = body.prompt
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given

    def encode() -> list[list[int]]:
        special = body.add_special_tokens
        return [service.encode(each, special) if isinstance(each, str) else list(each) for each in several]

    prompts = await service.in_thread(request, encode)
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if body.stream and (body.n or 1) > 1:
            message = "'echo' with 'logprobs' streams one answer per prompt; omit 'n', or do not stream"
            raise HttpError(400, message, param="n")
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if asked == 0 and not body.echo:
        raise invalid("max_tokens", "must be at least 1, got 0; 0 requires 'echo'")
    if body.max_tokens is None:
        asked = min(asked, service.room(prompts, None, "max_tokens"))
    params = sampling_params(
        body.model_copy(update={"prompt_logprobs": num_prompt_logprobs}),
        max_tokens=service.room(prompts, max(asked, 1), "max_tokens"),
        num_logprobs=body.logprobs,
        grammar=grammar_of(body),
    )
    job = service.new_job("cmpl", prompts, params, arrived)
    return await service.respond(request, body, CompletionWriter(service, job, body, is_echo_alone=asked == 0))


class CompletionWriter(Writer):
    """Formats a job as text completions; with `is_echo_alone`, only the prompt.

    The engine generates one token even then, because a prompt runs only with an answer. It is dropped.
    """

    WHOLE = CHUNK = "text_completion"

    _body: CompletionBody

    def __init__(self, service: Service, job: Job, body: CompletionBody, *, is_echo_alone: bool) -> None:
        super().__init__(service, job, body)
        self._is_echo_alone = is_echo_alone
        self._num_shown = [0] * len(job.choices)
        """characters of each choice so far, with the echoed prompt: the offset of the next token"""
        self._begun: set[int] = set()

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._is_echo_alone:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self.job.choices[index]
        entry = self._entry(index, choice, is_first=True)
        if self._body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = self._prompt_rows(index)
        return entry | self._details(choice)

    def _chunks(self, index: int, update: "Update", is_last: bool) -> list[dict[str, Any]]:
        is_first = index not in self._begun
        self._begun.add(index)
        entry = self._entry(index, update, is_first=is_first)
        is_needed = entry["text"] or entry["finish_reason"] or (self._body.echo and is_first)
        if not is_needed and not (self._wants_all and update.token_ids):
            return []
        return [self._chunk(entry, update, is_last)]

    def _prompt(self, index: int) -> list[int]:
        return self.job.prompts[index // self.job.params.n]

    def _entry(self, index: int, source: "Choice | Update", *, is_first: bool) -> dict[str, Any]:
        """A choice with the requested log-probabilities and token ids, the echoed prompt first."""
        token_texts, prompt = self._service.token_texts, self._prompt(index)
        if self._is_echo_alone:
            source = Choice(finish_reason="length")
        text, texts, token_ids = source.text, list(source.texts), list(source.token_ids)
        rows: list[TokenLogprobs | None] = list(source.logprobs or ())
        if self._body.echo and is_first:
            shown = self._prompt_text(index)
            special = {place for place, token_id in enumerate(prompt) if token_id in token_texts.special_ids}
            text, token_ids = shown + text, prompt + token_ids
            texts = _split(shown, [token_texts[token_id].text for token_id in prompt], special) + texts
            rows = [*(self._prompt_logprobs(index) or [None] * len(prompt)), *rows]
        offsets = list(accumulate(map(len, texts), initial=self._num_shown[index]))
        self._num_shown[index] = offsets.pop()
        entry = {"index": index, "text": text, "logprobs": None, "finish_reason": source.finish_reason}
        if self._body.logprobs is not None:
            entry["logprobs"] = {
                "tokens": [token_texts[token_id].text for token_id in token_ids],
                "token_logprobs": [row and finite(row.logprob) for row in rows],
                "top_logprobs": [
                    row and {token_texts[each].text: finite(value) for each, value in row.top.items()} for row in rows
                ],
                "text_offset": offsets,
            }
        if self._body.return_token_ids:
            entry |= {"token_ids": source.token_ids} | ({"prompt_token_ids": prompt} if is_first else {})
        return entry

    def _prompt_logprobs(self, index: int) -> "Sequence[TokenLogprobs | None]":
        return self.job.prompt_logprobs[index // self.job.params.n] or []

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], str):
            return str(prompt[index // self.job.params.n])
        return str(self._service.tokenizer.decode(self._prompt(index), clean_up_tokenization_spaces=False))

    def _prompt_rows(self, index: int) -> list[dict[str, Any] | None]:
        """vLLM's format: for each prompt token after the first, the log-probabilities by token id."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            return {"logprob": finite(logprob), "decoded_token": self._service.token_texts[token_id].text}

        pairs = zip(self._prompt(index), self._prompt_logprobs(index), strict=False)
        return [
            row and {str(each): entry(each, value) for each, value in ({token_id: row.logprob} | row.top).items()}
            for token_id, row in pairs
        ]


def _split(text: str, pieces: list[str], special: Collection[int] = ()) -> list[str]:
    """Split a text into one part per token, each as long as the token's own text.

    Tokens at the positions `special` may have been added by the tokenizer: they get a part only if the text has them.

    >>> _split("abc", ["<start>", "a", "bc", "<end>"], special={0, 3})
    ['', 'a', 'bc', '']
    """
    parts, at = [], 0
    for place, piece in enumerate(pieces):
        is_added = place in special and not text.startswith(piece, at)
        parts.append("" if is_added else text[at : at + len(piece)])
        at += len(parts[-1])
    return parts
