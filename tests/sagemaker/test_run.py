"""Deploying, changing, calling and removing an endpoint, against AWS's stand-ins."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.sagemaker_runtime import ACCOUNT, IMAGE, REGION, ROLE
from peagle.errors import DeployError
from peagle.sagemaker.aws import Aws, AwsError
from peagle.sagemaker.files import read_directory
from peagle.sagemaker.found import look
from peagle.sagemaker.plan import Call, Deployment, Rolling, plan_deploy
from peagle.sagemaker.run import Operator

BUCKET = f"peagle-sagemaker-{ACCOUNT}-{REGION}"
NOTHING = {"models": [], "configs": [], "endpoints": [], "targets": [], "policies": [], "objects": [], "buckets": []}


def drafter_files(directory: Path, content: str = "weights") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text(content)
    (directory / ".hidden").write_text("stays behind")
    return directory


def deployment(tmp_path: Path, **changes: object) -> Deployment:
    drafter = read_directory("drafter", drafter_files(tmp_path / "drafter"))
    settings = {
        "environment": {"SM_VLLM_MODEL": "org/name"},
        "drafter": drafter,
        "num_instances": 2,
        "max_instances": 4,
        "target_concurrency": 6.0,
        "smoke_test": False,
    }
    place = {"name": "chat", "region": REGION, "role": ROLE, "image": f"{IMAGE}:1", "instance": "ml.g5.xlarge"}
    return Deployment(**place | settings | changes)


def operator(aws: Aws) -> Operator:
    return Operator(aws, "chat")


def expected(made: Deployment) -> dict:
    assert made.drafter is not None and made.scaling is not None
    prefix = f"{BUCKET}/peagle/chat/drafter-{made.drafter.digest}/"
    return {
        "models": [made.model_name],
        "configs": [made.config_name],
        "endpoints": [("chat", "InService", made.config_name)],
        "targets": [("endpoint/chat/variant/AllTraffic", made.scaling.min_instances, made.scaling.max_instances)],
        "policies": [("chat-concurrency", made.scaling.concurrency)],
        "objects": [f"{prefix}config.json", f"{prefix}model.safetensors"],
        "buckets": [BUCKET],
    }


class Interrupting(Aws):
    """Stops with Ctrl-C before or after the n-th call that changes something."""

    def __init__(self, aws: Aws, number: int, when: str = "after") -> None:
        vars(self).update(vars(aws))  # its clients too: making them takes longer than all the calls
        self.left, self.when, self.changed = number, when, list[str]()

    def call(self, service: str, operation: str, **parameters: object) -> dict:
        if operation.startswith(("describe", "list", "get", "head", "batch", "invoke")):
            return super().call(service, operation, **parameters)
        self.left -= 1
        if self.left < 0 and self.when == "before":
            raise KeyboardInterrupt
        self.changed.append(operation)
        answer = super().call(service, operation, **parameters)
        if self.left < 0:
            raise KeyboardInterrupt
        return answer


def test_a_deployment_is_made_asked_and_removed_without_a_trace(cloud, aws, tmp_path):
    made = deployment(tmp_path, smoke_test=True)
    answer = operator(aws).deploy(made)
    assert cloud.state() == expected(made)
    assert answer is not None and answer.finish_reason in ("stop", "length"), "the smoke test streams to the end"
    assert answer.usage is not None and answer.usage["completion_tokens"] > 0
    assert answer.acceptance_length is not None and answer.acceptance_length >= 1
    assert cloud.invoked == ["chat"]
    model = cloud.client("sagemaker").describe_model(ModelName=made.model_name)
    source = model["PrimaryContainer"]["AdditionalModelDataSources"][0]
    assert source["ChannelName"] == "draft_model"
    assert source["S3DataSource"]["S3Uri"] == f"s3://{BUCKET}/peagle/chat/drafter-{made.drafter.digest}/"
    operator(aws).delete(look(aws, "chat"))
    assert cloud.state() == NOTHING


def test_deploying_twice_changes_nothing(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    operator(aws).deploy(made)
    counted = Interrupting(aws, 100)
    operator(counted).deploy(made)
    assert counted.changed == ["register_scalable_target", "put_scaling_policy"], "which say the same again"
    assert cloud.state() == expected(made)


CHANGES = (
    "create_bucket",
    "upload_file",
    "upload_file",
    "create_model",
    "create_endpoint_config",
    "create_endpoint",
    "register_scalable_target",
    "put_scaling_policy",
)


def places(calls: tuple[str, ...]) -> list:
    """Where a command may be interrupted; `make test` tries every third place."""
    return [number if number % 3 == 2 else pytest.param(number, marks=pytest.mark.slow) for number in range(len(calls))]


def interrupted(aws: Interrupting, act) -> list[str]:
    with pytest.raises(KeyboardInterrupt):
        act(operator(aws))
    return aws.changed


@pytest.mark.parametrize("number", places(CHANGES))
def test_a_deploy_that_was_interrupted_is_finished_by_the_same_command_or_removed(cloud, aws, tmp_path, number):
    made = deployment(tmp_path)
    done = interrupted(Interrupting(aws, number), lambda operator: operator.deploy(made))
    assert tuple(done) == CHANGES[: number + 1]
    operator(aws).deploy(made)
    assert cloud.state() == expected(made)

    cloud.reset()
    interrupted(Interrupting(aws, number), lambda operator: operator.deploy(made))
    operator(aws).delete(look(aws, "chat"))
    assert cloud.state() == NOTHING


REMOVALS = (
    "delete_scaling_policy",
    "deregister_scalable_target",
    "delete_endpoint",
    "delete_objects",
    "delete_endpoint_config",
    "delete_model",
    "delete_bucket",
)


@pytest.mark.parametrize("number", places(REMOVALS))
def test_a_delete_that_was_interrupted_is_finished_by_the_same_command(cloud, aws, tmp_path, number):
    operator(aws).deploy(deployment(tmp_path))
    act = Interrupting(aws, number)
    done = interrupted(act, lambda operator: operator.delete(look(aws, "chat")))
    assert tuple(done) == REMOVALS[: number + 1]
    operator(aws).delete(look(aws, "chat"))
    assert cloud.state() == NOTHING


def test_a_given_bucket_is_emptied_of_ours_and_kept(cloud, aws, tmp_path):
    cloud.client("s3").create_bucket(Bucket="their-bucket")
    cloud.client("s3").put_object(Bucket="their-bucket", Key="peagle/chat/notes.txt", Body=b"not ours")
    made = deployment(tmp_path, bucket="their-bucket")
    interrupted(Interrupting(aws, 1), lambda operator: operator.deploy(made))
    assert look(aws, "chat").is_nothing, "no tag tells of that bucket yet"
    assert len(look(aws, "chat", "their-bucket").objects) == 2
    operator(aws).deploy(made)
    interrupted(Interrupting(aws, 3, "before"), lambda operator: operator.delete(look(aws, "chat")))
    assert len(look(aws, "chat").objects) == 2, "models still tell where the objects lie"
    operator(aws).delete(look(aws, "chat"))
    state = cloud.state()
    assert state["objects"] == ["their-bucket/peagle/chat/notes.txt"] and state["buckets"] == ["their-bucket"]
    assert not state["models"] and not state["configs"]


def test_unfinished_uploads_and_old_versions_are_removed_too(cloud, aws, tmp_path):
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="versions")
    s3.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    made = deployment(tmp_path, bucket="versions")
    operator(aws).deploy(made)
    key = f"{made.drafter.prefix('chat')}model.safetensors"
    s3.put_object(Bucket="versions", Key=key, Body=b"weights")
    s3.create_multipart_upload(Bucket="versions", Key=key)
    operator(aws).delete(look(aws, "chat"))
    assert "Versions" not in s3.list_object_versions(Bucket="versions")
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="versions")


def test_other_deployments_keep_what_is_theirs(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    other = replace(made, name="chat-two", max_instances=None)
    operator(aws).deploy(made)
    Operator(aws, "chat-two").deploy(other)
    operator(aws).delete(look(aws, "chat"))
    state = cloud.state()
    assert state["models"] == [other.model_name] and state["configs"] == [other.config_name]
    assert [name for name, *_ in state["endpoints"]] == ["chat-two"]
    assert len(state["objects"]) == 2 and state["buckets"] == [BUCKET], "the bucket is still used"
    Operator(aws, "chat-two").delete(look(aws, "chat-two"))
    assert cloud.state() == NOTHING


def better(tmp_path: Path, made: Deployment, **changes: object) -> Deployment:
    drafter = read_directory("drafter", drafter_files(tmp_path / "better", "better weights"))
    return replace(made, drafter=drafter, **changes)


def test_an_update_rolls_over_and_removes_what_was_replaced(cloud, aws, tmp_path):
    operator(aws).deploy(deployment(tmp_path))
    new = better(tmp_path, deployment(tmp_path), image=f"{IMAGE}:2", max_instances=3, target_concurrency=9.0)
    assert operator(aws).update(replace(new, smoke_test=True), Rolling()) is not None, "it is asked something"
    assert cloud.state() == expected(new)


UPDATES = (
    "upload_file",
    "upload_file",
    "create_model",
    "create_endpoint_config",
    "add_tags",
    "delete_scaling_policy",
    "deregister_scalable_target",
    "update_endpoint",
    "delete_tags",
    "register_scalable_target",
    "put_scaling_policy",
    "delete_objects",
    "delete_endpoint_config",
    "delete_model",
)


@pytest.mark.parametrize("number", places(UPDATES))
def test_an_update_that_was_interrupted_is_finished_by_the_same_command(cloud, aws, tmp_path, number):
    operator(aws).deploy(deployment(tmp_path))
    new = better(tmp_path, deployment(tmp_path), instance="ml.g6e.2xlarge")
    done = interrupted(Interrupting(aws, number), lambda operator: operator.update(new, Rolling()))
    assert tuple(done) == UPDATES[: number + 1], "scaling pauses where the instance type changes: AWS refuses otherwise"
    operator(aws).update(new, Rolling())
    assert cloud.state() == expected(new)


def test_one_instance_is_replaced_by_its_successor(cloud, aws, tmp_path):
    made = deployment(tmp_path, num_instances=1, max_instances=None)
    operator(aws).deploy(made)
    new = replace(made, image=f"{IMAGE}:2")
    operator(aws).update(new, Rolling())
    assert cloud.state()["endpoints"] == [("chat", "InService", new.config_name)]


def test_an_update_without_scaling_takes_it_away(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    operator(aws).deploy(made)
    operator(aws).update(replace(made, max_instances=None, image=f"{IMAGE}:2"), Rolling())
    state = cloud.state()
    assert state["targets"] == [] and state["policies"] == []


def test_an_update_that_is_rolled_back_leaves_what_was_served(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    operator(aws).deploy(made)
    before = cloud.state()
    with pytest.raises(
        DeployError, match=r"was rolled back; the endpoint serves the old settings.*ping health check"
    ) as caught:
        operator(aws).update(better(tmp_path, made, image=f"{IMAGE}:broken"), Rolling())
    assert "/aws/sagemaker/Endpoints/chat" in str(caught.value)
    assert cloud.state() == before


def test_scaling_is_back_after_an_update_to_another_instance_type_was_rolled_back(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    operator(aws).deploy(made)
    before = cloud.state()
    broken = replace(made, image=f"{IMAGE}:broken", instance="ml.g6e.2xlarge")
    with pytest.raises(DeployError, match="rolled back; the endpoint serves the old settings"):
        operator(aws).update(broken, Rolling())
    assert before["policies"] and cloud.state() == before


def endpoint_tags(cloud) -> list[str]:
    arn = cloud.client("sagemaker").describe_endpoint(EndpointName="chat")["EndpointArn"]
    return sorted({tag["Key"] for tag in cloud.client("sagemaker").list_tags(ResourceArn=arn)["Tags"]})


PAUSE = UPDATES[UPDATES.index("add_tags") : UPDATES.index("update_endpoint") + 1]


@pytest.mark.parametrize(
    ("last", "looks"),
    [*(pytest.param(each, 0, marks=pytest.mark.slow) for each in PAUSE), ("update_endpoint", 8)],
)
def test_scaling_is_back_after_an_update_that_was_interrupted_and_rolled_back(cloud, aws, tmp_path, last, looks):
    """`last` is the call it was interrupted after. It is gone on with at once, or when it has been rolled back."""
    made = deployment(tmp_path)
    operator(aws).deploy(made)
    before, tags = cloud.state(), endpoint_tags(cloud)
    broken = replace(made, image=f"{IMAGE}:broken", instance="ml.g6e.2xlarge")
    number = UPDATES.index(last) - 2  # nothing is uploaded here
    done = interrupted(Interrupting(aws, number), lambda operator: operator.update(broken, Rolling()))
    assert done[-1] == last
    for _ in range(looks):
        cloud.client("sagemaker").describe_endpoint(EndpointName="chat")
    with pytest.raises(DeployError, match="rolled back; the endpoint serves the old settings"):
        operator(aws).update(broken, Rolling())
    assert before["policies"] and cloud.state() == before
    assert endpoint_tags(cloud) == tags, "nothing is left behind"


def test_who_may_not_remove_tags_can_still_update(cloud, aws, tmp_path):
    class Denied(Interrupting):
        def call(self, service: str, operation: str, **parameters: object) -> dict:
            if operation == "delete_tags":
                raise AwsError(operation, "AccessDeniedException", "not allowed")
            return Aws.call(self, service, operation, **parameters)

    made = deployment(tmp_path)
    operator(aws).deploy(made)
    new = replace(made, instance="ml.g6e.2xlarge", max_instances=None)
    operator(Denied(aws, 0)).update(new, Rolling())
    with pytest.raises(DeployError, match="rolled back"):
        operator(aws).update(replace(new, image=f"{IMAGE}:broken"), Rolling())
    assert not cloud.state()["targets"], "scaling that was given up does not come back"


def test_scaling_whose_tags_were_edited_is_told(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    operator(aws).deploy(made)
    arn = cloud.client("sagemaker").describe_endpoint(EndpointName="chat")["EndpointArn"]
    cloud.client("sagemaker").add_tags(ResourceArn=arn, Tags=[{"Key": "peagle:paused-scaling-0", "Value": "9:what"}])
    with pytest.raises(DeployError, match=r"cannot read the paused scaling in the tags peagle:paused-scaling-\* of"):
        operator(aws).update(replace(made, instance="ml.g6e.2xlarge"), Rolling())
    assert cloud.state()["policies"], "nothing was taken away"


def test_scaling_that_was_set_up_by_hand_comes_back_whole(cloud, aws, tmp_path):
    operator(aws).deploy(deployment(tmp_path))
    scaling = cloud.client("application-autoscaling")
    place = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/chat/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    metric = {"MetricName": "Load", "Namespace": "Own", "Statistic": "Average"}
    for number in range(3):
        goal = {"TargetValue": 10.0 + number, "CustomizedMetricSpecification": metric}
        scaling.put_scaling_policy(
            PolicyName=f"own-{number}", PolicyType="TargetTrackingScaling",
            TargetTrackingScalingPolicyConfiguration=goal, **place,
        )  # fmt: skip
    before = cloud.state()
    broken = replace(deployment(tmp_path), image=f"{IMAGE}:broken", instance="ml.g6e.2xlarge")
    number = UPDATES.index("delete_scaling_policy") - 2 + 1
    interrupted(Interrupting(aws, number), lambda operator: operator.update(broken, Rolling()))
    assert len(cloud.state()["policies"]) == 2, "two of four are gone"
    with pytest.raises(DeployError, match="rolled back"):
        operator(aws).update(broken, Rolling())
    assert sorted(cloud.state()["policies"]) == sorted(before["policies"])


def test_scaling_is_back_after_an_update_to_another_instance_type_was_refused(cloud, aws, tmp_path):
    class Refusing(Interrupting):
        def call(self, service: str, operation: str, **parameters: object) -> dict:
            if operation == "update_endpoint":
                raise AwsError(operation, "ResourceLimitExceeded", "no more of them")
            return Aws.call(self, service, operation, **parameters)

    operator(aws).deploy(deployment(tmp_path))
    before = cloud.state()
    with pytest.raises(DeployError, match="AWS refused update_endpoint"):
        operator(Refusing(aws, 0)).update(replace(deployment(tmp_path), instance="ml.g6e.2xlarge"), Rolling())
    state = cloud.state()
    assert before["policies"] and all(state[key] == before[key] for key in ("endpoints", "targets", "policies"))


def test_a_failed_smoke_test_says_that_the_endpoint_is_billed_and_how_it_ends(cloud, aws, tmp_path):
    class Mute(Interrupting):
        def call(self, service: str, operation: str, **parameters: object) -> dict:
            if operation.startswith("invoke"):
                raise AwsError(operation, "ModelError", "out of memory")
            return Aws.call(self, service, operation, **parameters)

    made = deployment(tmp_path, smoke_test=True)
    with pytest.raises(DeployError, match=r"the endpoint chat is InService, but .* out of memory") as caught:
        operator(Mute(aws, 0)).deploy(made)
    assert "it is still running and billed" in str(caught.value)
    assert "peagle deploy sagemaker delete chat" in str(caught.value)
    assert "/aws/sagemaker/Endpoints/chat" in str(caught.value)
    assert cloud.state() == expected(made)


def test_an_endpoint_that_fails_says_why_and_is_replaced_by_the_next_attempt(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    with pytest.raises(
        DeployError, match=r"the endpoint chat is Failed: .* did not pass the ping health check"
    ) as caught:
        operator(aws).deploy(replace(made, image=f"{IMAGE}:broken"))
    assert "`peagle deploy sagemaker delete chat` removes everything" in str(caught.value)
    operator(aws).deploy(made)
    assert cloud.state() == expected(made)


def test_a_busy_endpoint_is_removed_when_it_no_longer_is(cloud, aws, tmp_path):
    interrupted(Interrupting(aws, 5), lambda operator: operator.deploy(deployment(tmp_path)))
    found = look(aws, "chat")
    assert found.endpoint["EndpointStatus"] == "Creating"
    operator(aws).delete(found)
    assert cloud.state() == NOTHING


def test_deploying_over_other_settings_points_to_update(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    operator(aws).deploy(made)
    before = cloud.state()
    with pytest.raises(DeployError, match="exists with different settings") as caught:
        operator(aws).deploy(better(tmp_path, made))
    assert "peagle deploy sagemaker update chat" in str(caught.value)
    assert cloud.state() == before


def test_an_update_needs_an_endpoint_that_is_at_rest(cloud, aws, tmp_path):
    made = deployment(tmp_path)
    with pytest.raises(DeployError, match="no endpoint chat in us-east-1"):
        operator(aws).update(made, Rolling())
    interrupted(Interrupting(aws, 5), lambda operator: operator.deploy(made))
    with pytest.raises(DeployError, match="chat is Creating and cannot be updated now"):
        operator(aws).update(replace(made, image=f"{IMAGE}:2"), Rolling())


def test_a_wait_that_takes_too_long_can_be_gone_on_with(cloud, aws, tmp_path, monkeypatch):
    made = deployment(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("peagle.sagemaker.run.LIMIT_SECONDS", 0)
        with pytest.raises(DeployError, match="is still Creating after 0 minutes") as caught:
            operator(aws).deploy(made)
    assert "rerun the command to keep waiting" in str(caught.value)
    operator(aws).deploy(made)
    assert cloud.state() == expected(made)


def test_calls_are_what_the_dry_run_says(cloud, aws, tmp_path):
    made, sent = deployment(tmp_path, smoke_test=True), list[Call]()

    class Recording(Interrupting):
        def call(self, service: str, operation: str, **parameters: object) -> dict:
            parameters = {name: value for name, value in parameters.items() if name != "Callback"}
            sent.append(Call(service, operation, parameters))
            return Aws.call(self, service, operation, **parameters)

    operator(Recording(aws, 0)).deploy(made)
    at = 0
    for call in plan_deploy(made):
        plain = Call(call.service, call.operation, call.parameters)
        assert plain in sent[at:], f"{call.operation} as planned, and in that order"
        at = sent.index(plain, at) + 1
