"""Scaling that an update has paused, kept in tags of the endpoint: a command that goes on finds it there again.

A tag's value has at most 256 characters and few signs, so the calls that set the scaling up again are packed and cut:

    peagle:paused-scaling-0    412:eNqdkE9rwzAMxe/7FMbn...
    peagle:paused-scaling-1    ...
"""

import base64
import json
import zlib
from collections.abc import Iterable

from peagle.deploy.sagemaker.aws import Aws, AwsError
from peagle.deploy.sagemaker.checks import tags_of
from peagle.deploy.sagemaker.plan import Call
from peagle.errors import DeployError

PAUSED_TAG = "peagle:paused-scaling-"
MAX_TAG = 256


def keep(aws: Aws, endpoint_arn: str, calls: Iterable[Call]) -> None:
    """Write the calls into the endpoint's tags, over those of an earlier pause."""
    plain = json.dumps([call.as_json() for call in calls])
    packed = base64.b64encode(zlib.compress(plain.encode())).decode()
    # A shorter text leaves the last tags of a longer one behind; its length says where it ends.
    text = f"{len(packed)}:{packed}"
    parts = [text[at : at + MAX_TAG] for at in range(0, len(text), MAX_TAG)]
    tags = [{"Key": f"{PAUSED_TAG}{index}", "Value": part} for index, part in enumerate(parts)]
    aws.call("sagemaker", "add_tags", ResourceArn=endpoint_arn, Tags=tags)


def kept(aws: Aws, endpoint_arn: str) -> tuple[Call, ...]:
    """The calls that the endpoint's tags hold; none where no scaling is paused."""
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
            f"the scaling in the tags {PAUSED_TAG}* of {endpoint_arn} cannot be read: {error}",
            hint="remove these tags; scaling that was paused must then be set up by hand",
        ) from error


def forget(aws: Aws, endpoint_arn: str) -> None:
    """Remove the tags, where there are any; who may not do that empties them."""
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
    """What an interrupted pause took away already and what is still there; of the same policy, what is there."""
    calls = {(call.operation, call.parameters.get("PolicyName")): call for call in (*earlier, *found)}
    # A policy needs the target that it belongs to.
    return tuple(sorted(calls.values(), key=lambda call: call.operation != "register_scalable_target"))


def _tags(aws: Aws, endpoint_arn: str) -> dict[str, str]:
    return {key: value for key, value in tags_of(aws, endpoint_arn).items() if key.startswith(PAUSED_TAG)}
