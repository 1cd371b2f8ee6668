"""Options of the commands that have to do with vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

import tyro

from peagle.errors import ConfigError


@dataclass(frozen=True)
class VllmArguments:
    """Which vLLM, and how long it may take to start."""

    vllm_python: str | None = None
    """python of the environment that has vLLM; by default PEAGLE_VLLM_PYTHON, else the one that runs peagle"""
    start_seconds: float = 1800.0
    """time that vLLM may take until it is healthy"""

    def __post_init__(self) -> None:
        if not self.start_seconds > 0:
            raise ConfigError(f"start_seconds must be above 0, got {self.start_seconds}")


@dataclass(frozen=True)
class ParallelArguments:
    """How vLLM spreads the target over GPUs and nodes."""

    tensor_parallel_size: int = 1
    """GPUs that share each layer"""
    pipeline_parallel_size: int = 1
    """stages of layers, each on its own GPUs; not with a P-EAGLE drafter"""
    data_parallel_size: int = 1
    """copies of the target that share the requests"""
    num_nodes: int = 1
    """machines of a Ray cluster that is up already; more than 1 makes vLLM use it"""


VllmOptions = Annotated[VllmArguments, tyro.conf.OmitArgPrefixes]
ParallelOptions = Annotated[ParallelArguments, tyro.conf.OmitArgPrefixes]


def given_options(options: Any) -> Iterator[str]:
    """Names of the options that are not at their defaults."""
    default = type(options)()
    for field in fields(options):
        if getattr(options, field.name) != getattr(default, field.name):
            yield "--" + field.name.replace("_", "-")


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those for vLLM, which follow after a word `--`.

    >>> split_words(["target", "--port", "0", "--", "--kv-cache-dtype", "fp8"])
    (['target', '--port', '0'], ['--kv-cache-dtype', 'fp8'])
    """
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
