"""The plan and the outcome of a build, in words."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peagle.bench.verdict import MIN_SPEED_UP
from peagle.building.config import STAGES, BuildSettings, Stage
from peagle.building.plan import GIB, Measured, Plan, minutes, with_default
from peagle.building.run import Build, said_of
from peagle.building.state import BuildState
from peagle.cost import dollars
from peagle.targets.prices import Price


def plan_lines(
    settings: BuildSettings,
    measured: Measured,
    plan: Plan,
    state: BuildState,
    commands: Mapping[Stage, list[str]],
    price: Price | None,
) -> list[str]:
    """What will be made, what it takes, and the command of each stage, if `commands` has them."""
    where = measured.accelerator or f"{measured.device}"
    source = "answers to your prompts" if settings.data else "questions and answers, written by the target"
    facts = {
        "target": f"{measured.target}, {measured.num_parameters / 1e6:,.0f} million parameters, {measured.dtype} on "
        f"{where}",
        "measured": f"{measured.tokens_per_second:,.1f} tokens/s decoding {measured.batch} requests, "
        f"{measured.tokens_per_second_alone:,.1f} with one; {measured.seconds_per_step:.2f} s per training step of "
        f"{measured.tokens_per_step:,} tokens",
        "text": f"{plan.num_tokens:,} answer tokens in rows of up to {measured.max_length}: {source}",
        "drafter": f"{measured.num_layers} {'layer' if measured.num_layers == 1 else 'layers'}, "
        f"{measured.num_draft_tokens} draft tokens, {measured.num_drafter_parameters / 1e6:,.1f} million parameters, "
        f"{plan.num_steps:,} steps",
        "memory": f"{measured.memory_needed / GIB:.1f} GiB of {measured.memory_free / GIB:.1f} GiB free",
        "disk": f"{plan.disk_bytes / GIB:.2f} GiB",
        "time": minutes(plan.total)
        + ("" if plan.budget is None else f", of the budget of {plan.budget.text}")
        + (f"; {minutes(state.seconds)} spent so far" if len(state.stages) > 1 else ""),
    }
    if price is not None:
        one = " for one GPU" if price.num_gpus > 1 else ""
        facts["price"] = f"{dollars(plan.price(price) or 0)}{one} at {price.text}"
    lines = [f"{name:<9} {value}" for name, value in facts.items()]
    lines += ["", f"{'stage':<9} {'about':>8}  {'state':<9} {'command' if commands else ''}".rstrip()]
    for stage in STAGES:
        record = state.stages.get(stage)
        status = "planned" if record is None else record.status
        shown = f"peagle {shlex.join(commands[stage])}" if stage in commands else ""
        lines.append(f"{stage:<9} {minutes(plan.seconds[stage]):>8}  {status:<9} {shown}".rstrip())
        if record is not None and record.status == "finished" and stage != "check":
            lines.append(f"{'':<30}{said_of(stage, state)}, {minutes(record.seconds)}")
    return lines


def verdict_lines(build: Build, measured: Measured) -> list[str]:
    """Whether the drafter is right, whether it pays here, and what would be needed if it does not."""
    settings, state, compared = build.settings, build.state, build.document("bench")
    text, trained, evaluated = (state.stages[stage].outcome for stage in ("data", "train", "eval"))
    best = max(compared["recommended"] or [], key=lambda each: each["speedup"], default=None)
    place = shlex.quote(str(settings.output / "drafter"))
    lines = [
        "exact: the gate passes, and answers with drafts are the target's own (gate.json, lossless.json)"
        + ("" if state.stages["lossless"].outcome["lossless"] else "; too few drafts were accepted to show more"),
        f"acceptance length {evaluated['acceptance_length']:.2f} on {evaluated['workload']}, with "
        f"{evaluated['num_draft_tokens']} draft tokens per step",
    ]
    if best is None:
        return [*lines, "does it pay? nothing was drafted: pass more or longer --prompts and add --from-stage eval"]
    if best["speedup"] >= MIN_SPEED_UP:
        return [
            *lines,
            f"does it pay? yes: {best['speedup']:.2f} times plain decoding at concurrency {best['concurrency']}",
            f"next: peagle serve --drafter {place}",
        ]
    found = (best["label"], best["concurrency"])
    cell = next(each for each in compared["cells"] if (each["label"], each["concurrency"]) == found)
    length, most = cell["acceptance_length"], measured.num_draft_tokens + 1
    said = f"does it pay? no: {best['speedup']:.2f} times plain decoding at concurrency {best['concurrency']}"
    if length is not None and (needed := length / best["speedup"]) <= most:
        said += f"; here it would from an acceptance length of {needed:.2f} on"
    elif length is not None:
        said += f"; a speculative step takes {needed:.1f} plain steps here, and emits at most {most} tokens"
    lines.append(said)
    return [*lines, *_needed(build, measured, text, trained)]


def _needed(build: Build, measured: Measured, text: Mapping[str, Any], trained: Mapping[str, Any]) -> list[str]:
    """What a drafter that pays needs, compared with what this one had."""
    had = f"{text['num_answer_tokens']:,} answer tokens and {trained['num_steps']:,} steps"
    seconds = measured.full_tokens / measured.answers_per_second + measured.full_steps * measured.seconds_per_step
    budget = with_default(build.budget, measured.device)
    if text["num_answer_tokens"] >= measured.full_tokens or budget is None:
        return ["what would be needed: text like that of your users; give it with --data and --from-stage data"]
    where = "" if measured.device == "cuda" else ": use a GPU"
    larger = replace(build.settings, budget=budget.larger)
    again = shlex.join(["peagle", "build", *build.target, *larger.words, *build.cost, "--from-stage", "data"])
    return [
        f"what would be needed: more text and training. This drafter had {had}; a full training has "
        f"{measured.full_tokens:,} tokens and takes about {minutes(seconds)} on this machine{where}",
        f"next: `{again}` adds to the text and trains again; `peagle catalog` lists published drafters",
    ]
