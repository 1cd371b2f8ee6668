"""A recording as a load."""

import json

import pytest

from peagle.errors import DataError
from peagle.tuning.recording import read_recording


def write(directory, rows):
    directory.mkdir(exist_ok=True)
    (directory / "traffic-00000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(number, **more):
    common = {"id": f"r{number}", "time": 100 + 0.5 * number, "num_prompt_tokens": 3, "num_answer_tokens": 10 + number}
    return common | {"temperature": 0.7, "prompt_ids": [number, 1, 2]} | more


def test_the_rate_the_newest_prompts_and_the_usual_answer_are_read(tmp_path):
    write(tmp_path, [*(row(number) for number in range(5)), row(4), row(5, temperature=None)])
    found = read_recording(tmp_path, limit=2)
    assert found.prompts == [[4, 1, 2], [5, 1, 2]] and found.num_requests == 6, "two answers are one request"
    assert found.request_rate == pytest.approx(2.0) and found.temperature == 0.7
    assert found.max_tokens == 15, "the 95th percentile of 10 to 15 tokens"


def test_a_recording_without_text_or_files_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no recording"):
        read_recording(tmp_path)
    write(tmp_path, [{key: value for key, value in row(1).items() if key != "prompt_ids"}])
    with pytest.raises(DataError) as refused:
        read_recording(tmp_path)
    assert "no text to measure on" in refused.value.message and "--record-text" in refused.value.hint
