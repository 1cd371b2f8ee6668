"""The drafter a run starts with: a new one for the target, or an earlier one whose training goes on."""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from peagle.drafter.card import TargetIdentity, read_card
from peagle.drafter.checkpoint import drafter_directory, load_drafter
from peagle.drafter.create import check_copies, config_for_target, create_drafter
from peagle.drafter.layouts import weights_files
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import choose_draft_vocab, vocab_coverage
from peagle.errors import CheckpointError, ConfigError
from peagle.targets.hf import HFTarget
from peagle.training.config import TrainConfig

log = logging.getLogger(__name__)


def check_start(target: HFTarget, config: TrainConfig) -> None:
    """Refuse settings that the target or the earlier drafter cannot meet. Taps the layers the drafter will read."""
    if config.draft_vocab_size is not None and config.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {config.draft_vocab_size} exceeds the target's {target.vocab_size}",
            hint="leave it out to draft all of the target's tokens",
        )
    if config.from_drafter is not None:
        _load_earlier(target, config.from_drafter, config)
        return
    if config.init == "target" and config.num_layers > target.num_layers:
        raise ConfigError(
            f"num_layers {config.num_layers} exceeds the target's {target.num_layers}, so they cannot start as copies",
            hint=f"use at most {target.num_layers} layers, or init = random",
        )
    target.tap(config.aux_layer_ids or target.default_aux_layer_ids)
    drafter_config = config_for_target(target, num_layers=config.num_layers, **_switches(config))
    if config.init == "target":
        check_copies(target, drafter_config)


def starting_drafter(target: HFTarget, config: TrainConfig, counts_V: Tensor | None) -> Drafter:
    """A drafter in float32 on the target's device, as `config` says. Taps the layers it reads.

    `counts_V`, how often each token occurs in the answers, chooses a smaller draft vocabulary.
    """
    if config.from_drafter is not None:
        drafter = _load_earlier(target, config.from_drafter, config)
        drafter.config = dataclasses.replace(drafter.config, num_draft_tokens=config.num_draft_tokens)
        drafter.card, drafter.repairs = None, ()  # they tell of what the drafter was
        return drafter.float().requires_grad_(True)
    target.tap(config.aux_layer_ids or target.default_aux_layer_ids)
    drafter_config = config_for_target(target, num_layers=config.num_layers, **_switches(config))
    offsets_U = None
    if counts_V is not None and drafter_config.draft_vocab_size < drafter_config.vocab_size:
        offsets_U = choose_draft_vocab(counts_V, drafter_config.draft_vocab_size)
    return create_drafter(target, drafter_config, config.init, config.seed, offsets_U)


def draft_vocab_facts(drafter: Drafter, counts_V: Tensor) -> dict[str, Any]:
    """Size and coverage of a draft vocabulary smaller than the target's, which are logged, too; else nothing."""
    size, vocab_size = drafter.config.draft_vocab_size, drafter.config.vocab_size
    if size == vocab_size:
        return {}
    coverage = vocab_coverage(counts_V, drafter.d2t.cpu())
    log.info("the draft vocabulary, %d of %d tokens, covers %.2f%% of the answers", size, vocab_size, 100 * coverage)
    return {"draft_vocab": {"size": size, "coverage": round(coverage, 6)}}


def earlier_facts(target: HFTarget, path: Path) -> dict[str, Any]:
    """What tells the drafter that training goes on from."""
    directory = drafter_directory(path, target)
    digest = hashlib.sha256()
    for path in weights_files(directory):
        digest.update(path.read_bytes())
    facts: dict[str, Any] = {"name": directory.name, "weights": digest.hexdigest()[:32]}
    card = read_card(directory)
    if card is not None:
        num_answer_tokens = card.data.get("num_answer_tokens")
        facts |= {"training": card.training, "num_answer_tokens": num_answer_tokens}  # and so on to the first run
    return facts


def _switches(config: TrainConfig) -> dict[str, Any]:
    return {
        "parallel": config.method == "p-eagle",
        "num_draft_tokens": config.num_draft_tokens,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.draft_vocab_size,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.method == "eagle3" and config.norm_output,
        "embeddings": config.embeddings,
    }


def _load_earlier(target: HFTarget, directory: Path, config: TrainConfig) -> Drafter:
    try:
        # Other weights are what a fine-tuned target has. Other token ids, though, would have to be learned anew.
        card = read_card(drafter_directory(directory, target))
        is_mismatch = card is not None and card.target.tokenizer != TargetIdentity.of(target).tokenizer
        drafter = load_drafter(directory, target, allow_mismatch=not is_mismatch)
    except CheckpointError as error:
        raise CheckpointError(
            f"training cannot go on from {directory}: {error.message}",
            hint="give a drafter directory for a target of this tokenizer and width, or start a new drafter without it",
        ) from error
    if drafter.config.sliding_layers:
        raise ConfigError(
            f"training cannot go on from {directory}, whose layers see a window of {drafter.config.sliding_window}",
            hint="such drafters can be served and exported; start a new one to train",
        )
    differing = [
        f"{name} is {earlier!r} there and {wanted!r} in the settings"
        for name, (earlier, wanted) in _shapes(drafter, config, target).items()
        if earlier != wanted
    ]
    if differing:
        raise ConfigError(
            f"training cannot go on from {directory}, a drafter of another shape: {'; '.join(differing)}",
            hint="give the earlier drafter's settings, or start a new drafter",
        )
    return drafter


def _shapes(drafter: Drafter, config: TrainConfig, target: HFTarget) -> dict[str, tuple[Any, Any]]:
    """By setting: what the drafter has, and what is wanted; what is left open is the drafter's."""
    has = drafter.config
    pairs: dict[str, tuple[Any, Any]] = {
        "method": (has.method, config.method),
        "num_layers": (has.num_layers, config.num_layers),
        "fc_norm": (has.fc_norm, config.fc_norm),
        "norm_before_fc": (has.norm_before_fc, config.norm_before_fc),
        "embeddings": (has.embeddings, config.embeddings),
        "draft_vocab_size": (has.draft_vocab_size, config.draft_vocab_size or target.vocab_size),
    }
    if config.method == "eagle3":
        pairs["norm_output"] = (has.norm_output, config.norm_output)
    if config.aux_layer_ids is not None:
        pairs["aux_layer_ids"] = (list(has.aux_layer_ids), list(config.aux_layer_ids))
    if config.mask_token_id is not None:
        pairs["mask_token_id"] = (has.mask_token_id, config.mask_token_id)
    return pairs
