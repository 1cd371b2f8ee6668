"""Data-parallel training under `torchrun`: each process takes a share of every batch.

Gradients are summed over the processes and normalized by the labels of the whole batch, so the result does not depend
on the number of processes. `ddp` replicates the drafter; `fsdp` shards the layers of drafter and target (FSDP2) and
gathers one layer at a time.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from peagle.drafter.model import Drafter
from peagle.errors import ConfigError
from peagle.objective.config import TrainConfig
from peagle.targets.few_bit import few_bit_modules
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)


@contextlib.contextmanager
def joined_world() -> "Iterator[World]":
    """Join the process group that `torchrun` started; a single process without it.

    Each process selects the GPU of its local rank, so enter before loading a target.
    """
    number = os.environ.get("WORLD_SIZE", "1")
    if number == "1":
        yield World()
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend)
    except ValueError as error:
        raise ConfigError(
            f"WORLD_SIZE is {number!r}, but the process group cannot start: {error}",
            hint="start the processes with torchrun, or unset WORLD_SIZE to train in one process",
        ) from error
    if dist.get_rank():
        logging.getLogger("peagle").setLevel(logging.WARNING)  # the main process logs for all
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class World:
    """Rank and size of the process group. All processes call its methods together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> "World":
        """The process group of `joined_world`, or a single process."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def check(self, config: TrainConfig) -> None:
        if config.batch_size % self.size:
            raise ConfigError(
                f"batch_size {config.batch_size} is not divisible by {self.size} processes",
                hint=f"use a multiple of {self.size}",
            )

    def shards_layers(self, config: TrainConfig) -> bool:
        """Whether the layers of drafter and target are sharded."""
        return config.parallel == "fsdp" and self.size > 1

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def total(self, number: int) -> int:
        """The sum over the processes. Does not synchronize with the device."""
        return self._joined(number, dist.ReduceOp.SUM)

    def least(self, number: int) -> int:
        """The minimum over the processes."""
        return self._joined(number, dist.ReduceOp.MIN)

    def _joined(self, number: int, operation: Any) -> int:
        if self.size == 1:
            return number
        held = torch.tensor(number)
        dist.all_reduce(held, operation)
        return int(held)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from rank 0: random numbers and sums may differ between unlike GPUs."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, 0)

    def reduce(self, *tensors: Tensor) -> None:
        """All-reduce tensors of one dtype in a single call."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *others: Tensor) -> None:
        """All-reduce the gradients of unsharded parameters, together with other tensors.

        Backward has already reduced those of sharded layers.
        """
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if self.size > 1:
            for parameter in whole:
                if parameter.grad is None:  # all processes must send the same sizes
                    parameter.grad = torch.zeros_like(parameter)
        self.reduce(*(parameter.grad for parameter in whole if parameter.grad is not None), *others)

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the global gradient norm to `max_norm`. Returns the norm before clipping."""
        listed = list(parameters)
        sharded = [parameter for parameter in listed if isinstance(parameter, DTensor)]
        if not sharded:
            return nn.utils.clip_grad_norm_(listed, max_norm)
        gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
        local = [grad.to_local() for grad in gradients if isinstance(grad, DTensor)]
        whole = [grad for grad in gradients if not isinstance(grad, DTensor)]
        square = torch.stack([grad.square().sum() for grad in local]).sum()
        self.reduce(square)
        norm = (square + sum(grad.square().sum() for grad in whole)).sqrt()
        for grad in local + whole:
            grad.mul_((max_norm / (norm + 1e-6)).clamp_max(1.0))
        return norm


ALONE = World()


def shard(drafter: Drafter, target: HFTarget) -> None:
    """Shard the layers of both with FSDP2. Embeddings, `fc` and the head stay whole.

    The drafter must be identical in all processes.
    """
    # Each layer is an FSDP root, which by default stays gathered until backward; the target has no backward.
    for layer in drafter.layers:
        fully_shard(layer, reshard_after_forward=True)
        assert isinstance(layer, FSDPModule), "fully_shard makes it one"
        layer.set_gradient_divide_factor(1.0)  # backward sums instead of averaging
        layer.set_force_sum_reduction_for_comms(True)
    if not can_shard(target):
        log.warning("the target's weights are quantized and not sharded; each process keeps all of them")
        return
    target.keep_fingerprint()
    for layer in target.layers:
        fully_shard(layer, reshard_after_forward=True)


def can_shard(target: HFTarget) -> bool:
    """Whether the target's layers can be sharded: quantized weights cannot."""
    is_plain = all(parameter.is_floating_point() for parameter in target.layers.parameters())
    return is_plain and not any(few_bit_modules(target.layers))


def whole_state(state: Any) -> Any:
    """A state dict with sharded tensors gathered in every process."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole_state(value) for value in state)
    return state


def state_by_name(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gathered weights and optimizer state by parameter name, independent of the sharding."""
    moments = {name: optimizer.state[parameter] for name, parameter in _trained(drafter, optimizer)}
    return {"drafter": whole_state(drafter.state_dict()), "optimizer": whole_state(moments)}


def load_state_by_name(drafter: Drafter, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the result of `state_by_name`; each process takes its shards."""
    own = drafter.state_dict()
    drafter.load_state_dict({name: _like(tensor, own.get(name)) for name, tensor in state["drafter"].items()})
    for name, parameter in _trained(drafter, optimizer):
        optimizer.state[parameter] = {
            key: _like(value, parameter) if torch.is_tensor(value) and value.dim() else value
            for key, value in state["optimizer"][name].items()
        }


def _trained(drafter: Drafter, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters with their names."""
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def _like(tensor: Tensor, own: Tensor | None) -> Tensor:
    if not isinstance(own, DTensor):
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
