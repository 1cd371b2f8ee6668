"""A drafter swapped in over HTTP while requests run: answers do not change, and neither does anything by a refusal."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.local_server import Running, running
from harness.tiny_models import tiny_drafter, tiny_target, write_drafter
from peagle.adaptation.swap_client import swap
from peagle.adaptation.swap_route import swap_route
from peagle.checkpoint.card import read_card
from peagle.checkpoint.native import save_drafter
from peagle.engine.llm import LLM
from peagle.errors import ConfigError, ServerError

KEY = "operator"
BODY: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
NUM_REQUESTS = 10


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good drafter, one with other weights, and one of another shape."""
    root, target = tmp_path_factory.mktemp("drafters"), tiny_target(num_layers=3)
    write_drafter(target, root / "good")
    card = read_card(root / "good")
    assert card is not None
    per_position = {"per_position": [0.5] * 4, "acceptance_length": 3.0, "num_draft_tokens": 4}
    card = dataclasses.replace(card, acceptance={"baseline": per_position})
    other = tiny_drafter(target)
    for parameter in other.parameters():
        parameter.mul_(0.7)
    save_drafter(other, root / "other", card, full=False)
    save_drafter(tiny_drafter(target, num_layers=1), root / "narrow", card, full=False)
    return root


@pytest.fixture(scope="module")
def swapping(drafters: Path) -> Iterator[Running]:
    options: dict[str, Any] = {"max_batch": 8, "max_length": 256, "verify_tokens": 0}
    with running(
        lambda: LLM(tiny_target(num_layers=3), drafters / "good", 4, **options), (KEY,), routes=(swap_route(drafters),)
    ) as found:
        found.http.headers["Authorization"] = f"Bearer {KEY}"
        yield found


def answers(server: Running, numbers: range) -> list[str]:
    def ask(number: int) -> str:
        body = BODY | {"prompt": f"user {number} asks the user", "temperature": number % 2, "seed": number}
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(ask, numbers))


def test_requests_in_flight_during_swaps_are_answered_as_without(swapping: Running, drafters: Path) -> None:
    expected = answers(swapping, range(NUM_REQUESTS))
    before = swapping.stats()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answers, swapping, range(NUM_REQUESTS))
        while not swapping.stats().num_running:
            time.sleep(0.001)
        found = [swapping.http.post("/v1/drafter", json={"drafter": name}) for name in ("other", "good", "other")]
        assert asked.result() == expected
    assert [response.status_code for response in found] == [200, 200, 200]
    assert found[2].json() == {"drafter": "other", "previous": "good", "acceptance": {"baseline": 3.0}}
    stats = swapping.wait_until_idle()
    assert stats.num_finished == before.num_finished + NUM_REQUESTS and stats.num_aborted == 0
    assert swapping.http.get("/v1/models").json()["data"][0]["peagle"]["drafter"] == "other"
    assert swapping.metric("peagle:acceptance_length_baseline") == 3.0, "drift is measured against the new card"
    assert swap(swapping.url, drafters / "good", KEY)["drafter"] == "good"


def test_what_does_not_fit_or_is_elsewhere_is_refused_and_serving_goes_on(
    swapping: Running, drafters: Path, tmp_path: Path
) -> None:
    drafter = swapping.service.drafter_name
    (drafters / "link").symlink_to(tmp_path)
    for name, message in {
        "narrow": "num_layers is 1, served is 2",
        "missing": "names no directory",
        "../elsewhere": "must be in the directory of drafters",
        ".": "must be in the directory of drafters",
        "link": "must be in the directory of drafters",
        str(tmp_path): "must be in the directory of drafters",
        "a\0b": "is not a path",
        "a" * 256: "is not a path",
    }.items():
        response = swapping.http.post("/v1/drafter", json={"drafter": name})
        assert response.status_code == 400 and message in response.json()["error"]["message"], response.text
    for body, message in (({}, "'drafter' is missing"), ({"drafter": "good", "x": 1}, "unknown field 'x'")):
        response = swapping.http.post("/v1/drafter", json=body)
        assert response.status_code == 400 and message in response.json()["error"]["message"], response.text
    with pytest.raises(ServerError, match=r"refused the drafter: .*num_layers is 1"):
        swap(swapping.url, drafters / "narrow", KEY)
    assert swapping.service.drafter_name == drafter and answers(swapping, range(1))


def test_a_swap_needs_a_key_a_server_that_allows_it_and_a_directory(
    swapping: Running, drafters: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match="API key"):
        swap(swapping.url, drafters / "good", "wrong")
    with running() as plain, pytest.raises(ServerError, match="does not swap drafters") as refused:
        swap(plain.url, drafters / "good")
    assert refused.value.hint is not None and "--swap-from" in refused.value.hint
    with pytest.raises(ServerError, match="cannot reach"):
        swap(plain.url, drafters / "good")
    with pytest.raises(ConfigError, match="is not a directory"):
        swap_route(tmp_path / "none")
