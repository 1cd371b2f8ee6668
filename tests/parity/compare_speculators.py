"""Compare peagle's drafter with speculators' P-EAGLE training model: same weights, same text, same slots.

    python tests/parity/compare_speculators.py --speculators-python .venv-speculators/bin/python [--json OUT.json]

speculators samples the slots. For them its attention mask must equal `drafter.slots.visible` bit for bit, its logits
ours within `TOLERANCE` at every depth with the same most likely token, and its loss our KL. With `--self-test` it is
then given a drafter with a wrong mask token, which must show at every depth but 0.

Shapes: S slots, N of them with a loss, T tokens, A concatenated aux width, U draft vocabulary.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-4
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class DepthRow:
    """Logits of all slots of one depth, ours beside theirs."""

    depth: int
    num_slots: int
    max_difference: float
    num_top_token_differs: int


@dataclass(frozen=True)
class Agreement:
    num_slots: int
    num_mask_bits_differ: int
    depths: list[DepthRow]
    our_loss: float
    their_loss: float

    @property
    def faults(self) -> list[str]:
        """What does not hold, in words; empty means agreement."""
        found = []
        if self.num_mask_bits_differ:
            found.append(f"{self.num_mask_bits_differ} of {self.num_slots**2} attention mask entries differ")
        for row in self.depths:
            if row.max_difference > TOLERANCE or row.num_top_token_differs:
                found.append(
                    f"depth {row.depth}: logits differ by up to {row.max_difference:.1e} (allowed {TOLERANCE:g}), "
                    f"the top token in {row.num_top_token_differs} of {row.num_slots} slots"
                )
        if abs(self.our_loss - self.their_loss) > TOLERANCE:
            found.append(f"the KL loss is {self.our_loss:.6f} here and {self.their_loss:.6f} in speculators")
        return found


def make_inputs(target: Any, num_new_tokens: int) -> dict[str, Tensor]:
    """One prompt with the target's greedy answer, and what speculators needs to know of the target over it."""
    text = json.loads((HERE / "prompts.json").read_text())[0]["prompt"]
    conversation = [{"role": "user", "content": text}]
    prompt_ids = target.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    token_ids = target.model.generate(
        torch.tensor([prompt_ids]), max_new_tokens=num_new_tokens, min_new_tokens=num_new_tokens, do_sample=False
    )
    before_norm: list[Tensor] = []
    # speculators applies the target's final norm itself.
    norm = target.model.get_decoder().norm
    hook = norm.register_forward_pre_hook(lambda _module, arguments: before_norm.append(arguments[0]))
    output = target.forward(token_ids)
    hook.remove()
    loss_mask = torch.zeros(token_ids.shape[1], dtype=torch.long)
    loss_mask[len(prompt_ids) :] = 1
    return {
        "token_ids": token_ids[0].contiguous(),
        "aux_hidden": output.aux_hidden_BTA[0].contiguous(),
        "last_hidden": before_norm[0][0].contiguous(),
        "loss_mask": loss_mask,
        "target_logits": output.logits_BTV[0].contiguous(),
    }


def run_judge(
    speculators_python: Path, target: Path, drafter: Path, inputs: dict[str, Tensor], num_depths: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Run the speculators judge in its own environment; its tensors and the versions it ran with."""
    with tempfile.TemporaryDirectory(prefix="peagle-parity-") as name:
        folder = Path(name)
        given = {key: value for key, value in inputs.items() if key != "target_logits"}
        save_file(given, folder / "inputs.safetensors")
        command = [speculators_python, HERE / "judge_speculators.py", target, drafter]
        command += [folder / "inputs.safetensors", folder / "out.safetensors", num_depths]
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment["HF_HUB_OFFLINE"] = "1"
        log = folder / "log"
        try:
            with log.open("w") as stream:
                subprocess.run(
                    [str(part) for part in command],
                    check=True,
                    timeout=300,
                    env=environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(log.read_text()[-6000:])
            raise SystemExit(f"the speculators judge failed: {error}") from error
        with safe_open(folder / "out.safetensors", "pt") as file:
            versions = dict(file.metadata())
        return load_file(folder / "out.safetensors"), versions


def our_logits(drafter: Any, inputs: dict[str, Tensor], anchor: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Our draft logits [S, U] and attention mask [S, S] for the judge's slots."""
    from peagle.drafter.slots import Slots, slot_inputs, visible

    slots = Slots(anchor[None], depth[None])
    visible_BSS = visible(slots, slots)
    with torch.no_grad():
        fused_BTD = drafter.fuse(inputs["aux_hidden"][None])
        fused_mask_D = drafter.fuse(drafter.mask_hidden[None, None])[0, 0]
        token_ids_BS, fused_BSD = slot_inputs(
            slots, inputs["token_ids"][None], fused_BTD, drafter.config.mask_token_id, fused_mask_D
        )
        output = drafter(token_ids_BS, fused_BSD, slots.position_BS, visible_BSS)
        return drafter.logits(output.normed_BSD)[0], visible_BSS[0]


def our_loss(drafter: Any, logits_SU: Tensor, inputs: dict[str, Tensor], judged: dict[str, Tensor]) -> float:
    """Our KL over the slots that count in theirs. The target's opinion of label i is its logits row i - 1."""
    from peagle.objective.losses import judge_slots

    counted_S = judged["in_loss"].bool()
    label_N = (judged["anchor"] + judged["depth"] + 2)[counted_S]
    num_draft_ids = drafter.config.draft_vocab_size
    is_pruned = num_draft_ids < drafter.config.vocab_size
    draft_to_target_U = drafter.to_target_ids(torch.arange(num_draft_ids)) if is_pruned else None
    share_N = torch.ones(len(label_N))
    judged = judge_slots(logits_SU[counted_S], inputs["target_logits"], label_N - 1, draft_to_target_U, "kl", share_N)
    return float(judged.loss_N.mean())


def compare(drafter: Any, inputs: dict[str, Tensor], judged: dict[str, Tensor]) -> Agreement:
    logits_SU, visible_SS = our_logits(drafter, inputs, judged["anchor"], judged["depth"])
    difference_S = (logits_SU - judged["logits"]).abs().amax(-1)
    top_differs_S = logits_SU.argmax(-1) != judged["logits"].argmax(-1)
    depths = []
    for depth in judged["depth"].unique().tolist():
        chosen_S = judged["depth"] == depth
        depths.append(
            DepthRow(
                depth, int(chosen_S.sum()), float(difference_S[chosen_S].max()), int(top_differs_S[chosen_S].sum())
            )
        )
    return Agreement(
        num_slots=len(logits_SU),
        num_mask_bits_differ=int((visible_SS != judged["visible"]).sum()),
        depths=depths,
        our_loss=our_loss(drafter, logits_SU, inputs, judged),
        their_loss=float(judged["loss"]),
    )


def export_for_speculators(target: Any, drafter: Any, directory: Path) -> None:
    """The full directory of our drafter, in float32: the comparison is not about rounding."""
    from peagle.checkpoint.card import DrafterCard, TargetIdentity
    from peagle.checkpoint.native import save_drafter

    config = drafter.config
    identity = TargetIdentity.of(target)
    card = DrafterCard(identity, config.method, config.num_draft_tokens or 1, config.max_length, config.aux_layer_ids)
    save_drafter(drafter, directory, card, full=True, dtype=torch.float32)


def spoil_mask_token(drafter: Path, spoilt: Path) -> None:
    """A copy of a drafter directory whose config names another mask token; the weights are the same file."""
    spoilt.mkdir()
    (spoilt / "model.safetensors").symlink_to((drafter / "model.safetensors").resolve())
    config = json.loads((drafter / "config.json").read_text())
    for key in MASK_TOKEN_KEYS:
        if key in config:
            config[key] += 1000
    (spoilt / "config.json").write_text(json.dumps(config))


def report(versions: dict[str, str], agreement: Agreement, control: Agreement | None, json_path: Path | None) -> int:
    """Print the table and the differences, write the JSON, and give the exit status."""
    print(f"peagle and speculators {versions['speculators']}, float32, {agreement.num_slots} slots")
    print(f"{'depth':>10} {'slots':>8} {'max |difference|':>18} {'top token differs':>18}")
    for row in agreement.depths:
        print(f"{row.depth:>10} {row.num_slots:>8} {row.max_difference:>18.1e} {row.num_top_token_differs:>18}")
    print(f"attention mask: {agreement.num_mask_bits_differ} of {agreement.num_slots**2} entries differ")
    print(f"KL loss: {agreement.our_loss:.6f} here, {agreement.their_loss:.6f} in speculators")
    for line in agreement.faults:
        print(f"FAULT  {line}")
    holds = not agreement.faults
    if control is not None:
        by_depth = {row.depth: row.max_difference for row in control.depths}
        noticed = by_depth.pop(0) <= TOLERANCE and all(value > TOLERANCE for value in by_depth.values())
        holds = holds and noticed
        print(
            f"negative control, wrong mask token: logits of depths above 0 differ by at least "
            f"{min(by_depth.values()):.1e} (must exceed {TOLERANCE:g}): {'noticed' if noticed else 'NOT NOTICED'}"
        )
    print(f"speculators parity: {'holds' if holds else 'DOES NOT HOLD'}")
    if json_path:
        found = {"holds": holds, "versions": versions, "agreement": asdict(agreement)}
        json_path.write_text(json.dumps(found | {"control": control and asdict(control)}, indent=2) + "\n")
    return 0 if holds else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators-python", type=Path, required=True, help="the interpreter of its environment")
    parser.add_argument("--target", help="a target directory; without it, the embedded target")
    parser.add_argument("--drafter", help="a drafter directory; without it, the one shipped for the embedded target")
    parser.add_argument("--num-depths", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64, help="length of the answer whose slots are compared")
    parser.add_argument("--self-test", action="store_true", help="also prove that the comparison can fail")
    parser.add_argument("--json", type=Path, help="write what was found")
    arguments = parser.parse_args()

    from peagle.checkpoint.native import load_drafter
    from peagle.targets.load import load_target

    target = load_target(arguments.target, dtype="float32", device="cpu")
    drafter = load_drafter(arguments.drafter, target).without_pair_head()
    inputs = make_inputs(target, arguments.max_tokens)
    work = Path(tempfile.mkdtemp(prefix="peagle-parity-"))
    try:
        export_for_speculators(target, drafter, work / "drafter")
        interpreter, num_depths = arguments.speculators_python, arguments.num_depths
        judged, versions = run_judge(interpreter, target.directory, work / "drafter", inputs, num_depths)
        agreement = compare(drafter, inputs, judged)
        control = None
        if arguments.self_test:
            spoil_mask_token(work / "drafter", work / "spoilt")
            judged, _ = run_judge(interpreter, target.directory, work / "spoilt", inputs, num_depths)
            control = compare(drafter, inputs, judged)
    finally:
        shutil.rmtree(work)
    return report(versions, agreement, control, arguments.json)


if __name__ == "__main__":
    from peagle.errors import PeagleError

    try:
        sys.exit(main())
    except PeagleError as error:
        sys.exit(f"error: {error}")
