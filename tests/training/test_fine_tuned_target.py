"""The recipe that makes a second target: it learns to answer in JSON, and the commands after it accept it."""

import json
import re
import runpy
from pathlib import Path

import pytest

from harness.tiny_models import tiny_target, write_drafter, write_target
from peagle.checkpoint.native import load_drafter
from peagle.errors import CheckpointError
from peagle.targets.load import load_target

RECIPE = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "fine_tuned_target.py"))


def written(tmp_path: Path) -> tuple[Path, Path]:
    target = tiny_target(num_layers=3)
    rows = [
        {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": 'the "user"'}]}
        for n in range(24)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_target(target, tmp_path / "target"), write_drafter(target, tmp_path / "drafter")


def test_answers_are_wrapped_in_json_and_end_as_before(tmp_path: Path) -> None:
    target = tiny_target(num_layers=3)
    written(tmp_path)
    (prompt, answer), *others = RECIPE["wrapped"](tmp_path / "text.jsonl", target.tokenizer)
    assert len(others) == 23 and answer[-1] == 2
    assert json.loads(target.tokenizer.decode(answer[:-1])) == {"answer": 'the "user"'}
    assert target.tokenizer.decode(prompt).endswith("ask 0<|im_end|>\n<|im_start|>assistant\n")
    token_ids, labels, mask = RECIPE["batch"]([(prompt, answer), (prompt, answer[-1:])])
    assert labels[0].tolist() == [-100] * len(prompt) + answer and mask[1].sum() == len(prompt) + 1
    assert labels[1, len(prompt) :].tolist() == [2] + [-100] * (len(answer) - 1)
    assert token_ids.shape == labels.shape == mask.shape


@pytest.mark.slow
def test_a_tuned_target_answers_in_json_and_takes_the_earlier_drafter_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, drafter = written(tmp_path)
    command = ["--data", str(tmp_path / "text.jsonl"), "--target", str(directory), "--output", str(tmp_path / "tuned")]
    RECIPE["main"]([*command, "--num-steps", "60", "--batch-size", "8", "--learning-rate", "3e-3"])
    num_wrapped = re.search(r"(\d+) of 16 answers are JSON", capsys.readouterr().out)
    assert num_wrapped is not None and int(num_wrapped[1]) >= 4, "of a random model"
    tuned = load_target(str(tmp_path / "tuned"))
    with pytest.raises(CheckpointError) as caught:
        load_drafter(drafter, tuned)
    assert "--allow-mismatch" in (caught.value.hint or "")
    load_drafter(drafter, tuned, allow_mismatch=True)
