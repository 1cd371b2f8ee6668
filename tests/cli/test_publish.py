"""`peagle publish`, with the real client of the Hugging Face Hub against a stand-in of its API."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants, metadata_load

from harness.hub_server import TOKEN, hub_server
from peagle.checkpoint.native import load_drafter
from peagle.cli.publish import Arguments, publication_of
from peagle.report.model_card import model_card
from peagle.targets.catalog import ASSETS
from peagle.targets.load import load_target

# huggingface_hub sends files in a way that httpx calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

REPO = "acme/tiny-drafter"
KNOWN = ("--license", "apache-2.0", "--base-model", "acme/tiny")
SHIPPED = sorted(path.parent for path in ASSETS.glob("*/drafter_card.json"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture(scope="module")
def drafter(models, tmp_path_factory):
    """The tiny drafter with a measured card."""
    path = tmp_path_factory.mktemp("publish") / "drafter"
    shutil.copytree(models / "drafter", path)
    card = json.loads((path / "drafter_card.json").read_text())
    lengths = {"text": {"0-127": {"acceptance_length": 2.25, "num_drafts": 8}}}
    entry = {"kind": "decoded", "prompts": "mt_bench", "num_prompts": 80, "temperature": 0.0, "num_draft_tokens": 4}
    entry |= {"acceptance_length": 2.5, "per_position": [0.8, 0.4, 0.2, 0.1], "num_drafts": 900, "by_length": lengths}
    code = entry | {"prompts": "HumanEval", "acceptance_length": 3.25}
    card["acceptance"] = {"baseline": entry, "HumanEval at temperature 0": code}
    card["data"] = {"made_by": "regenerate", "num_conversations": 1200, "num_answer_tokens": 34567}
    earlier = {"num_steps": 20, "loss": "kl"}
    card["training"] = {"num_steps": 10, "loss": "ce", "from_drafter": {"training": earlier}}
    (path / "drafter_card.json").write_text(json.dumps(card))
    return path


@pytest.fixture(scope="module")
def published(drafter, models, tmp_path_factory):
    """What `--output` writes, once for all tests."""
    from peagle.cli.main import run

    output = tmp_path_factory.mktemp("publish") / "tiny-drafter"
    command = ["publish", drafter, "--output", output, *KNOWN, "--target", models / "target", "--dtype", "float32"]
    assert run([str(word) for word in command]) == 0
    return output


def test_the_output_has_weights_config_and_a_model_card(published, drafter, models):
    assert {path.name for path in published.iterdir()} == {
        "README.md", "config.json", "drafter_card.json", "model.safetensors",
    }  # fmt: skip
    target = load_target(models / "target", dtype="float32")
    assert load_drafter(published, target).config == load_drafter(drafter, target).config
    assert metadata_load(published / "README.md") == {
        "base_model": "acme/tiny",
        "library_name": "peagle",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "p-eagle", "eagle3", "vllm"],
    }
    text = (published / "README.md").read_text()
    for line in (
        "# tiny-drafter",
        "peagle serve acme/tiny --drafter tiny-drafter",
        """'{"method":"eagle3","model":"tiny-drafter","num_speculative_tokens":4,"parallel_drafting":true}'""",
        "peagle deploy sagemaker my-endpoint --target acme/tiny --drafter tiny-drafter \\",
        "| mt_bench, temperature 0 | 80 | 900 | 4 | 2.50 |",
        "| HumanEval, temperature 0 | 80 | 900 | 4 | 3.25 |",
        "| mt_bench, temperature 0 | 0.800 | 0.400 | 0.200 | 0.100 |",
        "Acceptance length by tokens of the text:\n\n| set | 0-127 |\n| --- | ---: |\n| mt_bench, temperature 0 | 2.25",
        "| 1 | 20 | - | - | kl | - | - | - |\n| 2 | 10 | - | - | ce | - | - | - |",
        "The target answered prompts from files (`peagle data regenerate`).",
        "| answer tokens | 34,567 |",
    ):
        assert line in text, line


def test_a_repository_gets_the_same_files_and_commands_that_name_it(peagle, hub, published):
    result = peagle("publish", published, "--repo", REPO, "--base-model", "acme/tiny", "--private")
    assert result.status == 0 and result.out.strip() == f"{hub.url}/{REPO}", result.err
    sent = hub.files[REPO]
    for name in ("config.json", "drafter_card.json", "model.safetensors"):
        assert sent[name] == (published / name).read_bytes()
    ours = (published / "README.md").read_text().replace("--drafter tiny-drafter", f"--drafter {REPO}")
    assert sent["README.md"].decode() == ours.replace('"model":"tiny-drafter"', f'"model":"{REPO}"')
    assert hub.private[REPO] and hub.commits[0].startswith("Upload the drafter with peagle")


def test_the_endpoint_and_the_token_come_from_the_environment(hub, published, tmp_path):
    words = ["publish", published, "--repo", REPO, "--base-model", "acme/tiny"]
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "peagle", *map(str, words)]
    result = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{hub.url}/{REPO}" and "model.safetensors" in hub.files[REPO]


def test_a_repository_with_files_is_only_changed_on_request(peagle, hub, published):
    hub.files[REPO] = {".gitattributes": b"", "README.md": b"by hand"}
    command = ("publish", published, "--repo", REPO, "--base-model", "acme/tiny")
    refused = peagle(*command)
    assert refused.status == 2 and f"{REPO} exists and has 2 files" in refused.err and "--update" in refused.err
    assert hub.files[REPO]["README.md"] == b"by hand" and not hub.commits
    assert peagle(*command, "--update").status == 0 and b"base_model" in hub.files[REPO]["README.md"]


def test_an_upload_that_fails_keeps_the_files_and_can_be_run_again(peagle, hub, published, tmp_path):
    command = ("publish", published, "--repo", REPO, "--base-model", "acme/tiny")
    hub.refused["/commit/"] = 403
    failed = peagle(*command)
    assert failed.status == 2 and f"you may not write to {REPO}" in failed.err
    (staged,) = tmp_path.glob("peagle-publish-*")
    assert f"the files are in {staged}" in failed.err and (staged / "model.safetensors").is_file()
    hub.refused.clear()
    assert peagle(*command).status == 0, "the repository is there, but empty"
    assert list(tmp_path.glob("peagle-publish-*")) == [staged]


def test_a_license_that_the_hub_does_not_know_is_told(peagle, hub, published):
    result = peagle("publish", published, "--repo", REPO, "--base-model", "acme/tiny", "--license", "my own")
    assert result.status == 2 and '"license" must be one of' in result.err and "check --license" in result.err


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"HF_TOKEN": ""}, "you are not logged in to the Hugging Face Hub", "hf auth login"),
        ({"HF_TOKEN": "hf_other"}, "does not accept your token", "hf auth login"),
        ({"ENDPOINT": "http://127.0.0.1:9"}, "(http://127.0.0.1:9) cannot be reached", "--output instead of --repo"),
    ],
)
def test_without_login_or_network_nothing_is_written(
    peagle, hub, published, monkeypatch, tmp_path, change, message, hint
):
    for name, value in change.items():
        monkeypatch.setattr(constants, name, value) if name == "ENDPOINT" else monkeypatch.setenv(name, value)
    result = peagle("publish", published, "--repo", REPO, "--base-model", "acme/tiny")
    assert result.status == 2 and message in result.err and hint in result.err, result.err
    assert not hub.files and not list(tmp_path.glob("peagle-publish-*"))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ((), "nowhere to publish to", "--repo ORG/NAME"),
        (("--repo", "a/b", "--card-only"), "exclude each other", "--repo"),
        (("--card-only", "--base-model", "a/b"), "the drafter has no license", "--license"),
        (("--card-only", "--license", "mit"), "tiny has no id on the Hugging Face Hub", "--base-model"),
        (("--repo", "alone", *KNOWN), "--repo alone has no owner", "ORG/alone"),
        (("--repo", "a/b c", *KNOWN), "--repo a/b c: ", "ORG/NAME"),
    ],
)
def test_what_is_missing_is_asked_for_first(peagle, drafter, options, message, hint):
    result = peagle("publish", drafter, *options)
    assert result.status == 2 and message in result.err and hint in result.err, result.err


def test_a_directory_without_card_or_drafter_is_refused(peagle, published, tmp_path):
    shutil.copytree(published, tmp_path / "bare")
    (tmp_path / "bare" / "drafter_card.json").unlink()
    result = peagle("publish", tmp_path / "bare", "--card-only", *KNOWN)
    assert result.status == 2 and "has no drafter_card.json" in result.err and "--record" in result.err
    empty = peagle("publish", tmp_path, "--card-only", *KNOWN)
    assert empty.status == 2 and "is not a drafter directory" in empty.err
    taken = peagle("publish", published, "--output", tmp_path, *KNOWN)
    assert taken.status == 2 and "is not empty" in taken.err


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_shipped_drafters_have_the_card_that_publish_writes(directory: Path):
    """After they were trained again: `make cards`."""
    expected = model_card(publication_of(Arguments(directory, card_only=True)))
    assert (directory / "README.md").read_text() == expected, "run `make cards`"
    wide = [line for line in expected.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not wide, wide
