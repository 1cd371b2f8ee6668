"""The plan of a build: how a budget is split, what is refused, and which settings make a finished stage stale."""

import dataclasses
import time
from pathlib import Path

import pytest

from harness.measured_rates import CPU
from peagle.building.config import FIRST_STAGE, STAGES, Budget, BuildSettings
from peagle.building.plan import LEAST_STEPS, MARGIN, check_disk, make_plan
from peagle.building.shape import TargetFacts, shape_of
from peagle.building.state import BuildState
from peagle.errors import CapacityError, ConfigError
from peagle.targets.prices import price_of

GPU = dataclasses.replace(
    CPU, device="cuda", feature_bytes=0, recipe="embedded", full_steps=12_000, tokens_per_step=32_768,
    tokens_per_second=90_000.0, tokens_per_second_alone=1_000.0, batch=256, seconds_per_step=0.11,
)  # fmt: skip


def test_a_budget_of_time_is_split_between_text_and_ten_passes_over_it():
    plan = make_plan(CPU, Budget.parse("20m"))
    assert plan.total == pytest.approx(MARGIN * 1200, rel=0.02), "all of it is used, but for the margin"
    passes = plan.num_steps * CPU.tokens_per_step / (plan.num_tokens / 0.75)
    assert passes == pytest.approx(10, rel=0.05)
    longer = make_plan(CPU, Budget.parse("40m"))
    assert longer.num_tokens > 2 * plan.num_tokens and longer.num_steps > 2 * plan.num_steps


def test_a_budget_above_the_full_plan_is_not_used_up():
    full, plan = make_plan(GPU, None), make_plan(GPU, Budget.parse("9h"))
    assert (plan.num_tokens, plan.num_steps) == (full.num_tokens, full.num_steps) == (30_000_000, 12_000)
    assert plan.total < 3600


def test_a_cpu_without_a_budget_gets_an_hour():
    plan = make_plan(CPU, None)
    assert plan.budget is not None and plan.budget.text == "1h" and plan.total <= 3600


def test_a_budget_of_money_is_time_at_the_price():
    price = price_of(None, 4.0)
    assert Budget.parse("2usd").at(price).seconds == 1800
    assert make_plan(GPU, Budget.parse("2usd").at(price)).price(price) <= 2
    with pytest.raises(ConfigError, match="--budget 2usd needs the price of this machine"):
        Budget.parse("2usd").at(None)


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_works():
    with pytest.raises(ConfigError, match="--budget 1m is too small") as refused:
        make_plan(CPU, Budget.parse("1m"))
    least = refused.value.hint.split("--budget ")[1].split()[0]
    assert make_plan(CPU, Budget.parse(least)).num_steps >= LEAST_STEPS


@pytest.mark.parametrize("text", ["", "10", "ten minutes", "-5m", "0h", "5 usdollars"])
def test_a_budget_needs_a_unit(text):
    with pytest.raises(ConfigError, match="is no limit"):
        Budget.parse(text)


def test_few_prompts_limit_the_text_and_the_steps():
    plan = make_plan(CPU, Budget.parse("1h"), most_tokens=1_000)
    assert plan.num_tokens == 1_000 and plan.num_steps == LEAST_STEPS and plan.total < 1200


def test_a_plan_that_the_disk_cannot_hold_is_refused():
    with pytest.raises(CapacityError, match=r"needs 0\.\d GiB of disk, but 0\.0 GiB are free"):
        check_disk(make_plan(CPU, None), 1)


FACTS = TargetFacts(
    num_parameters=135_000_000,
    architecture="LlamaForCausalLM",
    has_experts=False,
    is_gpu=False,
    max_length=8192,
    vocab_size=49_152,
    budget=600.0,
    seconds_per_token=0.3,
)


def test_the_shape_follows_the_size_and_the_device(tmp_path):
    asked = BuildSettings(output=tmp_path, num_draft_tokens=6)
    large = shape_of(asked, dataclasses.replace(FACTS, num_parameters=8_000_000_000, is_gpu=True))
    config = large.train_config(tmp_path, tmp_path)
    assert (large.recipe, config.max_length, config.num_draft_tokens) == ("dense-8b", 2048, 6)
    small = shape_of(asked, FACTS)
    config = small.train_config(tmp_path, tmp_path)
    assert (small.recipe, config.max_length, config.num_layers, config.num_draft_tokens) == (None, 192, 1, 6)
    assert (config.features, config.draft_vocab_size) == ("cached", 4096)
    tiny = shape_of(asked, dataclasses.replace(FACTS, max_length=64, vocab_size=288)).train_config(tmp_path, tmp_path)
    assert (tiny.max_length, tiny.draft_vocab_size) == (64, None)


# The state ------------------------------------------------------------------------------------------------------------


def finished(*stages):
    state = BuildState(BuildSettings(output=Path("out"), budget="10m").described(target=None))
    for stage in stages:
        state.begin(stage, ["peagle", stage])
        state.end(stage, "finished", {})
    return state


def test_changed_settings_are_refused_if_a_stage_would_be_stale(tmp_path):
    state = finished("check", "data", "train", "eval")
    now = state.settings | {"num_draft_tokens": 3}
    with pytest.raises(ConfigError) as refused:
        state.check_settings(now, None, tmp_path)
    assert "num_draft_tokens was None, is 3. These stages would be stale: train, eval" in refused.value.message
    assert "add --from-stage train" in refused.value.hint
    with pytest.raises(ConfigError, match="This stage would be stale: train"):
        state.check_settings(now, "eval", tmp_path)
    state.check_settings(now, "train", tmp_path)
    assert state.settings != now, "they are taken over when the stages are forgotten"


def test_settings_of_later_stages_may_change(tmp_path):
    state = finished("check", "data")
    state.check_settings(state.settings | {"num_layers": 2, "prompts": {"name": "p", "sha256": "1"}}, None, tmp_path)
    with pytest.raises(ConfigError, match=r"budget was '10m', is '1h'\. This stage would be stale: data"):
        state.check_settings(state.settings | {"budget": "1h"}, None, tmp_path)


def test_a_state_is_read_as_written_and_counts_the_time_of_a_killed_attempt(tmp_path):
    state = finished("check")
    state.begin("data", ["peagle", "data"])
    state.stages["data"].began -= 100
    state.write(tmp_path)  # the newest file: written 100 seconds after the attempt began
    found = BuildState.read(tmp_path)
    assert found is not None and found.settings == state.settings
    assert found.is_finished("check") and not found.is_finished("data")
    assert found.stages["data"].seconds == pytest.approx(100, abs=2) and found.stages["data"].began == 0
    assert not list(tmp_path.glob("*.tmp")) and time.time() > found.stages["data"].began


def test_a_damaged_state_is_refused(tmp_path):
    (tmp_path / "build.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match=r"build\.json cannot be read: its format is 'other'"):
        BuildState.read(tmp_path)


def test_every_setting_has_a_first_stage():
    others = {"target": None, "dtype": "auto", "device": "auto", "instance": None, "price_per_hour": None}
    described = BuildSettings(output=Path("out")).described(**others)
    assert FIRST_STAGE.keys() == described.keys() and set(FIRST_STAGE.values()) <= set(STAGES)
