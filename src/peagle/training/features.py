"""What the drafter learns from: the target's states over packed rows, and its logits where there is a label.

Shapes: B rows, T tokens, A concatenated aux width, D target width, N labels, V vocabulary.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from peagle.errors import ConfigError
from peagle.kernels.compiler import compiled
from peagle.targets.captured import CapturedPass
from peagle.targets.hf import HFTarget
from peagle.targets.packed import PackedOutput, PackedTarget, TargetHead
from peagle.training.batches import Batch
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation
from peagle.training.distributed import World
from peagle.training.feature_store import FeatureStore, States, Text
from peagle.training.objective import is_compiled

log = logging.getLogger(__name__)

SMALL_TARGET_BYTES = 2**31


class PackedText(Protocol):
    """The part of a `Batch` that the target reads; -1 in `document_BT` is padding."""

    @property
    def token_ids_BT(self) -> Tensor: ...
    @property
    def document_BT(self) -> Tensor: ...
    @property
    def position_BT(self) -> Tensor: ...


class Features(NamedTuple):
    """The target's states of one micro-batch. They need no gradient."""

    aux_hidden_BTA: Tensor
    last_hidden_BTD: Tensor
    """what the target's head reads; where a head cannot be applied to it alone, the logits themselves"""
    head: Callable[[Tensor], Tensor]

    def judge_logits(self, row_N: Tensor, column_N: Tensor) -> Tensor:
        """The target's logits [N, V] of some tokens: its distribution of the token after each."""
        return self.head(self.last_hidden_BTD[row_N, column_N])


class FeatureSource(Protocol):
    """Where the target's states of a micro-batch come from."""

    def prepare(self, batch: Batch) -> None:
        """Begin to fetch what `batch` will need, in the thread that makes batches; called once before `__call__`."""
        ...

    def __call__(self, batch: Batch) -> Features:
        """The states of a batch that lies on the device."""
        ...


class OnlineFeatures:
    """The target runs in this process, once for each micro-batch. What it gave is overwritten by the next one.

    `compiles` and `captures` (in a CUDA graph) say how; by default what is fastest for the target where it is.
    """

    def __init__(self, target: HFTarget, *, compiles: bool | None = None, captures: bool | None = None) -> None:
        compiles = target.device.type == "cuda" if compiles is None else compiles
        self._packed = PackedTarget(target, functools.partial(compiled, dynamic=False) if compiles else None)
        self._captures = (compiles and is_worth_capturing(target)) if captures is None else captures
        self._captures = self._captures and self._packed.can_pack
        self._captured: dict[torch.Size, CapturedPass[PackedOutput]] = {}

    def prepare(self, batch: PackedText) -> None:
        """There is nothing to fetch."""

    def __call__(self, batch: PackedText) -> Features:
        text = (batch.token_ids_BT, batch.document_BT, batch.position_BT)
        shape = batch.token_ids_BT.shape
        if self._captures and shape not in self._captured:
            try:
                self._captured[shape] = CapturedPass(self._packed.forward, *text)
            except RuntimeError as error:
                log.warning("the target's pass cannot be recorded as a CUDA graph, so it is launched: %s", error)
                self._captures = False
        output = self._captured[shape](*text) if self._captures else self._packed.forward(*text)
        return Features(output.aux_hidden_BTA, output.last_hidden_BTD, self._packed.head)


def is_worth_capturing(target: HFTarget) -> bool:
    """Whether its launches take longer than its arithmetic: a small model, all of it here, without experts.

    Experts are chosen by looking at values, which a graph cannot.
    """
    config = target.model.config.get_text_config()
    parameters = list(target.model.parameters())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    is_whole = not any(isinstance(parameter, DTensor) for parameter in parameters)
    has_experts = bool(getattr(config, "num_experts_per_tok", None))
    return target.device.type == "cuda" and num_bytes < SMALL_TARGET_BYTES and is_whole and not has_experts


class CachedFeatures:
    """The target ran once over all conversations, and its states are read from disk."""

    def __init__(self, target: HFTarget, store: FeatureStore) -> None:
        head = TargetHead(target)
        if not head.is_exact:
            raise ConfigError(
                f"the head of {type(target.model).__name__} does something peagle does not know, and the logits of "
                "all tokens would be too large to keep",
                hint='set features to "online"',
            )
        self._head, self._store, self._device = head, store, target.device
        self._prepared: dict[tuple[tuple[int, ...], ...], States] = {}

    def prepare(self, batch: Batch) -> None:
        states = self._store.read(batch.documents)
        if self._device.type == "cuda":
            states = States(*(tensor.pin_memory() for tensor in states))
        self._prepared[batch.documents] = states

    def __call__(self, batch: Batch) -> Features:
        if batch.documents not in self._prepared:
            self.prepare(batch)
        states = self._prepared.pop(batch.documents)
        aux_hidden_BTA, last_hidden_BTD = (tensor.to(self._device, non_blocking=True) for tensor in states)
        return Features(aux_hidden_BTA, last_hidden_BTD, self._head)


def features_for(
    target: HFTarget, config: TrainConfig, conversations: Sequence[Conversation], world: World
) -> FeatureSource:
    """The source that `config` names; cached states are completed first.

    Ask before the target is spread over the processes: each of them completes files of its own.
    """
    compiles = is_compiled(config, target.device)
    if config.features == "online":
        return OnlineFeatures(target, compiles=compiles, captures=False if world.shards_layers(config) else None)
    directory = config.features_directory or config.output / "features"
    store = FeatureStore(directory, target, conversations, config.max_length)
    source = CachedFeatures(target, store)
    packed = PackedTarget(target, functools.partial(compiled, dynamic=False) if compiles else None)

    def states_of(text: Text) -> States:
        output = packed.forward(*(tensor.to(target.device) for tensor in text))
        return States(output.aux_hidden_BTA, output.last_hidden_BTD)

    store.complete(states_of, config.micro_batch_size or config.batch_size, world)
    return source
