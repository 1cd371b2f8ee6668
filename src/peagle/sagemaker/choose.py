"""Turn the user's options into a deployment: image, uploads, environment, host. Creates nothing at AWS."""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from peagle.checkpoint.pairing import target_of
from peagle.errors import ConfigError
from peagle.sagemaker.checks import check_instance
from peagle.sagemaker.conventions import (
    DRAFT_DIRECTORY,
    MODEL_DIRECTORY,
    PREFIX,
    SPECULATION,
    Engine,
    variables,
    without_speculation,
)
from peagle.sagemaker.files import Upload, read_directory
from peagle.sagemaker.images import GPU_AMI, num_gpus, read_image, reads_lists, vllm_image, vllm_release, vllm_tag
from peagle.sagemaker.plan import MAX_STARTUP_SECONDS, STARTUP_SECONDS, Deployment, Host, read_pairs
from peagle.targets.catalog import CatalogEntry, find
from peagle.vllm.command import VllmSettings
from peagle.vllm.form import check_target, in_vllm_form
from peagle.vllm.models import Models, find_models

log = logging.getLogger(__name__)

ROLE_VARIABLE = "PEAGLE_SAGEMAKER_ROLE"
LARGE_GB = 60
"""A target of this size or of unknown size gets SageMaker's maximum startup time."""


@dataclass(frozen=True)
class Serving:
    """What to serve."""

    target: str | None = None
    """catalog name, Hugging Face id, or a directory to upload; default: NAME, if the catalog has it, else the
    target on the drafter's card"""
    drafter: str | None = None
    """directory to upload, Hugging Face id, or catalog variant; default: the catalog's"""
    num_draft_tokens: int | None = None
    """draft tokens per step; 0 turns speculation off; default: the number recommended for the drafter"""
    max_length: int | None = None
    """most tokens per request, prompt plus answer; also selects between short- and long-context drafters"""
    allow_mismatch: bool = False
    """accept a drafter trained for a different tokenizer or chat template"""
    upload_models: bool = False
    """download Hugging Face models here, with your access, and upload them to S3 (gated models, isolated networks)"""
    image: str | None = None
    """image in your ECR (see deploy/container), or the tag of an AWS vLLM container; default: a tested AWS tag"""
    engine: Literal["auto", "vllm", "native"] = "auto"
    """engine in the image; auto: vllm for AWS's container, native (peagle's own) for your image"""
    env: tuple[str, ...] = ()
    """extra environment variables, NAME=VALUE; SM_VLLM_* are vLLM options. No credentials"""


def choose(
    name: str, region: str, serving: Serving, host: Host, instances: Iterable[str], *, smoke_test: bool = True
) -> Deployment:
    """Decide everything. Reads local directories, and converts the drafter to vLLM's layout if the engine needs it.

    `instances` lists the instance types that endpoints support.
    """
    serving, given = _with_speculation(serving, read_pairs("--env", serving.env))
    role = host.role or os.environ.get(ROLE_VARIABLE)
    if not role:
        raise ConfigError(
            "no execution role", hint=f"pass --role arn:aws:iam::ACCOUNT:role/NAME, or set {ROLE_VARIABLE}"
        )
    if serving.target is None and serving.drafter is not None and find(name) is None:
        serving = replace(serving, target=target_of(serving.drafter))
    entry = find(serving.target or name)
    if serving.target is None and entry is None:
        raise ConfigError(
            f"the catalog has no target {name!r}", hint="pass --target; `peagle catalog` lists the known ones"
        )
    instance = host.instance or (entry.instance if entry else None)
    if instance is None:
        raise ConfigError("no instance type", hint="pass --instance, for example --instance ml.g6e.2xlarge")
    check_instance(instance, instances)
    gpus = num_gpus(instance)
    engine, image = _engine_and_image(region, serving, instance, gpus)
    tag = vllm_tag(read_image(image, region)["tag"], is_aws=serving.image is None or "/" not in serving.image)
    models, target, drafter = _models(name, serving, engine, tag)
    _check_isolation(host, models, target, drafter)
    settings = _settings(name, serving, models, target, drafter, _tensor_parallel(given, engine, gpus))
    environment = variables(
        settings, engine, vllm_release(tag), given, is_uploaded=target is not None, reads_lists=reads_lists(tag)
    )
    return Deployment(
        **vars(host) | {"role": role, "instance": instance},
        name=name,
        region=region,
        image=image,
        environment=environment,
        target=target,
        drafter=drafter,
        ami=GPU_AMI if gpus != 0 else None,
        startup_seconds=_startup_seconds(entry, target),
        smoke_test=smoke_test,
    )


def _with_speculation(serving: Serving, given: Mapping[str, str]) -> tuple[Serving, dict[str, str]]:
    """Options and variables, with what --env SM_VLLM_SPECULATIVE_CONFIG says among the options."""
    asked, given = without_speculation(given)
    if None not in (asked.drafter, serving.drafter) and asked.drafter != serving.drafter:
        raise ConfigError(
            f"--env {SPECULATION} names the drafter {asked.drafter}, but --drafter is {serving.drafter}",
            hint="name one drafter",
        )
    number = asked.draft_tokens(serving.num_draft_tokens)
    return replace(serving, drafter=serving.drafter or asked.drafter, num_draft_tokens=number), given


def _engine_and_image(region: str, serving: Serving, instance: str, gpus: int | None) -> tuple[Engine, str]:
    is_aws = serving.image is None or "/" not in serving.image
    engine: Engine = serving.engine if serving.engine != "auto" else "vllm" if is_aws else "native"
    if not is_aws:
        assert serving.image is not None
        return engine, serving.image
    if engine == "native":
        raise ConfigError(
            "AWS has no image with peagle's own engine",
            hint="build deploy/container, push it to ECR and pass it as --image",
        )
    if gpus == 0:
        raise ConfigError(
            f"--instance {instance} has no GPU, and AWS's vLLM container needs one",
            hint="choose a GPU instance, or pass your own CPU image with --image",
        )
    return engine, vllm_image(region, *([serving.image] if serving.image else []))


def _startup_seconds(entry: CatalogEntry | None, target: Upload | None) -> int:
    """Time limit for the download, and again for the start."""
    num_gb = None if entry is None else entry.vllm_gb(entry.drafter())
    if target is not None:
        num_gb = target.num_bytes / 1e9
    return STARTUP_SECONDS if num_gb is not None and num_gb < LARGE_GB else MAX_STARTUP_SECONDS


def _models(name: str, serving: Serving, engine: Engine, tag: str) -> tuple[Models, Upload | None, Upload | None]:
    """The models, and the directories to upload for them."""
    from peagle.targets.hub import fetch

    asked = serving.target or name
    models = find_models(
        asked,
        serving.drafter,
        wants_drafter=serving.num_draft_tokens != 0,
        max_length=serving.max_length,
        here=serving.upload_models,
    )
    if models.drafter is None and serving.num_draft_tokens != 0:
        raise ConfigError(
            f"no drafter is known for {asked}",
            hint="pass --drafter, or --num-draft-tokens 0 to serve without speculation",
        )
    directory = models.directory
    if directory is None and serving.upload_models:
        directory = fetch(models.target, what="target")
    target = None if directory is None else read_directory("target", directory)
    if models.drafter is None:
        return models, target, None
    files = Path(models.drafter.model)
    if not files.is_dir():
        if not serving.upload_models:
            return models, target, None
        files = fetch(models.drafter.model, what="drafter")
    if engine == "native":
        check_target(files, models, serving.allow_mismatch, with_weights=True)
        return models, target, read_directory("drafter", files)
    models = in_vllm_form(models, vllm_release(tag), allow_mismatch=serving.allow_mismatch, compare_weights=True)
    if models.drafter is not None and Path(models.drafter.model).is_dir():
        files = Path(models.drafter.model)
    return models, target, read_directory("drafter", files)


def _check_isolation(host: Host, models: Models, target: Upload | None, drafter: Upload | None) -> None:
    needed = models.target if target is None else None
    if models.drafter is not None and drafter is None:
        needed = needed or models.drafter.model
    if host.network_isolation and needed is not None:
        raise ConfigError(f"--network-isolation: the container cannot download {needed}", hint="add --upload-models")


def _tensor_parallel(given: Mapping[str, str], engine: Engine, gpus: int | None) -> int:
    """GPUs that share the target: all of the instance's, unless --env sets vLLM's own option."""
    variable = f"{PREFIX}TENSOR_PARALLEL_SIZE"
    if engine == "native":
        if gpus and gpus > 1:
            log.warning("the instance has %d GPUs; peagle's own engine uses one", gpus)
        return 1
    try:
        size = int(given.get(variable, gpus or 1))
    except ValueError:
        raise ConfigError(f"--env {variable} must be a whole number, got {given[variable]!r}") from None
    if gpus is None and variable not in given:
        log.warning("the number of GPUs of this instance type is unknown; using one (set --env %s=N)", variable)
    if size < 1 or (gpus is not None and size > gpus):
        raise ConfigError(f"--env {variable} is {size}, but the instance has {gpus} GPUs")
    return size


def _settings(
    name: str, serving: Serving, models: Models, target: Upload | None, drafter: Upload | None, tensor_parallel: int
) -> VllmSettings:
    facts = models.drafter
    if facts is not None and drafter is not None:
        facts = replace(facts, model=DRAFT_DIRECTORY)
    return VllmSettings(
        MODEL_DIRECTORY if target is not None else models.target,
        (name,) if models.name == name else (name, models.name),
        facts,
        serving.num_draft_tokens,
        max_length=serving.max_length,
        tensor_parallel_size=tensor_parallel,
        target_max_length=models.max_length,
        is_hybrid=models.is_hybrid,
        num_heads=models.config.get("num_attention_heads"),
    )
