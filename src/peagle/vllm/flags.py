"""vLLM's own options, merged into VllmSettings. Those we check become a field, the others are passed on."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from peagle.errors import ConfigError
from peagle.vllm.command import IS_FLAG, DrafterFacts, VllmSettings
from peagle.vllm.speculation import Speculation, read_speculation

REFUSED_FLAGS = {
    "--model": "use peagle's own TARGET",
    "--served-model-name": "use peagle's --served-model-name",
    "--host": "vLLM listens on a private socket; use peagle's --host",
    "--port": "vLLM listens on a private socket; use peagle's --port",
    "--uds": "vLLM listens on a private socket of peagle",
    "--api-key": "use peagle's --api-key-file or PEAGLE_API_KEYS: every user of the machine can read command lines",
    "--hf-token": "set HF_TOKEN in the environment: every user of the machine can read command lines",
    "--root-path": "peagle forwards to vLLM's usual routes",
    "--config": "options in a file are not checked; pass them here",
    "--headless": "start headless ranks with vLLM itself",
    "--grpc": "peagle forwards HTTP",
    "--ssl-keyfile": "vLLM listens on a private socket; terminate TLS in front of peagle",
    "--ssl-certfile": "vLLM listens on a private socket; terminate TLS in front of peagle",
}
REFUSED_SPECULATION = {
    "speculative_token_tree": "P-EAGLE drafts one chain of tokens, and vLLM no longer has trees",
    "num_speculative_tokens_per_batch_size": "with parallel drafting vLLM drafts wrongly with fewer tokens than "
    "the largest number",
    "disable_padded_drafter_batch": "parallel drafting needs the padded batch",
}
SPECULATION = "--speculative-config"
ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
}


def whole(text: str, flag: str) -> int:
    """
    >>> whole("8k", "--max-model-len"), whole("8K", "--max-model-len")
    (8000, 8192)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM]?)", text.strip())
    if match is None:
        raise ConfigError(f"{flag} must be a whole number, got {text!r}")
    return int(float(match[1]) * {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}[match[2]])


def fraction(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} must be a number, got {text!r}") from None


FOLDED: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "--tensor-parallel-size": ("tensor_parallel_size", whole),
    "--pipeline-parallel-size": ("pipeline_parallel_size", whole),
    "--data-parallel-size": ("data_parallel_size", whole),
    "--max-num-seqs": ("max_batch", whole),
    "--max-model-len": ("max_length", whole),
    "--max-num-batched-tokens": ("token_budget", whole),
    "--gpu-memory-utilization": ("memory_share", fraction),
    "--dtype": ("dtype", lambda text, flag: text),
}
"""Flags of vLLM that are fields of VllmSettings."""
SWITCHES = {
    "--enforce-eager": ("is_eager", True),
    "--no-enforce-eager": ("is_eager", False),
    "--enable-prefix-caching": ("reuse_prefixes", True),
    "--no-enable-prefix-caching": ("reuse_prefixes", False),
}


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at `--`: our options, and vLLM's.

    >>> split_words(["target", "--port", "0", "--", "--kv-cache-dtype", "fp8"])
    (['target', '--port', '0'], ['--kv-cache-dtype', 'fp8'])
    """
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def with_flags(settings: VllmSettings, words: list[str]) -> VllmSettings:
    """`settings` with vLLM's own options merged in."""
    default = VllmSettings(settings.target, settings.names)
    extra, speculation, changes = dict(settings.extra), dict(settings.speculation), dict[str, Any]()
    for flag, values in read_flags(words).items():
        if flag in REFUSED_FLAGS:
            raise ConfigError(f"{flag} cannot be passed to vLLM here", hint=REFUSED_FLAGS[flag])
        if flag == SPECULATION:
            asked = speculation_in(words)
            speculation |= asked.rest
            changes["num_draft_tokens"] = asked.draft_tokens(settings.num_draft_tokens)
            if asked.parallel is not None:
                speculation["parallel_drafting"] = asked.parallel
        elif flag.startswith("--speculative-config."):
            raise ConfigError(f"{flag} is not supported", hint="pass --speculative-config as one JSON object")
        elif flag in SWITCHES:
            name, value = SWITCHES[flag]
            changes[name] = value
        elif flag in FOLDED:
            name, read = FOLDED[flag]
            value, ours = read(one_value(flag, values), flag), getattr(settings, name)
            if ours != getattr(default, name) and ours != value:
                raise ConfigError(
                    f"{flag} is {value}, but {name} is {ours}", hint="they are the same setting; pass one of them"
                )
            changes[name] = value
        else:
            extra[flag] = values
    drafter = _of_kind(settings.drafter, speculation.get("parallel_drafting"))
    return replace(settings, **changes, drafter=drafter, extra=extra, speculation=speculation)


def _of_kind(drafter: DrafterFacts | None, parallel: bool | None) -> DrafterFacts | None:
    """The drafter, P-EAGLE or EAGLE-3 as the speculative config says."""
    if drafter is None or parallel is None:
        return drafter
    if parallel and drafter.parallel is False:
        raise ConfigError(
            "--speculative-config: parallel_drafting is true, but the drafter is EAGLE-3",
            hint="it has no mask token; omit the key",
        )
    return replace(drafter, parallel=parallel)


def read_flags(words: list[str]) -> dict[str, tuple[str, ...]]:
    """vLLM's options by long name. As in vLLM, the last of repeated flags wins.

    >>> read_flags(["--max_num_seqs=8", "-tp", "2", "--enforce-eager"])
    {'--max-num-seqs': ('8',), '--tensor-parallel-size': ('2',), '--enforce-eager': ()}
    """
    flags: dict[str, tuple[str, ...]] = {}
    flag = None
    for word in words:
        if IS_FLAG(word):
            name, equals, value = word.partition("=")
            dashed, dot, key = ALIASES.get(name, name).partition(".")
            flag = dashed.replace("_", "-") + dot + key
            flags[flag] = (value,) if equals else ()
        elif flag is None:
            raise ConfigError(f"{word!r} is not an option of vLLM", hint="pass --OPTION VALUE ... after --")
        else:
            flags[flag] += (word,)
    return flags


def speculation_in(words: list[str]) -> Speculation:
    """The speculative config among vLLM's options; an empty one if there is none."""
    values = read_flags(words).get(SPECULATION)
    found = Speculation() if values is None else read_speculation(one_value(SPECULATION, values), SPECULATION)
    for key, why in REFUSED_SPECULATION.items():
        if key in found.rest and found.rest[key] is not False:
            raise ConfigError(f"{SPECULATION}: {key} cannot be set here", hint=why)
    return replace(found, rest={key: value for key, value in found.rest.items() if key not in REFUSED_SPECULATION})


def drafter_in(words: list[str], given: str | None) -> str | None:
    """The drafter: `given`, or that of the speculative config among vLLM's options."""
    named = speculation_in(words).drafter
    if None not in (named, given) and named != given:
        raise ConfigError(f"{SPECULATION} names the drafter {named}, but --drafter is {given}", hint="name one drafter")
    return given or named


def one_value(flag: str, values: tuple[str, ...]) -> str:
    if len(values) != 1:
        raise ConfigError(f"{flag} takes one value, got {len(values)}")
    return values[0]
