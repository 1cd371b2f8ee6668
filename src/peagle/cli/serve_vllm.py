"""`peagle serve --engine vllm`: what was asked for in our words, in vLLM's; the process, and the server before it."""

import logging
import os
import shlex
import threading
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from peagle.cli.serve import DEFAULT_ENGINE, listen
from peagle.deploy.vllm import Command, Installed, Launch, check_combination, command
from peagle.deploy.vllm_flags import with_flags
from peagle.deploy.vllm_form import in_vllm_form
from peagle.deploy.vllm_models import Models, find_models
from peagle.deploy.vllm_process import Interpreter, VllmProcess, find_vllm
from peagle.errors import ConfigError
from peagle.server.lifecycle import Lifecycle, serve
from peagle.server.proxy import ProxyService, create_proxy_app
from peagle.server.proxy_bodies import Served

if TYPE_CHECKING:
    from peagle.cli.serve import Arguments
    from peagle.server.auth import ApiKeys

log = logging.getLogger(__name__)

WITHOUT_COUNTERPART = {
    "max_held": "vLLM plans prefills by itself",
    "verify_rows": "vLLM verifies every draft",
    "capture_adjusted": "vLLM has no such choice",
    "pack": "it is for the native engine on a CPU",
    "quantize": "give vLLM a quantized target, or its own option: -- --quantization ...",
}


def serve_vllm(arguments: "Arguments", keys: "ApiKeys", words: list[str]) -> int:
    """Serve until a signal ends it; `words` are vLLM's own options."""
    interpreter = find_vllm(arguments.vllm.vllm_python, os.environ)
    check_settings(arguments, interpreter.vllm)
    listener = listen(arguments.server, keys)
    starter = Starter(arguments, interpreter, words)
    lifecycle: Lifecycle[ProxyService] = Lifecycle(
        arguments.server,
        starter.start,
        lambda started: ProxyService(*started, arguments.server),
        starter.cancel,
    )
    return serve(create_proxy_app(arguments.server, keys, lifecycle), lifecycle, listener)


class Starter:
    """Finds the models, writes the drafter where vLLM needs it in another form, and starts vLLM."""

    def __init__(self, arguments: "Arguments", interpreter: Interpreter, words: list[str]) -> None:
        self._arguments, self._interpreter, self._words = arguments, interpreter, words
        self._process: VllmProcess | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False

    def start(self) -> tuple[VllmProcess, Served]:
        """Return when vLLM is healthy; what goes wrong before is raised, and leaves no process."""
        arguments, vllm = self._arguments, self._interpreter.vllm
        models = find_models(
            arguments.target.target,
            arguments.drafter.drafter,
            wants_drafter=arguments.num_draft_tokens != 0,
            max_length=arguments.engine.max_length,
        )
        check_combination(launch_of(arguments, models, self._words), vllm, os.environ)
        models = in_vllm_form(
            models, vllm, target=arguments.target.target, allow_mismatch=arguments.drafter.allow_mismatch
        )
        launch = launch_of(arguments, models, self._words)
        made = command(launch, vllm, os.environ)
        log.info("starting vLLM %s: %s", vllm.version, shlex.join(made.words))
        process = VllmProcess(self._interpreter, made, os.environ)
        with self._lock:
            self._process = process
            if self._is_cancelled:
                process.end()
        try:
            process.start()
            process.wait_healthy(arguments.vllm.start_seconds)
        except BaseException:
            process.end()
            raise
        return process, served_by(arguments, models, launch, made, vllm)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            process = self._process
        if process is not None:
            process.end()


def check_settings(arguments: "Arguments", vllm: Installed) -> None:
    """Refuse the settings of our own engine that vLLM has nothing like."""
    engine = arguments.engine
    for name, why in WITHOUT_COUNTERPART.items():
        if getattr(engine, name) != getattr(DEFAULT_ENGINE, name):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --engine vllm", hint=why)
    if (engine.compile is False) != (engine.capture is False):
        raise ConfigError(
            "--compile and --capture can only be switched off together with --engine vllm",
            hint="give --compile False --capture False, which is vLLM's --enforce-eager",
        )
    device = arguments.target.device
    if device not in ("auto", "cpu" if vllm.is_cpu else "cuda"):
        kind = "CPUs" if vllm.is_cpu else "GPUs"
        raise ConfigError(
            f"--device is {device}, but this vLLM is built for {kind} and takes all that it sees",
            hint="leave --device out; CUDA_VISIBLE_DEVICES chooses among GPUs",
        )


def launch_of(arguments: "Arguments", models: Models, words: list[str]) -> Launch:
    engine = arguments.engine

    def changed(name: str) -> Any:
        value = getattr(engine, name)
        return None if value == getattr(DEFAULT_ENGINE, name) else value

    launch = Launch(
        target=models.target,
        names=arguments.server.served_model_name or (models.name,),
        drafter=models.drafter,
        num_draft_tokens=arguments.num_draft_tokens,
        dtype=arguments.target.dtype,
        max_batch=engine.max_batch,
        max_length=engine.max_length,
        prefill_tokens=changed("prefill_tokens"),
        page_size=changed("page_size"),
        num_pages=engine.num_pages,
        memory_share=changed("memory_share"),
        reuse_prefixes=engine.reuse_prefixes,
        is_eager=engine.compile is False,
        target_max_length=models.max_length,
        is_hybrid=models.is_hybrid,
        **asdict(arguments.parallel),
    )
    return with_flags(launch, words)


def served_by(arguments: "Arguments", models: Models, launch: Launch, made: Command, vllm: Installed) -> Served:
    drafter = launch.drafter if made.num_draft_tokens else None
    served = Served(
        names=launch.names,
        target=models.name,
        engine=f"vLLM {vllm.version}",
        max_batch=made.max_batch * launch.data_parallel_size,
        max_waiting=arguments.engine.max_waiting,
    )
    if drafter is None:
        return served
    return replace(
        served,
        num_draft_tokens=made.num_draft_tokens,
        method=drafter.method,
        drafter_name=models.drafter_name,
        acceptance=models.acceptance,
    )
