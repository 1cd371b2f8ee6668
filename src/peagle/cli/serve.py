"""Serve the target behind an endpoint that clients of OpenAI and of SageMaker know.

It listens while the target is loaded and answers 503 until it is ready. SIGTERM (or Ctrl-C) lets accepted requests
finish; a second one ends at once. In a SageMaker container, settings are also taken from SM_VLLM_* and /opt/ml.
With --engine vllm the same endpoint stands before vLLM, for several GPUs and nodes; vLLM's own options follow after --.
"""

import importlib
import logging
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from peagle.cli.arguments import DrafterArguments, DrafterOptions, TargetArguments, TargetOptions, parse
from peagle.cli.vllm_arguments import (
    ParallelArguments,
    ParallelOptions,
    VllmArguments,
    VllmOptions,
    given_options,
    split_words,
)
from peagle.engine.config import EngineConfig
from peagle.errors import ConfigError, MissingExtraError
from peagle.server.sagemaker import Conventions, read_conventions
from peagle.server.settings import ServerSettings

if TYPE_CHECKING:
    import socket

    from peagle.engine.llm import LLM
    from peagle.server.auth import ApiKeys

log = logging.getLogger(__name__)

T = TypeVar("T", ServerSettings, EngineConfig)

DEFAULT_ENGINE = EngineConfig(max_waiting=256, capture_adjusted=True)
"""An engine's own default lets any number of requests wait; clients of a server would rather be told. Nor should the
first one that asks for a penalty or a schema wait for the steps that need it to be recorded."""


@dataclass(frozen=True)
class Arguments:
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """the target to serve; the same as --target"""
    engine_name: Annotated[Literal["native", "vllm"], tyro.conf.arg(name="engine")] = "native"
    """native: our own, for one GPU or a CPU; vllm: vLLM, for as many GPUs and nodes as you have"""
    num_draft_tokens: int | None = None
    """draft tokens a step; 0 decodes plainly, without it what the drafter's makers or a measurement advise"""
    server: Annotated[ServerSettings, tyro.conf.OmitArgPrefixes] = field(default_factory=ServerSettings)
    engine: Annotated[EngineConfig, tyro.conf.OmitArgPrefixes] = DEFAULT_ENGINE
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)
    vllm: VllmOptions = field(default_factory=VllmArguments)
    parallel: ParallelOptions = field(default_factory=ParallelArguments)


def main(argv: list[str]) -> int:
    argv, words = split_words(argv)
    arguments = parse(Arguments, "serve", argv)
    if arguments.name is not None and arguments.target.target is not None:
        raise ConfigError(
            f"two targets are given: {arguments.name} and, with --target, {arguments.target.target}",
            hint="give one of them",
        )
    is_vllm = arguments.engine_name == "vllm"
    foreign = [*given_options(arguments.vllm), *given_options(arguments.parallel), *words[:1]]
    if foreign and not is_vllm:
        raise ConfigError(f"{foreign[0]} is for vLLM, but this is the native engine", hint="add --engine vllm")
    conventions = read_conventions(os.environ, for_vllm=is_vllm)
    arguments = with_conventions(arguments, conventions)
    try:
        from peagle.server.auth import read_keys

        importlib.import_module(f"peagle.server.{'proxy' if is_vllm else 'app'}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("peagle"):
            raise
        raise MissingExtraError(error.name, "serve", "the server") from error
    more = [*conventions.api_keys, os.environ.get("VLLM_API_KEY", "") if is_vllm else ""]
    keys = read_keys(arguments.server.api_key_file, os.environ, more)
    if not is_vllm:
        return serve_native(arguments, keys)

    from peagle.cli.serve_vllm import serve_vllm

    return serve_vllm(arguments, keys, [*conventions.unmatched_words, *words])


def serve_native(arguments: Arguments, keys: "ApiKeys") -> int:
    from peagle.server.app import create_app
    from peagle.server.lifecycle import Lifecycle, serve
    from peagle.server.service import Service

    settings = arguments.server
    if arguments.num_draft_tokens != 0:
        arguments.drafter.check(arguments.target)
    listener = listen(settings, keys)
    lifecycle: Lifecycle[Service] = Lifecycle(
        settings, lambda: load(arguments), lambda llm: Service(llm, settings, drafter_name(arguments))
    )
    return serve(create_app(settings, keys, lifecycle), lifecycle, listener)


def listen(settings: ServerSettings, keys: "ApiKeys") -> "socket.socket":
    """Take the port, and say where and for whom."""
    from peagle.server.lifecycle import bind

    listener = bind(settings)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("listening on http://%s:%d%s", shown, port, ", with API keys" if keys else "")
    if not keys and host not in ("127.0.0.1", "::1"):
        log.info("anybody who reaches this address may use it: there are no API keys (--api-key-file)")
    return listener


def with_conventions(arguments: Arguments, conventions: Conventions) -> Arguments:
    """The command line's word where it says something, else the environment's, else the defaults."""
    target, drafter = arguments.target, arguments.drafter
    name = arguments.name or target.target or conventions.target
    if conventions.is_container and name is None:
        log.warning("no SM_VLLM_MODEL, no /opt/ml/model and no HF_MODEL_ID: serving the embedded default")
    dtype: Any = target.dtype if target.dtype != "auto" else conventions.dtype or "auto"
    engine = _overlaid(arguments.engine, DEFAULT_ENGINE, conventions.engine)
    server = _overlaid(arguments.server, ServerSettings(), conventions.server)
    if server.log_format == "auto":
        server = replace(server, log_format="text" if sys.stderr.isatty() else "json")
    given = arguments.num_draft_tokens
    return replace(
        arguments,
        name=None,
        num_draft_tokens=conventions.num_draft_tokens if given is None else given,
        server=server,
        engine=engine,
        target=replace(target, target=name, dtype=dtype),
        drafter=replace(drafter, drafter=drafter.drafter or (conventions.drafter if given != 0 else None)),
    )


def _overlaid(given: T, default: T, environment: dict[str, Any]) -> T:
    """Settings of the environment in every field that still has its default."""
    untouched = {name for name in environment if getattr(given, name) == getattr(default, name)}
    return replace(given, **{name: environment[name] for name in untouched})


def load(arguments: Arguments) -> "LLM":
    from peagle.engine.llm import LLM

    drafter: Any = arguments.drafter.drafter or "auto"
    return LLM(
        arguments.target.load(),
        drafter,
        arguments.num_draft_tokens,
        allow_mismatch=arguments.drafter.allow_mismatch,
        progress=lambda what, done, total: log.debug("starting the engine: %s (%d of %d)", what, done, total),
        **asdict(arguments.engine),
    )


def drafter_name(arguments: Arguments) -> str | None:
    return Path(arguments.drafter.drafter).name if arguments.drafter.drafter else None
