"""Cursors are texts that a client can only send back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.read.queries import cursors
from cope_sweep.store import Filter, QueryError, RunQuery

QUERY = RunQuery(filters=(Filter("m", "<", 1.0),), sort="m")
values = st.none() | st.floats(allow_nan=False) | st.integers(-(2**60), 2**60) | st.text() | st.booleans()


@given(st.lists(values, max_size=2), st.text("0123456789abcdef", min_size=16, max_size=16))
def test_a_cursor_holds_its_position_exactly(columns, run_id):
    position = (*columns, run_id)
    assert cursors.decode(cursors.encode(position, QUERY), QUERY) == position


@given(st.text())
def test_other_texts_are_refused(text):
    with pytest.raises(QueryError, match="not the cursor of a page of this query"):
        cursors.decode(text, QUERY)


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
        cursors.decode(cursors.encode(("0" * 16,), QUERY), other)
    with pytest.raises(QueryError, match="begin without a cursor"):
        cursors.decode(cursors.encode(("0" * 16,), QUERY), QUERY, "tiny None")


def test_the_size_of_the_page_is_not_part_of_it():
    larger = RunQuery(filters=QUERY.filters, sort="m", limit=7)
    assert cursors.decode(cursors.encode(("0" * 16,), QUERY), larger) == ("0" * 16,)
