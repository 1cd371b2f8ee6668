"""Put a target and its drafter behind a SageMaker endpoint.

NAME is the endpoint's; a name of the catalog brings target, drafter and instance along. Run the same command again and
it goes on where it was interrupted. The others: `peagle deploy sagemaker update|status|invoke|delete NAME`.
"""

import contextlib
import inspect
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from peagle.cli.arguments import parse
from peagle.deploy.sagemaker.choose import Host, Serving, choose
from peagle.deploy.sagemaker.plan import Call, Rolling, check_name, plan_deploy, plan_update
from peagle.errors import ConfigError
from peagle.provenance import provenance

if TYPE_CHECKING:
    from peagle.deploy.sagemaker.aws import Aws
    from peagle.deploy.sagemaker.invoke import Answer
    from peagle.deploy.sagemaker.plan import Deployment
    from peagle.deploy.sagemaker.run import Operator

log = logging.getLogger(__name__)

ROLE_VARIABLE = "PEAGLE_SAGEMAKER_ROLE"
Name = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class AccountArguments:
    """Where at AWS. Credentials come from where boto3 finds them, never from an option."""

    region: str | None = None
    """by default AWS_REGION, or the profile's"""
    profile: str | None = None
    """of ~/.aws/config; by default AWS_PROFILE"""

    def connect(self) -> "Aws":
        from peagle.deploy.sagemaker.aws import Aws

        return Aws(self.region or os.environ.get("AWS_REGION"), self.profile)


@dataclass(frozen=True)
class RunArguments:
    """How it is carried out."""

    smoke_test: bool = True
    """ask the endpoint something at the end, and stream the answer"""
    dry_run: bool = False
    """print every call as a line of JSON and make none; needs no credentials"""
    poll_seconds: float = 15.0
    """between looks at the endpoint's status"""
    limit_minutes: float = 90.0
    """to wait for the endpoint at most; it goes on without us"""
    json: bool = False
    """print one JSON document as the last line of stdout"""


@dataclass(frozen=True)
class DeployArguments:
    name: Name
    """of the endpoint: letters, digits, hyphens"""
    serving: Annotated[Serving, tyro.conf.OmitArgPrefixes] = field(default_factory=Serving)
    host: Annotated[Host, tyro.conf.OmitArgPrefixes] = field(default_factory=Host)
    account: Annotated[AccountArguments, tyro.conf.OmitArgPrefixes] = field(default_factory=AccountArguments)
    run: Annotated[RunArguments, tyro.conf.OmitArgPrefixes] = field(default_factory=RunArguments)


@dataclass(frozen=True)
class UpdateArguments(DeployArguments):
    rolling: Annotated[Rolling, tyro.conf.OmitArgPrefixes] = field(default_factory=Rolling)


@dataclass(frozen=True)
class StatusArguments:
    name: Name
    """of the endpoint"""
    bucket: str | None = None
    """look into this bucket too; otherwise those that tags tell of, and our own"""
    json: bool = False
    """print one JSON document as the last line of stdout"""
    account: Annotated[AccountArguments, tyro.conf.OmitArgPrefixes] = field(default_factory=AccountArguments)


@dataclass(frozen=True)
class DeleteArguments:
    name: Name
    """of the endpoint"""
    bucket: str | None = None
    """look into this bucket too: an upload that was interrupted before the model was made left no trace elsewhere"""
    logs: bool = False
    """remove the endpoint's log group too"""
    dry_run: bool = False
    """look, print every call that would remove something as a line of JSON, and make none"""
    poll_seconds: float = 15.0
    """between looks at the endpoint's status"""
    account: Annotated[AccountArguments, tyro.conf.OmitArgPrefixes] = field(default_factory=AccountArguments)


@dataclass(frozen=True)
class InvokeArguments:
    name: Name
    """of the endpoint"""
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """the user's message"""
    max_tokens: int = 256
    """to answer with, at most"""
    temperature: float = 0.0
    """0 takes the most likely token"""
    json: bool = False
    """print one JSON document instead of the text as it comes"""
    account: Annotated[AccountArguments, tyro.conf.OmitArgPrefixes] = field(default_factory=AccountArguments)


def main(argv: list[str]) -> int:
    commands = {"update": update, "status": status, "delete": delete, "invoke": invoke}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    return deploy(argv)


def deploy(argv: list[str]) -> int:
    arguments = parse(DeployArguments, "deploy sagemaker", argv)
    with arguments.account.connect() as aws:
        deployment = make_deployment(arguments, aws)
        if arguments.run.dry_run:
            return show_calls(aws, plan_deploy(deployment))
        with operating(aws, deployment.name, arguments.run) as operator:
            answer = operator.deploy(deployment)
        return show_deployment(arguments, deployment, answer)


def update(argv: list[str]) -> int:
    """Change an endpoint to other settings without a gap, then remove what it no longer uses.

    Give all options again, those that stay too. Several instances are replaced a few at a time; where the new ones do
    not become healthy, or an alarm goes off, SageMaker rolls back.
    """
    what = inspect.cleandoc(update.__doc__ or "")
    arguments = parse(UpdateArguments, "deploy sagemaker update", argv, description=what)
    with arguments.account.connect() as aws:
        deployment = make_deployment(arguments, aws)
        if arguments.run.dry_run:
            return show_calls(aws, plan_update(deployment, arguments.rolling, deployment.num_instances))
        with operating(aws, deployment.name, arguments.run) as operator:
            answer = operator.update(deployment, arguments.rolling)
        return show_deployment(arguments, deployment, answer)


def status(argv: list[str]) -> int:
    """Show what there is of a deployment at AWS, and what of it the endpoint does not use."""
    arguments = parse(StatusArguments, "deploy sagemaker status", argv, description=status.__doc__)
    check_name(arguments.name)
    from peagle.deploy.sagemaker.found import look
    from peagle.deploy.sagemaker.status import document, lines

    with arguments.account.connect() as aws:
        facts = document(look(aws, arguments.name, arguments.bucket), aws.region)
    print(json.dumps(facts) if arguments.json else "\n".join(lines(facts)))
    return 0 if facts["status"] == "InService" else 1


def delete(argv: list[str]) -> int:
    """Remove a deployment: endpoint, scaling, configurations, models, uploaded files; our bucket once it is empty."""
    arguments = parse(DeleteArguments, "deploy sagemaker delete", argv, description=delete.__doc__)
    check_name(arguments.name)
    from peagle.deploy.sagemaker.found import look, removal
    from peagle.deploy.sagemaker.invoke import log_group

    with arguments.account.connect() as aws:
        found = look(aws, arguments.name, arguments.bucket)
        group = Call("logs", "delete_log_group", {"logGroupName": log_group(arguments.name)})
        if arguments.dry_run:
            calls = removal(found, aws.call("sts", "get_caller_identity")["Account"])
            return show_calls(aws, (*calls, *([group] if arguments.logs else ())))
        if found.is_nothing and not arguments.logs:
            log.info("there is nothing of %s in %s", arguments.name, aws.region)
        run = RunArguments(poll_seconds=arguments.poll_seconds)
        with operating(aws, arguments.name, run) as operator:
            operator.delete(found, (group,) if arguments.logs else ())
    return 0


def invoke(argv: list[str]) -> int:
    """Ask an endpoint one thing and stream the answer."""
    arguments = parse(InvokeArguments, "deploy sagemaker invoke", argv, description=invoke.__doc__)
    from peagle.deploy.sagemaker.invoke import ask

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


def make_deployment(arguments: DeployArguments, aws: "Aws") -> "Deployment":
    check_name(arguments.name)
    role = arguments.host.role or os.environ.get(ROLE_VARIABLE)
    if not role:
        raise ConfigError(
            "no execution role is given", hint=f"use --role arn:aws:iam::ACCOUNT:role/NAME, or set {ROLE_VARIABLE}"
        )
    return choose(
        arguments.name,
        aws.region,
        role,
        arguments.serving,
        arguments.host,
        aws.instance_types(),
        smoke_test=arguments.run.smoke_test,
    )


def show_calls(aws: "Aws", calls: tuple[Call, ...]) -> int:
    """A line of JSON for each call, after boto3's own check of its parameters."""
    for call in calls:
        aws.check_call(call)
    for call in calls:
        print(json.dumps(call.as_json()))
    return 0


@contextlib.contextmanager
def operating(aws: "Aws", name: str, run: RunArguments) -> Iterator["Operator"]:
    """An operator whose waiting is shown, and what to do after an interruption."""
    from peagle.deploy.sagemaker.run import Operator

    talk = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=talk, disable=not talk.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{name}: starting")
        num_bytes = 0

        def on_bytes(count: int) -> None:
            nonlocal num_bytes
            num_bytes += count
            progress.update(task, description=f"{name}: {num_bytes / 1e6:,.1f} MB uploaded")

        def on_wait(state: str, seconds: float) -> None:
            progress.update(task, description=f"{name}: {state} for {seconds / 60:.1f} min")

        try:
            yield Operator(
                aws,
                name,
                poll_seconds=run.poll_seconds,
                limit_seconds=run.limit_minutes * 60,
                on_wait=on_wait,
                on_bytes=on_bytes,
            )
        except KeyboardInterrupt:
            log.info("the same command goes on from here; `peagle deploy sagemaker delete %s` removes everything", name)
            raise


def show_deployment(arguments: DeployArguments, deployment: "Deployment", answer: "Answer | None") -> int:
    scaling = deployment.scaling
    host = f"runtime.sagemaker.{deployment.region}.amazonaws.com{'.cn' if deployment.region.startswith('cn-') else ''}"
    facts: dict[str, Any] = {
        "name": deployment.name,
        "region": deployment.region,
        "status": "InService",
        "config": deployment.config_name,
        "model": deployment.model_name,
        "image": deployment.image,
        "instance": deployment.instance,
        "environment": dict(sorted(deployment.environment.items())),
        "scaling": None if scaling is None else asdict(scaling),
        "url": f"https://{host}/endpoints/{deployment.name}/invocations",
        "smoke_test": None if answer is None else answer.figures(),
        "provenance": provenance(),
    }
    if arguments.run.json:
        print(json.dumps(facts))
        return 0
    print(f"{facts['name']}  InService  {deployment.num_instances} x {deployment.instance}  in {deployment.region}")
    print(f"  at     {facts['url']}")
    print(f'  ask    peagle deploy sagemaker invoke {deployment.name} "PROMPT"')
    print(f"  end    peagle deploy sagemaker delete {deployment.name}")
    return 0
