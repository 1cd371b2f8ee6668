"""Everything that AWS tells before something is created: names, roles, instances, quotas, images, buckets.

What may not be asked is not a reason to stop: it is returned as a sentence, and the deployment goes on.
"""

from collections.abc import Iterable
from typing import Any

from peagle.deploy.sagemaker.aws import Aws, AwsError
from peagle.deploy.sagemaker.images import read_image
from peagle.deploy.sagemaker.plan import OWNER_TAG, Deployment, account_and_role
from peagle.errors import ConfigError, DeployError, nearest

PRINCIPAL = "sagemaker.amazonaws.com"


def check_instance(instance: str, known: Iterable[str]) -> None:
    """Refuse an instance type that no endpoint can have, by the service's description."""
    known = tuple(known)
    if instance in known:
        return
    hint = f"add ml.: --instance ml.{instance}" if f"ml.{instance}" in known else nearest(instance, known)
    if len(hint) > 200:
        hint = "for example ml.g6e.2xlarge"
    raise ConfigError(f"--instance {instance}: SageMaker has no endpoints on it", hint=hint)


def preflight(aws: Aws, deployment: Deployment) -> list[str]:
    """Refuse what cannot work. Returns what could not be checked."""
    check_instance(deployment.instance, aws.instance_types())
    check_identity(aws, deployment)
    skipped = [
        check_role(aws, deployment.role),
        check_quota(aws, deployment),
        check_image(aws, deployment),
        check_bucket(aws, deployment),
    ]
    return [sentence for sentence in skipped if sentence is not None]


def check_identity(aws: Aws, deployment: Deployment) -> None:
    account = aws.call("sts", "get_caller_identity")["Account"]
    if account != deployment.account:
        raise ConfigError(
            f"the role is of the account {deployment.account}, but you are signed in to {account}",
            hint="give a role of that account, or choose another with --profile",
        )


def check_role(aws: Aws, arn: str) -> str | None:
    """Refuse a role that does not exist or that SageMaker may not take."""
    _, name = account_and_role(arn)
    try:
        role = aws.call("iam", "get_role", RoleName=name)["Role"]
    except AwsError as error:
        if error.is_denied:
            return f"the role was not checked: {error.message}"
        if error.is_missing:
            raise ConfigError(f"--role: there is no role {name}", hint="create it, or give another") from error
        raise
    if role["Arn"] != arn:
        raise ConfigError(f"--role {arn}: the role {name} is {role['Arn']}", hint="give that")
    document = role.get("AssumeRolePolicyDocument")
    if isinstance(document, dict) and not trusts_sagemaker(document):
        raise ConfigError(
            f"--role: SageMaker may not take the role {name}: its trust policy does not name {PRINCIPAL}",
            hint=f"let the service {PRINCIPAL} call sts:AssumeRole in its trust policy",
        )
    return None


def trusts_sagemaker(document: dict[str, Any]) -> bool:
    """Whether a trust policy lets SageMaker take the role."""

    def listed(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    for statement in listed(document.get("Statement", [])):
        principal = statement.get("Principal", {})
        services = ["*"] if principal == "*" else listed(principal.get("Service", []))
        actions = listed(statement.get("Action", []))
        is_meant = any(action in ("*", "sts:*", "sts:AssumeRole") for action in actions)
        if statement.get("Effect") == "Allow" and is_meant and (PRINCIPAL in services or "*" in services):
            return True
    return False


def check_quota(aws: Aws, deployment: Deployment) -> str | None:
    """Refuse more instances than the account may have at all. How many are in use elsewhere, AWS does not tell."""
    name = f"{deployment.instance} for endpoint usage"
    try:
        quotas = aws.pages("service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker")
        quota = next((quota for quota in quotas if quota["QuotaName"] == name), None)
    except AwsError as error:
        if error.is_denied or error.is_missing:
            return f"the quota was not checked: {error.message}"
        raise
    if quota is None:
        return f"the quota was not checked: there is none called {name!r}"
    scaling = deployment.scaling
    needed = max(deployment.num_instances, scaling.max_instances if scaling else 0)
    if quota["Value"] < needed:
        raise DeployError(
            f"the account may have {quota['Value']:g} of {deployment.instance} behind endpoints in {aws.region}, "
            f"and {needed} are asked for",
            hint=f"ask for more: aws service-quotas request-service-quota-increase --service-code sagemaker "
            f"--quota-code {quota['QuotaCode']} --desired-value {needed}",
        )
    return None


def check_image(aws: Aws, deployment: Deployment) -> str | None:
    image = read_image(deployment.image, deployment.region)
    wanted = {"imageDigest": image.digest} if image.digest else {"imageTag": image.tag}
    try:
        answer = aws.call(
            "ecr",
            "batch_get_image",
            registryId=image.registry,
            repositoryName=image.repository,
            imageIds=[wanted],
        )
        is_there = bool(answer.get("images"))
    except AwsError as error:
        if error.is_denied:
            return f"the image was not checked: {error.message}"
        if not error.is_missing:
            raise
        is_there = False
    if not is_there:
        raise ConfigError(
            f"there is no image {deployment.image}", hint="check --image or --vllm-tag, or push the image first"
        )
    return None


def check_bucket(aws: Aws, deployment: Deployment) -> str | None:
    """Refuse a given bucket that does not exist, or one of anybody else's."""
    if not deployment.uploads:
        return None
    try:
        aws.call("s3", "head_bucket", Bucket=deployment.bucket_name, ExpectedBucketOwner=deployment.account)
    except AwsError as error:
        if error.is_missing and deployment.bucket is None:
            return None
        if error.is_missing:
            raise ConfigError(
                f"there is no bucket {deployment.bucket}", hint="create it, or leave --bucket out"
            ) from error
        if error.is_denied and deployment.bucket is None:
            raise DeployError(
                f"the bucket {deployment.bucket_name} cannot be used: it is another account's, or may not be read",
                hint="give one of your own with --bucket",
            ) from error
        if error.is_denied:
            return f"the bucket was not checked: {error.message}"
        raise
    return None


def tags_of(aws: Aws, arn: str) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in aws.pages("sagemaker", "list_tags", "Tags", ResourceArn=arn)}


def is_owned(aws: Aws, arn: str, deployment: str) -> bool:
    """Whether something carries the tag of a deployment."""
    return tags_of(aws, arn).get(OWNER_TAG) == deployment
