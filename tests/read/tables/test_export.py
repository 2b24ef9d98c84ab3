import io
import json
import math

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cope_sweep.read.tables.export import WRITERS, curve_batches, write_runs
from cope_sweep.read.tables.runs import run_batches
from cope_sweep.store import Filter, QueryError, RunQuery
from tests.read.queries.test_queries import SWEEP, sweep_of
from tests.read.tables.ablations import begin, end, fail, finish, plan_of, run_table

EVERY = RunQuery()


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
    file = io.BytesIO()
    return write_runs(store, query, output_format, file, **options), file.getvalue()


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
    lines, content = exported(store, "json", query)
    assert lines == 2, "limit and offset are those of lists"
    assert [line["run_id"] for line in json.loads(content)] == [filled.runs[2].run_id, filled.runs[1].run_id]
    assert "facts.quick" not in json.loads(content)[0], "no column for values that only other runs have"
    with pytest.raises(QueryError, match="facts.m"):
        exported(store, "csv", RunQuery(filters=(Filter("facts.m", "=", 1),)))


@pytest.mark.parametrize("output_format", WRITERS)
def test_every_format_holds_every_value(filled, store, output_format):
    lines, content = exported(store, output_format)
    assert lines == 5
    read = {"parquet": pd.read_parquet, "csv": pd.read_csv, "json": pd.read_json}[output_format]
    frame = read(io.BytesIO(content)).set_index("run_id")
    first, failed = frame.loc[filled.runs[0].run_id], frame.loc[filled.runs[3].run_id]
    assert (first["status"], first["row"], first["facts.n"], first["train.steps"]) == ("finished", "CoPE", 1.0, 6)
    assert failed["message"] == 'Diverged: "a, b"\nnan'
    assert pd.isna(failed["in_dist/token_error"])
    assert " ".join(first["sweeps"]) == SWEEP if output_format != "csv" else first["sweeps"] == SWEEP


@pytest.mark.parametrize("output_format", WRITERS)
def test_an_empty_store_gives_a_valid_file(store, output_format):
    lines, content = exported(store, output_format)
    assert lines == 0
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
