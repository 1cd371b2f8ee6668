"""AWS's stand-ins: a moto server for the control plane, a router for the runtime, and a real server behind it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.loaders import Loader

from harness.command_line import peagle as peagle
from harness.local_server import chat_body as chat_body
from harness.local_server import running
from harness.local_server import served as served
from harness.model_directories import write_models
from harness.sagemaker_runtime import REGION, SECRET, routing
from peagle.sagemaker.aws import Aws

ROOT = Path(__file__).parents[2]
MANIFEST = (
    '{"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", '
    '"config": {"digest": "sha256:%s"}, "layers": []}'
)
TRUST = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", '
    '"Principal": {"Service": "%s.amazonaws.com"}, "Action": "sts:AssumeRole"}]}'
)


@dataclass
class Cloud:
    """An account at the stand-ins. `containers` says which address answers for an endpoint; None: the shared server."""

    url: str
    shared: str
    containers: Callable[[str], str] | None = None
    invoked: list[str] = field(default_factory=list)
    _clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = boto3.client(
                service,
                region_name=REGION,
                endpoint_url=self.url,
                aws_access_key_id="none",
                aws_secret_access_key=SECRET,
            )
        return self._clients[service]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def reset(self) -> None:
        """An empty account, with a role that SageMaker may take and the images."""
        httpx.post(f"{self.url}/moto-api/reset", verify=False).raise_for_status()  # certificates take 50 ms to read
        self.containers = None
        self.invoked.clear()
        for name, service in (("Execution", "sagemaker"), ("Lambda", "lambda")):
            self.client("iam").create_role(
                RoleName=name, Path="/service-role/", AssumeRolePolicyDocument=TRUST % service
            )
        for repository, tags in (("vllm", ("server-sagemaker-cuda-v2.2",)), ("peagle", ("1", "2", "broken"))):
            self.client("ecr").create_repository(repositoryName=repository)
            for tag in tags:
                self.client("ecr").put_image(repositoryName=repository, imageTag=tag, imageManifest=MANIFEST % tag)

    def answers_for(self, endpoint: str) -> str:
        names = [each["EndpointName"] for each in self.client("sagemaker").list_endpoints()["Endpoints"]]
        if endpoint not in names:
            raise LookupError(endpoint)
        self.invoked.append(endpoint)
        return self.shared if self.containers is None else self.containers(endpoint)

    def state(self) -> dict[str, Any]:
        """Everything that exists, in names."""
        sagemaker, scaling, s3 = (self.client(each) for each in ("sagemaker", "application-autoscaling", "s3"))
        space = {"ServiceNamespace": "sagemaker"}
        buckets = [each["Name"] for each in s3.list_buckets()["Buckets"]]
        endpoints = [each["EndpointName"] for each in sagemaker.list_endpoints()["Endpoints"]]
        described = [sagemaker.describe_endpoint(EndpointName=name) for name in endpoints]
        return {
            "models": sorted(each["ModelName"] for each in sagemaker.list_models()["Models"]),
            "configs": sorted(
                each["EndpointConfigName"] for each in sagemaker.list_endpoint_configs()["EndpointConfigs"]
            ),
            "endpoints": [
                (each["EndpointName"], each["EndpointStatus"], each["EndpointConfigName"]) for each in described
            ],
            "targets": [
                (each["ResourceId"], each["MinCapacity"], each["MaxCapacity"])
                for each in scaling.describe_scalable_targets(**space)["ScalableTargets"]
            ],
            "policies": [
                (each["PolicyName"], each["TargetTrackingScalingPolicyConfiguration"]["TargetValue"])
                for each in scaling.describe_scaling_policies(**space)["ScalingPolicies"]
            ],
            "objects": sorted(
                f"{bucket}/{each['Key']}"
                for bucket in buckets
                for each in s3.list_objects_v2(Bucket=bucket).get("Contents", ())
            ),
            "buckets": buckets,
        }


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "harness" / "moto_server.py"), str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "moto did not start"
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/moto-api/data.json", verify=False)
                break
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="session", autouse=True)
def _services_are_read_once() -> Iterator[None]:
    """Each of boto3's sessions would read SageMaker's description of two megabytes again."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_service_model", "load_data_with_path"):
            patch.setattr(Loader, name, once_a_process(getattr(Loader, name)))
        yield


def once_a_process(method: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[tuple[Any, ...], Any] = {}

    def cached(self: Loader, *arguments: Any, **options: Any) -> Any:
        key = (*arguments, *sorted(options.items()))
        if key not in found:
            found[key] = method(self, *arguments, **options)
        return found[key]

    return cached


@pytest.fixture(scope="session", autouse=True)
def _endpoints_are_polled_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.sagemaker.run.POLL_SECONDS", 0.001)
        yield


@pytest.fixture(scope="session")
def stand_ins() -> Iterator[Cloud]:
    with moto_server() as url, running() as served:
        cloud = Cloud(url, served.url)
        with routing(cloud.answers_for) as runtime:
            environment = {
                "AWS_ENDPOINT_URL": url,
                "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": runtime,
                "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": REGION,
                "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            with pytest.MonkeyPatch.context() as patch:
                for name in [name for name in os.environ if name.startswith("AWS_")]:
                    patch.delenv(name)
                for name, value in environment.items():
                    patch.setenv(name, value)
                yield cloud
        cloud.close()


@pytest.fixture
def cloud(stand_ins: Cloud) -> Cloud:
    """An empty account; whatever boto3 makes in this process, or in one that it starts, talks to the stand-ins."""
    stand_ins.reset()
    return stand_ins


@pytest.fixture(scope="session")
def aws(stand_ins: Cloud) -> Iterator[Aws]:
    with Aws(REGION) as found:
        yield found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `target` and `drafter`, the latter in the compact form, for at most 4 draft tokens."""
    return write_models(tmp_path_factory.mktemp("models"))
