"""A deployment's state as a JSON document and as text."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from peagle.provenance import provenance
from peagle.sagemaker.found import Found, unused
from peagle.sagemaker.invoke import Answer, log_group
from peagle.sagemaker.plan import Deployment


def deployed_document(deployment: Deployment, answer: Answer | None) -> dict[str, Any]:
    """The result of a deploy or update that succeeded; `answer` is the smoke test's."""
    suffix = ".cn" if deployment.region.startswith("cn-") else ""
    host = f"runtime.sagemaker.{deployment.region}.amazonaws.com{suffix}"
    return {
        "name": deployment.name,
        "region": deployment.region,
        "status": "InService",
        "config": deployment.config_name,
        "model": deployment.model_name,
        "image": deployment.image,
        "instance": deployment.instance,
        "num_instances": deployment.num_instances,
        "environment": dict(sorted(deployment.environment.items())),
        "scaling": None if deployment.scaling is None else asdict(deployment.scaling),
        "url": f"https://{host}/endpoints/{deployment.name}/invocations",
        "smoke_test": None if answer is None else answer.figures(),
        "provenance": provenance(),
    }


def deployed_lines(facts: dict[str, Any]) -> list[str]:
    name = facts["name"]
    return [
        f"{name}  InService  {facts['num_instances']} x {facts['instance']}  in {facts['region']}",
        f"  url     {facts['url']}",
        f'  invoke  peagle deploy sagemaker invoke {name} "PROMPT"',
        f"  delete  peagle deploy sagemaker delete {name}",
    ]


def document(found: Found, region: str) -> dict[str, Any]:
    """What exists at AWS now."""
    left = unused(found)
    facts: dict[str, Any] = {
        "name": found.name,
        "region": region,
        "status": "absent",
        "config": None,
        "models": sorted(found.models),
        "configs": sorted(found.configs),
        "num_objects": len(found.objects),
        "num_bytes": sum(each.num_bytes for each in found.objects),
        "scaling": None,
        "unused": {
            "models": sorted(left.models),
            "configs": sorted(left.configs),
            "objects": sorted({f"s3://{each.bucket}/{each.key}" for each in left.objects}),
        },
    }
    if found.endpoint is not None:
        facts |= _endpoint(found, found.endpoint)
    if found.scaling:
        limits, *policies = (call.parameters for call in found.scaling)
        facts["scaling"] = {
            "min_instances": limits["MinCapacity"],
            "max_instances": limits["MaxCapacity"],
            "policies": {
                each["PolicyName"]: each.get("TargetTrackingScalingPolicyConfiguration", {}).get("TargetValue")
                for each in policies
            },
        }
    return facts


def _endpoint(found: Found, endpoint: Mapping[str, Any]) -> dict[str, Any]:
    variant = (endpoint.get("ProductionVariants") or [{}])[0]
    config = found.configs.get(endpoint.get("EndpointConfigName", ""), {})
    wanted = (config.get("ProductionVariants") or [{}])[0]
    container = found.models.get(wanted.get("ModelName", ""), {}).get("PrimaryContainer", {})
    return {
        "status": endpoint["EndpointStatus"],
        "failure_reason": endpoint.get("FailureReason"),
        "config": endpoint.get("EndpointConfigName"),
        "changing_to": (endpoint.get("PendingDeploymentSummary") or {}).get("EndpointConfigName"),
        "model": wanted.get("ModelName"),
        "instance": wanted.get("InstanceType"),
        "num_instances": variant.get("CurrentInstanceCount"),
        "desired_instances": variant.get("DesiredInstanceCount"),
        "image": container.get("Image"),
        "environment": container.get("Environment"),
        "log_group": log_group(found.name),
    }


def lines(facts: dict[str, Any]) -> list[str]:
    head, rows = f"{facts['name']}  no such endpoint in {facts['region']}", []
    if facts["status"] != "absent":
        instances = f"{facts['num_instances']} x {facts['instance']}"
        head = f"{facts['name']}  {facts['status']}  {instances}  in {facts['region']}"
        rows = [(key, facts[key]) for key in ("image", "config", "model")]
        rows += [("variable", f"{name}={value}") for name, value in sorted((facts["environment"] or {}).items())]
        rows += [("log", facts["log_group"]), ("failure", facts["failure_reason"])]
        rows += [("changing", f"to {facts['changing_to']}")] if facts["changing_to"] else []
    if facts["num_objects"]:
        rows.append(("files", f"{facts['num_objects']}, {facts['num_bytes'] / 1e6:,.1f} MB"))
    if scaling := facts["scaling"]:
        goals = ", ".join(f"{goal:g} requests in flight per instance" for goal in scaling["policies"].values() if goal)
        rows.append(("scaling", f"{scaling['min_instances']} to {scaling['max_instances']} instances, {goals}"))
    left = [name for names in facts["unused"].values() for name in names]
    rows.append(("unused", ", ".join(left)))
    last = "  the next successful deploy or update removes these; so does `peagle deploy sagemaker delete`"
    return [head, *(f"  {label:<10} {value}" for label, value in rows if value), *([last] if left else [])]
