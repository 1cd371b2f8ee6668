"""Any transformers causal LM as a target: its own modules, with hooks that capture the aux states.

Shapes: B requests, T tokens, V vocabulary, D width, A concatenated aux width (number of aux layers times D).
"""

import logging
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from peagle.errors import TargetError
from peagle.experts.few_bit import FewBitExperts
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.targets import hub
from peagle.targets.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from peagle.targets.catalog import ASSETS, CatalogDrafter, CatalogEntry
from peagle.targets.fingerprint import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CROPPABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types whose cache can be cropped to an earlier token."""


class TargetOutput(NamedTuple):
    """`aux_hidden_BTA` concatenates the residual stream entering each aux layer, in ascending order."""

    logits_BTV: Tensor
    aux_hidden_BTA: Tensor


class HFTarget:
    """A transformers model and its tokenizer. The model is set to evaluation mode, without gradients."""

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        name: str,
        source: str | None = None,
        directory: Path | None = None,
        entry: CatalogEntry | None = None,
        aux_layer_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.source = source
        """What finds it again: its catalog name, Hugging Face id or absolute path; None if the model was passed."""
        self.directory = directory
        self.entry = entry
        """Its catalog entry, if it has one."""
        self._shipped_drafter: Path | None = None
        self._catalog_drafters: dict[Path, CatalogDrafter] = {}
        self._chosen: CatalogDrafter | None = None
        config = model.config.get_text_config()
        _check_usable(model, config)
        if getattr(config, "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("eager")  # transformers' sdpa ignores the soft cap
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_length = _max_length(config)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.layers = decoder_layers(model)
        self._taps: list[Any] = []
        self._captured: dict[int, Tensor] = {}
        self.aux_layer_ids: tuple[int, ...] = ()
        self.is_lent = False
        """Set while an engine has patched the model; cleared when the engine is closed."""
        self._kept_fingerprint: str | None = None
        self.rounded_to: str | None = None
        """The form that its weights were rounded to while loading, after the fingerprint was taken."""
        self.default_aux_layer_ids = default_aux_layer_ids(self.num_layers)
        self.tap(self.default_aux_layer_ids if aux_layer_ids is None else aux_layer_ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def precision(self) -> str:
        """The dtype it computes in, and the form of its weights if quantized: "bfloat16, int4 weights"."""
        few_bit = (module for module in self.layers.modules() if isinstance(module, FewBitLinear | FewBitExperts))
        forms = sorted({module.form for module in few_bit})
        return ", ".join([str(self.dtype).removeprefix("torch."), *(f"{form} weights" for form in forms)])

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def embedding_VD(self) -> Tensor:
        """The input embedding itself, not a copy."""
        return self.model.get_input_embeddings().weight

    @property
    def head_VD(self) -> Tensor:
        """The output head itself; the embedding if the two are tied."""
        return self.model.get_output_embeddings().weight

    @property
    def final_norm_weight(self) -> Tensor:
        """The scale of the decoder's final norm, which must be named `norm`, as in the Llama family."""
        norm = getattr(self.model.get_decoder(), "norm", None)
        if norm is None:
            raise TargetError(f"{type(self.model).__name__} has no final norm named `norm`")
        return norm_scale(norm)

    @property
    def shipped_drafter(self) -> Path | None:
        """The directory of its published drafter, downloaded if necessary; None if there is none."""
        return self.drafter_for(None)

    @shipped_drafter.setter
    def shipped_drafter(self, directory: Path | None) -> None:
        self._shipped_drafter = directory

    @property
    def shipped_drafter_name(self) -> str | None:
        """The name of that drafter, or of the one chosen last for another length. Downloads nothing."""
        if self._shipped_drafter is not None:
            return self._shipped_drafter.name
        chosen = self._chosen or (self.entry.drafter() if self.entry is not None else None)
        return None if chosen is None else chosen.name

    def drafter_for(self, max_length: int | None) -> Path | None:
        """The best published drafter for texts of up to `max_length` tokens. Refuses one that is not public."""
        if self._shipped_drafter is not None or self.entry is None:
            return self._shipped_drafter
        chosen = self.entry.drafter(max_length=max_length)
        is_choice = sum(each.method == chosen.method for each in self.entry.drafters) > 1
        if is_choice and chosen != self._chosen:
            length = "short texts" if max_length is None else f"texts of up to {max_length} tokens"
            log.info("drafter %s: variant %s, for %s", chosen.name, chosen.variant, length)
        self._chosen = chosen
        return self._fetched(chosen)

    def find_drafter(self, name: str) -> Path | None:
        """The directory of a catalog variant ("long-context") or a model id; None if it is neither."""
        own = () if self.entry is None else self.entry.drafters
        for drafter in own:
            if name in (drafter.variant, drafter.source) and (drafter.where != "package" or drafter.is_here):
                return self._fetched(drafter)
        is_id = name.count("/") == 1 and hub.looks_like_an_id(name)
        return hub.fetch(name, "drafter") if is_id else None

    def catalog_drafter(self, directory: Path) -> CatalogDrafter | None:
        """The catalog's data on a drafter directory that was found through it."""
        return self._catalog_drafters.get(directory)

    def _fetched(self, drafter: CatalogDrafter) -> Path:
        drafter.check_public(self.name)
        assert drafter.source is not None, "the catalog checks this"
        if drafter.where == "package":
            directory = ASSETS / drafter.source
        elif drafter.where == "directory":
            directory = Path(drafter.source).expanduser()
        else:
            directory = hub.fetch(drafter.source, "drafter")
        self._catalog_drafters[directory] = drafter
        return directory

    def tap(self, aux_layer_ids: tuple[int, ...]) -> None:
        """Set the layers whose entering residual stream `forward` returns."""
        check_aux_layer_ids(aux_layer_ids, self.num_layers)
        for tap in self._taps:
            tap.remove()
        self._captured.clear()
        self._taps = [
            self.layers[index].register_forward_pre_hook(partial(self._keep_input, index), with_kwargs=True)
            for index in aux_layer_ids
        ]
        self.aux_layer_ids = tuple(aux_layer_ids)

    def compilable_modules(self) -> list[nn.Module]:
        """The layers, then the decoder's norm and rotary embedding if it has them."""
        others = [getattr(self.model.get_decoder(), name, None) for name in ("norm", "rotary_emb")]
        return [*self.layers, *(module for module in others if isinstance(module, nn.Module))]

    def new_cache(self) -> DynamicCache:
        # Without a config every layer, sliding-window ones too, keeps its whole history, so it can be cropped to any
        # length; the model's masks still apply the windows.
        return DynamicCache()

    def forward(self, token_ids_BT: Tensor, cache: DynamicCache | None = None) -> TargetOutput:
        """Run the tokens that follow those in `cache`, and extend it by them."""
        self.check_not_lent()
        with torch.no_grad():
            output = self.model(input_ids=token_ids_BT, past_key_values=cache, use_cache=cache is not None)
            return TargetOutput(output.logits, self.captured_aux())

    def aux_hidden(self, token_ids_BT: Tensor) -> Tensor:
        """The aux states alone, [B, T, A], without running the head: its logits are by far the largest tensor."""
        self.check_not_lent()
        with torch.no_grad():
            self.model.get_decoder()(input_ids=token_ids_BT, use_cache=False)
            aux_hidden_BTA = self.captured_aux()
        self.forget_captured()
        return aux_hidden_BTA

    def check_not_lent(self) -> None:
        if self.is_lent:
            raise TargetError(
                f"target {self.name!r} is in use by an engine", hint="close that engine first, or load the target again"
            )

    def captured_aux(self) -> Tensor:
        """The aux states of the model's last call, [B, T, A]."""
        return torch.cat([self._captured[index] for index in self.aux_layer_ids], dim=-1)

    def forget_captured(self) -> None:
        """Free the aux states of the model's last call, which would otherwise be kept until the next."""
        self._captured.clear()

    def fingerprint(self) -> str:
        """A hash of the weights, the same in float32 and bfloat16.

        It covers 64 elements of each parameter, rounded to bfloat16, so it takes milliseconds at any size. In float16
        it may differ: small weights lose bits that bfloat16 keeps.
        """
        if self._kept_fingerprint is not None:
            return self._kept_fingerprint
        return fingerprint(self.model)

    def keep_fingerprint(self) -> None:
        """Remember the fingerprint before the weights are sharded over several processes, or quantized."""
        self._kept_fingerprint = self.fingerprint()

    def _keep_input(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._captured[index] = args[0] if args else kwargs["hidden_states"]


@torch.no_grad()
def norm_scale(norm: nn.Module) -> Tensor:
    """The effective scale of an RMS norm, by evaluation: Gemma stores it as a difference from one."""
    weight = next(norm.parameters())
    # The root mean square of a constant is the constant; a large one makes epsilon negligible.
    scale: Tensor = norm(torch.full(weight.shape, 1024.0, dtype=weight.dtype, device=weight.device))
    return scale


def _check_usable(model: "PreTrainedModel", config: Any) -> None:
    """Refuse models whose cache cannot be cropped to an earlier token, and bidirectional models."""
    unknown = set(getattr(config, "layer_types", None) or ()) - CROPPABLE_LAYER_TYPES
    if unknown or getattr(model, "_is_stateful", False):
        kinds = f" ({', '.join(sorted(unknown))})" if unknown else ""
        raise TargetError(
            f"{type(model).__name__} has a recurrent state{kinds} that cannot be rolled back after a rejected draft",
            hint="use a target whose layers all have a KV cache",
        )
    if getattr(config, "is_decoder", True) is False and _reads_ahead(model):
        raise TargetError(
            f"{type(model).__name__} is an encoder: each token attends to later ones",
            hint="the target must be a decoder-only causal LM",
        )


@torch.no_grad()
def _reads_ahead(model: "PreTrainedModel") -> bool:
    """Whether a token's logits depend on the next token. Some decoders' configs do not say is_decoder."""
    logits_2TV = model(input_ids=torch.tensor([[0, 0], [0, 1]], device=model.device), use_cache=False).logits
    first_V, second_V = logits_2TV[:, 0].float()
    return bool((first_V - second_V).abs().max() > 1e-2 * first_V.abs().max())


def _max_length(config: Any) -> int:
    """The context length up to which a token's position does not depend on other sequences of the batch.

    With "longrope", transformers switches frequencies by the longest sequence of a batch, so the limit is the length
    up to which it uses the short ones.
    """
    most: int = getattr(config, "max_position_embeddings", 2**31)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") == "longrope":
            steady = int(rope.get("original_max_position_embeddings") or most)
            if steady < most:
                log.warning("context limited to %d of %d tokens: longrope switches frequencies there", steady, most)
            most = min(most, steady)
    return most


def decoder_layers(model: "PreTrainedModel") -> nn.ModuleList:
    """The decoder's list of layers, found by its length, for any model family."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise TargetError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers",
        hint="the target must be a decoder-only causal LM",
    )


def _eos_token_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """End tokens of the generation config, the model config and the tokenizer."""
    generation_config = getattr(model, "generation_config", None)
    configs = (generation_config, model.config, model.config.get_text_config(), tokenizer)
    found = [getattr(config, "eos_token_id", None) for config in configs]
    values = (value if isinstance(value, list | tuple) else [value] for value in found if value is not None)
    return frozenset(chain.from_iterable(values))
