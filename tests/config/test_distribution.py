import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cope_sweep.config.ablation import Distribution
from cope_sweep.config.source import default_label

SHARES = st.floats(0, 1, exclude_max=True)
DISTRIBUTIONS = [
    Distribution(uniform=(0.0, 0.5)),
    Distribution(uniform=(-2.0, 1e-7)),
    Distribution(log_uniform=(1.23456e-4, 1.23456e-2)),
    Distribution(int_uniform=(1, 4)),
    Distribution(log_int_uniform=(1, 512)),
    Distribution(choice=["gpt2", ["cope", "rope"], 3, None, True]),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.kind)
@given(share=SHARES)
def test_a_value_is_found_again_by_its_label(distribution, share):
    value = distribution.value_at(share)
    assert distribution.value_of(default_label(value)) == value


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[:5], ids=lambda d: d.kind)
@given(share=SHARES)
def test_numbers_are_within_the_bounds_and_short(distribution, share):
    value = distribution.value_at(share)
    low, high = distribution.bounds
    assert low <= value <= high
    assert isinstance(value, int) if distribution.is_int else isinstance(value, float)
    assert value in (low, high) or float(f"{value:.4g}") == value


def shares(count):
    return [(index + 0.5) / count for index in range(count)]


def test_whole_numbers_are_equally_likely():
    values = [Distribution(int_uniform=(1, 4)).value_at(share) for share in shares(400)]
    assert [values.count(number) for number in (1, 2, 3, 4)] == [100] * 4


def test_choices_are_equally_likely():
    values = [Distribution(choice=["a", "b", "c"]).value_at(share) for share in shares(300)]
    assert [values.count(name) for name in "abc"] == [100] * 3


def test_each_decade_of_a_logarithm_is_equally_likely():
    values = [Distribution(log_uniform=(1e-4, 1e-1)).value_at(share) for share in shares(300)]
    decades = [math.floor(math.log10(value) + 1e-9) for value in values]
    assert [decades.count(decade) for decade in (-4, -3, -2)] == pytest.approx([100] * 3, abs=1)
    sizes = [Distribution(log_int_uniform=(1, 1024)).value_at(share) for share in shares(300)]
    assert sorted(sizes)[150] == pytest.approx(math.sqrt(0.5 * 1024), abs=1)
    assert min(sizes) == 1
    assert 1000 < max(sizes) <= 1024


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no distribution given; give exactly one of uniform, log_uniform"),
        ({"uniform": [0, 1], "choice": [1]}, "uniform and choice given; give exactly one"),
        ({"uniform": [1, 1]}, r"uniform: \[1.0, 1.0\] is empty"),
        ({"int_uniform": [4, 1]}, r"int_uniform: \[4, 1\] is empty; write the lower bound first"),
        ({"log_uniform": [0, 1]}, "log_uniform: the lower bound 0.0 must be greater than 0"),
        ({"log_int_uniform": [0, 8]}, "the lower bound 0 must be greater than 0"),
        ({"choice": []}, "at least 1 item"),
        ({"choice": ["a", "b", "a"]}, "choice has a twice"),
        ({"int_uniform": [1, 2.5]}, "valid integer"),
        ({"uniform": [1]}, "Field required"),
        ({"uniform": ["0", 1]}, "valid number"),
    ],
)
def test_impossible_distributions_are_refused(data, message):
    with pytest.raises(ValidationError, match=message):
        Distribution.model_validate(data)


@pytest.mark.parametrize(
    ("distribution", "label"),
    [
        (DISTRIBUTIONS[0], "0.6"),
        (DISTRIBUTIONS[0], "much"),
        (DISTRIBUTIONS[0], "true"),
        (DISTRIBUTIONS[3], "5"),
        (DISTRIBUTIONS[3], "1.5"),
        (DISTRIBUTIONS[5], "gpt3"),
    ],
)
def test_labels_of_other_values_are_refused(distribution, label):
    with pytest.raises(ValueError, match="no number|is none of|no whole number|Expecting value"):
        distribution.value_of(label)
