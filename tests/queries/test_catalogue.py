"""Pages from memory are those that the database gives: any query, any order, while runs change."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.queries import AblationFiles, Queries, catalogue
from cope_sweep.store import Filter, QueryError, RunQuery, Store, SweepRecord, SweepRun
from cope_sweep.store.index import RunRow
from tests.plan.test_expand import BASE
from tests.store.databases import index_url, postgres  # noqa: F401 - fixtures

KEYS = ("m", "other", "facts.t", "model.layers", "model.name", "train.fast", "seed", "created_ms", "status", "run_id")
NUMBERS = (0.0, 0.5, -3.0, 7.25, 1e-300, 2.0**60)
FACTS = ("", "a", "b", "ä", "%d", '"quoted"')
TEXTS = (*FACTS, "true")  # booleans of specs are stored as texts


def row(number, source, status="finished"):
    metrics = {"m": source.choice(NUMBERS)} if source.random() < 0.8 else {"other": 1.5}
    facts = {"t": source.choice((*FACTS, 3, True))} if source.random() < 0.7 else {}
    spec = {
        "seed": number % 4,
        "model": {"layers": source.choice((1, 2, 2.5)), "name": source.choice(TEXTS)},
        "train": {"fast": source.random() < 0.5, "steps": 9},
    }
    return RunRow(
        f"{number:016x}"[::-1], status, spec, metrics=metrics, facts=facts, message=source.choice((None, "why")),
        created_ms=None if number % 7 == 0 else number // 5,
    )  # fmt: skip


def rows(numbers, seed=0, status="finished"):
    source = random.Random(seed)
    return [row(number, source, status) for number in numbers]


def served(store):
    """The queries of a store, which it has seen."""
    queries = Queries(store, in_memory=True)
    queries.state()
    return queries


def known(queries, query, **options):
    """The page from memory, once all that it needs is there."""
    if queries.known_runs(query, **options) is None:
        queries._catalogue.wait()
    return queries.known_runs(query, **options)


def same(queries, query, **options):
    """The page from memory, which is that of the database."""
    found, expected = known(queries, query, **options), queries.runs(query, **options)
    assert found is not None
    expected = expected.model_dump_json(exclude_unset=bool(options.get("fields")))
    assert json.loads(found) == json.loads(expected)
    return json.loads(found)


@pytest.fixture
def store(tmp_path, index_url):  # noqa: F811
    store = Store(tmp_path / "store", index=index_url, create=True)
    store.index.mark_built()
    store.index.write([*rows(range(40)), *rows(range(40, 50), status="failed")])
    return store


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The queries of a store that no test changes."""
    store = Store(tmp_path_factory.mktemp("catalogue") / "store", create=True)
    store.index.mark_built()
    store.index.write([*rows(range(60)), *rows(range(60, 70), status="failed")])
    return served(store)


values = {
    "m": st.sampled_from((*NUMBERS, 1)), "facts.t": st.sampled_from((*TEXTS, 3, True)),
    "model.layers": st.sampled_from((1, 2, 2.5, "a")), "model.name": st.sampled_from(TEXTS),
    "train.fast": st.booleans(), "seed": st.integers(-1, 4), "created_ms": st.integers(0, 13),
    "status": st.sampled_from(("finished", "failed")), "run_id": st.sampled_from(("5", "a")),
}  # fmt: skip
conditions = st.sampled_from(sorted(values)).flatmap(
    lambda key: st.builds(Filter, st.just(key), st.sampled_from(("=", "!=", "<", "<=", ">", ">=")), values[key])
)
query_values = st.fixed_dictionaries(
    {
        "filters": st.lists(conditions, max_size=3).map(tuple),
        "sort": st.sampled_from(KEYS),
        "descending": st.booleans(),
        "limit": st.integers(1, 30),
        "statuses": st.sampled_from(((), ("finished",), ("failed", "running"))),
    }
)


@settings(max_examples=80, deadline=None)
@given(query_values, st.integers(0, 80))
def test_any_page_is_that_of_the_database(shared, query, offset):
    same(shared, RunQuery(**query, offset=offset))


@settings(max_examples=10, deadline=None)
@given(query_values, st.sampled_from(((), ("metrics",), ("seed", "m", "facts.t"), ("run_id", "values"))))
def test_cursors_lead_through_all_pages(shared, query, fields):
    found, cursor = [], None
    while True:
        page = same(shared, RunQuery(**query), cursor=cursor, fields=fields)
        found += [run["run_id"] for run in page["runs"]]
        if (cursor := page["next"]) is None:
            break
    assert len(found) == len(set(found)) == page["total"]


ORDERS = [RunQuery(sort="m"), RunQuery(sort="model.name", descending=True), RunQuery(filters=(Filter("m", "<", 3),))]


def test_changes_are_seen(store):
    queries = served(store)
    queries_now = [*ORDERS, RunQuery(statuses=("finished",)), RunQuery(sort="facts.t")]
    for query in queries_now:
        same(queries, query)
    changes = [
        lambda: store.index.write(rows(range(5, 9), seed=3)),  # other values
        lambda: store.index.write(rows(range(60, 64), seed=4)),  # new runs, and texts that were unknown
        lambda: store.index.write([RunRow("f" * 16, "finished", {"model": {"name": "zz"}}, facts={"t": "c"})]),
        lambda: store.index.write([RunRow(f"{7:016x}"[::-1], "failed", {"seed": 1})]),  # it has lost its values
        lambda: store.index.delete([f"{11:016x}"[::-1], f"{63:016x}"[::-1]]),
        lambda: store.index.write(rows([70], seed=5)),  # SQLite gives it the number of the last one
    ]
    for change in changes:
        change()
        assert queries.known_runs(ORDERS[0]) is not None, "the state that was seen last is served until the next look"
        queries.state()
        assert queries.known_runs(ORDERS[0]) is None
        for query in queries_now:
            same(queries, query)


def test_a_deleted_run_whose_number_is_reused(store):
    queries = served(store)
    same(queries, ORDERS[0])
    last = rows(range(40, 50), status="failed")[-1]
    store.index.delete([last.run_id])
    store.index.write(rows([99]))
    queries.state()
    assert last.run_id not in {run["run_id"] for run in same(queries, ORDERS[0])["runs"]}


def test_an_index_that_is_made_again(store):
    queries = served(store)
    same(queries, ORDERS[0])
    store.index.clear()
    store.index.write(rows(range(100, 103)))
    queries.state()
    assert same(queries, ORDERS[0])["total"] == 3


def test_the_place_of_a_run_in_a_new_sweep(store):
    queries = served(store)
    run_id = same(queries, RunQuery(limit=1))["runs"][0]["run_id"]
    store.write_sweep(
        SweepRecord(
            sweep_id="20260730-120000-abcd",
            ablation="named",
            title="",
            hypothesis="",
            executor="local",
            command=[],
            status="finished",
            started_ms=1,
            ended_ms=2,
            versions={},
            machine={},
            metrics=[],
            reused=[],
            runs=[SweepRun(run_id=run_id, row="the row", labels={}, seed=0)],
        )
    )
    queries.state()
    found = same(queries, RunQuery(limit=1))["runs"][0]
    assert (found["ablations"], found["row"]) == (["named"], "the row")


def test_a_run_whose_lease_has_expired_reads_as_interrupted(store, monkeypatch):
    queries = served(store)
    run = rows([80])[0]
    store.index.acquire(run, "elsewhere/1/x", 1000.0)
    queries.state()
    running, interrupted = RunQuery(statuses=("running",)), RunQuery(statuses=("interrupted",))
    assert same(queries, running)["total"] == 1
    monkeypatch.setattr(Store, "settle", lambda store: [])  # as where the index cannot be written
    store.index.renew("elsewhere/1/x", -1.0)
    queries.state()
    assert same(queries, running)["total"] == 0
    (found,) = same(queries, interrupted)["runs"]
    assert (found["run_id"], found["status"]) == (run.run_id, "interrupted")
    assert same(queries, RunQuery(sort="status", limit=1000))["total"] == 51


@pytest.mark.parametrize(
    "query",
    [
        RunQuery(filters=(Filter("tags.row", "=", "a"),)),
        RunQuery(run_ids=("0" * 16,)),
        RunQuery(sweep_id="20260730-120000-abcd"),
        RunQuery(sort="unknown"),
        RunQuery(filters=(Filter("seed", "=", "text"),)),
    ],
)
def test_what_memory_does_not_answer_is_left_to_the_database(shared, query):
    assert known(shared, query) is None
    shared._catalogue.wait()


def test_a_cursor_of_another_query(shared):
    cursor = same(shared, RunQuery(sort="m", limit=5))["next"]
    same(shared, RunQuery(sort="other", limit=5))
    with pytest.raises(QueryError, match="cursor"):
        shared.known_runs(RunQuery(sort="other", limit=5), cursor=cursor)


def test_memory_is_bounded(store, monkeypatch):
    monkeypatch.setattr(catalogue, "MAX_BYTES", 1)
    monkeypatch.setattr(catalogue, "BATCH", 10)
    queries = served(store)
    assert known(queries, RunQuery(limit=30)) is None  # ten runs are in memory
    found = queries.known_runs(RunQuery(limit=30), reads=True)
    assert json.loads(found) == json.loads(queries.runs(RunQuery(limit=30)).model_dump_json())


def test_rows_of_ablation_files_that_change(store, tmp_path):
    folder = tmp_path / "ablations"
    folder.mkdir()
    queries = Queries(store, AblationFiles(folder), in_memory=True)
    queries.state()
    assert same(queries, RunQuery(limit=3))["runs"][0]["ablations"] == []
    (folder / "named.yaml").write_text(BASE + "grid: {model.layers: [1]}\n")
    plan = queries.files.load("named").plan
    store.index.write([RunRow(plan.runs[0].run_id, "finished", plan.runs[0].model_dump(mode="json"))])
    queries.state()
    found = same(queries, RunQuery(filters=(Filter("run_id", "=", plan.runs[0].run_id),)))
    assert found["runs"][0]["ablations"] == ["named"]
