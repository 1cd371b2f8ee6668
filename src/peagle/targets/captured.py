"""A pass that is recorded once as a CUDA graph and then replayed: a small target is bound by launches otherwise."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class CapturedPass(Generic[T]):
    """`run` over tensors of the shapes of `examples`. It owns its inputs and what `run` gave when it was recorded.

    Every call returns the same tensors with new contents, so they must have been used before the next one; whatever is
    queued on the same stream in between has. `run` must not wait for the device, nor look at its inputs' values.
    """

    def __init__(self, run: Callable[..., T], *examples: Tensor) -> None:
        self._inputs = [example.clone() for example in examples]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # the first one compiles, the second finds everything there
                run(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread moves the next batches meanwhile; only what this one does is recorded and judged.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = run(*self._inputs)

    def __call__(self, *inputs: Tensor) -> T:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._output
