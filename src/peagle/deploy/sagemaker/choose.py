"""What the user asks for, and a deployment decided from it: image, files, variables, host. Creates nothing at AWS."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from peagle.deploy.sagemaker.checks import check_instance
from peagle.deploy.sagemaker.container import Engine, reads_lists, variables, vllm_release
from peagle.deploy.sagemaker.files import Upload, read_directory
from peagle.deploy.sagemaker.images import GPU_AMI, VLLM_TAG, num_gpus, read_image, vllm_image
from peagle.deploy.sagemaker.plan import DRAFT_DIRECTORY, MODEL_DIRECTORY, Deployment
from peagle.deploy.sagemaker.scaling import Scaling
from peagle.deploy.vllm import Launch
from peagle.deploy.vllm_form import check_texts, in_vllm_form
from peagle.deploy.vllm_models import Models, find_models
from peagle.errors import ConfigError
from peagle.targets.catalog import find

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """What is served."""

    target: str | None = None
    """catalog name, Hugging Face id, or a directory, which is uploaded; by default NAME, where the catalog has it"""
    drafter: str | None = None
    """directory, Hugging Face id or variant; by default the catalog's. A directory is uploaded"""
    num_draft_tokens: int | None = None
    """draft tokens a step; 0 decodes plainly; by default what the drafter's makers advise"""
    allow_mismatch: bool = False
    """use a drafter that was trained for another target's tokenizer or chat template"""
    upload_target: bool = False
    """fetch a Hugging Face target here, with your own access, and upload it (gated ones, isolated networks)"""
    upload_drafter: bool = False
    """the same for a drafter"""
    engine: Literal["auto", "vllm", "native"] = "auto"
    """what the image runs; auto: vllm for AWS's image, native for one of your own"""
    image: str | None = None
    """your own image in ECR (deploy/container has its Dockerfile); by default AWS's vLLM container"""
    vllm_tag: str = VLLM_TAG
    """which of AWS's vLLM containers"""
    max_length: int | None = None
    """most tokens of a request, prompt and answer; also picks between drafters for short and long texts"""
    tensor_parallel_size: int | None = None
    """GPUs that share the target; by default all of the instance"""
    env: tuple[str, ...] = ()
    """further variables of the container, NAME=VALUE; SM_VLLM_* are vLLM's options. No credentials"""


@dataclass(frozen=True)
class Host:
    """What it runs on."""

    role: str | None = None
    """ARN of the role that SageMaker takes to read the files and the image; by default PEAGLE_SAGEMAKER_ROLE"""
    instance: str | None = None
    """for example ml.g6e.2xlarge; by default the catalog's"""
    num_instances: int = 1
    """to begin with"""
    max_instances: int | None = None
    """scale automatically up to so many; without it the number stays"""
    min_instances: int | None = None
    """and down to so many; by default --num-instances"""
    target_concurrency: float = 8.0
    """requests in flight for each instance that the scaling aims at"""
    scale_in_seconds: int = 300
    """pause before instances are taken away again"""
    scale_out_seconds: int = 60
    """pause before more are added"""
    bucket: str | None = None
    """for uploads; by default one of our own, peagle-sagemaker-ACCOUNT-REGION"""
    ami: str = "auto"
    """host image; auto: on GPUs the one with a driver for CUDA 13; none: the instance's default"""
    startup_seconds: int = 1800
    """that the container may take until it is healthy (60 to 3600)"""
    download_seconds: int = 1800
    """that uploaded files may take to reach an instance (60 to 3600)"""
    volume_gb: int | None = None
    """disk, for instances without one of their own"""
    subnets: tuple[str, ...] = ()
    """of a VPC to attach to"""
    security_groups: tuple[str, ...] = ()
    """in that VPC"""
    network_isolation: bool = False
    """no network for the container: everything must be uploaded"""
    metrics: bool = False
    """have SageMaker scrape the container's /metrics, and publish its own every 10 s"""
    tags: tuple[str, ...] = ()
    """for everything that is created, KEY=VALUE"""

    def scaling(self) -> Scaling | None:
        if self.max_instances is None:
            if self.min_instances is not None:
                raise ConfigError("--min-instances needs --max-instances", hint="give both")
            return None
        least = self.num_instances if self.min_instances is None else self.min_instances
        return Scaling(
            least, self.max_instances, self.target_concurrency, self.scale_in_seconds, self.scale_out_seconds
        )


def choose(
    name: str,
    region: str,
    role: str,
    serving: Serving,
    host: Host,
    instances: Iterable[str],
    *,
    smoke_test: bool = True,
) -> Deployment:
    """Decide everything. Local directories are read, and a drafter is put into vLLM's form where the engine needs it.

    `instances` are the types that endpoints may have.
    """
    entry = find(serving.target or name)
    if serving.target is None and entry is None:
        raise ConfigError(
            f"the catalog has no target {name!r}",
            hint="give the target with --target; `peagle catalog` lists the known",
        )
    instance = host.instance or (entry.instance if entry else None)
    if instance is None:
        raise ConfigError("no instance type is given", hint="use --instance, for example --instance ml.g6e.2xlarge")
    check_instance(instance, instances)
    gpus = num_gpus(instance)
    engine: Engine = serving.engine if serving.engine != "auto" else "native" if serving.image else "vllm"
    image = serving.image or _aws_image(region, serving, engine, instance, gpus)
    read_image(image, region)
    models, target, drafter = _models(name, serving, engine)
    _check_isolation(host, models, target, drafter)
    environment = _environment(name, serving, engine, models, target, drafter, _tensor_parallel(serving, engine, gpus))
    ami = {"auto": GPU_AMI if gpus != 0 else None, "none": None}.get(host.ami, host.ami)
    return Deployment(
        name,
        region,
        role,
        host.bucket,
        image,
        instance,
        environment,
        target,
        drafter,
        num_instances=host.num_instances,
        scaling=host.scaling(),
        ami=ami,
        startup_seconds=host.startup_seconds,
        download_seconds=host.download_seconds,
        volume_gb=host.volume_gb,
        subnets=host.subnets,
        security_groups=host.security_groups,
        network_isolation=host.network_isolation,
        metrics=host.metrics,
        tags=read_pairs("--tags", host.tags),
        smoke_test=smoke_test,
    )


def _aws_image(region: str, serving: Serving, engine: Engine, instance: str, gpus: int | None) -> str:
    if engine == "native":
        raise ConfigError(
            "AWS has no image with our own engine",
            hint="build the one in deploy/container, push it to ECR and give it with --image",
        )
    if gpus == 0:
        raise ConfigError(
            f"--instance {instance} has no GPU, and AWS's vLLM container needs one",
            hint="take one with GPUs, or an image of your own (--image) that runs on CPUs",
        )
    return vllm_image(region, serving.vllm_tag)


def _models(name: str, serving: Serving, engine: Engine) -> tuple[Models, Upload | None, Upload | None]:
    """What is served, and the directories of it that are uploaded."""
    asked = serving.target or name
    models = find_models(
        asked,
        serving.drafter,
        wants_drafter=serving.num_draft_tokens != 0,
        max_length=serving.max_length,
        here=serving.upload_drafter,
    )
    if models.drafter is None and serving.num_draft_tokens != 0:
        raise ConfigError(
            f"no drafter is known for {asked}",
            hint="give one with --drafter, or --num-draft-tokens 0 to decode plainly",
        )
    directory = models.directory
    if directory is None and serving.upload_target:
        directory = _fetched(models.target, "target")
    target = None if directory is None else read_directory("target", directory)
    if models.drafter is None:
        return models, target, None
    files = Path(models.drafter.model)
    if not files.is_dir():
        if not serving.upload_drafter:
            return models, target, None
        files = _fetched(models.drafter.model, "drafter")
    if engine == "native":
        check_texts(files, models, serving.allow_mismatch)
        return models, target, read_directory("drafter", files)
    models = in_vllm_form(models, vllm_release(serving.vllm_tag), target=asked, allow_mismatch=serving.allow_mismatch)
    if models.drafter is not None and Path(models.drafter.model).is_dir():
        files = Path(models.drafter.model)
    return models, target, read_directory("drafter", files)


def _fetched(hub_id: str, what: Literal["target", "drafter"]) -> Path:
    from peagle.targets.hub import fetch

    return fetch(hub_id, what=what)


def _check_isolation(host: Host, models: Models, target: Upload | None, drafter: Upload | None) -> None:
    if not host.network_isolation:
        return
    if target is None:
        raise ConfigError(
            f"--network-isolation, but the container would have to fetch {models.target}", hint="add --upload-target"
        )
    if models.drafter is not None and drafter is None:
        raise ConfigError(
            f"--network-isolation, but the container would have to fetch {models.drafter.model}",
            hint="add --upload-drafter",
        )


def _tensor_parallel(serving: Serving, engine: Engine, gpus: int | None) -> int:
    """How many GPUs share the target."""
    size = serving.tensor_parallel_size
    if engine == "native":
        if size not in (None, 1):
            raise ConfigError(f"--tensor-parallel-size is {size}, but our own engine uses one GPU")
        if gpus and gpus > 1:
            log.warning("the instance has %d GPUs, our own engine uses one of them", gpus)
        return 1
    if size is None:
        size = gpus or 1
        if gpus is None:
            log.warning("how many GPUs the instance has is not known here: one is used, see --tensor-parallel-size")
    if size < 1 or (gpus is not None and size > gpus):
        raise ConfigError(f"--tensor-parallel-size is {size}, the instance has {gpus} GPUs")
    if gpus is not None and gpus > size:
        log.warning("%d of the instance's %d GPUs stay unused: see --tensor-parallel-size", gpus - size, gpus)
    return size


def _environment(
    name: str,
    serving: Serving,
    engine: Engine,
    models: Models,
    target: Upload | None,
    drafter: Upload | None,
    tensor_parallel_size: int,
) -> dict[str, str]:
    facts = models.drafter
    if facts is not None and drafter is not None:
        facts = replace(facts, model=DRAFT_DIRECTORY)
    launch = Launch(
        MODEL_DIRECTORY if target is not None else models.target,
        (name,) if models.name == name else (name, models.name),
        facts,
        serving.num_draft_tokens,
        max_length=serving.max_length,
        tensor_parallel_size=tensor_parallel_size,
        target_max_length=models.max_length,
        is_hybrid=models.is_hybrid,
    )
    given = read_pairs("--env", serving.env)
    tag = serving.vllm_tag
    return variables(
        launch, engine, vllm_release(tag), given, is_uploaded=target is not None, reads_lists=reads_lists(tag)
    )


def read_pairs(option: str, words: Iterable[str]) -> Mapping[str, str]:
    """NAME=VALUE words as a mapping."""
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} takes NAME=VALUE, got {word.split('=')[0]!r}")
        if name in pairs:
            raise ConfigError(f"{option} gives {name} twice")
        pairs[name] = value
    return pairs
