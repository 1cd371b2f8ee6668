"""Deploy a target and its drafter to a SageMaker endpoint.

NAME names the endpoint; a catalog name also selects target, drafter and instance. Rerun an interrupted command and it
resumes. See also: `peagle deploy sagemaker update|status|invoke|delete NAME`.
"""

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from peagle.console.arguments import parse
from peagle.sagemaker.aws import Aws
from peagle.sagemaker.choose import Serving, choose
from peagle.sagemaker.costs import DeploymentCost, lines_of
from peagle.sagemaker.found import look, removal
from peagle.sagemaker.invoke import ask, log_group
from peagle.sagemaker.plan import Call, Host, Rolling, check_name, plan_deploy, plan_update
from peagle.sagemaker.run import operating
from peagle.sagemaker.status import deployed_document, deployed_lines, document, lines
from peagle.tuning.settings import with_settings

log = logging.getLogger(__name__)

Name = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]


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
    """settings of `peagle tune`; options given here go before them"""
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
    commands = {"update": update, "status": status, "delete": delete, "invoke": invoke}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    return carry_out(parse(DeployArguments, "deploy sagemaker", with_settings(argv, "deploy sagemaker")))


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
            log.info("nothing of %s exists in %s", arguments.name, aws.region)
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
