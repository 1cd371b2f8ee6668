"""Autoscaling that an update has paused, saved in the endpoint's tags so that a rerun can restore it.

A tag value holds at most 256 characters, so the calls that restore the scaling are compressed and split:

    peagle:paused-scaling-0    412:eNqdkE9rwzAMxe/7FMbn...
    peagle:paused-scaling-1    ...
"""

import base64
import json
import zlib
from collections.abc import Iterable

from peagle.errors import DeployError
from peagle.sagemaker.aws import Aws, AwsError
from peagle.sagemaker.checks import tags_of
from peagle.sagemaker.plan import Call

PAUSED_TAG = "peagle:paused-scaling-"
MAX_TAG = 256


def keep(aws: Aws, endpoint_arn: str, calls: Iterable[Call]) -> None:
    """Write the calls into the endpoint's tags, replacing earlier ones."""
    plain = json.dumps([call.as_json() for call in calls])
    packed = base64.b64encode(zlib.compress(plain.encode())).decode()
    # A shorter text leaves the last tags of a longer one behind, so it starts with its length.
    text = f"{len(packed)}:{packed}"
    parts = [text[at : at + MAX_TAG] for at in range(0, len(text), MAX_TAG)]
    tags = [{"Key": f"{PAUSED_TAG}{index}", "Value": part} for index, part in enumerate(parts)]
    aws.call("sagemaker", "add_tags", ResourceArn=endpoint_arn, Tags=tags)


def kept(aws: Aws, endpoint_arn: str) -> tuple[Call, ...]:
    """The calls in the endpoint's tags; empty if no scaling is paused."""
    tags = _tags(aws, endpoint_arn)
    if not tags:
        return ()
    text = "".join(tags[key] for key in sorted(tags, key=lambda key: int(key.removeprefix(PAUSED_TAG))))
    length, _, packed = text.partition(":")
    try:
        plain = zlib.decompress(base64.b64decode(packed[: int(length)]))
        return tuple(Call(**values) for values in json.loads(plain))
    except (ValueError, TypeError, zlib.error) as error:
        raise DeployError(
            f"cannot read the paused scaling in the tags {PAUSED_TAG}* of {endpoint_arn}: {error}",
            hint="remove these tags, then set up scaling by hand",
        ) from error


def forget(aws: Aws, endpoint_arn: str) -> None:
    """Remove the tags; without permission to delete tags, empty them."""
    tags = _tags(aws, endpoint_arn)
    if not tags:
        return
    try:
        aws.call("sagemaker", "delete_tags", ResourceArn=endpoint_arn, TagKeys=sorted(tags))
    except AwsError as error:
        if not error.is_denied:
            raise
        keep(aws, endpoint_arn, ())


def together(earlier: Iterable[Call], found: Iterable[Call]) -> tuple[Call, ...]:
    """Merge the calls saved by an interrupted pause with what exists now; for the same policy, the latter wins."""
    calls = {(call.operation, call.parameters.get("PolicyName")): call for call in (*earlier, *found)}
    # A policy needs its target registered first.
    return tuple(sorted(calls.values(), key=lambda call: call.operation != "register_scalable_target"))


def _tags(aws: Aws, endpoint_arn: str) -> dict[str, str]:
    return {key: value for key, value in tags_of(aws, endpoint_arn).items() if key.startswith(PAUSED_TAG)}
