"""vLLM's command line for a target and its drafter: what each release can do, and what parallel drafting needs.

Pure functions: nothing here starts a process, reads a model or imports vLLM. A worked example, for a P-EAGLE drafter
with 7 draft tokens and at most 256 requests at once:

    8192 prompt tokens a step are wanted. Besides, every request may need 7 - 1 placeholder rows for its next draft,
    which vLLM takes out of the same budget: --max-num-batched-tokens 8192 + 6 * 256 = 9728. A full batch verifies
    256 * (7 + 1) = 2048 tokens a step, so graphs are captured up to that: --max-cudagraph-capture-size 2048.
"""

import json
import logging
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from peagle.errors import ConfigError

log = logging.getLogger(__name__)

Version = tuple[int, int]
Layout = Literal["vllm", "speculators"]

OLDEST: Version = (0, 16)
TESTED = "0.32.0"
"""The release that our tests run against."""


@dataclass(frozen=True)
class Support:
    """One thing that vLLM can do for us, and the release that brought it."""

    since: Version
    what: str


SUPPORT = {
    "parallel": Support((0, 16), "P-EAGLE drafters (parallel drafting), in vLLM's own layout"),
    "eagle3": Support((0, 16), "EAGLE-3 drafters, in vLLM's own layout"),
    "hybrid": Support((0, 18), "P-EAGLE for targets that mix sliding-window and full attention, as GPT-OSS does"),
    "speculators": Support((0, 22), "P-EAGLE drafters in the layout of speculators"),
    "norms": Support((0, 22), "drafters with fc_norm or norm_output (EAGLE-3.1)"),
    "probabilistic": Support((0, 25), "parallel drafts that are sampled (draft_sample_method probabilistic)"),
    "pipeline": Support((0, 32), "EAGLE-3 over pipeline stages (never P-EAGLE: see the guide)"),
    "figures": Support((0, 32), "speculation figures with each answer"),
}
"""The table of supported releases; `docs/guides/scale.md` shows it, and a test compares the two."""

CPU_MAX_BATCH, GPU_MAX_BATCH = 16, 256
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 2048, 8192
MAX_CAPTURE_SIZE = 4096
"""What the published P-EAGLE commands use at most; every further size costs start-up time and memory."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
IS_FLAG = re.compile(r"--?[A-Za-z]").match


@dataclass(frozen=True)
class Installed:
    """A vLLM that was found: its release, and whether it is built for CPUs."""

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
            raise ConfigError(f"vLLM says that it is version {self.version!r}, which is not a release number")
        return int(match[1]), int(match[2])

    def has(self, feature: str) -> bool:
        return self.release >= SUPPORT[feature].since

    def need(self, feature: str, hint: str | None = None) -> None:
        """Refuse a release that lacks a feature, with the one that brought it."""
        if not self.has(feature):
            since = ".".join(map(str, SUPPORT[feature].since))
            raise ConfigError(
                f"vLLM {self.version} does not support {SUPPORT[feature].what}: that came with {since}",
                hint=hint or f"install vLLM {since} or newer in that environment; {TESTED} is tested",
            )


@dataclass(frozen=True)
class DrafterFacts:
    """What of a drafter directory decides how vLLM is started."""

    model: str
    """what vLLM is told to load: a directory, or a Hugging Face id"""
    parallel: bool | None
    """P-EAGLE or EAGLE-3; None: not known"""
    trained_draft_tokens: int | None = None
    advised_draft_tokens: int | None = None
    max_length: int | None = None
    """positions that its rotary embedding covers"""
    num_heads: int | None = None
    layout: Layout = "vllm"
    norms: tuple[str, ...] = ()
    """of fc_norm and norm_output, those it has"""
    uses_mrope: bool = False

    @property
    def method(self) -> str:
        return "p-eagle" if self.parallel else "eagle3"


@dataclass(frozen=True)
class Launch:
    """What is to be served, in our words; None where vLLM or `command` decides."""

    target: str
    names: tuple[str, ...]
    drafter: DrafterFacts | None = None
    num_draft_tokens: int | None = None
    """None: as many as are advised; 0: plain decoding"""
    dtype: str = "auto"
    max_batch: int | None = None
    max_length: int | None = None
    prefill_tokens: int | None = None
    token_budget: int | None = None
    """vLLM's own --max-num-batched-tokens, placeholder rows included; by default made from `prefill_tokens`"""
    page_size: int | None = None
    num_pages: int | None = None
    memory_share: float | None = None
    reuse_prefixes: bool = True
    is_eager: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    num_nodes: int = 1
    target_max_length: int | None = None
    is_hybrid: bool = False
    """whether the target mixes sliding-window and full attention"""
    speculation: Mapping[str, Any] = field(default_factory=dict)
    """further keys of vLLM's speculative config"""
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """further flags of vLLM and their values"""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "num_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_gpus % self.num_nodes:
            raise ConfigError(
                f"{self.num_gpus} GPUs (tensor x pipeline x data parallel) cannot be spread evenly over "
                f"{self.num_nodes} nodes",
                hint="make their product a multiple of --num-nodes",
            )
        if self.num_nodes > 1 and self.data_parallel_size > 1 and self.data_parallel_size % self.num_nodes:
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size}, which is no multiple of the {self.num_nodes} nodes",
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
    """`vllm serve ...`, what it was decided to be, and the environment that it needs besides."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    num_draft_tokens: int
    max_batch: int

    def text(self) -> str:
        """For a shell, one option a line."""
        head, lines = list(self.words[:3]), []
        for word in self.words[3:]:
            if IS_FLAG(word):
                lines.append(word)
            else:
                lines[-1] += " " + shlex.quote(word)
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " \\\n  ".join([shlex.join(head) if not variables else " ".join([*variables, shlex.join(head)]), *lines])


def command(launch: Launch, vllm: Installed, environment: Mapping[str, str] | None = None) -> Command:
    """The command that serves `launch` on that vLLM; combinations that it cannot do are refused with the reason.

    `environment` is what the process would inherit: a model runner that is forced there is noticed.
    """
    if vllm.release < OLDEST:
        vllm.need("parallel")
    num_draft_tokens = resolve_num_draft_tokens(launch)
    drafter = launch.drafter if num_draft_tokens else None
    if drafter is not None:
        check_drafter(launch, drafter, num_draft_tokens, vllm, environment or {})
    max_batch = launch.max_batch or (CPU_MAX_BATCH if vllm.is_cpu else GPU_MAX_BATCH)
    flags: dict[str, tuple[str, ...]] = {"--served-model-name": launch.names}
    flags |= _model_flags(launch, drafter)
    flags |= _batch_flags(launch, drafter, num_draft_tokens, max_batch, vllm)
    flags |= _parallel_flags(launch)
    variables: dict[str, str] = {}
    if drafter is not None:
        flags["--speculative-config"] = (json.dumps(_speculation(launch, drafter, num_draft_tokens)),)
        if vllm.has("figures"):
            flags |= {"--per-request-spec-decode-metrics": ("summary",), "--enable-per-request-metrics": ()}
        if drafter.parallel:
            variables[RUNNER_VARIABLE] = "0"
    flags |= launch.extra
    words = [word for flag, values in flags.items() for word in (flag, *values)]
    return Command(("vllm", "serve", launch.target, *words), variables, num_draft_tokens, max_batch)


def resolve_num_draft_tokens(launch: Launch) -> int:
    """Draft tokens a step: those asked for if it was trained for so many, else what its makers advise within that."""
    drafter, asked = launch.drafter, launch.num_draft_tokens
    if drafter is None:
        if asked:
            raise ConfigError(f"num_draft_tokens is {asked}, but there is no drafter", hint="give one with --drafter")
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


def check_combination(launch: Launch, vllm: Installed, environment: Mapping[str, str]) -> None:
    """Refuse early what no form of the drafter's files would make possible; `command` looks at the files as well."""
    drafter = launch.drafter
    in_any_form = None if drafter is None else replace(drafter, layout="vllm", max_length=None)
    command(replace(launch, drafter=in_any_form), vllm, environment)


def check_drafter(
    launch: Launch, drafter: DrafterFacts, num_draft_tokens: int, vllm: Installed, environment: Mapping[str, str]
) -> None:
    """Refuse what vLLM cannot do with this drafter, or would do badly without saying so."""
    if drafter.parallel is None:
        raise ConfigError(
            f"whether the drafter {drafter.model} is P-EAGLE or EAGLE-3 is not known: its config.json was not read",
            hint="say it to vLLM: --speculative-config '{\"parallel_drafting\": true}' for P-EAGLE, false for EAGLE-3 "
            "(SageMaker: --env SM_VLLM_SPECULATIVE_CONFIG=...); or give the drafter's directory",
        )
    vllm.need("parallel" if drafter.parallel else "eagle3")
    if drafter.layout == "speculators":
        vllm.need("speculators", hint="write it in vLLM's own layout first: peagle export DIR --to vllm --output NEW")
    if drafter.norms:
        vllm.need("norms")
    if drafter.max_length is not None and launch.max_length is not None and launch.max_length > drafter.max_length:
        raise ConfigError(
            f"max_length is {launch.max_length}, but the drafter's positions end at {drafter.max_length}, "
            "and vLLM would fail beyond them",
            hint=f"use --max-length {drafter.max_length}, a drafter for longer texts, or --num-draft-tokens 0",
        )
    if not drafter.parallel:
        if launch.pipeline_parallel_size > 1:
            vllm.need("pipeline", hint="use --tensor-parallel-size instead")
        return
    if environment.get(RUNNER_VARIABLE, "").strip().lower() in ("1", "true"):
        raise ConfigError(
            f"{RUNNER_VARIABLE}={environment[RUNNER_VARIABLE]} forces vLLM's second model runner, "
            "which cannot draft in parallel",
            hint=f"unset {RUNNER_VARIABLE}: it is set to 0 for P-EAGLE drafters",
        )
    if launch.is_hybrid:
        vllm.need("hybrid")
    if drafter.uses_mrope:
        raise ConfigError(
            f"{drafter.model}: the drafter has multi-part rotary positions (M-RoPE), "
            "with which vLLM cannot draft in parallel",
            hint="use an EAGLE-3 drafter for this target, or --num-draft-tokens 0",
        )
    if launch.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {launch.pipeline_parallel_size}, but a P-EAGLE drafter reads layers of all "
            "stages, and vLLM hands those on only in the model runner that cannot draft in parallel",
            hint="spread the target by --tensor-parallel-size (over nodes too), or serve an EAGLE-3 drafter",
        )
    if launch.speculation.get("draft_sample_method") == "probabilistic":
        vllm.need("probabilistic")


def _model_flags(launch: Launch, drafter: DrafterFacts | None) -> dict[str, tuple[str, ...]]:
    # OpenAI's defaults for what a request leaves out, as on our own engine, not those of the target's makers.
    flags: dict[str, tuple[str, ...]] = {"--generation-config": ("vllm",)}
    if launch.dtype != "auto":
        flags["--dtype"] = (launch.dtype,)
    max_length = launch.max_length
    if max_length is None and drafter is not None and drafter.max_length is not None:
        longest = launch.target_max_length
        if longest is None or longest > drafter.max_length:
            max_length = drafter.max_length
            log.info("max_length: %d, because the drafter's positions end there", max_length)
    if max_length is not None:
        flags["--max-model-len"] = (str(max_length),)
    return flags


def _batch_flags(
    launch: Launch, drafter: DrafterFacts | None, num_draft_tokens: int, max_batch: int, vllm: Installed
) -> dict[str, tuple[str, ...]]:
    placeholders = (num_draft_tokens - 1) * max_batch if drafter is not None and drafter.parallel else 0
    verified = (num_draft_tokens + 1) * max_batch
    budget = launch.token_budget
    if budget is None:
        prefill_tokens = launch.prefill_tokens or (CPU_PREFILL_TOKENS if vllm.is_cpu else GPU_PREFILL_TOKENS)
        budget = max(prefill_tokens, verified) + placeholders
    elif budget < verified + placeholders:
        raise ConfigError(
            f"--max-num-batched-tokens is {budget}, but a full batch of {max_batch} requests needs "
            f"{verified + placeholders} in a step: {verified} tokens to verify and {placeholders} placeholders",
            hint=f"use {verified + placeholders} or more, a smaller --max-batch, or fewer --num-draft-tokens",
        )
    flags: dict[str, tuple[str, ...]] = {
        "--max-num-seqs": (str(max_batch),),
        "--max-num-batched-tokens": (str(budget),),
        ("--enable-prefix-caching" if launch.reuse_prefixes else "--no-enable-prefix-caching"): (),
    }
    if launch.memory_share is not None:
        flags["--gpu-memory-utilization"] = (f"{launch.memory_share:g}",)
    if launch.page_size is not None:
        flags["--block-size"] = (str(launch.page_size),)
    if launch.num_pages is not None:
        flags["--num-gpu-blocks-override"] = (str(launch.num_pages),)
    if launch.is_eager:
        flags["--enforce-eager"] = ()
    elif drafter is not None and not vllm.is_cpu:
        flags["--max-cudagraph-capture-size"] = (str(min(MAX_CAPTURE_SIZE, verified)),)
    return flags


def _parallel_flags(launch: Launch) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    for name in ("tensor", "pipeline", "data"):
        size = getattr(launch, f"{name}_parallel_size")
        if size > 1:
            flags[f"--{name}-parallel-size"] = (str(size),)
    if launch.num_nodes > 1:
        flags["--distributed-executor-backend"] = ("ray",)
        if launch.data_parallel_size > 1:
            flags["--data-parallel-backend"] = ("ray",)
            flags["--data-parallel-size-local"] = (str(launch.data_parallel_size // launch.num_nodes),)
    return flags


def _speculation(launch: Launch, drafter: DrafterFacts, num_draft_tokens: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": drafter.model,
        "num_speculative_tokens": num_draft_tokens,
    }
    if drafter.parallel:
        config["parallel_drafting"] = True
    size = launch.tensor_parallel_size
    if drafter.num_heads is not None and drafter.num_heads % size:
        log.info("the drafter runs whole on each GPU: its %d heads cannot be split by %d", drafter.num_heads, size)
        config["draft_tensor_parallel_size"] = 1
    return config | dict(launch.speculation)
