"""Settings of the container: the same environment variables run AWS's vLLM image and ours.

`SM_VLLM_MAX_NUM_SEQS=256` is vLLM's `--max-num-seqs 256`; a flag without a value is "true", several values a JSON list.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from peagle.deploy.vllm import Installed, Launch, command, resolve_num_draft_tokens
from peagle.deploy.vllm_flags import FOLDED, SWITCHES, read_flags, with_flags
from peagle.errors import ConfigError

PREFIX = "SM_VLLM_"
Engine = Literal["vllm", "native"]
REFUSED = {
    f"{PREFIX}MODEL": "use --target",
    f"{PREFIX}SERVED_MODEL_NAME": "requests call the target by the endpoint's NAME: choose that",
    f"{PREFIX}HOST": "SageMaker decides where the container is asked",
    f"{PREFIX}PORT": "SageMaker asks on port 8080",
    f"{PREFIX}UDS": "SageMaker asks on port 8080",
    f"{PREFIX}API_KEY": "callers are let in by IAM (sagemaker:InvokeEndpoint), not by keys",
    f"{PREFIX}HF_TOKEN": "for a gated target use --upload-target: it is fetched here, with your own access",
}
"""Variables that something else decides, and what does."""
VLLM_RELEASES = {
    "server-sagemaker-cuda-v2.2": "0.26.0",
    "server-sagemaker-cuda-v2.4": "0.27.1",
    "server-sagemaker-cuda-v2.6": "0.30.0",
}
"""What is in images whose tags do not say it."""
FIRST_WITH_LISTS = "server-sagemaker-cuda-v2.4"
"""AWS's images before it make one word of a JSON list, which no option with several values takes."""
SINGLE_WORDS = frozenset({"--allowed-origins", "--allowed-methods", "--allowed-headers", "--middleware"})
"""Options whose JSON list is one word in every image: vLLM reads it itself."""


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


def reads_lists(tag: str) -> bool:
    """Whether an image of AWS's makes several words of a JSON list.

    >>> reads_lists("server-sagemaker-cuda-v2.2"), reads_lists("server-sagemaker-cuda-v2.10")
    (False, True)
    """

    def numbers(text: str) -> tuple[int, ...]:
        match = re.fullmatch(r"server-sagemaker-cuda-v(\d+)\.(\d+)", text)
        return () if match is None else (int(match[1]), int(match[2]))

    return numbers(tag) >= numbers(FIRST_WITH_LISTS)


def variables(
    launch: Launch,
    engine: Engine,
    vllm: Installed,
    given: Mapping[str, str],
    *,
    is_uploaded: bool,
    reads_lists: bool = True,
) -> dict[str, str]:
    """The container's environment for a launch and what the user asks for besides.

    For vLLM its options among the latter are taken into the launch first, so that what depends on them fits. Our own
    server decides by itself what they leave open, so there they are handed on as they are. An image of AWS's that does
    not read lists gets the first of the target's names.
    """
    for name in given:
        if name in REFUSED:
            raise ConfigError(f"--env {name} cannot be given", hint=REFUSED[name])
    if engine == "native":
        flags = _native_flags(launch) if is_uploaded else {"--model": (launch.target,)} | _native_flags(launch)
        found = {_variable(flag): _value(values) for flag, values in flags.items()}
        for name in given:
            if name in found or name == f"{PREFIX}SPECULATIVE_CONFIG":
                raise ConfigError(
                    f"--env {name}: the options decide that",
                    hint="use --target, --drafter, --num-draft-tokens, --max-length",
                )
        return found | dict(given)
    options = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    plain = {name: value for name, value in given.items() if name not in options}
    if not reads_lists:
        _check_no_lists(options)
        launch = replace(launch, names=launch.names[:1])
    made = command(with_flags(launch, _words(options)), vllm)
    flags = read_flags(list(made.words[3:]))
    for name in options:
        if _is_off(options[name]):
            flags.pop(_flag(name), None)
    if not is_uploaded:
        flags = {"--model": (launch.target,)} | flags
    return dict(made.environment) | {_variable(flag): _value(values) for flag, values in flags.items()} | plain


def _check_no_lists(options: Mapping[str, str]) -> None:
    for name, value in options.items():
        if _flag(name) not in SINGLE_WORDS and len(_list(value) or ()) > 1:
            raise ConfigError(
                f"--env {name} is a list, of which this image makes one word",
                hint=f"use --vllm-tag {FIRST_WITH_LISTS} or a later one",
            )


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


def _flag(variable: str) -> str:
    return "--" + variable.removeprefix(PREFIX).lower().replace("_", "-")


def _is_off(value: str) -> bool:
    return value.strip().lower() == "false"


def _words(variables: Mapping[str, str]) -> list[str]:
    """The flags that variables stand for."""
    words: list[str] = []
    for name, value in sorted(variables.items()):
        flag = _flag(name)
        if _is_off(value):
            # Left out, an option that vLLM has on by itself would stay on. One with a value cannot be off: told later.
            opposite = flag.replace("--", "--no-", 1)
            has_value = flag in FOLDED or flag == "--speculative-config"
            words += [opposite] if opposite in SWITCHES else [flag] if has_value else []
            continue
        words.append(flag)
        if value.strip().lower() in ("true", ""):
            continue
        elements = None if flag in SINGLE_WORDS else _list(value)
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
