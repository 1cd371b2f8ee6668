"""The KV cache: how many pages fit on the device, and the pages themselves."""

import logging
from dataclasses import dataclass

import torch

from peagle.drafter.model import Drafter
from peagle.errors import CapacityError
from peagle.host_memory import total_bytes
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget
from peagle.targets.paged import LayerShape, Memory, PagedTarget

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVCache:
    """Pages of the target and of the drafter. A page id names the same page in every layer of both."""

    num_pages: int
    page_size: int
    target_memory: Memory
    drafter_memory: Memory


def page_bytes(layers: tuple[LayerShape, ...], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers, keys and values."""
    return sum(2 * page_size * layer.num_groups * layer.width * dtype.itemsize for layer in layers)


def free_bytes(device: torch.device) -> int:
    """Memory available for pages."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return total_bytes() // 4


def choose_num_pages(
    config: EngineConfig, bytes_per_page: int, free: int, pages_per_sequence: int, max_batch: int
) -> int:
    """Number of pages, the waste page included: as many as fit, or as requests can use if that is fewer.

    Raises CapacityError if they cannot hold one sequence of full length.
    """
    affordable = int(free * config.memory_share) // bytes_per_page
    wanted = config.num_pages + 1 if config.num_pages is not None else pages_per_sequence * max_batch + 1
    if config.num_pages is not None and wanted > affordable:
        raise CapacityError(
            f"num_pages={config.num_pages} takes {config.num_pages * bytes_per_page / 2**30:.2f} GiB, but "
            f"{affordable * bytes_per_page / 2**30:.2f} GiB is available (memory_share={config.memory_share})",
            hint=f"use at most {max(affordable - 1, 0)} pages",
        )
    chosen = min(wanted, affordable)
    if chosen < pages_per_sequence + 1:
        raise CapacityError(
            f"the KV cache has room for {max(chosen - 1, 0)} pages of {config.page_size} tokens "
            f"({bytes_per_page / 2**20:.1f} MiB each), but one sequence of full length needs {pages_per_sequence}",
            hint="lower --max-length, or raise --memory-share",
        )
    log.info(
        "KV cache: %d pages of %d tokens, %.2f GiB (%s)",
        chosen - 1,
        config.page_size,
        chosen * bytes_per_page / 2**30,
        "set by num_pages"
        if config.num_pages is not None
        else "all that max_batch requests can use"
        if chosen == wanted
        else "limited by memory",
    )
    return chosen


def make_kv_cache(
    target: PagedTarget,
    drafter: Drafter | None,
    config: EngineConfig,
    max_batch: int,
    pages_per_sequence: int,
    num_drafts: int,
) -> KVCache:
    """Pages for both models. Requests have up to `num_drafts` drafts."""
    drafter_layers: tuple[LayerShape, ...] = ()
    if drafter is not None:
        drafter_layers = (LayerShape(drafter.config.num_kv_heads, drafter.config.head_dim),) * drafter.config.num_layers
    layers, dtype, device = target.layers, target.target.dtype, target.target.device
    num_pages = choose_num_pages(
        config,
        page_bytes(layers + drafter_layers, config.page_size, dtype),
        free_bytes(device) - activation_bytes(target.target, config.prefill_tokens, max_batch, num_drafts),
        pages_per_sequence,
        max_batch,
    )
    memories = (Memory(each, num_pages, config.page_size, dtype, device) for each in (layers, drafter_layers))
    return KVCache(num_pages, config.page_size, *memories)


def activation_bytes(target: HFTarget, prefill_tokens: int, max_batch: int, num_drafts: int) -> int:
    """Memory to leave for activations: logits, in float32 at worst, and the hidden states of some layers."""
    if target.device.type != "cuda":
        return 0
    num_logits = max(max_batch * (num_drafts + 1), 64)
    num_tokens = max(prefill_tokens, 2 * num_logits)
    intermediate = getattr(target.model.config.get_text_config(), "intermediate_size", 0) or 0
    width = 8 * target.hidden_size + 4 * intermediate
    # Adjusted logits need two more copies in float32, and tables per row. Their graphs may be captured late, but the
    # memory must be there: running out of it then would fail every request.
    logits = (14 * num_logits + 6 * max_batch) * target.vocab_size
    return logits + 4 * num_tokens * width + 2**30
