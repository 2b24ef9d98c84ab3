import pytest

from cope_sweep.store import Lease, RunQuery
from cope_sweep.store.reading import read_run
from tests.read.queries.test_queries import SWEEP, sweep_of
from tests.read.tables.ablations import begin, end, fail, finish, plan_of, run_table


@pytest.fixture
def plan():
    return plan_of()


def lines(table):
    return {line["run_id"]: line for line in table.to_pylist()}


def test_every_run_has_its_configuration_results_and_sweeps(plan, store):
    cope, other, none = (row.runs[0] for row in plan.rows)
    finish(store, cope, {"in_dist/token_error": 1.5}, {"parameters": 10, "device": "cpu", "torch": "2.15"})
    fail(store, other, "Diverged")
    store.write_sweep(sweep_of(plan, [cope, none]))
    table = run_table(store)
    found = lines(table)
    assert set(found) == {cope.run_id, other.run_id}, "runs that were not begun are not in the store"
    first, second = found[cope.run_id], found[other.run_id]
    assert (first["status"], first["ablation"], first["row"], first["sweeps"]) == (
        "finished",
        plan.name,
        "CoPE",
        [SWEEP],
    )
    assert (first["model.position"], first["model.position.0.p_max"], second["model.position"]) == (
        "cope", cope.model.position[0].p_max, "absolute",
    )  # fmt: skip
    assert (first["train.lr"], first["task.kind"]) == (cope.train.lr, "selective_copy")
    assert (first["in_dist/token_error"], first["facts.parameters"], first["facts.torch"]) == (1.5, 10, "2.15")
    assert (second["status"], second["message"], second["in_dist/token_error"], second["sweeps"]) == (
        "failed",
        "Diverged",
        None,
        [],
    )
    assert table.column("run_id").to_pylist() == sorted(found)
    frame = table.to_pandas()
    assert frame["facts.parameters"].notna().sum() == 1
    assert lines(run_table(store, RunQuery(("failed",)))).keys() == {other.run_id}


def test_a_run_whose_lease_expired_is_interrupted_without_a_change(plan, store):
    assert isinstance(store.index.acquire(read_run(begin(store, plan.runs[0])), "sweep", 60.0), Lease)
    assert run_table(store).column("status").to_pylist() == ["running"]
    store.index.renew("sweep", 0.0)
    assert run_table(store).column("status").to_pylist() == ["interrupted"]


def test_an_empty_store_has_the_columns_that_every_run_has(store):
    assert run_table(store).num_rows == 0
    assert {"run_id", "status", "seed", "sweeps"} <= set(run_table(store).column_names)


def test_the_arrow_table_survives_parquet(plan, store, tmp_path):
    import pyarrow.parquet as pq

    finish(store, plan.runs[0], {"in_dist/token_error": 1 / 3}, {"quick": True, "mixed": 1})
    finish(store, plan.runs[1], {"in_dist/token_error": 1 / 7}, {"quick": False, "mixed": "text"})
    table = run_table(store)
    pq.write_table(table, tmp_path / "runs.parquet")
    assert pq.read_table(tmp_path / "runs.parquet").equals(table)
    assert sorted(table.column("facts.mixed").to_pylist()) == ["1", "text"]


def test_no_run_folder_is_read(plan, store, monkeypatch):
    finish(store, plan.runs[0], {"in_dist/token_error": 1.0})
    end(store, begin(store, plan.runs[1]))
    monkeypatch.setattr(store, "run", lambda run_id: pytest.fail("a run folder was read"))
    assert run_table(store).num_rows == 2
