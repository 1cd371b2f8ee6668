"""Write what serves a target and its drafter with vLLM: a command, a Docker Compose file and a Kubernetes manifest.

Without --output it prints one of them. A drafter in another layout is converted to vLLM's first. vLLM's own options
go after --, as in `peagle deploy vllm gpt-oss-20b -- --max-num-seqs 64`. To have peagle run vLLM itself, with API
keys, limits and metrics in front, use `peagle serve --engine vllm`.
"""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from peagle.console.arguments import DrafterArguments, parse
from peagle.errors import ConfigError
from peagle.tuning.settings import with_settings
from peagle.vllm.command import TESTED, Installed, Parallelism, VllmSettings
from peagle.vllm.flags import drafter_in, split_words, with_flags
from peagle.vllm.form import prepare
from peagle.vllm.manifests import Deployment, render
from peagle.vllm.models import find_models

FILES = {"command": "serve.sh", "compose": "compose.yaml", "kubernetes": "kubernetes.yaml"}
NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True)
class Arguments:
    target: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """directory, GGUF file, catalog name or Hugging Face id; default: the embedded SmolLM2-135M-Instruct"""
    output: Path | None = None
    """directory for all three files; existing ones are replaced"""
    show: Literal["command", "compose", "kubernetes"] = "command"
    """which file to print if --output is not given"""
    num_draft_tokens: int | None = None
    """draft tokens per step; 0 turns speculation off. Default: what the drafter's makers recommend"""
    settings: Path | None = None
    """settings of `peagle tune`; options given here go before them"""
    max_length: int | None = None
    """maximum tokens of a sequence, prompt plus answer; default: the target's limit"""
    served_model_name: tuple[str, ...] = ()
    """model names that requests may use; default: the target's own"""
    vllm_version: str = TESTED
    """vLLM release to write for"""
    image: str | None = None
    """container image; default: vLLM's own for that release. Several nodes need one with Ray"""
    name: str = "peagle"
    """prefix of every name in the Compose file and the manifest"""
    port: int = 8000
    """port that vLLM listens on"""
    drafter: DrafterArguments = field(default_factory=DrafterArguments)
    parallel: Parallelism = field(default_factory=Parallelism)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"name must be at most 42 lower-case letters, digits and dashes, got {self.name!r}",
                hint="Kubernetes names its services with it",
            )
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port must be between 1 and 65535, got {self.port}")


def main(argv: list[str]) -> int:
    argv, words = split_words(with_settings(argv, "deploy vllm"))
    arguments = parse(Arguments, "deploy vllm", argv)
    vllm = Installed(arguments.vllm_version.removeprefix("v"))
    models = find_models(
        arguments.target,
        drafter_in(words, arguments.drafter.drafter),
        wants_drafter=arguments.num_draft_tokens != 0,
        max_length=arguments.max_length,
        here=False,
    )
    settings = VllmSettings(
        target=models.target,
        names=arguments.served_model_name or (models.name,),
        drafter=models.drafter,
        num_draft_tokens=arguments.num_draft_tokens,
        max_length=arguments.max_length,
        target_max_length=models.max_length,
        is_hybrid=models.is_hybrid,
        **asdict(arguments.parallel),
    )
    may_mismatch = arguments.drafter.allow_mismatch
    settings = with_flags(settings, words)
    settings = prepare(models, settings, vllm, allow_mismatch=may_mismatch, here=False)
    image = arguments.image or f"vllm/vllm-openai:v{vllm.version}"
    texts = render(settings, vllm, Deployment(arguments.name, image, arguments.port))
    if arguments.output is None:
        print(texts[arguments.show], end="")
        return 0
    output = arguments.output.expanduser()
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, not a directory", hint="give a directory")
    output.mkdir(parents=True, exist_ok=True)
    for what, text in texts.items():
        path = output / FILES[what]
        path.write_text(text, encoding="utf-8")
        if what == "command":
            path.chmod(0o755)
        print(path)
    return 0
