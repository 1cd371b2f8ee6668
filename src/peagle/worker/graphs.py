"""Compiling parts of a step, and capturing whole steps as CUDA graphs."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from peagle.cache import cache_directory
from peagle.experts import top_k
from peagle.experts.top_k import use_top_k
from peagle.kernels.compiler import compiled
from peagle.linears import skinny_linear
from peagle.linears.skinny_linear import join_sums, use_skinny_products

T = TypeVar("T")

COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureCost:
    """Cost of capturing at start-up: graphs, seconds, and bytes of device memory that the graphs hold."""

    num_graphs: int
    seconds: float
    num_bytes: int


class CaptureError(RuntimeError):
    """A pass runs but cannot be captured, because it synchronizes with the device."""


def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for any batch size. A function has few variants: 0, 1 or more rows, kinds of layers.

    If the compiler fails, as on combined kernels that sort a few tokens by expert (torch 2.11), the function falls back
    to uncombined kernels, then to eager code, with one warning each.
    """
    fast, name = compiled(function, dynamic=True), getattr(function, "__qualname__", repr(function))

    def separate(*args: Any, **kwargs: Any) -> Any:
        with torch._inductor.config.patch(combo_kernels=False):
            return fast(*args, **kwargs)

    ways = [(fast, "uncombined kernels"), (separate, "eager code"), (function, "")]

    def run(*args: Any, **kwargs: Any) -> Any:
        while True:
            way, next_way = ways[0]
            try:
                return way(*args, **kwargs)
            except BackendCompilerFailed as error:
                if not next_way:
                    raise
                reason = str(error.inner_exception).strip().partition("\n")[0]
                log.warning("torch.compile fails on %s (%s); falling back to %s", name, reason, next_way)
                ways.pop(0)

    return run


def keep_compiled_code() -> None:
    """Keep compiled code across restarts, unless the user chose a directory for it.

    Importing the compiler sets the variable to a directory in /tmp.
    """
    if os.environ.get(COMPILED_VARIABLE) in (None, default_cache_dir()):
        os.environ[COMPILED_VARIABLE] = str(cache_directory() / "compiled")


class UseKernels(CustomGraphPass):
    """Our graph passes as one pass of Inductor, with a uuid so that its compile cache works."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        use_top_k(graph)
        use_skinny_products(graph)
        join_sums(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((skinny_linear.__file__, top_k.__file__))


@contextmanager
def compiler_settings() -> Iterator[None]:
    with (
        torch._inductor.config.patch(
            {
                "combo_kernels": True,  # fuse independent small kernels into one launch
                "post_grad_custom_post_pass": UseKernels(),
                "triton.coalesce_tiling_analysis": False,  # fails for some reductions over dynamic shapes (torch 2.11)
                "triton.enable_pdl": True,  # programmatic dependent launch, as in our own kernels
            }
        ),
        torch.fx.experimental._config.patch(  # type: ignore[attr-defined]  # installed at import
            use_duck_shape=False
        ),
        torch._dynamo.config.patch(
            fake_tensor_cache_enabled=False  # for symbolic shapes it costs more than it saves: 19% of tracing
        ),
    ):
        yield


def capture(run: Callable[[], T], pool: Any) -> Callable[[], T]:
    """Capture `run` as a CUDA graph and return its replay. A run before it compiles and loads kernels."""
    stream = _warm_up_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), compiler_settings():
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with compiler_settings(), torch.cuda.graph(graph, pool=pool):
            result = run()
    except RuntimeError as error:
        # If a pass fails, ending the capture fails too. The first error is the cause.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        if isinstance(first, torch.cuda.OutOfMemoryError):
            raise first from None
        raise CaptureError(str(first).partition("\n")[0]) from error

    def replay() -> T:
        graph.replay()
        return result

    return replay


def replay_seconds(replay: Callable[[], Any], num_replays: int) -> float:
    """Device time per replay, averaged over `num_replays` in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_replays):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / num_replays


@cache
def _warm_up_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures: libraries keep a workspace of tens of megabytes per stream."""
    return torch.cuda.Stream(device)
