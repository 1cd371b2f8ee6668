"""Estimates the memory of a training step and picks micro-batch size and number of segments to fit the GPU.

The estimate counts tensors; `activation_memory.py` counts those of the drafter's passes. Peak memory is that of the
largest phase:

    target      weights, optimizer, the target's states and temporaries of one target layer
    masks       the target's states and temporaries of building P-EAGLE's masks
    loss        saved activations of the drafter and the logits of one chunk of labels
    backward    saved activations of the drafter and the gradients of one layer's activations
    update      weights, optimizer and all gradients

Activations are bfloat16 (2 bytes) if the target is in half precision; the drafter's weights stay float32.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import CapacityError
from peagle.objective.config import TrainConfig
from peagle.objective.labels import ChunkShape
from peagle.objective.objective import is_compiled
from peagle.targets.hf import HFTarget
from peagle.training.activation_memory import parallel_activations, unrolled_activations
from peagle.training.distributed import ALONE, World, can_shard
from peagle.training.features import is_worth_capturing

log = logging.getLogger(__name__)

USABLE = 0.94  # of device memory; the rest is lost to fragmentation
MORE_PARTITIONS = (2, 4, 8, 16, 32, 64)
GIB = 2**30
CHUNK_BYTES = {"ce": 4 * 5 + 1, "kl": 4 * 8, "kl+ce": 4 * 8 + 1, "tv+ce": 4 * 10 + 1, "lk": 4 * 9}
"""Bytes per logit of an uncompiled loss: its float32 tensors, and one bool tensor for ce."""


@dataclass(frozen=True)
class Sizes:
    """What the estimate depends on, in bytes unless noted."""

    target_weights: int
    target_transient_values: int
    """values per token that one target layer holds at once"""
    target_width: int
    keeps_all_logits: bool
    """the target's head cannot run separately, so the logits of all tokens are kept"""
    drafter: DrafterConfig
    num_parameters: int
    layer_parameters: int
    """parameters of the largest drafter layer"""
    value_bytes: int
    """bytes per activation value"""
    target_is_captured: bool = False
    """the target's forward is a CUDA graph, which keeps the memory of its activations"""
    num_processes: int = 1
    shards_layers: bool = False
    target_spread: int = 0
    """target weights that FSDP shards over the processes"""
    target_layer: int = 0
    """the largest sharded target layer, gathered while it runs"""

    @classmethod
    def of(cls, target: HFTarget, drafter: Drafter, config: TrainConfig, world: World = ALONE) -> "Sizes":
        """Call before anything is sharded."""
        from peagle.targets.packed import TargetHead

        tensors = [*target.model.parameters(), *target.model.buffers()]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}  # shared ones count once
        spread = target.layers if world.shards_layers(config) and can_shard(target) else ()
        layers = [sum(part.numel() * part.element_size() for part in layer.parameters()) for layer in spread]
        return cls(
            target_weights=sum(tensor.numel() * tensor.element_size() for tensor in storages.values()),
            target_transient_values=_transient_values(target.model.config.get_text_config(), drafter.config),
            target_width=target.hidden_size,
            keeps_all_logits=not TargetHead(target).is_exact,
            drafter=drafter.config,
            num_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
            layer_parameters=max(sum(part.numel() for part in layer.parameters()) for layer in drafter.layers),
            value_bytes=2 if target.dtype in (torch.bfloat16, torch.float16) else 4,
            target_is_captured=is_compiled(config, target.device) and is_worth_capturing(target) and not layers,
            num_processes=world.size,
            shards_layers=world.shards_layers(config),
            target_spread=sum(layers),
            target_layer=max(layers, default=0),
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes by part in the phase with the highest memory use."""

    micro_batch_size: int
    num_partitions: int
    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {number / GIB:.2f}" for name, number in self.parts.items() if number)
        return (
            f"{self.total / GIB:.2f} GiB with micro_batch_size {self.micro_batch_size}, num_partitions "
            f"{self.num_partitions} ({self.phase}: {parts})"
        )


def estimate(sizes: Sizes, config: TrainConfig, micro_batch_size: int, num_partitions: int) -> Estimate:
    """Peak memory of a step."""
    found = phases(sizes, config, micro_batch_size, num_partitions)
    fullest = max(found, key=lambda name: sum(found[name].values()))
    return Estimate(micro_batch_size, num_partitions, fullest, found[fullest])


def phases(sizes: Sizes, config: TrainConfig, micro_batch_size: int, num_partitions: int) -> dict[str, dict[str, int]]:
    """Bytes by part in each phase of a step."""
    weights, gradients = _weights(sizes)
    tokens = micro_batch_size * config.max_length
    value, width = sizes.value_bytes, sizes.target_width
    drafter, num_aux = sizes.drafter, len(sizes.drafter.aux_layer_ids)
    states = tokens * value * (num_aux + 1) * width
    if sizes.keeps_all_logits:
        states += tokens * value * (drafter.vocab_size - width)
    accumulates = num_partitions > 1 or micro_batch_size * sizes.num_processes < config.batch_size
    before = gradients if accumulates else 0
    # The loss also keeps the gradient of a separate head.
    head_gradients = before or (4 * drafter.draft_vocab_size * drafter.hidden_size if drafter.head == "own" else 0)
    # A layer's gradients exist once more before they are accumulated.
    layer_gradients = head_gradients + 4 * sizes.layer_parameters
    # The aux states exist twice while they are concatenated.
    passing = tokens * value * (sizes.target_transient_values + num_aux * width) if config.features == "online" else 0
    kept = {"target states": states, "target activations": passing if sizes.target_is_captured else 0}
    activations = unrolled_activations if config.method == "eagle3" else parallel_activations
    own = activations(sizes, config, micro_batch_size, num_partitions)
    masks = {"attention masks": own.masks}
    return {
        "target": weights | {"gradients": before, "target states": states, "target activations": passing},
        "masks": weights | {"gradients": before, **kept, "attention masks": own.masks_in_making},
        "loss": weights
        | {"gradients": head_gradients, **kept, "drafter activations": own.kept, **masks}
        | {"logits chunk": _logits(sizes, config)},
        "backward": weights
        | {"gradients": layer_gradients, **kept, "drafter activations": own.kept + own.in_passing, **masks},
        "update": weights | {"gradients": gradients, **kept},
    }


def plan(sizes: Sizes, config: TrainConfig, room: int) -> Estimate:
    """The largest micro-batch that fits into `room`, with the fewest segments. Settings that are given stay fixed."""
    best: Estimate | None = None
    for candidate in _candidates(sizes, config):
        found = estimate(sizes, config, *candidate)
        if found.total <= USABLE * room:
            return found
        best = found if best is None or found.total < best.total else best
    assert best is not None, "there is at least one candidate"
    remedies = ["omit num_partitions"] if config.method == "p-eagle" and config.num_partitions is not None else []
    remedies += [] if config.checkpoint_activations else ["set checkpoint_activations"]
    remedies += ["lower max_length or num_draft_tokens", "or train on several GPUs with --parallel fsdp"]
    message = f"a training step needs {best}, but the device has {room / GIB:.1f} GiB"
    raise CapacityError(message, hint=", ".join(remedies))


def planned(target: HFTarget, drafter: Drafter, config: TrainConfig, world: World = ALONE) -> TrainConfig:
    """`config` with micro_batch_size and num_partitions filled in. On a CPU the whole batch runs at once.

    All processes run the same passes, so the one with the least free memory decides.
    """
    rows = config.batch_size // world.size
    if target.device.type != "cuda":
        return replace(
            config,
            micro_batch_size=min(rows, config.micro_batch_size or rows),
            num_partitions=config.num_partitions or 1,
        )
    sizes = Sizes.of(target, drafter, config, world)
    free, _ = torch.cuda.mem_get_info(target.device)
    room = world.least(free + torch.cuda.memory_reserved(target.device))
    found = plan(sizes, config, room)
    log.info("memory: %s of %.1f GiB", found, room / GIB)
    return replace(config, micro_batch_size=found.micro_batch_size, num_partitions=found.num_partitions)


def _candidates(sizes: Sizes, config: TrainConfig) -> Iterator[tuple[int, int]]:
    """(micro_batch_size, num_partitions) from fastest to smallest: first fewer rows, then more segments."""
    rows = config.batch_size // sizes.num_processes
    sizes_at_once = [min(config.micro_batch_size, rows)] if config.micro_batch_size else _halves(rows)
    for micro_batch_size in sizes_at_once:
        yield micro_batch_size, config.num_partitions or 1
    if config.num_partitions is None and config.method == "p-eagle":
        yield from ((sizes_at_once[-1], num_partitions) for num_partitions in MORE_PARTITIONS)


def _halves(number: int) -> list[int]:
    """The number, halved while it is even, then one.

    >>> _halves(64), _halves(12)
    ([64, 32, 16, 8, 4, 2, 1], [12, 6, 3, 1])
    """
    found = [number]
    while found[-1] > 1:
        found.append(1 if found[-1] % 2 else found[-1] // 2)
    return found


def _weights(sizes: Sizes) -> tuple[dict[str, int], int]:
    """Bytes of weights and optimizer, and of all gradients: float32, with two moments for AdamW."""
    drafter, layers = sizes.num_parameters, sizes.layer_parameters * sizes.drafter.num_layers
    target = sizes.target_weights
    if sizes.shards_layers:
        spread = layers - layers // sizes.num_processes
        drafter = drafter - spread + sizes.layer_parameters
        target -= sizes.target_spread - sizes.target_spread // sizes.num_processes - sizes.target_layer
    return {"target weights": target, "drafter weights": 4 * drafter, "optimizer": 8 * drafter}, 4 * drafter


def _logits(sizes: Sizes, config: TrainConfig) -> int:
    """Draft logits of a chunk of labels with their gradients, target logits of its judges, and copies of the head.

    With labels = reached, the argmax over all columns is chunked to stay below this.
    """
    drafter, value = sizes.drafter, sizes.value_bytes
    chunk = ChunkShape.of(config, drafter.draft_vocab_size)
    by_logit = value + CHUNK_BYTES[config.loss] if config.compile == "off" else 2 * value
    logits = by_logit * chunk.num_labels * drafter.draft_vocab_size + value * chunk.num_judges * drafter.vocab_size
    is_own, is_chosen = drafter.head == "own", drafter.draft_vocab_size < drafter.vocab_size
    num_copies = 2 if is_own else int(is_chosen)  # a separate head has gradients
    return logits + num_copies * value * drafter.draft_vocab_size * drafter.hidden_size


def _transient_values(config: Any, drafter: DrafterConfig) -> int:
    """Values per token that one target layer holds: residual, norm, and the larger of attention and MLP.

    The drafter has the target's attention shape.
    """
    attention = 2 * (drafter.num_heads + drafter.num_kv_heads) * drafter.head_dim
    inner = drafter.intermediate_size
    chosen = getattr(config, "num_experts_per_tok", None)
    if chosen:
        inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
    return int(3 * config.hidden_size + max(attention, 3 * inner))
