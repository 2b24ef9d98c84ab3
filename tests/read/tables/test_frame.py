import subprocess
import sys

import pandas as pd
import pytest

from cope_sweep.read.tables import curves, frame, table
from cope_sweep.store import Lease
from cope_sweep.store.reading import read_run
from tests.read.tables.ablations import COUNTING, begin, end, fail, finish, plan_of, run_table, stop


@pytest.fixture
def plan():
    return plan_of()


def test_an_untrained_ablation_has_one_line_per_run(plan, store):
    got = frame(plan, store)
    assert got["run_id"].tolist() == [run.run_id for row in plan.rows for run in row.runs]
    assert got["status"].tolist() == ["pending"] * 6
    assert got["row"].tolist() == ["CoPE", "CoPE", "a_b <c>", "a_b <c>", "None", "None"]
    assert got["model.position"].tolist() == got["row"].tolist()
    assert got["seed"].tolist() == [0, 1] * 3
    assert got["in_dist/token_error"].isna().all()
    assert got["dense/loss"].dtype == "float64"


def test_the_configuration_of_every_run_is_in_its_line(plan, store):
    """Also of runs that were not begun; equal to what the table of all runs of a store says of the others."""
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 1.5})
    got = frame(plan, store).set_index("run_id")
    stored = run_table(store).to_pylist()[0]
    keys = [key for key in stored if key.startswith(("task.", "model.", "train.", "evaluate."))]
    line = got.loc[stored["run_id"]]
    assert {key: line[key] for key in keys if key != "model.position"} == {
        key: stored[key] for key in keys if key != "model.position"
    }
    assert line["model.position"] == "CoPE", "an axis has its label"
    assert got["train.steps"].tolist() == [6] * 6
    assert got["model.position.0.p_max"].notna().sum() == 2
    assert got.columns.is_unique


def test_each_status_has_its_values(plan, store):
    cope, other, none = plan.rows
    finish(store, cope.runs[0], {"in_dist/token_error": 1.5, "dense/loss": 2.0, "extra": 7.0}, {"parameters": 10})
    fail(store, other.runs[0], "ValueError: no, really")
    end(store, begin(store, other.runs[1]))  # its worker died
    stop(store, none.runs[1], "too slow")
    row = read_run(begin(store, none.runs[0]))
    assert isinstance(store.index.acquire(row, "sweep", 60.0), Lease)
    got = frame(plan, store)
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
    got = frame(plan, store)
    dtypes = {name: str(got[f"facts.{name}"].dtype) for name in facts}
    assert dtypes == {"n": "Int64", "speed": "Float64", "device": "str", "quick": "boolean", "odd": "Float64"}


def test_facts_can_be_metrics(store):
    plan = plan_of(metrics=[{"name": "facts.tokens_per_s", "goal": "max"}, {"name": "facts.train_s"}])
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 1.5}, {"tokens_per_s": 123.5, "device": "cpu"})
    got = frame(plan, store)
    assert got.columns.is_unique
    assert got["facts.tokens_per_s"].dropna().tolist() == [123.5]
    assert got["facts.train_s"].isna().all()
    assert table(plan, store).frame["facts.tokens_per_s.mean"].dropna().tolist() == [123.5]


def test_conditional_axes_are_missing_where_they_do_not_apply(store):
    plan = plan_of(when=[{"if": {"model.position": "CoPE"}, "grid": {"model.dim": [8, 16]}}], seeds=[3])
    got = frame(plan, store)
    assert got["model.dim"].isna().tolist() == [False, False, True, True]
    assert got["row"].tolist()[:2] == ["CoPE · 8", "CoPE · 16"]


def test_frames_can_be_written_and_read_again(plan, store, tmp_path):
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 1 / 3, "dense/loss": 2.0})
    fail(store, plan.rows[1].runs[0])
    got = frame(plan, store)
    got.to_parquet(tmp_path / "runs.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "runs.parquet"), got)
    got.to_csv(tmp_path / "runs.csv", index=False)
    again = pd.read_csv(tmp_path / "runs.csv", dtype=got.dtypes.to_dict(), keep_default_na=False, na_values=[""])
    pd.testing.assert_frame_equal(again, got)


def test_curves_have_one_line_per_value_and_unfinished_runs(plan, store):
    finish(store, plan.rows[0].runs[1], {"dense/loss": 0.5})
    fail(store, plan.rows[2].runs[0])
    got = curves(plan, store)
    assert got.drop(columns="run_id").values.tolist() == [
        ["CoPE", 1, 1, "train/loss", 2.5],
        ["CoPE", 1, 6, "train/loss", 1.25],
        ["CoPE", 1, 6, "dense/loss", 0.5],
        ["None", 0, 1, "train/loss", 2.5],
    ]
    assert set(got["run_id"]) == {plan.rows[0].runs[1].run_id, plan.rows[2].runs[0].run_id}
    assert curves(plan_of(seeds=[9]), store).empty


def test_former_metric_names_are_read_under_the_current_one(store):
    plan = plan_of(base=COUNTING, grid={}, metrics=[{"name": "in_dist/majority_baseline_error"}])
    finish(store, plan.runs[0], {"in_dist/commonest_error": 70.0})
    got = frame(plan, store)
    assert got["in_dist/majority_baseline_error"].tolist()[0] == 70.0
    assert "in_dist/commonest_error" not in got
    assert curves(plan, store)["metric"].tolist() == ["train/loss", "train/loss", "in_dist/majority_baseline_error"]


def test_a_damaged_run_has_its_reason_and_the_others_their_values(plan, store):
    for run in plan.rows[0].runs:
        finish(store, run, {"in_dist/token_error": 1.0})
    folder = store.run(plan.rows[0].runs[0].run_id)
    (folder.path / "result.json").write_text('{"metrics":')
    end(store, folder)
    got = frame(plan, store)
    assert got["status"].tolist()[:2] == ["damaged", "finished"]
    assert "result.json: not valid JSON" in got["message"][0]
    assert got["in_dist/token_error"].notna().tolist()[:2] == [False, True]


@pytest.mark.slow
def test_importing_results_imports_no_heavy_package():
    code = "import sys, cope_sweep.read.tables; print([m for m in ('torch', 'ray', 'mlflow', 'scipy', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
