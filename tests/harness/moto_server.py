"""A script: moto's server on a port, with the parts of SageMaker and Service Quotas that moto lacks.

    python tests/harness/moto_server.py PORT

As at AWS, endpoints take a few polls to be created, updated and deleted; names are unique; changing endpoints cannot be
deleted; all instance types exist; UpdateEndpoint refuses to change the instance type of a scaling variant, and rolls
back; scaling needs an endpoint. An image with the tag `broken` never becomes healthy.
"""

import json
import sys

import botocore.session
from moto.applicationautoscaling.models import ApplicationAutoscalingBackend, applicationautoscaling_backends
from moto.core.responses import ActionResult, EmptyResult
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.models import FakeEndpoint, FakeEndpointConfig, SageMakerModelBackend
from moto.sagemaker.responses import SageMakerResponse
from moto.server import main
from moto.servicequotas.responses import ServiceQuotasResponse

LOOKS = 2
"""polls until an endpoint reaches its next status"""
REASON = "The primary container for production variant AllTraffic did not pass the ping health check."
QUOTAS = {"ml.p5.48xlarge": 0.0, "ml.g5.xlarge": 8.0, "ml.g6e.2xlarge": 8.0, "ml.m5.xlarge": 8.0}
INSTANCES = frozenset(
    botocore.session.get_session().get_service_model("sagemaker").shape_for("ProductionVariantInstanceType").enum
)


def validate_instance_type(self, instance_type):
    if instance_type not in INSTANCES:
        raise ValidationError(message=f"Value '{instance_type}' failed to satisfy constraint")


def refuse_twice(name, kind, take):
    """Wrap a create method to refuse a name that exists."""

    def method(self, *arguments, **options):
        if options[name] in take(self):
            raise ValidationError(message=f'Cannot create already existing {kind} "{options[name]}".')
        return getattr(self, f"moto_{method.__name__}")(*arguments, **options)

    return method


def is_broken(backend, config):
    (variant,) = backend.endpoint_configs[config].production_variants
    return backend._models[variant["ModelName"]].primary_container["Image"].endswith(":broken")


def create_endpoint(self, endpoint_name, endpoint_config_name, tags):
    if endpoint_name in self.endpoints:
        raise ValidationError(message=f'Cannot create already existing endpoint "{endpoint_name}".')
    endpoint = self.moto_create_endpoint(endpoint_name, endpoint_config_name, tags)
    endpoint.endpoint_status, endpoint.looks = "Creating", LOOKS
    return endpoint


def describe_endpoint(self, endpoint_name):
    endpoint = self.endpoints.get(endpoint_name)
    if endpoint is not None and endpoint.endpoint_status not in ("InService", "Failed"):
        endpoint.looks -= 1
        if endpoint.looks < 0:
            arrive(self, endpoint)
    answer = dict(self.moto_describe_endpoint(endpoint_name))
    goal = getattr(endpoint, "goal", None)
    if goal is not None:
        answer["PendingDeploymentSummary"] = {"EndpointConfigName": goal}
    return {key: value for key, value in answer.items() if key not in ("Looks", "Goal")}


def arrive(backend, endpoint):
    """Give an endpoint the state that it was on its way to."""
    status, goal = endpoint.endpoint_status, getattr(endpoint, "goal", None)
    if status == "Deleting":
        del backend.endpoints[endpoint.endpoint_name]
    elif status == "Creating":
        is_bad = is_broken(backend, endpoint.endpoint_config_name)
        endpoint.endpoint_status = "Failed" if is_bad else "InService"
        endpoint.failure_reason = REASON if is_bad else None
    elif status == "Updating" and is_broken(backend, goal):
        endpoint.endpoint_status, endpoint.looks, endpoint.failure_reason = "RollingBack", LOOKS, REASON
        endpoint.goal = None
    else:
        if status == "Updating":
            change(backend, endpoint, goal)
        endpoint.endpoint_status, endpoint.goal = "InService", None


def change(backend, endpoint, config):
    kept = endpoint.production_variants[0]["DesiredInstanceCount"]
    endpoint.endpoint_config_name, endpoint.failure_reason = config, None
    endpoint.production_variants = endpoint._process_production_variants(
        backend.endpoint_configs[config].production_variants
    )
    if endpoint.retains:
        endpoint.production_variants[0] |= {"CurrentInstanceCount": kept, "DesiredInstanceCount": kept}


def update_endpoint(self):
    backend = self.sagemaker_backend
    name, config = self._get_param("EndpointName"), self._get_param("EndpointConfigName")
    endpoint = backend.endpoints.get(name)
    if endpoint is None or config not in backend.endpoint_configs:
        raise ValidationError(message=f'Could not find endpoint "{name}" or its configuration.')
    if endpoint.endpoint_status != "InService":
        raise ValidationError(message=f'Cannot update in-progress endpoint "{name}".')
    policy = (self._get_param("DeploymentConfig") or {}).get("RollingUpdatePolicy")
    count = endpoint.production_variants[0]["CurrentInstanceCount"]
    if policy and policy["MaximumBatchSize"]["Value"] * 2 > count:
        raise ValidationError(message="MaximumBatchSize must be between 5% and 50% of the variant's instances.")
    old = backend.endpoint_configs[endpoint.endpoint_config_name].production_variants[0]
    new = backend.endpoint_configs[config].production_variants[0]
    if old["InstanceType"] != new["InstanceType"] and scalable(backend, name):
        raise ValidationError(message="The variant is registered for scaling: its instance type cannot be changed.")
    endpoint.goal, endpoint.endpoint_status, endpoint.looks = config, "Updating", LOOKS
    endpoint.retains = bool(self._get_param("RetainAllVariantProperties"))
    return ActionResult({"EndpointArn": endpoint.arn})


def scalable(backend, name):
    scaling = applicationautoscaling_backends[backend.account_id][backend.region_name]
    return any(resource.startswith(f"endpoint/{name}/") for group in scaling.targets.values() for resource in group)


def delete_endpoint(self):
    name = self._get_param("EndpointName")
    endpoint = self.sagemaker_backend.endpoints.get(name)
    if endpoint is None:
        self.sagemaker_backend.delete_endpoint(name)
    if endpoint.endpoint_status in ("Creating", "Updating", "RollingBack"):
        raise ValidationError(message=f'Cannot update in-progress endpoint "{name}".')
    endpoint.endpoint_status, endpoint.looks = "Deleting", LOOKS
    return EmptyResult()


def delete_endpoint_config(self, endpoint_config_name):
    if any(each.endpoint_config_name == endpoint_config_name for each in self.endpoints.values()):
        raise ValidationError(message=f"Cannot delete in-use endpoint configuration {endpoint_config_name}.")
    self.moto_delete_endpoint_config(endpoint_config_name)


def register_scalable_target(self, namespace, r_id, *arguments, **options):
    from moto.sagemaker.models import sagemaker_backends

    endpoint = sagemaker_backends[self.account_id][self.region_name].endpoints.get(r_id.split("/")[1])
    if endpoint is None or endpoint.endpoint_status != "InService":
        raise ValidationError(message="No such endpoint, or it is not in service")
    return self.moto_register_scalable_target(namespace, r_id, *arguments, **options)


def list_service_quotas(self):
    quotas = [
        {"QuotaName": f"{name} for endpoint usage", "QuotaCode": f"L-{at}", "Value": value}
        for at, (name, value) in enumerate(QUOTAS.items())
    ]
    return json.dumps({"Quotas": quotas})


def patch(kind, name, method):
    if hasattr(kind, name):
        setattr(kind, f"moto_{name}", getattr(kind, name))
    method.__name__ = name
    setattr(kind, name, method)


for each in (FakeEndpoint, FakeEndpointConfig, SageMakerModelBackend):
    if hasattr(each, "validate_instance_type"):
        patch(each, "validate_instance_type", validate_instance_type)
patch(SageMakerModelBackend, "create_model", refuse_twice("model_name", "model", lambda self: self._models))
patch(
    SageMakerModelBackend,
    "create_endpoint_config",
    refuse_twice("endpoint_config_name", "endpoint configuration", lambda self: self.endpoint_configs),
)
patch(SageMakerModelBackend, "create_endpoint", create_endpoint)
patch(SageMakerModelBackend, "describe_endpoint", describe_endpoint)
patch(SageMakerModelBackend, "delete_endpoint_config", delete_endpoint_config)
patch(SageMakerResponse, "delete_endpoint", delete_endpoint)
patch(SageMakerResponse, "update_endpoint", update_endpoint)
patch(ApplicationAutoscalingBackend, "register_scalable_target", register_scalable_target)
patch(ServiceQuotasResponse, "list_service_quotas", list_service_quotas)

if __name__ == "__main__":
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])
