"""Automatic scaling of an endpoint by requests in flight, as the calls that set it up and take it down."""

from dataclasses import dataclass
from typing import Any

from peagle.errors import ConfigError

SERVICE = "application-autoscaling"
NAMESPACE = "sagemaker"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
"""Published every 10 s: invocations a minute would notice a burst of long answers minutes too late."""
VARIANT = "AllTraffic"


@dataclass(frozen=True)
class Scaling:
    """Between how many instances, and how many requests in flight each is to have."""

    min_instances: int
    max_instances: int
    concurrency: float = 8.0
    scale_in_seconds: int = 300
    scale_out_seconds: int = 60

    def __post_init__(self) -> None:
        if self.min_instances < 1:
            raise ConfigError(
                f"--min-instances must be at least 1, got {self.min_instances}",
                hint="an endpoint of this kind cannot scale to nothing; `delete` ends it",
            )
        if self.max_instances < self.min_instances:
            raise ConfigError(f"--max-instances is {self.max_instances}, below --min-instances {self.min_instances}")
        if not self.concurrency > 0:
            raise ConfigError(f"--target-concurrency must be above 0, got {self.concurrency:g}")
        for name, value in (("in", self.scale_in_seconds), ("out", self.scale_out_seconds)):
            if value < 0:
                raise ConfigError(f"--scale-{name}-seconds must be 0 or more, got {value}")


def resource_id(endpoint: str) -> str:
    return f"endpoint/{endpoint}/variant/{VARIANT}"


def policy_name(endpoint: str) -> str:
    return f"{endpoint}-concurrency"


def resource(endpoint: str) -> dict[str, Any]:
    return {"ServiceNamespace": NAMESPACE, "ResourceId": resource_id(endpoint), "ScalableDimension": DIMENSION}


def registration(endpoint: str, scaling: Scaling) -> dict[str, Any]:
    return resource(endpoint) | {"MinCapacity": scaling.min_instances, "MaxCapacity": scaling.max_instances}


def policy(endpoint: str, scaling: Scaling) -> dict[str, Any]:
    return resource(endpoint) | {
        "PolicyName": policy_name(endpoint),
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": float(scaling.concurrency),
            "PredefinedMetricSpecification": {"PredefinedMetricType": METRIC},
            "ScaleInCooldown": scaling.scale_in_seconds,
            "ScaleOutCooldown": scaling.scale_out_seconds,
        },
    }
