"""Recorded traffic: what is written, what is not, how much, and that requests never suffer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.tiny_models import tiny_target
from peagle.data.conversations import read_conversations
from peagle.engine.llm import LLM
from peagle.engine.outputs import RequestOutput
from peagle.engine.recorder import NUM_FILES, WARM_UP, Recorder, RecordOptions
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(num_layers=2)


def served(target: HFTarget, recorder: Recorder, *params: SamplingParams) -> list[RequestOutput]:
    with LLM(target, None, max_length=32, max_batch=2) as llm:
        llm.engine.on_finished = recorder
        return [output for each in params for output in llm.generate(PROMPTS, each)]


def rows_in(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in sorted(directory.iterdir()) for line in path.read_text().splitlines()]


def test_lengths_are_recorded_and_no_text(target: HFTarget, tmp_path: Path) -> None:
    outputs = served(target, Recorder(tmp_path / "traffic"), PARAMS)
    rows = rows_in(tmp_path / "traffic")
    assert [row["num_prompt_tokens"] for row in rows] == [3, 4] and {row["num_answer_tokens"] for row in rows} == {6}
    assert {row["id"] for row in rows} == {output.request_id for output in outputs}
    assert not any({"prompt_ids", "answer_ids"} & row.keys() for row in rows)
    Recorder(tmp_path / "traffic")(replace(outputs[0], request_id=WARM_UP), PARAMS)
    assert rows_in(tmp_path / "traffic") == rows, "the server's own request is no traffic"
    (path,) = (tmp_path / "traffic").iterdir()
    assert path.stat().st_mode & 0o077 == 0 == (tmp_path / "traffic").stat().st_mode & 0o077, "for the owner alone"


def test_recorded_text_can_be_trained_on_and_greedy_answers_are_known(target: HFTarget, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traffic", with_text=True)
    warm = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, n=2)
    biased = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={9: 5.0})
    outputs = served(target, recorder, PARAMS, warm, biased)
    (path,) = recorder.files()
    found = read_conversations(path, target.tokenizer, vocab_size=target.vocab_size)
    assert len(found) == 2 + 4 + 2 and found.is_greedy.tolist() == [True] * 2 + [False] * 6
    expected = {(*output.prompt_token_ids, *answer.token_ids) for output in outputs for answer in output.outputs}
    assert {tuple(row.token_ids.tolist()) for row in found} == expected


def test_the_directory_keeps_to_its_limit_and_later_runs_go_on(target: HFTarget, tmp_path: Path) -> None:
    (output, _) = served(target, Recorder(tmp_path / "first"), PARAMS)
    limit = 8000
    for _ in range(2):
        recorder = Recorder(tmp_path / "traffic", max_bytes=limit)
        for _ in range(80):
            recorder(output, PARAMS)
        assert sum(path.stat().st_size for path in recorder.files()) <= limit and len(recorder.files()) == NUM_FILES
    numbers = [int(path.stem.split("-")[1]) for path in recorder.files()]
    assert numbers == list(range(numbers[0], numbers[0] + NUM_FILES)) and numbers[0] > NUM_FILES, "the oldest are gone"


def test_a_disk_that_fails_ends_the_recording_and_no_request(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "traffic")
    with monkeypatch.context() as patch:
        patch.setattr("peagle.engine.recorder.os.write", fail)
        assert len(served(target, recorder, PARAMS)) == 2
    assert caplog.text.count("ended: No space left on device; requests are served as before") == 1


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record-text requires --record"):
        RecordOptions(record_text=True)
    with pytest.raises(ConfigError, match="record_mb must be at least 1, got 0"):
        RecordOptions(tmp_path, record_mb=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot record to"):
        Recorder(tmp_path / "file")
