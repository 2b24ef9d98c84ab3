"""The index against what was written into it, on SQLite and PostgreSQL."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from cope_sweep.config.filters import parse_filter
from cope_sweep.records import Event
from cope_sweep.store import Filter, RunQuery, Store, StoreError
from cope_sweep.store.index import Index
from cope_sweep.store.index.database import on_network, sqlite_file
from cope_sweep.store.index.rows import write_counters, write_runs
from cope_sweep.store.index.tables import FORMAT
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import members, row, summary, write_sweep

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


def test_specs_are_flat(filled):
    spec = filled.specs([RUNS[2].run_id])[RUNS[2].run_id]
    assert (spec["model.layers"], spec["model.position"], spec["seed"]) == (3, "cope+relative", 0)
    assert spec["model.tied"] is True
    assert spec["model.position.cope.p_max"] == 64
    assert not [key for key in spec if key.startswith("model.position.0")]


def test_filters(filled):
    expected = [
        (("model.layers", ">=", 2), [1, 2, 4, 5]),
        (("model.layers", "!=", 2), [0, 2, 3, 5]),
        (("model.position", "=", "cope+relative"), [2, 5]),
        (("model.position", "=", "none"), [0, 3]),
        (("model.position.cope.p_max", "=", 64), [1, 2, 4, 5]),
        (("model.position.0.p_max", "=", 64), [1, 2, 4, 5]),
        (("model.position.1.kind", "=", "relative"), [2, 5]),
        (("model.position.relative.std", ">=", 0), [2, 5]),
        (("model.tied", "=", True), [0, 1, 2, 3, 4, 5]),
        (("train.lr", "=", RUNS[0].train.lr), [0, 1, 2, 3, 4, 5]),
        (("test/loss", "<", 1.0), [0, 1]),
        (("facts.device", "=", "cpu"), [1, 3, 5]),
        (("facts.parameters", ">", 103), [4, 5]),
        (("seed", "=", 1), [3, 4, 5]),
        (("status", "=", "failed"), [3]),
        (("created_ms", "<=", 1001), [0, 1]),
        (("run_id", "=", RUNS[4].run_id), [4]),
    ]
    assert [(condition, sorted(matching(filled, condition))) for condition, _ in expected] == expected


def test_a_value_of_another_kind_and_the_progress_of_a_run_do_not_match(index):
    index.write([row(RUNS[0], metrics={"m": 1.0}, facts={"n": 2, "list": [1], "text": "3", "flag": False, 'a"b': 1})])
    index.acquire(row(RUNS[1], "running"), "owner", 60)
    index.renew("owner", 60, [Event(run_id=RUNS[1].run_id, status="running", step=1, metrics={"m": 0.5})])
    for condition in [
        ("facts.n", "<", "3"),
        ("facts.text", "<", 4),
        ("facts.flag", "<", 1),
        ("m", "=", "1"),
        ("train.lr", ">", "abc"),
        ("train.lr", "<", "inf"),
    ]:
        with raises("not_comparable", key=condition[0], value=condition[2]):
            matching(index, condition)
    assert matching(index, ("m", "<", 1)) == []
    assert matching(index, ("facts.flag", "=", False)) == matching(index, ("facts.n", "=", 2.0)) == [0]
    assert matching(index, sort="m")[0] == 0
    for unknown in ("facts.list", 'facts.a"b'):
        with raises("unknown_key"):
            matching(index, (unknown, "=", 1))


def test_a_part_with_options_has_its_kind_as_one_without(filled):
    bare, slow = tiny_run(), tiny_run(**{"train.optimizer": {"kind": "muon", "momentum": 0.5}})
    filled.write([row(bare), row(slow)])

    def found(condition, value):
        return {
            run.run_id for run in filled.page(RunQuery(filters=(Filter("train.optimizer", condition, value),))).runs
        }

    assert found("=", "muon") == {slow.run_id}
    assert found("!=", "muon") == {run.run_id for run in (bare, *RUNS)}


def test_filters_are_combined(filled):
    assert matching(filled, ("model.layers", "=", 2), ("test/loss", ">", 1)) == [4]
    assert matching(filled, ("seed", "=", 0), statuses=("failed",)) == []
    assert matching(filled, run_ids=(RUNS[1].run_id, RUNS[3].run_id), statuses=("failed",)) == [3]
    assert matching(filled, run_ids=()) == []


def test_a_wrong_filter_is_an_error(filled):
    for condition, code, data in [
        (("model.layer", "=", 2), "unknown_key", {"key": "model.layer"}),
        (("test/los", "=", 2), "unknown_key", {"key": "test/los"}),
        (("train.learning_rate", ">", 0), "unknown_key", {"near": ["train.lr"]}),
        (("model.position.0.pmax", "=", 8), "unknown_key", {"key": "model.position.0.pmax"}),
        (("seed", "=", "x"), "not_comparable", {"key": "seed", "value": "x"}),
        (("status", "=", 3), "unknown_status", {"status": 3}),
        (("status", "=", "Finished"), "unknown_status", {"status": "Finished"}),
        (("seed", "~", 3), "unknown_operator", {"operator": "~"}),
    ]:
        with raises(code, **data):
            matching(filled, condition)


def test_a_number_that_no_database_holds_is_an_error(filled):
    keys = ("seed", "test/loss", "model.layers", "facts.parameters")
    for key, value in itertools.product(keys, (2**63, -(2**63), 10**400, float("1e999"), float("nan"))):
        with raises("invalid_value", key=key, value=repr(value)):
            matching(filled, (key, "<", value))


def test_a_text_that_no_database_holds_is_an_error(filled):
    keys = ("worker_id", "facts.device", "model.position", "tags.row", "tags.ablation")
    for key, value in itertools.product(keys, ("a\0b", "\ud800")):
        with raises("invalid_value", key=key, value=repr(value)):
            matching(filled, (key, "=", value))


def test_a_null_character_is_an_error_wherever_it_is(filled):
    for query in ({"search_words": ("a\0",)}, {"sweep_id": "\0"}):
        with raises("invalid_value"):
            matching(filled, **query)
    for key in ("model.\0", "facts.\0", "test/\0", "tags.\0"):
        with raises("unknown_key"):
            matching(filled, (key, "=", 1))
    with raises("unknown_key"):
        matching(filled, sort="test/\0")


def test_integers_up_to_the_limit_and_fractions_are_compared(filled):
    assert len(matching(filled, ("seed", "<", 2**63 - 1), ("created_ms", ">", 1 - 2**63))) == len(RUNS)
    assert sorted(matching(filled, ("seed", "<", 0.5))) == [0, 1, 2]
    assert sorted(matching(filled, ("seed", ">", 0.5))) == [3, 4, 5]


def test_keys_with_other_letters_are_found(index):
    index.write([row(RUNS[0], metrics={"größe": 2.0}, facts={"名": "x"})])
    assert matching(index, ("größe", ">", 1), ("facts.名", "=", "x")) == [0]


def test_a_label_that_looks_like_a_number_is_found_as_it_was_typed(filled):
    labelled = [{**member, "labels": {"n": "0.10"}} for member in members(RUNS[:1])]
    filled.write_sweep(summary("2026-a", "finished", runs=1), labelled, ttl_s=None)
    for text in ("tags.n=0.10", 'tags.n="0.10"'):
        assert filled.page(RunQuery(filters=(parse_filter(text),))).total == 1
    assert filled.page(RunQuery(filters=(parse_filter("tags.n=0.1"),))).total == 0


def test_an_unknown_tag_is_an_error_that_names_near_ones(filled):
    write_sweep(filled, "2026-a", RUNS[:1])
    assert matching(filled, ("tags.row", "=", "none")) == matching(filled, ("tags.n", "=", "7")) == []
    assert matching(filled, ("tags.n", "=", 0)) == [0]
    with raises("unknown_key", key="tags.modle"):
        matching(filled, ("tags.modle", "=", "x"))
    with raises("unknown_key", key="tags.rwo") as error:
        matching(filled, ("tags.rwo", "=", "CoPE"))
    assert error.value.data["near"][0] == "tags.row"


def test_an_unknown_sort_key(filled):
    with raises("unknown_key", key="test/losses") as error:
        matching(filled, sort="test/losses")
    assert error.value.data["near"][0] == "test/loss"
    assert "test/loss" in str(error.value).replace("test/losses", "")


def test_sweeps(index):
    write_sweep(index, "2026-a", RUNS[:1], "running", ttl_s=60)
    assert index.sweep("2026-a") == summary("2026-a", "running", runs=1)
    write_sweep(index, "2026-a", RUNS[:1])
    assert index.sweeps() == [summary("2026-a", runs=1)]
    index.write([row(RUNS[0]), row(RUNS[1])])
    assert matching(index, sweep_id="2026-a") == [0]


@pytest.mark.parametrize(
    ("url", "code", "shown"),
    [
        ("mysql://u:secret@host/x", "unsupported_index", "mysql://***@host/x"),
        ("postgresql://u:secret[@host/x", "not_ready", "postgresql://***"),
        ("postgresql://u:s/e?c@ret@host/x", "not_ready", "postgresql://***"),
        ("u:secret@host/x", "unsupported_index", "***"),
        ("nonsense", "unsupported_index", "nonsense"),
        ("sqlite:////proc/none/index.db", "unusable_index", "sqlite:////proc/none/index.db"),
        ("postgresql://127.0.0.1:1/none", "not_ready", "postgresql://127.0.0.1:1/none"),
    ],
)
def test_a_database_that_cannot_be_opened(url, code, shown):
    with raises(code, index=shown):
        Index(url)


# -- the format of the tables ------------------------------------------------------------------------------------------


def fill_with(*rows):
    """Fills an index with these rows, and counts how often."""

    def fill(connection, *, replaces):
        filled.append(replaces)
        write_runs(connection, rows)

    filled = []
    return fill, filled


def set_format(index, number):
    with index.database.writing() as connection:
        write_counters(connection, format=number)
    index.close()


def test_an_index_of_another_format_is_made_again(index, index_url):
    index.write([row(RUNS[0])])
    set_format(index, FORMAT - 1)
    fill, filled = fill_with(row(RUNS[1]))
    for _ in range(2):  # the second time, it is of this format
        again = Index(index_url, fill)
        assert again.statuses() == {RUNS[1].run_id: "finished"}
        again.close()
    assert filled == [True]


@pytest.mark.parametrize("what", ["run", "sweep"])
def test_an_older_index_in_which_a_sweep_holds_a_lease_is_left_alone(index, index_url, what):
    if what == "run":
        index.acquire(row(RUNS[0], "running"), "a", 60)
    else:
        write_sweep(index, "a", RUNS[:1], "running", ttl_s=60)
    before = index.statuses(), index.sweeps()
    set_format(index, FORMAT - 1)
    fill, filled = fill_with()
    with raises("older_format_in_use"):
        Index(index_url, fill)
    set_format(index, FORMAT)
    index = Index(index_url, fill)
    assert (index.statuses(), index.sweeps()) == before
    assert filled == []


def test_an_index_of_a_newer_version_is_left_alone(index, index_url):
    index.write([row(RUNS[0])])
    set_format(index, FORMAT + 1)
    with raises("newer_format", format=FORMAT + 1, known=FORMAT):
        Index(index_url)
    set_format(index, FORMAT)
    assert Index(index_url).statuses() == {RUNS[0].run_id: "finished"}


def test_a_process_that_fails_to_fill_an_index_leaves_the_former_one(index, index_url):
    index.write([row(RUNS[0])])
    set_format(index, FORMAT - 1)

    def fail(connection, *, replaces):
        write_runs(connection, [row(RUNS[1])])
        raise StoreError("the disk is gone")

    with raises("damaged_store"):
        Index(index_url, fail)
    set_format(index, FORMAT)
    assert Index(index_url).statuses() == {RUNS[0].run_id: "finished"}


def test_of_processes_that_open_an_index_at_once_one_fills_it(index_url):
    fill, filled = fill_with(*(row(run) for run in RUNS))
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: Index(index_url, fill), range(4)))
    assert filled == [False]
    assert [len(each.statuses()) for each in opened] == [len(RUNS)] * 4
    for each in opened:
        each.close()


@pytest.mark.parametrize("name", ["sp%20ace", "a?b=c", "a#b", "a;b&c", "ü %C3%BC", "a+b"])
def test_a_path_is_the_path_of_its_url(tmp_path, name):
    store = Store(tmp_path / name, create=True)
    assert store.index.statuses() == {}
    assert sqlite_file(store.index_url) == tmp_path / name / "index.db"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "index.db").exists()


def test_a_mount_point_with_a_blank_is_recognised_as_a_network_s(monkeypatch, tmp_path):
    partition = psutil.disk_partitions(all=True)[0]
    mounts = [
        partition._replace(mountpoint="/", fstype="ext4"),
        partition._replace(mountpoint=str(tmp_path / "a b"), fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    assert on_network(tmp_path / "a b" / "store" / "index.db")
    assert not on_network(tmp_path / "a" / "index.db")
    assert not on_network(tmp_path / "a bc" / "index.db")
