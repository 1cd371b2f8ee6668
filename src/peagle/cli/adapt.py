"""Adapt a drafter to the text it is served, in minutes.

The adapted drafter is kept only if it accepts more on held-out traffic and loses at most 2% on old text. Rerun an
interrupted command and it resumes. The status is 0 if it is kept, 1 if not.
"""

import contextlib
import dataclasses
import json
import logging
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.adaptation.config import AdaptSettings
from peagle.adaptation.outcome import Outcome
from peagle.bench.client import root_of
from peagle.cli.train import Steps
from peagle.console.arguments import KeyArguments, ModelArguments, check_directory, parse
from peagle.console.progress import working
from peagle.rows import read_lines

if TYPE_CHECKING:
    from peagle.objective.config import TrainConfig
    from peagle.training.run import OnStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelArguments):
    settings: AdaptSettings
    swap: str | None = None
    """address of a server (`peagle serve --swap-from`), which then serves the drafter if it is kept"""
    json: bool = False
    """print one JSON document instead of lines"""
    key: KeyArguments = field(default_factory=KeyArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "adapt", argv)
    settings = arguments.settings
    for path in (settings.data, settings.old):
        if path is not None and not path.is_dir():
            next(read_lines(path), None)  # fail on a wrong path before loading the target
    check_directory(settings.output)
    if arguments.swap is not None:
        root_of(arguments.swap)
    api_key = arguments.key.read()
    target = arguments.drafter.pair(arguments.target).load()

    from peagle.adaptation.run import adapt

    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(contextlib.ExitStack())
        waiting.enter_context(working("gathering text, and measuring the drafter on it"))

        def begin(config: "TrainConfig") -> "OnStep":
            waiting.close()
            return stack.enter_context(contextlib.closing(Steps(config, is_shown=True))).show

        drafter = arguments.drafter
        outcome = adapt(target, drafter.drafter, settings, begin, allow_mismatch=drafter.allow_mismatch)
    swapped = None
    if arguments.swap is not None and outcome.is_kept:
        from peagle.adaptation.swap_client import swap

        swapped = swap(arguments.swap, settings.output, api_key)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(outcome) | {"swapped": swapped}))
    else:
        print("\n".join(verdict(arguments, outcome, swapped)))
    return 0 if outcome.is_kept else 1


def verdict(arguments: Arguments, outcome: Outcome, swapped: dict[str, Any] | None) -> list[str]:
    """What was measured, what became of the drafter, and what to do next."""
    place = shlex.quote(str(arguments.settings.output))
    lines = [
        f"acceptance length (K = {outcome.num_draft_tokens}) on held-out traffic: "
        f"{outcome.before.traffic:.2f} before, {outcome.after.traffic:.2f} after",
        f"on old text: {outcome.before.old:.2f} before, {outcome.after.old:.2f} after",
        f"{'kept' if outcome.is_kept else 'not kept'}: {outcome.why}",
    ]
    if not outcome.is_kept:
        return [*lines, "Next: more traffic or more --minutes, into a new --output; the earlier drafter is unchanged"]
    if swapped is not None:
        return [*lines, f"{arguments.swap} serves {swapped['drafter']} in the place of {swapped['previous']}"]
    return [*lines, f"the drafter is in {place}. Next:", f"  peagle serve --drafter {place}"]
