"""Write the command that serves a target and its drafter with vLLM, a Docker Compose file and a Kubernetes manifest.

Without --output one of them is printed. The drafter is put into vLLM's form where it is not. To have vLLM run by
peagle itself, with its API keys, limits and metrics in front, see `peagle serve --engine vllm`.
"""

import logging
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from peagle.cli.arguments import DrafterArguments, DrafterOptions, parse
from peagle.cli.vllm_arguments import ParallelArguments, ParallelOptions, split_words
from peagle.deploy.vllm import TESTED, Command, Installed, Launch, check_combination, command
from peagle.deploy.vllm_flags import with_flags
from peagle.deploy.vllm_form import in_vllm_form
from peagle.deploy.vllm_manifests import Placing, as_yaml, compose, in_container, kubernetes, served_words
from peagle.deploy.vllm_models import Models, find_models
from peagle.errors import ConfigError

log = logging.getLogger(__name__)

What = Literal["command", "compose", "kubernetes"]
FILES: dict[What, str] = {"command": "serve.sh", "compose": "compose.yaml", "kubernetes": "kubernetes.yaml"}
NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True)
class Arguments:
    target: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """directory, GGUF file, catalog name or Hugging Face id; by default the embedded SmolLM2-135M-Instruct"""
    output: Path | None = None
    """directory to write all three files into; those of an earlier run are replaced"""
    show: What = "command"
    """without --output: which one to print"""
    num_draft_tokens: int | None = None
    """draft tokens a step; 0 decodes plainly, without it what the drafter's makers advise"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """precision; auto: the target's own"""
    max_batch: int | None = None
    """requests that run at the same time; by default 256"""
    max_length: int | None = None
    """most tokens of one text, prompt and answer; by default the target's limit"""
    prefill_tokens: int | None = None
    """most prompt tokens run in one step; by default 8192. Room for drafts is added"""
    served_model_name: tuple[str, ...] = ()
    """names that requests may use for the target; by default its own"""
    vllm_version: str = TESTED
    """release of vLLM that the files are for"""
    image: str | None = None
    """container image; by default vLLM's own of that release. With several nodes it must have Ray"""
    name: str = "peagle"
    """of the deployment: names in both files begin with it"""
    port: int = 8000
    """port that vLLM listens on"""
    drafter: DrafterOptions = field(default_factory=DrafterArguments)
    parallel: ParallelOptions = field(default_factory=ParallelArguments)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"name must be lower-case letters, digits and dashes, at most 42, got {self.name!r}",
                hint="Kubernetes makes names of services of it",
            )
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port must be between 1 and 65535, got {self.port}")


def main(argv: list[str]) -> int:
    argv, words = split_words(argv)
    arguments = parse(Arguments, "deploy vllm", argv)
    vllm = Installed(arguments.vllm_version.removeprefix("v"))
    models = find_models(
        arguments.target,
        arguments.drafter.drafter,
        wants_drafter=arguments.num_draft_tokens != 0,
        max_length=arguments.max_length,
        here=False,
    )
    check_combination(launch_of(arguments, models, words), vllm, {})
    if models.drafter is not None and Path(models.drafter.model).is_dir():
        allow = arguments.drafter.allow_mismatch
        models = in_vllm_form(models, vllm, target=arguments.target, allow_mismatch=allow)
    launch = launch_of(arguments, models, words)
    texts = render(launch, vllm, arguments)
    if arguments.output is None:
        print(texts[arguments.show], end="")
        return 0
    write(texts, arguments.output)
    return 0


def launch_of(arguments: Arguments, models: Models, words: list[str]) -> Launch:
    launch = Launch(
        target=models.target,
        names=arguments.served_model_name or (models.name,),
        drafter=models.drafter,
        num_draft_tokens=arguments.num_draft_tokens,
        dtype=arguments.dtype,
        max_batch=arguments.max_batch,
        max_length=arguments.max_length,
        prefill_tokens=arguments.prefill_tokens,
        target_max_length=models.max_length,
        is_hybrid=models.is_hybrid,
        **asdict(arguments.parallel),
    )
    return with_flags(launch, words)


def render(launch: Launch, vllm: Installed, arguments: Arguments) -> dict[What, str]:
    """The texts of the three files."""
    placing = Placing(arguments.name, arguments.image or f"vllm/vllm-openai:v{vllm.version}", arguments.port)
    here = command(launch, vllm, {})
    inside, directories = in_container(launch)
    placing = replace(placing, directories=directories)
    there = command(inside, vllm, {})
    return {
        "command": shell_text(here, placing, launch),
        "compose": as_yaml([compose(inside, there, placing)], compose_comment(inside)),
        "kubernetes": as_yaml(kubernetes(inside, there, placing), kubernetes_comment(placing, inside)),
    }


def shell_text(made: Command, placing: Placing, launch: Launch) -> str:
    words = tuple(served_words(made, placing))
    lines = [
        "#!/usr/bin/env bash",
        "# An API key for clients: set VLLM_API_KEY. A token for gated models: set HF_TOKEN.",
    ]
    if launch.num_nodes > 1:
        lines.append(f"# Run it on the head of a Ray cluster of {launch.num_nodes} nodes; `ray status` shows them.")
    return "\n".join([*lines, replace(made, words=words).text()]) + "\n"


def compose_comment(launch: Launch) -> str:
    lines = ["Secrets come from the environment: VLLM_API_KEY (key for clients), HF_TOKEN (for gated models)."]
    if launch.num_nodes == 1:
        return "\n".join(["docker compose up", *lines])
    return "\n".join(
        [
            "On the first machine:  docker compose --profile head up",
            f"On the other {launch.num_nodes - 1}:  HEAD_ADDRESS=<its IP address> docker compose --profile worker up",
            *lines,
        ]
    )


def kubernetes_comment(placing: Placing, launch: Launch) -> str:
    lines = [
        "kubectl apply -f kubernetes.yaml",
        "Secrets, where needed: kubectl create secret generic "
        f'{placing.secret} --from-literal=api-key="$(cat FILE)" --from-literal=hf-token="$(cat FILE)"',
    ]
    if placing.directories:
        lines.append(f"The claim {placing.name}-models must exist, readable by every node, with these directories:")
        lines += [f"  {Path(inside).name}/  a copy of {path}" for inside, path in placing.directories.items()]
    if launch.num_nodes > 1:
        lines.append(f"It needs {launch.num_nodes} nodes with {launch.gpus_per_node} GPUs each, and Ray in the image.")
    return "\n".join(lines)


def write(texts: dict[What, str], output: Path) -> None:
    output = output.expanduser()
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, not a directory", hint="give a directory")
    output.mkdir(parents=True, exist_ok=True)
    for what, text in texts.items():
        path = output / FILES[what]
        scratch = path.with_name(f".{path.name}.writing")
        scratch.write_text(text, encoding="utf-8")
        if what == "command":
            scratch.chmod(0o755)
        os.replace(scratch, path)
        print(path)
