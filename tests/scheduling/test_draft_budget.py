"""Choosing the size of a verification pass from what drafts cost and bring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.scheduling.draft_budget import (
    HOLD_SECONDS,
    INDEPENDENT,
    PROBE_EVERY,
    PROBE_STEPS,
    WARM_UP,
    Choice,
    DraftBudget,
    DraftCurve,
)

LIKELY = DraftCurve((1, 2, 3, 4), (0.9, 1.7, 2.4, 3.0))
UNLIKELY = DraftCurve((1, 2, 3, 4), (0.1, 0.11, 0.12, 0.12))
CHEAP = {1: 1.0, 2: 1.1, 3: 1.15, 4: 1.2, 5: 1.25}
DEAR = {1: 1.0, 2: 1.3, 3: 2.0, 4: 3.0, 5: 4.0}


def observed(seconds: dict[int, float], curve: DraftCurve, num_times: int = WARM_UP) -> DraftBudget:
    budget = DraftBudget({min(seconds): seconds}.__getitem__)
    for _ in range(num_times):
        budget.observe(curve, num_requests=1)
    return budget


def test_without_any_observation_all_drafts_are_verified() -> None:
    assert DraftBudget({1: DEAR}.__getitem__).choose(1, 1, 1).num_tokens == 5


def test_a_pass_has_room_for_the_first_draft_of_each_request() -> None:
    costs = {64: {64: 1.0, 80: 1.01, 128: 1.5}}
    found = []
    for num_drafting in (1, 16, 17, 64):
        budget = DraftBudget(costs.__getitem__)
        budget.observe(DraftCurve((1, 31), (0.9, 2.0)), num_requests=1)
        found.append(budget.choose(batch=64, num_requests=64, num_drafting=num_drafting).num_tokens)
    assert found == [80, 80, 128, 128]


def test_likely_and_cheap_drafts_are_all_verified_and_dear_ones_in_part() -> None:
    assert observed(CHEAP, LIKELY).choose(1, 1, 1).num_tokens == 5
    assert observed(DEAR, LIKELY).choose(1, 1, 1).num_tokens == 2


def test_drafting_stops_only_when_enough_was_seen_and_is_tried_again_at_times() -> None:
    assert observed(DEAR, UNLIKELY, WARM_UP - 1).choose(1, 1, 1).num_tokens == 2
    budget = observed(DEAR, UNLIKELY)
    chosen = []
    for _ in range(2 * PROBE_EVERY):
        choice = budget.choose(1, 1, 1)
        budget.observe_time(choice, 1)
        chosen.append(choice.num_tokens)
    assert chosen.count(2) == 2 * PROBE_STEPS and chosen.count(1) == 2 * (PROBE_EVERY - PROBE_STEPS)
    assert chosen[PROBE_EVERY - PROBE_STEPS : PROBE_EVERY] == [2] * PROBE_STEPS, "a few steps in a row"


def test_a_burst_of_hard_drafts_does_not_stop_drafting_in_a_large_batch() -> None:
    """Sixty requests begin their answers at the same time, where drafts are unlikely for some steps."""
    seconds = {64: 1.0, 128: 1.5}
    budget = DraftBudget({64: seconds}.__getitem__)
    for _ in range(WARM_UP):
        budget.observe(LIKELY.scaled(60), num_requests=60)
    for _ in range(20):
        budget.observe(UNLIKELY.scaled(60), num_requests=60)
    assert budget.choose(64, 60, 60).num_tokens == 128
    for _ in range(200):
        budget.observe(UNLIKELY.scaled(60), num_requests=60)
    assert budget.choose(64, 60, 60).num_tokens == 64


def test_the_first_steps_of_a_large_batch_do_not_stop_drafting() -> None:
    budget = DraftBudget({64: {64: 1.0, 128: 1.5}}.__getitem__)
    chosen = []
    for _ in range(WARM_UP // INDEPENDENT):
        chosen.append(budget.choose(64, 60, 60).num_tokens)
        budget.observe(UNLIKELY.scaled(60), num_requests=60)
    assert set(chosen) == {128} and budget.choose(64, 60, 60).num_tokens == 64


def test_new_requests_draft_beside_paused_ones_where_drafting_pays_for_all() -> None:
    """One draft of a request pays a third of what a pass with drafts costs more, those of all requests pay."""
    budget = observed({4: 1.0, 8: 1.5}, DraftCurve((1,), (0.8,)))
    assert budget.choose(4, 4, num_drafting=1).num_tokens == 4
    assert budget.choose(4, 4, num_drafting=1, num_paused=3).num_tokens == 8
    assert budget.choose(4, 4, num_drafting=1, num_paused=3).num_expected == pytest.approx(0.8)


def test_drafts_that_are_accepted_less_than_expected_lose_weight() -> None:
    budget = observed({1: 1.0, 2: 1.2, 5: 2.2}, LIKELY)
    assert budget.choose(1, 1, 1).num_tokens == 5
    for _ in range(2000):
        budget.observe_accepted(1, Choice(5, 1, 3.0))
    assert budget.calibration == pytest.approx(1 / 3, rel=0.05)
    assert budget.choose(1, 1, 1).num_tokens == 2


def test_accepted_drafts_count_per_request_so_that_a_large_batch_is_forgotten_like_a_small_one() -> None:
    """After many steps of 256 requests whose drafts fail, those of one request are accepted as expected."""
    budget = observed(DEAR, LIKELY)
    for _ in range(1000):
        budget.observe_accepted(0, Choice(512, 256, 640.0))
    for _ in range(1000):
        budget.observe_accepted(3, Choice(5, 1, 3.0))
    assert budget.calibration > 0.8


def test_passes_whose_size_nobody_chose_say_nothing_about_the_probabilities() -> None:
    budget = observed(CHEAP, LIKELY)
    for _ in range(100):
        budget.observe_accepted(3, Choice(5, 1))
    assert budget.calibration == 1


def test_a_pass_of_another_size_teaches_what_its_drafts_are_worth() -> None:
    budget = observed(CHEAP, LIKELY)
    choice = budget.choose(1, 1, 1)
    assert budget.resized(choice, 1, 3) == (3, 1, pytest.approx(1.7), True, 1.15, 1.0)
    for _ in range(2000):
        budget.observe_accepted(1, budget.resized(choice, 1, 3))
    assert budget.calibration == pytest.approx(1 / 1.7, rel=0.05)
    assert DraftBudget({1: DEAR}.__getitem__).resized(Choice(5, 1), 1, 3).num_expected is None


def test_drafts_are_free_while_the_device_waits_for_the_host() -> None:
    """A step takes 1 s without drafts and 3 s with three of them. The host needs 3 s."""
    budget = observed(DEAR, UNLIKELY)
    assert budget.choose(1, 1, 1).num_tokens == 1
    budget.observe_host(3.0, batch=2)
    assert budget.choose(1, 1, 1).num_tokens == 1, "another batch size"
    budget.observe_host(3.0, batch=1)
    assert budget.choose(1, 1, 1).num_tokens == 4
    for _ in range(WARM_UP):
        budget.observe_host(0.5, batch=1)
        budget.observe(UNLIKELY, num_requests=1)
    assert budget.choose(1, 1, 1).num_tokens == 1


def test_a_single_slow_step_of_the_host_changes_little() -> None:
    budget = observed(DEAR, UNLIKELY)
    for seconds in (0.5, 500.0, 0.5):
        budget.observe_host(seconds, batch=1)
        assert budget.choose(1, 1, 1).num_tokens == 1


def test_rows_that_pad_a_batch_emit_nothing() -> None:
    """Three requests in a graph of four: 3 tokens in a second, or 4.8 with drafts."""
    curve = DraftCurve((1,), (0.6,))
    assert observed({4: 1.0, 8: 1.55}, curve).choose(4, num_requests=3, num_drafting=3).num_tokens == 8
    assert observed({4: 1.0, 8: 1.75}, curve).choose(4, num_requests=3, num_drafting=3).num_tokens == 4


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9), st.integers(0, 12))
def test_more_drafts_never_bring_less(probabilities: list[float], num_drafts: int) -> None:
    falling = sorted(probabilities, reverse=True)
    sums = [sum(falling[: place + 1]) for place in range(len(falling))]
    curve = DraftCurve(range(1, len(falling) + 1), sums)
    assert curve.expected(num_drafts) == pytest.approx(sum(falling[:num_drafts]))
    assert curve.expected(num_drafts) <= curve.expected(num_drafts + 0.5) <= curve.expected(num_drafts + 1)


def test_known_drafts_get_more_of_a_pass_where_they_are_likely_and_less_where_they_are_not() -> None:
    """On average 2.2 tokens in 2 s with one draft; a further token must then cost less than 0.9 s."""
    budget = observed({1: 1.5, 2: 2.0, 4: 3.0}, DraftCurve((1, 3), (0.7, 0.8)))
    known = [DraftCurve((1, 3), sums) for sums in ((0.95, 2.6), (0.5, 0.6))]
    assert [budget.choose(1, 1, 1, drafts=drafts).num_tokens for drafts in known] == [4, 2]
    assert budget.choose(1, 1, 1, drafts=known[0]).num_expected == pytest.approx(2.6)
    assert budget.choose(1, 1, 1).num_tokens == 2


def test_before_any_observation_known_drafts_decide() -> None:
    budget = DraftBudget({1: {1: 1.0, 2: 1.1, 4: 9.0}}.__getitem__)
    assert budget.choose(1, 1, 1, drafts=DraftCurve((1, 3), (0.9, 2.0))).num_tokens == 2


def serve(budget: DraftBudget, curve: DraftCurve, num_requests: int, num_steps: int = 50) -> list[int]:
    """Answer requests one after another, as the runner does: one whose drafts do not pay is paused to its end.

    Returns the steps of each request that verified drafts.
    """
    drafted = []
    for _ in range(num_requests):
        drafted.append(0)
        while drafted[-1] < num_steps and (choice := budget.choose(1, 1, 1)).num_tokens > 1:
            budget.observe_time(choice, 1 + (choice.num_expected or 0))
            budget.observe_accepted(round(choice.num_expected or 0), choice)
            budget.observe(curve, num_requests=1)
            drafted[-1] += 1
        for _ in range(num_steps - drafted[-1]):
            budget.observe_time(Choice(1), 1)
    return drafted


def test_with_trials_each_request_drafts_a_few_steps_and_the_verdict_follows_it() -> None:
    """Hard texts, then easy ones: the first easy request drafts to its end, where probes would come much later."""
    budget = DraftBudget({1: DEAR}.__getitem__, trial_steps=16)
    drafted = []
    for curve in (UNLIKELY, UNLIKELY, LIKELY, LIKELY, UNLIKELY):
        drafted.append(0)
        for step in range(50):
            choice = budget.choose(1, 1, 1, drafts=curve, num_on_trial=step < 16)
            if not choice.pays and step >= 16:
                assert choice.num_tokens == 1
                break
            assert choice.num_tokens > 1
            budget.observe_accepted(round(choice.num_expected or 0), choice)
            budget.observe(curve, num_requests=1)
            drafted[-1] += 1
    assert drafted[:4] == [16, 16, 50, 50] and 16 < drafted[4] < 50


def clock_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("peagle.scheduling.draft_budget.time.monotonic", lambda: now[0])
    return now


def test_drafting_stops_with_the_traffic_and_is_back_when_it_pays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = clock_of(monkeypatch)
    caplog.set_level("INFO")
    budget = DraftBudget({1: DEAR}.__getitem__)
    assert serve(budget, LIKELY, 20) == [50] * 20 and budget.pays and budget.gain > 1 and not caplog.records
    serve(budget, UNLIKELY, 2000)
    assert not budget.pays and budget.gain < 1 and budget.num_pauses == 1
    said = caplog.records[-1]
    assert said.levelname == "WARNING" and said.message.startswith("drafting does not pay at batch size 1 (")
    assert "tokens/s expected, 1.0 without drafts; drafts are accepted " in said.message
    now[0] = HOLD_SECONDS
    back = serve(budget, LIKELY, 4 * PROBE_EVERY)
    assert budget.pays and budget.gain > 1 and back[-1] == 50, "every step of the last request"
    assert caplog.records[-1].message.startswith("drafting pays again at batch size 1 (") and len(caplog.records) == 2


def test_drafting_is_tried_again_after_some_plain_steps_however_few_requests_come() -> None:
    """Hard texts, then easy ones, one at a time. All but one step of a request without drafts need no choice."""
    budget = DraftBudget({1: DEAR}.__getitem__)
    serve(budget, UNLIKELY, 200)
    assert budget.is_stopped
    drafted = serve(budget, LIKELY, 2 * PROBE_EVERY // 50)
    assert drafted[-1] == 50 and sum(drafted) < 50 * len(drafted)


def test_a_burst_drafts_though_drafting_stopped_among_the_last_requests_of_the_one_before() -> None:
    budget = DraftBudget({64: {64: 1.0, 128: 1.5}}.__getitem__)
    for _ in range(WARM_UP):
        budget.observe(UNLIKELY.scaled(10), num_requests=10)
    assert not budget.choose(64, 60, num_drafting=10, num_paused=0).pays
    assert not budget.choose(64, 60, num_drafting=50, num_paused=10).pays, "short bursts may not draft all the time"
    for _ in range(2 * PROBE_STEPS):
        budget.observe_time(Choice(64), 1)
    assert not budget.choose(64, 60, num_drafting=10, num_paused=50).pays, "no burst"
    for _ in range(WARM_UP // INDEPENDENT):
        assert budget.choose(64, 60, num_drafting=50, num_paused=10).pays
        budget.observe(UNLIKELY.scaled(50), num_requests=50)
    assert not budget.choose(64, 60, num_drafting=50, num_paused=10).pays


def test_drafting_that_began_again_goes_on_for_some_steps() -> None:
    """A burst grows through batch sizes that pay and that do not; a stop costs its requests their drafts for good."""
    budget = observed(DEAR, UNLIKELY)
    assert not budget.choose(1, 1, 1).pays
    budget.observe_host(5.0, batch=1)
    assert budget.choose(1, 1, 1).pays
    for _ in range(50):
        budget.observe_host(0.1, batch=1)
    assert budget.choose(1, 1, 1).pays
    for _ in range(WARM_UP):
        budget.observe(UNLIKELY, num_requests=1)
    assert not budget.choose(1, 1, 1).pays


def test_a_verdict_that_changes_with_every_step_is_told_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is slow at batch size 2 only, where drafts are free."""
    now = clock_of(monkeypatch)
    caplog.set_level("INFO")
    monkeypatch.setattr("peagle.scheduling.draft_budget.WARM_UP", 1)
    budget = DraftBudget({1: DEAR, 2: DEAR}.__getitem__)
    budget.observe_host(3.0, batch=2)
    for step in range(310):
        now[0] = HOLD_SECONDS / 100 * step
        budget.observe(UNLIKELY, num_requests=1)
        budget.choose(1 + step % 2, 1, 1)
    said = [record.message.split(" at ")[0] for record in caplog.records]
    assert said == ["drafting does not pay", "drafting pays again"] * 2 and budget.num_pauses == 2


def test_another_drafter_begins_without_a_verdict() -> None:
    budget = observed(DEAR, UNLIKELY)
    budget.choose(1, 1, 1)
    assert not budget.pays
    budget.reset()
    assert budget.pays and budget.gain is None and budget.num_pauses == 1, "a counter does not fall"


def test_a_batch_that_drafts_stops_only_if_it_loses_clearly_and_begins_again_once_it_gains() -> None:
    """One draft in a step that costs half as much again: 0.97, 0.9, 0.97 and 1.07 times plain decoding."""
    budget = DraftBudget({1: {1: 1.0, 2: 1.5}}.__getitem__)
    found = []
    for share in (0.46, 0.35, 0.46, 0.6):
        for _ in range(5 * WARM_UP):
            budget.observe(DraftCurve((1,), (share,)), num_requests=1)
        found.append(budget.choose(1, 1, 1).pays)
    assert found == [True, False, False, True]
