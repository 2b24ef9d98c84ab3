"""The table of the same runs does not depend on how they came into the store."""

import pathlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cope_sweep.results import table
from cope_sweep.store import Store
from cope_sweep.store.rebuild import rebuild
from tests.results.ablations import begin, end, fail, finish, plan_of, stop

PLAN = plan_of(
    published=[
        {
            "match": {"model.position": "CoPE"},
            "values": {"in_dist/token_error": 4.7},
            "std": {"in_dist/token_error": 0.5},
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
    drawn = table(PLAN, store, against="CoPE")
    return drawn.to_json(), drawn.to_markdown(), drawn.to_latex(), drawn.to_csv(), drawn.to_html()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("expected"), create=True)
    write(store, [], range(len(RUNS)))
    return rendered(store)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=history, order=st.permutations(range(len(RUNS))))
def test_order_duplicates_failures_and_resumptions_give_the_same_table(tmp_path_factory, expected, events, order):
    root = tmp_path_factory.mktemp("store")
    store = Store(root, create=True)
    write(store, events, order)
    assert rendered(store) == expected
    store.index.clear()
    rebuild(store.files, store.index)
    assert rendered(store) == expected, "from the folders alone"
    store.index.close()


GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["table.md", "table.tex", "table.html", "compared.md", "paper.md"])
def test_golden_tables(expected, tmp_path, name):
    """Made from recorded results; a change of these files is a change of what readers of tables see."""
    store = Store(tmp_path, create=True)
    write(store, [], range(len(RUNS)))
    stem, suffix = name.split(".")
    drawn = table(PLAN, store, against={"table": None, "compared": "CoPE", "paper": "paper"}[stem])
    text = {"md": drawn.to_markdown, "tex": drawn.to_latex, "html": drawn.to_html}[suffix]()
    assert text == (GOLDEN / name).read_text(encoding="utf-8")
