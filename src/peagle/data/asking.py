"""What users say, written by the target: questions, the documents they are about, and requests of every kind.

Prompted with the header of a user turn, an instruction-tuned model writes a question (Magpie). The answer to a request
for a text on such a topic is a document. Prompted with a user turn that begins with documents, it writes a question
about them.
"""

import logging
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from peagle.data.config import SynthesisConfig, drawn_number
from peagle.data.documents import Shelf, code_of, joined, read_documents
from peagle.data.generation import Answer, Job
from peagle.data.kinds import CODE, DOCUMENTS, GIVEN, KINDS, LONG, TOPICS
from peagle.data.prompts import Dialog
from peagle.data.shards import Drop, TokenIds
from peagle.data.turns import answer_end, question_opening
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.tokenizer import encode, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SHORTEST_QUESTION = 8  # characters of a question, and tokens of room for one
SHORTEST_PROMPT = 128  # tokens of the documents of a prompt
TEMPLATE_TOKENS = 96  # what a chat template and an instruction may add to documents
MAX_DOCUMENT_TOKENS, DOCUMENT_TEMPERATURE = 1024, 0.7
DOCUMENT_USES = 3  # prompts that each document leads
LOOP_TOKENS = 32
LONG_REQUEST = "Write a long and detailed answer with many sections."
QUESTION = "Question:"

Opening = tuple[list[int], int]
"""Token ids up to the start of a user's message, and the token that ends it."""


class Written(NamedTuple):
    """The tag of a job that writes what a user says."""

    stage: str
    """question, document or about (a question about `context`)"""
    kind: str
    context: str = ""


class Prompt(NamedTuple):
    """The first turn of a conversation, to be answered."""

    key: int
    kind: str
    dialog: Dialog


class Users:
    """Writes prompts of every kind, in one or more jobs each. `ready` holds the finished ones.

    Drops truncated, short, looping or repeated questions, and short or looping documents.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", config: SynthesisConfig, chance: random.Random, seen: set[int]
    ) -> None:
        self._tokenizer, self._config, self._chance, self._seen = tokenizer, config, chance, seen
        self._openings = question_openings(tokenizer, config, logs=True)
        self._answer_end = answer_end(tokenizer)
        self._plain_opening, self.question_end = question_opening(tokenizer, "")
        given = read_documents(config.documents)
        self._shelves = {source: Shelf(tokenizer, chance, texts, DOCUMENT_USES) for source, texts in given.items()}
        self.ready: deque[Prompt] = deque()
        self._later: deque[Job] = deque()
        self.num_asking = 0
        """prompts begun and not ready"""

    def begin(self, kind: str) -> None:
        """Begin a prompt, which then takes `jobs` until it is ready."""
        self.num_asking += 1
        source = KINDS[kind].source
        if source is not None and self._shelves[source].has_next:
            self._compose(kind, source)
        else:
            self._later.append(self._question_job(kind))

    def jobs(self, room: int) -> list[Job]:
        return [self._later.popleft() for _ in range(min(room, len(self._later)))]

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for room."""
        return len(self._later)

    def take(self, answers: Sequence[Answer]) -> list[tuple[str, Drop]]:
        """Go on with finished jobs. Returns what is dropped, by kind."""
        dropped: list[tuple[str, Drop]] = []
        spoken = [list(answer.token_ids[: len(answer.token_ids) - answer.is_ended]) for answer in answers]
        texts = self._tokenizer.batch_decode(spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for answer, words, text in zip(answers, spoken, map(str.strip, texts), strict=True):
            written: Written = answer.job.tag
            ids = np.array(words, dtype=np.int32)
            if written.stage == "document":
                reason = self._take_document(written.kind, ids, text)
            else:
                reason = self._take_question(written, ids, text, answer.is_ended)
            if reason is not None:
                self.num_asking -= 1
                dropped.append((written.kind, Drop(reason)))
        return dropped

    def _take_document(self, kind: str, ids: TokenIds, text: str) -> str | None:
        source = KINDS[kind].source
        assert source is not None, "only kinds about documents have them written"
        text = code_of(text) if source == CODE else text
        if source == CODE and not text:
            return "document: no code"
        if len(text) < SHORTEST_PROMPT:
            return "document: short"
        if loops(ids):
            return "document: loops"
        self._shelves[source].add(text)
        self._compose(kind, source)
        return None

    def _take_question(self, written: Written, ids: TokenIds, text: str, is_ended: bool) -> str | None:
        if written.stage == "about" and "\n" in text:
            # A small target continues with an answer of its own.
            text, is_ended, ids = text.split("\n", 1)[0].strip(), True, ids[:0]
        if not is_ended:
            return "question: cut"
        if len(text) < SHORTEST_QUESTION:
            return "question: short"
        if loops(ids):
            return "question: loops"
        kind = written.kind
        if KINDS[kind].source is not None and written.stage == "question":
            self._later.append(self._document_job(kind, text))
            return None
        if written.stage == "about":
            text = f"{written.context}{text}"
        return self._make_ready(kind, f"{text}\n\n{LONG_REQUEST}" if kind == LONG else text)

    def _make_ready(self, kind: str, text: str) -> str | None:
        question = Dialog("a question", ({"role": "user", "content": text},))
        key = question.key()
        if key in self._seen:
            return "question: asked before"
        self._seen.add(key)
        self.ready.append(Prompt(key, kind, question))
        self.num_asking -= 1
        return None

    def _compose(self, kind: str, source: str) -> None:
        """Make a prompt about documents, of a length drawn from few tokens to the most that fit."""
        about = KINDS[kind]
        most = max(self._config.max_prompt_tokens - TEMPLATE_TOKENS, SHORTEST_PROMPT // 2)
        if about.is_short:
            most = max(most // 4, min(most, SHORTEST_PROMPT))
        least = min(SHORTEST_PROMPT, most)
        num_tokens = round(math.exp(self._chance.uniform(math.log(least), math.log(most))))
        if not about.instructions:
            num_tokens = max(num_tokens - self._config.max_question_tokens, least // 2)
        context = joined(self._shelves[source].passages(num_tokens, is_single=about.is_short), source)
        if not about.instructions:
            self._later.append(self._question_about_job(kind, context))
            return
        parts = [self._chance.choice(about.instructions), context]
        if self._chance.random() < 0.5:
            parts.reverse()
        if self._make_ready(kind, "\n\n".join(parts)) is not None:
            self._later.append(self._question_job(kind))  # said before: a new document makes it another one

    def _question_job(self, kind: str) -> Job:
        purpose = KINDS[kind].source or (LONG if kind == LONG else "")
        opening = self._chance.choice(self._openings[purpose])
        # A longer one fills more than half a row.
        return self._job(
            Written("question", kind), opening, min(self._config.max_question_tokens, self._config.max_length // 2)
        )

    def _question_about_job(self, kind: str, context: str) -> Job:
        context = f"{context}\n\n{QUESTION} "
        opening = (self._plain_opening + encode(self._tokenizer, context.rstrip(" ")), self.question_end)
        return self._job(Written("about", kind, context), opening, self._config.max_question_tokens)

    def _document_job(self, kind: str, topic: str) -> Job:
        request = self._chance.choice(DOCUMENTS[KINDS[kind].source or ""])
        prompt_ids = render_chat(self._tokenizer, [{"role": "user", "content": f"{request}\n\n{topic}"}])
        max_tokens = min(MAX_DOCUMENT_TOKENS, self._config.max_length - len(prompt_ids))
        return self._job(Written("document", kind), (prompt_ids, self._answer_end), max_tokens, DOCUMENT_TEMPERATURE)

    def _job(self, tag: Written, opening: Opening, max_tokens: int, temperature: float | None = None) -> Job:
        prompt_ids, end = opening
        params = SamplingParams(
            max_tokens,
            self._config.question_temperature if temperature is None else temperature,
            seed=self._chance.getrandbits(62),
            stop_token_ids=(end,),
        )
        return Job(tag, prompt_ids, params)


def loops(token_ids: TokenIds) -> bool:
    """Whether the tokens end in a passage repeated three or more times over at least 32 tokens.

    >>> loops(np.arange(100, dtype=np.int32)), loops(np.arange(100, dtype=np.int32) % 20)
    (False, True)
    """
    return _period(token_ids) is not None


def num_repeated(token_ids: TokenIds) -> int:
    """Tokens at the end that repeat a passage once more, after it came three times or for 32 tokens.

    >>> num_repeated(np.arange(100, dtype=np.int32)), num_repeated(np.arange(100, dtype=np.int32) % 20)
    (0, 40)
    """
    period = _period(token_ids)
    if period is None:
        return 0
    is_new = token_ids[period:] != token_ids[:-period]
    first = int(is_new.nonzero()[0][-1]) + 1 if is_new.any() else 0
    return max(0, len(token_ids) - first - max(3 * period, LOOP_TOKENS))


def _period(token_ids: TokenIds) -> int | None:
    """The length of the passage that the tokens end in, if they loop."""
    content, size = token_ids.tobytes(), token_ids.itemsize
    tail = content[-8 * size :]
    earlier = content.rfind(tail, 0, len(content) - size)
    if earlier < 0 or earlier % size:
        return None
    period = len(content) - len(tail) - earlier
    compared = max(2 * period, LOOP_TOKENS * size)
    is_loop = content[-compared:] == content[-compared - period : -period] and compared + period <= len(content)
    return period // size if is_loop else None


def question_openings(
    tokenizer: "PreTrainedTokenizerBase", config: SynthesisConfig, *, logs: bool = False
) -> dict[str, list[Opening]]:
    """The start of a user turn for each system prompt that the chat template accepts, by what is asked for.

    Without system messages in the template, the requests for documents are plain questions, too.
    """
    plain, refusal = _accepted(tokenizer, config.system_prompts)
    if refusal is not None:
        if not plain:
            raise refusal
        if logs:
            number = len(config.system_prompts)
            log.info("using %d of the %d system prompts: %s", len(plain), number, refusal.message)
    longest = max(len(token_ids) for token_ids, _ in plain)
    if longest + SHORTEST_QUESTION > config.max_length:
        raise ConfigError(
            f"max_length {config.max_length} leaves no room for a question: the longest system prompt takes {longest} "
            "tokens with the chat template",
            hint="raise --max-length, or shorten system_prompts",
        )
    purposes = {purpose: _accepted(tokenizer, prompts)[0] or plain for purpose, prompts in TOPICS.items()}
    return purposes | {"": plain}


def _accepted(
    tokenizer: "PreTrainedTokenizerBase", system_prompts: Sequence[str]
) -> tuple[list[Opening], RequestError | None]:
    openings, refusal = [], None
    for system_prompt in system_prompts:
        try:
            openings.append(question_opening(tokenizer, system_prompt))
        except RequestError as error:
            refusal = error
    return openings, refusal


def unanswered_prompts(given: Sequence[Dialog], seen: set[int]) -> tuple[list[Prompt], list[Drop]]:
    """The first turn of each unanswered prompt, and repeated prompts that are not counted yet.

    A repetition has its own key; with the prompt's key, a later run would take the prompt for done.
    """
    prompts: dict[int, Dialog] = {}
    repeated: list[Drop] = []
    times = Counter[int]()
    for dialog in map(Dialog.first_turn, given):
        key = dialog.key()
        times[key] += 1
        repetition = drawn_number("given before", key, times[key])
        if times[key] > 1 and repetition not in seen:
            repeated.append(Drop("prompt: given before", repetition))
        elif times[key] == 1 and key not in seen:
            prompts[key] = dialog
    seen.update(prompts)
    return [Prompt(key, GIVEN, dialog) for key, dialog in prompts.items()], repeated
