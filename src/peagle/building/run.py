"""Runs the stages of a build one after another, skips those that are finished, and says what to change if one fails.

A stage is a command of peagle, run in this process. `check` has none: it loads the target and measures the machine.
"""

import copy
import json
import logging
import math
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.building.commands import (
    FILES,
    HELD_OUT,
    PROMPTS_NAME,
    SYNTHESIS_NAME,
    added_tokens,
    answer_tokens,
    commands_of,
    option_of,
    stage_path,
    synthesis_recipe,
    with_option,
)
from peagle.building.config import STAGES, Budget, BuildSettings, Stage
from peagle.building.plan import (
    MARGIN,
    Measured,
    Plan,
    check_disk,
    make_plan,
    measured_from,
    minutes,
    outcome_of,
    row_seconds,
    steps_within,
    with_default,
)
from peagle.building.shape import cpu_row
from peagle.building.state import BuildState
from peagle.checkpoint.card import read_card
from peagle.checkpoint.layouts import WEIGHTS_NAME
from peagle.data.prompts import read_dialogs
from peagle.data.shards import write_whole
from peagle.errors import CapacityError, ConfigError, PeagleError
from peagle.targets.prices import Price

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

Call = Callable[[list[str]], tuple[int, str]]
"""Runs a command line; returns its status and what it printed."""
SHAPE = ("target", "dtype", "device", "max_length", "num_draft_tokens", "num_layers", "recipe")
"""Settings that what was measured depends on."""
NEW_ROWS = {"check", "target", "dtype", "device", "max_length", "recipe"}
"""A restart and changed settings after which existing text does not fix the length of rows."""
HELP: dict[Stage, str] = {
    "data": "raise --max-length or give prompts with --data, and add --from-stage data; or use an instruction-tuned "
    "target, with a new --output",
    "train": "lower --num-layers and add --from-stage train, or lower --max-length and add --from-stage data",
    "eval": "give other prompts with --prompts, and add --from-stage eval",
    "gate": "train again with --from-stage train; if acceptance is the difference, pass a larger --budget with "
    "--from-stage data",
    "lossless": "pass a larger --budget with --from-stage data; lossless.json lists every difference",
    "bench": "give fewer or shorter prompts with --prompts, and add --from-stage eval",
    "report": "pip install 'peagle[bench]'",
}


class StageError(PeagleError):
    """A stage that failed, and what to change."""


@dataclass
class Build:
    """One build. `target` are the options that name the target; `load` loads it; `say` prints a line."""

    settings: BuildSettings
    target: list[str]
    described: dict[str, Any]
    load: "Callable[[], HFTarget]"
    call: Call
    say: Callable[[str], None]
    price: Price | None = None
    cost: list[str] = field(default_factory=list)
    state: BuildState = field(init=False)

    def __post_init__(self) -> None:
        self.state = BuildState.read(self.settings.output) or BuildState(self.described)

    def prepare(self, first: Stage | None = None, *, is_kept: bool = True) -> tuple[Measured, Plan]:
        """Check settings against an earlier run, measure unless that is done, and plan.

        What was measured is kept, also if no plan fits the budget; new settings are not. A dry run writes nothing.
        """
        first = self._new_restart(first)
        self.state.check_settings(self.described, first, self.settings.output)
        measured = self._measured(first)
        if is_kept:
            self.state.write(self.settings.output)
        plan = make_plan(measured, self.budget, most_tokens=self._most_tokens(measured))
        parent = next(
            each for each in (self.settings.output, *self.settings.output.absolute().parents) if each.exists()
        )
        check_disk(plan, shutil.disk_usage(parent).free)
        return measured, plan

    def run(self, measured: Measured, plan: Plan, first: Stage | None = None, last: Stage = "report") -> None:
        """Run the stages that are not finished, up to the last; those from the first on again."""
        if first is not None and self._new_restart(first) is None:
            self.say(f"resuming the build that --from-stage {first} began")
        self.state = self.state_before(measured, plan, first)
        self.state.settings = self.described
        self.state.write(self.settings.output)
        self._delete_forgotten()
        for number, stage in enumerate(STAGES[: STAGES.index(last) + 1], start=1):
            if stage == "check" or self.state.is_finished(stage):
                continue
            command = self._command(stage, measured, plan)
            self._write_inputs(measured)
            self.say(f"\n[{number}/{len(STAGES)}] {stage}: peagle {shlex.join(command)}")
            self._run(stage, command)
            self.say(f"{stage}: {said_of(stage, self.state)}, {minutes(self.state.stages[stage].seconds)}")
        self.state.restarted = None
        self.state.write(self.settings.output)

    def state_before(self, measured: Measured, plan: Plan, first: Stage | None = None) -> BuildState:
        """The state in which a run from this stage on begins."""
        state = copy.deepcopy(self.state)
        if (new := self._new_restart(first)) is not None:
            state.restart(new, adds_text=self._adds_text(measured, plan))
        return state

    def document(self, stage: Stage) -> dict[str, Any]:
        """What a finished stage printed as JSON."""
        document: dict[str, Any] = json.loads(stage_path(self.settings, stage).read_text(encoding="utf-8"))
        return document

    def commands(self, measured: Measured, plan: Plan) -> dict[Stage, list[str]]:
        return commands_of(self.settings, self.target, measured, plan, self.cost)

    @property
    def budget(self) -> Budget | None:
        return None if self.settings.budget is None else Budget.parse(self.settings.budget).at(self.price)

    def _new_restart(self, first: Stage | None) -> Stage | None:
        """The stage to run again; None if the same command was interrupted and resumes."""
        is_same = first == self.state.restarted and not self.state.stale(self.described)
        return None if is_same else first

    def _measured(self, first: Stage | None) -> Measured:
        """The rates of an earlier run, or new ones if that had another shape."""
        shape = {name: self.described.get(name) for name in SHAPE}
        record = self.state.stages.get("check")
        if first != "check" and record is not None and record.outcome.get("shape") == shape:
            measured = measured_from(record.outcome["measured"])
            if "data" in self.state.stages or self._row(measured, record.outcome.get("budget")) == self._row(measured):
                return measured
        settings = self.settings
        is_new = NEW_ROWS & {first, *self.state.changed(self.described)}
        if record is not None and "data" in self.state.stages and not is_new:
            settings = replace(settings, max_length=record.outcome["measured"]["max_length"])
        self.say("measuring how fast this machine decodes with the target and trains: about a minute")
        self.state.begin("check", [])
        started = time.perf_counter()
        target = self.load()
        load_seconds = time.perf_counter() - started

        from peagle.building.measure import fitting_prompts, measure

        budget = self._seconds(target.device.type)
        measured = measure(target, settings, budget, load_seconds)
        prompts = fitting_prompts(target)
        outcome = {"measured": outcome_of(measured), "shape": shape, "budget": budget, "prompts": prompts}
        self.state.end("check", "finished", outcome)
        return measured

    def _seconds(self, device: str) -> float:
        """The budget in seconds; 0 without one."""
        budget = with_default(self.budget, device)
        return (budget and budget.seconds) or 0.0

    def _row(self, measured: Measured, budget: float | None = None) -> int:
        """Tokens of a row for a budget in seconds, by default that of this run, if rows depend on it."""
        if measured.recipe is not None or self.settings.max_length is not None:
            return measured.max_length
        budget = self._seconds(measured.device) if budget is None else budget
        return cpu_row(budget, measured.batch / measured.tokens_per_second)

    def _most_tokens(self, measured: Measured) -> int | None:
        """Answer tokens that the prompts of --data can give."""
        if self.settings.data is None:
            return None
        return len(read_dialogs(self.settings.data)) * answer_tokens(measured)

    def _command(self, stage: Stage, measured: Measured, plan: Plan) -> list[str]:
        """The planned command. A resumed stage keeps its settings, but not its time limit."""
        begun = self.state.stages.get(stage)
        if stage == "train":
            if begun is not None:
                return begun.command
            plan = self._settled(measured, plan)
        command = self.commands(measured, plan)[stage]
        if stage == "data" and begun is not None and (held_out := option_of(begun.command, HELD_OUT)) is not None:
            command = with_option(command, HELD_OUT, held_out)
        if stage == "data" and plan.budget is not None and self.settings.data is None:
            spent, planned = 0.0 if begun is None else begun.seconds, plan.num_tokens / measured.answers_per_second
            least = max(planned / 2, row_seconds(measured))  # what was begun before an interruption is lost
            return with_option(command, "--seconds", math.ceil(max(least, planned - spent)))
        if stage == "bench" and self.cost:
            seconds = sum(self.state.stages[each].seconds for each in ("data", "train"))
            return with_option(command, "--training-hours", max(0.001, round(seconds / 3600, 3)))
        return command

    def _settled(self, measured: Measured, plan: Plan) -> Plan:
        """The plan with as many steps as the text is worth and the time that is left allows."""
        num_tokens = self.state.stages["data"].outcome["num_answer_tokens"]
        if plan.budget is None or plan.budget.seconds is None:
            return plan
        later = sum(plan.seconds[stage] for stage in STAGES[STAGES.index("eval") :])
        fixed = plan.seconds["train"] - plan.num_steps * measured.seconds_per_step
        left = MARGIN * plan.budget.seconds - self.state.seconds - later - fixed
        num_steps = steps_within(measured, left, num_tokens)
        seconds = plan.seconds | {"train": fixed + num_steps * measured.seconds_per_step}
        if num_steps * measured.seconds_per_step > left:
            log.warning(
                "%s are left of the budget; the least training, %d steps, exceeds it", minutes(max(0, left)), num_steps
            )
        return replace(plan, num_steps=num_steps, seconds=seconds)

    def _write_inputs(self, measured: Measured) -> None:
        """Files that commands of the stages read."""
        lines = [json.dumps(row) + "\n" for row in self.state.stages["check"].outcome["prompts"]]
        for name, text in ((PROMPTS_NAME, "".join(lines)), (SYNTHESIS_NAME, synthesis_recipe(measured))):
            write_whole(self.settings.output / name, text.encode())

    def _run(self, stage: Stage, command: list[str]) -> None:
        state, output = self.state, self.settings.output
        is_trained = stage == "train" and self._is_trained()
        if is_trained and stage not in state.stages:
            raise ConfigError(
                f"{stage_path(self.settings, stage)} holds a drafter that this build did not train",
                hint="move it away, or pass a new --output",
            )
        state.begin(stage, command)
        state.write(output)
        try:
            status, printed = (0, "") if is_trained else self.call(command)
            document = json.loads(printed.strip().rpartition("\n")[2]) if "--json" in command else {}
            if stage not in ("data", "train", "report"):
                write_whole(stage_path(self.settings, stage), (json.dumps(document) + "\n").encode())
            if status and not _is_unshown(stage, document):
                state.restarted = None  # the command has ended: repeated, it runs the stages again
                raise StageError(_failure(stage, document))
            outcome = outcome_of_stage(stage, document, stage_path(self.settings, stage))
        except KeyboardInterrupt:
            state.pause()
            state.write(output)
            raise
        except Exception as error:
            explained = self._explained(stage, error)
            state.end(stage, "failed", {"error": explained.message, "hint": explained.hint})
            state.write(output)
            if isinstance(error, PeagleError) or explained.hint is not None:
                raise explained from error
            raise
        state.end(stage, "finished", outcome)
        state.write(output)

    def _is_trained(self) -> bool:
        """Whether a training has finished: of a build that was killed before it recorded that, or of another."""
        from peagle.training.resume import saved_settings

        output = stage_path(self.settings, "train")
        return (output / WEIGHTS_NAME).exists() and not saved_settings(output)

    def _explained(self, stage: Stage, error: Exception) -> PeagleError:
        if isinstance(error, PeagleError):
            hint = error.hint or HELP[stage]
            if "--" not in hint:  # options change settings, and then it does not resume
                hint += f". Then rerun the command: it resumes at {stage}"
            return StageError(f"the stage {stage} failed: {error.message}", hint=hint)
        if type(error).__name__ == "OutOfMemoryError":
            message = f"the stage {stage} ran out of memory: {str(error).splitlines()[0]}"
            return CapacityError(message, hint=HELP["train"])
        return StageError(f"the stage {stage} failed: {type(error).__name__}: {error}")

    def _adds_text(self, measured: Measured, plan: Plan) -> bool:
        """Whether existing text is kept: more is wanted, or as much with another budget."""
        earlier, changed = self.state.stages.get("data"), self.state.changed(self.described)
        if earlier is None or "data" in changed:
            return False
        added = added_tokens(earlier.command, self.commands(measured, plan)["data"])
        return added is not None and (added > 0 or (added == 0 and "budget" in changed))

    def _delete_forgotten(self) -> None:
        """Delete what the stages that run again wrote before; also if that was interrupted."""
        if self.state.restarted is not None:
            for stage in STAGES[STAGES.index(self.state.restarted) :]:
                if stage in FILES and stage not in self.state.stages:
                    _remove(stage_path(self.settings, stage))


def outcome_of_stage(stage: Stage, document: dict[str, Any], path: Path) -> dict[str, Any]:
    """The figures of a finished stage."""
    if stage == "data":
        return {name: document[name] for name in ("num_rows", "num_tokens", "num_answer_tokens", "tokens_per_second")}
    if stage == "train":
        card = read_card(path)
        assert card is not None, "training wrote it"
        entry = card.acceptance.get("held_out_replay") or {}
        return {"num_steps": card.training["num_steps"], "acceptance_length": entry.get("acceptance_length")}
    if stage == "eval":
        names = ("workload", "num_prompts", "num_draft_tokens", "acceptance_length", "per_position")
        return {name: document[name] for name in names}
    if stage == "gate":
        return {"passed": document["gate"]["passed"], "not_checked": document["gate"]["not_checked"]}
    if stage == "lossless":
        return {"lossless": document["lossless"], "acceptance_length": document["acceptance_length"]}
    return {name: document[name] for name in ("verdict", "recommended") if name in document}


def said_of(stage: Stage, state: BuildState) -> str:
    """One phrase on a finished stage."""
    found = state.stages[stage].outcome
    match stage:
        case "data":
            return f"{found['num_rows']:,} conversations, {found['num_answer_tokens']:,} answer tokens"
        case "train":
            length = found["acceptance_length"]
            kept = "" if length is None else f", acceptance length {length:.2f} on held-out answers"
            return f"{found['num_steps']:,} steps{kept}"
        case "eval":
            return f"acceptance length {found['acceptance_length']:.2f} on {found['workload']}"
        case "gate":
            return "PASS" if found["passed"] else "FAIL"
        case "lossless":
            return "lossless" if found["lossless"] else "all answers are the target's own, but no draft was accepted"
        case "bench":
            return str(found["verdict"])
        case _:
            return "done"


def _failure(stage: Stage, document: dict[str, Any]) -> str:
    """Why a command ended with a status other than 0."""
    if stage == "gate":
        first = document["gate"]["first_difference"]
        cause = f" (likely cause: {first['cause']})" if first.get("cause") else ""
        return f"{first['name']}: {first['found']}{cause}"
    if stage == "lossless":
        return f"{len(_unequal(document))} comparisons with the target's own answers do not hold"
    failed = [cell["failure"] for cell in document.get("cells", ()) if cell.get("failure")]
    return failed[0] if failed else "it ended with an error"


def _is_unshown(stage: Stage, document: dict[str, Any]) -> bool:
    """Whether answers were the target's own, but a weak drafter had no draft accepted, so that little was tested."""
    return stage == "lossless" and document["acceptance_length"] <= 1 and not _unequal(document)


def _unequal(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in (*document["comparisons"], *document["distributions"]) if not each["holds"]]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
