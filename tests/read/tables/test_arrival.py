"""The table of the same runs does not depend on how they came into the store."""

import pathlib

import pytest
import scipy.stats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cope_sweep.read.tables import table
from cope_sweep.store import Store
from cope_sweep.store.rebuild import rebuild
from tests.read.tables.ablations import begin, end, fail, finish, plan_of, stop

PLAN = plan_of(
    published=[
        {
            "match": {"model.position": "CoPE"},
            "values": {"in_dist/token_error": 4.7},
            "std": {"in_dist/token_error": 0.5},
            "seeds": 3,
        }
    ]
)
RUNS = [run for row in PLAN.rows for run in row.runs]
VALUES = [{"in_dist/token_error": 10.0 * index / 3, "dense/loss": 1.0 / (index + 1)} for index in range(len(RUNS))]
LEFT_OUT = (RUNS[3].run_id, RUNS[4].run_id)
"""Runs that do not finish: one fails, one is stopped."""

history = st.lists(
    st.tuples(st.integers(0, len(RUNS) - 1), st.sampled_from(["fail", "stop", "begin", "finish"])), max_size=8
)


def write(store, events, order):
    """First the events, which the last attempts of all runs then replace, in this order."""
    for index, event in events:
        run = RUNS[index]
        if store.run(run.run_id).status == "finished":
            continue  # a finished run is never trained again
        if event == "fail":
            fail(store, run, "an earlier attempt")
        elif event == "stop":
            stop(store, run, "an earlier attempt")
        elif event == "begin":
            end(store, begin(store, run, "a worker that died"))
        elif run.run_id not in LEFT_OUT:
            finish(store, run, VALUES[index])
    for index in order:
        run = RUNS[index]
        if run.run_id == LEFT_OUT[0]:
            fail(store, run)
        elif run.run_id == LEFT_OUT[1]:
            stop(store, run)
        elif store.run(run.run_id).status != "finished":
            finish(store, run, VALUES[index])
        end(store, store.run(run.run_id))  # told twice


def rendered(store):
    """The content of the table, and what only one format shows: runs by status, and links to them."""
    drawn = table(PLAN, store, compare="CoPE")
    return drawn.to_json(), drawn.to_csv(), drawn.to_html()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("expected"), create=True)
    write(store, [], range(len(RUNS)))
    return rendered(store)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=history, order=st.permutations(range(len(RUNS))))
def test_order_duplicates_failures_and_resumptions_give_the_same_table(tmp_path_factory, expected, events, order):
    root = tmp_path_factory.mktemp("store")
    store = Store(root, create=True)
    write(store, events, order)
    assert rendered(store) == expected
    store.index.clear()
    rebuild(store, store.index)
    assert rendered(store) == expected, "from the folders alone"
    store.index.close()


GOLDEN = pathlib.Path(__file__).parent / "golden"


SEEDS_PLAN = plan_of(seeds=[0, 1, 2, 3, 4])
ERRORS = {
    "CoPE": [1.2, 2.1, 1.4, 97.0, 1.8],  # seed 3 is stuck
    "a_b <c>": [20.3, 22.4, 19.1, 21.7, 20.8],
    "None": [78.1, 81.2, 79.6, 80.3, 78.9],
}
LOSSES = {
    "CoPE": [0.21, 0.24, 0.19, 0.22, 0.2],
    "a_b <c>": [0.22, 0.23, 0.2, 0.21, 0.21],
    "None": [1.1, 1.3, 1, 1.2, 1],
}
"""Over five seeds: one row of each metric differs clearly from CoPE's, one does not."""


def partial_table(store, against):
    write(store, [], range(len(RUNS)))
    return table(PLAN, store, compare=against)


def five_seeds_table(store, against):
    for row in SEEDS_PLAN.rows:
        for run, error, loss in zip(row.runs, ERRORS[row.name], LOSSES[row.name], strict=True):
            finish(store, run, {"in_dist/token_error": error, "dense/loss": loss})
    return table(SEEDS_PLAN, store, compare=against)


@pytest.mark.parametrize(
    ("name", "make", "against"),
    [
        ("table.md", partial_table, None),
        ("table.tex", partial_table, None),
        ("table.html", partial_table, None),
        ("compared.md", partial_table, "CoPE"),
        ("paper.md", partial_table, "paper"),
        ("five_seeds.md", five_seeds_table, "CoPE"),
        ("five_seeds.html", five_seeds_table, "CoPE"),
    ],
)
def test_golden_tables(tmp_path, name, make, against):
    """Made from recorded results; a change of these files is a change of what readers of tables see."""
    drawn = make(Store(tmp_path, create=True), against)
    text = {"md": drawn.to_markdown, "tex": drawn.to_latex, "html": drawn.to_html}[name.partition(".")[2]]()
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_the_golden_p_values_are_those_of_scipy():
    """The exact tests of both comparisons of the primary metric, corrected by Holm's method, as in five_seeds.md."""
    p = {row: _exact_p(ERRORS[row], ERRORS["CoPE"]) for row in ("a_b <c>", "None")}
    smaller, larger = sorted(p, key=p.__getitem__)
    adjusted = {smaller: min(1.0, 2 * p[smaller]), larger: max(p[larger], min(1.0, 2 * p[smaller]))}
    text = (GOLDEN / "five_seeds.md").read_text(encoding="utf-8").replace("\\", "")
    comparison = text.partition("Hedges' g")[2]
    for row, value in adjusted.items():
        line = next(line for line in comparison.splitlines() if line.startswith(f"| {row}"))
        assert f" {value:.3f} |" in line
    assert "stuck: 1 of 5 seeds of CoPE (In-dist.)" in text


def _exact_p(a, b):
    def difference(x, y, axis):
        return x.mean(axis=axis) - y.mean(axis=axis)

    return scipy.stats.permutation_test((a, b), difference, vectorized=True, n_resamples=10_000).pvalue
