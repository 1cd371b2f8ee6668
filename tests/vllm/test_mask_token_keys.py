"""A P-EAGLE drafter is recognised as one whichever key its config has the mask token under."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.command_line import peagle as peagle
from harness.drafter_passes import card_for
from harness.tiny_models import tiny_drafter, tiny_target, write_target
from peagle.checkpoint.native import save_drafter
from peagle.vllm.command import Installed
from peagle.vllm.form import in_vllm_form
from peagle.vllm.models import facts_of, find_models

SPELLINGS = {
    "mask_token_id": {"mask_token_id": 9},
    "pard_token": {"pard_token": 9},
    "ptd_token_id": {"ptd_token_id": 9},
    "dflash": {"dflash_config": {"mask_token_id": 9}},
    "dspark_noise_token_id": {"dspark_noise_token_id": 9},
    "unused_token_id": {"unused_token_id": 9},
    "eagle_config": {"eagle_config": {"ptd_token_id": 9}},
    "parallel_drafting": {"parallel_drafting": True},
}
KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
ROLE = "arn:aws:iam::123456789012:role/sagemaker"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "target"
    write_target(tiny_target(), directory)
    return directory


@pytest.fixture(params=SPELLINGS)
def drafter(request, tmp_path):
    """A directory in vLLM's layout with one spelling of the mask token; its weights are not downloaded yet."""
    model = tiny_target()
    made = tiny_drafter(model, mask_token_id=9)
    save_drafter(made, tmp_path / "drafter", card_for(model, made), full=True, dtype=torch.float32)
    path = tmp_path / "drafter" / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key not in KEYS}
    eagle = values.pop("eagle_config") | SPELLINGS[request.param].get("eagle_config", {})
    path.write_text(json.dumps(values | SPELLINGS[request.param] | {"eagle_config": eagle}))
    return tmp_path / "drafter"


def test_the_config_alone_tells_that_it_is_parallel(drafter):
    (drafter / "model.safetensors").unlink()
    assert facts_of(drafter).parallel is True


def test_deploy_vllm_drafts_in_parallel(peagle, drafter, target, monkeypatch, tmp_path):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    if "parallel_drafting" in json.loads((drafter / "config.json").read_text()):
        pytest.skip("it is converted first, which needs the token itself")
    tensors = load_file(drafter / "model.safetensors")
    save_file({f"draft_model.{name}": tensor for name, tensor in tensors.items()}, drafter / "model.safetensors")
    result = peagle("deploy", "vllm", target, "--drafter", drafter)
    assert result.status == 0, result.err
    assert '"parallel_drafting": true' in result.out or '"parallel_drafting":true' in result.out


def test_deploy_sagemaker_drafts_in_parallel(peagle, drafter, target, monkeypatch, tmp_path):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    if "parallel_drafting" in json.loads((drafter / "config.json").read_text()):
        pytest.skip("it is converted first, which needs the token itself")
    result = peagle(
        "deploy", "sagemaker", "chat", "--target", target, "--drafter", drafter, "--role", ROLE, "--region",
        "us-west-2", "--instance", "ml.g6e.2xlarge", "--engine", "vllm", "--dry-run",
    )  # fmt: skip
    assert result.status == 0, result.err
    assert "parallel_drafting" in result.out


def test_serve_gives_vllm_a_key_it_reads(drafter, target, monkeypatch, tmp_path):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    if "parallel_drafting" in json.loads((drafter / "config.json").read_text()):
        pytest.skip("it is converted first, which needs the token itself")
    found = in_vllm_form(find_models(str(target), str(drafter)), Installed("0.32.0"))
    assert found.drafter is not None and found.drafter.parallel
    values = json.loads(((tmp_path / found.drafter.model) / "config.json").read_text())
    is_read = any(key in values for key in (*KEYS, "dspark_noise_token_id", "dflash_config"))
    assert is_read, "vLLM refuses a parallel drafter without a mask token"
