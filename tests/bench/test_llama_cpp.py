"""The llama.cpp anchor, run for real on the default model's GGUF file."""

from pathlib import Path
from typing import Any

import pytest

from harness.tiny_models import tiny_target
from peagle.bench.anchors import STATIC, anchors_of, run_anchors
from peagle.bench.llama_cpp import LLAMA_CPP, can_run
from peagle.decoding.reference import decode
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.targets.load import load_target


def test_llama_cpp_is_an_anchor_where_it_is_installed_and_the_target_is_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(num_layers=2)
    assert not can_run(target), "a model in memory has no file"
    (tmp_path / "tiny.gguf").write_bytes(b"")
    target.source = str(tmp_path / "tiny.gguf")
    assert can_run(target) and list(anchors_of(target))[-1] == LLAMA_CPP
    assert list(anchors_of(target, ["llama.cpp", "static"])) == [LLAMA_CPP, STATIC]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert LLAMA_CPP not in anchors_of(target)
    with pytest.raises(ConfigError, match="with the package xllamacpp"):
        anchors_of(target, ["llama.cpp"])


@pytest.mark.slow
def test_llama_cpp_answers_the_same_prompts_and_its_tokens_count() -> None:
    target = load_target()
    chats = [[{"role": "user", "content": text}] for text in ("Name three rivers.", "What is 2 + 2?")]
    prompts = [target.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    results: list[Any] = []
    run_anchors(target, prompts, [2], 8, results, num_requests={2: 2}, chosen=[LLAMA_CPP])
    (result,) = results
    assert result.failure is None and result.cell.method == LLAMA_CPP
    assert [answer.prompt for answer in result.answers] == [0, 1]
    assert all(answer.ttft > 0 and answer.seconds_per_token > 0 for answer in result.answers)
    for answer, prompt in zip(result.answers, prompts, strict=True):
        expected = [token for step in decode(target, prompt, SamplingParams(max_tokens=8)) for token in step.token_ids]
        assert len(answer.token_ids) == 8
        # It rounds activations to 8 bits, so later tokens may differ.
        assert list(answer.token_ids[:3]) == expected[:3]
