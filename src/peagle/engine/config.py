"""Settings of an engine, as the user gives them and as they are resolved for a target and a device."""

from dataclasses import dataclass
from typing import Literal

from peagle.errors import ConfigError

GPU_MAX_BATCH, CPU_MAX_BATCH = 256, 16
GPU_MAX_LENGTH, CPU_MAX_LENGTH = 8192, 4096
GPU_MAX_HELD = 8
GPU_VERIFY_ROWS = 320
MIN_CHUNKS, MAX_CHUNKS = 8, 64
"""Chunks of the smallest and the largest prefill pass, the last of which holds the padding."""


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine serves at once, and how. None means: chosen for the device, and logged."""

    max_batch: int | None = None
    """requests that run at the same time; by default 256 on a GPU, 16 on a CPU"""
    max_length: int | None = None
    """most tokens of one text, prompt and answer; by default the target's limit, or 8192 (4096 on a CPU) if lower"""
    page_size: int = 32
    """tokens a page of key-value memory holds"""
    num_pages: int | None = None
    """pages of key-value memory; by default as many as `memory_share` pays for and requests can use"""
    memory_share: float = 0.9
    """share of the free GPU memory to take for pages; on a CPU a quarter of it is taken of all memory"""
    prefill_tokens: int = 2048
    """most prompt tokens run in one step beside the decoding requests"""
    verify_rows: int | None = None
    """rows of a pass that verifies drafts, newest tokens included; where a batch has more, the first draft of each
    request is verified, and then the likeliest to be kept. 0: always all. By default 320 on a GPU, all on a CPU"""
    max_held: int | None = None
    """steps for which a new request may be held back, while many decode, to share its prefill pass with others; by
    default 8 on a GPU, where a pass costs its launches, and none on a CPU"""
    max_waiting: int | None = None
    """requests that may wait for a place in the batch; one more is refused, over HTTP with a 503. None: any number"""
    reuse_prefixes: bool = True
    """keep the pages of earlier texts and take them over where a prompt begins alike"""
    compile: bool | None = None
    """on a GPU: compile the layers; by default yes"""
    capture: bool | None = None
    """on a GPU: record each step as a CUDA graph; by default yes"""
    capture_adjusted: bool = False
    """on a GPU: record the steps with penalties, biases and grammars at start too, not when first needed"""

    pack: bool | None = None
    """on a CPU: keep a packed copy of the linear layers' weights too; by default in float32"""
    quantize: Literal["int8"] | None = None
    """on a CPU: give the target 8-bit weights. They are another target than the float ones: answers are those of the
    rounded weights, and a drafter, which stays as it is, is still verified by them. The float weights stay in memory"""

    def __post_init__(self) -> None:
        if self.quantize not in (None, "int8"):
            raise ConfigError(f"quantize must be 'int8' or None, got {self.quantize!r}")
        for name in ("max_batch", "max_length", "page_size", "num_pages", "prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("max_held", "max_waiting", "verify_rows"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length must be at least 2, got {self.max_length}", hint="one token of prompt and one of answer"
            )


def decode_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own: a batch runs in the next larger one.

    >>> decode_buckets(100)
    (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    """
    powers = [2**exponent for exponent in range(max_batch.bit_length())]
    between = [3 * power // 2 for power in powers if power >= 16]
    return (*sorted(size for size in powers + between if size < max_batch), max_batch)


def prefill_buckets(prefill_tokens: int) -> tuple[tuple[int, int], ...]:
    """(tokens, chunks) of prefill passes: a plan runs in the first that holds it.

    >>> prefill_buckets(2048)
    ((128, 8), (256, 8), (512, 16), (768, 24), (1024, 32), (1536, 48), (2048, 64))
    """
    sizes = sorted({max(prefill_tokens * sixteenths // 16, 1) for sixteenths in (1, 2, 4, 6, 8, 12, 16)})
    return tuple((size, max(MIN_CHUNKS, MAX_CHUNKS * size // prefill_tokens)) for size in sizes)
