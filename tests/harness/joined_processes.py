"""Training in several real processes that talk over the loopback, with the variables that torchrun sets.

A fork server imports torch and transformers once; each process is a fork of it and starts at once.
"""

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from harness.tiny_models import tiny_target
from harness.tiny_training import conversations, new_trainer, settings
from peagle.training.distributed import joined_world, whole_state

STOPPED = 7
TIMEOUT_S = 240
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["transformers.models.llama.modeling_llama", "peagle.training.trainer"])


def run_processes(output: Path, num_processes: int, **changes: Any) -> list[int | None]:
    """Train in `num_processes` processes. Return their exit statuses: 0, or 7 after `stop_after`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        CONTEXT.Process(target=_train, args=(common | {"RANK": str(rank)}, output, changes))
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(TIMEOUT_S)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert set(statuses) <= {0, STOPPED}, f"exit statuses {statuses}; stderr has the traceback"
    return statuses


def _train(variables: dict[str, str], output: Path, changes: dict[str, Any]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    last_step = changes.pop("stop_after", None)

    def on_step(step: int, metrics: object) -> None:
        if step == last_step:
            sys.exit(STOPPED)

    with joined_world() as world:
        config = settings(output, **changes)
        world.check(config)
        assert world.least(5 + world.rank) == 5
        noise = torch.full((3,), float(world.rank))
        world.share([noise])
        assert not noise.any(), "all have what the first one has"
        target = tiny_target()
        trainer = new_trainer(target, config, world)
        trainer.train(conversations(), on_step)
        for layers in (target.layers, trainer.drafter.layers):
            is_spread = {isinstance(parameter, DTensor) for parameter in layers.parameters()}
            assert is_spread == {config.parallel == "fsdp"}, "between steps no process holds a whole layer"
        state = whole_state(trainer.drafter.state_dict())
        if world.is_main:
            torch.save(state, output / "weights.pt")
