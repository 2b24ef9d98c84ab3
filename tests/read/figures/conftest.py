import pytest

from tests.helpers.finished_runs import finish, plan_of

METRICS = [
    {"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"},
    {"name": "dense/token_error", "label": "OOD", "unit": "%"},
]
PUBLISHED = [
    {"match": {"model.position": "CoPE"}, "values": {"in_dist/token_error": 4.5}, "std": {"in_dist/token_error": 0.5}},
]  # fmt: skip


@pytest.fixture
def grid_plan():
    """Two encodings × two widths × two seeds."""
    grid = {"model.position": {"CoPE": ["cope"], "none": []}, "model.dim": [8, 16]}
    return plan_of(name="widths", grid=grid, metrics=METRICS, published=PUBLISHED)


@pytest.fixture
def grid_store(grid_plan, store):
    """All runs finished: in_dist is 10 for CoPE and 50 for none, + 4 for width 16, ± 1 by seed; dense is constant."""
    for row in grid_plan.rows:
        base = (10.0 if row.labels["model.position"] == "CoPE" else 50.0) + 4.0 * (row.labels["model.dim"] == "16")
        for run in row.runs:
            error = base + (1.0 if run.seed else -1.0)
            finish(store, run, {"in_dist/token_error": error, "dense/token_error": 25.0}, {"parameters": 1000})
    return store
