"""A target that reads and writes paged memory: the same transformers modules, with our attention inside.

A batch is one long row of tokens, of any number of requests; which token belongs to whom is told by `PagedRows`.

Shapes: N tokens, R of them with logits, V vocabulary, A concatenated aux width, H query and G key-value heads, E head
width.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from peagle.errors import TargetError
from peagle.kernels.attention import PagedRows, on_host, paged_attention
from peagle.targets.hf import HFTarget, check_own_attention
from peagle.targets.probing import check_window, window_as_mask

PAGED, PROBE = "peagle_paged", "peagle_probe"
# What models hand to an attention function besides what it uses: none of it changes the result here.
HARMLESS = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "cache_position",
    "is_causal",
    "past_key_values",
}
HARMLESS |= {"output_attentions", "output_hidden_states", "return_dict", "output_router_logits", "shared_kv_states"}

Memory = list[tuple[Tensor, Tensor]]
"""One pair of key and value pages a layer, each [pages, page_size, G, E]."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: `num_groups` keys and as many values of `width` numbers."""

    num_groups: int
    width: int


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function faster without changing what it does; the identity where there is no compiler."""


class PagedTarget:
    """Runs a target over paged memory. It switches the target's attention and layers; `close` gives them back.

    `compile` is applied to the layers' own forward, once for each class of layer: layers of one class run the same
    code, so that compiling one compiles all, and a model of any depth starts in the time of one layer.
    """

    def __init__(self, target: HFTarget, compile: Compile | None = None) -> None:
        self.target = target
        self._memory: Memory = []
        AttentionInterface.register(PAGED, _attend_paged)
        AttentionMaskInterface.register(PAGED, _no_mask)
        AttentionInterface.register(PROBE, _attend_probe)
        AttentionMaskInterface.register(PROBE, window_as_mask)
        target.check_not_lent()
        target.is_lent = True
        # Four dimensions tell transformers that a mask is made already; our attention needs none, and does not read it.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=target.device)
        self._earlier_attention: str = target.model.config._attn_implementation
        try:
            self.layers = self._probe()
            target.model.set_attn_implementation(PAGED)
            self._install(compile or (lambda function: function))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the target its own attention and layers back."""
        self.target.model.set_attn_implementation(self._earlier_attention)
        for module in self._parts():
            module.__dict__.pop("forward", None)
        self._memory = []
        self.target.is_lent = False

    def new_memory(self, num_pages: int, page_size: int) -> Memory:
        """Empty pages for every layer. Zeros, so that rows nobody reads cannot spread what is not a number."""
        return new_memory(self.layers, num_pages, page_size, self.target.dtype, self.target.device)

    def forward(
        self,
        token_ids_N: Tensor,
        position_N: Tensor,
        memory: Memory,
        rows: PagedRows,
        logit_rows_R: Tensor | None,
        has_aux: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the tokens and keep their keys and values: logits [R, V] (of all rows for None) and aux states [N, A]."""
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

    def _parts(self) -> list[nn.Module]:
        """The layers, and what else of the decoder is worth compiling."""
        decoder = self.target.model.get_decoder()
        others = [getattr(decoder, name, None) for name in ("norm", "rotary_emb")]
        return [*self.target.layers, *(module for module in others if isinstance(module, nn.Module))]

    def _install(self, compile: Compile) -> None:
        """Compile the parts, and hand every layer its own pages.

        The pages are given from outside: a layer that looked them up by its number would have to be compiled anew
        for each number.
        """
        compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        for index, module in enumerate(self._parts()):
            kind = type(module)
            if kind not in compiled:
                compiled[kind] = compile(_steady(kind.forward) if hasattr(module, "rope_type") else kind.forward)
            is_layer = index < len(self.target.layers)
            module.forward = self._with_pages(compiled[kind], module, index if is_layer else None)

    def _with_pages(self, forward: Callable[..., Any], module: nn.Module, index: int | None) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if index is None:
                return forward(module, *args, **kwargs)
            return forward(module, *args, **kwargs, paged_pages=self._memory[index])

        return run

    @torch.no_grad()
    def _probe(self) -> tuple[LayerShape, ...]:
        """Run one token to learn what each layer keeps, and refuse what our attention does not do."""
        model = self.target.model
        check_own_attention(self.target)
        model.set_attn_implementation(PROBE)
        found: dict[int, LayerShape] = {}
        token = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        probe = partial(_check_layer, found, type(model).__name__, self.target.max_length)
        try:
            model(input_ids=token, position_ids=token, use_cache=False, paged_probe=probe)
        except TypeError as error:
            raise TargetError(
                f"{type(model).__name__} does not hand arguments on to its attention, as transformers' newer models do",
                hint="decode such a target with transformers, or serve it on vLLM",
            ) from error
        missing = [index for index in range(self.target.num_layers) if index not in found]
        if missing:
            raise TargetError(
                f"layer {missing[0]} of {type(model).__name__} does not attend through transformers' attention "
                "interface: it may be linear attention, a state-space layer or an older kind of module",
                hint="the engine serves models whose layers all attend over keys and values; decode such a target "
                "with transformers",
            )
        return tuple(found[index] for index in range(self.target.num_layers))


def _steady(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A rotary embedding's forward without transformers' look at the longest text of the batch.

    Up to the target's `max_length` that look changes nothing, and a CUDA graph cannot take it.
    """
    return inspect.unwrap(forward)


def new_memory(
    layers: tuple[LayerShape, ...], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> Memory:
    def pages(layer: LayerShape) -> Tensor:
        return torch.zeros(num_pages, page_size, layer.num_groups, layer.width, dtype=dtype, device=device)

    return [(pages(layer), pages(layer)) for layer in layers]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


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
    paged_probe: Callable[..., None],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in HARMLESS)
    paged_probe(module.layer_idx, query, key, value, attention_mask, sliding_window, unknown)
    return torch.zeros_like(query).transpose(1, 2), None


def _check_layer(
    found: dict[int, LayerShape],
    name: str,
    max_length: int,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int | None,
    unknown: list[str],
) -> None:
    """Note what a layer keeps, or refuse what our attention does not do."""
    if unknown:
        raise TargetError(
            f"{name} gives its attention {', '.join(unknown)} (layer {index}), which the engine does not know",
            hint="decode such a target with transformers",
        )
    if key.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise TargetError(
            f"{name} has keys of {key.shape[-1]} and values of {value.shape[-1]} numbers a head (layer {index}); "
            "the engine wants the same",
        )
    if index in found:
        raise TargetError(
            f"{name} attends more than once in layer {index}, and the engine keeps one set of keys and values",
            hint="decode such a target with transformers, or serve it on vLLM",
        )
    check_window(mask, window, max_length, f"layer {index} of {name}")
    found[index] = LayerShape(key.shape[1], key.shape[-1])
