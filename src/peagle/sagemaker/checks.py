"""Checks before anything is created: role, instance type, quota, image, bucket.

A check that the caller lacks permission for is skipped and reported; the deployment continues.
"""

import logging
from collections.abc import Iterable
from typing import Any

from peagle.errors import ConfigError, DeployError, nearest
from peagle.sagemaker.aws import Aws, AwsError
from peagle.sagemaker.images import read_image
from peagle.sagemaker.plan import OWNER_TAG, Deployment, account_and_role

log = logging.getLogger(__name__)

PRINCIPAL = "sagemaker.amazonaws.com"


def check_instance(instance: str, known: Iterable[str]) -> None:
    """Refuse an instance type that endpoints do not support."""
    known = tuple(known)
    if instance in known:
        return
    hint = f"add ml.: --instance ml.{instance}" if f"ml.{instance}" in known else nearest(instance, known)
    if len(hint) > 200:
        hint = "for example ml.g6e.2xlarge"
    raise ConfigError(f"--instance {instance}: SageMaker endpoints do not support it", hint=hint)


def preflight(aws: Aws, deployment: Deployment) -> None:
    """Refuse what cannot work."""
    check_instance(deployment.instance, aws.instance_types())
    account = aws.call("sts", "get_caller_identity")["Account"]
    if account != deployment.account:
        raise ConfigError(
            f"the role belongs to account {deployment.account}, but you are signed in to {account}",
            hint="pass a role of that account, or choose another account with --profile",
        )
    for name, check in (("role", check_role), ("quota", check_quota), ("image", check_image), ("bucket", check_bucket)):
        try:
            check(aws, deployment)
        except AwsError as error:
            if not error.is_denied and not error.is_missing:
                raise
            log.info("skipped the %s check: %s", name, error.message)


def check_role(aws: Aws, deployment: Deployment) -> None:
    """Refuse a role that does not exist or that SageMaker cannot assume."""
    arn, (_, name) = deployment.role, account_and_role(deployment.role)
    found = aws.find("iam", "get_role", RoleName=name)
    if found is None:
        raise ConfigError(f"--role: no role {name}", hint="create it, or pass another")
    role = found["Role"]
    if role["Arn"] != arn:
        raise ConfigError(f"--role {arn}: the ARN of {name} is {role['Arn']}", hint="pass that ARN")
    document = role.get("AssumeRolePolicyDocument")
    if isinstance(document, dict) and not trusts_sagemaker(document):
        raise ConfigError(
            f"--role: SageMaker cannot assume {name}: its trust policy does not name {PRINCIPAL}",
            hint=f"allow {PRINCIPAL} to call sts:AssumeRole in its trust policy",
        )


def trusts_sagemaker(document: dict[str, Any]) -> bool:
    def as_list(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    for statement in as_list(document.get("Statement", [])):
        principal = statement.get("Principal", {})
        services = ["*"] if principal == "*" else as_list(principal.get("Service", []))
        actions = as_list(statement.get("Action", []))
        matches = any(action in ("*", "sts:*", "sts:AssumeRole") for action in actions)
        if statement.get("Effect") == "Allow" and matches and (PRINCIPAL in services or "*" in services):
            return True
    return False


def check_quota(aws: Aws, deployment: Deployment) -> None:
    """Refuse more instances than the account's quota. AWS does not say how many are already in use."""
    name, scaling = f"{deployment.instance} for endpoint usage", deployment.scaling
    needed = max(deployment.num_instances, scaling.max_instances if scaling else 0)
    quotas = aws.pages("service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker")
    quota = next((quota for quota in quotas if quota["QuotaName"] == name), None)
    if quota is not None and quota["Value"] < needed:
        raise DeployError(
            f"the account's quota is {quota['Value']:g} x {deployment.instance} for endpoints in {aws.region}, "
            f"but {needed} are needed",
            hint=f"request more: aws service-quotas request-service-quota-increase --service-code sagemaker "
            f"--quota-code {quota['QuotaCode']} --desired-value {needed}",
        )


def check_image(aws: Aws, deployment: Deployment) -> None:
    image = read_image(deployment.image, deployment.region)
    wanted = {"imageDigest": image["digest"]} if image["digest"] else {"imageTag": image["tag"]}
    place: dict[str, Any] = {"registryId": image["registry"], "repositoryName": image["repository"]}
    answer = aws.find("ecr", "batch_get_image", imageIds=[wanted], **place)
    if answer is None or not answer.get("images"):
        raise ConfigError(f"no image {deployment.image}", hint="check --image, or push the image first")


def check_bucket(aws: Aws, deployment: Deployment) -> None:
    """Refuse a bucket that does not exist or belongs to another account."""
    if not deployment.uploads:
        return
    place = {"Bucket": deployment.bucket_name, "ExpectedBucketOwner": deployment.account}
    try:
        if aws.find("s3", "head_bucket", **place) is None and deployment.bucket is not None:
            raise ConfigError(f"no bucket {deployment.bucket}", hint="create it, or omit --bucket")
    except AwsError as error:
        if not error.is_denied or deployment.bucket is not None:
            raise
        raise DeployError(
            f"cannot access the bucket {deployment.bucket_name}: it is another account's, or access is denied",
            hint="pass one of your buckets with --bucket",
        ) from error


def tags_of(aws: Aws, arn: str) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in aws.pages("sagemaker", "list_tags", "Tags", ResourceArn=arn)}


def is_owned(aws: Aws, arn: str, deployment: str) -> bool:
    """Whether a resource is tagged with the deployment."""
    return tags_of(aws, arn).get(OWNER_TAG) == deployment
