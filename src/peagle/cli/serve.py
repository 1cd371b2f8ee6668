"""Serve a target over HTTP for OpenAI and SageMaker clients.

The server listens at once and answers 503 until the target is loaded. SIGTERM or Ctrl-C lets accepted requests finish;
a second one stops it immediately. In a SageMaker container it also reads SM_VLLM_* variables and /opt/ml.
With --engine vllm the same endpoint runs in front of vLLM, on several GPUs and nodes; vLLM's own options go after --.
"""

import importlib
import logging
import os
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from peagle.console.arguments import ServedModelArguments, parse, with_positional
from peagle.console.progress import working
from peagle.engine.recorder import Recorder, RecordOptions
from peagle.errors import ConfigError, MissingExtraError
from peagle.sagemaker.conventions import SPECULATION, Conventions, read_conventions
from peagle.scheduling.config import EngineOptions
from peagle.server.settings import ServerOptions, ServerSettings
from peagle.tuning.settings import with_settings
from peagle.vllm.command import Installed, Parallelism, VllmSettings
from peagle.vllm.flags import drafter_in, split_words, with_flags
from peagle.vllm.speculation import Speculation

if TYPE_CHECKING:
    import socket

    from peagle.engine.llm import LLM
    from peagle.server.auth import ApiKeys
    from peagle.vllm.models import Models
    from peagle.vllm.proxy_bodies import Served

log = logging.getLogger(__name__)

T = TypeVar("T", ServerSettings, EngineOptions)

DEFAULT_ENGINE = EngineOptions(max_waiting=256)
"""A server limits its queue, so that clients hear of an overload; the engine's own default has no limit."""


@dataclass(frozen=True)
class VllmOptions(Parallelism):
    """With --engine vllm."""

    vllm_python: str | None = None
    """python of the environment that has vLLM; default: PEAGLE_VLLM_PYTHON, else the one that runs peagle"""


@dataclass(frozen=True)
class Arguments(ServedModelArguments):
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """the target to serve; same as --target"""
    num_draft_tokens: int | None = None
    """draft tokens per step; 0 turns speculation off. Default: our engine verifies the drafts that pay; vLLM gets what
    the drafter's makers or a measurement recommend"""
    engine_name: Annotated[Literal["native", "vllm"], tyro.conf.arg(name="engine")] = "native"
    """native: our own, for one GPU or a CPU; vllm: vLLM, for several GPUs and nodes"""
    settings_file: Annotated[Path | None, tyro.conf.arg(name="settings")] = None
    """settings of `peagle tune`; options on the command line take precedence"""
    server: ServerOptions = field(default_factory=ServerOptions)
    engine: EngineOptions = DEFAULT_ENGINE
    recording: RecordOptions = field(default_factory=RecordOptions)
    swap_from: Path | None = None
    """directory of drafters that may take the place of the served one while the server runs (`peagle adapt --swap`,
    POST /v1/drafter); default: none"""
    vllm: VllmOptions = field(default_factory=VllmOptions)

    @property
    def settings(self) -> ServerSettings:
        return self.server if isinstance(self.server, ServerSettings) else ServerSettings(**vars(self.server))


def main(argv: list[str]) -> int:
    argv, words = split_words(with_settings(argv, "serve"))
    arguments = parse(Arguments, "serve", argv)
    is_vllm = arguments.engine_name == "vllm"
    changed = [each.name for each in fields(VllmOptions) if getattr(arguments.vllm, each.name) != each.default]
    only_vllm = [*(f"--{name.replace('_', '-')}" for name in changed), *words[:1]]
    if only_vllm and not is_vllm:
        raise ConfigError(f"{only_vllm[0]} is for vLLM, but this is the native engine", hint="add --engine vllm")
    conventions = read_conventions(os.environ, for_vllm=is_vllm)
    arguments = with_conventions(arguments, conventions)
    try:
        from peagle.server.auth import read_keys

        importlib.import_module("peagle.vllm.proxy" if is_vllm else "peagle.server.app")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("peagle"):
            raise
        raise MissingExtraError(error.name, "serve", "the server") from error
    more = [*conventions.api_keys, os.environ.get("VLLM_API_KEY", "") if is_vllm else ""]
    keys = read_keys(arguments.settings.api_key_file, os.environ, more)
    if is_vllm:
        return serve_vllm(arguments, keys, [*conventions.unmatched_words, *words])
    return serve_native(arguments, keys, conventions.speculation)


def with_conventions(arguments: Arguments, conventions: Conventions) -> Arguments:
    """Fill in from a container's environment what the command line leaves open."""
    target, drafter = with_positional(arguments.target, "target", arguments.name), arguments.drafter
    name = target.target or conventions.target
    if conventions.is_container and name is None:
        log.warning("no SM_VLLM_MODEL, no /opt/ml/model and no HF_MODEL_ID: serving the embedded default")
    dtype: Any = target.dtype if target.dtype != "auto" else conventions.dtype or "auto"
    server = _overlaid(arguments.settings, ServerSettings(), conventions.server)
    if server.log_format == "auto":
        server = replace(server, log_format="text" if sys.stderr.isatty() else "json")
    given = arguments.num_draft_tokens
    return replace(
        arguments,
        num_draft_tokens=conventions.num_draft_tokens if given is None else given,
        server=server,
        engine=_overlaid(arguments.engine, DEFAULT_ENGINE, conventions.engine),
        target=replace(target, target=name, dtype=dtype),
        drafter=replace(drafter, drafter=drafter.drafter or (conventions.drafter if given != 0 else None)),
    )


def _overlaid(given: T, default: T, environment: dict[str, Any]) -> T:
    """`given`, with the environment's value in each field that still has its default."""
    untouched = {name for name in environment if getattr(given, name) == getattr(default, name)}
    return replace(given, **{name: environment[name] for name in untouched})


def listen(settings: ServerSettings, keys: "ApiKeys") -> "socket.socket":
    """Bind the port and log the address."""
    from peagle.server.lifecycle import bind

    listener = bind(settings)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("listening on http://%s:%d%s", shown, port, ", with API keys" if keys else "")
    if not keys and host not in ("127.0.0.1", "::1"):
        log.info("no API keys: anyone who can reach this address can use it (set --api-key-file)")
    return listener


# Our own engine ---------------------------------------------------------------------------------------------------


def serve_native(arguments: Arguments, keys: "ApiKeys", asked: Speculation) -> int:
    from peagle.adaptation.swap_route import swap_route
    from peagle.responses.route import RESPONSES_ROUTE
    from peagle.sagemaker.serving import SAGEMAKER_ROUTES
    from peagle.server.app import create_app
    from peagle.server.lifecycle import Lifecycle, serve
    from peagle.server.service import Service
    from peagle.vllm.models import known_drafter

    settings, drafter = arguments.settings, arguments.drafter.drafter
    find = arguments.drafter.target_for if arguments.num_draft_tokens == 0 else arguments.drafter.pair
    arguments = replace(arguments, target=find(arguments.target))
    if arguments.num_draft_tokens != 0 and asked.parallel is not None:
        asked.check_kind(known_drafter(drafter, arguments.target.target, arguments.engine.max_length), SPECULATION)
    extra_routes = [*SAGEMAKER_ROUTES, RESPONSES_ROUTE]
    if arguments.swap_from is not None:
        extra_routes.append(swap_route(arguments.swap_from))
    listener = listen(settings, keys)
    recorder = recorder_of(arguments.recording)
    lifecycle: Lifecycle[Service] = Lifecycle(
        settings,
        lambda: load(arguments, asked, recorder),
        lambda llm: Service(llm, settings, Path(drafter).name if drafter else None),
    )
    return serve(create_app(settings, keys, lifecycle, extra_routes), lifecycle, listener)


def recorder_of(options: RecordOptions) -> Recorder | None:
    if options.record is None:
        return None
    what = "token ids of prompts and answers" if options.record_text else "ids and lengths, no text"
    recorder = Recorder(options.record, with_text=options.record_text, max_bytes=options.record_mb * 2**20)
    log.info("recording requests to %s: %s, at most %d MB", options.record, what, options.record_mb)
    return recorder


def load(arguments: Arguments, asked: Speculation, recorder: Recorder | None) -> "LLM":
    from peagle.engine.llm import LLM

    drafter: Any = arguments.drafter.drafter or "auto"
    target = arguments.target.load()
    with working("starting the engine"):
        llm = LLM(
            target,
            drafter,
            arguments.num_draft_tokens,
            allow_mismatch=arguments.drafter.allow_mismatch,
            progress=lambda what, done, total: log.debug("starting the engine: %s (%d of %d)", what, done, total),
            capture_adjusted=True,  # the first request with a penalty or a schema must not wait for compilers
            **asdict(arguments.engine),
        )
    asked.check_kind(None if llm.drafter is None else llm.drafter.config, SPECULATION)
    if recorder is not None:
        llm.engine.on_finished = recorder
    return llm


# vLLM -------------------------------------------------------------------------------------------------------------


def serve_vllm(arguments: Arguments, keys: "ApiKeys", words: list[str]) -> int:
    """Serve through vLLM; `words` are its own options."""
    from peagle.sagemaker.serving import SAGEMAKER_ROUTES
    from peagle.server.lifecycle import Lifecycle, serve
    from peagle.vllm.form import prepare
    from peagle.vllm.models import find_models
    from peagle.vllm.process import VllmProcess, find_vllm, start
    from peagle.vllm.proxy import ProxyService, create_proxy_app

    settings, drafter = arguments.settings, arguments.drafter
    interpreter = find_vllm(arguments.vllm.vllm_python, os.environ)
    check_settings(arguments, interpreter.vllm)
    listener = listen(settings, keys)
    process = VllmProcess(interpreter)

    def load_vllm() -> "Served":
        target, engine = arguments.target.target, arguments.engine
        wants_drafter = arguments.num_draft_tokens != 0
        source = drafter_in(words, drafter.drafter)
        models = find_models(target, source, wants_drafter=wants_drafter, max_length=engine.max_length)
        given = vllm_settings(arguments, models, words)
        prepared = prepare(models, given, interpreter.vllm, allow_mismatch=drafter.allow_mismatch)
        return start(process, models, prepared, engine.max_waiting)

    lifecycle: Lifecycle[ProxyService] = Lifecycle(
        settings, load_vllm, lambda served: ProxyService(process, served, settings), process.end
    )
    return serve(create_proxy_app(settings, keys, lifecycle, SAGEMAKER_ROUTES), lifecycle, listener)


def check_settings(arguments: Arguments, vllm: Installed) -> None:
    """Refuse options of our own engine that vLLM does not have."""
    if arguments.recording.record is not None:
        raise ConfigError("--record is for our own engine, but this is vLLM", hint="drop --record or --engine vllm")
    if arguments.swap_from is not None:
        raise ConfigError("--swap-from is for our own engine, but this is vLLM", hint="drop --swap-from")
    arguments.target.refuse_quantize("--engine vllm")
    device = arguments.target.device
    if device not in ("auto", "cpu" if vllm.is_cpu else "cuda"):
        kind = "CPUs" if vllm.is_cpu else "GPUs"
        raise ConfigError(
            f"--device is {device}, but this vLLM is built for {kind} and uses all it can see",
            hint="drop --device; CUDA_VISIBLE_DEVICES selects GPUs",
        )


def vllm_settings(arguments: Arguments, models: "Models", words: list[str]) -> VllmSettings:
    engine, usual = arguments.engine, DEFAULT_ENGINE
    settings = VllmSettings(
        target=models.target,
        names=arguments.server.served_model_name or (models.name,),
        drafter=models.drafter,
        num_draft_tokens=arguments.num_draft_tokens,
        dtype=arguments.target.dtype,
        max_batch=engine.max_batch,
        max_length=engine.max_length,
        prefill_tokens=None if engine.prefill_tokens == usual.prefill_tokens else engine.prefill_tokens,
        memory_share=None if engine.memory_share == usual.memory_share else engine.memory_share,
        reuse_prefixes=engine.reuse_prefixes,
        is_eager=engine.eager,
        target_max_length=models.max_length,
        is_hybrid=models.is_hybrid,
        num_heads=models.config.get("num_attention_heads"),
        **{each.name: getattr(arguments.vllm, each.name) for each in fields(Parallelism)},
    )
    return with_flags(settings, words)
