"""Differences between a drafter as an engine reads it and its card, each with the likely cause."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.checkpoint.card import Evidence
from peagle.checkpoint.config_json import num_differing_rows
from peagle.checkpoint.native import COMPACT_TENSOR, MISSING_HINTS
from peagle.checkpoint.reading import Difference, Files, Reading
from peagle.checkpoint.vllm import LENGTH_FREE_ROPE
from peagle.compare.evidence import fingerprint, meaning_of, shared_tables
from peagle.drafter.config import DrafterConfig
from peagle.drafter.vocab import read_table

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

TABLES = ("embed_tokens.weight", "lm_head.weight")
"""Tables that the compact form takes from the target and the full form stores."""

ZEROED = "the learned placeholder state was zeroed: a buffer saved before it was filled, or made anew by a conversion"
ABSOLUTE = "another framework's convention; engines compute target = draft + d2t[draft], so subtract the index"
OTHER_STEP = "it is from another drafter or training step"
CAUSES = {
    "parallel": "mask_hidden or the mask token was lost or added: P-EAGLE would run as EAGLE-3, or the reverse",
    "mask_token_id": (
        "another embedding row would be used; if several mask token keys are present, engines take the first they know "
        "(mask_token_id, pard_token, ptd_token_id)"
    ),
    "norm_before_residual": (
        "the norm flag was flipped or left to a default, which is true in EAGLE-3 tools and false for P-EAGLE"
    ),
    "fc_norm": "the norm flag was flipped or lost in a conversion: aux states would reach fc unnormed, or normed twice",
    "norm_before_fc": "the norm flag was flipped or lost in a conversion: aux states would reach fc at another scale",
    "norm_output": "the norm flag was flipped: the next draft step would be fed another state",
    "max_length": "max_position_embeddings was edited; scaled rotary embeddings depend on it",
    "draft_vocab_size": "config.json and d2t or lm_head belong to different drafters",
    "sliding_layers": "layer_types was lost or added in a conversion",
    "sliding_window": "sliding_window was edited",
    "aux_layer_ids": "the ids belong to another drafter or convention; id i means the residual stream entering layer i",
    "rope_parameters": "the scaling of the rotary embedding was lost or changed in a conversion",
}
IDENTITY = {
    "weights": (
        "target weights",
        "the target's weights are not those it was trained on",
        "another revision, fine-tune or quantization of the target",
    ),
    "tokenizer": (
        "tokenizer",
        "the target's tokenizer is not the one used in training",
        "tokens were added, or the tokenizer is from another revision",
    ),
    "chat_template": (
        "chat template",
        "the target's chat template is not the one used in training",
        "the template was edited, or is from another revision; every prompt starts with unfamiliar tokens",
    ),
}
"""Parts of a target's identity: the name of the check, what is found if it differs, and the likely cause."""
OWN_TABLE = "this drafter trained the table itself; the target's cannot replace it"
MISSING_CAUSES = MISSING_HINTS | dict.fromkeys(TABLES, OWN_TABLE)


def check_meaning(evidence: Evidence, config: DrafterConfig) -> str:
    """Compare all recorded settings; the first that differs is raised. Returns a summary."""
    found = meaning_of(config)
    is_length_free = config.rope_parameters.get("rope_type") in LENGTH_FREE_ROPE
    for name, recorded in evidence.config.items():
        if name == "max_length" and is_length_free:
            continue  # it only sizes a table, which exports extend to the target's length
        if name in found and not _same(recorded, found[name]):
            raise Difference(f"{name} is {found[name]}, recorded was {recorded}", _cause(name, recorded, found[name]))
    return f"{len(evidence.config)} settings match the card"


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, float) or isinstance(theirs, float):
        is_number = isinstance(ours, int | float) and isinstance(theirs, int | float)
        return is_number and math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def _cause(name: str, recorded: Any, found: Any) -> str:
    if name == "aux_layer_ids" and found in ([index + step for index in recorded] for step in (1, -1)):
        return (
            "the ids are off by one: some tools number a layer's output, engines the residual stream entering it "
            "(id i = output of layer i - 1)"
        )
    if name == "rope_parameters" and recorded.get("rope_theta") != found.get("rope_theta"):
        what = f"rope theta is {found.get('rope_theta'):g} instead of {recorded.get('rope_theta'):g}"
        return f"{what}: the base was lost in a conversion (10000 is the usual default)"
    return CAUSES.get(name, "config.json was edited, or belongs to another drafter than the card")


def check_tensors(
    evidence: Evidence, files: Files, reading: Reading, target: "HFTarget", *, is_other_target: bool = False
) -> str:
    """Compare all recorded fingerprints; the first tensor that differs is raised. Returns a summary.

    Stored tables must be the target's, unless another target is allowed.
    """
    state = reading.state
    changed = []
    for name, recorded in evidence.tensors.items():
        if name not in state:
            cause = MISSING_CAUSES.get(name, "the file is incomplete, or belongs to another drafter")
            raise Difference(f"the tensor {name!r} is missing", cause)
        if fingerprint(state[name]) != recorded:
            changed.append(name)
    is_rounded = files.dtypes == ["float16"]
    for name in (COMPACT_TENSOR, "mask_hidden", "d2t"):  # specific causes first, unless most tensors differ
        if name in changed and (is_rounded or len(changed) <= len(evidence.tensors) // 2):
            found, cause = _diagnose(name, evidence, files, reading, target)
            if not (is_rounded and cause == OTHER_STEP):
                raise Difference(found, cause)
    _check_changed(changed, evidence, state, is_rounded)
    for name in sorted(state.keys() - evidence.tensors.keys()):
        if name not in TABLES:
            raise Difference(
                f"the tensor {name!r} was not recorded", "the file belongs to another drafter than the card"
            )
        if not is_other_target:
            _check_table(name, reading, target)
    if changed:
        return (
            f"stored in float16, which rounds: {len(changed)} of {len(evidence.tensors)} tensors are left to the logits"
        )
    return f"{len(evidence.tensors)} tensors match the card"


def check_plausible(files: Files, reading: Reading) -> str:
    """Check tensors without evidence; returns a warning, or nothing."""
    for name, tensor in sorted(reading.state.items()):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Difference(f"{name!r} holds NaN or infinite values", "the file is damaged; copy or train it again")
    if reading.config.parallel and not bool(reading.state.get("mask_hidden", torch.ones(1)).any()):
        raise Difference("mask_hidden is all zeros", ZEROED)
    if "d2t" in reading.state:
        _, held_ids = read_table(reading.state["d2t"], None, reading.config.vocab_size)
        if held_ids:
            raise Difference("d2t holds absolute target ids, not offsets", ABSOLUTE)
    if reading.config.parallel and not files.is_compact and "embed_tokens.weight" not in files.tensors:
        return "embed_tokens.weight is absent: if the mask row was trained, it is lost"
    return ""


def _diagnose(name: str, evidence: Evidence, files: Files, reading: Reading, target: "HFTarget") -> tuple[str, str]:
    """What was found, and the cause, of a changed tensor that is often damaged in a known way."""
    if name == COMPACT_TENSOR:
        return _diagnose_mask_row(files, reading, target)
    if name == "mask_hidden":
        is_zero = not bool(reading.state[name].any())
        return ("mask_hidden is all zeros", ZEROED) if is_zero else ("mask_hidden has other values", OTHER_STEP)
    d2t = reading.state["d2t"].long()
    if fingerprint(d2t - torch.arange(len(d2t))) == evidence.tensors["d2t"]:
        return "d2t holds absolute target ids, not offsets", ABSOLUTE
    if not bool(d2t.any()):
        return "d2t is all zeros", "the buffer was saved before it was filled"
    return "d2t has other values", "it is the vocabulary of another drafter"


def _diagnose_mask_row(files: Files, reading: Reading, target: "HFTarget") -> tuple[str, str]:
    row = reading.config.mask_token_id
    if "embed_tokens.weight" not in files.tensors and not files.is_compact:
        return (
            f"embed_tokens.weight is missing, so the mask token {row} reads the target's row, not the trained one",
            "the embeddings were dropped because they look like the target's, and the trained mask row with them",
        )
    own, targets = reading.state[COMPACT_TENSOR], target.embedding_VD[row].cpu()
    if torch.equal(own.bfloat16(), targets.bfloat16()):
        return (
            f"row {row} of the embeddings is the target's, not the trained mask row",
            "the table was replaced by the target's in a conversion",
        )
    return f"the trained mask row (token {row}) has other values", OTHER_STEP


def _check_changed(changed: list[str], evidence: Evidence, state: Mapping[str, Tensor], is_rounded: bool) -> None:
    """Refuse changed tensors, unless rounding explains all of them."""
    for name in changed:
        if not bool(state[name].isfinite().all()):
            cause = "the file is damaged, or the values do not fit its dtype"
            raise Difference(f"{name!r} holds NaN or infinite values", cause)
        if not bool(state[name].any()):
            cause = "it was saved before it was filled, or a conversion created an empty one"
            raise Difference(f"{name!r} is all zeros", cause)
    if changed and not is_rounded:
        is_most = len(changed) > len(evidence.tensors) // 2
        raise Difference(
            f"{len(changed)} of {len(evidence.tensors)} tensors have other values, first {changed[0]!r}",
            "these are the weights of another drafter or training step"
            if is_most
            else "the file is damaged, or these tensors were trained or edited after the card was written",
        )


def _check_table(name: str, reading: Reading, target: "HFTarget") -> None:
    """A table that the drafter shares with the target must be the target's, except for the mask row."""
    table = reading.state[name]
    expected, own_row = shared_tables(target, reading.config, reading.state.get("d2t"))[name]
    if table.shape != expected.shape:
        raise Difference(
            f"{name} has shape {list(table.shape)}, the target's is {list(expected.shape)}", "another target"
        )
    dtype = torch.float16 if table.dtype == torch.float16 else torch.bfloat16
    differing = num_differing_rows(table, expected, own_row, dtype)
    if differing:
        raise Difference(
            f"{differing:,} rows of {name} are not the target's, which this drafter shares",
            "the table belongs to another target or revision, or was converted to a lower precision",
        )
