"""How much memory a step needs, and with it how many rows go through at once and in how many segments.

The estimate counts tensors; those of the drafter's passes are in `activations.py`. A step has phases, and the fullest
one decides:

    target      weights, optimizer, the target's states and what one of its layers needs in passing
    masks       the target's states and what P-EAGLE's masks need while they are made, if there are any
    loss        what the drafter keeps for the backward pass, and the logits of one chunk of labels
    backward    the same with the gradients of one layer's activations in place of the logits
    update      weights, optimizer and all gradients

Values are bfloat16 (2 bytes) where the target is in half precision, whatever the drafter's own weights are kept in.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import CapacityError
from peagle.targets.hf import HFTarget
from peagle.training.activations import parallel_activations, unrolled_activations
from peagle.training.config import TrainConfig
from peagle.training.distributed import World, can_spread
from peagle.training.features import is_worth_capturing
from peagle.training.labels import ChunkShape
from peagle.training.objective import is_compiled

log = logging.getLogger(__name__)

USABLE = 0.94  # of the device's memory; the rest is lost between blocks of the allocator
MOST_PARTITIONS = 64
GIB = 2**30
ALONE = World()
CHUNK_BYTES = {"ce": 4 * 5 + 1, "kl": 4 * 8, "kl+ce": 4 * 8 + 1}
"""a logit, in a loss that is not compiled: its tensors of float32 at once, and one that marks the choices"""


@dataclass(frozen=True)
class Sizes:
    """Everything about models and machine that the estimate depends on; bytes unless it says otherwise."""

    target_weights: int
    target_transient_values: int
    """values a token that one layer of the target has at once"""
    target_width: int
    keeps_all_logits: bool
    """the target's head cannot be applied alone, so the logits of all tokens are kept"""
    drafter: DrafterConfig
    num_parameters: int
    layer_parameters: int
    """parameters of one layer of the drafter, the largest"""
    value_bytes: int
    """of an activation"""
    matrix_parameters: int = 0
    """parameters that Muon would train"""
    target_is_captured: bool = False
    """its pass is recorded as a graph, which keeps the memory of its activations"""
    num_processes: int = 1
    shards_layers: bool = False
    target_spread: int = 0
    """the part of the target's weights that is spread over the processes"""
    target_layer: int = 0
    """the largest layer of that part, whole while it runs"""

    @classmethod
    def of(cls, target: HFTarget, drafter: Drafter, config: TrainConfig, world: World = ALONE) -> "Sizes":
        """Ask before anything is sharded."""
        from peagle.targets.packed import TargetHead

        spread = target.layers if world.shards_layers(config) and can_spread(target) else ()
        layers = [sum(part.numel() * part.element_size() for part in layer.parameters()) for layer in spread]
        return cls(
            target_weights=sum(tensor.numel() * tensor.element_size() for tensor in _storages(target.model)),
            target_transient_values=_transient_values(target.model.config.get_text_config(), drafter.config),
            target_width=target.hidden_size,
            keeps_all_logits=not TargetHead(target).is_exact,
            drafter=drafter.config,
            num_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
            layer_parameters=max(sum(part.numel() for part in layer.parameters()) for layer in drafter.layers),
            value_bytes=2 if target.dtype in (torch.bfloat16, torch.float16) else 4,
            matrix_parameters=sum(
                parameter.numel()
                for name, parameter in drafter.named_parameters()
                if parameter.dim() == 2 and name.startswith(("layers.", "fc."))
            ),
            target_is_captured=is_compiled(config, target.device) and is_worth_capturing(target) and not layers,
            num_processes=world.size,
            shards_layers=world.shards_layers(config),
            target_spread=sum(layers),
            target_layer=max(layers, default=0),
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes by part in the fullest phase of a step."""

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
            f"{self.total / GIB:.2f} GiB at {self.micro_batch_size} rows at once in {self.num_partitions} "
            f"segments ({self.phase}: {parts})"
        )


def estimate(sizes: Sizes, config: TrainConfig, micro_batch_size: int, num_partitions: int) -> Estimate:
    """What a step needs at most."""
    found = phases(sizes, config, micro_batch_size, num_partitions)
    fullest = max(found, key=lambda name: sum(found[name].values()))
    return Estimate(micro_batch_size, num_partitions, fullest, found[fullest])


def phases(sizes: Sizes, config: TrainConfig, micro_batch_size: int, num_partitions: int) -> dict[str, dict[str, int]]:
    """Bytes by part in each phase of a step."""
    weights, gradients = _weights(sizes, config)
    tokens = micro_batch_size * config.max_length
    value, width = sizes.value_bytes, sizes.target_width
    drafter, num_aux = sizes.drafter, len(sizes.drafter.aux_layer_ids)
    states = tokens * value * (num_aux + 1) * width
    if sizes.keeps_all_logits:
        states += tokens * value * (drafter.vocab_size - width)
    accumulates = num_partitions > 1 or micro_batch_size * sizes.num_processes < config.batch_size
    before = gradients if accumulates else 0
    # The loss leaves the gradients of an own head behind.
    head_gradients = before or (4 * drafter.draft_vocab_size * drafter.hidden_size if drafter.head == "own" else 0)
    # A layer's own are made beside those they are added to.
    layer_gradients = head_gradients + 4 * sizes.layer_parameters
    # The aux states lie beside each other for a moment before they are joined.
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
    """The most rows at once that fit into `room`, and the fewest segments; what the settings fix is kept."""
    best: Estimate | None = None
    for candidate in _candidates(sizes, config):
        found = estimate(sizes, config, *candidate)
        if found.total <= USABLE * room:
            return found
        best = found if best is None or found.total < best.total else best
    assert best is not None, "there is always one candidate"
    raise CapacityError(
        f"a step needs {best}, but the device has {room / GIB:.1f} GiB",
        hint=_remedy(config),
    )


def planned(target: HFTarget, drafter: Drafter, config: TrainConfig, world: World = ALONE) -> TrainConfig:
    """`config` with the rows at once and the segments filled in; the estimate is logged. On a CPU all rows at once.

    All processes must run the same passes, so the one with the least room decides.
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
    log.info("memory: %s, of %.1f GiB", found, room / GIB)
    return replace(config, micro_batch_size=found.micro_batch_size, num_partitions=found.num_partitions)


def _candidates(sizes: Sizes, config: TrainConfig) -> Iterator[tuple[int, int]]:
    """Rows at once and segments, from the fastest to the smallest: first fewer rows, then more segments."""
    rows = config.batch_size // sizes.num_processes
    sizes_at_once = [min(config.micro_batch_size, rows)] if config.micro_batch_size else _halves(rows)
    for micro_batch_size in sizes_at_once:
        yield micro_batch_size, config.num_partitions or 1
    if config.num_partitions is None and config.method == "p-eagle":
        num_partitions = 2
        while num_partitions <= MOST_PARTITIONS:
            yield sizes_at_once[-1], num_partitions
            num_partitions *= 2


def _halves(number: int) -> list[int]:
    """The number and its divisors below it that halving gives, down to one.

    >>> _halves(64), _halves(12)
    ([64, 32, 16, 8, 4, 2, 1], [12, 6, 3, 1])
    """
    found = [number]
    while found[-1] > 1:
        half = found[-1] // 2
        found.append(half if found[-1] % 2 == 0 else 1)
    return found


def _remedy(config: TrainConfig) -> str:
    remedies = ["lower max_length or num_draft_tokens"]
    if not config.checkpoint_activations:
        remedies.insert(0, "set checkpoint_activations")
    if config.method == "p-eagle" and config.num_partitions is not None:
        remedies.insert(0, "leave num_partitions out")
    return ", ".join(remedies) + ", or spread the run over several GPUs with parallel = fsdp"


def _weights(sizes: Sizes, config: TrainConfig) -> tuple[dict[str, int], int]:
    """Bytes of weights and optimizer, and of all gradients. Weights, gradients and moments are float32.

    AdamW has two moments, Muon one for the layers' matrices.
    """
    drafter, layers = sizes.num_parameters, sizes.layer_parameters * sizes.drafter.num_layers
    target = sizes.target_weights
    if sizes.shards_layers:
        spread = layers - layers // sizes.num_processes
        drafter = drafter - spread + sizes.layer_parameters
        target -= sizes.target_spread - sizes.target_spread // sizes.num_processes - sizes.target_layer
    moments = 8 * drafter - (4 * sizes.matrix_parameters if config.optimizer == "muon" else 0)
    return {"target weights": target, "drafter weights": 4 * drafter, "optimizer": moments}, 4 * drafter


def _logits(sizes: Sizes, config: TrainConfig) -> int:
    """Logits of a chunk of labels and their gradients, and those of its judges; copies of the head's rows.

    Judging all columns, where only reached labels are learned, takes less: it is cut to fit into the labels' logits.
    """
    drafter, value = sizes.drafter, sizes.value_bytes
    chunk = ChunkShape.of(config, drafter.draft_vocab_size)
    by_logit = value + CHUNK_BYTES[config.loss] if config.compile == "off" else 2 * value
    logits = by_logit * chunk.num_labels * drafter.draft_vocab_size + value * chunk.num_judges * drafter.vocab_size
    is_own, is_chosen = drafter.head == "own", drafter.draft_vocab_size < drafter.vocab_size
    num_copies = 2 if is_own else int(is_chosen)  # the head, of which an own one has gradients
    return logits + num_copies * value * drafter.draft_vocab_size * drafter.hidden_size


def _storages(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, each once however often it is used."""
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return list(found.values())


def _transient_values(config: Any, drafter: DrafterConfig) -> int:
    """Values a token that one layer has at once: residual, norm, and the wider of attention and gated layer.

    Heads are the drafter's, which are the target's.
    """
    attention = 2 * (drafter.num_heads + drafter.num_kv_heads) * drafter.head_dim
    inner = drafter.intermediate_size
    chosen = getattr(config, "num_experts_per_tok", None)
    if chosen:
        inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
    return int(3 * config.hidden_size + max(attention, 3 * inner))
