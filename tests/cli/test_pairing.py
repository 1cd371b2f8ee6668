"""A drafter without a target: commands take the target on its card, and refuse one that does not fit."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from harness.tiny_models import tiny_target, write_drafter, write_target
from peagle.checkpoint.pairing import target_of
from peagle.cli.main import run
from peagle.engine.llm import LLM
from peagle.errors import CheckpointError
from peagle.targets.load import load_target

PROMPT = '{"prompt": "the user"}\n'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `other` (the same tokenizer, another width and depth); the target's `drafter`, written from its
    directory, and the same in vLLM's layout, `full`."""
    root = tmp_path_factory.mktemp("pair")
    write_target(tiny_target(num_layers=3, seed=3), root / "target")
    write_target(tiny_target(num_layers=2, hidden_size=32, seed=3), root / "other")
    write_target(tiny_target(num_layers=3, seed=7), root / "stranger")
    write_drafter(load_target(root / "target", dtype="float32"), root / "drafter")
    (root / "prompts.jsonl").write_text(PROMPT * 2)
    return root


@pytest.fixture(scope="module")
def full(pair: Path) -> Path:
    assert run(["export", str(pair / "drafter"), "--output", str(pair / "full")]) == 0
    return pair / "full"


def without_source(drafter: Path, destination: Path) -> Path:
    """A copy with the card of an older version, which has only the target's name."""
    shutil.copytree(drafter, destination)
    card = json.loads((destination / "drafter_card.json").read_text())
    del card["target"]["source"]
    (destination / "drafter_card.json").write_text(json.dumps(card))
    return destination


def test_the_card_says_where_the_target_is(pair):
    card = json.loads((pair / "drafter" / "drafter_card.json").read_text())
    assert card["target"]["name"] == "target" and card["target"]["source"] == str(pair / "target")


@pytest.mark.parametrize(
    ("drafter", "target"),
    [
        ("smollm2-135m-instruct-eagle3", "smollm2-135m-instruct"),
        ("amazon/GPT-OSS-20B-P-EAGLE", "gpt-oss-20b"),
        ("long-context", None),
    ],
)
def test_the_catalog_knows_the_target_of_its_drafters(drafter, target):
    assert target_of(drafter) == target


def test_a_layout_of_speculators_names_its_target(peagle, pair, tmp_path):
    assert peagle("export", pair / "drafter", "--to", "speculators", "--output", tmp_path / "out").status == 0
    (tmp_path / "out" / "drafter_card.json").unlink()
    assert target_of(str(tmp_path / "out")) == str(pair / "target")


@pytest.mark.parametrize(
    "words",
    [
        "generate hello --drafter drafter --max-tokens 4",
        "eval --drafter drafter --prompts prompts.jsonl --max-tokens 4 --json",
        "bench --drafter drafter --prompts prompts.jsonl --max-tokens 4 --concurrency 1 --methods p-eagle --json",
        "doctor drafter --json",
        pytest.param(
            "lossless --drafter drafter --max-tokens 12 --num-seeds 1 --num-samples 80 --temperature 0.2 --json",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "train --from drafter --data prompts.jsonl --output trained --num-steps 1 --num-layers 2 "
            "--num-draft-tokens 4 --max-length 32 --batch-size 1",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda words: words.split()[0],
)
def test_a_command_takes_the_target_of_the_drafter(peagle, pair, tmp_path, monkeypatch, words):
    for name in ("drafter", "prompts.jsonl"):
        (tmp_path / name).symlink_to(pair / name)
    monkeypatch.chdir(tmp_path)
    result = peagle(*words.split(), "--dtype", "float32")
    assert f"target {pair / 'target'}, for which the drafter was trained" in result.err
    assert result.status == 0, result.err


def test_llm_takes_it_too(pair):
    with LLM(drafter=pair / "drafter", dtype="float32", max_batch=1, max_length=64) as llm:
        assert llm.target.source == str(pair / "target")


def test_deploy_vllm_and_the_hint_of_export_name_the_target(peagle, pair, tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    exported = peagle("export", pair / "drafter", "--output", tmp_path / "out")
    hint = next(line for line in exported.err.splitlines() if "peagle deploy vllm" in line)
    assert f"peagle deploy vllm {pair / 'target'} --drafter {tmp_path / 'out'}" in hint
    command = peagle("deploy", "vllm", "--drafter", tmp_path / "out").out
    words = shlex.split(command)
    assert words[words.index("serve") + 1] == str(pair / "target")


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("other", "target_hidden_size is 64, but target 'other' has 32"),
        ("stranger", "this target has other weights"),
    ],
)
def test_deploy_vllm_prints_no_command_for_a_target_that_does_not_fit(peagle, pair, full, target, complaint):
    result = peagle("deploy", "vllm", pair / target, "--drafter", full)
    assert result.status == 2 and complaint in result.err and result.out == ""
    assert peagle("deploy", "vllm", pair / "target", "--drafter", full).status == 0


def test_sizes_that_do_not_fit_cannot_be_allowed_but_weights_can(peagle, pair, full):
    assert peagle("deploy", "vllm", pair / "other", "--drafter", full, "--allow-mismatch").status == 2
    result = peagle("deploy", "vllm", pair / "stranger", "--drafter", full, "--allow-mismatch")
    assert result.status == 0 and "other weights" in result.err


def test_an_old_card_keeps_the_default_and_its_sizes_are_compared(peagle, full, tmp_path):
    old = without_source(full, tmp_path / "old")
    assert target_of(str(old)) is None
    result = peagle("deploy", "vllm", "--drafter", old)
    assert result.status == 2 and result.out == ""
    assert "vocab_size is 288, but target 'smollm2-135m-instruct' has 49152" in result.err
    assert "the drafter belongs to another target, 'target'" in result.err


def test_an_old_card_with_a_catalog_name_means_that_target(pair, tmp_path):
    old = without_source(pair / "drafter", tmp_path / "old")
    card = json.loads((old / "drafter_card.json").read_text())
    card["target"]["name"] = "gpt-oss-20b"
    (old / "drafter_card.json").write_text(json.dumps(card))
    assert target_of(str(old)) == "gpt-oss-20b"


def test_a_target_that_has_moved_is_asked_for(pair, tmp_path):
    drafter = shutil.copytree(pair / "drafter", tmp_path / "drafter")
    text = (drafter / "drafter_card.json").read_text()
    (drafter / "drafter_card.json").write_text(text.replace(str(pair / "target"), str(tmp_path / "gone")))
    with pytest.raises(CheckpointError, match="which does not exist") as refused:
        target_of(str(drafter))
    assert "pass --target" in str(refused.value)


def test_serve_and_sagemaker_ask_for_it_too(peagle, pair, tmp_path):
    drafter = shutil.copytree(pair / "drafter", tmp_path / "drafter")
    text = (drafter / "drafter_card.json").read_text()
    (drafter / "drafter_card.json").write_text(text.replace(str(pair / "target"), str(tmp_path / "gone")))
    host = ("--instance", "ml.m5.xlarge", "--role", "arn:aws:iam::123456789012:role/peagle", "--region", "us-west-2")
    for words in (
        ("serve", "--drafter", drafter, "--port", 0),
        ("deploy", "sagemaker", "chat", "--drafter", drafter, *host, "--dry-run"),
    ):
        result = peagle(*words)
        assert result.status == 2 and f"target 'target' at {tmp_path / 'gone'}" in result.err, result.err


def test_export_writes_where_the_target_is_now(peagle, pair, tmp_path):
    shutil.copytree(pair / "target", tmp_path / "moved")
    result = peagle("export", pair / "drafter", "--target", tmp_path / "moved", "--output", tmp_path / "out")
    assert result.status == 0, result.err
    assert target_of(str(tmp_path / "out")) == str(tmp_path / "moved")
