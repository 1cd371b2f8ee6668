"""What a training run refuses before anything is written, and which unfinished runs it does not resume."""

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from harness.tiny_models import tiny_target, tiny_tokenizer
from harness.tiny_training import ignore
from harness.training_runs import greedy_answers, settings, shards, written
from peagle.errors import ConfigError, DataError
from peagle.targets.hf import HFTarget
from peagle.training.run import train_drafter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return greedy_answers(target, tmp_path_factory.mktemp("data") / "answers.jsonl")


def test_bad_settings_and_data_are_refused_before_anything_is_written(target, data, tmp_path):
    prompt_only = written(tmp_path / "prompt_only.jsonl", {"prompt_ids": list(range(3, 60)), "answer_ids": [5, 6]})
    strange = shards(tmp_path / "strange", tiny_target(seed=5), [0.0])
    one_token = written(tmp_path / "one_token.jsonl", {"prompt_ids": [4, 5, 6], "answer_ids": [7]})
    cases = [
        ({"max_length": 513}, ConfigError, "max_length 513 exceeds the target's 512", "use at most 512"),
        ({"num_layers": 9}, ConfigError, "num_layers 9 exceeds the target's 8", "init = random"),
        ({"data": tmp_path / "no.jsonl"}, DataError, "no file at", "existing file"),
        ({"held_out": tmp_path / "no.jsonl"}, DataError, "no file at", "existing file"),
        ({"data": prompt_only}, DataError, "none of its 1 rows has an answer token", "raise max_length"),
        ({"data": one_token}, DataError, "no row has an answer of two or more tokens", "longer answers"),
        ({"aux_layer_ids": (2, 8)}, ConfigError, "aux_layer_ids must", "default"),
        ({"mask_token_id": 288}, ConfigError, "mask_token_id must be between 0 and 287", ""),
        ({"draft_vocab_size": 289}, ConfigError, "draft_vocab_size 289 exceeds the target's 288", "omit it"),
        ({"data": tmp_path}, DataError, "not a shard directory: no manifest.json", "peagle data"),
        ({"data": strange}, DataError, "not by 'tiny': the weights differ", "its own target"),
        ({"held_out": strange}, DataError, "not by 'tiny': the weights differ", "its own target"),
    ]
    output = tmp_path / "drafter"
    for changes, kind, words, hint in cases:
        values = {"data": data, "output": output} | changes
        with pytest.raises(kind) as caught:
            train_drafter(target, settings(**values), ignore)
        assert words in caught.value.message, changes
        assert hint in (caught.value.hint or ""), changes
        assert not output.exists(), changes


def test_an_unfinished_run_of_another_target_is_refused(target, data, tmp_path):
    def interrupt(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, settings(data, tmp_path), interrupt)
    with pytest.raises(ConfigError, match="target_weights was"):
        train_drafter(tiny_target(seed=5), settings(data, tmp_path), ignore)


def test_an_unfinished_run_is_not_gone_on_with_on_other_text(target, tmp_path):
    def interrupt(step, metrics):
        raise KeyboardInterrupt

    rows = [{"prompt_ids": [3, 4, 5], "answer_ids": list(range(start, start + 12))} for start in (20, 40, 60, 80)]
    data = written(tmp_path / "rows.jsonl", *rows)
    held_out = written(tmp_path / "held_out.jsonl", *rows[:2])
    config = settings(data, tmp_path / "drafter", held_out=held_out)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, config, interrupt)
    otherwise_cut = [{"prompt_ids": [3, 4, 5, rows[0]["answer_ids"][0]], "answer_ids": rows[0]["answer_ids"][1:]}]
    for path, others, name in (
        (data, rows[::-1], "data_contents"),
        (data, otherwise_cut + rows[1:], "data_contents"),
        (held_out, rows[1:3], "held_out_contents"),
    ):
        earlier = path.read_text()
        written(path, *others)
        with pytest.raises(ConfigError, match=f"{name} was"):
            train_drafter(target, config, ignore)
        path.write_text(earlier)
    train_drafter(target, config, ignore)


def test_layers_that_cannot_be_copied_are_refused_before_prompts_are_answered(tmp_path, monkeypatch):
    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 288, "max_position_embeddings": 512}
    target = HFTarget(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **shape)), tiny_tokenizer(), name="experts")
    prompts = written(tmp_path / "prompts.jsonl", {"prompt": "why?"})

    def answer(*_):
        raise AssertionError("nothing may be written yet")

    monkeypatch.setattr("peagle.training.data.answer_dialogs", answer)
    with pytest.raises(ConfigError) as caught:
        train_drafter(target, settings(prompts, tmp_path / "out", held_out=None), ignore)
    assert "to start from" in caught.value.message and "init = random" in caught.value.hint
    assert not (tmp_path / "out").exists()
