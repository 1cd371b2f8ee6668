"""Deploy a target and its drafter: files for vLLM on any number of GPUs, or an endpoint of SageMaker."""

import json
import logging
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from peagle.console.arguments import DrafterArguments, check_directory, parse
from peagle.errors import ConfigError
from peagle.sagemaker.aws import Aws
from peagle.sagemaker.choose import Serving, choose
from peagle.sagemaker.costs import DeploymentCost, lines_of
from peagle.sagemaker.found import look, removal
from peagle.sagemaker.invoke import ask, log_group
from peagle.sagemaker.plan import Call, Host, Rolling, check_name, plan_deploy, plan_update
from peagle.sagemaker.run import operating
from peagle.sagemaker.status import deployed_document, deployed_lines, document, lines
from peagle.tuning.settings import with_settings
from peagle.vllm.command import TESTED, Installed, Parallelism, VllmSettings
from peagle.vllm.flags import drafter_in, split_words, with_flags
from peagle.vllm.form import prepare
from peagle.vllm.manifests import Deployment, render
from peagle.vllm.models import find_models

log = logging.getLogger(__name__)

FILES = {"command": "serve.sh", "compose": "compose.yaml", "kubernetes": "kubernetes.yaml"}
NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
Name = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class VllmArguments:
    target: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """directory, GGUF file, catalog name or Hugging Face id; default: the drafter's own target, or
    the built-in SmolLM2-135M-Instruct if no drafter is given"""
    output: Path | None = None
    """directory for all three files; existing ones are replaced"""
    show: Literal["command", "compose", "kubernetes"] = "command"
    """which file to print if --output is not given"""
    num_draft_tokens: int | None = None
    """draft tokens per step; 0 turns speculation off. Default: what the drafter's makers recommend"""
    settings: Path | None = None
    """settings of `peagle tune`; options on the command line take precedence"""
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


@dataclass(frozen=True)
class AccountArguments:
    """AWS account. Credentials come from boto3's usual sources."""

    region: str | None = None
    """default: AWS_REGION, or the profile's region"""
    profile: str | None = None
    """profile in ~/.aws/config; default: AWS_PROFILE"""

    def connect(self) -> Aws:
        return Aws(self.region or os.environ.get("AWS_REGION"), self.profile)


@dataclass(frozen=True)
class RunArguments:
    """This run."""

    dry_run: bool = False
    """print every call as a line of JSON and make none; needs no credentials"""
    smoke_test: bool = True
    """stream one short answer from the endpoint at the end"""
    json: bool = False
    """print one JSON document as the last line of stdout"""


@dataclass(frozen=True)
class DeployArguments:
    name: Name
    """endpoint name: letters, digits, hyphens"""
    settings: Path | None = None
    """settings of `peagle tune`; options on the command line take precedence"""
    serving: Serving = field(default_factory=Serving)
    host: Host = field(default_factory=Host)
    account: AccountArguments = field(default_factory=AccountArguments)
    run: RunArguments = field(default_factory=RunArguments)
    cost: DeploymentCost = field(default_factory=DeploymentCost)


@dataclass(frozen=True)
class UpdateArguments(DeployArguments):
    rolling: Rolling = field(default_factory=Rolling)


@dataclass(frozen=True)
class StatusArguments:
    name: Name
    """endpoint name"""
    bucket: str | None = None
    """also look in this bucket; default: peagle's own and those named in tags"""
    json: bool = False
    """print one JSON document as the last line of stdout"""
    account: AccountArguments = field(default_factory=AccountArguments)


@dataclass(frozen=True)
class DeleteArguments:
    name: Name
    """endpoint name"""
    bucket: str | None = None
    """also look in this bucket: an upload interrupted before the model existed leaves no other trace"""
    logs: bool = False
    """delete the endpoint's log group too"""
    dry_run: bool = False
    """print every call that would delete something as a line of JSON, and make none"""
    account: AccountArguments = field(default_factory=AccountArguments)


@dataclass(frozen=True)
class InvokeArguments:
    name: Name
    """endpoint name"""
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """the user message"""
    max_tokens: int = 256
    """most tokens to generate"""
    temperature: float = 0.0
    """0 is greedy"""
    json: bool = False
    """print one JSON document instead of streaming the text"""
    account: AccountArguments = field(default_factory=AccountArguments)


def main(argv: list[str]) -> int:
    actions = {"vllm": vllm, "sagemaker": sagemaker}
    return actions[argv[0]](argv[1:])


def vllm(argv: list[str]) -> int:
    """Write what serves a target and its drafter with vLLM: a command, a Docker Compose file and a Kubernetes manifest.

    Without --output it prints one of them. A drafter in another layout is converted to vLLM's first. vLLM's own options
    go after --, as in `peagle deploy vllm gpt-oss-20b -- --max-num-seqs 64`. To have peagle run vLLM itself, with API
    keys, limits and metrics in front, use `peagle serve --engine vllm`.
    """
    argv, words = split_words(with_settings(argv, "deploy vllm"))
    arguments = parse(VllmArguments, "deploy vllm", argv, description=vllm.__doc__)
    if arguments.output is not None:
        check_directory(arguments.output.expanduser())
    release = Installed(arguments.vllm_version.removeprefix("v"))
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
        num_heads=models.config.get("num_attention_heads"),
        **asdict(arguments.parallel),
    )
    may_mismatch = arguments.drafter.allow_mismatch
    settings = with_flags(settings, words)
    settings = prepare(models, settings, release, allow_mismatch=may_mismatch, here=False)
    image = arguments.image or f"vllm/vllm-openai:v{release.version}"
    texts = render(settings, release, Deployment(arguments.name, image, arguments.port))
    if arguments.output is None:
        print(texts[arguments.show], end="")
        return 0
    output = arguments.output.expanduser()
    output.mkdir(parents=True, exist_ok=True)
    for what, text in texts.items():
        path = output / FILES[what]
        path.write_text(text, encoding="utf-8")
        if what == "command":
            path.chmod(0o755)
        print(path)
    return 0


def sagemaker(argv: list[str]) -> int:
    """Deploy a target and its drafter to a SageMaker endpoint.

    NAME names the endpoint; a catalog name also selects target, drafter and instance. Rerun an interrupted command and
    it resumes. See also: `peagle deploy sagemaker update|status|invoke|delete NAME`.
    """
    commands = {"update": update, "status": status, "delete": delete, "invoke": invoke}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    argv = with_settings(argv, "deploy sagemaker")
    return carry_out(parse(DeployArguments, "deploy sagemaker", argv, description=sagemaker.__doc__))


def update(argv: list[str]) -> int:
    """Change an endpoint's settings without downtime, then remove what it no longer uses.

    Pass all options again, including unchanged ones. Several instances are replaced a few at a time. SageMaker rolls
    back if the new ones do not become healthy or an alarm fires.
    """
    argv = with_settings(argv, "deploy sagemaker")
    arguments = parse(UpdateArguments, "deploy sagemaker update", argv, description=update.__doc__)
    return carry_out(arguments, arguments.rolling)


def carry_out(arguments: DeployArguments, rolling: Rolling | None = None) -> int:
    """Create the endpoint or, with `rolling`, update it."""
    check_name(arguments.name)
    run = arguments.run
    with arguments.account.connect() as aws:
        types = aws.instance_types()
        chosen = choose(arguments.name, aws.region, arguments.serving, arguments.host, types, smoke_test=run.smoke_test)
        if run.dry_run:
            for line in lines_of(chosen, arguments.cost):
                log.info("%s", line)
            return print_calls(
                aws, plan_deploy(chosen) if rolling is None else plan_update(chosen, rolling, chosen.num_instances)
            )
        with operating(aws, chosen.name) as operator:
            answer = operator.deploy(chosen) if rolling is None else operator.update(chosen, rolling)
    facts = deployed_document(chosen, answer)
    print(json.dumps(facts) if run.json else "\n".join(deployed_lines(facts)))
    return 0


def status(argv: list[str]) -> int:
    """Show a deployment's resources at AWS, and which of them the endpoint does not use."""
    arguments = parse(StatusArguments, "deploy sagemaker status", argv, description=status.__doc__)
    check_name(arguments.name)
    with arguments.account.connect() as aws:
        facts = document(look(aws, arguments.name, arguments.bucket), aws.region)
    print(json.dumps(facts) if arguments.json else "\n".join(lines(facts)))
    return 0 if facts["status"] == "InService" else 1


def delete(argv: list[str]) -> int:
    """Delete a deployment: endpoint, scaling, configurations, models, uploads, and peagle's bucket once it is empty."""
    arguments = parse(DeleteArguments, "deploy sagemaker delete", argv, description=delete.__doc__)
    check_name(arguments.name)
    with arguments.account.connect() as aws:
        found = look(aws, arguments.name, arguments.bucket)
        group = Call("logs", "delete_log_group", {"logGroupName": log_group(arguments.name)})
        more = (group,) if arguments.logs else ()
        if arguments.dry_run:
            return print_calls(aws, (*removal(found), *more))
        if found.is_nothing and not arguments.logs:
            log.info("no resources of %s exist in %s", arguments.name, aws.region)
        with operating(aws, arguments.name) as operator:
            operator.delete(found, more)
    return 0


def invoke(argv: list[str]) -> int:
    """Send one prompt to an endpoint and stream the answer."""
    arguments = parse(InvokeArguments, "deploy sagemaker invoke", argv, description=invoke.__doc__)

    def show(text: str) -> None:
        if not arguments.json:
            print(text, end="", flush=True)

    message = {"role": "user", "content": arguments.prompt}
    body = {"messages": [message], "max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    with arguments.account.connect() as aws:
        answer = ask(aws, arguments.name, body, show)
    print(json.dumps({"text": answer.text} | answer.figures()) if arguments.json else "")
    log.info("%s", ", ".join(f"{key} {value}" for key, value in answer.figures().items() if value is not None))
    return 0


def print_calls(aws: Aws, calls: tuple[Call, ...]) -> int:
    """Print one line of JSON per call, after boto3 has validated all of them."""
    for call in calls:
        aws.check_call(call)
    for call in calls:
        print(json.dumps(call.as_json()))
    return 0
