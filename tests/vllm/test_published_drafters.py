"""A drafter that is given by its id on the hub, and that the catalog does not know: its own config says its kind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from harness.local_hub import StandInHub, running
from peagle.cli.main import run
from peagle.vllm.models import find_models

WORDS = ["deploy", "vllm", "some/target", "--drafter", "some/drafter"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with running(StandInHub()) as stand_in:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stand_in.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield stand_in


def publish(hub: StandInHub, directory: Path, **config: object) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]} | config))
    (directory / "drafter_card.json").write_text('{"num_draft_tokens": 5}')
    (directory / "pytorch_model.bin").write_bytes(b"weights")
    hub.repositories["some/drafter"] = directory


@pytest.mark.parametrize(("config", "parallel"), [({}, False), ({"mask_token_id": 7}, True)])
def test_its_config_says_whether_it_drafts_in_parallel(hub, tmp_path, config, parallel):
    publish(hub, tmp_path / "drafter", **config)
    found = find_models("some/target", "some/drafter", here=False).drafter
    assert found.model == "some/drafter" and found.parallel is parallel and found.trained_draft_tokens == 5
    assert not any(name.endswith(".bin") for name in hub.served), "the weights stay where they are"


def test_an_eagle3_drafter_is_not_deployed_as_p_eagle(hub, tmp_path, capsys):
    publish(hub, tmp_path / "drafter")
    assert run(WORDS) == 0
    text = capsys.readouterr().out
    assert "parallel_drafting" not in text and '"num_speculative_tokens": 5' in text


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_config_that_cannot_be_fetched_asks_for_the_kind(hub, tmp_path, capsys, is_gated):
    if is_gated:
        publish(hub, tmp_path / "drafter")
        hub.gated.add("some/drafter")
    assert run(WORDS) == 2
    text = capsys.readouterr().err
    assert "cannot fetch its config.json" in text and "whether the drafter some/drafter is P-EAGLE" in text
    assert run([*WORDS, "--", "--speculative-config", '{"parallel_drafting": false}']) == 0
    assert '"parallel_drafting": false' in capsys.readouterr().out
