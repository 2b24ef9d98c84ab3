import pytest

from cope_sweep.read.tables import table
from tests.helpers.finished_runs import fail, finish, plan_of

PUBLISHED = [
    {"match": {"model.position": "CoPE"}, "values": {"in_dist/token_error": 4.7}, "std": {"in_dist/token_error": 0.5},
     "source": "Table 1"},
    {"match": {"model.position": "None"}, "values": {"in_dist/token_error": 78.0}, "source": "Table 1"},
]  # fmt: skip


@pytest.fixture
def plan():
    return plan_of(published=PUBLISHED)


@pytest.fixture
def partial(plan, store):
    """CoPE complete, the second row with one seed of two (and a better mean!), the third with nothing finished."""
    cope, other, none = plan.rows
    finish(store, cope.runs[0], {"in_dist/token_error": 10.0, "dense/loss": 0.25})
    finish(store, cope.runs[1], {"in_dist/token_error": 14.0, "dense/loss": 0.75})
    finish(store, other.runs[0], {"in_dist/token_error": 1.0, "dense/loss": 9.0})
    fail(store, other.runs[1])
    fail(store, none.runs[0])
    return table(plan, store)
