import ast
import math
from pathlib import Path

import pytest

import cope_sweep.read
from cope_sweep.config import Metric
from cope_sweep.read.numbers import (
    decimal_places,
    fixed,
    integer,
    interval_text,
    metric_text,
    p_text,
    percent_range,
    significant,
)

PERCENT = Metric(name="in_dist/token_error", unit="%")
MILLIONS = Metric(name="facts.parameters", unit="M", scale=1e-6, decimals=1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.4, "3.40"),
        (0.0, "0.00"),
        (0.005, "0.01"),
        (0.0049, "0.005"),
        (0.00004, "0.00004"),
        (4e-9, "0.000000"),
        (-0.003, "-0.003"),
        (math.inf, "inf"),
        (math.nan, "–"),
    ],
)
def test_a_value_has_the_digits_of_its_metric_or_those_that_it_needs(value, text):
    assert metric_text(PERCENT, value) == text


def test_a_value_is_printed_in_the_unit_of_its_metric():
    assert metric_text(MILLIONS, 124_400_000) == "124.4"
    assert metric_text(MILLIONS, 20_000) == "0.02"
    assert metric_text(MILLIONS, 20_000, 1) == "0.0", "of a cell that has decided"


def test_a_difference_has_a_sign_and_is_never_minus_zero():
    assert [metric_text(PERCENT, value, 2, signed=True) for value in (4.2, -4.2, -0.001)] == ["+4.20", "-4.20", "+0.00"]
    assert significant(0.25, signed=True) == "+0.25"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fixed(None, 2), "–"),
        (fixed(0.125, 1), "0.1"),
        (significant(0.123456), "0.1235"),
        (significant(1234567.0, 3), "1.23e+06"),
        (interval_text(0.42, 0.314, 0.5), "0.42 [0.31, 0.50]"),
        (percent_range(0.342, 1.0), "34–100 %"),
        (integer(1234), "1,234"),
        (integer(2500.5), "2,500"),
        (integer(None), "–"),
        (p_text(0.0421), "0.042"),
        (p_text(0.00099), "0.001"),
        (p_text(0.05), "0.050"),
        (p_text(0.05002), "0.0501"),
        (p_text(0.0504), "0.0504"),
        (p_text(0.0506), "0.051"),
        (p_text(0.00042), "0.0004"),
    ],
)
def test_other_texts(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("scale", "digits"),
    [
        (1.0, {16.9: 1, 100.0: 1, 0.004: 3, 0.03: 2, 5e-05: 5, 7.0: 1}),
        (1e-6, {124.4e6: 1, 20.8e6: 1, 123e6: 0, 1_234_567: 6}),
    ],
)
def test_places_of_published_numbers(scale, digits):
    assert {value: decimal_places(value, scale) for value in digits} == digits


@pytest.mark.parametrize("room", ["tables", "reports"])
def test_tables_and_reports_round_nowhere_else(room):
    """A wrong number of digits has one home: no f-string there has a format such as `.2f`."""
    rounding = []
    for path in Path(cope_sweep.read.__path__[0], room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            spec = node.format_spec if isinstance(node, ast.FormattedValue) else None
            if spec is not None and "." in ast.unparse(spec):
                rounding.append(f"{path.name}:{node.lineno}")
    durations = {place for place in rounding if place.startswith("provenance.py")}
    assert set(rounding) == durations
