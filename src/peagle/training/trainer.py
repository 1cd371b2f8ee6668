"""The training loop: batches in, a drafter that imitates the target's next K tokens out.

What is learned from a batch is the objective's affair, where the target's states come from the feature source's.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.errors import ConfigError
from peagle.training.batches import Batch, Batches
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation
from peagle.training.features import FeatureSource
from peagle.training.labels import ChunkShape
from peagle.training.objective import Objective
from peagle.training.optimizers import make_optimizer
from peagle.training.resume import Progress, RunState

log = logging.getLogger(__name__)

NO_STEP = -1


class Trainer:
    """One run. It owns the optimizer and trains `drafter` in place, by `objective`, from what `features_of` gives."""

    def __init__(
        self,
        drafter: Drafter,
        objective: Objective,
        features_of: FeatureSource,
        config: TrainConfig,
        run: RunState,
    ) -> None:
        self.drafter, self.objective, self.features_of = drafter, objective, features_of
        self.config, self.run, self.world = config, run, run.world
        self._batches: Batches | None = None
        self.device = next(drafter.parameters()).device
        self.optimizer = make_optimizer(drafter, config)
        self.progress = Progress.begin(config.num_draft_tokens, self.device)
        run.restore(drafter, self.optimizer, self.progress)
        self._is_updating = False
        self._first_bad = torch.full((), NO_STEP, device=self.device)
        """the first step whose loss or gradient is no number; kept on the device so that no step waits for it"""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    def train(
        self,
        conversations: Sequence[Conversation],
        on_step: Callable[[int, dict[str, Any] | None], None],
        on_save: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        """Run the remaining steps. `on_step(step, metrics)` follows each; metrics are None between log lines.

        State is saved every `save_every` steps and when the run is interrupted (KeyboardInterrupt); `on_save` may add
        measurements, which go to the metrics file. One that an interruption kept from being made is made first.
        Of several processes each takes its share of the batches, and all call `on_save` together.
        """
        vocab_size = self.drafter.config.draft_vocab_size if self.device.type == "cuda" else None
        chunks = ChunkShape.of(self.config, vocab_size)
        self._batches = Batches(conversations, self.config, self.world.rank, self.world.size, chunks)
        self.drafter.train()
        started, first_step = time.monotonic(), self.step
        try:
            self._measure(on_save)
            prefetched = self._batches.prefetched(self.step, self.config.num_steps, self._micro_batches)
            with contextlib.closing(prefetched) as batches:
                for micro_batches in batches:
                    self.train_step(*micro_batches)
                    metrics = None
                    if self.step % self.config.log_every == 0 or self.step == self.config.num_steps:
                        rate = (self.step - first_step) / max(1e-9, time.monotonic() - started)
                        metrics = self._take_metrics() | {"steps_per_second": round(rate, 3)}
                        self.run.log(metrics)
                    on_step(self.step, metrics)
                    if self._is_saved_step():
                        self._save()
                        self._measure(on_save)
        except KeyboardInterrupt:
            if self._is_updating or self.world.size > 1:
                log.warning("interrupted where no state can be saved; the one saved last stands")
            else:
                self._save()
            raise

    def train_step(self, *micro_batches: Batch) -> None:
        """One optimizer step on a batch, whole or in parts."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums = self.accumulate_gradients(*micro_batches)
        self.world.reduce_gradients(self.drafter.parameters(), loss, sums)
        norm = self.world.clip_gradients(self.drafter.parameters(), self.config.max_gradient_norm)
        is_bad = ~(loss.isfinite() & norm.isfinite()) & (self._first_bad == NO_STEP)
        self._first_bad = torch.where(is_bad, self.step, self._first_bad)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        # An interruption between these lines would leave weights and step number that do not belong together.
        self._is_updating = True
        self.optimizer.step()
        self.progress.depth_sums += sums
        self.progress.step += 1
        self._is_updating = False

    def _is_saved_step(self) -> bool:
        return self.step % self.config.save_every == 0 or self.step == self.config.num_steps

    def _save(self) -> None:
        """Write the state, unless the loss is no longer a number: such a state is not worth going on from."""
        self._check_finite()
        self.run.save(self.drafter, self.optimizer, self.progress)

    def _measure(self, on_save: Callable[[int], dict[str, Any]] | None) -> None:
        """Add `on_save`'s measurements of this step to the metrics, once."""
        if on_save is None or not self.step or not self._is_saved_step():
            return
        if self.world.total(self.world.is_main and not self.run.is_measured(self.step)):
            measured = on_save(self.step)
            if measured:
                self.run.log({"step": self.step} | measured)

    def _check_finite(self) -> None:
        """Stop a run that has diverged. Reading this waits for the device."""
        step = int(self._first_bad)
        if step == NO_STEP:
            return
        raise self._diverged(step)

    def _diverged(self, step: int) -> ConfigError:
        rows: list[int] = []
        if self._batches is not None:
            rows = [self._batches.conversations[index].number for index in self._batches.documents(step)]
        earlier = "the state saved last is from before it" if self.run.can_continue else "no state was saved before"
        go_on = f"--from {self.run.drafter} and another output" if self.run.drafter.exists() else "another output"
        return ConfigError(
            f"the loss or its gradient is not a number in step {step + 1}, of rows {summary(rows)}: training diverged; "
            f"{earlier}",
            hint=f"lower learning_rate or raise warmup_steps, and give {go_on}; if it happens at the same rows again, "
            "`peagle data inspect --rows` shows them",
        )

    def accumulate_gradients(self, *micro_batches: Batch) -> tuple[Tensor, Tensor]:
        """Add the gradients of this process's share of the batch. Returns its share of the mean loss, and of the sums.

        The mean is over the labels of the whole batch, all processes' together.
        """
        num_labels = max(1, self.world.total(sum(part.num_labels for part in micro_batches)))  # there may be none
        loss, sums = torch.zeros((), device=self.device), torch.zeros_like(self.progress.depth_sums)
        for part in micro_batches:
            moved = part.to(self.device)
            part_loss, part_sums = self.objective.accumulate(moved, self.features_of(moved), num_labels)
            loss, sums = loss + part_loss, sums + part_sums
        return loss, sums

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """A batch in parts of as many rows as go through at once; runs in the thread that makes batches."""
        num_rows = len(batch.token_ids_BT)
        size = self.config.micro_batch_size or num_rows
        parts = [batch] if size >= num_rows else [batch.rows(at, at + size) for at in range(0, num_rows, size)]
        for part in parts:
            self.features_of.prepare(part)
        return [part.to(self.device) for part in parts]

    def _take_metrics(self) -> dict[str, Any]:
        """Means since the last call. Reading them waits for the device."""
        self._check_finite()
        losses, correct, counts = self.progress.depth_sums.tolist()
        self.progress.depth_sums.zero_()
        return {
            "step": self.step,
            "loss": sum(losses) / max(1.0, sum(counts)),
            "accuracy_by_depth": [round(c / max(1.0, n), 4) for c, n in zip(correct, counts, strict=True)],
            "learning_rate": learning_rate(self.step - 1, self.config),
        }


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to `min_learning_rate_ratio` of the peak."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    progress = min(1.0, max(0, step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps))
    floor = config.min_learning_rate_ratio
    return config.learning_rate * warmup * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def summary(numbers: Sequence[int], most: int = 16) -> str:
    """Numbers for a message: all of a few, else the first ones.

    >>> summary([4, 1]), summary(range(40), most=3)
    ('4, 1', '0, 1, 2 and 37 more')
    """
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
