"""Answer one prompt, streaming to stdout. On a terminal, colors show accepted, bonus and recovered tokens.

With --compare it answers twice, plainly and with drafts, and shows both side by side. To measure acceptance over many
prompts use `peagle eval`; to prove that answers do not change, `peagle lossless`.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from peagle.compare.divergence import first_divergence
from peagle.console.arguments import ServedModelArguments, parse
from peagle.console.comparison import Run, comparison, not_lossless, report
from peagle.console.display import Display
from peagle.console.progress import working
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.engine.engine import Engine
    from peagle.engine.llm import LLM
    from peagle.engine.outputs import Update
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

WARMUP_TOKENS = 16
"""Length of the warm-up answer before anything is timed."""


@dataclass(frozen=True)
class SamplingArguments:
    """How tokens are chosen. The Python and HTTP APIs have more settings."""

    max_tokens: int = 256
    """longest answer, in tokens"""
    temperature: float = 0.0
    """0 decodes greedily; 1 samples the target's own distribution"""
    top_p: float = 1.0
    """sample from the smallest set of tokens with this total probability"""
    top_k: int = 0
    """sample from the k most likely tokens; 0: all"""
    min_p: float = 0.0
    """drop tokens less likely than this fraction of the most likely one"""
    repetition_penalty: float = 1.0
    """penalize tokens of the prompt and the answer; above 1 avoids repetition"""
    seed: int = 0
    """the same seed gives the same answer"""
    n: int = 1
    """number of answers; answer i uses seed + i"""
    stop: tuple[str, ...] = ()
    """end before the first of these strings"""
    ignore_eos: bool = False
    """continue past end tokens"""
    logprobs: int | None = None
    """with --json: report log-probabilities, and those of this many most likely tokens"""
    num_draft_tokens: int | None = None
    """draft tokens per step; 0: plain decoding; default: what pays on this machine"""
    tolerance: float = 1.0
    """below 1, NOT lossless: also keep drafts with at least this fraction of the best token's probability"""


@dataclass(frozen=True)
class Arguments(ServedModelArguments):
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """what to ask"""
    compare: bool = False
    """answer twice, plainly and with drafts, and compare speed and text"""
    system: str | None = None
    """system message before the prompt"""
    raw: bool = False
    """continue the prompt without the chat template"""
    json: bool = False
    """print one JSON document instead of text and table"""
    sampling: SamplingArguments = field(default_factory=SamplingArguments)


def main(argv: list[str]) -> int:
    arguments = checked(parse(Arguments, "generate", argv))
    params = SamplingParams(**asdict(arguments.sampling))
    num_draft_tokens = params.num_draft_tokens
    with Console(stderr=True).status("loading target and drafter (the first run also converts the target)"):
        target = arguments.target.load()
        drafter = arguments.drafter.load(target) if num_draft_tokens != 0 else None
    if drafter is not None and num_draft_tokens is not None:
        drafter.check_num_draft_tokens(num_draft_tokens)
    prompt_ids = render(target, arguments)
    if params.max_tokens > (room := target.max_length - len(prompt_ids)):
        log.warning("at most %d tokens fit behind the prompt in the target's context of %d", room, target.max_length)
    drafters = [None, drafter] if arguments.compare else [drafter]
    runs = [run(target, each, prompt_ids, arguments, params) for each in drafters]
    divergences = (
        first_divergence(target, prompt_ids, ours.token_ids, theirs.token_ids, params)
        for ours, theirs in zip(runs[0].answers, runs[-1].answers, strict=True)
    )
    divergence = next(filter(None, divergences), None) if arguments.compare else None
    if arguments.json:
        print(json.dumps(report(runs, divergence)))
        return 0
    if arguments.compare:
        Console().print(comparison(*runs))
    if params.tolerance < 1:
        Console(stderr=True).print(not_lossless(runs[-1], params.tolerance))
    elif divergence is not None:
        Console().print(divergence.explain(str(target.dtype).removeprefix("torch.")), soft_wrap=True)
    return 0


def checked(arguments: Arguments) -> Arguments:
    """Refuse contradicting options before anything is loaded; fill in the drafter's target."""
    if not arguments.prompt.strip():
        raise RequestError("the prompt is empty", hint="give the text to answer as the first argument")
    if arguments.sampling.num_draft_tokens == 0 and arguments.compare:
        raise ConfigError("--compare needs drafts, but num_draft_tokens is 0", hint="use at least 1")
    if arguments.sampling.logprobs is not None and not arguments.json:
        raise ConfigError("--logprobs are reported in the JSON document only", hint="add --json")
    if arguments.raw and arguments.system is not None:
        raise ConfigError(
            f"--raw uses no chat template, so --system {arguments.system!r} has no effect",
            hint="put its text into the prompt",
        )
    options = arguments.drafter
    find = options.target_for if arguments.sampling.num_draft_tokens == 0 else options.pair
    return replace(arguments, target=find(arguments.target))


def render(target: "HFTarget", arguments: Arguments) -> list[int]:
    from peagle.decoding.reference import check_prompt
    from peagle.tokenizer import prompt_ids

    if arguments.raw:
        token_ids = list(target.tokenizer(arguments.prompt, verbose=False)["input_ids"])
    else:
        messages = [{"role": "system", "content": arguments.system}] if arguments.system is not None else []
        token_ids = prompt_ids(target.tokenizer, [*messages, {"role": "user", "content": arguments.prompt}])
    check_prompt(target, token_ids)
    return token_ids


def run(
    target: "HFTarget",
    drafter: "Drafter | None",
    prompt_ids: list[int],
    arguments: Arguments,
    params: SamplingParams,
) -> Run:
    """Start an engine just large enough, answer the prompt, and close it."""
    if drafter is None:
        params = replace(params, num_draft_tokens=None)
    with working("starting the engine"):
        llm = start(target, drafter, len(prompt_ids), params)
    with llm:
        engine = llm.engine
        method = "plain"
        if engine.drafter is not None:
            drafts = f"tree of {engine.tree_nodes}" if engine.tree_nodes else f"K = {engine.num_draft_tokens}"
            method = f"{engine.drafter.config.method}, {drafts}"
        if arguments.compare or arguments.json:
            warm_up(engine, prompt_ids, params)
        return answer(engine, prompt_ids, params, method, display(method, arguments))


def start(target: "HFTarget", drafter: "Drafter | None", prompt_length: int, params: SamplingParams) -> "LLM":
    from peagle.engine.llm import LLM

    with Console(stderr=True).status("starting the engine") as status:
        return LLM(
            target,
            drafter,
            params.num_draft_tokens,
            max_batch=params.n,
            max_length=min(prompt_length + params.max_tokens, target.max_length),
            reuse_prefixes=params.n > 1,  # a single answer must not reuse the warm-up's pages
            progress=lambda what, done, total: status.update(f"starting the engine: {what} ({done} of {total})"),
        )


def warm_up(engine: "Engine", prompt_ids: list[int], params: SamplingParams) -> None:
    """Answer a text of the prompt's length, so that one-time costs are not timed."""
    max_tokens = min(WARMUP_TOKENS, params.max_tokens)
    engine.add(prompt_ids[::-1], replace(params, max_tokens=max_tokens, stop=(), ignore_eos=True))
    while engine.has_work:
        engine.step()


def answer(
    engine: "Engine", prompt_ids: list[int], params: SamplingParams, method: str, show: "Callable[[Update], None]"
) -> Run:
    updates: list[Update] = []
    started = time.perf_counter()
    engine.add(prompt_ids, params, on_update=updates.append)
    num_seen = num_first_tokens = 0
    first = seconds = 0.0
    while engine.has_work:
        for output in engine.step():
            finished, seconds = output, time.perf_counter() - started
        if updates and not num_first_tokens:
            first = time.perf_counter() - started
            num_first_tokens = sum(len(update.token_ids) for update in updates)
        for update in updates[num_seen:]:
            show(update)
        num_seen = len(updates)
    metrics = finished.metrics
    length, num_tolerated = metrics.acceptance.acceptance_length, metrics.num_tolerated_tokens
    return Run(method, finished.outputs, length, seconds, first, num_first_tokens, num_tolerated)


def display(method: str, arguments: Arguments) -> "Callable[[Update], None]":
    """A function that shows updates on stdout, with headings if there are several answers."""
    if arguments.json:
        return lambda _: None
    names = [method] if arguments.compare else []
    total = arguments.sampling.n
    several = [f"answer {index + 1} of {total}" if total > 1 else "" for index in range(total)]
    return Display([", ".join(filter(None, [*names, each])) for each in several]).add
