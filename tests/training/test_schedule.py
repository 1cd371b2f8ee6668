"""The learning-rate schedule and its corners."""

from pathlib import Path

import pytest

from peagle.objective.config import TrainConfig
from peagle.training.optimizer import learning_rate


def settings(**changes):
    return TrainConfig(data=Path("data.jsonl"), output=Path("out"), **changes)


def test_the_learning_rate_warms_up_holds_its_peak_and_ends_at_the_floor():
    config = settings(num_steps=1000, warmup_steps=10, learning_rate=2.0, min_learning_rate_ratio=0.1)
    assert learning_rate(0, config) == pytest.approx(0.2)
    assert learning_rate(9, config) == learning_rate(10, config) == 2.0
    assert learning_rate(505, config) == pytest.approx(2.0 * 0.55)
    assert learning_rate(999, config) == pytest.approx(0.2, rel=1e-3)
    assert learning_rate(1000, config) == learning_rate(5000, config) == pytest.approx(0.2)
    rates = [learning_rate(step, config) for step in range(10, 1000)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(0, 1), (0, 5), (5, 5), (9, 5)])
def test_odd_schedules_stay_between_zero_and_the_peak(warmup_steps, num_steps):
    config = settings(num_steps=num_steps, warmup_steps=warmup_steps, min_learning_rate_ratio=0.0)
    rates = [learning_rate(step, config) / config.learning_rate for step in range(num_steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[0] == (1.0 if warmup_steps == 0 else 1 / warmup_steps)
