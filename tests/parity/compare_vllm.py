"""Compare peagle's reference decoder with vLLM: same target, same drafter, same prompts, draft token by draft token.

    python tests/parity/compare_vllm.py --vllm-python .venv-vllm/bin/python [--drafter DIR] [--prompts FILE] \
        [--num-draft-tokens K] [--json OUT.json]

The judge and the comparison are `peagle.export`'s own, those that `peagle doctor --engine vllm` uses. Every forgiven
difference is printed. With `--self-test` vLLM is then given a drafter with a wrong mask token, which the comparison
must notice.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parity.agreement_table import table
from peagle.compare.vllm_parity import Agreement, OurSide, compare, run_judge

HERE = Path(__file__).resolve().parent
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def prompts_of(ours: OurSide, path: Path, limit: int | None) -> list[list[int]]:
    """The prompts of a file, or `limit` of them at even distances: all kinds are among a few."""
    from peagle.compare.answers import render_prompt
    from peagle.data.prompts import read_prompts

    prompts = read_prompts(path)
    if limit is not None and limit < len(prompts):
        prompts = [prompts[index * len(prompts) // limit] for index in range(limit)]
    return [render_prompt(ours.target, prompt) for prompt in prompts]


def load_our_side(target_path: str | None, drafter: str | None, num_draft_tokens: int) -> OurSide:
    from peagle.checkpoint.native import load_drafter
    from peagle.targets.load import load_target

    target = load_target(target_path, dtype="float32", device="cpu")
    return OurSide(target, load_drafter(drafter, target).without_pair_head(), num_draft_tokens)


def export_for_vllm(ours: OurSide, directory: Path) -> None:
    """vLLM's directory of our drafter, in float32: the comparison is not about rounding."""
    import torch

    from peagle.checkpoint.card import DrafterCard, TargetIdentity
    from peagle.checkpoint.native import save_drafter

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


def self_test(ours: OurSide, arguments: argparse.Namespace, target: Path, drafter: Path) -> Agreement:
    """Give vLLM a wrong mask token; the agreement that comes back must have faults in draft tokens."""
    spoilt = drafter.with_name("spoilt")
    spoil_mask_token(drafter, spoilt)
    prompts = prompts_of(ours, arguments.prompts, arguments.num_control_prompts)
    judged = run_judge(arguments.vllm_python, target, spoilt, prompts, 32, arguments.num_draft_tokens, parallel=True)
    return compare(ours, judged, 32)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--target", help="a target directory; without it, the embedded target")
    parser.add_argument("--drafter", help="a drafter directory; without it, the one shipped for the embedded target")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.json", help="any file that peagle eval takes")
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, help="use so many, spread over the file")
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
        prompts = prompts_of(ours, arguments.prompts, arguments.num_prompts)
        say(f"vLLM decodes {len(prompts)} prompts x {arguments.max_tokens} tokens")
        judged = run_judge(
            arguments.vllm_python,
            target,
            work / "drafter",
            prompts,
            arguments.max_tokens,
            ours.num_draft_tokens,
            parallel=ours.drafter.config.parallel,
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
