"""The target answers prompt files turn by turn; each turn follows the target's own answer to the previous one.

Assistant turns of the file are replaced. Those before the first user turn are dropped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peagle.data.config import RegenerationConfig
from peagle.data.generation import Answer, Generator, Job, check_max_length
from peagle.data.progress import RunProgress
from peagle.data.prompts import Dialog
from peagle.data.shard_writer import ShardWriter, open_writer
from peagle.data.shards import Drop, Row, check_disk, written_counts
from peagle.data.turns import answer_end, following_turn, opening_text
from peagle.drafter.model import Drafter
from peagle.errors import DataError
from peagle.targets.hf import HFTarget
from peagle.tokenizer import encode_all

TEMPLATE_TOKENS = 64  # generous estimate of what a chat template adds per turn


@dataclass
class _Growing:
    """A conversation in progress."""

    key: int
    turns: deque[list[dict[str, Any]]]
    """the messages before each remaining answer"""
    history: list[dict[str, Any]]
    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)


def answer_dialogs(
    target: HFTarget,
    dialogs: Sequence[Dialog],
    output: Path,
    config: RegenerationConfig,
    settings: dict[str, Any],
    *,
    drafter: Drafter | None = None,
    max_batch: int | None = None,
    progress: RunProgress | None = None,
) -> dict[str, Any]:
    """Answer dialogs into a shard directory, or resume it. `settings` identify the run in the manifest."""
    progress = progress or RunProgress()
    check(target, dialogs, config)
    check_disk(output, max(estimated_tokens(dialogs, config) - written_counts(output)["num_tokens"], 0))
    with open_writer(target, output, "regenerate", settings) as writer:
        if len(writer.keys) < len(dialogs):
            sizes: dict[str, Any] = {"max_length": config.max_length, "max_batch": max_batch}
            with Generator(target, drafter, **sizes, progress=progress) as generator:
                progress.begin(writer.counts["num_answer_tokens"])
                # A dropped prompt is done as well.
                Regeneration(generator, writer, dialogs, config).run(
                    lambda counts: progress.update(generator.engine, counts, len(writer.keys), len(dialogs))
                )
        writer.finish()
        return writer.counts


def split_turns(dialog: Dialog, max_turns: int | None = None) -> deque[list[dict[str, Any]]]:
    """The messages before each answer: all but the assistant's, up to and including a user message."""
    turns: list[list[dict[str, Any]]] = []
    said: list[dict[str, Any]] = []
    for message in dialog.messages:
        if message["role"] != "assistant":
            said.append(message)
        if message["role"] == "user":
            turns.append(said)
            said = []
    return deque(turns[:max_turns])


def check(target: HFTarget, dialogs: Sequence[Dialog], config: RegenerationConfig) -> None:
    """Reject a max_length or chat template that cannot work, before the engine starts."""
    check_max_length(config.max_length, target)
    answer_end(target.tokenizer)
    if any(len(split_turns(dialog, config.max_turns)) > 1 for dialog in dialogs):
        try:
            answer_end(target.tokenizer, num_turns=2)
        except DataError as error:
            raise DataError(error.message, hint="pass --max-turns 1 to answer only first turns") from error


def estimated_tokens(dialogs: Sequence[Dialog], config: RegenerationConfig) -> int:
    """A generous estimate of the tokens in the output, counting one token per UTF-8 byte.

    Not a bound: a template may add more than `TEMPLATE_TOKENS`.
    """
    sizes = []
    for dialog in dialogs:
        turns = split_turns(dialog, config.max_turns)
        num_bytes = sum(len(message["content"].encode()) for said in turns for message in said)
        sizes.append(num_bytes + len(turns) * (config.max_answer_tokens + TEMPLATE_TOKENS))
    return sum(min(size, config.max_length) for size in sizes)


class Regeneration:
    """Answers every dialog that `writer` has no row for. The row key is the dialog's number.

    Drops prompts that leave no room for an answer and conversations without any answer, counted by reason. A row ends
    before a turn that cannot follow (no room, a truncated answer, a template that rewrites it). Answers depend only
    on the dialog's number, its text and the settings.
    """

    def __init__(
        self, generator: Generator, writer: ShardWriter, dialogs: Sequence[Dialog], config: RegenerationConfig
    ) -> None:
        self._generator = generator
        self._tokenizer, self._config, self._writer, self._dialogs = generator.target.tokenizer, config, writer, dialogs
        self._max_length = config.max_length
        self._numbers = deque(number for number in range(len(dialogs)) if number not in writer.keys)
        self._later: deque[Job] = deque()
        self._answer_end = answer_end(self._tokenizer)

    def run(self, on_progress: Callable[[dict[str, Any]], None] = lambda counts: None) -> dict[str, Any]:
        """Calls `on_progress` with the counts after each step. Returns the counts."""
        for answers in self._generator.run(self.next_jobs):
            self.take(answers)
            on_progress(self._writer.counts)
        return self._writer.counts

    def next_jobs(self, room: int) -> list[Job]:
        jobs = [self._later.popleft() for _ in range(min(room, len(self._later)))]
        drops: list[Drop] = []
        while self._numbers and len(jobs) < room:
            numbers = [self._numbers.popleft() for _ in range(min(room - len(jobs), len(self._numbers)))]
            begun = [self._begin(number) for number in numbers if not self._uses_tools(number)]
            drops += [Drop("prompt: uses tools", number) for number in numbers if self._uses_tools(number)]
            texts = [
                opening_text(self._tokenizer, Dialog(self._dialogs[growing.key].where, growing.history))
                for growing in begun
            ]
            for growing, prompt_ids in zip(begun, encode_all(self._tokenizer, texts), strict=True):
                if self._has_room(len(prompt_ids)):
                    growing.token_ids = prompt_ids
                    jobs.append(self._job(growing))
                else:
                    drops.append(Drop("prompt: too long", growing.key))
        self._writer.append((), drops)
        return jobs

    def take(self, answers: Sequence[Answer]) -> None:
        rows: list[Row] = []
        drops: list[Drop] = []
        for answer in answers:
            growing: _Growing = answer.job.tag
            start = len(growing.token_ids)
            growing.token_ids = [*growing.token_ids, *answer.token_ids]
            if len(answer.token_ids) > answer.is_ended:
                growing.spans.append((start, len(growing.token_ids)))
                if answer.is_ended and growing.turns and self._continue(growing, answer):
                    continue
            else:
                del growing.token_ids[start:]
            if growing.spans:
                # Nothing is trained after the last answer.
                token_ids = np.array(growing.token_ids[: growing.spans[-1][1]], dtype=np.int32)
                kind, temperature = self._dialogs[growing.key].kind, answer.job.params.temperature
                rows.append(Row(growing.key, token_ids, tuple(growing.spans), temperature, kind))
            else:
                drops.append(Drop("answer: empty", growing.key))
        self._writer.append(rows, drops)

    def _uses_tools(self, number: int) -> bool:
        """Tool results answer calls that the target may not make."""
        return any(message["role"] in ("tool", "function") for message in self._dialogs[number].messages)

    def _begin(self, number: int) -> _Growing:
        turns = split_turns(self._dialogs[number], self._config.max_turns)
        return _Growing(number, turns, history=turns.popleft())

    def _continue(self, growing: _Growing, answer: Answer) -> bool:
        """Add the next turn and queue its answer. Returns False if it cannot follow."""
        messages = growing.turns.popleft()
        following = following_turn(self._tokenizer, growing.history, answer.token_ids, messages)
        if following is None or not self._has_room(len(growing.token_ids) + len(following[1])):
            return False
        spoken, token_ids = following
        growing.history = [*growing.history, spoken, *messages]
        growing.token_ids += token_ids
        self._later.append(self._job(growing))
        return True

    def _has_room(self, num_tokens: int) -> bool:
        return num_tokens + 2 <= self._max_length

    def _job(self, growing: _Growing) -> Job:
        room = self._max_length - len(growing.token_ids)
        params = self._config.answer_params(growing.key, len(growing.spans), room, self._answer_end)
        return Job(growing, growing.token_ids, params)
