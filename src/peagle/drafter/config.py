"""A drafter's configuration, as plain data. `checkpoint/config_json.py` reads and writes vLLM's config.json."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.errors import ConfigError

USUAL_NUM_DRAFT_TOKENS = 7
"""The best value measured for the embedded target."""


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and switches of a drafter. The same network drafts in parallel (P-EAGLE) or one by one (EAGLE-3)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding: the target's vocabulary."""
    draft_vocab_size: int
    """Rows of the head; smaller than `vocab_size` only with a `d2t` table."""
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    """Target layers whose ENTERING residual stream the drafter reads, ascending."""
    parallel: bool = True
    """True: P-EAGLE, all draft tokens in one pass. False: EAGLE-3, one pass per draft token."""
    mask_token_id: int | None = None
    """The token fed at depth > 0; required if `parallel`."""
    num_draft_tokens: int | None = None
    """The most draft tokens it was trained for; None if unknown."""
    advised_draft_tokens: int | None = None
    """Recommended draft tokens per step; None if unknown."""
    fc_norm: bool = False
    """Norm each aux state before `fc`."""
    norm_before_fc: bool = False
    """Norm the concatenated aux states before `fc`."""
    norm_before_residual: bool = False
    """Layer 0's residual is the normed fused state, not the raw one."""
    norm_output: bool = False
    """EAGLE-3 feeds back the final normed state, not the raw one."""
    attention_bias: bool = False
    qk_norm: bool = False
    """Norm each head's query and key before the rotary embedding, as in Qwen3."""
    sliding_window: int = 0
    """Window of the layers in `sliding_layers`, their own position included; 0 for none."""
    sliding_layers: tuple[int, ...] = ()
    """Indices of the drafter's layers that have the window; the others attend to the whole text."""
    rms_norm_eps: float = 1e-5
    max_length: int = 8192
    """Positions that the rotary embedding covers."""
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    embeddings: Literal["shared", "own"] = "shared"
    """shared: the target's table; only the mask token has its own row."""
    head: Literal["shared", "own"] = "shared"

    def __post_init__(self) -> None:
        if tuple(sorted(set(self.aux_layer_ids))) != self.aux_layer_ids or not self.aux_layer_ids:
            raise ConfigError(
                f"aux_layer_ids must be distinct and ascending, got {list(self.aux_layer_ids)}",
                hint="engines sort them and drop duplicates, so any other order would be served differently",
            )
        if self.parallel and self.mask_token_id is None:
            raise ConfigError(
                "a parallel drafter needs mask_token_id, the token fed to its placeholders",
                hint="choose an id that no text uses",
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id must be between 0 and {self.vocab_size - 1}, got {self.mask_token_id}")
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("fc_norm and norm_before_fc exclude each other", hint="keep one of the two")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        self._check_windows()
        for table, kept in (("embeddings", self.embeddings), ("head", self.head)):
            if kept == "shared" and self.hidden_size != self.target_hidden_size:
                raise ConfigError(
                    f"hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}, "
                    f"so its {table} cannot be shared",
                    hint=f'set {table} to "own"; a drafter directory must then hold that table',
                )

    def _check_windows(self) -> None:
        layers = self.sliding_layers
        if bool(layers) != bool(self.sliding_window) or self.sliding_window < 0:
            raise ConfigError(
                f"sliding_window {self.sliding_window} and sliding_layers {list(layers)} do not belong together",
                hint="set both, or neither",
            )
        if tuple(sorted(set(layers))) != layers or any(not 0 <= layer < self.num_layers for layer in layers):
            raise ConfigError(
                f"sliding_layers must be distinct, ascending and below {self.num_layers}, got {list(layers)}"
            )

    def window(self, layer: int) -> int:
        """A layer's sliding window, its own position included; 0 for none."""
        return self.sliding_window if layer in self.sliding_layers else 0

    @property
    def aux_size(self) -> int:
        """Width of the concatenated aux states."""
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def usual_num_draft_tokens(self) -> int:
        """Draft tokens per step by default: the recommended number, at most what it was trained for."""
        wanted = self.advised_draft_tokens or USUAL_NUM_DRAFT_TOKENS
        return min(wanted, self.num_draft_tokens or wanted)

    @property
    def method(self) -> str:
        return "p-eagle" if self.parallel else "eagle3"

    def depths_within(self, wanted: Iterable[int]) -> tuple[int, ...]:
        """The numbers of draft tokens in `wanted` that the drafter was trained for."""
        limit = self.num_draft_tokens
        return tuple(depth for depth in wanted if limit is None or depth <= limit)

    def check_num_draft_tokens(self, num_draft_tokens: int) -> None:
        """Refuse more draft tokens than it was trained for: acceptance drops to zero beyond."""
        limit = self.num_draft_tokens
        if num_draft_tokens < 1 or (limit is not None and num_draft_tokens > limit):
            allowed = "at least 1" if limit is None else f"between 1 and {limit}, the depth it was trained for"
            raise ConfigError(
                f"num_draft_tokens must be {allowed}, got {num_draft_tokens}",
                hint="drafters do not extrapolate; train one with a larger num_draft_tokens",
            )
