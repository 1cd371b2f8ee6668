"""Settings of an engine, and the batch shapes that CUDA graphs are captured for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from peagle.errors import ConfigError

GPU_MAX_BATCH, CPU_MAX_BATCH = 256, 16
GPU_MAX_LENGTH, CPU_MAX_LENGTH = 8192, 4096
GPU_MAX_DELAY = 8
"""Most steps that a new request waits to share its prefill pass with others."""
VERIFY_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of the verification passes that the engine chooses from."""
USEFUL_SIZE = 20
"""Average tokens per request beyond which a larger pass of several requests gains too little to deserve a graph."""
MIXED_BATCH = 32
"""Batches from this size on have a pass for a few drafting requests; in smaller ones it costs as much as the next."""
TREE_NODES, TREE_DEPTH = 31, 8
"""The tree of drafts by default. With the newest token it has 32 rows, which fill the tiles of kernels."""
SHARED_BUCKETS, LARGE_SHARED_BUCKETS = ((128, 8), (256, 8)), ((256, 8), (512, 16), (768, 24))
"""(tokens, chunks) of the prompts that may share the pass of a decode step: of up to 64 requests, and of more"""
SHARED_SIZE = 8
"""Most tokens per decoding request in a shared pass."""
MIN_CHUNKS, MAX_CHUNKS = 8, 64
"""Chunks of the smallest and the largest prefill pass. The last chunk holds the padding."""


@dataclass(frozen=True)
class EngineOptions:
    """Capacity and memory of the native engine."""

    max_batch: int | None = None
    """requests that run at the same time; default: 256 on a GPU, 16 on a CPU"""
    max_length: int | None = None
    """maximum tokens per sequence, prompt plus output; default: the target's limit, at most 8192 (4096 on a CPU)"""
    max_waiting: int | None = None  # no limit
    """requests that may wait in the queue; further ones are refused (HTTP 503)"""
    memory_share: float = 0.9
    """share of the free GPU memory for the KV cache; on a CPU, of a quarter of all memory"""
    prefill_tokens: int = 2048
    """maximum prompt tokens per step: raise it for throughput, lower it for steady streams; a server on a CPU prefills
    for about 0.4 s per step while other requests run"""
    reuse_prefixes: bool = True
    """keep the KV cache of finished requests and reuse it for prompts with the same prefix"""
    eager: bool = False
    """on a GPU: neither compile layers nor capture CUDA graphs; starts faster, decodes slower"""

    def __post_init__(self) -> None:
        for name, minimum in (("max_batch", 1), ("max_length", 2), ("max_waiting", 0), ("prefill_tokens", 1)):
            self._require(name, minimum)
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")

    def _require(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {value}")


@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    """All settings of an engine: the options above, and those that only programs set."""

    page_size: int = 32
    """tokens per page of the KV cache"""
    num_pages: int | None = None
    """pages of the KV cache; default: as many as `memory_share` allows and requests can use"""
    tree_nodes: int | None = None
    """nodes of the tree of drafts per request, for parallel drafters; default: a chain of num_draft_tokens if that is
    given, else a tree of 31"""
    verify_tokens: int | None = None
    """fixed limit on the tokens of a verification pass. If the batch has more, the engine verifies the first draft of
    each request, then the drafts most likely to be accepted. 0: verify all. Default: those that pay (`draft_budget`)"""
    capture_adjusted: bool = False
    """capture CUDA graphs for penalties, biases and grammars at start: per batch size those with no and with the most
    drafts. All others are captured when a request first needs them"""
    captured_batches: tuple[int, ...] = ()
    """for measurements that start quickly: batch sizes with a CUDA graph, the last of them `max_batch`, and one graph
    for prefill; no passes are shared. Default: `decode_buckets` and `prefill_buckets`"""
    assumed_acceptance: tuple[float, ...] = ()
    """for measurements with random weights: accept the draft at each depth of a chain in this share of the steps,
    whatever the target says"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, minimum in (("page_size", 1), ("num_pages", 1), ("verify_tokens", 0)):
            self._require(name, minimum)
        batches = self.captured_batches
        if batches and (list(batches) != sorted({*batches}) or batches[0] < 1 or batches[-1] != self.max_batch):
            raise ConfigError(f"captured_batches must ascend to max_batch={self.max_batch}, got {list(batches)}")
        shares = self.assumed_acceptance
        if not all(0 <= share <= 1 for share in shares) or any(a < b for a, b in pairwise(shares)):
            raise ConfigError(f"assumed_acceptance must be shares that do not grow with depth, got {list(shares)}")
        if shares and self.tree_nodes is not None:
            raise ConfigError("assumed_acceptance is for chains, but tree_nodes asks for a tree")


def decode_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes with a CUDA graph. A batch runs in the smallest graph that fits it.

    >>> decode_buckets(100)
    (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    """
    powers = [2**exponent for exponent in range(max_batch.bit_length())]
    between = [3 * power // 2 for power in powers if power >= 16]
    return (*sorted(size for size in powers + between if size < max_batch), max_batch)


def verify_sizes(batch: int, num_drafts: int, limit: int | None = None) -> tuple[int, ...]:
    """Sizes of the verification passes of a batch with up to `num_drafts` drafts each, to choose from.

    The first is plain decoding. The others have room for at least one draft per request, except for one size of large
    batches: it serves a few drafting requests beside many that opted out. With a `limit`, as in
    `EngineConfig.verify_tokens`, there is one size with drafts.

    >>> verify_sizes(1, 31), verify_sizes(8, 31), verify_sizes(256, 31)
    ((1, 8, 16, 32), (8, 16, 32, 64, 128), (256, 320, 512, 768, 1024))
    >>> verify_sizes(8, 0), verify_sizes(8, 16, limit=0), verify_sizes(64, 7, limit=320)
    ((8,), (8, 136), (64, 320))
    """
    most = batch * (num_drafts + 1)
    if limit is not None:
        return tuple(sorted({batch, min(most, max(limit, 2 * batch)) if limit else most}))
    useful = [size for size in VERIFY_SIZES if size <= max(VERIFY_SIZES[3], USEFUL_SIZE * batch)]
    between = (size for size in useful if 2 * batch <= size <= 0.8 * most)
    few = {batch + batch // 4} if batch >= MIXED_BATCH and num_drafts else set()
    return tuple(sorted({batch, *few, *between, min(most, max(2 * batch, useful[-1]))}))


def shared_buckets(batch: int, prefill_tokens: int) -> tuple[tuple[int, int], ...]:
    """(tokens, chunks) of prompts that may share the pass of a decode step of `batch` requests.

    >>> shared_buckets(64, 2048), shared_buckets(65, 2048), shared_buckets(8, 100)
    (((128, 8), (256, 8)), ((256, 8), (512, 16), (768, 24)), ())
    """
    buckets = SHARED_BUCKETS if batch <= 64 else LARGE_SHARED_BUCKETS
    return tuple(bucket for bucket in buckets if bucket[0] <= prefill_tokens)


def shared_bucket(batch: int, prefill_tokens: int, num_tokens: int, num_chunks: int) -> tuple[int, int] | None:
    """The smallest of these buckets with room for the chunks and one of padding, if there is one."""
    fitting = (
        (tokens, chunks)
        for tokens, chunks in shared_buckets(batch, prefill_tokens)
        if num_tokens <= tokens and num_chunks < chunks
    )
    return next(fitting, None)


def shared_size(sizes: Sequence[int]) -> int:
    """The verification pass size that prompts may share, out of the `verify_sizes` of a batch.

    >>> [shared_size(verify_sizes(batch, 31)) for batch in (1, 8, 64, 256)], shared_size(verify_sizes(8, 0))
    ([8, 64, 512, 1024], 8)
    """
    batch, *drafting = sizes
    return max((size for size in drafting if size <= SHARED_SIZE * batch), default=min(drafting, default=batch))


def prefill_buckets(prefill_tokens: int) -> tuple[tuple[int, int], ...]:
    """(tokens, chunks) of the prefill graphs. A plan runs in the first graph that fits it.

    >>> prefill_buckets(2048)
    ((128, 8), (256, 8), (512, 16), (768, 24), (1024, 32), (1536, 48), (2048, 64))
    """
    sizes = sorted({max(prefill_tokens * sixteenths // 16, 1) for sixteenths in (1, 2, 4, 6, 8, 12, 16)})
    return tuple((size, max(MIN_CHUNKS, MAX_CHUNKS * size // prefill_tokens)) for size in sizes)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler."""

    max_batch: int
    """requests that run at the same time, one row each"""
    max_length: int
    """maximum tokens per sequence, prompt plus output"""
    prefill_tokens: int
    """maximum prompt tokens per plan"""
    max_chunks: int = 64
    """maximum prompts per plan"""
    max_delay: int = 0
    """most plans that a new request waits to share its prefill pass with others"""
    shares_passes: bool = False
    """whether few prompt tokens run in the pass of a decode step (`shared_buckets`), not in one of their own"""

    @classmethod
    def of(cls, config: EngineConfig, max_length: int, is_gpu: bool) -> "SchedulerConfig":
        """The limits of an engine. One chunk of a pass is padding."""
        max_batch = config.max_batch or (GPU_MAX_BATCH if is_gpu else CPU_MAX_BATCH)
        max_delay = GPU_MAX_DELAY if is_gpu else 0
        shares_passes = is_gpu and not config.captured_batches
        return cls(max_batch, max_length, config.prefill_tokens, MAX_CHUNKS - 1, max_delay, shares_passes)

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_length", "prefill_tokens", "max_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
