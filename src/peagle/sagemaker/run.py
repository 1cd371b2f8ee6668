"""Carry out a plan at AWS. Existing resources are kept, so rerunning an interrupted command resumes."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from peagle.errors import DeployError
from peagle.sagemaker import paused
from peagle.sagemaker.aws import Aws, AwsError
from peagle.sagemaker.checks import is_owned, preflight
from peagle.sagemaker.files import prefix_of
from peagle.sagemaker.found import Found, config_of, find_endpoint, find_scaling, look, removal, scaling_removal, unused
from peagle.sagemaker.invoke import Answer, ask, log_group
from peagle.sagemaker.plan import SMOKE_QUESTION, Call, Deployment, Rolling, plan_deploy, plan_update

log = logging.getLogger(__name__)

POLL_SECONDS, MAX_POLL_SECONDS = 2.0, 15.0
LIMIT_SECONDS = 5400.0
MOVING = ("Creating", "Updating", "SystemUpdating", "RollingBack")


class Operator:
    """Creates, updates and removes one deployment. `show` displays the progress of uploads and waits."""

    def __init__(self, aws: Aws, name: str, show: Callable[[str], None] = lambda text: None) -> None:
        self._aws, self._name = aws, name
        self._show, self._num_bytes = show, 0
        self._stored: dict[str, int] | None = None

    def deploy(self, deployment: Deployment) -> Answer | None:
        """Create the endpoint, or resume creating it; returns the answer to the smoke test, if any."""
        preflight(self._aws, deployment)
        endpoint = self._settled(find_endpoint(self._aws, self._name))
        if endpoint is not None and config_of(endpoint) != deployment.config_name:
            raise DeployError(
                f"the endpoint {self._name} exists with different settings",
                hint=f"to change it, run `peagle deploy sagemaker update {self._name} ...` with the same options",
            )
        return self._carry_out(deployment, plan_deploy(deployment))

    def update(self, deployment: Deployment, rolling: Rolling) -> Answer | None:
        """Update the endpoint without downtime, then remove what it no longer uses."""
        preflight(self._aws, deployment)
        endpoint = find_endpoint(self._aws, self._name)
        if endpoint is None:
            raise DeployError(
                f"no endpoint {self._name} in {self._aws.region}",
                hint=f"create it with `peagle deploy sagemaker {self._name} ...`",
            )
        status, config = endpoint["EndpointStatus"], config_of(endpoint)
        if config != deployment.config_name and status != "InService":
            hint = "wait until it is InService" if status in MOVING else "delete it and deploy again"
            raise DeployError(f"the endpoint {self._name} is {status} and cannot be updated now", hint=hint)
        now = (endpoint.get("ProductionVariants") or [{}])[0]
        num_instances = int(now.get("CurrentInstanceCount") or now.get("DesiredInstanceCount") or 1)
        return self._carry_out(deployment, plan_update(deployment, rolling, num_instances))

    def delete(self, found: Found, more: Iterable[Call] = ()) -> None:
        """Remove everything found, then run the calls in `more`."""
        self._remove([*removal(found), *more])

    def _endpoint(self) -> dict[str, Any] | None:
        return self._aws.find("sagemaker", "describe_endpoint", EndpointName=self._name)

    def _settled(self, endpoint: dict[str, Any] | None) -> dict[str, Any] | None:
        """The endpoint; waits for a failed or deleting one to be gone and returns None."""
        if endpoint is None or endpoint["EndpointStatus"] not in ("Failed", "Deleting"):
            return endpoint
        if endpoint["EndpointStatus"] == "Failed":
            log.info("removing the endpoint that failed: %s", endpoint.get("FailureReason", "?"))
            self._delete_endpoint(Call("sagemaker", "delete_endpoint", {"EndpointName": self._name}))
        self._wait(lambda endpoint: endpoint is None)
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
                    if self._endpoint() is None:
                        self._aws.run(call)
                        log.info("endpoint %s: creating", self._name)
                case "update_endpoint":
                    self._update_endpoint(call, deployment)
                case "describe_endpoint":
                    paused.forget(self._aws, self._wait_in_service(deployment.config_name))
                    if deployment.scaling is None:
                        self._remove(scaling_removal(find_scaling(self._aws, self._name)))
                case "invoke_endpoint_with_response_stream":
                    answer = self._smoke_test()
                case _:
                    self._aws.run(call)
                    log.info("%s: done", call.operation)
        self._prune()
        return answer

    def _smoke_test(self) -> Answer:
        try:
            answer = ask(self._aws, self._name, SMOKE_QUESTION)
        except DeployError as error:
            raise DeployError(
                f"the endpoint {self._name} is InService, but the smoke test failed: {error.message}",
                hint=f"it is still running and billed; `peagle deploy sagemaker delete {self._name}` removes it. "
                f"CloudWatch log: {log_group(self._name)}",
            ) from error
        log.info("smoke test passed: %d characters in %.2f s", len(answer.text), answer.total_seconds)
        return answer

    def _create_bucket(self, call: Call, account: str) -> None:
        bucket = call.parameters["Bucket"]
        if self._aws.find("s3", "head_bucket", Bucket=bucket, ExpectedBucketOwner=account) is not None:
            return
        try:
            self._aws.run(call)
        except AwsError as error:
            if error.code != "BucketAlreadyOwnedByYou":
                raise
        log.info("bucket %s: created", bucket)

    def _upload(self, call: Call, deployment: Deployment) -> None:
        """Upload a file unless it exists: prefixes contain digests, and S3 lists only complete objects."""
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

    def _on_bytes(self, count: int) -> None:
        self._num_bytes += count
        self._show(f"{self._num_bytes / 1e6:,.1f} MB uploaded")

    def _create(self, call: Call, kind: str, describe: str) -> None:
        name = call.parameters[f"{kind}Name"]
        there = self._aws.find("sagemaker", describe, **{f"{kind}Name": name})
        if there is None:
            self._aws.run(call)
            log.info("%s %s: created", "model" if kind == "Model" else "endpoint configuration", name)
        elif not is_owned(self._aws, there[f"{kind}Arn"], self._name):
            raise DeployError(f"{name} exists in {self._aws.region} and was not created by peagle")

    def _update_endpoint(self, call: Call, deployment: Deployment) -> None:
        endpoint = self._endpoint()
        if endpoint is None or config_of(endpoint) == deployment.config_name:
            return
        old = self._aws.call("sagemaker", "describe_endpoint_config", EndpointConfigName=config_of(endpoint))
        arn = endpoint["EndpointArn"]
        try:
            if old["ProductionVariants"][0].get("InstanceType") != deployment.instance:
                # SageMaker refuses to change the instance type of a variant that is registered for scaling.
                scaling = find_scaling(self._aws, self._name)
                if scaling:
                    paused.keep(self._aws, arn, paused.together(paused.kept(self._aws, arn), scaling))
                    self._remove(scaling_removal(scaling))
            self._aws.run(call)
        except DeployError:
            self._restore_scaling(arn)
            raise
        log.info("endpoint %s: updating to %s", self._name, deployment.config_name)

    def _restore_scaling(self, endpoint_arn: str) -> None:
        """Restore the scaling that a failed update has paused."""
        try:
            for call in paused.kept(self._aws, endpoint_arn):
                self._aws.run(call)
            paused.forget(self._aws, endpoint_arn)
        except DeployError as error:  # the update's own error is reported too
            log.warning("could not restore the scaling of %s: %s", self._name, error)

    def _wait_in_service(self, config: str) -> str:
        """Wait until the endpoint serves `config`; returns its ARN. Cleans up after an update that was rolled back."""
        endpoint = self._wait(lambda endpoint: endpoint is not None and endpoint["EndpointStatus"] not in MOVING)
        assert endpoint is not None
        status, reason = endpoint["EndpointStatus"], endpoint.get("FailureReason", "no reason given")
        hint = (
            f"CloudWatch log: {log_group(self._name)}; `peagle deploy sagemaker delete {self._name}` removes everything"
        )
        if status != "InService":
            raise DeployError(f"the endpoint {self._name} is {status}: {reason}", hint=hint)
        arn: str = endpoint["EndpointArn"]
        if endpoint["EndpointConfigName"] != config:
            self._restore_scaling(arn)
            self._prune()
            raise DeployError(
                f"the update of {self._name} was rolled back; the endpoint serves the old settings: {reason}",
                hint=f"CloudWatch log: {log_group(self._name)}",
            )
        log.info("endpoint %s: InService", self._name)
        return arn

    def _wait(self, is_over: Callable[[dict[str, Any] | None], bool]) -> dict[str, Any] | None:
        start, last = time.monotonic(), ""
        while True:
            endpoint = self._endpoint()
            if is_over(endpoint):
                return endpoint
            if endpoint is None:
                raise DeployError(f"the endpoint {self._name} was deleted by someone else")
            status, seconds = endpoint["EndpointStatus"], time.monotonic() - start
            if status != last:
                log.info("endpoint %s: %s", self._name, status)
                last = status
            self._show(f"{status} for {seconds / 60:.1f} min")
            if seconds > LIMIT_SECONDS:
                raise DeployError(
                    f"the endpoint {self._name} is still {status} after {seconds / 60:.0f} minutes",
                    hint="rerun the command to keep waiting",
                )
            time.sleep(min(POLL_SECONDS * (1 + seconds / 16), MAX_POLL_SECONDS))

    def _delete_endpoint(self, call: Call) -> None:
        """Delete the endpoint; if SageMaker refuses because it is changing, wait and retry."""
        try:
            self._aws.run(call)
        except AwsError as error:
            if error.is_missing:
                return
            log.info("cannot delete the endpoint yet: %s", error.message)
            endpoint = self._wait(lambda endpoint: endpoint is None or endpoint["EndpointStatus"] not in MOVING)
            if endpoint is None or endpoint["EndpointStatus"] == "Deleting":
                return
            self._aws.run(call)
        log.info("delete_endpoint: %s", self._name)

    def _prune(self) -> None:
        """Remove models, configurations and objects that the endpoint does not use."""
        self._remove(removal(unused(look(self._aws, self._name))))

    def _remove(self, calls: Iterable[Call]) -> None:
        """Carry out removals; ignore what is already gone."""
        for call in calls:
            if call.until == "gone":
                self._wait(lambda endpoint: endpoint is None)
                continue
            if call.operation == "delete_endpoint":
                self._delete_endpoint(call)
                continue
            try:
                answer = self._aws.run(call)
            except AwsError as error:
                if call.operation == "delete_bucket" and error.code == "BucketNotEmpty":
                    log.info("bucket %s: kept, in use by other deployments", call.parameters["Bucket"])
                elif not error.is_missing:
                    raise
                continue
            failed = answer.get("Errors")
            if failed:
                raise DeployError(f"could not delete {len(failed)} objects: {failed[0].get('Message', failed[0])}")
            named = [value for key, value in call.parameters.items() if key.endswith("Name") or key == "ResourceId"]
            log.info("%s: %s", call.operation, named[0] if named else call.parameters.get("Bucket", "done"))


@contextlib.contextmanager
def operating(aws: Aws, name: str) -> Iterator[Operator]:
    """An operator with a progress display on stderr; after an interruption, says how to resume."""
    stderr = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{name}: starting")
        try:
            yield Operator(aws, name, lambda text: progress.update(task, description=f"{name}: {text}"))
        except KeyboardInterrupt:
            log.info("rerun the command to resume; `peagle deploy sagemaker delete %s` removes everything", name)
            raise
