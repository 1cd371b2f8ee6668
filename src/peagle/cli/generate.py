"""Answer one prompt with the target, drafting with P-EAGLE.

The answer streams to stdout. On a terminal, tokens the drafter guessed right are told apart by color from those the
target had to supply itself.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle.bench.acceptance import Divergence, first_divergence
from peagle.cli.arguments import (
    DrafterArguments,
    DrafterOptions,
    TargetArguments,
    TargetOptions,
    choose_num_draft_tokens,
    parse,
)
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.decoding.reference import Step
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

STYLES = {"accepted": "green", "bonus": "cyan", "recovered": "magenta"}


@dataclass(frozen=True)
class Arguments:
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """what to ask"""
    num_draft_tokens: int | None = None
    """draft tokens a step; by default 7, or fewer where the drafter was trained for fewer; 0: no drafter"""
    compare: bool = False
    """answer twice, plainly and with drafts, and compare speed and text"""
    sample_drafts: bool = False
    """with a temperature: draw the drafts instead of taking the likeliest; the answer's distribution is the same"""
    raw: bool = False
    """continue the prompt as it is, without the chat template"""
    system: str | None = None
    """system message before the prompt"""
    json: bool = False
    """print one JSON document instead of text and table"""
    sampling: Annotated[SamplingParams, tyro.conf.OmitArgPrefixes] = field(default_factory=SamplingParams)
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)


@dataclass
class Answer:
    """One decoding of the prompt, timed."""

    method: str
    token_ids: list[int]
    text: str
    seconds: float
    acceptance_length: float
    finish_reason: str | None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "generate", argv)
    check(arguments)
    with Console(stderr=True).status("loading the target and its drafter (the first time also converts the target)"):
        target = arguments.target.load()
        drafter = arguments.drafter.load(target) if arguments.num_draft_tokens != 0 else None
    prompt_ids = render(target, arguments)
    num_draft_tokens = 0
    if drafter is not None:
        num_draft_tokens = choose_num_draft_tokens(arguments.num_draft_tokens, drafter)
        drafter.check_num_draft_tokens(num_draft_tokens)
    answers = []
    if arguments.compare or drafter is None:
        answers.append(answer(target, prompt_ids, arguments, None, 0))
    if drafter is not None:
        answers.append(answer(target, prompt_ids, arguments, drafter, num_draft_tokens))
    divergence = None
    if arguments.compare:
        plain, drafted = (each.token_ids for each in answers)
        divergence = first_divergence(target, prompt_ids, plain, drafted, arguments.sampling)
    if arguments.json:
        print(json.dumps(report(answers, divergence)))
    elif arguments.compare:
        Console().print(comparison(answers))
        if divergence is not None:
            Console().print(explanation(divergence, str(target.dtype).removeprefix("torch.")), soft_wrap=True)
    return 0


def check(arguments: Arguments) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    if not arguments.prompt.strip():
        raise RequestError("the prompt is empty", hint="give the text to answer as the first argument")
    if arguments.num_draft_tokens is not None and arguments.num_draft_tokens < 0:
        raise ConfigError(
            f"num_draft_tokens must be at least 0, got {arguments.num_draft_tokens}",
            hint="0 decodes without a drafter; leave it out for the usual number",
        )
    if arguments.num_draft_tokens == 0 and (arguments.compare or arguments.sample_drafts):
        flag = "--compare" if arguments.compare else "--sample-drafts"
        raise ConfigError(f"{flag} needs drafts, but num_draft_tokens is 0", hint="use at least 1, or leave it out")
    if arguments.sample_drafts and arguments.sampling.is_greedy:
        raise ConfigError("--sample-drafts needs a temperature above 0, got 0", hint="add --temperature 1")
    if arguments.raw and arguments.system is not None:
        raise ConfigError(
            f"--raw uses no chat template, so the system message {arguments.system!r} has no place",
            hint="leave out --system, or put its text into the prompt",
        )


def render(target: "HFTarget", arguments: Arguments) -> list[int]:
    from peagle.decoding.reference import check_prompt
    from peagle.tokenizer import render_chat

    if arguments.raw:
        prompt_ids = list(target.tokenizer(arguments.prompt, verbose=False)["input_ids"])
    else:
        messages = [{"role": "system", "content": arguments.system}] if arguments.system is not None else []
        prompt_ids = render_chat(target.tokenizer, [*messages, {"role": "user", "content": arguments.prompt}])
    check_prompt(target, prompt_ids)
    return prompt_ids


def answer(
    target: "HFTarget",
    prompt_ids: list[int],
    arguments: Arguments,
    drafter: "Drafter | None",
    num_draft_tokens: int,
) -> Answer:
    """Decode once, streaming unless JSON was asked for."""
    from peagle.decoding.acceptance import Acceptance
    from peagle.decoding.reference import decode

    method = f"{drafter.config.method}, K = {num_draft_tokens}" if drafter is not None else "plain"
    console = Console(quiet=arguments.json, highlight=False, soft_wrap=True)
    if arguments.compare:
        console.print(Text(f"--- {method}", style="bold"))
    steps = decode(
        target,
        prompt_ids,
        arguments.sampling,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        sample_drafts=arguments.sample_drafts,
    )
    started = time.perf_counter()
    done = list(stream(steps, console))
    seconds = time.perf_counter() - started
    drafted = [step.num_accepted_emitted for step in done if step.draft_token_ids]
    return Answer(
        method=method,
        token_ids=[token for step in done for token in step.token_ids],
        text="".join(step.text for step in done),
        seconds=seconds,
        acceptance_length=Acceptance.of(drafted, num_draft_tokens).acceptance_length,
        finish_reason=done[-1].finish_reason,
    )


def stream(steps: "Iterator[Step]", console: Console) -> "Iterator[Step]":
    """Print each step's text as it comes: on a terminal each token in the color of its kind, else the bare text."""
    for step in steps:
        if console.is_terminal:
            for text, kind in zip(step.texts, step.kinds, strict=True):
                console.print(Text(text, style=STYLES.get(kind, "")), end="")
        elif not console.quiet:  # rich would turn tabs into spaces and drop control characters
            sys.stdout.write(step.text)
            sys.stdout.flush()
        yield step
    console.print()


def comparison(answers: list[Answer]) -> Table:
    plain, drafted = answers
    is_same = plain.token_ids == drafted.token_ids
    table = Table(
        title="the two answers are identical" if is_same else "the two answers DIFFER",
        caption="colors: "
        + ", ".join(f"[{style}]{kind}[/]" for kind, style in STYLES.items())
        + f" | speed-up {drafted.tokens_per_second / plain.tokens_per_second:.2f}x",
    )
    for heading in ("decoding", "tokens", "tokens/s", "acceptance length"):
        table.add_column(heading, justify="left" if heading == "decoding" else "right")
    for each in answers:
        table.add_row(
            each.method, str(len(each.token_ids)), f"{each.tokens_per_second:.1f}", f"{each.acceptance_length:.2f}"
        )
    return table


def explanation(divergence: Divergence, dtype: str) -> str:
    """Where two answers part, and for greedy ones how close a call it was for the target itself."""
    where = f"They part at token {divergence.token}"
    if divergence.target_gap is None:
        return f"{where}. Sampled answers part where the drafts are sampled too, or where rounding moves a draw."
    apart = f"{where}, where the logits of the target's own two best tokens are {divergence.target_gap:.4f} apart"
    if not divergence.is_near_tie:
        return f"{apart}, too far for rounding in {dtype} to explain it. Please report this."
    advice = "" if dtype == "float32" else " With --dtype float32 the answers are identical."
    return f"{apart}: in {dtype} the order of summation decides such a near tie.{advice}"


def report(answers: list[Answer], divergence: Divergence | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "answers": [vars(each) | {"tokens_per_second": round(each.tokens_per_second, 2)} for each in answers]
    }
    if len(answers) == 2:
        document["identical_to_plain"] = divergence is None
        document["divergence"] = None if divergence is None else vars(divergence)
    return document
