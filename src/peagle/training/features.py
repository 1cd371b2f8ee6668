"""The target's hidden states of packed sequences, computed online or read from disk, and its logits at labels.

Shapes: B rows, T tokens, A concatenated aux width, D target width, N labels, V vocabulary.
"""

import functools
import logging
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from peagle.data.conversations import Conversation
from peagle.errors import ConfigError
from peagle.kernels.compiler import compiled
from peagle.objective.batches import Batch
from peagle.objective.config import TrainConfig
from peagle.objective.objective import Features, is_compiled
from peagle.targets.captured import CapturedPass
from peagle.targets.hf import HFTarget
from peagle.targets.packed import PackedOutput, PackedTarget, TargetHead
from peagle.training.distributed import World
from peagle.training.feature_store import FeatureStore, States, Text

log = logging.getLogger(__name__)

SMALL_TARGET_BYTES = 2**31


class OnlineFeatures:
    """Runs the target on each micro-batch, compiled or as a CUDA graph. The next call overwrites the result."""

    def __init__(self, target: HFTarget, *, compiles: bool = False, captures: bool = False) -> None:
        self._packed = PackedTarget(target, functools.partial(compiled, dynamic=False) if compiles else None)
        self._captures = captures and self._packed.can_pack
        self._captured: dict[torch.Size, CapturedPass[PackedOutput]] = {}

    def prepare(self, batch: Batch) -> None:
        """Nothing to prefetch."""

    def __call__(self, batch: Batch | Text) -> Features:
        text = (batch.token_ids_BT, batch.document_BT, batch.position_BT)
        shape = batch.token_ids_BT.shape
        if self._captures and shape not in self._captured:
            try:
                self._captured[shape] = CapturedPass(self._packed.forward, *text)
            except RuntimeError as error:
                log.warning("cannot capture the target's forward as a CUDA graph, falling back to launches: %s", error)
                self._captures = False
        output = self._captured[shape](*text) if self._captures else self._packed.forward(*text)
        return Features(output.aux_hidden_BTA, output.last_hidden_BTD, self._packed.head)


def is_worth_capturing(target: HFTarget) -> bool:
    """Whether kernel launches dominate: a small, unsharded model without experts.

    Expert routing depends on values, which a CUDA graph cannot capture.
    """
    config = target.model.config.get_text_config()
    parameters = list(target.model.parameters())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    is_whole = not any(isinstance(parameter, DTensor) for parameter in parameters)
    has_experts = bool(getattr(config, "num_experts_per_tok", None))
    return target.device.type == "cuda" and num_bytes < SMALL_TARGET_BYTES and is_whole and not has_experts


class CachedFeatures:
    """Reads states from a `FeatureStore`."""

    def __init__(self, target: HFTarget, store: FeatureStore) -> None:
        head = TargetHead(target)
        if not head.is_exact:
            raise ConfigError(
                f"cannot cache features of {type(target.model).__name__}: its head cannot run separately, and the "
                "logits of all tokens are too large to store",
                hint="use --features online",
            )
        self._head, self._store, self._device = head, store, target.device
        self._prepared: dict[tuple[tuple[int, ...], ...], States] = {}

    def prepare(self, batch: Batch) -> None:
        """Read the states of `batch`, in the prefetch thread."""
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


FeatureSource = OnlineFeatures | CachedFeatures


def features_for(
    target: HFTarget, config: TrainConfig, conversations: Sequence[Conversation], world: World
) -> FeatureSource:
    """The feature source for `config`. Completes the cache on disk first.

    Call before the target is sharded: each process writes its own files.
    """
    compiles = is_compiled(config, target.device)
    if config.features == "online":
        captures = compiles and is_worth_capturing(target) and not world.shards_layers(config)
        return OnlineFeatures(target, compiles=compiles, captures=captures)
    directory = config.features_directory or config.output / "features"
    store = FeatureStore(directory, target, conversations, config.max_length)
    source = CachedFeatures(target, store)
    online = OnlineFeatures(target, compiles=compiles)

    def states_of(text: Text) -> States:
        features = online(Text(*(tensor.to(target.device) for tensor in text)))
        return States(features.aux_hidden_BTA, features.last_hidden_BTD)

    store.complete(states_of, config.micro_batch_size or config.batch_size, world)
    return source
