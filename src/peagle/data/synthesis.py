"""The target writes its own training data: questions first, then answers (Magpie).

Prompted with the header of a user turn, an instruction-tuned model writes a question. The question goes through the
chat template and is answered at a mix of temperatures. Rows keep the generated token ids.
"""

import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from peagle.data.config import SynthesisConfig, Until, drawn_number
from peagle.data.generation import Answer, Generator, Job, check_max_length
from peagle.data.progress import RunProgress
from peagle.data.prompts import Dialog
from peagle.data.shard_writer import ShardWriter, open_writer
from peagle.data.shards import HELD_OUT_NAME, Drop, Row, TokenIds, check_disk, total, written_counts
from peagle.data.turns import answer_end, opening_text, question_opening
from peagle.errors import ConfigError, DataError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.tokenizer import encode_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SHORTEST_QUESTION = 8  # characters of a question, and tokens of room for one
LOOP_TOKENS = 32
FIRST_ANSWERS = 64  # answers after which the drop rate is checked
FRUITLESS_QUESTIONS = 512  # dropped questions in a row after which the run fails
GPU_RATE, CPU_RATE = 500_000, 10_000  # upper bounds in tokens per second
ROW_TOKENS = 2  # tokens of a row per answer token, unless the prompt is longer than its answer


class _Asked(NamedTuple):
    """The tag of a job that answers a question."""

    key: int
    temperature: float
    is_held_out: bool


def write_synthesis(
    target: HFTarget,
    output: Path,
    config: SynthesisConfig,
    until: Until,
    given: Sequence[Dialog],
    settings: dict[str, Any],
    *,
    max_batch: int | None = None,
    progress: RunProgress | None = None,
) -> dict[str, Any]:
    """Synthesize into a shard directory, or resume it. `settings` identify the run in the manifest."""
    progress = progress or RunProgress()
    check(target, config)
    check_disk(output, estimated_tokens(target, config, until, written_counts(output)))
    directories = [output, output / HELD_OUT_NAME] if config.num_held_out else [output]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(open_writer(target, each, "synthesize", settings)) for each in directories]
        counts = total(writer.counts for writer in writers)
        if not until.is_reached(counts):
            engine = Generator(target, max_length=config.max_length, max_batch=max_batch, progress=progress)
            generator = stack.enter_context(engine)
            progress.begin(counts["num_answer_tokens"])

            def update(counts: dict[str, Any]) -> None:
                progress.update(generator.engine, counts, *until.progress(counts, progress.seconds))

            counts = Synthesis(generator, writers, config, until, given).run(update)
        for writer in writers:
            writer.finish()
    return counts


def check(target: HFTarget, config: SynthesisConfig) -> None:
    """Reject a max_length or chat template that cannot work, before the engine starts."""
    check_max_length(config.max_length, target)
    answer_end(target.tokenizer)
    _openings(target.tokenizer, config)


def estimated_tokens(target: HFTarget, config: SynthesisConfig, until: Until, written: dict[str, Any]) -> int:
    """A generous estimate of the tokens still to write, prompts included; `written` counts the output so far.

    A bound only with --num-answers: otherwise long prompts with short answers may exceed it.
    """
    estimates = []
    if until.num_answers is not None:
        estimates.append((until.num_answers - written["num_rows"]) * config.max_length)
    if until.num_tokens is not None:
        estimates.append((until.num_tokens - written["num_answer_tokens"]) * ROW_TOKENS)
    if until.seconds is not None:
        estimates.append(int(until.seconds * (GPU_RATE if target.device.type == "cuda" else CPU_RATE)))
    return max(min(estimates), 0) + config.max_length


class Synthesis:
    """Writes rows until `until` is reached. Schedules questions and answers between the generator and the shards.

    A second writer takes the first `config.num_held_out` greedy answers. Of `given` prompts the first turn is answered.
    Drops truncated, short, looping or repeated questions, repeated prompts or ones longer than half a row, and
    truncated, short or looping answers, counted by reason.
    """

    def __init__(
        self,
        generator: Generator,
        writers: Sequence[ShardWriter],
        config: SynthesisConfig,
        until: Until,
        given: Sequence[Dialog] = (),
    ) -> None:
        self._generator, self._tokenizer = generator, generator.target.tokenizer
        self._config, self._until, self._max_length = config, until, config.max_length
        self._writers, self._writer = writers, writers[0]
        self._answer_end = answer_end(self._tokenizer)
        self._openings = _openings(self._tokenizer, config, logs=True)
        # Each run has its own seed; otherwise it would repeat the questions of the first.
        self._chance = random.Random(f"{config.seed}/{self._writer.num_runs}")
        self._seen = set[int]().union(*(writer.keys for writer in writers))
        unanswered, repeated = _unanswered(given, self._seen)
        self._given = deque(unanswered)
        self._writer.append((), repeated)
        self._ready: deque[tuple[int, Dialog]] = deque()
        self._num_begun = self._num_given = 0
        self._outcomes: Counter[str] = Counter()
        self._is_watched = False
        self._fruitless: Counter[str] = Counter()
        """questions dropped since the last answer began, by reason"""
        self._num_asking = 0
        self._num_answering = 0
        self._num_held_out = sum(writer.counts["num_rows"] for writer in writers[1:])
        self._deadline = time.monotonic() + (until.seconds or float("inf"))

    def run(self, on_progress: Callable[[dict[str, Any]], None] = lambda counts: None) -> dict[str, Any]:
        """Calls `on_progress` with the counts after each step. Returns the counts over all writers and runs."""
        for answers in self._generator.run(self.next_jobs):
            self.take(answers)
            on_progress(self.counts())
        return self.counts()

    def counts(self) -> dict[str, Any]:
        return total(writer.counts for writer in self._writers)

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
        for writer in self._writers[1:]:
            writer.append(kept[True])
        self._writer.append(kept[False], drops)
        self._watch(sum(map(len, kept.values())), drops)

    def _drop_questions(self, drops: Sequence[Drop]) -> None:
        """Count dropped questions, and fail if nothing else comes: the run would never end."""
        self._writer.append((), drops)
        self._fruitless.update(drop.reason for drop in drops)
        number = self._fruitless.total()
        # Of concurrent questions the bad ones may finish first, so wait for several times as many.
        if self._num_answering or self._ready or number < max(FRUITLESS_QUESTIONS, 8 * self._num_asking):
            return
        raise DataError(
            f"none of the last {number} questions is usable: {_by_reason(self._fruitless)}",
            hint="use an instruction-tuned target, raise --max-length, or set max_question_tokens in a recipe",
        )

    def _watch(self, num_kept: int, drops: Sequence[Drop]) -> None:
        """Warn if most answers are truncated, and fail if none is usable: the run would never end."""
        self._outcomes.update(drop.reason for drop in drops)
        self._outcomes["kept"] += num_kept
        num_answers = sum(self._outcomes.values())
        if num_answers < FIRST_ANSWERS or self._is_watched:
            return
        self._is_watched = True
        if not self._outcomes["kept"]:
            raise DataError(
                f"none of the first {num_answers} answers is usable: {_by_reason(self._outcomes)}",
                hint="raise --max-length, keep truncated answers (--keep-cut), or use an instruction-tuned target",
            )
        if self._outcomes["answer: cut"] > num_answers / 2:
            counts = (self._outcomes["answer: cut"], num_answers, self._max_length)
            message = "%d of the first %d answers were dropped because they reach max_length %d"
            log.warning(f"{message}; raise --max-length, or pass --keep-cut", *counts)

    def _num_wanted(self) -> int:
        """How many more answers to begin, including those whose question is not written yet."""
        if time.monotonic() > self._deadline:
            return 0
        counts, most = self.counts(), 2**31
        if self._until.num_answers is not None:
            most = self._until.num_answers - counts["num_rows"] - self._num_answering
        if self._until.num_tokens is not None:
            mean = counts["num_answer_tokens"] / counts["num_rows"] if counts["num_rows"] else self._max_length / 2
            missing = self._until.num_tokens - counts["num_answer_tokens"]
            begun = self._num_answering * mean
            # At least one, so that a high estimate does not end the run.
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
            min(self._config.max_question_tokens, self._max_length // 2),  # a longer one fills more than half a row
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
    """Whether the tokens end in a passage repeated three or more times over at least 32 tokens.

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
    tokenizer: "PreTrainedTokenizerBase", config: SynthesisConfig, *, logs: bool = False
) -> list[tuple[list[int], int]]:
    """The start of a user turn for each system prompt that the chat template accepts."""
    openings, refusal = [], None
    for system_prompt in config.system_prompts:
        try:
            openings.append(question_opening(tokenizer, system_prompt))
        except RequestError as error:
            refusal = error
    if refusal is not None:
        if not openings:
            raise refusal
        if logs:
            number = len(config.system_prompts)
            log.info("using %d of the %d system prompts: %s", len(openings), number, refusal.message)
    longest = max(len(token_ids) for token_ids, _ in openings)
    if longest + SHORTEST_QUESTION > config.max_length:
        raise ConfigError(
            f"max_length {config.max_length} leaves no room for a question: the longest system prompt takes {longest} "
            "tokens with the chat template",
            hint="raise --max-length, or shorten system_prompts",
        )
    return openings


def _unanswered(given: Sequence[Dialog], seen: set[int]) -> tuple[list[tuple[int, Dialog]], list[Drop]]:
    """The first turn of each unanswered prompt, and repeated prompts that are not counted yet.

    A repetition has its own key; with the prompt's key, a later run would take the prompt for done.
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
