"""Several processes on one run, as `torchrun` starts them: each takes a share of every batch's rows.

Gradients are sums over all processes of sum(loss) / num_labels, with num_labels that of the whole batch, so the number
of processes does not change what is learned. `ddp` keeps a whole drafter in each; `fsdp` shards the layers of drafter
and target (FSDP2), gathering one layer at a time, and keeps the rest whole.
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
from peagle.targets.hf import HFTarget
from peagle.training.config import TrainConfig

log = logging.getLogger(__name__)


@contextlib.contextmanager
def joined_world() -> "Iterator[World]":
    """The processes that `torchrun` started, this one among them, for as long as the block runs; else this one alone.

    On GPUs each process takes the one of its local rank as its current device, so enter before a target is loaded.
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
            f"WORLD_SIZE is {number!r}, but the processes cannot be joined: {error}",
            hint="start them with torchrun, or unset WORLD_SIZE to train in one process",
        ) from error
    if dist.get_rank():
        logging.getLogger("peagle").setLevel(logging.WARNING)  # the first process tells of the choices of all
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class World:
    """This process's place among those of the run. Its methods are called by all of them together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> "World":
        """The world of `joined_world`, or that of one process."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def check(self, config: TrainConfig) -> None:
        if config.batch_size % self.size:
            raise ConfigError(
                f"batch_size {config.batch_size} cannot be shared by {self.size} processes",
                hint=f"use a multiple of {self.size}",
            )

    def shards_layers(self, config: TrainConfig) -> bool:
        """Whether the layers of drafter and target are spread over the processes."""
        return config.parallel == "fsdp" and self.size > 1

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def total(self, number: int) -> int:
        """The sum of a number over the processes. It does not wait for a device."""
        return self._joined(number, dist.ReduceOp.SUM)

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers."""
        return self._joined(number, dist.ReduceOp.MIN)

    def _joined(self, number: int, operation: Any) -> int:
        if self.size == 1:
            return number
        held = torch.tensor(number)
        dist.all_reduce(held, operation)
        return int(held)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by the first process's: noise drawn on unlike GPUs, or sums made there, need not be equal."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, 0)

    def reduce(self, *tensors: Tensor) -> None:
        """Replace tensors of one dtype by their sums over the processes, in one message."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *others: Tensor) -> None:
        """Sum the gradients of what every process has whole, and other tensors with them, over the processes.

        Those of sharded layers were summed by the backward.
        """
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if self.size > 1:
            for parameter in whole:
                if parameter.grad is None:  # every process must send as much
                    parameter.grad = torch.zeros_like(parameter)
        self.reduce(*(parameter.grad for parameter in whole if parameter.grad is not None), *others)

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients down to a joint norm of `max_norm`; returns the norm before."""
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


def shard(drafter: Drafter, target: HFTarget) -> None:
    """Spread the layers of both over the processes (FSDP2); a layer is whole only while it runs.

    Tables, the fusing layer and the head stay whole. The drafter must be the same in all processes before.
    """
    # By default a root, which each layer is, would stay whole until a backward, and the target has none.
    for layer in drafter.layers:
        fully_shard(layer, reshard_after_forward=True)
        assert isinstance(layer, FSDPModule), "made one just now"
        layer.set_gradient_divide_factor(1.0)  # sums, not means, in the backward
        layer.set_force_sum_reduction_for_comms(True)
    if not can_spread(target):
        log.warning("the target's weights are quantized, so each process keeps all of them")
        return
    target.keep_fingerprint()
    for layer in target.layers:
        fully_shard(layer, reshard_after_forward=True)


def can_spread(target: HFTarget) -> bool:
    """Whether the target's layers can be sharded: quantized weights cannot."""
    return all(parameter.is_floating_point() for parameter in target.layers.parameters())


def whole_state(state: Any) -> Any:
    """A state dict with sharded tensors gathered. All processes call it together, and each gets everything."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole_state(value) for value in state)
    return state


def state_by_name(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, and the optimizer's state of each by its name, gathered: it does not matter who was sharded how."""
    moments = {name: state[parameter] for name, parameter, state in _states(drafter, optimizer)}
    return {"drafter": whole_state(drafter.state_dict()), "optimizer": whole_state(moments)}


def load_state_by_name(drafter: Drafter, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `state_by_name` gave, each process taking its shards of it."""
    own = drafter.state_dict()
    drafter.load_state_dict({name: _like(tensor, own.get(name)) for name, tensor in state["drafter"].items()})
    for name, parameter, states in _states(drafter, optimizer):
        states[parameter] = {
            key: _like(value, parameter) if torch.is_tensor(value) and value.dim() else value
            for key, value in state["optimizer"][name].items()
        }


def _states(
    drafter: Drafter, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, dict[Tensor, Any]]]:
    """Each trained parameter with its name and the place of its state, in the one of joined optimizers that has it."""
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    for part in getattr(optimizer, "optimizers", (optimizer,)):
        for group in part.param_groups:
            for parameter in group["params"]:
                yield names[parameter], parameter, part.state


def _like(tensor: Tensor, own: Tensor | None) -> Tensor:
    if not isinstance(own, DTensor):
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
