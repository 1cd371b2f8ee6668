"""Choosing the number of draft tokens from costs and acceptance."""

import math
import sys
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import ConfigError
from peagle.scheduling.draft_cost import (
    ExpectedSpeed,
    StepCosts,
    acceptance_from_card,
    choose_num_draft_tokens,
    speed_table,
)

CARD = [0.66, 0.38, 0.24, 0.16, 0.12, 0.10, 0.08]


def costs_of(target: list[float], draft: float) -> StepCosts:
    """Costs from seconds for 1, 2, ... target rows and a constant draft."""
    return StepCosts(dict(enumerate(target, start=1)), dict.fromkeys(range(1, len(target)), draft))


def test_costs_that_rise_with_rows_give_few_draft_tokens_and_flat_costs_give_many() -> None:
    steep = costs_of([30, 34, 38, 48, 58, 68, 78, 88], 5)
    flat = costs_of([30, 31, 31, 31, 31, 31, 31, 31], 3)
    assert choose_num_draft_tokens(flat, CARD) == 7
    assert choose_num_draft_tokens(steep, CARD) == 2


def test_drafting_that_does_not_pay_is_turned_off() -> None:
    assert choose_num_draft_tokens(costs_of([10, 20, 30, 40], 10), CARD) == 0


def test_gain_below_the_threshold_is_not_taken() -> None:
    barely = costs_of([1.0, 1.5], 0.09)
    assert 1 < speed_table(barely, [0.6])[1].speed_up < 1.02
    assert choose_num_draft_tokens(barely, [0.6]) == 0


def test_table_begins_with_plain_decoding_and_ends_where_something_is_unknown() -> None:
    costs = costs_of([1.0] * 5, 0.1)
    assert [row.num_draft_tokens for row in speed_table(costs, CARD)] == [0, 1, 2, 3, 4]
    assert [row.num_draft_tokens for row in speed_table(costs, CARD[:2])] == [0, 1, 2]
    assert speed_table(costs, CARD)[0] == ExpectedSpeed(0, 1.0, 1.0, 1.0, 1.0)


def test_table_row_reads_as_a_log_line() -> None:
    row = speed_table(StepCosts({1: 0.030, 2: 0.036}, {1: 0.010}), [0.6])[1]
    assert str(row) == "K 1: acceptance length 1.60, step 46.0 ms, 34.8 tokens/s, 1.04 x"


def test_numbers_between_measured_ones_are_interpolated() -> None:
    costs = StepCosts({1: 1.0, 4: 4.0, 8: 6.0}, {3: 0.5, 7: 0.9})
    assert math.isclose(costs.step_seconds(1), 2.0 + 0.5), "below the smallest measured draft, the smallest's cost"
    assert math.isclose(costs.step_seconds(5), 5.0 + 0.7)
    assert costs.max_draft_tokens == 7


def test_drafter_without_measured_costs_leaves_plain_decoding() -> None:
    assert choose_num_draft_tokens(StepCosts({1: 1.0, 2: 1.0}, {}), CARD) == 0


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ({2: 1.0}, {1: 1.0}, "target_seconds has no entry for 1 token"),
        ({1: 0.0}, {1: 1.0}, "target_seconds must map counts from 1 to positive seconds, got {1: 0.0}"),
        ({1: 1.0}, {0: 1.0}, "draft_seconds must map counts from 1 to positive seconds, got {0: 1.0}"),
        ({1: math.nan}, {}, "target_seconds must map counts from 1"),
    ],
)
def test_costs_that_cannot_be_are_refused(target: dict[int, float], draft: dict[int, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        StepCosts(target, draft)
    assert message in str(error.value)


@pytest.mark.parametrize("acceptance", [[0.5, 0.6], [1.1], [-0.1], [0.5, math.nan]])
def test_acceptance_that_rises_or_is_no_share_is_refused(acceptance: list[float]) -> None:
    with pytest.raises(ConfigError) as error:
        choose_num_draft_tokens(costs_of([1.0, 1.0, 1.0], 0.1), acceptance)
    assert "must lie between 0 and" in str(error.value)


def test_card_figures_are_averaged_over_decoded_sets_and_replays_left_out() -> None:
    acceptance = {
        "held_out_replay": {"per_position": [0.9, 0.9, 0.9]},
        "mt_bench": {"per_position": [0.6, 0.4], "num_draft_tokens": 2},
        "humaneval": {"per_position": [0.8, 0.6, 0.2], "num_draft_tokens": 3},
        "note": "text",
    }
    assert acceptance_from_card(acceptance) == pytest.approx((0.7, 0.5))
    assert acceptance_from_card({"replay": acceptance["held_out_replay"]}) == pytest.approx((0.9, 0.9, 0.9))
    assert acceptance_from_card({}) is None


@given(
    target=st.lists(st.floats(0.001, 10), min_size=2, max_size=9),
    draft=st.floats(0.001, 10),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=8),
)
def test_chosen_number_is_never_slower_than_any_other(target: list[float], draft: float, shares: list[float]) -> None:
    acceptance = [math.prod(shares[: index + 1]) for index in range(len(shares))]
    costs = costs_of(target, draft)
    table = speed_table(costs, acceptance)
    chosen = choose_num_draft_tokens(costs, acceptance)
    best = max(row.speed_up for row in table)
    assert table[chosen].speed_up == best if best >= 1.02 else chosen == 0


def test_module_does_not_load_torch() -> None:
    code = "import sys, peagle.scheduling.draft_cost; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
