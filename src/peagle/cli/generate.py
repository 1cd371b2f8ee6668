"""Answer one prompt with the target, drafting with P-EAGLE.

The answer streams to stdout. On a terminal, tokens the drafter guessed right are told apart by color from those the
target had to supply itself.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle.cli.arguments import ModelArguments, Models, parse
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.decoding.reference import Step
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

STYLES = {"accepted": "green", "bonus": "cyan", "recovered": "yellow"}


@dataclass(frozen=True)
class Arguments:
    prompt: tyro.conf.Positional[str]
    """what to ask"""
    num_draft_tokens: int = 7
    """draft tokens a step; 0 decodes without a drafter"""
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
    sampling: Annotated[SamplingParams, tyro.conf.OmitArgPrefixes] = SamplingParams()
    models: Models = field(default_factory=ModelArguments)


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
    if arguments.num_draft_tokens < 0 or (arguments.compare and arguments.num_draft_tokens == 0):
        raise RequestError(f"num_draft_tokens must be at least 1 to draft, got {arguments.num_draft_tokens}")
    talk = Console(stderr=True)
    with talk.status("loading the target and its drafter (the first time also converts the target)"):
        target = arguments.models.load_target()
        drafter = arguments.models.load_drafter(target) if arguments.num_draft_tokens else None
    prompt_ids = render(target, arguments)
    answers = []
    if arguments.compare or drafter is None:
        answers.append(answer(target, prompt_ids, arguments, None))
    if drafter is not None:
        answers.append(answer(target, prompt_ids, arguments, drafter))
    if arguments.json:
        print(json.dumps(report(answers)))
    elif arguments.compare:
        Console().print(comparison(answers))
    return 0


def render(target: "HFTarget", arguments: Arguments) -> list[int]:
    from peagle.tokenizer import render_chat

    if not arguments.prompt.strip():
        raise RequestError("the prompt is empty", hint="give the text to answer as the first argument")
    if arguments.raw:
        return list(target.tokenizer(arguments.prompt)["input_ids"])
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return render_chat(target.tokenizer, [*messages, {"role": "user", "content": arguments.prompt}])


def answer(target: "HFTarget", prompt_ids: list[int], arguments: Arguments, drafter: "Drafter | None") -> Answer:
    """Decode once, streaming unless JSON was asked for."""
    from peagle.decoding.acceptance import Acceptance
    from peagle.decoding.reference import decode

    num_draft_tokens = arguments.num_draft_tokens if drafter is not None else 0
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
    """Print each step's text as it comes, each token in the color of its kind."""
    for step in steps:
        for text, kind in zip(step.texts, step.kinds, strict=True):
            console.print(Text(text, style=STYLES.get(kind, "")), end="")
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


def report(answers: list[Answer]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "answers": [vars(each) | {"tokens_per_second": round(each.tokens_per_second, 2)} for each in answers]
    }
    if len(answers) == 2:
        document["identical"] = answers[0].token_ids == answers[1].token_ids
    return document
