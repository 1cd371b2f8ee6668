"""Key-value memory: how many pages a device has room for, and the pages themselves."""

import logging
from dataclasses import dataclass

import torch

from peagle.engine.config import EngineConfig
from peagle.errors import CapacityError
from peagle.targets.capacity import memory_bytes
from peagle.targets.paged import LayerShape, Memory, new_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVCache:
    """Pages of the target and of the drafter. One page id stands for a page in every layer of both."""

    num_pages: int
    page_size: int
    target_memory: Memory
    drafter_memory: Memory


def page_bytes(layers: tuple[LayerShape, ...], page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page in all layers, keys and values."""
    return sum(2 * page_size * layer.num_groups * layer.width * dtype.itemsize for layer in layers)


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken for pages."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return memory_bytes() // 4


def choose_num_pages(config: EngineConfig, bytes_a_page: int, free: int, pages_a_text: int, max_batch: int) -> int:
    """Pages to make, the waste page included: as many as fit, or as requests can use if that is fewer.

    Refused if they could not hold a single text of full length.
    """
    affordable = int(free * config.memory_share) // bytes_a_page
    wanted = config.num_pages + 1 if config.num_pages is not None else pages_a_text * max_batch + 1
    if config.num_pages is not None and wanted > affordable:
        raise CapacityError(
            f"{config.num_pages} pages take {config.num_pages * bytes_a_page / 2**30:.2f} GiB, but "
            f"{affordable * bytes_a_page / 2**30:.2f} GiB can be had (memory_share {config.memory_share})",
            hint=f"ask for at most {max(affordable - 1, 0)} pages",
        )
    chosen = min(wanted, affordable)
    if chosen < pages_a_text + 1:
        raise CapacityError(
            f"there is room for {max(chosen - 1, 0)} pages of {config.page_size} tokens "
            f"({bytes_a_page / 2**20:.1f} MiB each), but one text of full length needs {pages_a_text}",
            hint="lower max_length, or give the engine more memory (memory_share, num_pages)",
        )
    log.info(
        "%d pages of %d tokens, %.2f GiB: %s",
        chosen - 1,
        config.page_size,
        chosen * bytes_a_page / 2**30,
        "as asked for"
        if config.num_pages is not None
        else "all that requests can use"
        if chosen == wanted
        else "all that fit",
    )
    return chosen


def make_kv_cache(
    target_layers: tuple[LayerShape, ...],
    drafter_layers: tuple[LayerShape, ...],
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    return KVCache(
        num_pages,
        page_size,
        new_memory(target_layers, num_pages, page_size, dtype, device),
        new_memory(drafter_layers, num_pages, page_size, dtype, device),
    )
