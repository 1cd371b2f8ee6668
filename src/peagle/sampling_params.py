"""How one request wants its tokens chosen and where it wants them to end."""

from dataclasses import dataclass

from peagle.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per-request sampling settings; out-of-range values are refused when the object is made."""

    max_tokens: int = 256
    """most tokens to generate"""
    temperature: float = 0.0
    """0 takes the most likely token; 1 samples the target's own distribution"""
    top_k: int = 0
    """sample among the k most likely tokens only; 0 means all"""
    top_p: float = 1.0
    """sample among the most likely tokens that together hold this probability"""
    min_p: float = 0.0
    """drop tokens less likely than this fraction of the most likely one"""
    seed: int = 0
    """with the position in the text it fixes every random draw"""
    stop: tuple[str, ...] = ()
    """end before the first of these strings"""
    stop_token_ids: tuple[int, ...] = ()
    """end at any of these tokens, besides the target's own end tokens"""
    ignore_eos: bool = False
    """go on past the target's end tokens"""
    n: int = 1
    """answers to give; answer i is drawn with seed + i"""
    logprobs: int | None = None
    """report the log-probability of each token and of so many of the likeliest ones; None reports none"""
    num_draft_tokens: int | None = None
    """draft tokens a step; 0 decodes without drafts, None takes the engine's number, which is also the most"""

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        require(self.max_tokens >= 1, "max_tokens", "at least 1")
        require(self.temperature >= 0, "temperature", "0 or more")
        require(self.top_k >= 0, "top_k", "0 (all tokens) or more")
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        require(0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        require(all(self.stop), "stop", "a list of non-empty strings")
        require(self.n >= 1, "n", "at least 1")
        require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "between 0 and 20, or None")
        require(self.num_draft_tokens is None or self.num_draft_tokens >= 0, "num_draft_tokens", "0 or more, or None")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
