"""Compare vLLM with peagle on the same target, drafter and prompts, draft token by draft token.

Acceptance rates hide faults (a wrong mask token barely changes them), so the draft tokens are compared. Float32 logits
of two implementations differ by about 5e-5; a difference counts as a tie only if our top two logits are within `TIE`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle.compare.evidence import greedy_params
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.errors import ConfigError, PeagleError
from peagle.provenance import package_version
from peagle.targets.hf import HFTarget

JUDGE = Path(__file__).with_name("judge_vllm.py")
TIE = 1e-3
PYTHON_VARIABLE = "PEAGLE_VLLM_PYTHON"


class JudgeError(PeagleError):
    """vLLM did not start or crashed; the message ends with its output."""

    @property
    def reason(self) -> str:
        """The last line that names an error, or the last line."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        return ([line for line in lines if "Error" in line] or lines)[-1]


def find_vllm_python() -> Path | None:
    """The Python of an environment with vLLM: that of PEAGLE_VLLM_PYTHON, or this one; None if there is none."""
    named = os.environ.get(PYTHON_VARIABLE)
    if not named:
        return Path(sys.executable) if package_version("vllm") else None
    path = Path(named).expanduser().absolute()
    if path.is_dir() or not os.access(path, os.X_OK):
        raise ConfigError(
            f"{PYTHON_VARIABLE}: {path} is not an executable", hint="set it to the python of vLLM's environment"
        )
    return path


@dataclass(frozen=True)
class VerifiedStep:
    """One draft and its number of accepted tokens; `draft_gaps` (ours only) are its top-two logit gaps."""

    draft_tokens: tuple[int, ...]
    num_accepted: int
    draft_gaps: tuple[float, ...] = ()


@dataclass
class Agreement:
    """Result of the comparison; no `faults` means agreement."""

    num_draft_tokens: int
    num_prompts: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_compared_drafts: int = 0
    num_output_ties: int = 0
    num_draft_ties: int = 0
    ours_per_position: list[int] = field(default_factory=list)
    theirs_per_position: list[int] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ours_per_position = self.ours_per_position or [0] * self.num_draft_tokens
        self.theirs_per_position = self.theirs_per_position or [0] * self.num_draft_tokens

    def note(self, line: str, gap: float) -> bool:
        """Add a difference to the ties or, if `gap` is too wide for rounding, to the faults; True for a tie."""
        is_tie = gap < TIE
        (self.ties if is_tie else self.faults).append(line)
        return is_tie


def compare_outputs(
    agreement: Agreement, label: str, ours: list[int], theirs: list[int], target_gap: Callable[[int], float]
) -> bool:
    """Compare output ids up to the first difference; True if there is none.

    `target_gap(i)` is our target's top-two logit gap at output token i.
    """
    for index, (our_token, their_token) in enumerate(zip(ours, theirs, strict=False)):
        if our_token != their_token:
            gap = target_gap(index)
            line = f"{label}: output token {index} is {our_token} here, {their_token} in vLLM, target gap {gap:.1e}"
            agreement.num_output_ties += agreement.note(line, gap)
            return False
        agreement.num_output_tokens += 1
    if len(ours) != len(theirs):
        agreement.faults.append(f"{label}: {len(ours)} output tokens here, {len(theirs)} in vLLM")
    return True


def compare_steps(
    agreement: Agreement,
    label: str,
    ours: list[VerifiedStep],
    theirs: list[VerifiedStep],
    target_gap: Callable[[int], float],
) -> None:
    """Compare drafts and acceptance step by step; stop when a tie makes the decoders diverge."""
    cursor = 1  # output index of the first token of the step; token 0 came from the prefill
    for number, (our_step, their_step) in enumerate(zip(ours, theirs, strict=False)):
        where = f"{label} step {number}"
        agreement.num_steps += 1
        compare_draft(agreement, where, our_step, their_step)
        for counts, step in ((agreement.ours_per_position, our_step), (agreement.theirs_per_position, their_step)):
            for position in range(step.num_accepted):
                counts[position] += 1
        if our_step.num_accepted != their_step.num_accepted:
            line = f"{where}: {our_step.num_accepted} accepted here, {their_step.num_accepted} in vLLM"
            shorter = min(our_step.num_accepted, their_step.num_accepted)
            if our_step.draft_tokens[shorter] == their_step.draft_tokens[shorter] and not (
                (gap := target_gap(cursor + shorter)) < TIE
            ):
                agreement.faults.append(f"{line}, the drafts agree and the target gap is {gap:.1e}")
            else:
                agreement.ties.append(f"{line}; comparison of this prompt stops")
            return
        cursor += our_step.num_accepted + 1
    if len(ours) < len(theirs):
        agreement.faults.append(f"{label}: {len(ours)} steps here, {len(theirs)} in vLLM")


def compare_draft(agreement: Agreement, where: str, ours: VerifiedStep, theirs: VerifiedStep) -> None:
    """Compare one draft; each differing token is a tie or a fault."""
    if len(ours.draft_tokens) != len(theirs.draft_tokens):
        agreement.faults.append(
            f"{where}: {len(ours.draft_tokens)} draft tokens here, {len(theirs.draft_tokens)} in vLLM"
        )
        return
    for position, (our_token, their_token) in enumerate(zip(ours.draft_tokens, theirs.draft_tokens, strict=True)):
        agreement.num_compared_drafts += 1
        if our_token == their_token:
            continue
        gap = ours.draft_gaps[position]
        line = f"{where} position {position}: draft {our_token} here, {their_token} in vLLM, our gap {gap:.1e}"
        agreement.num_draft_ties += agreement.note(line, gap)


def check_is_alive(agreement: Agreement) -> None:
    """A drafter whose tokens are never accepted would pass every comparison, so that is a fault."""
    if not agreement.ours_per_position[0] or not agreement.theirs_per_position[0]:
        agreement.faults.append(
            "no draft token was ever accepted at position 0 "
            f"(here {agreement.ours_per_position[0]}, vLLM {agreement.theirs_per_position[0]})"
        )


def run_judge(
    vllm_python: Path,
    target: Path,
    drafter: Path,
    prompts: list[list[int]],
    max_tokens: int,
    num_draft_tokens: int,
    *,
    parallel: bool,
) -> dict[str, Any]:
    """Run judge_vllm.py in vLLM's environment; its output is shown only if it fails."""
    with tempfile.TemporaryDirectory(prefix="peagle-judge-") as name:
        folder = Path(name)
        (folder / "prompts.json").write_text(json.dumps(prompts))
        # Python finds modules beside a script first, and ours would shadow vLLM.
        judge = shutil.copy(JUDGE, folder)
        command: list[Any] = [vllm_python, judge, target, drafter, num_draft_tokens, folder / "prompts.json"]
        command += [max_tokens, folder / "out.json", *([] if parallel else ["--one-by-one"])]
        # Start-up takes about 20 s and a prompt 6 s; be generous to slow machines.
        timeout = 300 + 60 * len(prompts)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        log = folder / "log"
        try:
            with log.open("w") as stream:
                subprocess.run(
                    [str(part) for part in command],
                    check=True,
                    timeout=timeout,
                    env=environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            raise JudgeError(f"the vLLM judge failed: {error}\n{log.read_text(errors='replace')[-6000:]}") from error
        judged: dict[str, Any] = json.loads((folder / "out.json").read_text())
        return judged


@dataclass(frozen=True)
class OurSide:
    """peagle's target and drafter in float32, without a pair head: other engines have none."""

    target: HFTarget
    drafter: Drafter
    num_draft_tokens: int

    def decode(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], list[VerifiedStep]]:
        """Output ids and verified steps. vLLM counts its last step beyond `max_tokens`, so we decode that far too."""
        depth = self.num_draft_tokens
        params = greedy_params(max_tokens + depth + 1)
        drafter = self.drafter.without_pair_head()
        steps = list(decode(self.target, prompt_ids, params, drafter=drafter, num_draft_tokens=depth))
        verified = [step for step in steps if step.draft_token_ids]
        return (
            [token for step in steps for token in step.token_ids],
            [VerifiedStep(step.draft_token_ids, step.num_accepted, step.draft_gaps) for step in verified],
        )

    def target_gaps(self, prompt_ids: list[int], output_ids: list[int]) -> Callable[[int], float]:
        """A function that gives the target's top-two logit gap at output token i, from one forward on demand."""
        gaps: list[float] = []

        def gap(index: int) -> float:
            if not gaps:
                token_ids_1T = torch.tensor([prompt_ids + output_ids], device=self.target.device)
                logits_BTV = self.target.forward(token_ids_1T).logits_BTV
                top_T2 = logits_BTV[0, len(prompt_ids) - 1 :].topk(2).values
                gaps.extend((top_T2[:, 0] - top_T2[:, 1]).tolist())
            return gaps[index]

        return gap


def compare(ours: OurSide, judged: dict[str, Any], max_tokens: int) -> Agreement:
    """Decode the judged prompts with peagle and compare."""
    agreement = Agreement(ours.num_draft_tokens)
    for index, request in enumerate(judged["requests"]):
        label = f"prompt {index}"
        prompt_ids = request["prompt_ids"]
        output_ids, steps = ours.decode(prompt_ids, max_tokens)
        target_gap = ours.target_gaps(prompt_ids, output_ids)
        judged_steps = [VerifiedStep(tuple(step["draft_tokens"]), step["num_accepted"]) for step in request["steps"]]
        agreement.num_prompts += 1
        compare_outputs(agreement, label, output_ids[:max_tokens], request["output_ids"], target_gap)
        compare_steps(agreement, label, steps, judged_steps, target_gap)
    check_is_alive(agreement)
    return agreement
