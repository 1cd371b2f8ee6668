"""Find a deployment's resources at AWS, and the calls that remove them.

Resources are found by name and confirmed by tag: models and endpoint configurations are called `NAME-digest`, objects
`peagle/NAME/...`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.errors import DeployError
from peagle.sagemaker.aws import Aws, AwsError
from peagle.sagemaker.checks import is_owned, tags_of
from peagle.sagemaker.files import prefix_of
from peagle.sagemaker.plan import BUCKET_TAG, DIGEST_LENGTH, OWNER_TAG, SCALING, Call, own_bucket, scaled

OBJECTS_PER_CALL = 1000
POLICY_KINDS = [f"{kind}ScalingPolicyConfiguration" for kind in ("Step", "TargetTracking", "Predictive")]
SCALING_KEYS = {
    "register_scalable_target": [*scaled(""), "MinCapacity", "MaxCapacity", "SuspendedState"],
    "put_scaling_policy": [*scaled(""), "PolicyName", "PolicyType", *POLICY_KINDS],
}
"""Parameters of the calls that set up scaling."""


@dataclass(frozen=True)
class Stored:
    """A version of an object, or an unfinished multipart upload."""

    bucket: str
    key: str
    version: str | None = None
    upload_id: str | None = None
    num_bytes: int = 0


@dataclass(frozen=True)
class Found:
    """A deployment's resources, as AWS describes them."""

    name: str
    account: str
    endpoint: Mapping[str, Any] | None = None
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    objects: tuple[Stored, ...] = ()
    scaling: tuple[Call, ...] = ()
    """the calls that set it up"""
    own_bucket: str | None = None
    """peagle's own bucket, if it exists"""

    @property
    def is_nothing(self) -> bool:
        return not any((self.endpoint, self.configs, self.models, self.objects, self.scaling))


def config_of(endpoint: Mapping[str, Any]) -> str:
    """The configuration that the endpoint uses or is changing to."""
    pending = endpoint.get("PendingDeploymentSummary") or {}
    name: str = pending.get("EndpointConfigName") or endpoint.get("EndpointConfigName", "")
    return name


def find_endpoint(aws: Aws, name: str) -> dict[str, Any] | None:
    """The endpoint; None if it does not exist. Refuses one that peagle did not create."""
    endpoint = aws.find("sagemaker", "describe_endpoint", EndpointName=name)
    if endpoint is not None and not is_owned(aws, endpoint["EndpointArn"], name):
        raise DeployError(
            f"the endpoint {name} in {aws.region} was not created by peagle; nothing was changed",
            hint="choose another name",
        )
    return endpoint


def look(aws: Aws, name: str, bucket: str | None = None) -> Found:
    """Find all resources of a deployment. `bucket`: also look here (an interrupted upload leaves no tag)."""
    endpoint = find_endpoint(aws, name)
    account = aws.call("sts", "get_caller_identity")["Account"]
    own = own_bucket(account, aws.region)
    buckets = {own} | ({bucket} if bucket else set())
    configs = _named(aws, name, "EndpointConfig", "endpoint_config", buckets)
    models = _named(aws, name, "Model", "model", buckets)
    stored = {each: _objects(aws, each, name, account) for each in sorted(buckets)}
    if bucket and stored[bucket] is None:
        raise DeployError(f"no bucket {bucket}", hint="check --bucket")
    objects = tuple(each for some in stored.values() for each in some or ())
    scaling = find_scaling(aws, name)
    return Found(name, account, endpoint, configs, models, objects, scaling, None if stored[own] is None else own)


def find_scaling(aws: Aws, name: str) -> tuple[Call, ...]:
    """The calls that set up the endpoint's scaling as it is now: its target, then the policies."""
    resource = scaled(name)["ResourceId"]
    space = {"ServiceNamespace": scaled(name)["ServiceNamespace"]}
    targets = aws.pages(SCALING, "describe_scalable_targets", "ScalableTargets", ResourceIds=[resource], **space)
    policies = aws.pages(SCALING, "describe_scaling_policies", "ScalingPolicies", ResourceId=resource, **space)
    found = [("register_scalable_target", each) for each in targets]
    found += [("put_scaling_policy", each) for each in policies]
    return tuple(
        Call(SCALING, operation, {key: values[key] for key in SCALING_KEYS[operation] if key in values})
        for operation, values in found
    )


def _named(aws: Aws, name: str, kind: str, noun: str, buckets: set[str]) -> dict[str, dict[str, Any]]:
    """The deployment's models or configurations. Adds the buckets named in their tags to `buckets`."""
    pattern = re.compile(re.escape(name) + rf"-[0-9a-f]{{{DIGEST_LENGTH}}}")
    found = {}
    for each in aws.pages("sagemaker", f"list_{noun}s", f"{kind}s", NameContains=name):
        own_name = each[f"{kind}Name"]
        tags = tags_of(aws, each[f"{kind}Arn"]) if pattern.fullmatch(own_name) else {}
        if tags.get(OWNER_TAG) == name:
            found[own_name] = aws.call("sagemaker", f"describe_{noun}", **{f"{kind}Name": own_name})
            buckets |= {tags[BUCKET_TAG]} if BUCKET_TAG in tags else set()
    return found


def _objects(aws: Aws, bucket: str, name: str, account: str) -> list[Stored] | None:
    """Objects under the deployment's prefix, with old versions and unfinished uploads; None if there is no bucket."""
    prefix = prefix_of(name)
    matches = re.compile(re.escape(prefix) + rf"(target|drafter)-[0-9a-f]{{{DIGEST_LENGTH}}}/").match
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
    return [each for each in found if matches(each.key)]


def unused(found: Found) -> Found:
    """The resources that the endpoint does not use."""
    kept = config_of(found.endpoint or {})
    variants = found.configs.get(kept, {}).get("ProductionVariants", ())
    kept_models = {variant.get("ModelName") for variant in variants}
    places = [place for name in kept_models if name in found.models for place in sources(found.models[name])]
    return Found(
        found.name,
        found.account,
        configs={name: config for name, config in found.configs.items() if name != kept},
        models={name: model for name, model in found.models.items() if name not in kept_models},
        objects=tuple(each for each in found.objects if not f"s3://{each.bucket}/{each.key}".startswith(tuple(places))),
    )


def sources(model: Mapping[str, Any]) -> list[str]:
    """The S3 prefixes that a model reads."""
    container = model.get("PrimaryContainer", {})
    several = [container.get("ModelDataSource"), *(container.get("AdditionalModelDataSources") or ())]
    return [source["S3DataSource"]["S3Uri"] for source in several if source]


def removal(found: Found) -> tuple[Call, ...]:
    """The calls that remove everything found. After an interruption the rest can still be found.

    Models go last of the tagged resources, because their tags name the bucket.
    """
    calls = scaling_removal(found.scaling)
    if found.endpoint is not None:
        endpoint = {"EndpointName": found.name}
        calls.append(Call("sagemaker", "delete_endpoint", endpoint))
        calls.append(Call("sagemaker", "describe_endpoint", endpoint, until="gone"))
    owner = {"ExpectedBucketOwner": found.account}
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
        for at in range(0, len(entries), OBJECTS_PER_CALL):
            batch = {"Objects": entries[at : at + OBJECTS_PER_CALL], "Quiet": True}
            calls.append(Call("s3", "delete_objects", {"Bucket": bucket, "Delete": batch} | owner))
    calls += [Call("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name}) for name in found.configs]
    calls += [Call("sagemaker", "delete_model", {"ModelName": name}) for name in found.models]
    if found.own_bucket is not None:
        calls.append(Call("s3", "delete_bucket", {"Bucket": found.own_bucket} | owner))
    return tuple(calls)


def scaling_removal(scaling: Sequence[Call]) -> list[Call]:
    """The calls that undo those of `find_scaling`: policies first, then their target."""
    undo = {"register_scalable_target": "deregister_scalable_target", "put_scaling_policy": "delete_scaling_policy"}
    names = ("PolicyName", *scaled(""))
    return [
        Call(SCALING, undo[call.operation], {name: call.parameters[name] for name in names if name in call.parameters})
        for call in reversed(scaling)
    ]
