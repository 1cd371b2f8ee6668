"""What a deployment consists of, and the calls that make it. Plain data: nothing here talks to AWS.

Everything is found again by its name. The endpoint has the deployment's; a model and an endpoint configuration add a
digest of what they say, and an uploaded directory a digest of what is in it:

    endpoint   chat
    model      chat-1f0c9a7e
    config     chat-b2d41c60
    objects    s3://BUCKET/peagle/chat/drafter-9e107d9d/model.safetensors

So the same command finds what an interrupted one made and goes on from there, and a changed one makes new names beside
the old. Tags say which deployment each thing belongs to; what does not carry them is never touched.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle import __version__
from peagle.deploy.sagemaker.files import Upload
from peagle.deploy.sagemaker.scaling import SERVICE as SCALING
from peagle.deploy.sagemaker.scaling import VARIANT, Scaling, policy, registration
from peagle.errors import ConfigError

DRAFT_CHANNEL = "draft_model"
DRAFT_DIRECTORY = f"/opt/ml/additional-model-data-sources/{DRAFT_CHANNEL}"
MODEL_DIRECTORY = "/opt/ml/model"
OWNER_TAG = "peagle:deployment"
BUCKET_TAG = "peagle:bucket"
MAX_NAME = 54
"""SageMaker's 63, less the digest that a model's and a configuration's name add."""
MAX_VARIABLES, MAX_VARIABLE = 100, 1024
DIGEST_LENGTH = 8
SMOKE_QUESTION: Mapping[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}

_NAME = re.compile(r"[A-Za-z0-9](-*[A-Za-z0-9])*")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/(?:.*/)?([\w+=,.@-]+)")
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEYS?|ACCESS_KEY|PRIVATE_KEY)($|_)")
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|(AKIA|ASIA)[A-Z0-9]{12,})")


@dataclass(frozen=True)
class Call:
    """One call of boto3. `until` is the status that it is repeated for."""

    service: str
    operation: str
    parameters: dict[str, Any]
    until: str | None = None

    def as_json(self) -> dict[str, Any]:
        call = {"service": self.service, "operation": self.operation, "parameters": self.parameters}
        return call if self.until is None else call | {"until": self.until}


@dataclass(frozen=True)
class Deployment:
    """Everything that decides what is created."""

    name: str
    region: str
    role: str
    bucket: str | None
    """None: one of our own, named after the account and the region, made when it is needed and removed when empty"""
    image: str
    instance: str
    environment: Mapping[str, str] = field(default_factory=dict)
    target: Upload | None = None
    """None: the container fetches the target itself"""
    drafter: Upload | None = None
    num_instances: int = 1
    scaling: Scaling | None = None
    ami: str | None = None
    startup_seconds: int = 1800
    download_seconds: int = 1800
    volume_gb: int | None = None
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    network_isolation: bool = False
    metrics: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    smoke_test: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)
        account_and_role(self.role)
        check_environment(self.environment)
        for name, value in (("startup", self.startup_seconds), ("download", self.download_seconds)):
            if not 60 <= value <= 3600:
                raise ConfigError(f"--{name}-seconds must be between 60 and 3600, got {value}")
        if self.num_instances < 1:
            raise ConfigError(f"--num-instances must be at least 1, got {self.num_instances}")
        if self.volume_gb is not None and not 1 <= self.volume_gb <= 512:
            raise ConfigError(f"--volume-gb must be between 1 and 512, got {self.volume_gb}")
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError("--subnets and --security-groups belong together", hint="give both, or neither")
        for key in self.tags:
            if key.startswith(("aws:", "peagle:")):
                raise ConfigError(f"--tags {key}: names that begin with aws: or peagle: are taken")

    @property
    def account(self) -> str:
        return account_and_role(self.role)[0]

    @property
    def bucket_name(self) -> str:
        return self.bucket or own_bucket(self.account, self.region)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return tuple(upload for upload in (self.target, self.drafter) if upload is not None)

    @property
    def owner_tags(self) -> list[dict[str, str]]:
        tags = {OWNER_TAG: self.name, BUCKET_TAG: self.bucket_name, "peagle:version": __version__} | dict(self.tags)
        return [{"Key": key, "Value": value} for key, value in tags.items()]

    @property
    def model_name(self) -> str:
        return f"{self.name}-{digest(self._model())}"

    @property
    def config_name(self) -> str:
        return f"{self.name}-{digest(self._config())}"

    def model(self) -> dict[str, Any]:
        """The parameters of create_model."""
        return {"ModelName": self.model_name} | self._model() | {"Tags": self.owner_tags}

    def config(self) -> dict[str, Any]:
        """The parameters of create_endpoint_config."""
        return {"EndpointConfigName": self.config_name} | self._config() | {"Tags": self.owner_tags}

    def _model(self) -> dict[str, Any]:
        container: dict[str, Any] = {"Image": self.image, "Environment": dict(sorted(self.environment.items()))}
        if self.target is not None:
            container["ModelDataSource"] = {"S3DataSource": self._source(self.target)}
        if self.drafter is not None:
            container["AdditionalModelDataSources"] = [
                {"ChannelName": DRAFT_CHANNEL, "S3DataSource": self._source(self.drafter)}
            ]
        if self.metrics:
            container["ContainerMetricsConfig"] = {"MetricsEndpoints": [{"MetricsEndpointPath": "/metrics"}]}
        model: dict[str, Any] = {"ExecutionRoleArn": self.role, "PrimaryContainer": container}
        if self.subnets:
            model["VpcConfig"] = {"Subnets": list(self.subnets), "SecurityGroupIds": list(self.security_groups)}
        if self.network_isolation:
            model["EnableNetworkIsolation"] = True
        return model

    def _source(self, upload: Upload) -> dict[str, str]:
        uri = f"s3://{self.bucket_name}/{upload.prefix(self.name)}"
        return {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}

    def _config(self) -> dict[str, Any]:
        variant: dict[str, Any] = {
            "VariantName": VARIANT,
            "ModelName": self.model_name,
            "InstanceType": self.instance,
            "InitialInstanceCount": self.num_instances,
            "InitialVariantWeight": 1.0,
            "ContainerStartupHealthCheckTimeoutInSeconds": self.startup_seconds,
            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        }
        if self.uploads:
            variant["ModelDataDownloadTimeoutInSeconds"] = self.download_seconds
        if self.ami is not None:
            variant["InferenceAmiVersion"] = self.ami
        if self.volume_gb is not None:
            variant["VolumeSizeInGB"] = self.volume_gb
        config: dict[str, Any] = {"ProductionVariants": [variant]}
        if self.metrics:
            config["MetricsConfig"] = {"EnableEnhancedMetrics": True, "MetricPublishFrequencyInSeconds": 10}
        return config


@dataclass(frozen=True)
class Rolling:
    """How an update replaces instances: so many at a time, with a pause in which alarms may call it off."""

    batch_size: int = 1
    """replaced at a time, of several; at most half of them"""
    batch_unit: Literal["instances", "percent"] = "instances"
    """what --batch-size counts"""
    wait_seconds: int = 60
    """pause after each batch, in which an alarm may go off"""
    alarms: tuple[str, ...] = ()
    """CloudWatch alarms that roll the update back"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size must be at least 1, got {self.batch_size}")
        if self.batch_unit == "percent" and not 5 <= self.batch_size <= 50:
            raise ConfigError(f"--batch-size must be between 5 and 50 percent, got {self.batch_size}")
        if not 0 <= self.wait_seconds <= 3600:
            raise ConfigError(f"--wait-seconds must be between 0 and 3600, got {self.wait_seconds}")

    def as_config(self, num_instances: int) -> dict[str, Any]:
        """The deployment config of update_endpoint. A single instance cannot be rolled: its successor is started
        beside it and takes over when it is healthy.
        """
        if num_instances == 1:
            routing = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": self.wait_seconds}
            config: dict[str, Any] = {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing}}
        else:
            config = {"RollingUpdatePolicy": self._policy(num_instances)}
        if self.alarms:
            config["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in self.alarms]}
        return config

    def _policy(self, num_instances: int) -> dict[str, Any]:
        if self.batch_unit == "instances" and self.batch_size * 2 > num_instances:
            raise ConfigError(
                f"--batch-size must be at most half of the {num_instances} instances, got {self.batch_size}"
            )
        unit = "INSTANCE_COUNT" if self.batch_unit == "instances" else "CAPACITY_PERCENT"
        return {
            "MaximumBatchSize": {"Type": unit, "Value": self.batch_size},
            "WaitIntervalInSeconds": self.wait_seconds,
        }


def plan_deploy(deployment: Deployment) -> tuple[Call, ...]:
    """All calls that change something, in order, and the wait and the question that prove it."""
    create = {
        "EndpointName": deployment.name,
        "EndpointConfigName": deployment.config_name,
        "Tags": deployment.owner_tags,
    }
    endpoint = Call("sagemaker", "create_endpoint", create)
    return (*_parts(deployment), endpoint, *_afterwards(deployment))


def plan_update(deployment: Deployment, rolling: Rolling, num_instances: int) -> tuple[Call, ...]:
    """The same for an endpoint that exists and has `num_instances` now.

    What it no longer uses is removed afterwards, by what is found then.
    """
    change = {
        "EndpointName": deployment.name,
        "EndpointConfigName": deployment.config_name,
        "RetainAllVariantProperties": deployment.scaling is not None,
        "DeploymentConfig": rolling.as_config(num_instances),
    }
    endpoint = Call("sagemaker", "update_endpoint", change)
    return (*_parts(deployment), endpoint, *_afterwards(deployment))


def _parts(deployment: Deployment) -> tuple[Call, ...]:
    """Bucket, objects, model and configuration: free of charge but for the storage, and in nobody's way."""
    calls = []
    owner = {"ExpectedBucketOwner": deployment.account}
    if deployment.uploads and deployment.bucket is None:
        bucket: dict[str, Any] = {"Bucket": deployment.bucket_name}
        if deployment.region != "us-east-1":
            bucket["CreateBucketConfiguration"] = {"LocationConstraint": deployment.region}
        calls.append(Call("s3", "create_bucket", bucket))
    for upload in deployment.uploads:
        prefix = upload.prefix(deployment.name)
        for name, _ in upload.files:
            place = {"Bucket": deployment.bucket_name, "Key": prefix + name, "ExtraArgs": owner}
            calls.append(Call("s3", "upload_file", {"Filename": str(upload.directory / name)} | place))
    calls.append(Call("sagemaker", "create_model", deployment.model()))
    calls.append(Call("sagemaker", "create_endpoint_config", deployment.config()))
    return tuple(calls)


def _afterwards(deployment: Deployment) -> tuple[Call, ...]:
    name = deployment.name
    calls = [Call("sagemaker", "describe_endpoint", {"EndpointName": name}, until="InService")]
    if deployment.scaling is not None:
        calls.append(Call(SCALING, "register_scalable_target", registration(name, deployment.scaling)))
        calls.append(Call(SCALING, "put_scaling_policy", policy(name, deployment.scaling)))
    if deployment.smoke_test:
        calls.append(invocation(name, SMOKE_QUESTION))
    return tuple(calls)


def invocation(endpoint: str, body: Mapping[str, Any]) -> Call:
    """A chat that is streamed, with the figures at its end."""
    question = {**body, "stream": True, "stream_options": {"include_usage": True}}
    parameters = {"EndpointName": endpoint, "ContentType": "application/json", "Body": json.dumps(question)}
    return Call("sagemaker-runtime", "invoke_endpoint_with_response_stream", parameters)


def own_bucket(account: str, region: str) -> str:
    """Ours alone. SageMaker's usual policies let an execution role read buckets with its name in theirs."""
    return f"peagle-sagemaker-{account}-{region}"


def digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def check_name(name: str) -> None:
    if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot be an endpoint's name: letters, digits and single hyphens between them, "
            f"at most {MAX_NAME} characters",
            hint="choose a name, and give the target with --target",
        )


def account_and_role(arn: str) -> tuple[str, str]:
    """The account and the bare name of a role."""
    match = _ROLE.fullmatch(arn)
    if match is None:
        raise ConfigError(
            f"--role {arn!r} is not the ARN of a role",
            hint="give the execution role as arn:aws:iam::ACCOUNT:role/NAME",
        )
    return match[1], match[2]


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse what SageMaker would refuse, and secrets: everybody who may describe the model could read them."""
    if len(environment) > MAX_VARIABLES:
        raise ConfigError(
            f"the container would get {len(environment)} environment variables, SageMaker allows {MAX_VARIABLES}"
        )
    for name, value in environment.items():
        if _SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value):
            raise ConfigError(
                f"the variable {name} looks like a credential, and a container's variables can be read by everybody "
                "who may describe the model",
                hint="for a gated target use --upload-target: it is fetched here, with your own access, and goes to "
                "your bucket; callers are let in by IAM, not by keys. If it was real, revoke it: it has been in an "
                "argument list",
            )
        for what, text in (("name", name), ("value", value)):
            if len(text) > MAX_VARIABLE:
                raise ConfigError(
                    f"the {what} of the variable {name[:60]} has {len(text)} characters, "
                    f"SageMaker allows {MAX_VARIABLE}",
                    hint="put what is long into the model's directory, or into an image of your own",
                )
