import io
import json
import math

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cope_sweep.read.tables import read_results, table
from cope_sweep.read.tables.export import (
    WRITERS,
    csv_column,
    curve_batches,
    run_batches,
    run_chunks,
)
from cope_sweep.read.tables.render import csv_text, without_formula
from cope_sweep.records import Event
from cope_sweep.store import Filter, Lease, RunQuery
from cope_sweep.store.reading import read_run
from tests.helpers.errors import raises
from tests.helpers.finished_runs import CONTENT, COUNTING, begin, fail, finish, plan_of, run_table, stop
from tests.helpers.sweeps import end
from tests.read.queries.test_queries import SWEEP, sweep_of


@pytest.fixture
def plan():
    return plan_of()


def test_the_configuration_of_every_run_is_in_its_line(plan, store):
    """Also of runs that were not begun; equal to what the table of all runs of a store says of the others."""
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 1.5})
    got = read_results(plan, store).frame.set_index("run_id")
    stored = run_table(store).to_pylist()[0]
    keys = [key for key in stored if key.startswith(("task.", "model.", "train.", "evaluate."))]
    line = got.loc[stored["run_id"]]
    assert {key: line[key] for key in keys if key != "model.position"} == {
        key: stored[key] for key in keys if key != "model.position"
    }
    assert line["model.position"] == "CoPE", "an axis has its label"
    assert got["train.steps"].tolist() == [6] * 6
    assert got["model.position.cope.p_max"].notna().sum() == 2
    assert got.columns.is_unique


def test_each_status_has_its_values(plan, store):
    cope, other, none = plan.rows
    finish(store, cope.runs[0], {"in_dist/token_error": 1.5, "dense/loss": 2.0, "extra": 7.0}, {"parameters": 10})
    fail(store, other.runs[0], "ValueError: no, really")
    end(store, begin(store, other.runs[1]))  # its worker died
    stop(store, none.runs[1], "too slow")
    row = read_run(begin(store, none.runs[0]))
    assert isinstance(store.index.acquire(row, "sweep", 60.0), Lease)
    assert read_results(plan, store).frame["status"].tolist()[4] == "pending", "it waits for its worker"
    store.index.renew("sweep", 60.0, [Event(run_id=row.run_id, status="running", worker_id="here:1")])
    got = read_results(plan, store).frame
    assert got["status"].tolist() == ["finished", "pending", "failed", "interrupted", "running", "stopped"]
    first = got.iloc[0]
    assert (first["in_dist/token_error"], first["dense/loss"], first["extra"]) == (1.5, 2.0, 7.0)
    assert got["message"].dropna().tolist() == ["ValueError: no, really", "too slow"]
    assert got["facts.parameters"].dtype == "Int64"
    assert first["facts.parameters"] == 10
    assert got["in_dist/token_error"].notna().sum() == 1


def test_facts_keep_their_types(plan, store):
    facts = {"n": 3, "speed": 1.5, "device": "cpu", "quick": True, "odd": None}
    finish(store, plan.rows[0].runs[0], {}, facts)
    got = read_results(plan, store).frame
    dtypes = {name: str(got[f"facts.{name}"].dtype) for name in facts}
    assert dtypes == {"n": "Int64", "speed": "Float64", "device": "str", "quick": "boolean", "odd": "Float64"}


def test_large_numbers_of_a_configuration_stay_floats(store):
    plan = plan_of(base=CONTENT["base"] | {"train": CONTENT["base"]["train"] | {"clip": 1e20}}, seeds=[3])
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 1.5})
    assert run_table(store)["train.clip"].to_pylist() == [1e20]
    assert b"1e+20" in b"".join(run_chunks(store, RunQuery(filters=(Filter("train.clip", "=", 1e20),)), "csv"))


def test_conditional_axes_are_missing_where_they_do_not_apply(store):
    plan = plan_of(when=[{"if": {"model.position": "CoPE"}, "grid": {"model.dim": [8, 16]}}], seeds=[3])
    got = read_results(plan, store).frame
    assert got["model.dim"].isna().tolist() == [False, False, True, True]
    assert got["row"].tolist()[:2] == ["CoPE · 8", "CoPE · 16"]


def test_curves_have_one_line_per_value_and_unfinished_runs(plan, store):
    finish(store, plan.rows[0].runs[1], {"dense/loss": 0.5})
    fail(store, plan.rows[2].runs[0])
    got = read_results(plan, store).curves
    assert got[["row", "seed", "step", "metric", "value"]].values.tolist() == [
        ["CoPE", 1, 1, "train/loss", 2.5],
        ["CoPE", 1, 6, "train/loss", 1.25],
        ["CoPE", 1, 6, "dense/loss", 0.5],
        ["None", 0, 1, "train/loss", 2.5],
    ]
    assert set(got["run_id"]) == {plan.rows[0].runs[1].run_id, plan.rows[2].runs[0].run_id}
    assert read_results(plan_of(seeds=[9]), store).curves.empty


def test_former_metric_names_are_read_under_the_current_one(store):
    plan = plan_of(base=COUNTING, grid={}, metrics=[{"name": "in_dist/majority_baseline_error"}])
    finish(store, plan.runs[0], {"in_dist/commonest_error": 70.0})
    got = read_results(plan, store).frame
    assert got["in_dist/majority_baseline_error"].tolist()[0] == 70.0
    assert "in_dist/commonest_error" not in got
    assert read_results(plan, store).curves["metric"].tolist() == [
        "train/loss",
        "train/loss",
        "in_dist/majority_baseline_error",
    ]


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
    assert (first["model.position"], first["model.position.cope.p_max"], second["model.position"]) == (
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


def test_what_a_running_run_has_reported_so_far_is_in_no_column(plan, store):
    finish(store, plan.runs[0], {"in_dist/token_error": 1.0})
    running = read_run(begin(store, plan.runs[1]))
    assert isinstance(store.index.acquire(running, "sweep", 60.0), Lease)
    so_far = {"in_dist/token_error": 9.0, "half/way": 9.0}
    store.index.renew("sweep", 60.0, [Event(run_id=running.run_id, status="running", step=3, metrics=so_far)])
    table = run_table(store)
    assert "half/way" not in table.column_names
    assert lines(table)[running.run_id]["in_dist/token_error"] is None


EVERY = RunQuery()


def test_no_run_folder_is_read(plan, store, monkeypatch):
    finish(store, plan.runs[0], {"in_dist/token_error": 1.0})
    end(store, begin(store, plan.runs[1]))
    monkeypatch.setattr(store, "run", lambda run_id: pytest.fail("a run folder was read"))
    assert run_table(store).num_rows == 2


@pytest.fixture
def filled(store):
    """Runs whose facts have other types from run to run, one without a sweep, one failed, one that has begun."""
    plan = plan_of()
    facts = [{"n": 1, "mixed": 2, "quick": True}, {"n": 2.5, "mixed": "text", "odd": None}, {"n": 3, "mixed": True}]
    for number, run in enumerate(plan.runs[:3]):
        finish(store, run, {"in_dist/token_error": float(number), f"only_{number}": 0.5}, facts[number])
    fail(store, plan.runs[3], 'Diverged: "a, b"\nnan')
    end(store, begin(store, plan.runs[4]))
    store.write_sweep(sweep_of(plan, plan.runs[:4]))
    return plan


def exported(store, output_format, query=EVERY, **options):
    return b"".join(run_chunks(store, query, output_format, **options))


@pytest.mark.parametrize("size", [1, 2, 100])
def test_batches_are_the_table_of_all_runs(filled, store, size):
    schema, found = run_batches(store, EVERY, size)
    batches = list(found)
    assert len(batches) == math.ceil(5 / size)
    table = pa.Table.from_batches(batches, schema)
    expected = run_table(store)
    assert set(table.column_names) == set(expected.column_names)
    assert table.select(expected.column_names).to_pydict() == expected.to_pydict()
    assert table.schema.field("facts.n").type == pa.float64()
    assert table.column("facts.mixed").to_pylist().count("True") == 1


def test_an_export_follows_the_query(filled, store):
    query = RunQuery(
        ("finished",), sweep_id=SWEEP, filters=(Filter("facts.n", ">", 1),), sort="in_dist/token_error",
        descending=True, limit=1, offset=1,
    )  # fmt: skip
    lines = json.loads(exported(store, "json", query))
    assert [line["run_id"] for line in lines] == [filled.runs[2].run_id, filled.runs[1].run_id], "without limit"
    assert "facts.quick" not in lines[0], "no column for values that only other runs have"
    with raises("unknown_key", key="facts.m"):
        exported(store, "csv", RunQuery(filters=(Filter("facts.m", "=", 1),)))


@pytest.mark.parametrize("output_format", WRITERS)
def test_every_format_holds_every_value(filled, store, output_format):
    content = exported(store, output_format)
    read = {"parquet": pd.read_parquet, "csv": pd.read_csv, "json": pd.read_json}[output_format]
    frame = read(io.BytesIO(content)).set_index("run_id")
    assert len(frame) == 5
    first, failed = frame.loc[filled.runs[0].run_id], frame.loc[filled.runs[3].run_id]
    assert (first["status"], first["row"], first["facts.n"], first["train.steps"]) == ("finished", "CoPE", 1.0, 6)
    assert failed["message"] == 'Diverged: "a, b"\nnan'
    assert pd.isna(failed["in_dist/token_error"])
    assert " ".join(first["sweeps"]) == SWEEP if output_format != "csv" else first["sweeps"] == SWEEP


@pytest.mark.parametrize("output_format", WRITERS)
def test_an_empty_store_gives_a_valid_file(store, output_format):
    content = exported(store, output_format)
    if output_format == "json":
        assert json.loads(content) == []
    else:
        table = pq.read_table(io.BytesIO(content)) if output_format == "parquet" else pd.read_csv(io.BytesIO(content))
        assert "run_id" in list(table.column_names if output_format == "parquet" else table.columns)


def test_curves_have_a_line_for_each_logged_value(filled, store, monkeypatch):
    monkeypatch.setattr("cope_sweep.read.tables.export.CURVE_ROWS", 3)
    schema, found = curve_batches(store, RunQuery(statuses=("finished",)))
    batches = list(found)
    assert len(batches) == 3, "a batch ends with the first run that fills it"
    table = pa.Table.from_batches(batches, schema).to_pandas()
    first = table[table["run_id"] == filled.runs[1].run_id]
    assert first[["step", "metric", "value"]].values.tolist()[:3] == [
        [1, "train/loss", 2.5], [6, "train/loss", 1.25], [6, "in_dist/token_error", 1.0],
    ]  # fmt: skip
    assert set(first["row"]) == {filled.row_name(filled.runs[1].run_id)}
    (store.root / "runs" / filled.runs[1].run_id / "curve.jsonl").unlink()
    again = pa.Table.from_batches(list(curve_batches(store, EVERY)[1]), schema)
    assert filled.runs[1].run_id not in again.column("run_id").to_pylist()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("@x", "'@x"),
        ("-m·p", "'-m·p"),
        ("+RoPE", "'+RoPE"),
        ("\tx", "'\tx"),
        ("-1", "-1"),
        ("+2.5e-3", "+2.5e-3"),
        ("-.5", "-.5"),
        ("CoPE = 1", "CoPE = 1"),
        ("", ""),
        (-1.5, -1.5),
        (None, None),
    ],
)
def test_texts_are_no_formulas_and_numbers_stay(text, shown):
    assert without_formula(text) == shown


def test_frames_and_arrow_columns():
    frame = pd.DataFrame({"=row": ["=A1", "-2", None], "value": [-1.0, 2.0, None]})
    assert csv_text(frame) == "=row,value\n'=A1,-1.0\n-2,2.0\n,\n"
    assert csv_column(pa.array(["=A1", "-2", None])).to_pylist() == ["'=A1", "-2", None]
    assert csv_column(pa.array([["=A1", "b"], ["c"]])).to_pylist() == ["'=A1 b", "c"]
    assert csv_column(pa.array([-1, None])).to_pylist() == [-1, None]


def test_the_table_of_an_ablation(store):

    plan = plan_of(grid={"model.position": {"=CoPE": ["cope"]}}, published=[])
    results = table(plan, store)
    assert pd.read_csv(io.StringIO(results.to_csv()))["row"].tolist() == ["'=CoPE"]
    assert repr(results) == "<table of copying: 1 rows, 2 runs; print() shows it>"
    assert str(results) == results.to_markdown()
