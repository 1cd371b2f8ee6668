"""What there is of a deployment at AWS, and the calls that remove it.

Found by name and confirmed by tag: models and configurations `NAME-digest`, objects `peagle/NAME/...` of our layout.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.deploy.sagemaker import scaling
from peagle.deploy.sagemaker.aws import Aws, AwsError
from peagle.deploy.sagemaker.checks import is_owned, tags_of
from peagle.deploy.sagemaker.files import prefix_of
from peagle.deploy.sagemaker.plan import BUCKET_TAG, DIGEST_LENGTH, OWNER_TAG, Call, own_bucket
from peagle.errors import DeployError

OBJECTS_A_CALL = 1000


@dataclass(frozen=True)
class Stored:
    """One version of one object, or an upload that was never finished."""

    bucket: str
    key: str
    version: str | None = None
    upload_id: str | None = None
    num_bytes: int = 0


@dataclass(frozen=True)
class Found:
    """A deployment as it is now. Descriptions are those of the service."""

    name: str
    endpoint: Mapping[str, Any] | None = None
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    objects: tuple[Stored, ...] = ()
    scalable_target: Mapping[str, Any] | None = None
    policies: tuple[Mapping[str, Any], ...] = ()
    own_bucket: str | None = None
    """the bucket that only we use, where it exists"""

    @property
    def is_nothing(self) -> bool:
        parts = (self.endpoint, self.configs, self.models, self.objects, self.scalable_target, self.policies)
        return not any(parts)

    @property
    def config_in_use(self) -> str | None:
        """The configuration that the endpoint has, or is changing to."""
        return None if self.endpoint is None else config_of(self.endpoint)


def config_of(endpoint: Mapping[str, Any]) -> str:
    pending = endpoint.get("PendingDeploymentSummary") or {}
    name: str = pending.get("EndpointConfigName") or endpoint.get("EndpointConfigName", "")
    return name


def describe_endpoint(aws: Aws, name: str) -> dict[str, Any] | None:
    """The endpoint's description, whosever it is; None where there is none."""
    try:
        return aws.call("sagemaker", "describe_endpoint", EndpointName=name)
    except AwsError as error:
        if error.is_missing:
            return None
        raise


def find_endpoint(aws: Aws, name: str) -> dict[str, Any] | None:
    """The endpoint's description; None where there is none. One that is not ours is refused."""
    endpoint = describe_endpoint(aws, name)
    if endpoint is None:
        return None
    if not is_owned(aws, endpoint["EndpointArn"], name):
        raise DeployError(
            f"there is an endpoint {name} in {aws.region} that peagle did not make; nothing was touched",
            hint="choose another name",
        )
    return endpoint


def look(aws: Aws, name: str, bucket: str | None = None) -> Found:
    """Find everything of a deployment. `bucket` is one that no tag tells of, because an upload was interrupted."""
    endpoint = find_endpoint(aws, name)
    account = aws.call("sts", "get_caller_identity")["Account"]
    own = own_bucket(account, aws.region)
    buckets = {own, *([bucket] if bucket else [])}
    configs = _named(aws, name, "EndpointConfig", "list_endpoint_configs", buckets)
    models = _named(aws, name, "Model", "list_models", buckets)
    objects: list[Stored] = []
    has_own = False
    for each in sorted(buckets):
        stored = _objects(aws, each, name, account)
        if stored is None and each == bucket:
            raise DeployError(f"there is no bucket {bucket}", hint="check --bucket")
        objects += stored or ()
        has_own = has_own or (each == own and stored is not None)
    target, policies = find_scaling(aws, name)
    return Found(name, endpoint, configs, models, tuple(objects), target, policies, own if has_own else None)


def find_scaling(aws: Aws, name: str) -> tuple[Mapping[str, Any] | None, tuple[Mapping[str, Any], ...]]:
    """The endpoint's scalable target and its policies."""
    space = {"ServiceNamespace": scaling.NAMESPACE}
    resource = scaling.resource_id(name)
    targets = aws.pages(
        scaling.SERVICE, "describe_scalable_targets", "ScalableTargets", ResourceIds=[resource], **space
    )
    policies = aws.pages(scaling.SERVICE, "describe_scaling_policies", "ScalingPolicies", ResourceId=resource, **space)
    return next(iter(targets), None), tuple(policies)


def _named(aws: Aws, name: str, kind: str, operation: str, buckets: set[str]) -> dict[str, dict[str, Any]]:
    """Models or configurations of the deployment, described; the buckets that their tags tell of are added."""
    pattern = re.compile(re.escape(name) + rf"-[0-9a-f]{{{DIGEST_LENGTH}}}")
    found = {}
    for each in aws.pages("sagemaker", operation, f"{kind}s", NameContains=name):
        own_name = each[f"{kind}Name"]
        tags = tags_of(aws, each[f"{kind}Arn"]) if pattern.fullmatch(own_name) else {}
        if tags.get(OWNER_TAG) == name:
            describe = "describe_model" if kind == "Model" else "describe_endpoint_config"
            found[own_name] = aws.call("sagemaker", describe, **{f"{kind}Name": own_name})
            buckets |= {tags[BUCKET_TAG]} if BUCKET_TAG in tags else set()
    return found


def _objects(aws: Aws, bucket: str, name: str, account: str) -> list[Stored] | None:
    """Everything under the deployment's prefix, old versions and unfinished uploads too; None without the bucket."""
    prefix = prefix_of(name)
    is_ours = re.compile(re.escape(prefix) + rf"(target|drafter)-[0-9a-f]{{{DIGEST_LENGTH}}}/").match
    place = {"Bucket": bucket, "Prefix": prefix, "ExpectedBucketOwner": account}
    found = []
    try:
        for kind in ("Versions", "DeleteMarkers"):
            for each in aws.pages("s3", "list_object_versions", kind, **place):
                version = None if each["VersionId"] == "null" else each["VersionId"]
                found.append(Stored(bucket, each["Key"], version, num_bytes=each.get("Size", 0)))
        for each in aws.pages("s3", "list_multipart_uploads", "Uploads", **place):
            found.append(Stored(bucket, each["Key"], upload_id=each["UploadId"]))
    except AwsError as error:
        if error.is_missing or (error.is_denied and bucket == own_bucket(account, aws.region)):
            return None
        raise
    return [each for each in found if is_ours(each.key)]


def unused(found: Found) -> Found:
    """What of a deployment its endpoint does not use."""
    kept = found.config_in_use
    variants = found.configs.get(kept or "", {}).get("ProductionVariants", ())
    kept_models = {variant.get("ModelName") for variant in variants}
    places = [place for name in kept_models if name in found.models for place in sources(found.models[name])]
    return Found(
        found.name,
        configs={name: config for name, config in found.configs.items() if name != kept},
        models={name: model for name, model in found.models.items() if name not in kept_models},
        objects=tuple(each for each in found.objects if not f"s3://{each.bucket}/{each.key}".startswith(tuple(places))),
    )


def sources(model: Mapping[str, Any]) -> list[str]:
    """The S3 prefixes that a model reads."""
    container = model.get("PrimaryContainer", {})
    several = [container.get("ModelDataSource"), *(container.get("AdditionalModelDataSources") or ())]
    return [source["S3DataSource"]["S3Uri"] for source in several if source]


def removal(found: Found, account: str) -> tuple[Call, ...]:
    """The calls that remove what was found, such that an interruption anywhere leaves the rest to be found again.

    Models go last of what has tags: theirs tell which bucket the objects lie in.
    """
    calls = list(scaling_removal(found.name, found.scalable_target, found.policies))
    if found.endpoint is not None:
        endpoint = {"EndpointName": found.name}
        calls.append(Call("sagemaker", "delete_endpoint", endpoint))
        calls.append(Call("sagemaker", "describe_endpoint", endpoint, until="gone"))
    owner = {"ExpectedBucketOwner": account}
    for each in found.objects:
        if each.upload_id is not None:
            place = {"Bucket": each.bucket, "Key": each.key, "UploadId": each.upload_id}
            calls.append(Call("s3", "abort_multipart_upload", place | owner))
    for bucket in sorted({each.bucket for each in found.objects}):
        entries = [
            {"Key": each.key} | ({"VersionId": each.version} if each.version else {})
            for each in found.objects
            if each.bucket == bucket and each.upload_id is None
        ]
        for at in range(0, len(entries), OBJECTS_A_CALL):
            batch = {"Objects": entries[at : at + OBJECTS_A_CALL], "Quiet": True}
            calls.append(Call("s3", "delete_objects", {"Bucket": bucket, "Delete": batch} | owner))
    calls += [Call("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name}) for name in found.configs]
    calls += [Call("sagemaker", "delete_model", {"ModelName": name}) for name in found.models]
    if found.own_bucket is not None:
        calls.append(Call("s3", "delete_bucket", {"Bucket": found.own_bucket} | owner))
    return tuple(calls)


def scaling_restoration(target: Mapping[str, Any] | None, policies: tuple[Mapping[str, Any], ...]) -> tuple[Call, ...]:
    """The calls that set up again what `scaling_removal` takes away."""
    place = ["ServiceNamespace", "ResourceId", "ScalableDimension"]
    kinds = [f"{kind}ScalingPolicyConfiguration" for kind in ("Step", "TargetTracking", "Predictive")]
    given = {
        "register_scalable_target": [*place, "MinCapacity", "MaxCapacity", "SuspendedState"],
        "put_scaling_policy": [*place, "PolicyName", "PolicyType", *kinds],
    }
    found = [] if target is None else [("register_scalable_target", target)]
    found += [("put_scaling_policy", policy) for policy in policies]
    return tuple(
        Call(scaling.SERVICE, operation, {key: values[key] for key in given[operation] if key in values})
        for operation, values in found
    )


def scaling_removal(
    name: str, target: Mapping[str, Any] | None, policies: tuple[Mapping[str, Any], ...]
) -> tuple[Call, ...]:
    place = scaling.resource(name)
    calls = [
        Call(scaling.SERVICE, "delete_scaling_policy", {"PolicyName": policy["PolicyName"]} | place)
        for policy in policies
    ]
    if target is not None:
        calls.append(Call(scaling.SERVICE, "deregister_scalable_target", place))
    return tuple(calls)
