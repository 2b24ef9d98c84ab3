import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.config import TrainSpec
from cope_sweep.optim import SCHEDULES
from tests.helpers.tiny import tiny_run


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2]),
    ],
)
def test_rates_by_hand(schedule, rates):
    train = tiny_run(**{"train.schedule": schedule, "train.warmup": 2}).train
    assert [train.learning_rate(1.0, step) for step in range(1, 7)] == pytest.approx(rates)


@given(schedule=st.sampled_from(list(SCHEDULES)), steps=st.integers(1, 50), data=st.data())
@settings(deadline=None)
def test_rates_are_positive_and_never_above_the_full_rate(schedule, steps, data):
    warmup = data.draw(st.integers(0, steps))
    train = TrainSpec.model_validate({"steps": steps, "warmup": warmup, "schedule": schedule})
    rates = [train.learning_rate(0.1, step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 0.1 * (1 + 1e-15) for rate in rates)  # lr·step/warmup rounds
    assert rates[max(0, warmup - 1)] == pytest.approx(0.1)  # the full rate is reached
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
