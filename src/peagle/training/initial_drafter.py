"""The drafter a run starts from: a new one for the target, or an existing one (`--from`), perhaps with a new pair head.

Shapes: V vocabulary, U draft vocabulary, R rank, D width.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoint.card import TargetIdentity, read_card
from peagle.checkpoint.layouts import weights_files
from peagle.checkpoint.native import drafter_directory, load_drafter
from peagle.config import from_mapping
from peagle.data.config import differences
from peagle.drafter.config import DrafterConfig
from peagle.drafter.create import check_copies, config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.drafter.pair_head import PairHead, ProjectedPairHead
from peagle.drafter.vocab import choose_draft_vocab, vocab_coverage
from peagle.errors import CheckpointError, ConfigError
from peagle.objective.config import TrainConfig
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

PAIR_STD = 0.02
"""of a new pair head's tables: its scores start near zero"""


def check_initial_drafter(target: HFTarget, config: TrainConfig) -> None:
    """Reject settings that the target or the `--from` drafter cannot meet. Taps the layers the drafter reads."""
    if config.draft_vocab_size is not None and config.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {config.draft_vocab_size} exceeds the target's {target.vocab_size}",
            hint="omit it to draft from the full vocabulary",
        )
    if config.from_drafter is not None:
        _load_earlier(target, config.from_drafter, config)
        return
    if config.init == "target" and config.num_layers > target.num_layers:
        raise ConfigError(
            f"num_layers {config.num_layers} exceeds the target's {target.num_layers}: too few layers to copy",
            hint=f"use at most {target.num_layers} layers, or init = random",
        )
    drafter_config = _new_config(target, config)
    if config.init == "target":
        check_copies(target, drafter_config)


def initial_drafter(
    target: HFTarget, config: TrainConfig, counts_V: Tensor | None, saved: Mapping[str, Any] = MappingProxyType({})
) -> Drafter:
    """A trainable float32 drafter on the target's device. Taps the layers it reads.

    `counts_V`, the token counts of the answers, selects the draft vocabulary if it is smaller than the target's.
    Resuming with the `saved` settings of a `--from` run needs only its shape: the saved state has the weights.
    """
    if "from_facts" in saved:
        shape = from_mapping(DrafterConfig, saved["drafter_config"], "settings.json: drafter_config")
        target.tap(shape.aux_layer_ids)
        drafter = Drafter(shape, target.embedding_VD, target.head_VD).to(target.device)
        return drafter if config.pair_head is None else with_new_pair_head(drafter, config.pair_head, config)
    if config.from_drafter is not None:
        drafter = _load_earlier(target, config.from_drafter, config).float()
        if config.aux_layer_ids not in (None, drafter.config.aux_layer_ids):
            drafter = with_more_aux_layers(target, drafter, config)
        drafter.config = dataclasses.replace(drafter.config, num_draft_tokens=config.num_draft_tokens)
        drafter.card, drafter.repairs = None, ()  # they describe the drafter before this run
        if drafter.pair_head is not None:
            log.info("the pair head of %s is not used: a pair head fits one drafter", config.from_drafter)
            drafter.pair_head = None
        if config.pair_head is not None:
            return with_new_pair_head(drafter, config.pair_head, config)
        return drafter.requires_grad_(True)
    drafter_config = _new_config(target, config)
    offsets_U = None
    if counts_V is not None and drafter_config.draft_vocab_size < drafter_config.vocab_size:
        offsets_U = choose_draft_vocab(counts_V, drafter_config.draft_vocab_size)
    return create_drafter(target, drafter_config, config.init, config.seed, offsets_U)


def with_more_aux_layers(target: HFTarget, drafter: Drafter, config: TrainConfig) -> Drafter:
    """The drafter, reading more layers of the target. It drafts as before: the new columns of `fc` are zero."""
    more, earlier = config.aux_layer_ids, drafter.config.aux_layer_ids
    assert more is not None and drafter.config.fc_norm, "checked by `_load_earlier`"
    target.tap(more)
    shape, offsets_U = dataclasses.replace(drafter.config, aux_layer_ids=more), drafter.state_dict().get("d2t")
    wider = create_drafter(target, shape, "random", config.seed, offsets_U)
    state = drafter.state_dict()
    same = {name: tensor for name, tensor in state.items() if not name.startswith(("fc", "mask_hidden"))}
    wider.load_state_dict(wider.state_dict() | same)
    width, num_layers = drafter.config.target_hidden_size, len(more)
    with torch.no_grad():
        wider.fc.weight.zero_()
        for index, layer in enumerate(earlier):
            place = more.index(layer)
            wider.fc.weight.view(-1, num_layers, width)[:, place] = drafter.fc.weight[:, index * width :][:, :width]
            wider.fc_norm[place].load_state_dict(drafter.fc_norm[index].state_dict())
            if shape.parallel:
                wider.mask_hidden.view(num_layers, width)[place] = drafter.mask_hidden[index * width :][:width]
    return wider


def with_new_pair_head(drafter: Drafter, rank: int, config: TrainConfig) -> Drafter:
    """The drafter, frozen, with an untrained pair head. A seed gives the same head on any device."""
    size, device = drafter.config.draft_vocab_size, drafter.fc.weight.device
    noise = torch.Generator().manual_seed(config.seed)
    left_UR, right_UR = (torch.randn(size, rank, generator=noise).mul(PAIR_STD).to(device) for _ in range(2))
    if config.pair_tables == "free":
        head = PairHead(left_UR, right_UR)
    else:
        width = drafter.config.hidden_size
        head = ProjectedPairHead(left_UR, right_UR, width, lambda: _draft_tables(drafter))
    drafter.requires_grad_(False)
    drafter.pair_head = head.requires_grad_(True)
    return drafter


def _draft_tables(drafter: Drafter) -> tuple[Tensor, Tensor]:
    """Embeddings and head of the draft vocabulary, [U, D] each."""
    table_VD, size = drafter.embedding_VD.detach(), drafter.config.draft_vocab_size
    if size < len(table_VD):
        table_VD = table_VD[drafter.to_target_ids(torch.arange(size, device=table_VD.device))]
    return table_VD, drafter.head_VD.detach()


def draft_vocab_facts(drafter: Drafter, counts_V: Tensor) -> dict[str, Any]:
    """Size and coverage of a reduced draft vocabulary, also logged. Empty for the full vocabulary."""
    size, vocab_size = drafter.config.draft_vocab_size, drafter.config.vocab_size
    if size == vocab_size:
        return {}
    coverage = vocab_coverage(counts_V, drafter.d2t.cpu())
    log.info("draft vocabulary: %d of %d tokens, covers %.2f%% of the answers", size, vocab_size, 100 * coverage)
    return {"draft_vocab": {"size": size, "coverage": round(coverage, 6)}}


def earlier_facts(target: HFTarget, path: Path) -> dict[str, Any]:
    """Name, weight hash and training history of the `--from` drafter, for the card. Reads all its weights."""
    directory = drafter_directory(path, target)
    digest = hashlib.sha256()
    for file in weights_files(directory):
        digest.update(file.read_bytes())
    facts: dict[str, Any] = {"name": directory.name, "weights": digest.hexdigest()[:32]}
    card = read_card(directory)
    if card is not None:
        facts |= {"training": card.training, "num_answer_tokens": card.data.get("num_answer_tokens")}
    return facts


def _new_config(target: HFTarget, config: TrainConfig) -> DrafterConfig:
    """The config of a new drafter. Taps the layers it reads."""
    target.tap(config.aux_layer_ids or target.default_aux_layer_ids)
    same = ("num_layers", "num_draft_tokens", "mask_token_id", "draft_vocab_size", "fc_norm", "norm_before_fc")
    switches: dict[str, Any] = {name: getattr(config, name) for name in (*same, "embeddings")}
    is_parallel = config.method == "p-eagle"
    return config_for_target(
        target, parallel=is_parallel, norm_output=config.norm_output and not is_parallel, **switches
    )


def _load_earlier(target: HFTarget, directory: Path, config: TrainConfig) -> Drafter:
    try:
        # A fine-tuned target has other weights, which is fine. Another tokenizer is not.
        card = read_card(drafter_directory(directory, target))
        is_mismatch = card is not None and card.target.tokenizer != TargetIdentity.of(target).tokenizer
        drafter = load_drafter(directory, target, allow_mismatch=not is_mismatch)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot train from {directory}: {error.message}",
            hint="pass --from a drafter for a target of the same tokenizer and width, or omit --from",
        ) from error
    if drafter.config.sliding_layers:
        raise ConfigError(
            f"cannot train from {directory}: it uses sliding-window attention ({drafter.config.sliding_window} tokens)",
            hint="such drafters can be served and exported but not trained; omit --from to start a new one",
        )
    names = ["method", "num_layers", "fc_norm", "norm_before_fc", "embeddings"]
    names += ["norm_output"] if config.method == "eagle3" else []
    # Unset settings take the drafter's.
    names += [name for name in ("mask_token_id", "aux_layer_ids") if getattr(config, name) is not None]
    if drafter.config.fc_norm and set(drafter.config.aux_layer_ids) < set(config.aux_layer_ids or ()):
        names.remove("aux_layer_ids")  # it will read more layers
    if config.pair_head is not None and drafter.config.num_draft_tokens is not None:
        names.append("num_draft_tokens")  # it is not trained any further
    wanted = {name: getattr(config, name) for name in names}
    wanted["draft_vocab_size"] = config.draft_vocab_size or target.vocab_size
    if differing := differences({name: getattr(drafter.config, name) for name in wanted}, wanted):
        raise ConfigError(
            f"cannot train from {directory}: its shape differs: {'; '.join(differing)} in the settings",
            hint="use that drafter's settings, or omit --from to start a new drafter",
        )
    return drafter
