"""One adaptation: gather text, continue the drafter for minutes, keep it by the rule, check it with the gate, write it.

Everything unfinished is in OUTPUT/work, so a rerun of the command resumes. At the end it is deleted: it holds the text.
"""

import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peagle.adaptation.config import AdaptSettings
from peagle.adaptation.outcome import OUTCOME_NAME, Measured, Outcome, judge, read_outcome
from peagle.adaptation.text import AdaptText, gather
from peagle.checkpoint.card import DrafterCard, card_of, pair_head_of, read_card
from peagle.checkpoint.layouts import WEIGHTS_NAME
from peagle.checkpoint.native import drafter_directory, load_drafter, save_drafter
from peagle.compare.gate import Gate
from peagle.data.config import differences
from peagle.data.conversations import Conversation
from peagle.data.shards import write_whole
from peagle.decoding.acceptance import Acceptance
from peagle.drafter.model import Drafter
from peagle.errors import ConfigError
from peagle.objective.config import TrainConfig
from peagle.targets.hf import HFTarget
from peagle.training.data import RunText
from peagle.training.replay import replay
from peagle.training.resume import saved_settings
from peagle.training.run import OnStep, seconds_per_step, train_drafter

log = logging.getLogger(__name__)

Begin = Callable[[TrainConfig], OnStep]
"""Called when training begins; returns what is called after each step."""
TOKENS_PER_STEP = {"cuda": 16384, "cpu": 1024}
SHORTEST_ROW = 64
LENGTH_SHARE = 0.95
"""Share of the rows that are trained on whole; longer ones are truncated."""
MOST_PASSES, LEAST_STEPS = 10, 20
"""Passes over the text at most, and steps at least."""
SAME = ("loss", "labels", "retention", "retention_floor", "deep_floor")
"""Settings kept from the drafter's own training."""


def adapt(
    target: HFTarget,
    path: Path | str | None,
    settings: AdaptSettings,
    begin: Begin = lambda _: lambda *_: None,
    *,
    allow_mismatch: bool = False,
) -> Outcome:
    """Adapt the drafter at `path` (default: the target's own), or resume that; returns the outcome if it is finished.

    The drafter is written to `settings.output` only if it is kept. `allow_mismatch` takes a drafter of other weights of
    the target, for example before it was fine-tuned; the adapted one belongs to the given target.
    """
    started, output, work = time.monotonic(), settings.output, settings.output / "work"
    described = settings.described() | {"drafter": path and str(path)}
    if (done := read_outcome(output)) is not None:
        if differing := differences(done.settings, described):
            raise ConfigError(
                f"{output} holds a finished adaptation with other settings: {'; '.join(differing)}",
                hint="pass a new --output",
            )
        return done
    if (output / WEIGHTS_NAME).exists():
        raise ConfigError(f"{output} already holds a drafter", hint="pass a new --output")
    drafter = load_drafter(path, target, allow_mismatch=allow_mismatch)
    text = gather(target, drafter, settings, work, described)
    depth = drafter.config.num_draft_tokens or drafter.config.usual_num_draft_tokens
    before = _replayed(target, drafter, text, depth)
    log.info("before: acceptance length %.3f on held-out traffic, %.3f on old text", *vars(_lengths(before)).values())
    config = _train(target, drafter, drafter_directory(path, target), text, settings, work / "drafter", begin)
    adapted = load_drafter(config.output, target)
    adapted.pair_head = drafter.pair_head  # trained for the old weights, and measured with the new ones
    after = _replayed(target, adapted, text, depth)
    is_kept, why = judge(_lengths(before), _lengths(after))
    if is_kept:
        card = _card(target, adapted, drafter, before, after)
        save_drafter(adapted, config.output, card, full=False)
        failure = Gate(config.output, target, "native").run(lambda name: log.debug("gate: %s", name)).failure
        if failure is not None:
            is_kept, why = False, f"the gate fails at {failure.name}: {failure.found}"
        else:
            save_drafter(adapted, output, card, full=False)
    outcome = Outcome(
        is_kept,
        why,
        before=_lengths(before),
        after=_lengths(after),
        num_draft_tokens=depth,
        num_steps=config.num_steps,
        seconds=round(time.monotonic() - started, 1),
        settings=described,
    )
    write_whole(output / OUTCOME_NAME, outcome.to_json().encode())
    shutil.rmtree(work, ignore_errors=True)
    return outcome


def _train(
    target: HFTarget,
    drafter: Drafter,
    directory: Path,
    text: AdaptText,
    settings: AdaptSettings,
    output: Path,
    begin: Begin,
) -> TrainConfig:
    """Train into `output`, unless an earlier run has finished that; returns the settings."""
    run_text = RunText(text.train, text.traffic, text.facts)
    config = train_config(target, drafter, directory, text.train, settings, output)
    saved = saved_settings(output)
    if saved:
        config = dataclasses.replace(config, num_steps=saved["num_steps"], warmup_steps=saved["warmup_steps"])
    elif (output / WEIGHTS_NAME).exists():
        card = read_card(output)
        assert card is not None, "training wrote it"
        return dataclasses.replace(config, num_steps=card.training["num_steps"])
    else:
        most = -(-MOST_PASSES * sum(map(len, text.train)) // (config.batch_size * config.max_length))
        seconds = seconds_per_step(target, config, run_text)
        num_steps = max(LEAST_STEPS, min(most, int(60 * settings.minutes / seconds)))
        log.info("a step takes %.2f s, so training takes about %.1f minutes", seconds, num_steps * seconds / 60)
        config = dataclasses.replace(config, num_steps=num_steps, warmup_steps=max(1, num_steps // 20))
    log.info("training %d steps of %d x %d tokens", config.num_steps, config.batch_size, config.max_length)
    train_drafter(target, config, begin(config), run_text)
    return config


def train_config(
    target: HFTarget,
    drafter: Drafter,
    directory: Path,
    rows: Sequence[Conversation],
    settings: AdaptSettings,
    output: Path,
) -> TrainConfig:
    """Settings that continue the drafter as it was trained, on rows as long as most of the text."""
    shape, training = drafter.config, {} if drafter.card is None else drafter.card.training
    usual = int(np.quantile([len(row) for row in rows], LENGTH_SHARE, method="higher"))
    max_length = min(target.max_length, max(SHORTEST_ROW, 1 << (usual - 1).bit_length()))
    same: dict[str, Any] = {name: training[name] for name in SAME if training.get(name) is not None}
    if not shape.parallel:
        same |= {"norm_output": shape.norm_output}
    return TrainConfig(
        data=settings.data,
        output=output,
        from_drafter=directory,
        method="p-eagle" if shape.parallel else "eagle3",
        num_layers=shape.num_layers,
        num_draft_tokens=shape.num_draft_tokens or shape.usual_num_draft_tokens,
        draft_vocab_size=None if shape.draft_vocab_size == shape.vocab_size else shape.draft_vocab_size,
        fc_norm=shape.fc_norm,
        norm_before_fc=shape.norm_before_fc,
        embeddings=shape.embeddings,
        max_length=max_length,
        batch_size=max(1, TOKENS_PER_STEP[target.device.type] // max_length),
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        save_every=100,
        **same,
    )


def _replayed(target: HFTarget, drafter: Drafter, text: AdaptText, depth: int) -> tuple[Acceptance, Acceptance]:
    """Acceptance on held-out traffic and on old text."""
    return replay(target, drafter, text.traffic, depth), replay(target, drafter, text.old, depth)


def _lengths(measured: tuple[Acceptance, Acceptance]) -> Measured:
    return Measured(*(round(each.acceptance_length, 4) for each in measured))


def _card(
    target: HFTarget,
    adapted: Drafter,
    drafter: Drafter,
    before: tuple[Acceptance, Acceptance],
    after: tuple[Acceptance, Acceptance],
) -> DrafterCard:
    """The card that training wrote, with acceptance on both texts, before and after."""
    card = card_of(adapted, target)
    entries = {}
    for name, old, new in zip(("traffic_replay", "old_text_replay"), before, after, strict=True):
        entries[name] = pair_head_of(adapted) | {
            "num_draft_tokens": len(new.accepted_per_position),
            "acceptance_length": round(new.acceptance_length, 4),
            "acceptance_length_before": round(old.acceptance_length, 4),
            "per_position": [round(share, 4) for share in new.per_position],
            "num_drafts": new.num_drafts,
        }
    longest = card.max_length if drafter.card is None else max(card.max_length, drafter.card.max_length)
    return dataclasses.replace(card, acceptance=card.acceptance | entries, max_length=longest)
