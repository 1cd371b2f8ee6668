"""The training loop: target states in, a drafter that imitates the target's next K tokens out.

Shapes: B rows, T tokens, S slots, N slots with a label, D width, V vocabulary.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.drafter.slots import Slots, slot_inputs, visible
from peagle.drafter.vocab import draft_to_target
from peagle.errors import ConfigError
from peagle.targets.hf import HFTarget
from peagle.training.batches import LABEL_CHUNK, Batch, make_batch
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation
from peagle.training.losses import slot_losses
from peagle.training.resume import Progress, RunState

log = logging.getLogger(__name__)


class Trainer:
    """One run. It owns the optimizer and trains `drafter` in place; the target is only read."""

    def __init__(self, target: HFTarget, drafter: Drafter, config: TrainConfig, run: RunState) -> None:
        self.target, self.drafter, self.config, self.run = target, drafter, config, run
        self.optimizer = _optimizer(drafter, config)
        compiles = config.compile == "on" or (config.compile == "auto" and target.device.type == "cuda")
        wrap: Callable[..., Any] = torch.compile if compiles else _as_is
        self._target_forward = wrap(target.forward, dynamic=False)
        self._drafter_forward = wrap(self._slot_states, dynamic=False)
        self._chunk_losses = wrap(self._judge_chunk, dynamic=False)
        self.progress = Progress.begin(config.num_draft_tokens, target.device)
        run.restore(drafter, self.optimizer, self.progress)
        self._is_updating = False

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
        """
        self.drafter.train()
        started, first_step = time.monotonic(), self.step
        try:
            self._measure(on_save)
            while self.step < self.config.num_steps:
                self.train_step(make_batch(conversations, self.config, self.step))
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
            if self._is_updating:
                log.warning("interrupted in the middle of an update; the state saved last stands")
            else:
                self._save()
            raise

    def train_step(self, batch: Batch) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        _, sums = self.accumulate_gradients(batch.to(self.target.device))
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_gradient_norm)
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
        self._check_finite(self.progress.depth_sums[0].sum().item())
        self.run.save(self.drafter, self.optimizer, self.progress)

    def _measure(self, on_save: Callable[[int], dict[str, Any]] | None) -> None:
        """Add `on_save`'s measurements of this step to the metrics, once."""
        if on_save is not None and self.step and self._is_saved_step() and not self.run.is_measured(self.step):
            self.run.log({"step": self.step} | on_save(self.step))

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss is {loss} after step {self.step}: training diverged",
                hint="lower learning_rate, or raise warmup_steps",
            )

    def accumulate_gradients(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Add the gradients of the batch's mean loss. Returns it, and `Progress.depth_sums` of this batch alone.

        The vocabulary projection is the largest tensor by far, so its forward and backward are done a chunk of
        labels at a time and only the gradient of the slots' states is kept.
        """
        target_output = self._target_forward(batch.token_ids_BT)
        # bfloat16 wherever the target is in half precision, because float16 gradients would need scaling.
        is_half = target_output.aux_hidden_BTA.dtype in (torch.bfloat16, torch.float16)
        aux_hidden_BTA = target_output.aux_hidden_BTA.to(torch.bfloat16 if is_half else torch.float32)
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=is_half):
            states_BSD = self._drafter_forward(batch.token_ids_BT, aux_hidden_BTA, *batch.slots)
        states_ND = states_BSD[batch.row_N, batch.slot_N]
        leaves = [chunk.detach().requires_grad_() for chunk in states_ND.split(LABEL_CHUNK)]
        total = states_ND.new_zeros((), dtype=torch.float32)
        depth_sums = torch.zeros_like(self.progress.depth_sums)
        num_labels = max(1, batch.num_labels)  # a batch of one-token answers has none, and no gradient
        for index, leaf in enumerate(leaves):
            part = slice(index * LABEL_CHUNK, (index + 1) * LABEL_CHUNK)
            judges = target_output.logits_BTV[batch.row_N[part], batch.judge_N[part]]
            loss, sums = self._chunk_losses(leaf, judges, batch.depth_N[part], batch.weight_N[part])
            (loss / num_labels).backward()
            depth_sums += sums
            total += loss.detach() / num_labels
        states_ND.backward(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]))
        return total, depth_sums

    def _slot_states(self, token_ids_BT: Tensor, aux_hidden_BTA: Tensor, anchor_BS: Tensor, depth_BS: Tensor) -> Tensor:
        """Final normed states of the slots."""
        slots = Slots(anchor_BS, depth_BS)
        fused_BTD = self.drafter.fuse(aux_hidden_BTA)
        fused_mask_D = self.drafter.fuse(self.drafter.mask_hidden.to(aux_hidden_BTA.dtype))
        mask_token_id = self.drafter.config.mask_token_id
        assert mask_token_id is not None, "only parallel drafters are trained here"
        inputs = slot_inputs(slots, token_ids_BT, fused_BTD, mask_token_id, fused_mask_D)
        return self.drafter(*inputs, slots.position_BS, visible(slots, slots)).normed_BSD

    def _judge_chunk(
        self, states_ND: Tensor, target_logits_NV: Tensor, depth_N: Tensor, weight_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Summed loss of a chunk, and per depth the sums of loss, correct guesses and slots."""
        offsets = getattr(self.drafter, "d2t", None)
        table = None if offsets is None else draft_to_target(offsets)
        losses_N, is_correct_N = slot_losses(self.drafter.logits(states_ND), target_logits_NV, table, self.config.loss)
        losses_N = losses_N * weight_N
        rows = torch.stack([losses_N.detach(), is_correct_N * weight_N, weight_N])
        sums = torch.zeros_like(self.progress.depth_sums).index_add(1, depth_N, rows)
        return losses_N.sum(), sums

    def _take_metrics(self) -> dict[str, Any]:
        """Means since the last call. Reading them waits for the device."""
        losses, correct, counts = self.progress.depth_sums.tolist()
        self._check_finite(sum(losses))
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


def _optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; vectors (norms, biases, the learned placeholders) are not decayed."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in drafter.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def _as_is(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return function
