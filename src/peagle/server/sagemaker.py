"""SageMaker's conventions: settings in the environment, models under /opt/ml, the route of an invocation.

The same environment variables run vLLM's container and ours. `SM_VLLM_MAX_MODEL_LEN=4096` means vLLM's option
`--max-model-len 4096`; the rules for other values are those of AWS's container and are written at `vllm_arguments`.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError, RequestError, nearest

log = logging.getLogger(__name__)

PREFIX = "SM_VLLM_"
ROOT_VARIABLE = "PEAGLE_ML_ROOT"
"""Names another directory than /opt/ml."""
MODEL_VARIABLE = "SAGEMAKER_MODEL_PATH"
HUB_VARIABLE = "HF_MODEL_ID"
"""Names a target. Machines that are no container have it too, so that alone opens no address."""
CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
PORT = 8080
DRAFT_CHANNEL = "draft_model"
"""The additional data source that a drafter lies in when no speculative config names one."""

SINGLE_TOKEN = frozenset({"--allowed-origins", "--allowed-methods", "--allowed-headers", "--middleware"})
METHODS = ("eagle3", "eagle", "p-eagle")
DEPTH_KEYS = ("prediction_depth", "depth")
TREE_KEYS = ("num_parallel_trees", "parallel_trees", "num_trees")
DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class Conventions:
    """What the environment asks for, in our words; None and empty where it says nothing."""

    is_container: bool = False
    """whether any of SageMaker's own variables or directories is there, so that all addresses are listened on"""
    target: str | None = None
    drafter: str | None = None
    num_draft_tokens: int | None = None
    dtype: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    server: dict[str, Any] = field(default_factory=dict)
    """fields of ServerSettings"""
    engine: dict[str, Any] = field(default_factory=dict)
    """fields of EngineConfig"""
    unmatched: tuple[str, ...] = ()
    """options of vLLM that have no counterpart here"""
    unmatched_words: tuple[str, ...] = ()
    """the same as words of vLLM's command line, for vLLM itself"""


def read_conventions(environment: Mapping[str, str], *, for_vllm: bool = False) -> Conventions:
    """Translate the environment; what has no counterpart is told in one warning, unless vLLM itself will get it."""
    root = Path(environment.get(ROOT_VARIABLE, "/opt/ml"))
    model_directory = Path(environment.get(MODEL_VARIABLE, str(root / "model")))
    has_model = model_directory.is_dir() and any(model_directory.iterdir())
    sources = root / "additional-model-data-sources"
    has_options = any(name.startswith(PREFIX) for name in environment)
    is_container = has_options or has_model or (sources / DRAFT_CHANNEL).is_dir()
    if not (is_container or environment.get(HUB_VARIABLE)):
        return Conventions()
    options = _options(vllm_arguments(environment, model_directory if has_model else None))
    conventions = _Reader(options, sources, is_container).read()
    if conventions.unmatched and not for_vllm:
        log.warning("settings of vLLM without a counterpart here, not used: %s", ", ".join(conventions.unmatched))
    return conventions


def vllm_arguments(environment: Mapping[str, str], model_directory: Path | None) -> list[str]:
    """The command line that the variables stand for on vLLM's container.

    "true" and "" give a bare flag, "false" none. A JSON array gives one word for each element. A JSON object stays
    one word as it is written, several after each other are one word each. Anything else is passed on as it is.

    >>> vllm_arguments({"SM_VLLM_MODEL": "m", "SM_VLLM_ENFORCE_EAGER": "True", "SM_VLLM_SEED": "1"}, None)
    ['--port', '8080', '--model', 'm', '--enforce-eager', '--seed', '1']
    """
    words = ["--port", str(PORT)]
    model = environment.get(f"{PREFIX}MODEL") or model_directory or environment.get(HUB_VARIABLE)
    if model:
        words += ["--model", str(model)]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in (PREFIX, f"{PREFIX}MODEL"):
            flag = "--" + name.removeprefix(PREFIX).lower().replace("_", "-")
            words += _words(flag, environment[name])
    return words


def _words(flag: str, value: str) -> list[str]:
    stripped = value.strip()
    if stripped.lower() == "false":
        return []
    if stripped.lower() in ("true", ""):
        return [flag]
    if flag in SINGLE_TOKEN:
        return [flag, value]
    if stripped.startswith("["):
        try:
            elements = json.loads(stripped)
        except ValueError:
            return [flag, value]
        if not elements:
            log.warning("%s is an empty list and is left out", flag)
            return []
        return [flag, *map(_word, elements)]
    if stripped.startswith("{"):
        objects = _objects(stripped)
        return [flag, *(objects if len(objects) > 1 else [value])]
    return [flag, value]


def _word(element: Any) -> str:
    if isinstance(element, str):
        return element
    return json.dumps(element, separators=(",", ":"))


def _objects(text: str) -> list[str]:
    """The JSON objects that a text is made of, as they are written; none if it is anything else."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            return []
        if not isinstance(value, dict):
            return []
        found.append(text[at:end])
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found


def _options(words: list[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            options[name] = []
        else:
            options[name].append(word)
    return options


class _Reader:
    """Takes vLLM's options one after the other; what is left at the end has no counterpart."""

    def __init__(self, options: dict[str, list[str]], sources: Path, is_container: bool) -> None:
        self._options, self._sources, self._is_container = dict(options), sources, is_container
        self._unmatched: list[str] = []
        self._speculation_rest: dict[str, Any] = {}

    def read(self) -> Conventions:
        target = self._text("model")
        server = self._present(
            host=self._text("host") or ("0.0.0.0" if self._is_container else None),
            port=self._number("port"),
            served_model_name=tuple(self._options.pop("served-model-name", ())) or None,
            cors_origins=self._origins(),
            drain_seconds=self._fraction("shutdown-timeout"),
            keep_alive_seconds=self._fraction("sse-keep-alive-interval"),
        )
        is_eager = self._options.pop("enforce-eager", None) is not None
        engine = self._present(
            max_length=self._number("max-model-len"),
            max_batch=self._number("max-num-seqs"),
            prefill_tokens=self._number("max-num-batched-tokens"),
            max_waiting=self._number("max-num-queued-reqs"),
            memory_share=self._fraction("gpu-memory-utilization"),
            page_size=self._number("block-size"),
            reuse_prefixes=self._switch("enable-prefix-caching"),
            capture=False if is_eager else None,
            compile=False if is_eager else None,
        )
        dtype = self._text("dtype")
        drafter, num_draft_tokens = self._speculation()
        keys = tuple(self._options.pop("api-key", ()))
        for name in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
            if self._options.get(name) == ["1"]:
                del self._options[name]
        unmatched = [f"--{name}" for name in self._options] + self._unmatched
        words = [word for name, values in self._options.items() for word in (f"--{name}", *values)]
        if self._speculation_rest:
            words += ["--speculative-config", json.dumps(self._speculation_rest)]
        return Conventions(
            is_container=self._is_container,
            target=target,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            dtype=DTYPES.get(dtype, dtype) if dtype else None,
            api_keys=keys,
            server=server,
            engine=engine,
            unmatched=tuple(sorted(unmatched)),
            unmatched_words=tuple(words),
        )

    @staticmethod
    def _present(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    def _text(self, name: str) -> str | None:
        values = self._options.pop(name, None)
        if values is None:
            return None
        if len(values) != 1:
            raise ConfigError(f"{_variable(name)} takes one value, got {len(values)}")
        return values[0]

    def _fraction(self, name: str) -> float | None:
        text = self._text(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise ConfigError(f"{_variable(name)} must be a number, got {text!r}") from None

    def _number(self, name: str) -> int | None:
        """A whole number; as in vLLM, `8k` is 8000 and `8K` is 8192."""
        text = self._text(name)
        if text is None:
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM]?)", text.strip())
        if match is None:
            raise ConfigError(f"{_variable(name)} must be a whole number, got {text!r}")
        unit = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}[match[2]]
        return int(float(match[1]) * unit)

    def _switch(self, name: str) -> bool | None:
        on, off = self._options.pop(name, None), self._options.pop(f"no-{name}", None)
        return None if on is None and off is None else off is None

    def _origins(self) -> tuple[str, ...] | None:
        text = self._text("allowed-origins")
        if text is None:
            return None
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{_variable('allowed-origins')} must be a JSON list of strings, got {text!r}")
        return tuple(values)

    def _speculation(self) -> tuple[str | None, int | None]:
        """The drafter's directory and the number of draft tokens, of vLLM's speculative config."""
        text = self._text("speculative-config")
        if text is None:
            channel = self._sources / DRAFT_CHANNEL
            return (str(channel), None) if channel.is_dir() else (None, None)
        name = _variable("speculative-config")
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name} is not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{name} must be a JSON object, got {text!r}")
        method = config.pop("method", "eagle3")
        if method not in METHODS:
            raise ConfigError(f"{name}: the method {method!r} is not supported", hint="use 'eagle3'")
        drafter = config.pop("model", None)
        if drafter is not None and not isinstance(drafter, str):
            raise ConfigError(f"{name}: model must be text, got {drafter!r}")
        if drafter and (self._sources / drafter).is_dir():
            drafter = str(self._sources / drafter)
        if drafter is None and (self._sources / DRAFT_CHANNEL).is_dir():
            drafter = str(self._sources / DRAFT_CHANNEL)
        config.pop("parallel_drafting", None)  # the drafter's own config.json says which kind it is
        num_draft_tokens = _count(config.pop("num_speculative_tokens", None), f"{name}: num_speculative_tokens")
        depth = _depth(config.pop("parallel_drafting_spec", None), f"{name}: parallel_drafting_spec")
        if depth is not None and num_draft_tokens not in (None, depth):
            raise ConfigError(
                f"{name}: num_speculative_tokens is {num_draft_tokens}, but parallel_drafting_spec has depth {depth}",
                hint="both set the number of draft tokens: leave one of them out",
            )
        if config.get("draft_tensor_parallel_size") == 1:
            del config["draft_tensor_parallel_size"]
        self._unmatched += [f"--speculative-config {key}" for key in config]
        self._speculation_rest = config
        return drafter, num_draft_tokens if depth is None else depth


def _depth(spec: Any, name: str) -> int | None:
    """The number of draft tokens of the block that AWS's articles name: trees in parallel, and their depth."""
    if spec is None:
        return None
    if not isinstance(spec, dict):
        raise ConfigError(f"{name} must be a JSON object, got {spec!r}")
    for key in spec:
        if key not in DEPTH_KEYS + TREE_KEYS:
            raise ConfigError(f"{name}: unknown key {key!r}", hint=nearest(key, DEPTH_KEYS + TREE_KEYS))
    for key in TREE_KEYS:
        if _count(spec.get(key), f"{name}: {key}") not in (None, 1):
            raise ConfigError(
                f"{name}: {key} is {spec[key]}, but there are no candidate trees yet",
                hint="use 1: one sequence of draft tokens",
            )
    depths = [_count(spec[key], f"{name}: {key}") for key in DEPTH_KEYS if key in spec]
    return depths[0] if depths else None


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def _variable(option: str) -> str:
    return PREFIX + option.upper().replace("-", "_")


def invocation_route(attributes: str | None, body: Any, known: Iterable[str]) -> str:
    """Which route an invocation means: the one its custom attributes name, else what its body looks like.

    >>> invocation_route("route=/v1/completions,x=1", {"messages": []}, ["/v1/completions"])
    '/v1/completions'
    """
    match = re.search(r"route=(/[^\s,]+)", attributes or "")
    if match is not None:
        if match[1] not in known:
            raise RequestError(
                f"{CUSTOM_ATTRIBUTES} names the route {match[1][:200]!r}, which there is not",
                hint=f"known: {', '.join(known)}",
            )
        return match[1]
    if isinstance(body, dict):
        if "messages" in body:
            return "/v1/chat/completions"
        if "prompt" in body:
            return "/v1/completions"
    raise RequestError(
        "the body has neither 'messages' nor 'prompt'", hint="send the body of a chat completion or of a completion"
    )
