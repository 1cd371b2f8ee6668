"""A deployment as plain data, and the AWS calls that create it. Nothing here talks to AWS.

Every resource is found again by name. The endpoint has the deployment's name. Models and endpoint configurations add a
digest of their settings, uploaded directories a digest of their contents:

    endpoint   chat
    model      chat-1f0c9a7e
    config     chat-b2d41c60
    objects    s3://BUCKET/peagle/chat/drafter-9e107d9d/model.safetensors

A rerun finds what an interrupted command created and resumes; changed settings get new names beside the old ones. Tags
say which deployment a resource belongs to. Resources without our tags are never touched.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle import __version__
from peagle.errors import ConfigError
from peagle.sagemaker.conventions import DRAFT_CHANNEL
from peagle.sagemaker.files import Upload

VARIANT = "AllTraffic"
SCALING, NAMESPACE = "application-autoscaling", "sagemaker"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
"""Published every 10 s. Invocations per minute would react to a burst of long answers minutes too late."""
SCALE_IN_SECONDS, SCALE_OUT_SECONDS = 300, 60
OWNER_TAG = "peagle:deployment"
BUCKET_TAG = "peagle:bucket"
MAX_NAME = 54
"""SageMaker's limit of 63, minus the digest in the names of models and configurations."""
MAX_VARIABLES, MAX_VARIABLE = 100, 1024
DIGEST_LENGTH = 8
STARTUP_SECONDS, MAX_STARTUP_SECONDS = 1800, 3600
BAKE_SECONDS = {False: 60, True: 300}
"""Pause after each batch of a rolling update, without and with alarms to watch."""
SMOKE_QUESTION: Mapping[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}

_NAME = re.compile(r"[A-Za-z0-9](-*[A-Za-z0-9])*")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/(?:.*/)?([\w+=,.@-]+)")
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEYS?|ACCESS_KEY|PRIVATE_KEY)($|_)")
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|(AKIA|ASIA)[A-Z0-9]{12,})")


@dataclass(frozen=True)
class Call:
    """One boto3 call. `until`: repeat it until the endpoint has this status."""

    service: str
    operation: str
    parameters: dict[str, Any]
    until: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Scaling:
    """Instance limits, and the requests in flight per instance to aim for."""

    min_instances: int
    max_instances: int
    concurrency: float

    def calls(self, endpoint: str) -> tuple[Call, Call]:
        limits = {"MinCapacity": self.min_instances, "MaxCapacity": self.max_instances}
        policy = {
            "PolicyName": f"{endpoint}-concurrency",
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": float(self.concurrency),
                "PredefinedMetricSpecification": {"PredefinedMetricType": METRIC},
                "ScaleInCooldown": SCALE_IN_SECONDS,
                "ScaleOutCooldown": SCALE_OUT_SECONDS,
            },
        }
        place = scaled(endpoint)
        return (
            Call(SCALING, "register_scalable_target", place | limits),
            Call(SCALING, "put_scaling_policy", place | policy),
        )


def scaled(endpoint: str) -> dict[str, Any]:
    """The endpoint's instances, as autoscaling names them."""
    resource = f"endpoint/{endpoint}/variant/{VARIANT}"
    return {"ServiceNamespace": NAMESPACE, "ResourceId": resource, "ScalableDimension": DIMENSION}


@dataclass(frozen=True)
class Host:
    """Where it runs."""

    role: str | None = None
    """ARN of the execution role that SageMaker assumes; default: PEAGLE_SAGEMAKER_ROLE"""
    instance: str | None = None
    """for example ml.g6e.2xlarge; default: the catalog's. vLLM uses all of its GPUs"""
    num_instances: int = 1
    """initial number of instances, and the minimum when scaling"""
    max_instances: int | None = None
    """scale automatically up to this many instances; default: no scaling"""
    target_concurrency: float = 8.0
    """requests in flight per instance that scaling aims for"""
    bucket: str | None = None
    """S3 bucket for uploads; default: peagle-sagemaker-ACCOUNT-REGION, created on demand"""
    subnets: tuple[str, ...] = ()
    """VPC subnets"""
    security_groups: tuple[str, ...] = ()
    """VPC security groups"""
    network_isolation: bool = False
    """give the container no network access; needs uploaded models"""
    metrics: bool = False
    """publish the container's /metrics and 10-second endpoint metrics to CloudWatch"""
    tags: tuple[str, ...] = ()
    """tags for every resource, KEY=VALUE"""


@dataclass(frozen=True, kw_only=True)
class Deployment(Host):
    """Everything that determines what is created: the host, with role and instance filled in, and what runs there."""

    role: str
    instance: str
    name: str
    region: str
    image: str
    environment: Mapping[str, str] = field(default_factory=dict)
    target: Upload | None = None
    """None: the container downloads the target"""
    drafter: Upload | None = None
    ami: str | None = None
    startup_seconds: int = STARTUP_SECONDS
    """limit for downloading the uploads, and again for starting the container"""
    smoke_test: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)
        account_and_role(self.role)
        check_environment(self.environment)
        if self.num_instances < 1:
            raise ConfigError(f"--num-instances must be at least 1, got {self.num_instances}")
        if self.max_instances is not None and self.max_instances < self.num_instances:
            raise ConfigError(f"--max-instances is {self.max_instances}, below --num-instances {self.num_instances}")
        if not self.target_concurrency > 0:
            raise ConfigError(f"--target-concurrency must be above 0, got {self.target_concurrency:g}")
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError("--subnets and --security-groups go together", hint="pass both, or neither")
        for key in read_pairs("--tags", self.tags):
            if key.startswith(("aws:", "peagle:")):
                raise ConfigError(f"--tags {key}: the prefixes aws: and peagle: are reserved")

    @property
    def account(self) -> str:
        return account_and_role(self.role)[0]

    @property
    def scaling(self) -> Scaling | None:
        most = self.max_instances
        return None if most is None else Scaling(self.num_instances, most, self.target_concurrency)

    @property
    def bucket_name(self) -> str:
        return self.bucket or own_bucket(self.account, self.region)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return tuple(upload for upload in (self.target, self.drafter) if upload is not None)

    @property
    def owner_tags(self) -> list[dict[str, str]]:
        tags = {OWNER_TAG: self.name, BUCKET_TAG: self.bucket_name, "peagle:version": __version__}
        return [{"Key": key, "Value": value} for key, value in (tags | read_pairs("--tags", self.tags)).items()]

    @property
    def model_name(self) -> str:
        return f"{self.name}-{digest(self._model())}"

    @property
    def config_name(self) -> str:
        return f"{self.name}-{digest(self._config())}"

    def model(self) -> dict[str, Any]:
        """Parameters of create_model."""
        return {"ModelName": self.model_name} | self._model() | {"Tags": self.owner_tags}

    def config(self) -> dict[str, Any]:
        """Parameters of create_endpoint_config."""
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
            variant["ModelDataDownloadTimeoutInSeconds"] = self.startup_seconds
        if self.ami is not None:
            variant["InferenceAmiVersion"] = self.ami
        config: dict[str, Any] = {"ProductionVariants": [variant]}
        if self.metrics:
            config["MetricsConfig"] = {"EnableEnhancedMetrics": True, "MetricPublishFrequencyInSeconds": 10}
        return config


@dataclass(frozen=True)
class Rolling:
    """How the update replaces instances."""

    batch_size: str = "1"
    """instances to replace at a time: a number, or a percentage such as 25%; at most half"""
    alarms: tuple[str, ...] = ()
    """CloudWatch alarms that roll the update back"""

    def __post_init__(self) -> None:
        match = re.fullmatch(r"([1-9]\d*)(%?)", self.batch_size)
        if match is None or (match[2] and not 5 <= int(match[1]) <= 50):
            raise ConfigError(f"--batch-size must be a number such as 2, or between 5% and 50%, got {self.batch_size}")

    def as_config(self, num_instances: int) -> dict[str, Any]:
        """The DeploymentConfig of update_endpoint.

        A single instance is not rolled: its replacement starts beside it and takes over when healthy.
        """
        wait = {"WaitIntervalInSeconds": BAKE_SECONDS[bool(self.alarms)]}
        size, is_percent = int(self.batch_size.rstrip("%")), self.batch_size.endswith("%")
        if num_instances == 1:
            routing = {"Type": "ALL_AT_ONCE"} | wait
            config: dict[str, Any] = {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing}}
        elif not is_percent and size * 2 > num_instances:
            raise ConfigError(f"--batch-size must be at most half of the {num_instances} instances, got {size}")
        else:
            batch = {"Type": "CAPACITY_PERCENT" if is_percent else "INSTANCE_COUNT", "Value": size}
            config = {"RollingUpdatePolicy": {"MaximumBatchSize": batch} | wait}
        if self.alarms:
            config["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in self.alarms]}
        return config


def plan_deploy(deployment: Deployment) -> tuple[Call, ...]:
    """All calls that change something, in order; then the wait and the smoke test."""
    return _plan(deployment, "create_endpoint", {"Tags": deployment.owner_tags})


def plan_update(deployment: Deployment, rolling: Rolling, num_instances: int) -> tuple[Call, ...]:
    """The same for an existing endpoint that has `num_instances` now. Unused resources are removed afterwards."""
    change = {
        "RetainAllVariantProperties": deployment.scaling is not None,
        "DeploymentConfig": rolling.as_config(num_instances),
    }
    return _plan(deployment, "update_endpoint", change)


def _plan(deployment: Deployment, operation: str, parameters: dict[str, Any]) -> tuple[Call, ...]:
    calls, name = [], deployment.name
    owner = {"ExpectedBucketOwner": deployment.account}
    if deployment.uploads and deployment.bucket is None:
        bucket: dict[str, Any] = {"Bucket": deployment.bucket_name}
        if deployment.region != "us-east-1":
            bucket["CreateBucketConfiguration"] = {"LocationConstraint": deployment.region}
        calls.append(Call("s3", "create_bucket", bucket))
    for upload in deployment.uploads:
        for file, _ in upload.files:
            place = {"Bucket": deployment.bucket_name, "Key": upload.prefix(name) + file, "ExtraArgs": owner}
            calls.append(Call("s3", "upload_file", {"Filename": str(upload.directory / file)} | place))
    endpoint = {"EndpointName": name, "EndpointConfigName": deployment.config_name} | parameters
    calls += [
        Call("sagemaker", "create_model", deployment.model()),
        Call("sagemaker", "create_endpoint_config", deployment.config()),
        Call("sagemaker", operation, endpoint),
        Call("sagemaker", "describe_endpoint", {"EndpointName": name}, until="InService"),
    ]
    if deployment.scaling is not None:
        calls += deployment.scaling.calls(name)
    if deployment.smoke_test:
        calls.append(invocation(name, SMOKE_QUESTION))
    return tuple(calls)


def invocation(endpoint: str, body: Mapping[str, Any]) -> Call:
    """A streamed chat request with usage in the last chunk."""
    question = {**body, "stream": True, "stream_options": {"include_usage": True}}
    parameters = {"EndpointName": endpoint, "ContentType": "application/json", "Body": json.dumps(question)}
    return Call("sagemaker-runtime", "invoke_endpoint_with_response_stream", parameters)


def own_bucket(account: str, region: str) -> str:
    """A bucket for peagle only. SageMaker's default policies let roles read buckets with "sagemaker" in the name."""
    return f"peagle-sagemaker-{account}-{region}"


def digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def check_name(name: str) -> None:
    if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} is not a valid endpoint name: use letters, digits and hyphens, at most {MAX_NAME} characters",
            hint="choose a name, and pass the target with --target",
        )


def account_and_role(arn: str) -> tuple[str, str]:
    """Account id and name of a role."""
    match = _ROLE.fullmatch(arn)
    if match is None:
        raise ConfigError(
            f"--role {arn!r} is not the ARN of a role",
            hint="pass the execution role as arn:aws:iam::ACCOUNT:role/NAME",
        )
    return match[1], match[2]


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse what SageMaker refuses, and secrets: anyone allowed to describe the model can read them."""
    if len(environment) > MAX_VARIABLES:
        raise ConfigError(f"{len(environment)} environment variables exceed SageMaker's limit of {MAX_VARIABLES}")
    for name, value in environment.items():
        if _SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value):
            raise ConfigError(
                f"the variable {name} looks like a credential; anyone allowed to describe the model can read it",
                hint="for gated models use --upload-models; callers authenticate with IAM, not keys. If the value is "
                "real, revoke it: it was on a command line",
            )
        for what, text in (("name", name), ("value", value)):
            if len(text) > MAX_VARIABLE:
                raise ConfigError(
                    f"the {what} of the variable {name[:60]} has {len(text)} characters, more than SageMaker's limit "
                    f"of {MAX_VARIABLE}",
                    hint="put long values into the model directory or into your own image",
                )


def read_pairs(option: str, words: Iterable[str]) -> dict[str, str]:
    """Parse NAME=VALUE words."""
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} takes NAME=VALUE, got {word.split('=')[0]!r}")
        if name in pairs:
            raise ConfigError(f"{option} sets {name} twice")
        pairs[name] = value
    return pairs
