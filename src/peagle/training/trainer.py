"""The training loop: runs the objective on each batch, steps the optimizer, logs metrics and saves state."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peagle.data.conversations import Conversation
from peagle.drafter.model import Drafter
from peagle.errors import ConfigError
from peagle.objective.batches import Batch, Batches
from peagle.objective.config import TrainConfig
from peagle.objective.eagle3 import UnrolledObjective
from peagle.objective.labels import ChunkShape
from peagle.objective.p_eagle import ParallelObjective
from peagle.training.features import FeatureSource
from peagle.training.optimizer import learning_rate, make_optimizer
from peagle.training.resume import Progress, RunState

log = logging.getLogger(__name__)

NO_STEP = -1


class Trainer:
    """One run. Owns the optimizer and trains `drafter` in place."""

    def __init__(
        self,
        drafter: Drafter,
        objective: ParallelObjective | UnrolledObjective,
        features_of: FeatureSource,
        config: TrainConfig,
        run: RunState,
    ) -> None:
        self.drafter, self.objective, self.features_of = drafter, objective, features_of
        self.config, self.run, self.world = config, run, run.world
        self._batches: Batches | None = None
        self.device = next(drafter.parameters()).device
        self.trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(drafter, config)
        self.progress = Progress(0, torch.zeros(3, config.num_draft_tokens, device=self.device))
        run.restore(drafter, self.optimizer, self.progress)
        self._is_updating = False
        self._first_bad = torch.full((), NO_STEP, device=self.device)
        """first step with a non-finite loss or gradient; on the device, so that no step synchronizes"""

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
        """Run the remaining steps. Calls `on_step(step, metrics)` after each; metrics are None between log lines.

        Saves the state every `save_every` steps and on KeyboardInterrupt. `on_save` returns measurements for the
        metrics file; a resumed run first makes the measurement that an interruption prevented. With several
        processes each takes its share of the batches, and all call `on_save` together.
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
                    if self._is_due(self.config.log_every):
                        rate = (self.step - first_step) / max(1e-9, time.monotonic() - started)
                        metrics = self._take_metrics() | {"steps_per_second": round(rate, 3)}
                        self.run.log(metrics)
                    on_step(self.step, metrics)
                    if self._is_due(self.config.save_every):
                        self._save()
                        self._measure(on_save)
        except KeyboardInterrupt:
            if self._is_updating or self.world.size > 1:
                log.warning("interrupted during an update; resuming from the last saved state")
            else:
                self._save()
            raise

    def train_step(self, *micro_batches: Batch) -> None:
        """One optimizer step on a batch, whole or in micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums = self.accumulate_gradients(*micro_batches)
        self.world.reduce_gradients(self.trained, loss, sums)
        norm = self.world.clip_gradients(self.trained, self.config.max_gradient_norm)
        is_bad = ~(loss.isfinite() & norm.isfinite()) & (self._first_bad == NO_STEP)
        self._first_bad = torch.where(is_bad, self.step, self._first_bad)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        # Weights and step number are inconsistent between these lines, so an interrupt must not save here.
        self._is_updating = True
        self.optimizer.step()
        self.progress.depth_sums += sums
        self.progress.step += 1
        self._is_updating = False

    def accumulate_gradients(self, *micro_batches: Batch) -> tuple[Tensor, Tensor]:
        """Add the gradients of this process's share of the batch. Returns its share of the mean loss and of the sums.

        The mean is over the labels of the whole batch, across all processes.
        """
        num_labels = max(1, self.world.total(sum(part.num_labels for part in micro_batches)))  # there may be none
        loss, sums = torch.zeros((), device=self.device), torch.zeros_like(self.progress.depth_sums)
        for part in micro_batches:
            moved = part.to(self.device)
            part_loss, part_sums = self.objective.accumulate(moved, self.features_of(moved), num_labels)
            loss, sums = loss + part_loss, sums + part_sums
        return loss, sums

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """Split a batch into micro-batches on the device. Runs in the prefetch thread."""
        num_rows = len(batch.token_ids_BT)
        size = self.config.micro_batch_size or num_rows
        parts = [batch] if size >= num_rows else [batch.rows(at, at + size) for at in range(0, num_rows, size)]
        for part in parts:
            self.features_of.prepare(part)
        return [part.to(self.device) for part in parts]

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.num_steps

    def _save(self) -> None:
        """Write the state, unless training has diverged."""
        self._check_finite()
        self.run.save(self.drafter, self.optimizer, self.progress)

    def _measure(self, on_save: Callable[[int], dict[str, Any]] | None) -> None:
        """Log the measurements of this step, once."""
        if on_save is None or not self.step or not self._is_due(self.config.save_every):
            return
        if self.world.total(self.world.is_main and not self.run.is_measured(self.step)):
            measured = on_save(self.step)
            if measured:
                self.run.log({"step": self.step} | measured)

    def _take_metrics(self) -> dict[str, Any]:
        """Means since the last call. Synchronizes with the device."""
        self._check_finite()
        losses, correct, counts = self.progress.depth_sums.tolist()
        self.progress.depth_sums.zero_()
        return {
            "step": self.step,
            "loss": sum(losses) / max(1.0, sum(counts)),
            "accuracy_by_depth": [round(c / max(1.0, n), 4) for c, n in zip(correct, counts, strict=True)],
            "learning_rate": learning_rate(self.step - 1, self.config),
        }

    def _check_finite(self) -> None:
        """Stop a run that has diverged. Synchronizes with the device."""
        step = int(self._first_bad)
        if step == NO_STEP:
            return
        rows: list[int] = []
        if self._batches is not None:
            rows = [self._batches.conversations[index].number for index in self._batches.documents(step)]
        earlier = "the last saved state is from before it" if self.run.can_continue else "no state was saved before it"
        start = f"--from {self.run.drafter} and a new --output" if self.run.drafter.exists() else "a new --output"
        raise ConfigError(
            f"training diverged: loss or gradient is NaN or infinite in step {step + 1} (rows {summary(rows)}); "
            f"{earlier}",
            hint=f"lower learning_rate or raise warmup_steps, and pass {start}; if the same rows fail again, "
            "look at them with `peagle data inspect --rows`",
        )


def summary(numbers: Sequence[int], most: int = 16) -> str:
    """The first `most` numbers, and how many follow.

    >>> summary([4, 1]), summary(range(40), most=3)
    ('4, 1', '0, 1, 2 and 37 more')
    """
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
