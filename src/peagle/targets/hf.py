"""Any `transformers` causal LM as a target: its own modules, with the aux states tapped on the way.

Shapes as in `base.py`.
"""

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from peagle.errors import TargetError
from peagle.targets import hub
from peagle.targets.base import TargetCache, TargetOutput, check_aux_layer_ids, default_aux_layer_ids
from peagle.targets.catalog import ASSETS, CatalogDrafter, CatalogEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

OWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""kinds of attention that our own attention functions do; others exist only as a mask of transformers'"""
CUTTABLE_LAYER_TYPES = OWN_LAYER_TYPES | {"chunked_attention"}


class HFTarget:
    """A transformers model and its tokenizer. The model is put in evaluation mode and its gradients are turned off."""

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        name: str,
        directory: Path | None = None,
        entry: CatalogEntry | None = None,
        aux_layer_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.directory = directory
        self.entry = entry
        """what the catalog knows of it"""
        self._shipped_drafter: Path | None = None
        self._catalog_drafters: dict[Path, CatalogDrafter] = {}
        self._chosen: CatalogDrafter | None = None
        config = model.config.get_text_config()
        _check_usable(model, config)
        if getattr(config, "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("eager")  # transformers' sdpa leaves the soft cap of attention scores out
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_length = _max_length(config)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.layers = _decoder_layers(model, self.num_layers)
        self._taps: list[Any] = []
        self._captured: dict[int, Tensor] = {}
        self.aux_layer_ids: tuple[int, ...] = ()
        self.is_lent = False
        """an engine has changed the model for its own use; it sets this and gives the model back when it is closed"""
        self._kept_fingerprint: str | None = None
        self.default_aux_layer_ids = default_aux_layer_ids(self.num_layers)
        self.tap(self.default_aux_layer_ids if aux_layer_ids is None else aux_layer_ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def embedding_VD(self) -> Tensor:
        """The input embedding's own tensor, not a copy."""
        return self.model.get_input_embeddings().weight

    @property
    def head_VD(self) -> Tensor:
        """The output head's own tensor; the embedding's where the two are tied."""
        return self.model.get_output_embeddings().weight

    @property
    def final_norm_weight(self) -> Tensor:
        """What the norm before the head multiplies by, where the decoder calls it `norm`, as the Llama family does."""
        norm = getattr(self.model.get_decoder(), "norm", None)
        if norm is None:
            raise TargetError(f"{type(self.model).__name__} has no final norm named `norm`")
        return self.norm_scale(norm)

    def norm_scale(self, norm: nn.Module) -> Tensor:
        """What one of its RMS norms multiplies by, whether it stores that or, as Gemma's, the difference from one."""
        return norm_scale(norm)

    @property
    def shipped_drafter(self) -> Path | None:
        """The directory of the drafter for it, fetched now where it lies on the hub; None where nobody ships one."""
        return self.drafter_for(None)

    @shipped_drafter.setter
    def shipped_drafter(self, directory: Path | None) -> None:
        self._shipped_drafter = directory

    @property
    def shipped_drafter_name(self) -> str | None:
        """What that drafter is called, or the one that was chosen last for another length; nothing is fetched."""
        if self._shipped_drafter is not None:
            return self._shipped_drafter.name
        chosen = self._chosen or (self.entry.drafter() if self.entry is not None else None)
        return None if chosen is None else chosen.name

    def drafter_for(self, max_length: int | None) -> Path | None:
        """The shipped drafter that serves texts of up to `max_length` tokens best; one nobody can have is refused."""
        if self._shipped_drafter is not None or self.entry is None:
            return self._shipped_drafter
        chosen = self.entry.drafter(max_length=max_length)
        if len(self.entry.drafters) > 1 and chosen != self._chosen:
            length = "usual lengths" if max_length is None else f"up to {max_length} tokens"
            log.info("drafter %s: the %s one, for texts of %s", chosen.name, chosen.variant, length)
        self._chosen = chosen
        return self._fetched(chosen)

    def find_drafter(self, name: str) -> Path | None:
        """The directory meant by a catalog variant ("long-context") or a model id; None where it is neither."""
        own = () if self.entry is None else self.entry.drafters
        for drafter in own:
            if name in (drafter.variant, drafter.source) and (drafter.where != "package" or drafter.is_here):
                return self._fetched(drafter)
        is_id = name.count("/") == 1 and hub.looks_like_an_id(name)
        return hub.fetch(name, "drafter") if is_id else None

    def catalog_drafter(self, directory: Path) -> CatalogDrafter | None:
        """What the catalog says of a drafter directory that it led to."""
        return self._catalog_drafters.get(directory)

    def _fetched(self, drafter: CatalogDrafter) -> Path:
        drafter.check_public(self.name)
        assert drafter.source is not None, "the catalog refuses a public drafter without a source"
        if drafter.where == "package":
            directory = ASSETS / drafter.source
        elif drafter.where == "directory":
            directory = Path(drafter.source).expanduser()
        else:
            directory = hub.fetch(drafter.source, "drafter")
        self._catalog_drafters[directory] = drafter
        return directory

    def tap(self, aux_layer_ids: tuple[int, ...]) -> None:
        """Choose the layers whose entering residual stream `forward` returns; replaces the earlier choice."""
        check_aux_layer_ids(aux_layer_ids, self.num_layers)
        for tap in self._taps:
            tap.remove()
        self._captured.clear()
        self._taps = [
            self.layers[index].register_forward_pre_hook(self._keep_input(index), with_kwargs=True)
            for index in aux_layer_ids
        ]
        self.aux_layer_ids = tuple(aux_layer_ids)

    def new_cache(self) -> TargetCache:
        # Without a config every layer keeps its whole history, sliding-window ones too, so any length can be cut
        # back to; the model's own masks still apply the windows.
        return DynamicCache()

    def forward(self, token_ids_BT: Tensor, cache: TargetCache | None = None) -> TargetOutput:
        self.check_not_lent()
        with torch.no_grad():
            output = self.model(input_ids=token_ids_BT, past_key_values=cache, use_cache=cache is not None)
            return TargetOutput(output.logits, self.captured_aux())

    def aux_hidden(self, token_ids_BT: Tensor) -> Tensor:
        """The aux states alone, [B, T, A]: the head, whose logits are the largest tensor by far, is not run."""
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
        """The aux states of the model's last call, concatenated, [B, T, A]."""
        return torch.cat([self._captured[index] for index in self.aux_layer_ids], dim=-1)

    def forget_captured(self) -> None:
        """Let go of the aux states of the model's last call, which are kept until the next one otherwise."""
        self._captured.clear()

    def fingerprint(self) -> str:
        """A hash that tells these weights from others, the same whether they are loaded in float32 or in bfloat16.

        It covers 64 elements spread over each parameter, rounded to bfloat16, so it takes milliseconds at any size.
        In float16, small weights have lost bits that bfloat16 keeps, so it may differ there.
        """
        if self._kept_fingerprint is not None:
            return self._kept_fingerprint
        samples, names = [], []
        for name, parameter in sorted(self.model.named_parameters()):
            flat = parameter.detach().flatten()
            index = torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64).long()
            samples.append(flat[index.to(flat.device)].to(torch.bfloat16))
            names.append(f"{name}:{list(parameter.shape)}")
        content = torch.cat(samples).view(torch.int16).cpu().numpy().tobytes()
        return hashlib.sha256("\n".join(names).encode() + content).hexdigest()[:32]

    def keep_fingerprint(self) -> None:
        """Remember the fingerprint of the weights as they are: they are about to be spread over several processes."""
        self._kept_fingerprint = self.fingerprint()

    def _keep_input(self, index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[index] = args[0] if args else kwargs["hidden_states"]

        return keep


@torch.no_grad()
def norm_scale(norm: nn.Module) -> Tensor:
    """What a root-mean-square norm multiplies by, found by asking it."""
    weight = next(norm.parameters())
    # A large constant: its root mean square is itself, and the norm's epsilon is nothing beside it.
    scale: Tensor = norm(torch.full(weight.shape, 1024.0, dtype=weight.dtype, device=weight.device))
    return scale


def check_own_attention(target: HFTarget) -> None:
    """Refuse a target whose attention ours cannot stand in for: a mask that is left out would not be noticed."""
    others = set(getattr(target.model.config.get_text_config(), "layer_types", None) or ()) - OWN_LAYER_TYPES
    if others:
        raise TargetError(
            f"{type(target.model).__name__} has layers of {', '.join(sorted(others))}, which our attention does not do",
            hint="decode such a target with transformers, or serve it on vLLM",
        )


def _check_usable(model: "PreTrainedModel", config: Any) -> None:
    """Refuse models whose memory cannot be cut back to an earlier token, and those that read ahead."""
    unknown = set(getattr(config, "layer_types", None) or ()) - CUTTABLE_LAYER_TYPES
    if unknown or getattr(model, "_is_stateful", False):
        kinds = f" ({', '.join(sorted(unknown))})" if unknown else ""
        raise TargetError(
            f"{type(model).__name__} keeps a running state{kinds} that cannot be cut back when a draft is rejected",
            hint="use a target whose layers all attend over a key-value cache",
        )
    if getattr(config, "is_decoder", True) is False and _reads_ahead(model):
        raise TargetError(
            f"{type(model).__name__} is an encoder here: each token sees the ones after it",
            hint="the target must be a decoder-only causal LM",
        )


@torch.no_grad()
def _reads_ahead(model: "PreTrainedModel") -> bool:
    """Whether a token's logits change with the one after it. Some decoders are not called so by their config."""
    logits_2TV = model(input_ids=torch.tensor([[0, 0], [0, 1]], device=model.device), use_cache=False).logits
    first_V, second_V = logits_2TV[:, 0].float()
    return bool((first_V - second_V).abs().max() > 1e-2 * first_V.abs().max())


def _max_length(config: Any) -> int:
    """The most tokens of a text whose positions mean the same whatever text is beside it.

    With "longrope" transformers chooses the frequencies by the longest text of a batch, so those are the tokens up to
    which it takes the short ones.
    """
    most: int = getattr(config, "max_position_embeddings", 2**31)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") == "longrope":
            steady = int(rope.get("original_max_position_embeddings") or most)
            if steady < most:
                log.warning("texts have at most %d tokens here, not %d: longrope changes beyond", steady, most)
            most = min(most, steady)
    return most


def _decoder_layers(model: "PreTrainedModel", num_layers: int) -> nn.ModuleList:
    """The decoder's list of layers, found by its length rather than by a table of model families."""
    decoder = model.get_decoder()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise TargetError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to read states from",
        hint="the target must be a decoder-only causal LM",
    )


def _eos_token_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """End tokens of the model's generation settings and of its tokenizer."""
    generation_config = getattr(model, "generation_config", None)
    configs = (generation_config, model.config, model.config.get_text_config(), tokenizer)
    found = [getattr(config, "eos_token_id", None) for config in configs]
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list | tuple) else [value] if value is not None else [])
    return frozenset(ids)
