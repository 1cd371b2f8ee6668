"""How much memory a step needs, and with it how many rows go through at once and in how many segments.

The estimate counts tensors. What a compiled layer keeps for its backward pass is known: a test asks torch for it, and
the numbers of values below are its answer. A step has phases, and the fullest one decides:

    target      weights, optimizer, the target's states and what one of its layers needs in passing
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
from peagle.training.batches import SLOT_MULTIPLE
from peagle.training.cod import max_num_slots
from peagle.training.config import TrainConfig
from peagle.training.distributed import World, can_spread
from peagle.training.features import is_worth_capturing
from peagle.training.labels import ChunkShape
from peagle.training.objective import is_compiled
from peagle.training.partition import segment_size

log = logging.getLogger(__name__)

USABLE = 0.94  # of the device's memory; the rest is lost between blocks of the allocator
MOST_PARTITIONS = 64
GIB = 2**30
ALONE = World()


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


def saved_values(drafter: DrafterConfig, index: int) -> int:
    """Values a slot that a compiled layer keeps for its backward pass, the state that enters it included.

    The state, what attention reads (the first layer also the embedding), query and output of attention, the state
    between, its norm, and three of the width of the gated layer. Keys and values are counted by the caller.
    """
    width, inner = drafter.hidden_size, drafter.num_heads * drafter.head_dim
    read = 3 * width if index == 0 else width  # embedding, and both halves of what attention reads
    return width + read + 2 * inner + 2 * width + 3 * drafter.intermediate_size


def estimate(sizes: Sizes, config: TrainConfig, micro_batch_size: int, num_partitions: int) -> Estimate:
    """What a step needs at most."""
    weights, gradients = _weights(sizes, config)
    tokens = micro_batch_size * config.max_length
    value, width = sizes.value_bytes, sizes.target_width
    num_aux = len(sizes.drafter.aux_layer_ids)
    states = tokens * value * (num_aux + 1) * width
    if sizes.keeps_all_logits:
        states += tokens * value * (sizes.drafter.vocab_size - width)
    activations, transient = _drafter_activations(sizes, config, micro_batch_size, num_partitions)
    accumulates = num_partitions > 1 or micro_batch_size * sizes.num_processes < config.batch_size
    before = gradients if accumulates else 0
    # A layer's own are made beside those they are added to.
    layer_gradients = before + 4 * sizes.layer_parameters
    # The aux states lie beside each other for a moment before they are joined.
    passing = tokens * value * (sizes.target_transient_values + num_aux * width) if config.features == "online" else 0
    kept = {"target states": states, "target activations": passing if sizes.target_is_captured else 0}
    phases: dict[str, dict[str, int]] = {
        "target": weights | {"gradients": before, "target states": states, "target activations": passing},
        "loss": weights
        | {"gradients": before, **kept, "drafter activations": activations, "logits chunk": _logits(sizes, config)},
        "backward": weights | {"gradients": layer_gradients, **kept, "drafter activations": activations + transient},
        "update": weights | {"gradients": gradients, **kept},
    }
    fullest = max(phases, key=lambda name: sum(phases[name].values()))
    return Estimate(micro_batch_size, num_partitions, fullest, phases[fullest])


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
    moments = 8 * drafter - (4 * layers if config.optimizer == "muon" else 0)
    return {"target weights": target, "drafter weights": 4 * drafter, "optimizer": moments}, 4 * drafter


def _drafter_activations(
    sizes: Sizes, config: TrainConfig, micro_batch_size: int, num_partitions: int
) -> tuple[int, int]:
    """Bytes that are kept for the backward pass at once, and those that one layer's backward pass adds."""
    drafter, value = sizes.drafter, sizes.value_bytes
    cod = (config.num_draft_tokens, config.retention, config.retention_floor)
    row_slots = max_num_slots(config.max_length, *cod)
    size = segment_size(row_slots, num_partitions, config.num_draft_tokens, SLOT_MULTIPLE)
    slots, tokens = micro_batch_size * size, micro_batch_size * config.max_length
    key_values = 2 * drafter.num_kv_heads * drafter.head_dim
    context = tokens if num_partitions > 1 else 0
    width = drafter.hidden_size
    by_layer = [slots * saved_values(drafter, index) for index in range(drafter.num_layers)]
    copies = sizes.layer_parameters * value  # weights in the activations' type, kept with them
    # Keys and values are kept joined to the context's, and once more where they are the slots' own.
    joined = (slots + 2 * context if context else slots) * key_values
    if config.checkpoint_activations:
        kept = drafter.num_layers * slots * (width + key_values) + max(by_layer) + joined
        num_bytes = value * kept + copies
    else:
        num_bytes = value * (sum(by_layer) + drafter.num_layers * joined) + drafter.num_layers * copies
    # Rotary tables, the states of labels and their gradients; positions and ranges of slots as whole numbers.
    num_bytes += slots * (2 * drafter.head_dim * value + 3 * width * value + 12 * 8)
    # Context: keys and values of all columns and their gradients; fused states of all columns and theirs.
    num_bytes += value * (2 * drafter.num_layers * context * key_values + 2 * tokens * width)
    if config.method == "eagle3":
        num_bytes += _dense_masks(config, micro_batch_size)
    transient = value * slots * (2 * drafter.intermediate_size + 2 * width) + sizes.layer_parameters * value
    return num_bytes, transient


def _dense_masks(config: TrainConfig, micro_batch_size: int) -> int:
    """EAGLE-3's passes attend with masks of slots times all earlier slots, in the activations' type."""
    cod = (config.retention, config.retention_floor)
    ends = [max_num_slots(config.max_length, depth + 1, *cod) for depth in range(config.num_draft_tokens)]
    return micro_batch_size * 2 * sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False))


def _logits(sizes: Sizes, config: TrainConfig) -> int:
    """Logits of a chunk of labels and their gradients, and those of its judges; an own head's copy and gradients."""
    drafter = sizes.drafter
    chunk = ChunkShape.of(config, drafter.draft_vocab_size)
    logits = sizes.value_bytes * (
        2 * chunk.num_labels * drafter.draft_vocab_size + chunk.num_judges * drafter.vocab_size
    )
    copies = 2 * sizes.value_bytes * drafter.draft_vocab_size * drafter.hidden_size if drafter.head == "own" else 0
    return logits + copies


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
