"""The target writes its own training data: what users ask for (`asking.py`), then answers.

Answers use a mix of temperatures, and rows keep the generated token ids. The share of each kind of text is a setting.
"""

import contextlib
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from peagle.data.asking import (
    SHORTEST_QUESTION,
    Prompt,
    Users,
    Written,
    loops,
    num_repeated,
    question_openings,
    unanswered_prompts,
)
from peagle.data.config import SynthesisConfig, Until
from peagle.data.generation import Answer, Generator, Job, check_max_length
from peagle.data.kinds import GIVEN, LONG, KindMix
from peagle.data.progress import RunProgress
from peagle.data.prompts import Dialog
from peagle.data.shard_writer import ShardWriter, open_writer
from peagle.data.shards import HELD_OUT_NAME, Drop, Row, check_disk, total, written_counts
from peagle.data.turns import answer_end, following_question, following_turn, opening_text
from peagle.errors import DataError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.tokenizer import detokenize, encode_all

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter

log = logging.getLogger(__name__)

FIRST_ANSWERS = 64  # answers after which the drop rate is checked
FRUITLESS_QUESTIONS = 512  # dropped questions in a row after which the run fails
GPU_RATE, CPU_RATE = 500_000, 10_000  # upper bounds in tokens per second
ROW_TOKENS = 2  # tokens of a row per answer token, unless the prompt is longer than its answer


@dataclass(eq=False)
class _Growing:
    """A conversation in progress: the tag of the jobs that answer its turns, or write the user's next one."""

    key: int
    kind: str
    history: list[dict[str, Any]]
    token_ids: list[int]
    temperature: float
    is_held_out: bool
    num_turns: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    answer_ids: Sequence[int] = ()
    """the last answer"""
    is_asking: bool = False
    """whether the running job writes the user's next turn"""

    @property
    def start(self) -> int:
        """Where the newest answer begins."""
        return self.spans[-1][0] if self.spans and self.spans[-1][1] == len(self.token_ids) else len(self.token_ids)


def write_synthesis(
    target: HFTarget,
    output: Path,
    config: SynthesisConfig,
    until: Until,
    given: Sequence[Dialog],
    settings: dict[str, Any],
    *,
    drafter: "Drafter | None" = None,
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
            sizes: dict[str, Any] = {"max_length": config.max_length, "max_batch": max_batch}
            generator = stack.enter_context(Generator(target, drafter, **sizes, progress=progress))
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
    question_openings(target.tokenizer, config)


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
    """Writes rows until `until` is reached. Schedules prompts and answers between the generator and the shards.

    A second writer takes the first `config.num_held_out` greedy answers. Of `given` prompts the first turn is answered.
    Drops repeated prompts or ones that leave no room for an answer, and truncated, short or looping answers, counted by
    reason. A conversation of several turns ends before such an answer; a long answer before it begins to loop.
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
        # Each run has its own seed; otherwise it would repeat the questions of the first.
        self._chance = random.Random(f"{config.seed}/{self._writer.num_runs}")
        self._seen = set[int]().union(*(writer.keys for writer in writers))
        unanswered, repeated = unanswered_prompts(given, self._seen)
        self._given = deque(unanswered)
        self._writer.append((), repeated)
        self._users = Users(self._tokenizer, config, self._chance, self._seen)
        self._kinds = KindMix(config.shares, self.counts()["kinds"])
        self._later: deque[Job] = deque()
        self._num_begun = self._num_given = 0
        self._outcomes: Counter[str] = Counter()
        self._is_watched = False
        self._fruitless: Counter[str] = Counter()
        """prompts dropped since the last answer began, by reason"""
        self._num_answering = 0
        self._held_out = Counter[str]()
        """held-out conversations of each kind, finished or begun"""
        for writer in writers[1:]:
            self._held_out.update(writer.counts["kinds"])
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
        jobs = [self._later.popleft() for _ in range(min(room, len(self._later)))]
        while True:
            num_wanted, chosen = self._num_wanted(), list[Prompt]()
            while len(chosen) < min(room - len(jobs), num_wanted) and (prompt := self._next_prompt()) is not None:
                chosen.append(prompt)
            begun = self._answer_jobs(chosen)
            jobs += begun
            num_missing = num_wanted - len(begun) - len(self._users.ready) - self._users.num_asking
            for _ in range(min(num_missing, room - len(jobs) - self._users.num_waiting)):
                self._users.begin(self._kinds.next())
            # A prompt about documents that are there is ready at once.
            if not (self._users.ready and num_wanted > len(begun) and len(jobs) < room):
                return jobs + (self._users.jobs(room - len(jobs)) if num_wanted else [])

    def take(self, answers: Sequence[Answer]) -> None:
        written = [answer for answer in answers if isinstance(answer.job.tag, Written)]
        if written:
            self._drop_prompts(self._users.take(written))
        kept, drops = {False: list[Row](), True: list[Row]()}, list[Drop]()
        for answer in answers:
            growing = answer.job.tag
            if not isinstance(growing, _Growing):
                continue
            reason = None
            if growing.is_asking:
                goes_on = self._follow(growing, answer)
            else:
                goes_on, reason = self._add_answer(growing, answer)
            if goes_on:
                continue
            self._num_answering -= 1
            if growing.spans:
                # Nothing is trained after the last answer.
                row = np.array(growing.token_ids[: growing.spans[-1][1]], dtype=np.int32)
                kept[growing.is_held_out].append(
                    Row(growing.key, row, tuple(growing.spans), growing.temperature, growing.kind)
                )
                self._kinds.keep(growing.kind)
            else:
                assert reason is not None, "without an answer there is a reason"
                self._held_out[growing.kind] -= growing.is_held_out
                drops.append(Drop(reason, growing.key))
                self._kinds.drop(growing.kind)
        for writer in self._writers[1:]:
            writer.append(kept[True])
        self._writer.append(kept[False], drops)
        self._watch(sum(map(len, kept.values())), drops)

    def _add_answer(self, growing: _Growing, answer: Answer) -> tuple[bool, str | None]:
        """Add an answer, or the next piece of a long one. Returns whether the conversation continues, and what is
        wrong.

        A faulty answer is not added.
        """
        start, num_before = growing.start, len(growing.token_ids)
        token_ids = [*growing.token_ids[start:], *answer.token_ids]
        body = np.array(token_ids[: len(token_ids) - answer.is_ended], dtype=np.int32)
        is_piece = growing.kind == LONG and not answer.is_ended and not loops(body)
        reason = None if is_piece else self._fault(token_ids, answer.is_ended)
        if reason is not None:
            return False, reason
        # A loop is trivial to draft and would fill the row.
        num_dropped = num_repeated(body)
        is_ended = answer.is_ended and not num_dropped
        token_ids = token_ids[: len(token_ids) - num_dropped - (answer.is_ended and not is_ended)]
        growing.token_ids = [*growing.token_ids[:start], *token_ids]
        growing.spans = [span for span in growing.spans if span[0] != start] + [(start, len(growing.token_ids))]
        growing.answer_ids = token_ids
        if is_piece and self._has_room(growing) and len(growing.token_ids) > num_before:
            self._later.append(self._answer_job(growing))
            return True, None
        return is_ended and len(growing.spans) < growing.num_turns and self._ask(growing), None

    def _ask(self, growing: _Growing) -> bool:
        """Let the target write the user's next turn. Returns False if none can follow."""
        opening = following_question(self._tokenizer, growing.history, growing.answer_ids)
        if opening is None or not self._has_room(growing, len(opening) + SHORTEST_QUESTION):
            return False
        growing.is_asking = True
        params = SamplingParams(
            min(self._config.max_question_tokens, self._max_length - len(growing.token_ids) - len(opening)),
            self._config.question_temperature,
            seed=self._chance.getrandbits(62),
            stop_token_ids=(self._users.question_end,),
        )
        self._later.append(Job(growing, [*growing.token_ids, *opening], params))
        return True

    def _follow(self, growing: _Growing, answer: Answer) -> bool:
        """Add the user's next turn and have it answered. Returns False if it is unusable."""
        growing.is_asking = False
        words = list(answer.token_ids[: len(answer.token_ids) - answer.is_ended])
        text = detokenize(self._tokenizer, words).strip()
        if not answer.is_ended or len(text) < SHORTEST_QUESTION or loops(np.array(words, dtype=np.int32)):
            return False
        message = {"role": "user", "content": text}
        if message in growing.history:
            return False
        following = following_turn(self._tokenizer, growing.history, growing.answer_ids, [message])
        if following is None or not self._has_room(growing, len(following[1])):
            return False
        growing.history = [*growing.history, following[0], message]
        growing.token_ids = [*growing.token_ids, *following[1]]
        self._later.append(self._answer_job(growing))
        return True

    def _has_room(self, growing: _Growing, num_tokens: int = 0) -> bool:
        return len(growing.token_ids) + num_tokens + self._config.min_answer_tokens <= self._max_length

    def _drop_prompts(self, dropped: Sequence[tuple[str, Drop]]) -> None:
        """Count dropped prompts, and fail if nothing else comes: the run would never end."""
        self._writer.append((), [drop for _, drop in dropped])
        for kind, drop in dropped:
            self._fruitless[drop.reason] += 1
            self._kinds.drop(kind)
        number = self._fruitless.total()
        # Of concurrent questions the bad ones may finish first, so wait for several times as many.
        if self._num_answering or self._users.ready or number < max(FRUITLESS_QUESTIONS, 8 * self._users.num_asking):
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

    def _next_prompt(self) -> Prompt | None:
        is_given = bool(self._given) and self._num_given < self._config.given_share * (self._num_begun + 1)
        source = self._given if is_given else self._users.ready
        if not source:
            return None
        self._num_given += is_given
        self._num_begun += 1
        return source.popleft()

    def _answer_jobs(self, chosen: Sequence[Prompt]) -> list[Job]:
        texts = [opening_text(self._tokenizer, prompt.dialog) for prompt in chosen]
        jobs: list[Job] = []
        dropped: list[tuple[str, Drop]] = []
        for prompt, prompt_ids in zip(chosen, encode_all(self._tokenizer, texts), strict=True):
            if len(prompt_ids) > self._config.max_prompt_tokens:
                dropped.append((prompt.kind, Drop("prompt: too long", prompt.key)))
                continue
            temperature = self._chance.choice(self._config.temperatures)
            is_held_out = temperature == 0 and self._lacks_held_out(prompt.kind)
            self._held_out[prompt.kind] += is_held_out
            num_turns = self._chance.randint(2, self._config.max_turns) if prompt.kind == "turns" else 1
            history = list(prompt.dialog.messages)
            growing = _Growing(prompt.key, prompt.kind, history, prompt_ids, temperature, is_held_out, num_turns)
            jobs.append(self._answer_job(growing))
        self._num_answering += len(jobs)
        if jobs:
            self._fruitless.clear()
        self._drop_prompts(dropped)
        return jobs

    def _lacks_held_out(self, kind: str) -> bool:
        """Whether a conversation of this kind should be held out: each kind has its share of the held-out ones."""
        config, num_held_out = self._config, self._held_out.total()
        share = config.given_share if kind == GIVEN else config.shares[kind]
        return num_held_out < config.num_held_out and self._held_out[kind] < math.ceil(share * config.num_held_out)

    def _answer_job(self, growing: _Growing) -> Job:
        params = SamplingParams(
            min(self._config.max_answer_tokens, self._max_length - len(growing.token_ids)),
            growing.temperature,
            top_p=self._config.top_p,
            top_k=self._config.top_k,
            seed=self._chance.getrandbits(62),
            stop_token_ids=(self._answer_end,),
        )
        return Job(growing, growing.token_ids, params)

    def _fault(self, answer_ids: Sequence[int], is_ended: bool) -> str | None:
        token_ids = np.array(answer_ids, dtype=np.int32)
        if len(token_ids) < self._config.min_answer_tokens:
            return "answer: short"
        if not self._config.keep_loops and loops(token_ids[: len(token_ids) - is_ended]):
            return "answer: loops"
        return None if is_ended or self._config.keep_cut else "answer: cut"


def _by_reason(outcomes: Counter[str]) -> str:
    return ", ".join(f"{reason} ({number})" for reason, number in outcomes.most_common() if number)
