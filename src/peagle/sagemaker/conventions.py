"""The container's settings: what `peagle deploy sagemaker` writes and `peagle serve` reads.

The same environment variables configure AWS's vLLM container and peagle's own: `SM_VLLM_MAX_MODEL_LEN=4096` is vLLM's
`--max-model-len 4096`. `words_of` has AWS's rules for other kinds of values; `NATIVE` lists what peagle's engine reads.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from peagle.errors import ConfigError
from peagle.vllm.command import Installed, VllmSettings, command, resolve_num_draft_tokens
from peagle.vllm.flags import FOLDED, SWITCHES, fraction, one_value, read_flags, whole, with_flags
from peagle.vllm.speculation import Speculation, read_speculation

log = logging.getLogger(__name__)

Engine = Literal["vllm", "native"]
Flags = dict[str, tuple[str, ...]]

PREFIX = "SM_VLLM_"
SPECULATION = f"{PREFIX}SPECULATIVE_CONFIG"
PORT = 8080
ROOT_VARIABLE = "PEAGLE_ML_ROOT"
"""Replaces /opt/ml."""
MODEL_VARIABLE = "SAGEMAKER_MODEL_PATH"
HUB_VARIABLE = "HF_MODEL_ID"
"""Names a target. Also set outside containers, so on its own it does not make the server listen on all addresses."""
MODEL_DIRECTORY = "/opt/ml/model"
SOURCES = "additional-model-data-sources"
DRAFT_CHANNEL = "draft_model"
"""The data source that holds the drafter, unless the speculative config names another."""
DRAFT_DIRECTORY = f"/opt/ml/{SOURCES}/{DRAFT_CHANNEL}"

SINGLE_WORDS = frozenset({"--allowed-origins", "--allowed-methods", "--allowed-headers", "--middleware"})
"""Options that take a JSON list as one word."""
REFUSED = {
    f"{PREFIX}MODEL": "use --target",
    f"{PREFIX}SERVED_MODEL_NAME": "requests name the model by the endpoint's NAME; choose that",
    f"{PREFIX}HOST": "SageMaker sets the address",
    f"{PREFIX}PORT": "SageMaker always calls port 8080",
    f"{PREFIX}UDS": "SageMaker always calls port 8080",
    f"{PREFIX}API_KEY": "callers authenticate with IAM (sagemaker:InvokeEndpoint), not keys",
    f"{PREFIX}HF_TOKEN": "for gated models use --upload-models: it downloads them here, with your access",
}
"""Variables that --env must not set, and what to do instead."""


def origins(text: str, variable: str) -> tuple[str, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{variable} must be a JSON list of strings, got {text!r}")
    return tuple(values)


NATIVE: dict[str, tuple[Literal["server", "engine"], str, Callable[[str, str], Any]]] = {
    "--host": ("server", "host", lambda text, _: text),
    "--port": ("server", "port", whole),
    "--allowed-origins": ("server", "cors_origins", origins),
    "--shutdown-timeout": ("server", "drain_seconds", fraction),
    "--sse-keep-alive-interval": ("server", "keep_alive_seconds", fraction),
    "--max-model-len": ("engine", "max_length", whole),
    "--max-num-seqs": ("engine", "max_batch", whole),
    "--max-num-batched-tokens": ("engine", "prefill_tokens", whole),
    "--max-num-queued-reqs": ("engine", "max_waiting", whole),
    "--gpu-memory-utilization": ("engine", "memory_share", fraction),
}
"""vLLM options that are fields of ServerSettings or EngineOptions."""
DTYPES = {"half": "float16", "float": "float32"}


def variable_of(flag: str) -> str:
    return PREFIX + flag.removeprefix("--").upper().replace("-", "_")


def flag_of(variable: str) -> str:
    return "--" + variable.removeprefix(PREFIX).lower().replace("_", "-")


def value_of(values: tuple[str, ...]) -> str:
    if not values:
        return "true"
    return values[0] if len(values) == 1 else json.dumps(list(values))


def words_of(flag: str, value: str) -> list[str]:
    """Command-line words for one variable, by the rules of AWS's container.

    "true" and "" give the bare flag, "false" nothing. A JSON array gives one word per element. A JSON object stays one
    word; several objects in a row give one word each. Anything else is passed on unchanged.
    """
    stripped = value.strip()
    if is_off(value):
        return []
    if stripped.lower() in ("true", ""):
        return [flag]
    if flag in SINGLE_WORDS:
        return [flag, value]
    if stripped.startswith("["):
        try:
            elements = json.loads(stripped)
        except ValueError:
            return [flag, value]
        if not elements:
            log.warning("%s is an empty list; ignoring it", flag)
            return []
        texts = (each if isinstance(each, str) else json.dumps(each, separators=(",", ":")) for each in elements)
        return [flag, *texts]
    objects = _objects(stripped)
    return [flag, *(objects if len(objects) > 1 else [value])]


def is_off(value: str) -> bool:
    return value.strip().lower() == "false"


def _objects(text: str) -> list[str]:
    """The JSON objects in a text, as written; empty if it holds anything else."""
    found = []
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return []
        if not isinstance(value, dict):
            return []
        found.append(text[:end])
        text = text[end:].lstrip()
    return found


# What deploy writes.


def without_speculation(given: Mapping[str, str]) -> tuple[Speculation, dict[str, str]]:
    """Take what peagle's options also say out of SM_VLLM_SPECULATIVE_CONFIG; other keys stay in the variables."""
    text = given.get(SPECULATION)
    if text is None or is_off(text):
        return Speculation(), dict(given)
    found = read_speculation(text, SPECULATION)
    rest = found.rest if found.parallel is None else found.rest | {"parallel_drafting": found.parallel}
    if found.drafter == DRAFT_DIRECTORY:  # where the uploaded drafter will be
        found = replace(found, drafter=None)
    others = {name: value for name, value in given.items() if name != SPECULATION}
    return found, others | ({SPECULATION: json.dumps(rest)} if rest else {})


def variables(
    settings: VllmSettings,
    engine: Engine,
    vllm: Installed,
    given: Mapping[str, str],
    *,
    is_uploaded: bool,
    reads_lists: bool = True,
) -> dict[str, str]:
    """The container's environment: the settings plus the user's own variables.

    For vLLM, the user's vLLM options are merged into the settings first, so that dependent values fit them.
    peagle's own server works those out itself, so it gets them unchanged. AWS images that do not read lists
    (`reads_lists`) get only the first model name.
    """
    for name in given:
        if name in REFUSED:
            raise ConfigError(f"--env {name} cannot be set", hint=REFUSED[name])
    model: Flags = {} if is_uploaded else {"--model": (settings.target,)}
    if engine == "native":
        given = dict(given)
        if (config := given.get(SPECULATION)) is not None and not (asked := read_speculation(config, SPECULATION)).rest:
            asked.check_kind(settings.drafter, SPECULATION)
            del given[SPECULATION]  # nothing is left of it that the options below do not say
        found = {variable_of(flag): value_of(values) for flag, values in (model | _native_flags(settings)).items()}
        for name in given:
            if name in found or name == SPECULATION:
                raise ConfigError(
                    f"--env {name} conflicts with the options of this command",
                    hint="use --target, --drafter, --num-draft-tokens, --max-length",
                )
        return found | dict(given)
    options = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    plain = {name: value for name, value in given.items() if name not in options}
    if not reads_lists:
        for name, value in options.items():
            flag = flag_of(name)
            if flag not in SINGLE_WORDS and value.lstrip().startswith("[") and len(words_of(flag, value)) > 2:
                raise ConfigError(
                    f"--env {name} is a list, which this image cannot read",
                    hint="use --image server-sagemaker-cuda-v2.4 or later",
                )
        settings = replace(settings, names=settings.names[:1])
    made = command(with_flags(settings, _flags_for_vllm(options)), vllm)
    flags = read_flags(list(made.words[3:]))
    for name in options:
        if is_off(options[name]):
            flags.pop(flag_of(name), None)
    written = {variable_of(flag): value_of(values) for flag, values in (model | flags).items()}
    return dict(made.environment) | written | plain


def _native_flags(settings: VllmSettings) -> Flags:
    """The options peagle's own server reads; it works out the rest."""
    flags: Flags = {"--served-model-name": settings.names}
    if settings.max_length is not None:
        flags["--max-model-len"] = (str(settings.max_length),)
    num_draft_tokens = resolve_num_draft_tokens(settings)
    if settings.drafter is not None and num_draft_tokens:
        config = {"method": "eagle3", "model": settings.drafter.model, "num_speculative_tokens": num_draft_tokens}
        config |= {"parallel_drafting": True} if settings.drafter.parallel else {}
        flags["--speculative-config"] = (json.dumps(config),)
    return flags


def _flags_for_vllm(options: Mapping[str, str]) -> list[str]:
    words: list[str] = []
    for name, value in sorted(options.items()):
        flag = flag_of(name)
        if is_off(value):
            # Omitting a default-on option would leave it on. An option with a value cannot be off; the parser says so.
            opposite = flag.replace("--", "--no-", 1)
            has_value = flag in FOLDED or flag == "--speculative-config"
            words += [opposite] if opposite in SWITCHES else [flag] if has_value else []
        else:
            words += words_of(flag, value)
    return words


# What serve reads.


@dataclass(frozen=True)
class Conventions:
    """Settings from the environment in peagle's terms; None or empty if not set."""

    is_container: bool = False
    """one of SageMaker's variables or directories exists, so listen on all addresses"""
    target: str | None = None
    drafter: str | None = None
    num_draft_tokens: int | None = None
    speculation: Speculation = field(default_factory=Speculation)
    dtype: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    server: dict[str, Any] = field(default_factory=dict)
    """fields of ServerSettings"""
    engine: dict[str, Any] = field(default_factory=dict)
    """fields of EngineOptions"""
    unmatched: tuple[str, ...] = ()
    """vLLM options that peagle's own engine does not have"""
    unmatched_words: tuple[str, ...] = ()
    """the same as words of a vLLM command line"""


def read_conventions(environment: Mapping[str, str], *, for_vllm: bool = False) -> Conventions:
    """Translate the environment. Warns about options without an equivalent, unless vLLM itself will get them."""
    root = Path(environment.get(ROOT_VARIABLE, "/opt/ml"))
    model_directory = Path(environment.get(MODEL_VARIABLE, str(root / "model")))
    has_model = model_directory.is_dir() and any(model_directory.iterdir())
    sources = root / SOURCES
    has_options = any(name.startswith(PREFIX) for name in environment)
    is_container = has_options or has_model or (sources / DRAFT_CHANNEL).is_dir()
    if not (is_container or environment.get(HUB_VARIABLE)):
        return Conventions()
    flags = container_flags(environment, model_directory if has_model else None)
    conventions = _translate(flags, sources, is_container)
    if conventions.unmatched and not for_vllm:
        log.warning("ignoring vLLM options without an equivalent: %s", ", ".join(conventions.unmatched))
    return conventions


def container_flags(environment: Mapping[str, str], model_directory: Path | None) -> Flags:
    """The vLLM options that AWS's container builds from the environment.

    >>> container_flags({"SM_VLLM_MODEL": "m", "SM_VLLM_ENFORCE_EAGER": "True", "SM_VLLM_SEED": "1"}, None)
    {'--port': ('8080',), '--model': ('m',), '--enforce-eager': (), '--seed': ('1',)}
    """
    flags: Flags = {"--port": (str(PORT),)}
    model = environment.get(f"{PREFIX}MODEL") or model_directory or environment.get(HUB_VARIABLE)
    if model:
        flags["--model"] = (str(model),)
    for name in sorted(environment):
        is_option = name.startswith(PREFIX) and name not in (PREFIX, f"{PREFIX}MODEL")
        if is_option and (words := words_of(flag_of(name), environment[name])):
            flags[words[0]] = tuple(words[1:])
    return flags


def _translate(flags: Flags, sources: Path, is_container: bool) -> Conventions:
    """Take the options peagle understands out of `flags`; the rest are unmatched."""

    def text(flag: str) -> str | None:
        return one_value(variable_of(flag), flags.pop(flag)) if flag in flags else None

    fields: dict[str, dict[str, Any]] = {"server": {}, "engine": {}}
    if is_container:
        fields["server"]["host"] = "0.0.0.0"
    for flag, (part, name, read) in NATIVE.items():
        if (value := text(flag)) is not None:
            fields[part][name] = read(value, variable_of(flag))
    if names := flags.pop("--served-model-name", ()):
        fields["server"]["served_model_name"] = names
    if flags.pop("--enforce-eager", None) is not None:
        fields["engine"]["eager"] = True
    for flag, is_on in (("--enable-prefix-caching", True), ("--no-enable-prefix-caching", False)):
        if flags.pop(flag, None) is not None:
            fields["engine"]["reuse_prefixes"] = is_on
    target, dtype, keys = text("--model"), text("--dtype"), flags.pop("--api-key", ())
    speculation = _read_speculation(text("--speculative-config"), sources)
    rest = speculation.rest
    # vLLM is told the kind of a drafter; our own engine reads it from the drafter's config.json.
    for_vllm = rest if speculation.parallel is None else rest | {"parallel_drafting": speculation.parallel}
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"):
        if flags.get(flag) == ("1",):
            del flags[flag]
    words = [word for flag, values in flags.items() for word in (flag, *values)]
    return Conventions(
        is_container=is_container,
        target=target,
        drafter=speculation.drafter,
        num_draft_tokens=speculation.draft_tokens(None),
        speculation=speculation,
        dtype=DTYPES.get(dtype, dtype) if dtype else None,
        api_keys=keys,
        server=fields["server"],
        engine=fields["engine"],
        unmatched=tuple(sorted([*flags, *(f"--speculative-config {key}" for key in rest)])),
        unmatched_words=(*words, *(("--speculative-config", json.dumps(for_vllm)) if for_vllm else ())),
    )


def _read_speculation(text: str | None, sources: Path) -> Speculation:
    """vLLM's speculative config, with the drafter of the additional data source filled in."""
    channel = str(sources / DRAFT_CHANNEL) if (sources / DRAFT_CHANNEL).is_dir() else None
    if text is None:
        return Speculation(channel)
    found = read_speculation(text, SPECULATION)
    drafter = found.drafter
    if drafter and (sources / drafter).is_dir():
        drafter = str(sources / drafter)
    rest = dict(found.rest)
    if rest.get("draft_tensor_parallel_size") == 1:
        del rest["draft_tensor_parallel_size"]
    return replace(found, drafter=drafter or channel, rest=rest)
