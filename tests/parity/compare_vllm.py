"""Compare peagle's reference decoder with vLLM: same target, same drafter, same prompts, draft token by draft token.

    python tests/parity/compare_vllm.py --vllm-python .venv-vllm/bin/python [--drafter DIR] [--json OUT.json]

Acceptance rates alone hide faults (a wrong mask token leaves them unchanged), so the draft tokens themselves are
compared. Two implementations differ by about 5e-5 in a float32 logit; a difference is forgiven only where our own
top two logits lie within `TIE`, and every forgiven one is counted and printed. With `--self-test` vLLM is then given
a drafter with a wrong mask token, which the comparison must notice.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIE = 1e-3
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class VerifiedStep:
    """One draft and how much of it the target kept; `draft_gaps` (ours only) are its top-two logit gaps."""

    draft_tokens: tuple[int, ...]
    num_accepted: int
    draft_gaps: tuple[float, ...] = ()


@dataclass
class Agreement:
    """What the comparison of some prompts found. `faults` empty means agreement."""

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


def compare_outputs(
    agreement: Agreement, label: str, ours: list[int], theirs: list[int], target_gap: Callable[[int], float]
) -> bool:
    """Compare output ids until the first difference; True when there is none.

    `target_gap(i)` is our target's top-two logit gap where output token i was chosen; it is asked only at a difference.
    """
    for index, (our_token, their_token) in enumerate(zip(ours, theirs, strict=False)):
        if our_token != their_token:
            gap = target_gap(index)
            line = f"{label}: output token {index} is {our_token} here, {their_token} in vLLM, target gap {gap:.1e}"
            if gap < TIE:
                agreement.num_output_ties += 1
                agreement.ties.append(line)
            else:
                agreement.faults.append(line)
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
    """Compare drafts and acceptance step by step; stops where a tie sends the two decoders different ways."""
    cursor = 1  # index in the output of the first token the step decides; token 0 came from the prefill
    for number, (our_step, their_step) in enumerate(zip(ours, theirs, strict=False)):
        where = f"{label} step {number}"
        agreement.num_steps += 1
        compare_draft(agreement, where, our_step, their_step)
        for counts, step in (
            (agreement.ours_per_position, our_step),
            (agreement.theirs_per_position, their_step),
        ):
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
    """Compare the tokens of one draft; each differing token is a tie or a fault."""
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
        if gap < TIE:
            agreement.num_draft_ties += 1
            agreement.ties.append(line)
        else:
            agreement.faults.append(line)


def check_is_alive(agreement: Agreement) -> None:
    """A drafter that is never right would pass every comparison, so it is a fault."""
    if not agreement.ours_per_position[0] or not agreement.theirs_per_position[0]:
        agreement.faults.append(
            "no draft token was ever accepted at position 0 "
            f"(here {agreement.ours_per_position[0]}, vLLM {agreement.theirs_per_position[0]})"
        )


def run_judge(
    vllm_python: Path, target: Path, drafter: Path, prompts: list[list[int]], max_tokens: int, num_draft_tokens: int
) -> dict[str, Any]:
    """Run the vLLM judge in its own environment; its talk is shown only when it fails."""
    with tempfile.TemporaryDirectory(prefix="peagle-parity-") as name:
        folder = Path(name)
        (folder / "prompts.json").write_text(json.dumps(prompts))
        command = [vllm_python, HERE / "judge_vllm.py", target, drafter, num_draft_tokens]
        command += [folder / "prompts.json", max_tokens, folder / "out.json"]
        # Generous beside the measured 20 s of start-up and 6 s a prompt: a slow machine is not a failure.
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
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(log.read_text()[-6000:])
            raise SystemExit(f"the vLLM judge failed: {error}") from error
        return json.loads((folder / "out.json").read_text())


def judged_steps(request: dict[str, Any]) -> list[VerifiedStep]:
    return [VerifiedStep(tuple(step["draft_tokens"]), step["num_accepted"]) for step in request["steps"]]


@dataclass(frozen=True)
class OurSide:
    """peagle's target and drafter in float32 on the CPU, and what they make of a prompt."""

    target: Any
    drafter: Any
    num_draft_tokens: int

    def decode(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], list[VerifiedStep]]:
        """Output ids and verified steps. vLLM counts acceptances of its last step beyond `max_tokens`, so decoding
        goes on until every step that vLLM could have verified is complete."""
        from peagle.decoding.reference import decode
        from peagle.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=max_tokens + self.num_draft_tokens + 1, temperature=0.0, ignore_eos=True)
        output_ids: list[int] = []
        steps = []
        num_draft_tokens = self.num_draft_tokens
        for step in decode(self.target, prompt_ids, params, drafter=self.drafter, num_draft_tokens=num_draft_tokens):
            output_ids.extend(step.token_ids)
            if step.draft_token_ids:
                steps.append(VerifiedStep(step.draft_token_ids, step.num_accepted, tuple(step.draft_gaps)))
        return output_ids, steps

    def target_gaps(self, prompt_ids: list[int], output_ids: list[int]) -> Callable[[int], float]:
        """The top-two logit gap of the target where output token i was chosen, from one plain forward on demand."""
        gaps: list[float] = []

        def gap(index: int) -> float:
            if not gaps:
                import torch

                with torch.inference_mode():
                    logits_BTV = self.target.forward(torch.tensor([prompt_ids + output_ids])).logits_BTV
                top_T2 = logits_BTV[0, len(prompt_ids) - 1 :].topk(2).values
                gaps.extend((top_T2[:, 0] - top_T2[:, 1]).tolist())
            return gaps[index]

        return gap

    def prompts(self, limit: int | None) -> list[list[int]]:
        entries = json.loads((HERE / "prompts.json").read_text())[:limit]
        conversations = [[{"role": "user", "content": entry["text"]}] for entry in entries]
        tokenizer = self.target.tokenizer
        return [
            list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))
            for conversation in conversations
        ]


def load_our_side(target_path: str | None, drafter: str | None, num_draft_tokens: int) -> OurSide:
    from peagle.drafter.checkpoint import load_drafter
    from peagle.targets.load import load_target

    target = load_target(target_path, dtype="float32", device="cpu")
    return OurSide(target, load_drafter(drafter, target), num_draft_tokens)


def export_for_vllm(ours: OurSide, directory: Path) -> None:
    """vLLM's directory of our drafter, in float32: the comparison is not about rounding."""
    import torch

    from peagle.drafter.card import DrafterCard, TargetIdentity
    from peagle.drafter.checkpoint import save_drafter

    config = ours.drafter.config
    identity = TargetIdentity.of(ours.target)
    card = DrafterCard(identity, config.method, ours.num_draft_tokens, config.max_length, config.aux_layer_ids)
    save_drafter(ours.drafter, directory, card, full=True, dtype=torch.float32)


def spoil_mask_token(drafter: Path, spoilt: Path) -> None:
    """A copy of a drafter directory whose config names another mask token; the weights are the same file."""
    spoilt.mkdir()
    for path in drafter.iterdir():
        if path.name != "config.json":
            (spoilt / path.name).symlink_to(path.resolve())
    config = json.loads((drafter / "config.json").read_text())
    present = [key for key in MASK_TOKEN_KEYS if key in config]
    assert present, f"{drafter / 'config.json'} names no mask token: none of {', '.join(MASK_TOKEN_KEYS)}"
    for key in present:
        config[key] += 1000
    (spoilt / "config.json").write_text(json.dumps(config))


def compare(ours: OurSide, judged: dict[str, Any], max_tokens: int) -> Agreement:
    """Decode the judged prompts here and compare."""
    agreement = Agreement(ours.num_draft_tokens)
    for index, request in enumerate(judged["requests"]):
        label = f"prompt {index}"
        prompt_ids = request["prompt_ids"]
        output_ids, steps = ours.decode(prompt_ids, max_tokens)
        target_gap = ours.target_gaps(prompt_ids, output_ids)
        agreement.num_prompts += 1
        compare_outputs(agreement, label, output_ids[:max_tokens], request["output_ids"], target_gap)
        compare_steps(agreement, label, steps, judged_steps(request), target_gap)
    check_is_alive(agreement)
    return agreement


def table(agreement: Agreement) -> Iterator[str]:
    """Accepted drafts per position, ours beside vLLM's, and the totals."""
    yield f"{'position':>10} {'peagle':>8} {'vLLM':>8} {'rate':>8}"
    for position, (mine, other) in enumerate(
        zip(agreement.ours_per_position, agreement.theirs_per_position, strict=True)
    ):
        yield f"{position:>10} {mine:>8} {other:>8} {mine / max(agreement.num_steps, 1):>8.4f}"
    lengths = [
        1 + sum(counts) / max(agreement.num_steps, 1)
        for counts in (agreement.ours_per_position, agreement.theirs_per_position)
    ]
    yield f"{'AL':>10} {lengths[0]:>8.4f} {lengths[1]:>8.4f}"
    num_faulty_drafts = sum(" position " in fault for fault in agreement.faults)
    yield (
        f"{agreement.num_prompts} prompts, {agreement.num_output_tokens} output tokens equal "
        f"({agreement.num_output_ties} prompts end at a target tie); {agreement.num_steps} drafts, "
        f"{agreement.num_compared_drafts} draft tokens, {num_faulty_drafts} differ "
        f"({agreement.num_draft_ties} more at ties below {TIE:g})"
    )


def self_test(ours: OurSide, arguments: argparse.Namespace, target: Path, drafter: Path) -> Agreement:
    """Give vLLM a wrong mask token; the agreement that comes back must have faults in draft tokens."""
    spoilt = drafter.with_name("spoilt")
    spoil_mask_token(drafter, spoilt)
    prompts = ours.prompts(arguments.num_control_prompts)
    judged = run_judge(arguments.vllm_python, target, spoilt, prompts, 32, arguments.num_draft_tokens)
    return compare(ours, judged, 32)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--target", help="a target directory; without it, the embedded target")
    parser.add_argument("--drafter", help="a drafter directory; without it, the one shipped for the embedded target")
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, help="use only the first ones")
    parser.add_argument("--num-control-prompts", type=int, default=2)
    parser.add_argument("--self-test", action="store_true", help="also prove that the comparison can fail")
    parser.add_argument("--json", type=Path, help="write what was found")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    ours = load_our_side(arguments.target, arguments.drafter, arguments.num_draft_tokens)
    target = Path(ours.target.directory)
    work = Path(tempfile.mkdtemp(prefix="peagle-parity-"))
    try:
        export_for_vllm(ours, work / "drafter")
        prompts = ours.prompts(arguments.num_prompts)
        say(f"vLLM decodes {len(prompts)} prompts x {arguments.max_tokens} tokens")
        judged = run_judge(
            arguments.vllm_python, target, work / "drafter", prompts, arguments.max_tokens, ours.num_draft_tokens
        )
        say(f"vLLM {judged['versions']['vllm']} took {judged['total_s']} s; peagle decodes the same")
        agreement = compare(ours, judged, arguments.max_tokens)
        say("compared")
        control = None
        if arguments.self_test:
            control = self_test(ours, arguments, target, work / "drafter")
            say("negative control done")
    finally:
        shutil.rmtree(work)
    return report(arguments, judged, agreement, control)


def report(
    arguments: argparse.Namespace, judged: dict[str, Any], agreement: Agreement, control: Agreement | None
) -> int:
    """Print the table and the differences, write the JSON, and give the exit status."""
    print(f"peagle and vLLM {judged['versions']['vllm']}, float32, greedy, K={arguments.num_draft_tokens}")
    print("\n".join(table(agreement)))
    for line in agreement.ties:
        print(f"tie    {line}")
    for line in agreement.faults:
        print(f"FAULT  {line}")
    holds = not agreement.faults
    if control is not None:
        num_noticed = sum(" position " in fault for fault in control.faults)
        holds = holds and num_noticed > 0
        equal = control.ours_per_position == control.theirs_per_position
        print(
            f"negative control, wrong mask token: {num_noticed} of {control.num_compared_drafts} draft tokens differ"
            f" (must be more than 0); accepted per position {'equal' if equal else 'differs'}"
        )
    print(f"vLLM parity: {'holds' if holds else 'DOES NOT HOLD'}")
    if arguments.json:
        versions = {"versions": judged["versions"], "loaded": judged["loaded"], "judge_s": judged["total_s"]}
        found = {"holds": holds, **versions, "agreement": asdict(agreement)}
        arguments.json.write_text(json.dumps(found | {"control": control and asdict(control)}, indent=2) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    from peagle.errors import PeagleError

    try:
        sys.exit(main())
    except PeagleError as error:
        sys.exit(f"error: {error}")
