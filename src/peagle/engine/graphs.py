"""Compiling parts of a step, and recording whole steps as CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from peagle.kernels import skinny_linear
from peagle.kernels.compiler import compiled
from peagle.kernels.skinny_linear import join_sums

T = TypeVar("T")


@dataclass(frozen=True)
class Captures:
    """What start-up cost: graphs recorded, seconds, and bytes of device memory they hold."""

    num_graphs: int
    seconds: float
    num_bytes: int


class RecordingError(RuntimeError):
    """A pass that runs but cannot be recorded, because it waits for the device: it looks at values on the way."""


def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for any batch size at once. Variants of one function (0, 1 or more rows, kinds of layers) are few."""
    return compiled(function, dynamic=True)


class JoinSums(CustomGraphPass):
    """`join_sums` as a pass of torch's compiler, under a name by which compiled code is found again."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        join_sums(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((skinny_linear.__file__,))


@contextmanager
def compiler_settings() -> Iterator[None]:
    with (
        torch._inductor.config.patch(
            {
                "combo_kernels": True,  # independent small kernels become one launch
                "post_grad_custom_post_pass": JoinSums(),
                "triton.enable_pdl": True,  # kernels begin while the one before them ends, as ours do
            }
        ),
        torch.fx.experimental._config.patch(  # type: ignore[attr-defined]  # installed at import
            use_duck_shape=False
        ),
    ):
        yield


def record(run: Callable[[], T], pool: Any) -> Callable[[], T]:
    """Record `run` as a CUDA graph, after running it twice: the first compiles, the second finds everything there."""
    stream = _rehearsal_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), compiler_settings():
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with compiler_settings(), torch.cuda.graph(graph, pool=pool):
            decoded = run()
    except RuntimeError as error:
        # Where a pass fails, ending its recording fails too, and hides why.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        if isinstance(first, torch.cuda.OutOfMemoryError):
            raise first from None
        raise RecordingError(str(first).partition("\n")[0]) from error

    def replay() -> T:
        graph.replay()
        return decoded

    return replay


def replay_seconds(replay: Callable[[], Any], num_replays: int) -> float:
    """How long the device takes for one of so many replays in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_replays):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / num_replays


@cache
def _rehearsal_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: the libraries keep a workspace of tens of megabytes for every stream they have met."""
    return torch.cuda.Stream(device)
