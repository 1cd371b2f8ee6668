"""Facts about AWS's vLLM containers and instance types that no API call returns."""

import re

from peagle.errors import ConfigError
from peagle.vllm.command import Installed

VLLM_TAG = "server-sagemaker-cuda-v2.2"
"""vLLM 0.26.0 on CUDA 13."""
VLLM_RELEASES = {
    "server-sagemaker-cuda-v2.2": "0.26.0",
    "server-sagemaker-cuda-v2.4": "0.27.1",
    "server-sagemaker-cuda-v2.6": "0.30.0",
}
"""vLLM versions of tags that do not name one."""
FIRST_WITH_LISTS = (2, 4)
"""Earlier AWS images pass a JSON list to vLLM as a single word."""
VLLM_REPOSITORY = "vllm"
USUAL_REGISTRY = "763104351884"
OTHER_REGISTRIES = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
}
"""Regions with their own registry account."""

GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""Driver 580. CUDA 13 images do not start on the default driver."""

_SMALL = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")
_USUAL = dict.fromkeys(_SMALL, 1) | {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
GPUS = {
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "g4dn": dict.fromkeys(_SMALL, 1) | {"12xlarge": 4},
    "g5": _USUAL,
    "g6": _USUAL,
    "g6e": _USUAL,
    "g7e": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    **{family: {"24xlarge": 8} for family in ("p4d", "p4de")},
    **{family: {"48xlarge": 8} for family in ("p5e", "p5en", "p6-b200", "p6-b300")},
}
"""GPUs per instance, by family and size."""

_GPU_FAMILY = re.compile(r"[gp]\d")
_NEURON_FAMILY = re.compile(r"(inf|trn)\d")
_ECR = re.compile(
    r"(?P<registry>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?"
    r"/(?P<repository>[a-z0-9._/-]+)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def vllm_image(region: str, tag: str = VLLM_TAG) -> str:
    """Address of AWS's vLLM container.

    >>> vllm_image("eu-west-1")
    '763104351884.dkr.ecr.eu-west-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.2'
    """
    host = f"{OTHER_REGISTRIES.get(region, USUAL_REGISTRY)}.dkr.ecr.{region}.amazonaws.com"
    return f"{host}{'.cn' if region.startswith('cn-') else ''}/{VLLM_REPOSITORY}:{tag}"


def vllm_tag(tag: str | None, *, is_aws: bool) -> str:
    """The AWS tag to take vLLM's version from; for a custom image whose tag says nothing, the default."""
    return tag if tag and (is_aws or _version(tag)) else VLLM_TAG


def vllm_release(tag: str) -> Installed:
    """The vLLM in an AWS image.

    >>> vllm_release("0.21.0-gpu-py312-cu130-ubuntu22.04-sagemaker-v1.4").version
    '0.21.0'
    """
    version = _version(tag)
    if version is None:
        raise ConfigError(
            f"--image {tag}: unknown vLLM version", hint=f"known tags: {', '.join(VLLM_RELEASES)}, or VERSION-..."
        )
    return Installed(version)


def _version(tag: str) -> str | None:
    match = re.match(r"\d+\.\d+(\.\d+)?(?=-|$)", tag)
    return VLLM_RELEASES.get(tag) or (match[0] if match else None)


def reads_lists(tag: str) -> bool:
    """Whether an AWS image splits a JSON list into words.

    >>> reads_lists("server-sagemaker-cuda-v2.2"), reads_lists("server-sagemaker-cuda-v2.10")
    (False, True)
    """
    match = re.fullmatch(r"server-sagemaker-cuda-v(\d+)\.(\d+)", tag)
    return match is not None and (int(match[1]), int(match[2])) >= FIRST_WITH_LISTS


def read_image(address: str, region: str) -> dict[str, str | None]:
    """The parts of an image address, named as in `_ECR`. SageMaker pulls only from ECR in the endpoint's region."""
    match = _ECR.fullmatch(address)
    if match is None:
        raise ConfigError(
            f"--image {address}: SageMaker only pulls images from Amazon ECR",
            hint=f"push it there: ACCOUNT.dkr.ecr.{region}.amazonaws.com/NAME:TAG",
        )
    if match["region"] != region:
        raise ConfigError(
            f"--image is in {match['region']}, but the endpoint is in {region}",
            hint=f"push it to {region}, or deploy with --region {match['region']}",
        )
    if match["tag"] is None and match["digest"] is None:
        raise ConfigError(
            f"--image {address} has neither a tag nor a digest", hint="add one: the deployed version must be fixed"
        )
    return match.groupdict()


def num_gpus(instance: str) -> int | None:
    """GPUs of an instance type such as ml.g6e.12xlarge; None if it has GPUs but the number is unknown."""
    _, family, size = instance.split(".")
    if _NEURON_FAMILY.match(family):
        raise ConfigError(
            f"--instance {instance} has AWS accelerators, which neither engine supports",
            hint="choose NVIDIA GPUs, for example ml.g6e.2xlarge",
        )
    if not _GPU_FAMILY.match(family):
        return 0
    return GPUS.get(family, {}).get(size)
