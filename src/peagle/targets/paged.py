"""A target over a paged KV cache: transformers' modules with our attention.

A batch is one row of tokens of any number of requests; `PagedRows` maps each token to its request.

Shapes: N tokens, R of them with logits, V vocabulary, A concatenated aux width, H query and G key-value heads, E head
width.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from peagle.errors import TargetError
from peagle.kernels.attention import PagedRows, on_host, paged_attention
from peagle.kernels.compiler import Compile
from peagle.targets.hf import HFTarget
from peagle.targets.native_layers import native_layers
from peagle.targets.probing import OTHER_ENGINES, Probe, check_layer_types, no_mask, window_as_mask

PAGED, PROBE = "peagle_paged", "peagle_probe"


@dataclass(frozen=True)
class LayerShape:
    """A layer's KV cache entry per token: `num_groups` key heads and value heads of `width` numbers."""

    num_groups: int
    width: int


class Memory:
    """The pages of a KV cache. `memory[layer]` are a layer's keys and values, each [pages, page_size, G, E].

    Zeroed: unused entries must not contain NaN. The keys of all layers of one shape share a tensor, and so do their
    values, so that few launches move entries in all layers. Keys and values must not share one: torch.compile gets
    wrong results from two arguments that are written and share memory.
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        self._blocks: list[tuple[Tensor, Tensor]] = []
        """keys and values [layers, cells, G x E] of each shape"""
        pages: dict[int, tuple[Tensor, Tensor]] = {}
        for shape in dict.fromkeys(layers):
            own = [index for index, layer in enumerate(layers) if layer == shape]
            size = (len(own), num_pages, page_size, shape.num_groups, shape.width)
            keys, values = (_zeros(size, dtype, device) for _ in range(2))
            self._blocks.append((keys.flatten(3).flatten(1, 2), values.flatten(3).flatten(1, 2)))
            pages |= {index: (keys[place], values[place]) for place, index in enumerate(own)}
        self._layers = [pages[index] for index in range(len(layers))]

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]

    def free(self) -> None:
        """Drop the pages, whoever still holds this object."""
        self._layers, self._blocks = [], []

    def move(self, source_BK: Tensor, destination_BK: Tensor) -> None:
        """Copy entries of each request from cell to cell in every layer. Skips destinations below 0.

        All entries of a request are read before the first is written.
        """
        for keys, values in self._blocks:
            if keys.is_cuda:
                from peagle.kernels.move_triton import move_entries_triton

                move_entries_triton(keys, values, source_BK, destination_BK)
                continue
            is_moved_BK = destination_BK >= 0
            source_M, destination_M = source_BK[is_moved_BK], destination_BK[is_moved_BK]
            for cells in (keys, values):
                cells.index_copy_(1, destination_M, cells.index_select(1, source_M))


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the system provides memory when it is first written, which most pages never are."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)


class PagedTarget:
    """Runs a target over a paged KV cache. Patches the target's attention and layers; `close` restores them.

    `compile` is applied once per class of layer, to its forward: layers of one class share the compiled code, so a
    model of any depth starts in the time of one layer.
    """

    def __init__(self, target: HFTarget, compile: Compile | None = None) -> None:
        self.target = target
        self._memory: Memory | None = None
        AttentionInterface.register(PAGED, _attend_paged)
        AttentionMaskInterface.register(PAGED, no_mask)
        AttentionInterface.register(PROBE, _attend_probe)
        AttentionMaskInterface.register(PROBE, window_as_mask)
        target.check_not_lent()
        target.is_lent = True
        # A mask with four dimensions keeps transformers from building one; our attention ignores it.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=target.device)
        self._earlier_attention: str = target.model.config._attn_implementation
        try:
            self.layers = self._probe()
            target.model.set_attn_implementation(PAGED)
            is_native = compile is None and target.device.type == "cpu"
            self._install(compile or (lambda function: function), is_native)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the target's attention and layers."""
        self.target.model.set_attn_implementation(self._earlier_attention)
        for module in self.target.compilable_modules():
            module.__dict__.pop("forward", None)
        self._memory = None
        self.target.is_lent = False

    def new_memory(self, num_pages: int, page_size: int) -> Memory:
        return Memory(self.layers, num_pages, page_size, self.target.dtype, self.target.device)

    def forward(
        self,
        token_ids_N: Tensor,
        position_N: Tensor,
        memory: Memory,
        rows: PagedRows,
        logit_rows_R: Tensor | None,
        has_aux: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the tokens and cache their keys and values: logits [R, V] (of all rows for None), aux states [N, A]."""
        self._memory = memory
        output = self.target.model(
            input_ids=token_ids_N[None],
            position_ids=position_N[None],
            use_cache=False,
            logits_to_keep=0 if logit_rows_R is None else logit_rows_R,
            attention_mask=self._mask,
            paged_rows=on_host(rows),
        )
        return output.logits[0], self.target.captured_aux()[0] if has_aux else None

    def _install(self, compile: Compile, is_native: bool) -> None:
        """Compile the modules and pass every layer its own pages.

        Pages are an argument: a layer that looked them up by its index would be compiled once per index.
        """
        compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        modules, forwards = self.target.compilable_modules(), list[Callable[..., Any]]()
        for module in modules:
            kind = type(module)
            if kind not in compiled:
                # A rotary embedding is wrapped to check the longest sequence of the batch. Up to `max_length` the check
                # changes nothing, and a CUDA graph cannot capture it.
                is_rotary = hasattr(module, "rope_type")
                compiled[kind] = compile(inspect.unwrap(kind.forward) if is_rotary else kind.forward)
            forwards.append(partial(compiled[kind], module))
        layers = list(self.target.layers)
        num_layers = len(layers)
        if is_native:
            own = native_layers(layers, forwards[:num_layers], self.windows, self._rotaries)
            forwards[:num_layers] = map(self._with_memory, own)
        else:
            forwards[:num_layers] = map(self._with_pages, forwards[:num_layers], range(num_layers))
        for module, bound in zip(modules, forwards, strict=True):
            module.forward = bound

    def _with_pages(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            assert self._memory is not None, "set by `forward`"
            return forward(*args, **kwargs, paged_pages=self._memory[index])

        return run

    def _with_memory(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: forward(*args, **kwargs, paged_memory=self._memory)

    @torch.no_grad()
    def _probe(self) -> tuple[LayerShape, ...]:
        """Run one token to learn each layer's KV shape, and refuse what our attention does not support."""
        model = self.target.model
        self._rotaries: list[Any] = []
        """the rotary embedding that the model gives to each layer"""
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, __, kwargs: self._rotaries.append(kwargs.get("position_embeddings")), with_kwargs=True
            )
            for layer in self.target.layers
        ]
        check_layer_types(self.target)
        model.set_attn_implementation(PROBE)
        found: dict[int, LayerShape] = {}
        token = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        probe = Probe(type(model).__name__, self.target.max_length)
        try:
            model(input_ids=token, position_ids=token, use_cache=False, paged_probe=probe, paged_layers=found)
        except TypeError as error:
            raise TargetError(
                f"{type(model).__name__} does not pass keyword arguments to its attention, as newer models do",
                hint=OTHER_ENGINES,
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        missing = [index for index in range(self.target.num_layers) if index not in found]
        if missing:
            raise TargetError(
                f"layer {missing[0]} of {type(model).__name__} does not use transformers' attention interface: it may "
                "be linear attention, a state-space layer or an older module",
                hint=OTHER_ENGINES,
            )
        self.windows = [probe.windows[index] for index in range(self.target.num_layers)]
        return tuple(found[index] for index in range(self.target.num_layers))


def _attend_paged(
    module: nn.Module,
    query_1HNE: Tensor,
    key_1GNE: Tensor,
    value_1GNE: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_pages: tuple[Tensor, Tensor],
    paged_rows: PagedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    attended_NHE = paged_attention(
        query_1HNE[0].transpose(0, 1),
        key_1GNE[0].transpose(0, 1),
        value_1GNE[0].transpose(0, 1),
        *paged_pages,
        paged_rows,
        scale=query_1HNE.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks_H=s_aux,
    )
    return attended_NHE[None], None


def _attend_probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_probe: Probe,
    paged_layers: dict[int, LayerShape],
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Record a layer's KV shape, or refuse what our attention does not support."""
    index: int = module.layer_idx  # type: ignore[assignment]  # an int in transformers
    paged_probe.record(index, attention_mask, sliding_window, kwargs)
    if key.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise TargetError(
            f"layer {index} of {paged_probe.name} has keys of width {key.shape[-1]} and values of width "
            f"{value.shape[-1]}; the engine needs equal widths",
            hint=OTHER_ENGINES,
        )
    if index in paged_layers:
        raise TargetError(
            f"{paged_probe.name} attends more than once in layer {index}; the engine has one KV cache per layer",
            hint=OTHER_ENGINES,
        )
    paged_layers[index] = LayerShape(key.shape[1], key.shape[-1])
    return torch.zeros_like(query).transpose(1, 2), None
