"""Settings of a training run: what is refused when they are made, and how a recipe file becomes them."""

from pathlib import Path

import pytest

from peagle.config import from_toml
from peagle.errors import ConfigError
from peagle.objective.config import TrainConfig


def refusal(**settings):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(data=Path("data.jsonl"), output=Path("out"), **settings)
    return caught.value


@pytest.mark.parametrize(
    "name", ["num_layers", "num_draft_tokens", "batch_size", "num_steps", "save_every", "log_every"]
)
def test_counts_below_one_are_refused(name):
    assert refusal(**{name: 0}).message == f"{name} must be at least 1, got 0"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"retention": 0.0}, "retention must be above 0 and at most 1"),
        ({"retention": float("nan")}, "retention must be above 0 and at most 1"),
        ({"retention_floor": 1.5}, "retention_floor must be between 0 and 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, got nan"),
        ({"learning_rate": float("inf")}, "learning_rate must be above 0, got inf"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm must be above 0, got 0.0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"seed": -1}, "seed must be between 0 and 2**63 - 1, got -1"),
        ({"seed": 99999999999999999999}, "seed must be between 0 and 2**63 - 1, got 99999999999999999999"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"min_learning_rate_ratio": 1.1}, "min_learning_rate_ratio must be between 0 and 1, got 1.1"),
        ({"aux_layer_ids": ()}, "aux_layer_ids is empty"),
        ({"method": "eagle"}, "method must be one of 'p-eagle', 'eagle3', got 'eagle'"),
        ({"norm_output": False}, "norm_output is for eagle3"),
        ({"method": "eagle3", "mask_token_id": 5}, "mask_token_id is for p-eagle"),
        ({"method": "eagle3", "num_partitions": 2}, "num_partitions is for p-eagle"),
        ({"norm_before_fc": True}, "fc_norm and norm_before_fc exclude each other"),
        ({"draft_vocab_size": 1}, "draft_vocab_size must be at least 2, got 1"),
        ({"num_held_out": -1}, "num_held_out must be at least 0, got -1"),
        ({"init": "targets"}, "init must be one of 'target', 'random', got 'targets'"),
        ({"labels": "reach"}, "labels must be one of 'all', 'reached', 'until-failure', 'on-policy', got 'reach'"),
        ({"method": None}, "method must be one of 'p-eagle', 'eagle3', got None"),
        ({"loss": "mse"}, "loss must be one of 'kl', 'ce', 'kl+ce', 'tv+ce', 'lk', got 'mse'"),
        ({"embeddings": "tied"}, "embeddings must be one of 'shared', 'own', got 'tied'"),
        ({"compile": "yes"}, "compile must be one of 'auto', 'on', 'off', got 'yes'"),
    ],
)
def test_values_out_of_range_are_refused_by_name(settings, message):
    assert message in refusal(**settings).message


def test_a_length_without_room_for_the_drafts_is_refused_with_the_least_that_has():
    error = refusal(num_draft_tokens=8, max_length=10)
    assert error.message == "max_length 10 is too short for 8 draft tokens" and error.hint == "use at least 11"
    TrainConfig(data=Path("d"), output=Path("o"), num_draft_tokens=8, max_length=11)


def test_a_recipe_file_becomes_settings_with_real_paths_and_tuples(tmp_path):
    recipe = tmp_path / "train.toml"
    recipe.write_text(
        'data = "d.jsonl"\noutput = "out"\nheld_out = "h.jsonl"\naux_layer_ids = [1, 2]\nlearning_rate = 1\n'
    )
    assert from_toml(TrainConfig, recipe) == TrainConfig(
        data=Path("d.jsonl"), output=Path("out"), held_out=Path("h.jsonl"), aux_layer_ids=(1, 2), learning_rate=1.0
    )


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("batchsize = 4", "unknown key 'batchsize'", "did you mean 'batch_size'?"),
        ('batch_size = "4"', "batch_size must be a whole number, got '4'", None),
        ('loss = "kld"', "loss must be one of 'kl', 'ce', 'kl+ce', 'tv+ce', 'lk', got 'kld'", "did you mean 'kl'?"),
        ("num_steps = 0", "num_steps must be at least 1, got 0", None),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_with_the_file_and_the_key(tmp_path, line, message, hint):
    recipe = tmp_path / "train.toml"
    recipe.write_text(f'data = "d.jsonl"\noutput = "out"\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        from_toml(TrainConfig, recipe)
    assert message in caught.value.message and str(recipe) in caught.value.message and caught.value.hint == hint


def test_a_recipe_without_data_is_told_so(tmp_path):
    recipe = tmp_path / "train.toml"
    recipe.write_text('output = "out"\n')
    with pytest.raises(ConfigError, match="the key 'data' is missing"):
        from_toml(TrainConfig, recipe)
