"""Cursors are texts that a client can only send back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.read.queries import parse_filter
from cope_sweep.read.queries.runs import decode_cursor, encode_cursor
from cope_sweep.store import Filter, QueryError, RunQuery


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
    with pytest.raises(QueryError, match="is no condition; write KEY, an operator and a value"):
        parse_filter(text)


QUERY = RunQuery(filters=(Filter("m", "<", 1.0),), sort="m")
values = st.none() | st.floats(allow_nan=False) | st.integers(-(2**60), 2**60) | st.text() | st.booleans()


@given(st.lists(values, max_size=2), st.text("0123456789abcdef", min_size=16, max_size=16))
def test_a_cursor_holds_its_position_exactly(columns, run_id):
    position = (*columns, run_id)
    assert decode_cursor(encode_cursor(position, QUERY), QUERY) == position


@given(st.text())
def test_other_texts_are_refused(text):
    with pytest.raises(QueryError, match="not the cursor of a page of this query"):
        decode_cursor(text, QUERY)


@pytest.mark.parametrize(
    "other",
    [
        RunQuery(sort="m"),
        RunQuery(filters=QUERY.filters, sort="m", descending=True),
        RunQuery(QUERY.statuses, sort="seed"),
    ],
)
def test_that_of_another_query_is_refused(other):
    with pytest.raises(QueryError, match="begin without a cursor"):
        decode_cursor(encode_cursor(("0" * 16,), QUERY), other)
    with pytest.raises(QueryError, match="begin without a cursor"):
        decode_cursor(encode_cursor(("0" * 16,), QUERY), QUERY, "tiny None")


def test_the_size_of_the_page_is_not_part_of_it():
    larger = RunQuery(filters=QUERY.filters, sort="m", limit=7)
    assert decode_cursor(encode_cursor(("0" * 16,), QUERY), larger) == ("0" * 16,)
