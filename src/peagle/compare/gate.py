"""The gate: is this directory, as an engine reads it, still the drafter that its card describes?

Checks run in order, and the first that fails names the cause: files, target identity, config, tensors, then logits at
every depth and acceptance. Without evidence on the card some checks cannot be made; the verdict lists them.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from peagle.checkpoint import vllm
from peagle.checkpoint.card import CARD_NAME, DrafterCard, Evidence, TargetIdentity, card_of, read_card
from peagle.checkpoint.config_json import read_config
from peagle.checkpoint.layouts import CONFIG_NAME, read_tensors
from peagle.checkpoint.native import load_drafter, state_of
from peagle.checkpoint.reading import Difference, Files, Reading, read_files
from peagle.compare.acceptance import measure
from peagle.compare.answers import decode_with_reference
from peagle.compare.causes import IDENTITY, check_meaning, check_plausible, check_tensors
from peagle.compare.evidence import (
    MAX_TOKENS,
    draft_logprobs,
    gate_prompts,
    golden_distances,
    greedy_params,
    prompts_hash,
    usual_depth,
)
from peagle.compare.rounded import effect_on, is_implausible, rounding_of
from peagle.compare.vllm_parity import PYTHON_VARIABLE, JudgeError, OurSide, compare, run_judge
from peagle.compare.vllm_rules import read_as_vllm
from peagle.decoding.acceptance import Acceptance
from peagle.drafter.model import Drafter
from peagle.errors import PeagleError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

Engine = Literal["native", "vllm"]
Status = Literal["pass", "FAIL", "warning", "not checked", "not reached"]

LOGPROB_TOLERANCE = 0.01
"""Allowed error of golden log-probabilities in float32. Machines differ by 1e-4; the mildest known fault, by 0.9."""
TOLERANCE_STEPS = 96
"""The same in low precision, in units of the dtype's eps: 0.75 in bfloat16."""
RATE_TOLERANCE = 0.02
"""Allowed error of an acceptance rate in float32, or two drafts if that is more."""


@dataclass(frozen=True)
class Check:
    """One check: what was found and, if it failed, the likely cause."""

    name: str
    status: Status
    found: str
    cause: str | None = None


@dataclass(frozen=True)
class Verdict:
    engine: Engine
    checks: tuple[Check, ...]

    @property
    def failure(self) -> Check | None:
        return next((check for check in self.checks if check.status == "FAIL"), None)

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def unchecked(self) -> list[str]:
        return [check.name for check in self.checks if check.status == "not checked"]

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "passed": self.passed,
            "first_difference": None if self.failure is None else asdict(self.failure),
            "not_checked": self.unchecked,
            "checks": [asdict(check) for check in self.checks],
        }


class _Open(Exception):  # noqa: N818  raised by a check that cannot be made or that only warns
    def __init__(self, found: str, status: Status = "not checked") -> None:
        super().__init__(found)
        self.found, self.status = found, status


class Gate:
    """Checks one directory for one target and engine. Call `run` once."""

    def __init__(
        self,
        directory: Path,
        target: "HFTarget",
        engine: Engine,
        *,
        prompts: list[list[int]] | None = None,
        vllm_python: Path | None = None,
        allow_mismatch: bool = False,
    ) -> None:
        """`prompts` replace the gate's own."""
        self.directory, self.target, self.engine = directory, target, engine
        self.prompts = gate_prompts(target.tokenizer, target.max_length) if prompts is None else prompts
        self.vllm_python, self.allow_mismatch = vllm_python, allow_mismatch
        self.card: DrafterCard | None = None
        self.files: Files
        self.reading: Reading
        self.drafter: Drafter
        self.is_other_target = False
        self.rounding: str | None = None
        """how the target's weights were rounded, if the card is for plain ones"""

    def run(self, on_check: Callable[[str], None] = lambda _: None) -> Verdict:
        """Run the checks until one fails. `on_check` gets the name of each."""
        checks: list[Check] = []
        with tempfile.TemporaryDirectory(prefix="peagle-gate-") as scratch:
            for name, examine in self._steps(Path(scratch)):
                if checks and checks[-1].status in ("FAIL", "not reached"):
                    checks.append(Check(name, "not reached", ""))
                    continue
                on_check(name)
                checks.append(self._check(name, examine))
        return Verdict(self.engine, tuple(checks))

    @cached_property
    def identity(self) -> TargetIdentity:
        return TargetIdentity.of(self.target)

    @property
    def evidence(self) -> Evidence | None:
        return None if self.card is None else self.card.evidence

    def _check(self, name: str, examine: Callable[[], str]) -> Check:
        try:
            return Check(name, "pass", examine())
        except _Open as outcome:
            return Check(name, outcome.status, outcome.found)
        except PeagleError as error:
            return Check(name, "FAIL", error.message, error.hint)

    def _steps(self, scratch: Path) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "files", self._files
        yield "card", self._card
        for key, (name, found, cause) in IDENTITY.items():
            yield name, partial(self._identity, key, found, cause)
        # The compact form is read by our rules, exported, and the result is read by vLLM's.
        is_compact = hasattr(self, "files") and self.files.is_compact
        if self.engine == "native" or is_compact:
            yield "config", self._native_meaning
            yield "tensors", self._tensors
        if self.engine == "vllm":
            if is_compact:
                yield "export", partial(self._export, scratch / "drafter")
            yield "vLLM's rules", self._vllm_rules
            yield "config in vLLM", self._meaning
            yield "tensors in vLLM", self._tensors
        yield "lengths", self._lengths
        yield "dtype", self._dtype
        yield "load", self._load
        yield "logits by depth", self._logits
        yield "acceptance", self._acceptance
        if self.engine == "vllm":
            yield "vLLM itself", self._vllm_run

    def _files(self) -> str:
        self.files = read_files(self.directory)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.files.tensors.values())
        form = "compact form" if self.files.is_compact else "full form"
        return f"{len(self.files.tensors)} tensors, {num_bytes / 2**20:.1f} MiB, {form}"

    def _card(self) -> str:
        self.card = read_card(self.directory)
        if self.card is None:
            raise _Open(f"no {CARD_NAME}, so target and weights cannot be identified")
        if self.card.evidence is None:
            raise _Open(
                "the card has no evidence; if the drafter is known to be good, `peagle doctor DIR --record` adds it"
            )
        return f"trained for {self.card.target.name!r}, evidence recorded in {self.card.evidence.dtype}"

    def _identity(self, key: str, found: str, cause: str) -> str:
        if self.card is None:
            raise _Open("no card to compare with")
        is_same, rounding = getattr(self.card.target, key) == getattr(self.identity, key), rounding_of(self.target)
        if key == "weights" and rounding is not None and (self.target.rounded_to is not None or not is_same):
            self.rounding = rounding
            if is_same:
                raise _Open(f"as in training before they were rounded to {rounding}", "warning")
            raise _Open(
                f"rounded ({rounding}), so their fingerprint differs from training, and that they are of the same "
                "model is not proved; `serve` needs --allow-mismatch",
                "warning",
            )
        if is_same:
            return "as in training"
        if self.allow_mismatch:
            self.is_other_target = True
            raise _Open(f"{found} (allowed by --allow-mismatch)", "warning")
        if key == "weights" and self.target.dtype == torch.float16:
            cause += "; or float16 rounded them, try bfloat16"
        raise Difference(found, cause)

    def _native_meaning(self) -> str:
        tensors = read_tensors(self.directory)
        repairs: list[str] = []
        config = read_config(self.directory / CONFIG_NAME, tensors, self.target, self.card, repairs)
        self.reading = Reading(config, state_of(config, tensors, self.target))
        said = self._meaning()
        if repairs:
            raise _Open(f"{said}; read differently from what is written: {'; '.join(repairs)}", "warning")
        return said

    def _meaning(self) -> str:
        if self.evidence is None:
            config = self.reading.config
            raise _Open(f"aux layers {list(config.aux_layer_ids)}, mask token {config.mask_token_id}; no evidence")
        return check_meaning(self.evidence, self.reading.config)

    def _tensors(self) -> str:
        if self.evidence is None:
            beware = check_plausible(self.files, self.reading)
            raise _Open(
                beware or "finite and plausible; no fingerprints recorded", "warning" if beware else "not checked"
            )
        is_other = self.is_other_target or self.rounding is not None
        return check_tensors(self.evidence, self.files, self.reading, self.target, is_other_target=is_other)

    def _export(self, directory: Path) -> str:
        drafter = load_drafter(self.directory, self.target, allow_mismatch=True)
        vllm.write(drafter, self.target, card_of(drafter, self.target), directory)
        self.directory, self.files = directory, read_files(directory)
        return "exported from the compact form, as `peagle export` does; the export is checked from here on"

    def _vllm_rules(self) -> str:
        recorded = self.evidence.config.get("parallel") if self.evidence is not None else None
        has_mask = any("mask_hidden" in name for name in self.files.tensors)
        parallel = has_mask if recorded is None else bool(recorded)
        self.reading = read_as_vllm(self.files, self.target, parallel=parallel)
        config = self.reading.config
        mask = f", mask token {config.mask_token_id}" if parallel else ""
        return f"vLLM accepts the names and reads {config.method}, aux layers {list(config.aux_layer_ids)}{mask}"

    def _lengths(self) -> str:
        positions, most = self.reading.config.max_length, self.target.max_length
        trained = "" if self.card is None else f"; trained on up to {self.card.max_length} tokens"
        said = f"{positions} positions, the target has {most}{trained}"
        if positions < most:
            raise _Open(f"{said}; vLLM without the fix of issue 48894 crashes on longer texts", "warning")
        return said

    def _dtype(self) -> str:
        stored = self.files.dtypes
        unknown = sorted(set(stored) - {"float32", "bfloat16", "float16"})
        if unknown or not stored:
            raise Difference(
                f"the weights are stored as {', '.join(unknown)}", "a quantized copy, which engines cannot draft with"
            )
        served = str(self.target.dtype).removeprefix("torch.")
        said = f"stored in {', '.join(stored)}, served in {served}"
        named = self.files.config.get("torch_dtype") or self.files.config.get("dtype")
        if named is not None and named not in stored:
            raise _Open(f"{said}; config.json says {named}", "warning")
        return said

    def _load(self) -> str:
        if self.engine == "native":
            allow_mismatch = self.allow_mismatch or self.rounding is not None
            drafter = load_drafter(self.directory, self.target, allow_mismatch=allow_mismatch)
            self.drafter = drafter.without_pair_head()  # the evidence is
        else:
            self.drafter = self.reading.build(self.target)
        return f"{self.drafter.config.method}, {self.drafter.config.num_layers} layers"

    def _logits(self) -> str:
        if self.evidence is None or not self.evidence.golden:
            raise _Open("the card has no golden drafts")
        if self.is_other_target or self.rounding is not None:
            raise _Open(f"the golden drafts belong to {'the plain' if self.rounding else 'another'} target")
        by_draft = []
        for text in self.evidence.golden:
            newest = [draft.newest for draft in text.drafts]
            depth = len(text.drafts[0].token_ids)
            found = draft_logprobs(self.target, self.drafter, text.token_ids, newest, depth)
            for draft, logprobs_KV in zip(text.drafts, found, strict=True):
                by_draft.append(golden_distances(draft, logprobs_KV, self.drafter.config.parallel))
        largest = [max(distances) for distances in zip_longest(*by_draft, fillvalue=0.0)]
        precisions = {getattr(torch, self.evidence.dtype, torch.bfloat16), self.target.dtype}
        limit = max(LOGPROB_TOLERANCE, TOLERANCE_STEPS * max(torch.finfo(dtype).eps for dtype in precisions))
        for depth, distance in enumerate(largest):
            if not distance <= limit:
                raise Difference(
                    f"log-probabilities at depth {depth} differ by {distance:.3g} from the recorded ones",
                    "config and tensors match, so the engine computes differently: its version or its precision",
                )
        shown = " ".join(f"{distance:.0e}" for distance in largest)
        return f"match within {limit:g}; by depth {shown}"

    def _acceptance(self) -> str:
        depth = usual_depth(self.drafter.config)
        recorded = None if self.evidence is None else self.evidence.acceptance
        if recorded is not None:
            depth = len(recorded.accepted_per_position)
        if not self.prompts:
            raise _Open(f"no prompt fits into the target's {self.target.max_length} tokens; give --prompts")
        measured = self._measure(depth)
        said = f"{_rates(measured)} in {measured.num_drafts} drafts, length {measured.acceptance_length:.3f}"
        is_alive_on_card = recorded is None or recorded.accepted_per_position[0] > 0
        if measured.num_drafts and not measured.accepted_per_position[0] and is_alive_on_card:
            raise Difference(
                f"no draft token was accepted: {said}", "the drafter belongs to another target, or is broken"
            )
        if recorded is None or recorded.prompts != prompts_hash(self.prompts):
            self._compare_with_named(measured, said)
            raise _Open(f"{said}; the card has no figure for these prompts")
        if self.is_other_target:
            raise _Open(f"{said}; the card's figure is for another target")
        expected = Acceptance(recorded.num_drafts, recorded.accepted_per_position)
        if self.rounding is not None:
            found = effect_on(expected, measured)
            if is_implausible(expected, measured):
                raise Difference(found, "the target is another model, or rounding has broken it")
            raise _Open(f"{found}; {said}", "warning")
        is_exact = self.evidence is not None and self.evidence.dtype == "float32" and self.target.dtype == torch.float32
        for position, (ours, theirs) in enumerate(zip(measured.per_position, expected.per_position, strict=True)):
            num_drafts = max(1, min(measured.num_drafts, expected.num_drafts))
            limit = max(RATE_TOLERANCE, 2 / num_drafts) if is_exact else max(0.1, 3 * (0.5 / num_drafts) ** 0.5)
            if abs(ours - theirs) > limit:
                raise Difference(
                    f"at position {position} {ours:.3f} of the drafts are accepted, on the card {theirs:.3f}",
                    "all other checks pass, so the engine drafts or verifies differently; run `peagle lossless`",
                )
        if not expected.num_accepted:
            raise _Open(f"{said}, as recorded: no draft token is ever accepted", "warning")
        return f"{said}; the card's {_rates(expected)}"

    def _compare_with_named(self, measured: Acceptance, said: str) -> None:
        """Figures for other prompts cannot be compared exactly, but a small fraction of them is a fault."""
        named = [] if self.card is None else self.card.acceptance.values()
        lengths = [figure["acceptance_length"] for figure in named if figure.get("acceptance_length")]
        if lengths and not self.is_other_target and measured.acceptance_length - 1 < 0.25 * (min(lengths) - 1):
            raise Difference(
                f"{said}; the lowest acceptance length on the card is {min(lengths):.3f}",
                "aux layers, norms, rotary embedding or target differ from training",
            )

    def _measure(self, depth: int) -> Acceptance:
        """Acceptance in our engine; in the reference decoder if vLLM's reading is checked."""
        params = greedy_params(MAX_TOKENS)
        if self.engine == "native":
            return measure(self.target, self.drafter, self.prompts, params, depth)[0]
        return decode_with_reference(self.target, self.prompts, [params] * len(self.prompts), self.drafter, depth)[1]

    def _vllm_run(self) -> str:
        if self.vllm_python is None:
            raise _Open(f"vLLM is not installed, so only its reading rules were checked; set {PYTHON_VARIABLE}")
        if self.target.directory is None or self.target.dtype != torch.float32:
            raise _Open("comparing with vLLM needs a target directory and --dtype float32")
        if not self.prompts:
            raise _Open("no prompt to run; give --prompts")
        depth = usual_depth(self.drafter.config)
        given = (self.vllm_python, self.target.directory, self.directory, self.prompts, MAX_TOKENS, depth)
        try:
            judged = run_judge(*given, parallel=self.drafter.config.parallel)
        except JudgeError as error:
            raise Difference(
                f"vLLM did not run it: {error.reason}", "vLLM refuses the directory, or does not start on this machine"
            ) from error
        agreement = compare(OurSide(self.target, self.drafter, depth), judged, MAX_TOKENS)
        if agreement.faults:
            raise Difference(
                f"{len(agreement.faults)} differences, first {agreement.faults[0]}",
                f"vLLM {judged['versions']['vllm']} computes differently from the same files; please report it",
            )
        counts = "/".join(map(str, agreement.theirs_per_position))
        return (
            f"vLLM {judged['versions']['vllm']} drafted the same {agreement.num_compared_drafts} tokens in "
            f"{agreement.num_steps} drafts, accepted by position {counts}; {len(agreement.ties)} ties forgiven"
        )


def _rates(acceptance: Acceptance) -> str:
    return " ".join(f"{share:.2f}" for share in acceptance.per_position)
