"""Training text written by the target itself: it invents the questions, then answers them.

Started right after the header of a user turn, an instruction-tuned model writes what a user would (Magpie). Each
question is then put through the chat template like any other and answered at a mix of temperatures. Rows are kept as
token ids, exactly as they were generated.

`SeatedGenerator` is a throughput decoder with fixed seats: every step runs one token of every seat, as one captured
graph on a GPU, and a seat that has finished takes the next job.

Shapes: B seats, H heads, E head width, T tokens a seat can hold.
"""

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from peagle.errors import ConfigError, RequestError, TargetError
from peagle.targets.hf import HFTarget
from peagle.tokenizer import render_chat

STEPS_BETWEEN_LOOKS = 24  # the host looks for finished seats this often; a look costs a synchronisation
SHORTEST_QUESTION = 8  # characters
SHORTEST_ANSWER = 12  # tokens


@dataclass(frozen=True)
class Job:
    """Text to continue until an end token or `max_tokens`. `tag` comes back with the result."""

    prompt_ids: list[int]
    temperature: float
    max_tokens: int
    tag: Any = None


@dataclass(frozen=True)
class SynthesisConfig:
    """How the target's own text is made."""

    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """each answer draws one of these"""
    question_temperature: float = 0.9
    max_question_tokens: int = 160
    given_share: float = 0.15
    """share of answers that go to given prompts, as long as there are any"""
    seed: int = 0
    system_prompts: tuple[str, ...] = (
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        "You are a helpful assistant. The user asks for explanations, summaries, rewriting, brainstorming and essays.",
        "You are a programming assistant. The user asks for Python functions and explanations of code.",
        "You complete code. The user pastes the beginning of a Python function with its docstring.",
        "You are a math tutor. The user asks word problems and wants step by step solutions.",
        "You are an expert in science, history and philosophy. The user asks questions about them.",
        "You play roles and write stories, emails, poems and dialogues for the user.",
    )


@dataclass
class SynthesisCounts:
    questions: int = 0
    answers: int = 0
    answer_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"question": 0, "repeated": 0, "long": 0, "answer": 0})


class SeatedGenerator:
    """Decodes many jobs at once in fixed seats. It switches the target's attention to its own while it is open."""

    def __init__(self, target: HFTarget, num_seats: int, max_length: int) -> None:
        if num_seats < 1 or not 2 <= max_length <= target.max_length:
            raise ConfigError(
                f"num_seats must be at least 1 and max_length between 2 and the target's {target.max_length}, "
                f"got {num_seats} and {max_length}"
            )
        self.target, self.num_seats, self.max_length = target, num_seats, max_length
        device, config = target.device, target.model.config.get_text_config()
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or target.hidden_size // num_heads
        heads = (num_seats, getattr(config, "num_key_value_heads", None) or num_heads, max_length, head_dim)
        self.key_values = [
            (
                torch.zeros(heads, device=device, dtype=target.dtype),
                torch.zeros(heads, device=device, dtype=target.dtype),
            )
            for _ in range(target.num_layers)
        ]
        self.seats_B = torch.arange(num_seats, device=device)
        self.columns_T = torch.arange(max_length, device=device)
        self.token_ids_BT = torch.zeros(num_seats, max_length, dtype=torch.long, device=device)
        self.position_B = torch.zeros(num_seats, dtype=torch.long, device=device)
        self.prompt_length_B = torch.ones(num_seats, dtype=torch.long, device=device)
        self.end_B = torch.zeros(num_seats, dtype=torch.long, device=device)
        self.temperature_B = torch.ones(num_seats, device=device)
        self.is_done_B = torch.ones(num_seats, dtype=torch.bool, device=device)
        self.eos_ids = torch.tensor(sorted(target.eos_token_ids), device=device)
        AttentionInterface.register("peagle_seats", attend_in_seats)
        AttentionMaskInterface.register("peagle_seats", lambda *args, **kwargs: None)
        self._earlier_attention: str = target.model.config._attn_implementation
        target.model.set_attn_implementation("peagle_seats")
        try:
            self._run_step: Callable[[], Any] = self._captured() if device.type == "cuda" else self._step
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the target its own attention back and let go of the seats' memory. The generator is of no use then."""
        self.target.model.set_attn_implementation(self._earlier_attention)
        self.key_values.clear()

    def __enter__(self) -> "SeatedGenerator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _step(self) -> None:
        """One token for every seat: a prompt's next token as it is, else a draw from the target."""
        visible_B11T = (self.columns_T <= self.position_B[:, None])[:, None, None]
        token_B1 = self.token_ids_BT.gather(1, self.position_B[:, None])
        logits_BV = (
            self.target.model(
                input_ids=token_B1,
                position_ids=self.position_B[:, None],
                use_cache=False,
                seats=self,
                visible=visible_B11T,
            )
            .logits[:, -1]
            .float()
        )
        noise_BV = -torch.log(-torch.log(torch.rand_like(logits_BV).clamp(1e-9, 1 - 1e-7)))
        drawn_B = (logits_BV + noise_BV * self.temperature_B[:, None]).argmax(-1)
        next_B = (self.position_B + 1).clamp_max(self.max_length - 1)
        is_prompt_B = next_B < self.prompt_length_B
        kept_B = self.token_ids_BT.gather(1, next_B[:, None])[:, 0]
        chosen_B = torch.where(is_prompt_B | self.is_done_B, kept_B, drawn_B)
        self.token_ids_BT.scatter_(1, next_B[:, None], chosen_B[:, None])
        is_end_B = ~is_prompt_B & ((chosen_B[:, None] == self.eos_ids).any(1) | (next_B + 1 >= self.end_B))
        self.position_B.copy_(torch.where(self.is_done_B, self.position_B, next_B))
        self.is_done_B.logical_or_(is_end_B)

    def _captured(self) -> Callable[[], Any]:
        """The step compiled and captured as one CUDA graph."""
        step = torch.compile(self._step, dynamic=False)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def run(self, next_job: Callable[[], Job | None]) -> Iterator[tuple[Job, list[int]]]:
        """Yield (job, new tokens) as seats finish; ends once `next_job` returns None and every seat is done."""
        seated: list[Job | None] = [None] * self.num_seats
        is_open = True
        while is_open or any(job is not None for job in seated):
            for seat, tokens in self._finished(seated):
                job, seated[seat] = seated[seat], None
                if job is not None:
                    yield job, tokens
            empty = [seat for seat, job in enumerate(seated) if job is None]
            jobs = list(itertools.islice(iter(next_job, None), len(empty))) if is_open else []
            is_open = is_open and len(jobs) == len(empty)
            placed = list(zip(empty, jobs, strict=False))
            self._seat(placed)
            for seat, job in placed:
                seated[seat] = job
            for _ in range(STEPS_BETWEEN_LOOKS if any(job is not None for job in seated) else 0):
                self._run_step()

    def _finished(self, seated: list[Job | None]) -> list[tuple[int, list[int]]]:
        done = [seat for seat in self.is_done_B.nonzero()[:, 0].tolist() if seated[seat] is not None]
        if not done:
            return []
        index = torch.tensor(done, device=self.target.device)
        starts, stops = self.prompt_length_B[index].tolist(), (self.position_B[index] + 1).tolist()
        rows = self.token_ids_BT[index].tolist()
        return [(seat, row[a:b]) for seat, row, a, b in zip(done, rows, starts, stops, strict=True)]

    def _seat(self, placed: list[tuple[int, Job]]) -> None:
        jobs = [job for _, job in placed]
        if not jobs:
            return
        for job in jobs:
            self._check(job)
        device = self.target.device
        index = torch.tensor([seat for seat, _ in placed], device=device)
        rows = torch.zeros(len(jobs), self.max_length, dtype=torch.long)
        for row, job in zip(rows, jobs, strict=True):
            row[: len(job.prompt_ids)] = torch.tensor(job.prompt_ids)
        lengths = torch.tensor([len(job.prompt_ids) for job in jobs])
        limits = (lengths + torch.tensor([job.max_tokens for job in jobs])).clamp_max(self.max_length)
        self.token_ids_BT[index] = rows.to(device)
        self.prompt_length_B[index] = lengths.to(device)
        self.end_B[index] = limits.to(device)
        self.temperature_B[index] = torch.tensor([job.temperature for job in jobs], device=device)
        self.position_B[index] = 0
        self.is_done_B[index] = False

    def _check(self, job: Job) -> None:
        if not 1 <= len(job.prompt_ids) < self.max_length:
            raise RequestError(
                f"a prompt must have between 1 and {self.max_length - 1} tokens, got {len(job.prompt_ids)}",
                hint="leave the prompt out, or make seats of a larger max_length",
            )
        if job.max_tokens < 1 or not 0 <= job.temperature < math.inf:
            raise RequestError(
                "max_tokens must be at least 1 and the temperature at least 0, "
                f"got {job.max_tokens} and {job.temperature}"
            )


def attend_in_seats(
    module: torch.nn.Module,
    query_BH1E: Tensor,
    key_BH1E: Tensor,
    value_BH1E: Tensor,
    attention_mask: Tensor | None,
    *,
    seats: SeatedGenerator,
    visible: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token a seat over the seat's memory, which the new key and value are written to first.

    Plain attention only: what other kinds would need (a window, sinks, capped scores) is refused, not left out.
    """
    window = kwargs.get("sliding_window")
    if (window is not None and window < seats.max_length) or any(
        kwargs.get(k) is not None for k in ("softcap", "s_aux")
    ):
        raise TargetError(
            f"{type(seats.target.model).__name__} attends with a sliding window, sinks or capped scores, "
            "which text generation in seats does not do",
            hint="write the training text with another engine and give it as a file of conversations",
        )
    keys, values = seats.key_values[cast(int, module.layer_idx)]
    keys[seats.seats_B, :, seats.position_B] = key_BH1E[:, :, 0]
    values[seats.seats_B, :, seats.position_B] = value_BH1E[:, :, 0]
    num_seats, num_heads, _, head_dim = query_BH1E.shape
    grouped = query_BH1E.reshape(num_seats, keys.shape[1], -1, head_dim)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scaling)
    return attended.reshape(num_seats, 1, num_heads, head_dim), None


def synthesize(
    generator: SeatedGenerator,
    config: SynthesisConfig,
    given_prompts: list[str],
    seconds: float,
    counts: SynthesisCounts,
) -> Iterator[dict[str, Any]]:
    """Yield rows {prompt_ids, answer_ids, temperature} for about `seconds`; `counts` is kept up to date.

    Dropped and counted: questions that are short, cut or repeated, prompts that fill more than half a seat, and answers
    of a few tokens. The deadline is for starting: what sits in a seat by then is finished.
    """
    chance = random.Random(config.seed)
    target, tokenizer = generator.target, generator.target.tokenizer
    openings = [_user_turn_opening(tokenizer, prompt) for prompt in config.system_prompts]
    questions: deque[str] = deque()
    given = deque(chance.sample(given_prompts, len(given_prompts)))
    seen: set[str] = set()
    deadline = time.monotonic() + seconds

    def next_job() -> Job | None:
        while time.monotonic() <= deadline:
            question = given.popleft() if given and chance.random() < config.given_share else None
            if question is None and not questions:
                opening = chance.choice(openings)
                return Job(opening, config.question_temperature, config.max_question_tokens, tag="question")
            message = {"role": "user", "content": questions.popleft() if question is None else question}
            prompt_ids = render_chat(tokenizer, [message])
            if len(prompt_ids) <= generator.max_length // 2:
                return Job(prompt_ids, chance.choice(config.answer_temperatures), generator.max_length, tag="answer")
            counts.dropped["long"] += 1
        return None

    for job, tokens in generator.run(next_job):
        is_ended = tokens[-1] in target.eos_token_ids
        if job.tag == "question":
            text = str(tokenizer.decode(tokens[:-1], skip_special_tokens=True)).strip()
            if not is_ended or len(text) < SHORTEST_QUESTION:
                counts.dropped["question"] += 1
            elif text in seen:
                counts.dropped["repeated"] += 1
            else:
                seen.add(text)
                questions.append(text)
                counts.questions += 1
        elif len(tokens) < SHORTEST_ANSWER:
            counts.dropped["answer"] += 1
        else:
            counts.answers += 1
            counts.answer_tokens += len(tokens)
            yield {"prompt_ids": job.prompt_ids, "answer_ids": tokens, "temperature": job.temperature}


def answer_greedily(generator: SeatedGenerator, prompts: list[list[int]], max_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield rows of the target's greedy answers to rendered prompts, as replay wants them, in no fixed order."""
    jobs = iter([Job(prompt_ids, 0.0, max_tokens) for prompt_ids in prompts])
    for job, tokens in generator.run(lambda: next(jobs, None)):
        yield {"prompt_ids": job.prompt_ids, "answer_ids": tokens, "temperature": 0.0}


def _user_turn_opening(tokenizer: Any, system_prompt: str) -> list[int]:
    """The chat template's text up to where the user's words would begin."""
    mark = "PLACE-OF-THE-QUESTION"
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": mark}]
    render_chat(tokenizer, messages, add_generation_prompt=False)  # refuses what the template cannot do, in words
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return list(tokenizer(text[: text.index(mark)], add_special_tokens=False)["input_ids"])
