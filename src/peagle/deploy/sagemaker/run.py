"""Carry a plan out at AWS: what is there already is left as it is, so the same command again goes on."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from peagle.deploy.sagemaker import paused
from peagle.deploy.sagemaker.aws import Aws, AwsError
from peagle.deploy.sagemaker.checks import is_owned, preflight
from peagle.deploy.sagemaker.files import prefix_of
from peagle.deploy.sagemaker.found import (
    Found,
    config_of,
    describe_endpoint,
    find_endpoint,
    find_scaling,
    look,
    removal,
    scaling_removal,
    scaling_restoration,
    unused,
)
from peagle.deploy.sagemaker.invoke import Answer, ask, log_group
from peagle.deploy.sagemaker.plan import SMOKE_QUESTION, Call, Deployment, Rolling, plan_deploy, plan_update
from peagle.errors import DeployError

log = logging.getLogger(__name__)

POLL_SECONDS = 15.0
LIMIT_SECONDS = 5400.0
MOVING = ("Creating", "Updating", "SystemUpdating", "RollingBack")


class Operator:
    """Makes, changes and removes one deployment.

    `on_wait` gets the endpoint's status and the seconds waited, `on_bytes` the bytes sent, for whoever shows progress.
    """

    def __init__(
        self,
        aws: Aws,
        name: str,
        *,
        poll_seconds: float = POLL_SECONDS,
        limit_seconds: float = LIMIT_SECONDS,
        on_wait: Callable[[str, float], None] = lambda status, seconds: None,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._aws, self._name = aws, name
        self._poll_seconds, self._limit_seconds = poll_seconds, limit_seconds
        self._on_wait, self._on_bytes = on_wait, on_bytes
        self._stored: dict[str, int] | None = None

    def deploy(self, deployment: Deployment) -> Answer | None:
        """Make the endpoint, or go on making it; the answer to the smoke test, if there is one."""
        self._preflight(deployment)
        endpoint = self._settled(find_endpoint(self._aws, self._name))
        if endpoint is not None and config_of(endpoint) != deployment.config_name:
            raise DeployError(
                f"the endpoint {self._name} exists, with other settings than these",
                hint=f"to change it: peagle deploy sagemaker update {self._name} ..., with the same options",
            )
        answer = self._carry_out(deployment, plan_deploy(deployment))
        self._prune()
        return answer

    def update(self, deployment: Deployment, rolling: Rolling) -> Answer | None:
        """Change the endpoint to new settings without a gap, then remove what it no longer uses."""
        self._preflight(deployment)
        endpoint = find_endpoint(self._aws, self._name)
        if endpoint is None:
            raise DeployError(
                f"there is no endpoint {self._name} in {self._aws.region}",
                hint=f"make it with: peagle deploy sagemaker {self._name} ...",
            )
        status, config = endpoint["EndpointStatus"], config_of(endpoint)
        if config != deployment.config_name and status != "InService":
            hint = "wait until it is InService" if status in MOVING else "delete it and deploy it again"
            raise DeployError(f"the endpoint {self._name} is {status} and cannot be changed now", hint=hint)
        answer = self._carry_out(deployment, plan_update(deployment, rolling, _num_instances(endpoint)))
        self._prune()
        return answer

    def delete(self, found: Found, more: Iterable[Call] = ()) -> None:
        """Remove everything that was found, and then what `more` removes."""
        self._remove([*removal(found, self._account()), *more])

    def _account(self) -> str:
        account: str = self._aws.call("sts", "get_caller_identity")["Account"]
        return account

    def _preflight(self, deployment: Deployment) -> None:
        for sentence in preflight(self._aws, deployment):
            log.info("%s", sentence)

    def _settled(self, endpoint: dict[str, Any] | None) -> dict[str, Any] | None:
        """The endpoint, unless it failed or is on its way out: then it is gone when this returns."""
        if endpoint is None or endpoint["EndpointStatus"] not in ("Failed", "Deleting"):
            return endpoint
        call = {"EndpointName": self._name}
        if endpoint["EndpointStatus"] == "Failed":
            log.info("the endpoint that failed before is removed first: %s", endpoint.get("FailureReason", "?"))
            self._remove([Call("sagemaker", "delete_endpoint", call)])
        self._wait_gone()
        return None

    def _carry_out(self, deployment: Deployment, calls: Iterable[Call]) -> Answer | None:
        answer = None
        for call in calls:
            match call.operation:
                case "create_bucket":
                    self._create_bucket(call, deployment.account)
                case "upload_file":
                    self._upload(call, deployment)
                case "create_model":
                    self._create(call, "Model", "describe_model")
                case "create_endpoint_config":
                    self._create(call, "EndpointConfig", "describe_endpoint_config")
                case "create_endpoint":
                    self._create_endpoint(call)
                case "update_endpoint":
                    self._update_endpoint(call, deployment)
                case "describe_endpoint":
                    paused.forget(self._aws, self._wait_in_service(deployment.config_name))
                    if deployment.scaling is None:
                        self._remove(scaling_removal(self._name, *find_scaling(self._aws, self._name)))
                case "invoke_endpoint_with_response_stream":
                    answer = self._smoke_test()
                case _:
                    self._aws.call(call.service, call.operation, **call.parameters)
                    log.info("%s: done", call.operation)
        return answer

    def _smoke_test(self) -> Answer:
        try:
            answer = ask(self._aws, self._name, SMOKE_QUESTION)
        except DeployError as error:
            raise DeployError(
                f"the endpoint {self._name} is InService, but does not answer a question: {error.message}",
                hint=f"it stays up and is billed; `peagle deploy sagemaker delete {self._name}` ends that. "
                f"Its log is {log_group(self._name)} in CloudWatch",
            ) from error
        log.info("it answers: %d characters in %.2f s", len(answer.text), answer.total_seconds)
        return answer

    def _create_bucket(self, call: Call, account: str) -> None:
        bucket = call.parameters["Bucket"]
        try:
            self._aws.call("s3", "head_bucket", Bucket=bucket, ExpectedBucketOwner=account)
            return
        except AwsError as error:
            if not error.is_missing:
                raise
        try:
            self._aws.call(call.service, call.operation, **call.parameters)
        except AwsError as error:
            if error.code != "BucketAlreadyOwnedByYou":
                raise
        log.info("bucket %s: created", bucket)

    def _upload(self, call: Call, deployment: Deployment) -> None:
        """Send a file unless it is there: prefixes carry digests, and S3 shows only objects that are whole."""
        if self._stored is None:
            place = {"Bucket": deployment.bucket_name, "Prefix": prefix_of(self._name)}
            objects = self._aws.pages(
                "s3", "list_objects_v2", "Contents", ExpectedBucketOwner=deployment.account, **place
            )
            self._stored = {each["Key"]: each["Size"] for each in objects}
        key = call.parameters["Key"]
        sizes = {upload.prefix(self._name) + name: size for upload in deployment.uploads for name, size in upload.files}
        if self._stored.get(key) == sizes[key]:
            self._on_bytes(sizes[key])
            return
        self._aws.call(call.service, call.operation, **call.parameters, Callback=self._on_bytes)
        log.info("s3://%s/%s: uploaded, %.1f MB", call.parameters["Bucket"], key, sizes[key] / 1e6)

    def _create(self, call: Call, kind: str, describe: str) -> None:
        name = call.parameters[f"{kind}Name"]
        try:
            there = self._aws.call("sagemaker", describe, **{f"{kind}Name": name})
        except AwsError as error:
            if not error.is_missing:
                raise
            self._aws.call(call.service, call.operation, **call.parameters)
            log.info("%s %s: created", "model" if kind == "Model" else "endpoint configuration", name)
            return
        if not is_owned(self._aws, there[f"{kind}Arn"], self._name):
            raise DeployError(f"{name} exists in {self._aws.region}, and peagle did not make it")

    def _create_endpoint(self, call: Call) -> None:
        if describe_endpoint(self._aws, self._name) is None:
            self._aws.call(call.service, call.operation, **call.parameters)
            log.info("endpoint %s: creating", self._name)

    def _update_endpoint(self, call: Call, deployment: Deployment) -> None:
        endpoint = describe_endpoint(self._aws, self._name)
        if endpoint is None or config_of(endpoint) == deployment.config_name:
            return
        old = self._aws.call("sagemaker", "describe_endpoint_config", EndpointConfigName=config_of(endpoint))
        arn = endpoint["EndpointArn"]
        try:
            if old["ProductionVariants"][0].get("InstanceType") != deployment.instance:
                # SageMaker refuses to change the instance type of a variant that is registered for scaling.
                found = find_scaling(self._aws, self._name)
                if found[0] is not None or found[1]:
                    now = scaling_restoration(*found)
                    paused.keep(self._aws, arn, paused.together(paused.kept(self._aws, arn), now))
                    self._remove(scaling_removal(self._name, *found))
            self._aws.call(call.service, call.operation, **call.parameters)
        except DeployError:
            self._restore_scaling(arn)
            raise
        log.info("endpoint %s: updating to %s", self._name, deployment.config_name)

    def _restore_scaling(self, endpoint_arn: str) -> None:
        """Set up again the scaling that an update has paused, because the endpoint stays as it was."""
        try:
            for call in paused.kept(self._aws, endpoint_arn):
                self._aws.call(call.service, call.operation, **call.parameters)
            paused.forget(self._aws, endpoint_arn)
        except DeployError as error:  # what the update failed of is told as well
            log.warning("the scaling of %s could not be set up again: %s", self._name, error)

    def _wait_in_service(self, config: str) -> str:
        """Wait for the endpoint to serve `config`; its ARN. An update that was rolled back is cleaned up and told."""
        endpoint = self._wait(lambda endpoint: endpoint is not None and endpoint["EndpointStatus"] not in MOVING)
        assert endpoint is not None
        status, reason = endpoint["EndpointStatus"], endpoint.get("FailureReason", "AWS gives no reason")
        hint = f"its log is {log_group(self._name)} in CloudWatch; `delete {self._name}` removes everything"
        if status != "InService":
            raise DeployError(f"the endpoint {self._name} is {status}: {reason}", hint=hint)
        arn: str = endpoint["EndpointArn"]
        if endpoint["EndpointConfigName"] != config:
            self._restore_scaling(arn)
            self._prune()
            raise DeployError(
                f"the update of {self._name} was rolled back, and the endpoint serves as before: {reason}",
                hint=f"its log is {log_group(self._name)} in CloudWatch",
            )
        log.info("endpoint %s: InService", self._name)
        return arn

    def _wait_gone(self) -> None:
        self._wait(lambda endpoint: endpoint is None)

    def _wait(self, is_over: Callable[[dict[str, Any] | None], bool]) -> dict[str, Any] | None:
        start, last = time.monotonic(), ""
        while True:
            endpoint = describe_endpoint(self._aws, self._name)
            if is_over(endpoint):
                return endpoint
            if endpoint is None:
                raise DeployError(f"the endpoint {self._name} is gone: somebody removed it meanwhile")
            status, seconds = endpoint["EndpointStatus"], time.monotonic() - start
            if status != last:
                log.info("endpoint %s: %s", self._name, status)
                last = status
            self._on_wait(status, seconds)
            if seconds > self._limit_seconds:
                raise DeployError(
                    f"the endpoint {self._name} is still {status} after {seconds / 60:.0f} minutes",
                    hint="the same command waits again; --limit-minutes gives it longer",
                )
            time.sleep(self._poll_seconds)

    def _delete_endpoint(self, call: Call) -> None:
        """Remove the endpoint; where it is busy and SageMaker refuses, when it no longer is."""
        try:
            self._aws.call(call.service, call.operation, **call.parameters)
        except AwsError as error:
            if error.is_missing:
                return
            log.info("the endpoint cannot be removed yet: %s", error.message)
            endpoint = self._wait(lambda endpoint: endpoint is None or endpoint["EndpointStatus"] not in MOVING)
            if endpoint is None or endpoint["EndpointStatus"] == "Deleting":
                return
            self._aws.call(call.service, call.operation, **call.parameters)
        log.info("delete_endpoint: %s", self._name)

    def _prune(self) -> None:
        """Remove models, configurations and objects of the deployment that its endpoint does not use."""
        self._remove(removal(unused(look(self._aws, self._name)), self._account()))

    def _remove(self, calls: Iterable[Call]) -> None:
        """Carry removals out; what is gone already is no matter."""
        for call in calls:
            if call.until == "gone":
                self._wait_gone()
                continue
            if call.operation == "delete_endpoint":
                self._delete_endpoint(call)
                continue
            try:
                answer = self._aws.call(call.service, call.operation, **call.parameters)
            except AwsError as error:
                if call.operation == "delete_bucket" and error.code == "BucketNotEmpty":
                    log.info("bucket %s: kept, other deployments use it", call.parameters["Bucket"])
                elif not error.is_missing:
                    raise
                continue
            failed = answer.get("Errors")
            if failed:
                raise DeployError(f"{len(failed)} objects could not be removed: {failed[0].get('Message', failed[0])}")
            named = [value for key, value in call.parameters.items() if key.endswith("Name") or key == "ResourceId"]
            log.info("%s: %s", call.operation, named[0] if named else call.parameters.get("Bucket", "done"))


def _num_instances(endpoint: dict[str, Any]) -> int:
    variants = endpoint.get("ProductionVariants") or [{}]
    return int(variants[0].get("CurrentInstanceCount") or variants[0].get("DesiredInstanceCount") or 1)
