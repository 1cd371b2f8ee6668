"""AWS's vLLM container by region, and what its instances have: facts that no call tells before something is created."""

import re
from dataclasses import dataclass

from peagle.errors import ConfigError

VLLM_TAG = "server-sagemaker-cuda-v2.2"
"""vLLM 0.26.0 on CUDA 13."""
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
"""Regions whose deep learning containers lie in an account of their own."""

GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""Driver 580: images on CUDA 13 do not start on an instance's default driver."""

_SMALL = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")
_USUAL = dict.fromkeys(_SMALL, 1) | {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
GPUS = {
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "g4dn": dict.fromkeys(_SMALL, 1) | {"12xlarge": 4},
    "g5": _USUAL,
    "g6": _USUAL,
    "g6e": _USUAL,
    "g7e": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
}
"""GPUs of an instance by family and size."""

_GPU_FAMILY = re.compile(r"[gp]\d")
_NEURON_FAMILY = re.compile(r"(inf|trn)\d")
_ECR = re.compile(
    r"(?P<registry>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?"
    r"/(?P<repository>[a-z0-9._/-]+)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Image:
    """An image in Amazon's registry."""

    registry: str
    region: str
    repository: str
    tag: str | None
    digest: str | None


def vllm_image(region: str, tag: str = VLLM_TAG) -> str:
    """The address of AWS's vLLM container.

    >>> vllm_image("eu-west-1")
    '763104351884.dkr.ecr.eu-west-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.2'
    """
    host = f"{OTHER_REGISTRIES.get(region, USUAL_REGISTRY)}.dkr.ecr.{region}.amazonaws.com"
    return f"{host}{'.cn' if region.startswith('cn-') else ''}/{VLLM_REPOSITORY}:{tag}"


def read_image(address: str, region: str) -> Image:
    """The parts of an image's address; SageMaker pulls only from ECR, and from the endpoint's own region."""
    match = _ECR.fullmatch(address)
    if match is None:
        raise ConfigError(
            f"--image {address}: SageMaker takes images from Amazon ECR alone",
            hint=f"push it there: ACCOUNT.dkr.ecr.{region}.amazonaws.com/NAME:TAG",
        )
    image = Image(**match.groupdict())
    if image.region != region:
        raise ConfigError(
            f"--image lies in {image.region}, the endpoint in {region}",
            hint=f"push it to {region}, or deploy with --region {image.region}",
        )
    if image.tag is None and image.digest is None:
        raise ConfigError(f"--image {address} has neither a tag nor a digest", hint="name the version that is deployed")
    return image


def num_gpus(instance: str) -> int | None:
    """GPUs of an instance type such as ml.g6e.12xlarge; 0 without any, None where it has some but we do not know."""
    _, family, size = instance.split(".")
    if _NEURON_FAMILY.match(family):
        raise ConfigError(
            f"--instance {instance} has AWS's own accelerators, which neither engine runs on",
            hint="take one with NVIDIA GPUs, for example ml.g6e.2xlarge",
        )
    if not _GPU_FAMILY.match(family):
        return 0
    return GPUS.get(family, {}).get(size)
