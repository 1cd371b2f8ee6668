"""vLLM's command line for a target and its drafter: what each release supports, and what parallel drafting needs.

Pure functions: nothing here starts a process, reads a model or imports vLLM. Example, for a P-EAGLE drafter with 7
draft tokens and a batch of 256:

    8192 prompt tokens per step are wanted. Each request may also need 7 - 1 placeholder tokens for its next draft,
    which vLLM takes from the same budget: --max-num-batched-tokens 8192 + 6 * 256 = 9728. A full batch verifies
    256 * (7 + 1) = 2048 tokens per step, so graphs are captured up to that: --max-cudagraph-capture-size 2048.
"""

import json
import logging
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from peagle.errors import ConfigError

log = logging.getLogger(__name__)

Version = tuple[int, int]
Flags = dict[str, tuple[str, ...]]
"""vLLM's flags with their values"""
Layout = Literal["vllm", "speculators"]

TESTED = "0.32.0"
"""The release that our tests use."""

SUPPORT: dict[str, tuple[Version, str]] = {
    "parallel": ((0, 16), "P-EAGLE drafters (parallel drafting), in vLLM's own layout"),
    "eagle3": ((0, 16), "EAGLE-3 drafters, in vLLM's own layout"),
    "hybrid": ((0, 18), "P-EAGLE for targets that mix sliding-window and full attention, as GPT-OSS does"),
    "speculators": ((0, 22), "P-EAGLE drafters in the layout of speculators"),
    "norms": ((0, 22), "drafters with fc_norm or norm_output (EAGLE-3.1)"),
    "probabilistic": ((0, 25), "parallel drafts that are sampled (draft_sample_method probabilistic)"),
    "pipeline": ((0, 32), "EAGLE-3 over pipeline stages (never P-EAGLE: see the guide)"),
    "figures": ((0, 32), "speculation figures with each answer"),
}
"""The first release that has each feature. A test compares this with the table in `docs/guides/scale.md`."""

CPU_MAX_BATCH, GPU_MAX_BATCH = 16, 256
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 2048, 8192
MAX_CAPTURE_SIZE = 4096
"""The largest value in published P-EAGLE commands. Each further size costs start-up time and memory."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
IS_FLAG = re.compile(r"--?[A-Za-z]").match


@dataclass(frozen=True)
class Installed:
    """A vLLM installation: its release, and whether it is built for CPUs."""

    version: str
    is_cpu: bool = False

    @property
    def release(self) -> Version:
        """
        >>> Installed("0.16.1rc2.dev3+g1a2b3c").release
        (0, 16)
        """
        match = re.match(r"(\d+)\.(\d+)", self.version)
        if match is None:
            raise ConfigError(f"vLLM reports version {self.version!r}, which is not a release number")
        return int(match[1]), int(match[2])

    def has(self, feature: str) -> bool:
        return self.release >= SUPPORT[feature][0]

    def need(self, feature: str, hint: str | None = None) -> None:
        """Refuse a release without the feature, and name the first that has it."""
        if not self.has(feature):
            release, what = SUPPORT[feature]
            since = ".".join(map(str, release))
            raise ConfigError(
                f"vLLM {self.version} does not support {what}: that needs {since}",
                hint=hint or f"install vLLM {since} or newer; {TESTED} is tested",
            )


@dataclass(frozen=True)
class DrafterFacts:
    """What decides how vLLM runs a drafter."""

    model: str
    """directory or Hugging Face id"""
    parallel: bool | None
    """P-EAGLE (True) or EAGLE-3 (False); None: unknown"""
    trained_draft_tokens: int | None = None
    advised_draft_tokens: int | None = None
    max_length: int | None = None
    """maximum position of its rotary embedding"""
    num_heads: int | None = None
    layout: Layout = "vllm"
    norms: tuple[str, ...] = ()
    """which of fc_norm and norm_output it has"""
    uses_mrope: bool = False

    @property
    def method(self) -> str:
        return "p-eagle" if self.parallel else "eagle3"


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How vLLM spreads the target over GPUs and nodes."""

    tensor_parallel_size: int = 1
    """GPUs that share each layer"""
    data_parallel_size: int = 1
    """replicas of the target that share the requests"""
    num_nodes: int = 1
    """nodes of a running Ray cluster; vLLM uses it if there is more than one"""


@dataclass(frozen=True)
class VllmSettings(Parallelism):
    """What vLLM should serve, under our names. None: vLLM or `command` decides."""

    target: str
    names: tuple[str, ...]
    drafter: DrafterFacts | None = None
    num_draft_tokens: int | None = None
    """None: the recommended number; 0: plain decoding"""
    dtype: str = "auto"
    max_batch: int | None = None
    max_length: int | None = None
    prefill_tokens: int | None = None
    token_budget: int | None = None
    """vLLM's --max-num-batched-tokens, with placeholder tokens; default: computed from `prefill_tokens`"""
    memory_share: float | None = None
    reuse_prefixes: bool = True
    is_eager: bool = False
    pipeline_parallel_size: int = 1
    target_max_length: int | None = None
    is_hybrid: bool = False
    """whether the target mixes sliding-window and full attention"""
    num_heads: int | None = None
    """attention heads of the target, if its config is on this machine"""
    speculation: Mapping[str, Any] = field(default_factory=dict)
    """further keys of vLLM's speculative config"""
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """further flags of vLLM, with their values"""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "num_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads is not None and self.num_heads % self.tensor_parallel_size:
            raise ConfigError(
                f"the {self.num_heads} attention heads of the target do not divide by "
                f"tensor_parallel_size={self.tensor_parallel_size}",
                hint="vLLM gives each GPU as many heads: pass a --tensor-parallel-size that divides them",
            )
        if self.num_gpus % self.num_nodes:
            raise ConfigError(
                f"{self.num_gpus} GPUs (tensor x pipeline x data parallel) do not divide by {self.num_nodes} nodes",
                hint="make their product a multiple of --num-nodes",
            )
        if self.num_nodes > 1 and self.data_parallel_size > 1 and self.data_parallel_size % self.num_nodes:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} is not a multiple of the {self.num_nodes} nodes",
                hint="give each node the same number of data-parallel ranks",
            )

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes


@dataclass(frozen=True)
class Command:
    """`vllm serve ...`, the environment variables it needs, and what was decided for it."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    num_draft_tokens: int
    max_batch: int

    def text(self) -> str:
        """For a shell, one option per line."""
        head, lines = list(self.words[:3]), []
        for word in self.words[3:]:
            if IS_FLAG(word):
                lines.append(word)
            else:
                lines[-1] += " " + shlex.quote(word)
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " \\\n  ".join([" ".join([*variables, shlex.join(head)]), *lines])


def command(settings: VllmSettings, vllm: Installed, environment: Mapping[str, str] | None = None) -> Command:
    """The command that serves `settings` on that vLLM. Refuses combinations that vLLM does not support.

    `environment` is what the process will inherit: it may force the wrong model runner.
    """
    vllm.need("parallel")
    num_draft_tokens = resolve_num_draft_tokens(settings)
    drafter = settings.drafter if num_draft_tokens else None
    if drafter is not None:
        check_drafter(settings, drafter, vllm, environment or {})
    max_batch = settings.max_batch or (CPU_MAX_BATCH if vllm.is_cpu else GPU_MAX_BATCH)
    flags = {"--served-model-name": settings.names, **_model_flags(settings, drafter)}
    flags |= _batch_flags(settings, drafter, num_draft_tokens, max_batch, vllm) | _parallel_flags(settings)
    variables: dict[str, str] = {}
    if drafter is not None:
        flags["--speculative-config"] = (json.dumps(_speculation(settings, drafter, num_draft_tokens)),)
        if vllm.has("figures"):
            flags |= {"--per-request-spec-decode-metrics": ("summary",), "--enable-per-request-metrics": ()}
        if drafter.parallel:
            variables[RUNNER_VARIABLE] = "0"
    flags |= settings.extra
    words = [word for flag, values in flags.items() for word in (flag, *values)]
    return Command(("vllm", "serve", settings.target, *words), variables, num_draft_tokens, max_batch)


def resolve_num_draft_tokens(settings: VllmSettings) -> int:
    """Draft tokens per step: what the user asks for, else what the drafter's makers recommend."""
    drafter, asked = settings.drafter, settings.num_draft_tokens
    if drafter is None:
        if asked:
            raise ConfigError(f"num_draft_tokens={asked}, but there is no drafter", hint="pass --drafter")
        return 0
    if asked is None:
        advised = drafter.advised_draft_tokens or 7
        return min(advised, drafter.trained_draft_tokens or advised)
    limit = drafter.trained_draft_tokens
    if asked < 0 or (limit is not None and asked > limit):
        allowed = "0 or more" if limit is None else f"between 0 and {limit}, the depth it was trained for"
        raise ConfigError(
            f"num_draft_tokens must be {allowed}, got {asked}",
            hint="drafters do not extrapolate; train one with a larger num_draft_tokens",
        )
    return asked


def check_combination(settings: VllmSettings, vllm: Installed, environment: Mapping[str, str]) -> None:
    """Refuse what cannot work in any layout of the drafter, before it is converted."""
    drafter = settings.drafter
    in_any_form = None if drafter is None else replace(drafter, layout="vllm", max_length=None)
    command(replace(settings, drafter=in_any_form), vllm, environment)


def check_drafter(
    settings: VllmSettings, drafter: DrafterFacts, vllm: Installed, environment: Mapping[str, str]
) -> None:
    """Refuse what vLLM cannot do with this drafter, or would do wrong silently."""
    if drafter.parallel is None:
        raise ConfigError(
            f"cannot tell whether the drafter {drafter.model} is P-EAGLE or EAGLE-3: its config.json was not read",
            hint="tell vLLM: --speculative-config '{\"parallel_drafting\": true}' for P-EAGLE, false for EAGLE-3 "
            "(SageMaker: --env SM_VLLM_SPECULATIVE_CONFIG=...); or give the drafter's directory",
        )
    if drafter.layout == "speculators":
        vllm.need("speculators", hint="convert it to vLLM's own layout first: peagle export DIR --to vllm --output NEW")
    if drafter.norms:
        vllm.need("norms")
    if drafter.max_length is not None and settings.max_length is not None and settings.max_length > drafter.max_length:
        raise ConfigError(
            f"max_length={settings.max_length} exceeds the drafter's maximum position of {drafter.max_length}",
            hint=f"pass --max-length {drafter.max_length}, a drafter for longer sequences, or --num-draft-tokens 0",
        )
    if not drafter.parallel:
        if settings.pipeline_parallel_size > 1:
            vllm.need("pipeline", hint="use --tensor-parallel-size instead")
        return
    if environment.get(RUNNER_VARIABLE, "").strip().lower() in ("1", "true"):
        raise ConfigError(
            f"{RUNNER_VARIABLE}={environment[RUNNER_VARIABLE]} forces vLLM's second model runner, "
            "which cannot draft in parallel",
            hint=f"unset {RUNNER_VARIABLE}: peagle sets it to 0 for P-EAGLE drafters",
        )
    if settings.is_hybrid:
        vllm.need("hybrid")
    if drafter.uses_mrope:
        raise ConfigError(
            f"{drafter.model}: vLLM cannot draft in parallel with M-RoPE positions",
            hint="use an EAGLE-3 drafter for this target, or --num-draft-tokens 0",
        )
    if settings.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={settings.pipeline_parallel_size}: a P-EAGLE drafter reads layers of all stages, "
            "and only vLLM's second model runner passes those on, which cannot draft in parallel",
            hint="use --tensor-parallel-size (over nodes too), or an EAGLE-3 drafter",
        )
    if settings.speculation.get("draft_sample_method") == "probabilistic":
        vllm.need("probabilistic")


def _model_flags(settings: VllmSettings, drafter: DrafterFacts | None) -> Flags:
    # Requests get OpenAI's sampling defaults, as with our own engine, not those of generation_config.json.
    flags: Flags = {"--generation-config": ("vllm",)}
    if settings.dtype != "auto":
        flags["--dtype"] = (settings.dtype,)
    max_length, limit = settings.max_length, None if drafter is None else drafter.max_length
    if max_length is None and limit is not None and (settings.target_max_length or math.inf) > limit:
        max_length = limit
        log.info("max_length: %d, the drafter's maximum position", max_length)
    if max_length is not None:
        flags["--max-model-len"] = (str(max_length),)
    return flags


def _batch_flags(
    settings: VllmSettings, drafter: DrafterFacts | None, num_draft_tokens: int, max_batch: int, vllm: Installed
) -> Flags:
    placeholders = (num_draft_tokens - 1) * max_batch if drafter is not None and drafter.parallel else 0
    verified = (num_draft_tokens + 1) * max_batch
    budget = settings.token_budget
    if budget is None:
        prefill_tokens = settings.prefill_tokens or (CPU_PREFILL_TOKENS if vllm.is_cpu else GPU_PREFILL_TOKENS)
        budget = max(prefill_tokens, verified) + placeholders
    elif budget < verified + placeholders:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is too small: a full batch of {max_batch} requests needs "
            f"{verified + placeholders} per step ({verified} tokens to verify, {placeholders} placeholders)",
            hint=f"use {verified + placeholders} or more, a smaller --max-batch, or fewer --num-draft-tokens",
        )
    flags: Flags = {
        "--max-num-seqs": (str(max_batch),),
        "--max-num-batched-tokens": (str(budget),),
        ("--enable-prefix-caching" if settings.reuse_prefixes else "--no-enable-prefix-caching"): (),
    }
    if settings.memory_share is not None:
        flags["--gpu-memory-utilization"] = (f"{settings.memory_share:g}",)
    if settings.is_eager:
        flags["--enforce-eager"] = ()
    elif drafter is not None and not vllm.is_cpu:
        flags["--max-cudagraph-capture-size"] = (str(min(MAX_CAPTURE_SIZE, verified)),)
    return flags


def _parallel_flags(settings: VllmSettings) -> Flags:
    sizes = {kind: getattr(settings, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data")}
    flags: Flags = {f"--{kind}-parallel-size": (str(size),) for kind, size in sizes.items() if size > 1}
    if settings.num_nodes > 1:
        flags["--distributed-executor-backend"] = ("ray",)
        if settings.data_parallel_size > 1:
            flags["--data-parallel-backend"] = ("ray",)
            flags["--data-parallel-size-local"] = (str(settings.data_parallel_size // settings.num_nodes),)
    return flags


def _speculation(settings: VllmSettings, drafter: DrafterFacts, num_draft_tokens: int) -> dict[str, Any]:
    config: dict[str, Any] = {"method": "eagle3", "model": drafter.model, "num_speculative_tokens": num_draft_tokens}
    if drafter.parallel:
        config["parallel_drafting"] = True
    size = settings.tensor_parallel_size
    if drafter.num_heads is not None and drafter.num_heads % size:
        log.info("each GPU runs the whole drafter: its %d heads do not divide by %d", drafter.num_heads, size)
        config["draft_tensor_parallel_size"] = 1
    return config | dict(settings.speculation)
