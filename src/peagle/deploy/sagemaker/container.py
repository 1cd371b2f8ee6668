"""Settings of the container: the same environment variables run AWS's vLLM image and ours.

`SM_VLLM_MAX_NUM_SEQS=256` is vLLM's `--max-num-seqs 256`; a flag without a value is "true", several values a JSON list.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from peagle.deploy.vllm import Installed, Launch, command, resolve_num_draft_tokens
from peagle.deploy.vllm_flags import read_flags, with_flags
from peagle.errors import ConfigError

PREFIX = "SM_VLLM_"
Engine = Literal["vllm", "native"]
DECIDED = frozenset(
    {f"{PREFIX}{name}" for name in ("MODEL", "SERVED_MODEL_NAME", "SPECULATIVE_CONFIG", "HOST", "PORT")}
)
VLLM_RELEASES = {"server-sagemaker-cuda-v2.2": "0.26.0"}
"""What is in images whose tags do not say it."""


def vllm_release(tag: str) -> Installed:
    """The vLLM in an image of AWS's, by its tag.

    >>> vllm_release("0.21.0-gpu-py312-cu130-ubuntu22.04-sagemaker-v1.4").version
    '0.21.0'
    """
    match = re.match(r"\d+\.\d+(\.\d+)?(?=-|$)", tag)
    version = VLLM_RELEASES.get(tag) or (match[0] if match else None)
    if version is None:
        known = ", ".join(VLLM_RELEASES)
        raise ConfigError(
            f"--vllm-tag {tag}: which vLLM that is cannot be told", hint=f"known: {known}, or VERSION-..."
        )
    return Installed(version)


def variables(
    launch: Launch, engine: Engine, vllm: Installed, given: Mapping[str, str], *, is_uploaded: bool
) -> dict[str, str]:
    """The container's environment for a launch and what the user asks for besides.

    For vLLM its options among the latter are taken into the launch first, so that what depends on them fits. Our own
    server decides by itself what they leave open, so there they are handed on as they are.
    """
    if engine == "native":
        flags = _native_flags(launch) if is_uploaded else {"--model": (launch.target,)} | _native_flags(launch)
        found = {_variable(flag): _value(values) for flag, values in flags.items()}
        for name in given:
            if name in found or name in DECIDED:
                raise ConfigError(
                    f"--env {name}: the options decide that",
                    hint="use --target, --drafter, --num-draft-tokens, --max-length",
                )
        return found | dict(given)
    plain = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
    launch = with_flags(launch, _words({name: value for name, value in given.items() if name.startswith(PREFIX)}))
    made = command(launch, vllm)
    flags = read_flags(list(made.words[3:]))
    if not is_uploaded:
        flags = {"--model": (launch.target,)} | flags
    return dict(made.environment) | {_variable(flag): _value(values) for flag, values in flags.items()} | plain


def _native_flags(launch: Launch) -> dict[str, tuple[str, ...]]:
    """What our own server reads of them; the rest it decides by itself."""
    flags: dict[str, tuple[str, ...]] = {"--served-model-name": launch.names}
    if launch.max_length is not None:
        flags["--max-model-len"] = (str(launch.max_length),)
    num_draft_tokens = resolve_num_draft_tokens(launch)
    if launch.drafter is not None and num_draft_tokens:
        config: dict[str, Any] = {
            "method": "eagle3",
            "model": launch.drafter.model,
            "num_speculative_tokens": num_draft_tokens,
        }
        if launch.drafter.parallel:
            config["parallel_drafting"] = True
        flags["--speculative-config"] = (json.dumps(config),)
    return flags


def _variable(flag: str) -> str:
    return PREFIX + flag.removeprefix("--").upper().replace("-", "_")


def _value(values: tuple[str, ...]) -> str:
    if not values:
        return "true"
    return values[0] if len(values) == 1 else json.dumps(list(values))


def _words(variables: Mapping[str, str]) -> list[str]:
    """The flags that variables stand for."""
    words: list[str] = []
    for name, value in sorted(variables.items()):
        flag = "--" + name.removeprefix(PREFIX).lower().replace("_", "-")
        if value.lower() == "false":
            continue
        words.append(flag)
        if value.lower() in ("true", ""):
            continue
        elements = _list(value)
        words += [value] if elements is None else elements
    return words


def _list(value: str) -> list[str] | None:
    if not value.lstrip().startswith("["):
        return None
    try:
        elements = json.loads(value)
    except ValueError:
        return None
    return [each if isinstance(each, str) else json.dumps(each) for each in elements]
