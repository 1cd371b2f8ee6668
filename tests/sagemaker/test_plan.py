"""What is decided before anything is created: names, variables, images, calls; and streams put together again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.sagemaker_runtime import IMAGE, REGION, ROLE, vllm_arguments
from peagle.errors import ConfigError
from peagle.sagemaker.checks import check_instance, trusts_sagemaker
from peagle.sagemaker.conventions import read_conventions, variables
from peagle.sagemaker.files import read_directory
from peagle.sagemaker.images import num_gpus, read_image, reads_lists, vllm_image, vllm_release, vllm_tag
from peagle.sagemaker.plan import Deployment, Rolling, check_environment, plan_deploy, plan_update
from peagle.server.sse import EventSplitter, data_of
from peagle.vllm.command import DrafterFacts, Installed, VllmSettings, command

DRAFTER = DrafterFacts("amazon/GPT-OSS-20B-P-EAGLE", parallel=True, trained_draft_tokens=10)
SETTINGS = VllmSettings("openai/gpt-oss-20b", ("chat", "gpt-oss-20b"), DRAFTER, 7, tensor_parallel_size=2)
VLLM = Installed("0.26.0")


def deployment(**changes: object) -> Deployment:
    settings = {"name": "chat", "region": REGION, "role": ROLE, "image": f"{IMAGE}:1", "instance": "ml.g5.xlarge"}
    return Deployment(**settings | {"environment": {"SM_VLLM_MODEL": "org/name"}} | changes)


def test_variables_mean_the_command_line_that_vllm_would_be_started_with():
    """Read back by the published rules for AWS's container."""
    environment = variables(SETTINGS, "vllm", VLLM, {}, is_uploaded=False)
    words = vllm_arguments(environment, None)
    _, _, target, *flags = command(SETTINGS, VLLM).words
    expected = ["--port", "8080", "--model", target]
    assert words[:4] == expected
    assert sorted(words[4:]) == sorted(flags)
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0", "parallel drafting needs the first model runner"


def test_own_server_takes_the_same_variables():
    asked = {"SM_VLLM_MAX_NUM_SEQS": "16", "SM_VLLM_DTYPE": "half", "SM_VLLM_ENFORCE_EAGER": "true"}
    read = read_conventions(variables(SETTINGS, "native", VLLM, asked, is_uploaded=False))
    assert read.target == "openai/gpt-oss-20b" and read.drafter == DRAFTER.model and read.num_draft_tokens == 7
    assert read.server["served_model_name"] == ("chat", "gpt-oss-20b") and read.dtype == "float16"
    assert read.engine == {"max_batch": 16, "eager": True} and read.unmatched == ()
    plain = replace(SETTINGS, num_draft_tokens=0)
    for config, complaint in (
        ('{"draft_tensor_parallel_size": 2}', "--env SM_VLLM_SPECULATIVE_CONFIG conflicts with the options"),
        ("x", "SM_VLLM_SPECULATIVE_CONFIG is not valid JSON"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            variables(plain, "native", VLLM, {"SM_VLLM_SPECULATIVE_CONFIG": config}, is_uploaded=True)


def test_options_of_vllm_are_taken_in_and_what_depends_on_them_fits():
    asked = {"SM_VLLM_MAX_NUM_SEQS": "64", "SM_VLLM_ENFORCE_EAGER": "true", "SM_VLLM_QUANTIZATION": "fp8", "TZ": "UTC"}
    found = variables(SETTINGS, "vllm", VLLM, asked, is_uploaded=True)
    assert "SM_VLLM_MODEL" not in found, "the files are at /opt/ml/model"
    assert found["SM_VLLM_MAX_NUM_BATCHED_TOKENS"] == str(8192 + 6 * 64), "placeholders of 64 requests, not of 256"
    assert found["SM_VLLM_QUANTIZATION"] == "fp8" and found["SM_VLLM_ENFORCE_EAGER"] == "true" and found["TZ"] == "UTC"


@pytest.mark.parametrize("engine", ["vllm", "native"])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("MODEL", "use --target"),
        ("SERVED_MODEL_NAME", "requests name the model by the endpoint's NAME; choose that"),
        ("PORT", "SageMaker always calls port 8080"),
        ("API_KEY", "callers authenticate with IAM"),
        ("HF_TOKEN", "use --upload-models"),
    ],
)
def test_variables_that_are_decided_elsewhere_are_refused_with_what_this_command_has(engine, name, remedy):
    with pytest.raises(ConfigError, match=f"--env SM_VLLM_{name} cannot be set") as caught:
        variables(SETTINGS, engine, VLLM, {f"SM_VLLM_{name}": "x"}, is_uploaded=False)
    assert remedy in str(caught.value)


def test_an_option_of_vllm_that_is_switched_off_is_off():
    def words(**asked: str) -> list[str]:
        given = {f"SM_VLLM_{name}": value for name, value in asked.items()}
        return vllm_arguments(variables(SETTINGS, "vllm", Installed("0.32.0"), given, is_uploaded=False), None)

    assert "--enable-prefix-caching" in words() and "--enable-per-request-metrics" in words()
    found = words(ENABLE_PREFIX_CACHING="False ", ENABLE_PER_REQUEST_METRICS="false", ENFORCE_EAGER="false")
    assert "--no-enable-prefix-caching" in found and "--enable-prefix-caching" not in found
    assert "--enable-per-request-metrics" not in found and "--enforce-eager" not in found
    for name in ("MAX_NUM_SEQS", "SPECULATIVE_CONFIG"):
        with pytest.raises(ConfigError, match="takes one value, got 0"):
            words(**{name: "false"})


def test_an_image_that_makes_one_word_of_a_list_gets_one_name_and_no_lists():
    found = variables(SETTINGS, "vllm", VLLM, {}, is_uploaded=False, reads_lists=False)
    assert found["SM_VLLM_SERVED_MODEL_NAME"] == "chat", "the endpoint's"
    asked = {"SM_VLLM_LORA_MODULES": '["a=x", "b=y"]'}
    with pytest.raises(ConfigError, match="--env SM_VLLM_LORA_MODULES is a list") as caught:
        variables(SETTINGS, "vllm", VLLM, asked, is_uploaded=False, reads_lists=False)
    assert "--image server-sagemaker-cuda-v2.4" in str(caught.value)
    assert variables(SETTINGS, "vllm", VLLM, asked, is_uploaded=False)["SM_VLLM_LORA_MODULES"] == '["a=x", "b=y"]'
    tags = {
        "server-sagemaker-cuda-v2.2": False,
        "server-sagemaker-cuda-v2.4": True,
        "server-sagemaker-cuda-v2.10": True,
    }
    tags |= {"server-sagemaker-cuda-v3.0": True, "0.21.0-gpu-py312-cu130-ubuntu22.04-sagemaker-v1.4": False}
    assert {tag: reads_lists(tag) for tag in tags} == tags


def test_a_list_that_vllm_reads_as_json_stays_one_word():
    asked = {"SM_VLLM_ALLOWED_ORIGINS": '["https://a"]'}
    for known in (True, False):
        found = variables(SETTINGS, "vllm", VLLM, asked, is_uploaded=False, reads_lists=known)
        assert found["SM_VLLM_ALLOWED_ORIGINS"] == '["https://a"]'


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "SM_VLLM_API_KEY", "PEAGLE_API_KEYS", "X_PASSWORD"],
)
def test_credentials_are_refused_as_variables(name):
    with pytest.raises(ConfigError, match=f"the variable {name} looks like a credential") as caught:
        check_environment({name: "x"})
    assert "--upload-models" in str(caught.value)


def test_credentials_are_known_by_their_look_too_and_options_about_tokens_are_not_refused():
    for value in ("hf_" + "a" * 34, "AKIA" + "A" * 16):
        with pytest.raises(ConfigError, match="looks like a credential") as caught:
            check_environment({"OTHER": value})
        assert value not in str(caught.value)
    check_environment(
        {"SM_VLLM_MAX_NUM_BATCHED_TOKENS": "1", "SM_VLLM_TOKENIZER": "x", "SM_VLLM_TOKENIZER_MODE": "auto"}
    )


def test_limits_of_sagemaker_are_checked_before_it_does():
    check_environment({"A": "x" * 1024})
    with pytest.raises(
        ConfigError, match="the value of the variable A has 1025 characters, more than SageMaker's limit of 1024"
    ):
        check_environment({"A": "x" * 1025})
    with pytest.raises(ConfigError, match="101 environment variables exceed SageMaker's limit of 100"):
        check_environment({f"A{i}": "" for i in range(101)})
    for name in ("openai/gpt-oss", "-a", "a_b", "a" * 55, ""):
        with pytest.raises(ConfigError, match="is not a valid endpoint name"):
            deployment(name=name)
    with pytest.raises(ConfigError, match="is not the ARN of a role"):
        deployment(role="MyRole")
    with pytest.raises(ConfigError, match="--tags aws:x: the prefixes aws: and peagle: are reserved"):
        deployment(tags=("aws:x=y",))
    with pytest.raises(ConfigError, match="go together"):
        deployment(subnets=("subnet-1",))
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        deployment(num_instances=0)
    with pytest.raises(ConfigError, match="--max-instances is 1, below --num-instances 2"):
        deployment(num_instances=2, max_instances=1)


def test_names_follow_from_contents(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    one = deployment(drafter=read_directory("drafter", tmp_path))
    assert deployment(drafter=read_directory("drafter", tmp_path)).config_name == one.config_name
    (tmp_path / "config.json").write_text("[]")
    other = deployment(drafter=read_directory("drafter", tmp_path))
    assert other.model_name != one.model_name and other.config_name != one.config_name
    assert deployment(num_instances=2).model_name == deployment().model_name, "the number is the configuration's"
    assert deployment(num_instances=2).config_name != deployment().config_name
    assert deployment(tags=("team=a",)).config_name == deployment().config_name, "tags say nothing about what runs"
    assert len(deployment(name="a" * 54).config_name) == 63


def test_directories_without_a_config_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_directory("target", tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        read_directory("target", tmp_path / "none")


def test_rolling_keeps_to_sagemakers_rules():
    assert "BlueGreenUpdatePolicy" in Rolling().as_config(1), "one instance cannot be rolled"
    policy = Rolling("2", alarms=("slow",)).as_config(4)
    assert policy["RollingUpdatePolicy"]["MaximumBatchSize"] == {"Type": "INSTANCE_COUNT", "Value": 2}
    assert policy["AutoRollbackConfiguration"] == {"Alarms": [{"AlarmName": "slow"}]}
    with pytest.raises(ConfigError, match="at most half of the 3 instances, got 2"):
        Rolling("2").as_config(3)
    with pytest.raises(ConfigError, match="between 5% and 50%, got 60%"):
        Rolling("60%")
    with pytest.raises(ConfigError, match="a number such as 2, or between 5% and 50%, got few"):
        Rolling("few")
    percent = Rolling("25%").as_config(4)["RollingUpdatePolicy"]["MaximumBatchSize"]
    assert percent == {"Type": "CAPACITY_PERCENT", "Value": 25}
    update = plan_update(deployment(max_instances=2), Rolling(), 1)
    (change,) = [call for call in update if call.operation == "update_endpoint"]
    assert change.parameters["RetainAllVariantProperties"], "the number that scaling has chosen stays"


def test_images_and_instances():
    assert vllm_image("us-west-2").startswith("763104351884.dkr.ecr.us-west-2.amazonaws.com/vllm:")
    assert vllm_image("cn-north-1").startswith("727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/vllm:")
    assert read_image(vllm_image("eu-south-1"), "eu-south-1")["registry"] == "692866216735"
    with pytest.raises(ConfigError, match="--image is in us-west-2, but the endpoint is in us-east-1"):
        read_image(vllm_image("us-west-2"), "us-east-1")
    with pytest.raises(ConfigError, match="only pulls images from Amazon ECR"):
        read_image("docker.io/me/peagle:1", REGION)
    with pytest.raises(ConfigError, match="neither a tag nor a digest"):
        read_image(IMAGE, REGION)
    counts = {"ml.g6e.2xlarge": 1, "ml.g5.12xlarge": 4, "ml.p5.48xlarge": 8, "ml.g7e.12xlarge": 2, "ml.m5.xlarge": 0}
    assert {instance: num_gpus(instance) for instance in counts} == counts
    assert num_gpus("ml.g7.48xlarge") is None
    with pytest.raises(ConfigError, match="AWS accelerators"):
        num_gpus("ml.inf2.xlarge")
    with pytest.raises(ConfigError, match="--image latest: unknown vLLM version"):
        vllm_release("latest")
    assert vllm_tag("1", is_aws=False) == vllm_tag(None, is_aws=False) == "server-sagemaker-cuda-v2.2"
    assert vllm_tag("0.21.0", is_aws=False) == "0.21.0" and vllm_tag("latest", is_aws=True) == "latest"
    with pytest.raises(ConfigError, match="do not support it") as caught:
        check_instance("g6e.2xlarge", ["ml.g6e.2xlarge"])
    assert "--instance ml.g6e.2xlarge" in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "is_trusted"),
    [
        ({"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}, True),
        ({"Effect": "Allow", "Principal": {"Service": ["a", "sagemaker.amazonaws.com"]}, "Action": ["sts:*"]}, True),
        ({"Effect": "Deny", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}, False),
        ({"Effect": "Allow", "Principal": {"AWS": "arn:aws:iam::1:root"}, "Action": "sts:AssumeRole"}, False),
        ({"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:TagSession"}, False),
    ],
)
def test_trust_policies_are_read(statement, is_trusted):
    assert trusts_sagemaker({"Statement": statement}) == is_trusted
    assert trusts_sagemaker({"Statement": [statement]}) == is_trusted


def test_plan_is_plain_json():
    for call in plan_deploy(deployment(max_instances=3, subnets=("s",), security_groups=("g",), metrics=True)):
        assert json.loads(json.dumps(call.as_json())) == call.as_json()


TEXTS = st.lists(st.text(alphabet="aé\U0001f600\u2028:{} \t", min_size=1, max_size=8), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(1, 9), min_size=1))
def test_events_are_the_same_wherever_the_stream_is_cut(texts, end, cuts):
    whole = "".join(f": comment{end}{end}data: {text}{end}{end}" for text in texts).encode()
    splitter, found, at, turn = EventSplitter(), list[str](), 0, 0
    while at < len(whole):
        size = cuts[turn % len(cuts)]
        found += [data.decode() for each in splitter.feed(whole[at : at + size]) if (data := data_of(each)) is not None]
        at, turn = at + size, turn + 1
    assert found == texts and not splitter.rest
