"""Conditions as they are written."""

import pytest

from cope_sweep.config.filters import Filter, parse_filter
from tests.helpers.errors import raises


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.layers>=4", Filter("model.layers", ">=", 4)),
        ("model.layers != 4", Filter("model.layers", "!=", 4)),
        ("train.lr<1e-3", Filter("train.lr", "<", 1e-3)),
        ("test/perplexity<=-.5", Filter("test/perplexity", "<=", -0.5)),
        ("model.position=cope+relative", Filter("model.position", "=", "cope+relative")),
        ("status == finished", Filter("status", "=", "finished")),
        ("model.tied=true", Filter("model.tied", "=", True)),
        ("facts.device='3'", Filter("facts.device", "=", "3")),
        ("facts.note=a=b<c", Filter("facts.note", "=", "a=b<c")),
    ],
)
def test_conditions(text, expected):
    parsed = parse_filter(text)
    assert parsed == expected
    assert type(parsed.value) is type(expected.value)


@pytest.mark.parametrize("text", ["", "model.layers", "model.layers>=", ">=4", "= 4", "model.layers 4"])
def test_what_is_no_condition(text):
    with raises("invalid_condition", condition=text):
        parse_filter(text)


def test_a_number_with_more_digits_than_python_reads():
    with raises("invalid_value", key="seed"):
        parse_filter(f"seed={'9' * 5000}")
