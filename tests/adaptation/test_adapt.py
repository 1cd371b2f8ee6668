"""A drafter adapted to recorded traffic: what is kept, what is written, what is refused, and that a rerun goes on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.command_line import Result
from harness.command_line import peagle as peagle
from harness.engine_runs import answer
from harness.local_server import running
from harness.tiny_models import tiny_target, write_drafter, write_target
from peagle.adaptation import run as adaptation
from peagle.adaptation.config import AdaptSettings
from peagle.adaptation.outcome import read_outcome
from peagle.adaptation.run import adapt
from peagle.adaptation.swap_route import swap_route
from peagle.adaptation.text import gather, mixed, read_served, split
from peagle.checkpoint.card import read_card
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.compare.gate import Gate
from peagle.console import progress
from peagle.data.conversations import read_conversations
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.engine.recorder import Recorder
from peagle.errors import ConfigError, DataError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

SHAPE: dict[str, Any] = {"num_layers": 4, "initializer_range": 0.1}
"""of a random target that often repeats itself, so that a drafter learns something in a few steps"""
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(**SHAPE)


@pytest.fixture(scope="module")
def short() -> HFTarget:
    """The same target with a context that no prompt of the gate fits into, so that measuring takes no time."""
    return tiny_target(**SHAPE, max_position_embeddings=80)


@pytest.fixture(scope="module")
def drafter(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(target, tmp_path_factory.mktemp("drafters") / "drafter")


def prompts(word: str, number: int) -> list[str]:
    return [f"the {word} {index} asks" for index in range(number)]


def record(target: HFTarget, directory: Path, texts: Sequence[str], with_text: bool = True, **changes: Any) -> Path:
    """Traffic as a server records it."""
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | changes)
    with LLM(target, None, max_length=64, max_batch=8) as llm:
        llm.engine.on_finished = Recorder(directory, with_text=with_text)
        llm.generate(texts, params)
    return directory


@pytest.fixture(scope="module")
def traffic(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(target, tmp_path_factory.mktemp("traffic"), prompts("user", 15))


@pytest.fixture(scope="module")
def old(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(target, tmp_path_factory.mktemp("old"), prompts("other", 15))


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a few rows."""
    monkeypatch.setitem(adaptation.TOKENS_PER_STEP, "cpu", 256)


def settings(traffic: Path, old: Path, output: Path, **changes: Any) -> AdaptSettings:
    values = {"minutes": 1e-3, "old_share": 0.4, "num_held_out": 3, "learning_rate": 3e-3}
    return AdaptSettings(data=traffic, old=old, output=output, **values | changes)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_a_drafter_that_gains_is_kept_gated_and_written_with_both_acceptances(
    target: HFTarget, drafter: Path, traffic: Path, old: Path, tmp_path: Path
) -> None:
    given = settings(traffic, old, tmp_path / "out")
    outcome = adapt(target, drafter, given)
    assert outcome.is_kept, outcome.why
    assert outcome.after.traffic > outcome.before.traffic and outcome.after.old >= 0.98 * outcome.before.old
    assert sorted(path.name for path in given.output.iterdir()) == [
        "adaptation.json", "config.json", "drafter_card.json", "model.safetensors",
    ]  # fmt: skip
    card = read_card(given.output)
    assert card is not None and card.data["num_old"] > 0 and card.training["from_drafter"]["name"] == "drafter"
    for name, before, after in (
        ("traffic_replay", outcome.before.traffic, outcome.after.traffic),
        ("old_text_replay", outcome.before.old, outcome.after.old),
    ):
        entry = card.acceptance[name]
        assert (entry["acceptance_length_before"], entry["acceptance_length"]) == (before, after)
    assert Gate(given.output, target, "native").run().passed
    assert read_outcome(given.output) == outcome == adapt(target, drafter, given), "a rerun has nothing left to do"
    with pytest.raises(ConfigError, match=r"finished adaptation with other settings: minutes was 0\.001, is 5"):
        adapt(target, drafter, settings(traffic, old, given.output, minutes=5))
    with pytest.raises(ConfigError, match=r"other settings: drafter was '.*', is None"):
        adapt(target, None, given)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_a_drafter_that_does_not_gain_is_not_kept_and_nothing_of_it_remains(
    short: HFTarget, drafter: Path, traffic: Path, old: Path, tmp_path: Path
) -> None:
    loaded, rounded = load_drafter(drafter, short), tmp_path / "rounded"
    assert loaded.card is not None
    save_drafter(loaded, rounded, loaded.card, full=False)
    before = (rounded / "model.safetensors").read_bytes()
    given = settings(traffic, old, tmp_path / "out", learning_rate=1e-9)  # no weight changes, once it is rounded
    outcome = adapt(short, rounded, given)
    assert outcome.before == outcome.after and not outcome.is_kept
    assert "held-out traffic does not rise" in outcome.why
    assert [path.name for path in given.output.iterdir()] == ["adaptation.json"]
    assert (rounded / "model.safetensors").read_bytes() == before


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_an_interrupted_adaptation_resumes_with_the_same_text_though_traffic_goes_on(
    short: HFTarget, drafter: Path, traffic: Path, old: Path, tmp_path: Path
) -> None:
    recording = tmp_path / "traffic"
    recording.mkdir()
    (path,) = traffic.iterdir()
    (recording / path.name).write_bytes(path.read_bytes())
    steps: list[int] = []

    def stop_at(last: int) -> Any:
        def on_step(step: int, _: object) -> None:
            steps.append(step)
            if step == last:
                raise KeyboardInterrupt

        return lambda config: on_step

    given = settings(recording, old, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        adapt(short, drafter, given, stop_at(7))
    (recording / "traffic-00000001.jsonl").write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="unfinished adaptation with other settings: seed was 0, is 1"):
        adapt(short, drafter, settings(recording, old, given.output, seed=1))
    resumed = adapt(short, drafter, given, stop_at(-1))
    assert steps == list(range(1, resumed.num_steps + 1)), "no step is lost or done twice"
    assert not (given.output / "work").exists(), "users' text is deleted"


def test_a_recording_without_text_and_an_empty_directory_are_refused(
    target: HFTarget, drafter: Path, tmp_path: Path
) -> None:
    loaded = load_drafter(drafter, target)
    (tmp_path / "empty").mkdir()
    record(target, tmp_path / "lengths", prompts("user", 3), with_text=False)
    with pytest.raises(DataError, match="3 records, but no text: only ids and lengths") as refused:
        read_served(target, loaded, tmp_path / "lengths", tmp_path / "work")
    assert refused.value.hint is not None and "--record-text" in refused.value.hint
    with pytest.raises(DataError, match="neither a recording nor a shard directory"):
        read_served(target, loaded, tmp_path / "empty", tmp_path / "work")
    record(target, tmp_path / "lengths", prompts("user", 2))
    with next(iter((tmp_path / "lengths").iterdir())).open("a") as file:
        file.write('{"prompt_ids": [1, 2')  # the server is about to write
    assert len(read_served(target, loaded, tmp_path / "lengths", tmp_path / "work")) == 2
    assert (tmp_path / "work" / "traffic.jsonl").stat().st_mode & 0o077 == 0


def loaded_rows(target: HFTarget, recording: Path) -> Any:
    (path,) = recording.iterdir()
    return read_conversations(path, target.tokenizer, vocab_size=target.vocab_size)


def test_a_prompt_is_trained_on_or_held_out_however_often_it_came(
    target: HFTarget, drafter: Path, tmp_path: Path
) -> None:
    rows = loaded_rows(target, record(target, tmp_path / "traffic", prompts("user", 10) * 2))
    given = settings(tmp_path / "traffic", tmp_path, tmp_path / "out")
    train, held_out = split(target, load_drafter(drafter, target), rows, given)
    assert (len(train), len(held_out)) == (16, 2), "a fifth of the prompts, each once"
    trained = {row.token_ids.tobytes() for row in train}
    assert not trained & {row.token_ids.tobytes() for row in held_out}
    few = loaded_rows(target, record(target, tmp_path / "few", prompts("user", 4)))
    with pytest.raises(DataError, match="4 different prompts with answers are too few"):
        split(target, load_drafter(drafter, target), few, given)


def test_sampled_traffic_is_trained_on_and_measured_on_greedy_answers_to_its_prompts(
    target: HFTarget, drafter: Path, tmp_path: Path
) -> None:
    rows = loaded_rows(target, record(target, tmp_path / "traffic", prompts("user", 5), temperature=1.0, seed=3))
    given = settings(tmp_path / "traffic", tmp_path, tmp_path / "out")
    train, (held_out,) = split(target, load_drafter(drafter, target), rows, given)
    assert len(train) == 4
    prompt = target.tokenizer("the user 0 asks")["input_ids"]
    expected = answer(target, prompt, SamplingParams(max_tokens=24))
    assert held_out.token_ids.tolist() == [*prompt, *expected]
    assert np.flatnonzero(held_out.loss_mask).tolist() == list(range(len(prompt), len(held_out)))


def test_old_text_gets_its_share_of_the_tokens(target: HFTarget, old: Path, tmp_path: Path) -> None:
    rows = list(loaded_rows(target, old))
    half = sum(map(len, rows)) // 2
    assert len(mixed(rows, half, settings(old, old, tmp_path, old_share=0.5))) == pytest.approx(len(rows) / 2, abs=1)
    assert len(mixed(rows, 3 * half, settings(old, old, tmp_path, old_share=0.25))) == pytest.approx(
        len(rows) / 2, abs=1
    )
    assert mixed(rows, 10**6, settings(old, old, tmp_path, old_share=0.5)) == rows, "all there is"
    assert mixed(rows, half, settings(old, old, tmp_path, old_share=0.0)) == []


def test_a_file_of_conversations_is_answered_by_the_target_and_the_text_is_gathered_once(
    short: HFTarget, drafter: Path, old: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "no"}] for text in prompts("a", 6)]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    given, loaded = settings(path, old, tmp_path / "out"), load_drafter(drafter, short)
    text = gather(short, loaded, given, tmp_path / "work", given.described())
    assert (len(text.traffic), len(text.old)) == (1, 3) and text.facts["num_old"] == len(text.train) - 5 > 0
    assert all(np.count_nonzero(row.loss_mask) > 3 for row in text.train), "the file's short answers are replaced"
    path.unlink()
    again = gather(short, loaded, given, tmp_path / "work", given.described())
    for part in ("train", "traffic", "old"):
        for one, two in zip(getattr(text, part), getattr(again, part), strict=True):
            assert np.array_equal(one.token_ids, two.token_ids) and np.array_equal(one.loss_mask, two.loss_mask)
    assert again.facts == text.facts


@pytest.mark.slow
def test_without_old_text_the_target_writes_some(
    target: HFTarget, drafter: Path, traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.adaptation.text.MOST_SYNTHESIZED", 160)
    given = AdaptSettings(data=traffic, output=tmp_path / "out", num_held_out=2, num_old=3)
    text = gather(target, load_drafter(drafter, target), given, tmp_path / "work", given.described())
    assert len(text.traffic) == 2 and text.old and text.facts["num_old"], "some to train on, some held out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0}, "minutes must be above 0"),
        ({"old_share": 1}, "old_share must be at least 0 and below 1"),
        ({"num_held_out": 0}, "num_held_out must be at least 1"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, tmp_path, tmp_path, **change)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_the_command_adapts_and_swaps_the_drafter_into_a_server(
    peagle: Callable[..., Result],
    short: HFTarget,
    drafter: Path,
    traffic: Path,
    old: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.02)
    write_target(short, tmp_path / "target")
    words = ["--data", str(traffic), "--old", str(old), "--output", str(tmp_path / "adapted"), "--minutes", "0.001"]
    words += ["--num-held-out", "3", "--learning-rate", "3e-3", "--old-share", "0.4"]
    words += ["--target", str(tmp_path / "target"), "--drafter", str(drafter), "--dtype", "float32"]
    options: dict[str, Any] = {"max_batch": 4, "max_length": 64, "verify_tokens": 0}
    with running(lambda: LLM(tiny_target(**SHAPE), drafter, 4, **options), routes=(swap_route(tmp_path),)) as server:
        result = peagle("adapt", *words, "--swap", server.url)
        assert result.status == 0, result.err
        gathering, _, training = result.err.rpartition("gathering text, and measuring the drafter on it, for ")
        assert gathering and "measuring and checking the drafter" in training, "one line for each long stage"
        assert "on old text: " in result.out and "\nkept: acceptance length on held-out traffic +" in result.out
        assert f"{server.url} serves adapted in the place of p-eagle" in result.out
        assert server.service.drafter_name == "adapted"
        served: Drafter = server.service.engine._engine.drafter  # type: ignore[assignment]
        assert torch.equal(served.fc.weight, load_drafter(tmp_path / "adapted", short).fc.weight)
    result = peagle("adapt", *words, "--swap", server.url)
    assert result.status == 2 and "cannot reach" in result.err and "rerun the command" in result.err
    result = peagle("adapt", *words, "--json")
    assert json.loads(result.out)["is_kept"] and result.status == 0
