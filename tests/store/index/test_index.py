"""The index against what was written into it, on SQLite and PostgreSQL."""

import dataclasses
import operator
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.store import Filter, QueryError, RunQuery, StoreError, SweepSummary
from cope_sweep.store.index import Index
from tests.store.index.rows import row
from tests.tiny import tiny_run

RUNS = [
    tiny_run(seed=seed, **{"model.layers": layers, "model.position": position})
    for seed in (0, 1)
    for layers, position in [(1, []), (2, ["cope"]), (3, ["cope", "relative"])]
]


@pytest.fixture
def filled(index):
    index.write(
        [
            row(
                run,
                "finished" if number != 3 else "failed",
                metrics={"test/loss": number / 2} if number != 3 else {},
                facts={"device": "cpu" if number % 2 else "cuda", "parameters": 100 + number},
                created_ms=1000 + number,
            )
            for number, run in enumerate(RUNS)
        ]
    )
    return index


def matching(index, *filters, **query):
    page = index.page(RunQuery(filters=tuple(Filter(*each) for each in filters), **query))
    assert page.total >= len(page.runs)
    return [[run.run_id for run in RUNS].index(record.run_id) for record in page.runs]


def test_a_record_is_what_was_written(filled):
    record = filled.records([RUNS[1].run_id])[RUNS[1].run_id]
    assert (record.status, record.seed, record.steps, record.created_ms) == ("finished", 0, RUNS[1].train.steps, 1001)
    assert record.metrics == {"test/loss": 0.5}
    assert record.facts == {"device": "cpu", "parameters": 101}
    assert (record.value("test/loss"), record.value("facts.parameters"), record.value("none")) == (0.5, 101, None)


def test_a_written_run_is_replaced(filled):
    before = filled.revision()
    filled.write([row(RUNS[0], "failed", message="no", metrics={})])
    record = filled.records([RUNS[0].run_id])[RUNS[0].run_id]
    assert (record.status, record.message, record.metrics) == ("failed", "no", {})
    assert record.revision == filled.revision() == before + 1
    assert matching(filled, ("test/loss", "<", 100)) == sorted([1, 2, 4, 5], key=lambda n: RUNS[n].run_id)


def test_statuses(filled):
    assert filled.statuses([RUNS[0].run_id, RUNS[3].run_id, "0" * 16]) == {
        RUNS[0].run_id: "finished",
        RUNS[3].run_id: "failed",
    }
    assert Counter(filled.statuses().values()) == {"finished": 5, "failed": 1}
    assert set(filled.statuses()) == {run.run_id for run in RUNS}


def test_specs_are_flat(filled):
    spec = filled.specs([RUNS[2].run_id])[RUNS[2].run_id]
    assert (spec["model.layers"], spec["model.position"], spec["seed"]) == (3, "cope+relative", 0)
    assert spec["model.tied"] is True
    assert spec["model.position.0.kind"] == "cope"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (("model.layers", ">=", 2), [1, 2, 4, 5]),
        (("model.layers", "!=", 2), [0, 2, 3, 5]),
        (("model.position", "=", "cope+relative"), [2, 5]),
        (("model.position", "=", "none"), [0, 3]),
        (("model.tied", "=", True), [0, 1, 2, 3, 4, 5]),
        (("train.lr", "=", RUNS[0].train.lr), [0, 1, 2, 3, 4, 5]),
        (("test/loss", "<", 1.0), [0, 1]),
        (("facts.device", "=", "cpu"), [1, 3, 5]),
        (("facts.parameters", ">", 103), [4, 5]),
        (("seed", "=", 1), [3, 4, 5]),
        (("status", "=", "failed"), [3]),
        (("created_ms", "<=", 1001), [0, 1]),
        (("run_id", "=", RUNS[4].run_id), [4]),
    ],
)
def test_filters(filled, condition, expected):
    assert sorted(matching(filled, condition)) == expected


def test_filters_are_combined(filled):
    assert matching(filled, ("model.layers", "=", 2), ("test/loss", ">", 1)) == [4]
    assert matching(filled, ("seed", "=", 0), statuses=("failed",)) == []
    assert matching(filled, run_ids=(RUNS[1].run_id, RUNS[3].run_id), statuses=("failed",)) == [3]
    assert matching(filled, run_ids=()) == []


@pytest.mark.parametrize("sort", ["test/loss", "model.layers", "facts.parameters", "created_ms", "facts.device"])
def test_sorting(filled, sort):
    everything = matching(filled, sort=sort)
    assert sorted(everything) == list(range(6))
    values = [number for number in everything if sort != "test/loss" or number != 3]
    keys = {"model.layers": lambda n: RUNS[n].model.layers, "facts.device": lambda n: "cpu" if n % 2 else "cuda"}
    key = keys.get(sort, lambda n: n)
    assert [key(number) for number in values] == sorted(key(number) for number in values)
    if sort == "test/loss":
        assert everything[-1] == 3  # the run without the metric comes last, in both directions
        assert matching(filled, sort=sort, descending=True) == [5, 4, 2, 1, 0, 3]


def test_pages(filled):
    whole = matching(filled, sort="created_ms")
    parts = [matching(filled, sort="created_ms", limit=4, offset=offset) for offset in (0, 4)]
    assert [number for part in parts for number in part] == whole
    assert filled.page(RunQuery(limit=1)).total == 6


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (("model.layer", "=", 2), "near ones: model.layers"),
        (("test/los", "=", 2), "near ones: test/loss"),
        (("seed", "=", "x"), "seed is a number; it cannot be compared with 'x'"),
        (("status", "=", 3), "status is a text"),
        (("seed", "~", 3), "no operator"),
    ],
)
def test_a_wrong_filter_names_the_way_out(filled, condition, message):
    with pytest.raises(QueryError, match=message):
        matching(filled, condition)


def test_an_unknown_sort_key(filled):
    with pytest.raises(QueryError, match="near ones: test/loss"):
        matching(filled, sort="test/losses")


@pytest.mark.slow
@settings(max_examples=30)
@given(
    layers=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    limit=st.integers(0, 6),
    compare=st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
)
def test_a_filter_selects_what_python_selects(layers, limit, compare):
    index = Index("sqlite://")
    runs = {run.run_id: run for run in (tiny_run(seed=n, **{"model.layers": each}) for n, each in enumerate(layers))}
    index.write([row(run) for run in runs.values()])
    python = {
        "=": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
    expected = {run_id for run_id, run in runs.items() if python[compare](run.model.layers, limit)}
    page = index.page(RunQuery(filters=(Filter("model.layers", compare, limit),)))
    assert {record.run_id for record in page.runs} == expected
    index.close()


def test_parts_are_written_once(index):
    with index.database.reading() as connection:
        before = connection.exec_driver_sql("SELECT COUNT(*) FROM parts").scalar()
    index.write([row(run) for run in RUNS])
    with index.database.reading() as connection:
        after = connection.exec_driver_sql("SELECT COUNT(*) FROM parts").scalar()
    assert after - before == 3 + 3  # three models; one task, train and evaluate


def test_sweeps(index):
    members = [{"run_id": RUNS[0].run_id, "row": "a", "seed": 0, "labels": {"x": "1"}, "reused": False}]
    summary = SweepSummary("2026-a", "tiny", "Tiny", "running", "local", 1, None, 1, 0)
    index.write_sweep(summary, members, "2026-a@somewhere/else:1:2")
    assert index.sweep("2026-a") == summary
    ended = dataclasses.replace(summary, status="finished", ended_ms=5)
    index.write_sweep(ended, members, None)
    assert index.sweeps() == [ended]
    index.write([row(RUNS[0]), row(RUNS[1])])
    assert matching(index, sweep_id="2026-a") == [0]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:secret@host/x", r"mysql://u:\*\*\*@host/x' is no index; accepted: sqlite:///PATH"),
        ("nonsense", "is no index"),
        ("sqlite:////proc/none/index.db", "cannot be used: unable to open database file"),
        ("postgresql://127.0.0.1:1/none", "does not answer"),
    ],
)
def test_a_database_that_cannot_be_opened(url, message):
    with pytest.raises(StoreError, match=message):
        Index(url)


def test_a_newer_database_is_not_touched(index):
    with index.database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match="has version 9999, and this cope_sweep knows"):
        Index(index.url)


def test_the_migrations_make_the_declared_tables(index):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from cope_sweep.store.index.database import _upgrade
    from cope_sweep.store.index.tables import metadata

    with index.database.writing() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        made = connection.exec_driver_sql("SELECT * FROM counters").all()
        metadata.drop_all(connection)
        connection.exec_driver_sql("DROP TABLE alembic_version")
        _upgrade(connection)
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.exec_driver_sql("SELECT * FROM counters").all() == made == [("revision", 0)]


def test_of_several_owners_of_a_name_one_succeeds(index: Index) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from cope_sweep.store.index.requests import claim, claimed

    assert claimed(index, "a") is None
    with ThreadPoolExecutor(8) as pool:
        (holder,) = set(pool.map(lambda number: claim(index, "a", f"owner {number}", 60), range(8)))
    assert claimed(index, "a") == holder
    index.unlock("a", "another")
    assert claim(index, "a", "late", 60) == holder
    index.unlock("a", holder)
    assert claim(index, "a", "late", -1) == "late"
    assert claimed(index, "a") is None  # it has expired
    assert claim(index, "a", "later", 60) == "later"
