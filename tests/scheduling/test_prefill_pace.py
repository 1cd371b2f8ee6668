"""Prompt tokens per step on a CPU, from the measured speed of prefill passes."""

from peagle.scheduling.prefill_pace import FIRST_TOKENS, KEPT, MIN_TOKENS, STEP_SECONDS, PrefillPace


def test_passes_take_as_long_as_they_may_once_one_was_timed() -> None:
    pace = PrefillPace()
    assert pace.num_tokens == FIRST_TOKENS
    for tokens_per_second in (500, 2000):
        pace = PrefillPace()
        pace.observe(64, 64 / tokens_per_second)
        assert pace.num_tokens == STEP_SECONDS * tokens_per_second


def test_a_short_prompt_hardly_changes_the_speed_of_long_ones() -> None:
    pace = PrefillPace()
    pace.observe(1000, 2.0)
    pace.observe(2, 0.05)
    assert 0.9 * STEP_SECONDS * 500 < pace.num_tokens < STEP_SECONDS * 500


def test_the_newest_passes_count_most() -> None:
    pace = PrefillPace()
    pace.observe(1000, 1.0)
    for _ in range(20):
        pace.observe(100, 1.0)
    assert KEPT < 1 and pace.num_tokens == STEP_SECONDS * 100


def test_passes_that_are_slow_however_short_are_not_cut_further() -> None:
    pace = PrefillPace()
    pace.observe(100, 60.0)
    assert pace.num_tokens == MIN_TOKENS
