"""Down-sampling keeps what a reader looks for: the ends and the extremes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.api.ablations import GetCurves
from cope_sweep.config import expand, load_ablation
from cope_sweep.read.queries import curves
from cope_sweep.read.queries.curves import CurveCache, curves_of_runs, downsample, plan_curves
from cope_sweep.store import RunFolder, Store
from tests.config.test_expand import BASE
from tests.helpers.errors import raises
from tests.helpers.finished_runs import begin
from tests.helpers.sweeps import end

numbers = st.floats(-1e6, 1e6) | st.none()
series = st.lists(numbers, max_size=300).map(lambda found: [(i, 0.1 * i, value) for i, value in enumerate(found)])


@given(series, st.integers(4, 60))
def test_ends_and_extremes_are_kept(points, maximum):
    kept = downsample(points, maximum)
    assert len(kept) <= maximum
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(map(id, kept)) <= set(map(id, points))
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
    known = [value for *_, value in points if value is not None]
    if known:
        shown = [value for *_, value in kept if value is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))


def test_every_bucket_keeps_its_own_extremes():
    points = [(i, None, float(i % 10)) for i in range(102)]
    kept = {i for i, *_ in downsample(points, 22)}
    assert kept == {0, 101} | {i for start in range(1, 101, 10) for i in (start + 8, start + 9)}


@pytest.fixture
def big(tmp_path):
    """A plan of five rows with two seeds each, and a store in which the first four rows were trained."""
    (tmp_path / "big.yaml").write_text(BASE + "grid: {model.layers: [1, 2, 3, 4, 5]}\nseeds: [0, 1]\n")
    plan, store = expand(load_ablation(tmp_path / "big.yaml")), Store(tmp_path / "store", create=True)
    for number, run in enumerate(ids_of(plan)[:8]):
        folder = begin(store, run)
        folder.log({"step": 1, "train/loss": float(number)})
        end(store, folder)
    return plan, store


def ids_of(plan):
    """The runs row by row: a plan has all rows with the first seed first."""
    return [run for row in plan.rows for run in row.runs]


def pages(plan, store, limit, known=None):
    """The pages of curves, one after the other."""
    found, offset = [], 0
    while offset is not None:
        found.append(
            plan_curves(plan, store, GetCurves(name=plan.name, metric="train/loss", offset=offset, limit=limit), known)
        )
        offset = found[-1].next
    return found


def test_pages_have_all_rows_of_an_ablation(big):
    plan, store = big
    (whole,) = pages(plan, store, 100)
    found = pages(plan, store, 2)
    assert [len(page.rows) for page in found] == [2, 2, 1]
    assert [row for page in found for row in page.rows] == whole.rows
    assert {page.total for page in found} == {5}
    points = {each.run_id: each.points for row in whole.rows for each in row.series}
    assert points == {run.run_id: [(1, float(i))] if i < 8 else [] for i, run in enumerate(ids_of(plan))}


def test_curves_of_runs_have_metrics_that_are_computed_from_logged_ones(big):
    plan, store = big
    folder = begin(store, ids_of(plan)[0])
    folder.log({"step": 1, "validation/perplexity": 4.0, "test/perplexity": 9.0})
    folder.log({"step": 2, "test/perplexity": 9.0})  # one of the two is missing
    end(store, folder)
    (series,) = curves_of_runs([folder], "validation_and_test/perplexity", None).series
    assert [(step, value) for step, _, value in series.points] == [(1, pytest.approx(6.0))]
    with raises("unknown_metric", metric="validation_and_test/loss"):
        curves_of_runs([folder], "validation_and_test/loss", None)


def test_a_page_ends_where_it_has_many_begun_runs(big, monkeypatch):
    monkeypatch.setattr(curves, "MAX_RUNS", 5)
    # Two rows have four begun runs; the fourth row has two and the last one has none.
    assert [len(page.rows) for page in pages(*big, 100)] == [2, 3]
    monkeypatch.setattr(curves, "MAX_RUNS", 1)  # a row is never divided
    assert [len(page.rows) for page in pages(*big, 100)] == [1, 1, 1, 2]


def test_only_runs_that_have_changed_are_read_again(big, monkeypatch):
    plan, store = big
    known, read, original = CurveCache(), [], RunFolder.curve
    monkeypatch.setattr(RunFolder, "curve", lambda folder: (read.append(folder.run_id), original(folder))[1])
    before = pages(plan, store, 2, known)
    assert len(read) == 8
    assert pages(plan, store, 2, known) == before
    assert len(read) == 8
    changed = begin(store, ids_of(plan)[3])
    changed.log({"step": 2, "train/loss": 0.5})
    end(store, changed)
    read.clear()
    after = pages(plan, store, 2, known)
    assert read == [ids_of(plan)[3].run_id]
    assert after[0].rows[1].series[1].points[-1] == (2, 0.5)
