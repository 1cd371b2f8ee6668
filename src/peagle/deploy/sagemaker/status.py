"""A deployment as it is at AWS, for people and for programs."""

from typing import Any

from peagle.deploy.sagemaker.found import Found, unused
from peagle.deploy.sagemaker.invoke import log_group


def document(found: Found, region: str) -> dict[str, Any]:
    """What there is, as one JSON document."""
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
        facts |= _endpoint(found)
    if found.scalable_target is not None:
        facts["scaling"] = {
            "min_instances": found.scalable_target["MinCapacity"],
            "max_instances": found.scalable_target["MaxCapacity"],
            "policies": {each["PolicyName"]: _goal(each) for each in found.policies},
        }
    return facts


def _endpoint(found: Found) -> dict[str, Any]:
    endpoint = found.endpoint
    assert endpoint is not None
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


def _goal(policy: Any) -> float | None:
    goal: float | None = (policy.get("TargetTrackingScalingPolicyConfiguration") or {}).get("TargetValue")
    return goal


def lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    if facts["status"] == "absent":
        shown = [f"{facts['name']}  there is no such endpoint in {facts['region']}"]
    else:
        shown = [
            f"{facts['name']}  {facts['status']}  {facts['num_instances']} x {facts['instance']}  in {facts['region']}",
            f"  image      {facts['image']}",
            f"  config     {facts['config']}",
            f"  model      {facts['model']}",
            *(f"  variable   {name}={value}" for name, value in sorted((facts["environment"] or {}).items())),
            f"  log        {facts['log_group']}",
        ]
        if facts["failure_reason"]:
            shown.append(f"  failure    {facts['failure_reason']}")
        if facts["changing_to"]:
            shown.append(f"  changing   to {facts['changing_to']}")
    if facts["num_objects"]:
        shown.append(f"  files      {facts['num_objects']}, {facts['num_bytes'] / 1e6:,.1f} MB")
    scaling = facts["scaling"]
    if scaling:
        goals = ", ".join(f"{goal:g} requests in flight each" for goal in scaling["policies"].values() if goal)
        shown.append(f"  scaling    {scaling['min_instances']} to {scaling['max_instances']} instances, {goals}")
    left = facts["unused"]
    several = [*left["models"], *left["configs"], *left["objects"]]
    if several:
        shown.append(f"  unused     {', '.join(several)}")
        shown.append(
            "  `peagle deploy sagemaker delete` removes these too; a deploy or update that succeeds does as well"
        )
    return shown
