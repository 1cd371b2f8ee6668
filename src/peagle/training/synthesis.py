"""Training text written by the target itself: it invents the questions, then answers them.

Started right after the header of a user turn, an instruction-tuned model writes what a user would (Magpie). Each
question is then put through the chat template like any other and answered at a mix of temperatures. Rows are kept as
token ids, exactly as they were generated.
"""

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from peagle.errors import ConfigError, DataError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.tokenizer import encode_all
from peagle.training.generation import (
    Answer,
    Dialog,
    Generator,
    Job,
    SynthesisConfig,
    Until,
    check_max_length,
    drawn_number,
)
from peagle.training.shard_writer import ShardWriter
from peagle.training.shards import Drop, Row, TokenIds, total
from peagle.training.turns import answer_end, opening_text, question_opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

SHORTEST_QUESTION = 8  # characters of a question, and room left for one in tokens
LOOP_TOKENS = 32
FIRST_ANSWERS = 64  # after which a look is taken at what becomes of them
FRUITLESS_QUESTIONS = 512  # after which a target that gets nothing to answer is given up
GPU_RATE, CPU_RATE = 500_000, 10_000  # tokens a second that no machine we know of exceeds
ROW_TOKENS = 2  # tokens of a row to each answer token; more only where the prompt is longer than its answer

OnProgress = Callable[[dict[str, Any]], None]


class _Asked(NamedTuple):
    """The tag of a job that answers a question."""

    key: int
    temperature: float
    is_held_out: bool


def synthesize(
    generator: Generator,
    writer: ShardWriter,
    held_out: ShardWriter | None,
    config: SynthesisConfig,
    until: Until,
    given: Sequence[Dialog] = (),
    on_progress: OnProgress = lambda counts: None,
) -> dict[str, Any]:
    """Write rows until `until` says so, and return the counts over both writers and all runs.

    `held_out` takes the first `config.num_held_out` greedy answers. Of `given` prompts the first turn is answered.
    Dropped and counted by reason: questions that are cut, short, loop or were asked before, prompts that were given
    before or fill more than half a row, and answers that are cut, short or loop. `on_progress` gets the counts whenever
    they change.
    """
    work = _Synthesis(generator, writer, held_out, config, until, given)
    for answers in generator.run(work.next_jobs):
        work.take(answers)
        on_progress(work.counts())
    return work.counts()


def counts_of(writer: ShardWriter, held_out: ShardWriter | None) -> dict[str, Any]:
    return total([writer.counts, *([held_out.counts] if held_out else [])])


def check(target: "HFTarget", config: SynthesisConfig) -> None:
    """Refuse what cannot work, before an engine is started: texts too long, a template without turn boundaries."""
    check_max_length(config.max_length, target)
    answer_end(target.tokenizer)
    _openings(target.tokenizer, config)


def estimated_tokens(target: "HFTarget", config: SynthesisConfig, until: Until, written: dict[str, Any]) -> int:
    """A generous estimate of the tokens still to be written, prompts included, where `written` counts what there is.

    A number of answers makes it a bound. Otherwise prompts of half a row with short answers may exceed it: a bound that
    allows for them is many times the usual, and would refuse disks that have room.
    """
    estimates = []
    if until.num_answers is not None:
        estimates.append((until.num_answers - written["num_rows"]) * config.max_length)
    if until.num_tokens is not None:
        estimates.append((until.num_tokens - written["num_answer_tokens"]) * ROW_TOKENS)
    if until.seconds is not None:
        estimates.append(int(until.seconds * (GPU_RATE if target.device.type == "cuda" else CPU_RATE)))
    return max(min(estimates), 0) + config.max_length


class _Synthesis:
    """What is asked for, being written and done, between the generator and the shards."""

    def __init__(
        self,
        generator: Generator,
        writer: ShardWriter,
        held_out: ShardWriter | None,
        config: SynthesisConfig,
        until: Until,
        given: Sequence[Dialog],
    ) -> None:
        target = generator.target
        self._tokenizer, self._config, self._until = target.tokenizer, config, until
        self._max_length = config.max_length
        self._writer, self._held_out = writer, held_out
        self._answer_end = answer_end(self._tokenizer)
        self._openings = _openings(self._tokenizer, config, says_so=True)
        # A new run draws other numbers, else it would write the questions of the first one once more.
        self._chance = random.Random(f"{config.seed}/{writer.num_runs}")
        self._seen = writer.keys | (held_out.keys if held_out else set())
        unanswered, repeated = _unanswered(given, self._seen)
        self._given = deque(unanswered)
        writer.append((), repeated)
        self._ready: deque[tuple[int, Dialog]] = deque()
        self._num_begun = self._num_given = 0
        self._outcomes: Counter[str] = Counter()
        self._is_watched = False
        self._fruitless: Counter[str] = Counter()
        """questions dropped since an answer was last begun, by reason"""
        self._num_asking = 0
        self._num_answering = 0
        self._num_held_out = held_out.counts["num_rows"] if held_out else 0
        self._deadline = time.monotonic() + (until.seconds or float("inf"))

    def counts(self) -> dict[str, Any]:
        return counts_of(self._writer, self._held_out)

    def next_jobs(self, room: int) -> list[Job]:
        num_wanted = self._num_wanted()
        chosen: list[tuple[int, Dialog]] = []
        while len(chosen) < min(room, num_wanted) and (question := self._next_question()) is not None:
            chosen.append(question)
        jobs = self._answer_jobs(chosen)
        num_missing = num_wanted - len(jobs) - len(self._ready) - self._num_asking
        return jobs + [self._question_job() for _ in range(min(num_missing, room - len(jobs)))]

    def take(self, answers: Sequence[Answer]) -> None:
        questions = [answer for answer in answers if not isinstance(answer.job.tag, _Asked)]
        if questions:
            self._take_questions(questions)
        kept: dict[bool, list[Row]] = {False: [], True: []}
        drops: list[Drop] = []
        for answer in answers:
            asked = answer.job.tag
            if not isinstance(asked, _Asked):
                continue
            self._num_answering -= 1
            token_ids = np.array(answer.token_ids, dtype=np.int32)
            reason = self._fault(token_ids, answer.is_ended)
            if reason is not None:
                self._num_held_out -= asked.is_held_out
                drops.append(Drop(reason, asked.key))
                continue
            start = len(answer.job.prompt_ids)
            row = np.concatenate((np.array(answer.job.prompt_ids, dtype=np.int32), token_ids))
            kept[asked.is_held_out].append(Row(asked.key, row, ((start, len(row)),), asked.temperature))
        if self._held_out is not None:
            self._held_out.append(kept[True])
        self._writer.append(kept[False], drops)
        self._watch(sum(map(len, kept.values())), drops)

    def _drop_questions(self, drops: Sequence[Drop]) -> None:
        """Count questions that will not be answered, and give up where there are no others: it would go on for ever."""
        self._writer.append((), drops)
        self._fruitless.update(drop.reason for drop in drops)
        number = self._fruitless.total()
        # Of those asked at the same time the faulty ones may be the first to end, so wait for several times as many.
        if self._num_answering or self._ready or number < max(FRUITLESS_QUESTIONS, 8 * self._num_asking):
            return
        raise DataError(
            f"none of the last {number} questions can be used: {_by_reason(self._fruitless)}",
            hint="raise max_question_tokens, question_temperature or max_length, or use an instruction-tuned target",
        )

    def _watch(self, num_kept: int, drops: Sequence[Drop]) -> None:
        """Say when most answers are cut off, and give up where none is of use: it would go on for ever."""
        self._outcomes.update(drop.reason for drop in drops)
        self._outcomes["kept"] += num_kept
        num_answers = sum(self._outcomes.values())
        if num_answers < FIRST_ANSWERS or self._is_watched:
            return
        self._is_watched = True
        if not self._outcomes["kept"]:
            raise DataError(
                f"none of the first {num_answers} answers can be used: {_by_reason(self._outcomes)}",
                hint="raise max_length, keep cut answers (--keep-cut), or use an instruction-tuned target",
            )
        if self._outcomes["answer: cut"] > num_answers / 2:
            log.warning(
                "%d of the first %d answers were dropped because they reach max_length %d; raise it, or keep them "
                "with --keep-cut",
                self._outcomes["answer: cut"],
                num_answers,
                self._max_length,
            )

    def _num_wanted(self) -> int:
        """How many more answers may be begun, those whose question is not written yet included."""
        if time.monotonic() > self._deadline:
            return 0
        counts, most = self.counts(), 2**31
        if self._until.num_answers is not None:
            most = self._until.num_answers - counts["num_rows"] - self._num_answering
        if self._until.num_tokens is not None:
            mean = counts["num_answer_tokens"] / counts["num_rows"] if counts["num_rows"] else self._max_length / 2
            missing = self._until.num_tokens - counts["num_answer_tokens"]
            begun = self._num_answering * mean
            # At least one, so that an estimate that is too high does not end the run.
            most = min(most, max(int((missing - begun) / mean), int(missing > 0 and not self._num_answering)))
        return max(most, 0)

    def _next_question(self) -> tuple[int, Dialog] | None:
        is_given = bool(self._given) and self._num_given < self._config.given_share * (self._num_begun + 1)
        source = self._given if is_given else self._ready
        if not source:
            return None
        self._num_given += is_given
        self._num_begun += 1
        return source.popleft()

    def _answer_jobs(self, chosen: Sequence[tuple[int, Dialog]]) -> list[Job]:
        texts = [opening_text(self._tokenizer, dialog) for _, dialog in chosen]
        jobs, drops = [], []
        for (key, _), prompt_ids in zip(chosen, encode_all(self._tokenizer, texts), strict=True):
            if len(prompt_ids) > self._max_length // 2:
                drops.append(Drop("prompt: too long", key))
                continue
            temperature = self._chance.choice(self._config.temperatures)
            is_held_out = temperature == 0 and self._num_held_out < self._config.num_held_out
            self._num_held_out += is_held_out
            params = SamplingParams(
                self._max_length - len(prompt_ids),
                temperature,
                top_p=self._config.top_p,
                top_k=self._config.top_k,
                seed=self._chance.getrandbits(62),
                stop_token_ids=(self._answer_end,),
            )
            jobs.append(Job(_Asked(key, temperature, is_held_out), prompt_ids, params))
        self._num_answering += len(jobs)
        if jobs:
            self._fruitless.clear()
        self._drop_questions(drops)
        return jobs

    def _question_job(self) -> Job:
        prompt_ids, end = self._chance.choice(self._openings)
        self._num_asking += 1
        params = SamplingParams(
            self._config.max_question_tokens,
            self._config.question_temperature,
            seed=self._chance.getrandbits(62),
            stop_token_ids=(end,),
        )
        return Job(None, prompt_ids, params)

    def _take_questions(self, questions: Sequence[Answer]) -> None:
        self._num_asking -= len(questions)
        drops = []
        spoken = [list(answer.token_ids[: len(answer.token_ids) - answer.is_ended]) for answer in questions]
        texts = self._tokenizer.batch_decode(spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for answer, words, text in zip(questions, spoken, map(str.strip, texts), strict=True):
            question = Dialog("a question", ({"role": "user", "content": text},))
            key = question.key()
            if not answer.is_ended:
                drops.append(Drop("question: cut"))
            elif len(text) < SHORTEST_QUESTION:
                drops.append(Drop("question: short"))
            elif loops(np.array(words, dtype=np.int32)):
                drops.append(Drop("question: loops"))
            elif key in self._seen:
                drops.append(Drop("question: asked before"))
            else:
                self._seen.add(key)
                self._ready.append((key, question))
        self._drop_questions(drops)

    def _fault(self, token_ids: TokenIds, is_ended: bool) -> str | None:
        if len(token_ids) < self._config.min_answer_tokens:
            return "answer: short"
        if not self._config.keep_loops and loops(token_ids[: len(token_ids) - is_ended]):
            return "answer: loops"
        return None if is_ended or self._config.keep_cut else "answer: cut"


def _by_reason(outcomes: Counter[str]) -> str:
    return ", ".join(f"{reason} ({number})" for reason, number in outcomes.most_common() if number)


def loops(token_ids: TokenIds) -> bool:
    """Whether a text ends in a passage said three times or more, in the same tokens, over 32 tokens or more.

    >>> loops(np.arange(100, dtype=np.int32)), loops(np.arange(100, dtype=np.int32) % 20)
    (False, True)
    """
    content, size = token_ids.tobytes(), token_ids.itemsize
    tail = content[-8 * size :]
    earlier = content.rfind(tail, 0, len(content) - size)
    if earlier < 0 or earlier % size:
        return False
    period = len(content) - len(tail) - earlier
    compared = max(2 * period, LOOP_TOKENS * size)
    return content[-compared:] == content[-compared - period : -period] and compared + period <= len(content)


def _openings(
    tokenizer: "PreTrainedTokenizerBase", config: SynthesisConfig, *, says_so: bool = False
) -> list[tuple[list[int], int]]:
    """Beginnings of a user turn, one for each system prompt that the template takes; those it refuses are logged."""
    openings, refusal = [], None
    for system_prompt in config.system_prompts:
        try:
            openings.append(question_opening(tokenizer, system_prompt))
        except RequestError as error:
            refusal = error
    if refusal is not None:
        if not openings:
            raise refusal
        if says_so:
            log.info(
                "questions are asked under %d of the %d system prompts: %s",
                len(openings),
                len(config.system_prompts),
                refusal.message,
            )
    longest = max(len(token_ids) for token_ids, _ in openings)
    if longest + SHORTEST_QUESTION > config.max_length:
        raise ConfigError(
            f"max_length {config.max_length} leaves no room for a question: the longest system prompt takes {longest} "
            "tokens with the chat template",
            hint="raise max_length, or shorten the system prompts",
        )
    return openings


def _unanswered(given: Sequence[Dialog], seen: set[int]) -> tuple[list[tuple[int, Dialog]], list[Drop]]:
    """The first turn of each given prompt that no earlier run is done with, and repetitions that none has counted.

    Every repetition has a key of its own: with the prompt's, a later run would take the prompt itself for done.
    """
    prompts: dict[int, Dialog] = {}
    repeated: list[Drop] = []
    times: Counter[int] = Counter()
    for dialog in map(Dialog.first_turn, given):
        key = dialog.key()
        times[key] += 1
        repetition = drawn_number("given before", key, times[key])
        if times[key] > 1 and repetition not in seen:
            repeated.append(Drop("prompt: given before", repetition))
        elif times[key] == 1 and key not in seen:
            prompts[key] = dialog
    seen.update(prompts)
    return list(prompts.items()), repeated
