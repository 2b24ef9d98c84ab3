import io
import json
import math

import pandas as pd
import pytest

from cope_sweep.read.tables import table
from cope_sweep.read.tables.layout import layout
from cope_sweep.store import Store
from tests.read.tables.ablations import COUNTING, end, finish, plan_of, stop


def test_the_frame_by_hand(partial):
    frame = partial.frame
    assert frame["row"].tolist() == ["CoPE", "a_b <c>", "None"]
    assert frame["finished"].tolist() == [2, 1, 0]
    assert frame["failed"].tolist() == [0, 1, 1]
    assert frame["pending"].tolist() == [0, 0, 1]
    assert frame["seeds"].tolist() == [2, 2, 2]
    cope = frame.iloc[0]
    assert cope["in_dist/token_error.mean"] == 12.0
    assert cope["in_dist/token_error.std"] == pytest.approx(math.sqrt(8))
    assert cope["in_dist/token_error.n"] == 2
    assert cope["in_dist/token_error.ci_low"] == pytest.approx(1.2142, abs=1e-4)  # test_stats.py computes it by hand
    assert (cope["in_dist/token_error.median"], cope["in_dist/token_error.high"]) == (12.0, 14.0)
    assert cope["in_dist/token_error.stuck"] == 0
    assert cope["in_dist/token_error.published"] == 4.7
    assert cope["in_dist/token_error.published_std"] == 0.5
    assert frame["in_dist/token_error.n"].tolist() == [2, 1, 0]
    assert frame["in_dist/token_error.std"].isna().tolist() == [False, True, True]
    assert frame["parameters"].tolist() == [1234, 1234, pd.NA]


def test_column_names_are_stable(partial):
    metric = [".mean", ".std", ".n", ".ci_low", ".ci_high", ".median", ".low", ".high", ".stuck", ".published",
              ".published_std", ".best"]  # fmt: skip
    assert partial.frame.columns.tolist() == [
        "row", "model.position", "seeds", "finished", "stopped", "failed", "damaged", "running", "interrupted",
        "pending", "parameters",
        *(f"in_dist/token_error{part}" for part in metric),
        *(f"dense/loss{part}" for part in metric),
    ]  # fmt: skip


def test_best_is_among_rows_with_all_their_seeds(partial, complete):
    assert not partial.frame["in_dist/token_error.best"].any()
    assert not partial.complete
    assert complete.frame["in_dist/token_error.best"].tolist() == [True, False, False]
    assert complete.frame["dense/loss.best"].tolist() == [False, False, True]
    assert complete.complete


def test_a_tie_has_two_best(store):
    plan = plan_of(seeds=[0])
    for row, value in zip(plan.rows, (1.0, 1.0, 2.0), strict=True):
        finish(store, row.runs[0], {"in_dist/token_error": value, "dense/loss": value})
    assert table(plan, store).frame["in_dist/token_error.best"].tolist() == [True, True, False]


def test_json_is_plain(partial):
    data = json.loads(json.dumps(partial.to_json(), allow_nan=False))
    assert data["ablation"] == "copying"
    assert data["axes"] == {"model.position": "position"}
    assert [metric["goal"] for metric in data["metrics"]] == ["min", "max"]
    cope, other, none = data["rows"]
    assert cope["labels"] == {"model.position": "CoPE"}
    error = cope["metrics"]["in_dist/token_error"]
    assert error["published"] == {"value": 4.7, "std": 0.5, "seeds": None, "source": "Table 1"}
    assert (error["mean"], error["n"], error["best"]) == (12.0, 2, False)
    assert error["ci"] == [pytest.approx(1.2142, abs=1e-4), pytest.approx(60.2058, abs=1e-4)]
    assert (error["ci_method"], error["median"], error["range"]) == ("logit t", 12.0, [10.0, 14.0])
    ids = [run["run_id"] for run in cope["runs"]]
    assert error["values"] == [
        {"run_id": ids[0], "seed": 0, "value": 10.0, "stuck": False},
        {"run_id": ids[1], "seed": 1, "value": 14.0, "stuck": False},
    ]
    assert other["metrics"]["in_dist/token_error"] == {
        "mean": 1.0, "std": None, "n": 1, "ci": None, "ci_method": None, "median": 1.0, "range": [1.0, 1.0],
        "values": [{"run_id": other["runs"][0]["run_id"], "seed": 0, "value": 1.0, "stuck": False}],
        "published": None, "best": False, "learned": None, "comparison": None,
    }  # fmt: skip
    assert none["counts"] == {
        "finished": 0, "stopped": 0, "failed": 1, "damaged": 0, "running": 0, "interrupted": 0, "pending": 1,
    }  # fmt: skip
    assert data["stopped"] == 0
    assert none["parameters"] is None
    assert [run["status"] for run in none["runs"]] == ["failed", "pending"]
    assert none["runs"][0]["message"] == "Diverged: the loss is nan"
    assert none["runs"][1]["message"] is None


def test_csv_and_parquet_hold_rows_or_runs(partial, tmp_path):
    rows = pd.read_csv(io.StringIO(partial.to_csv()))
    assert rows["in_dist/token_error.mean"].tolist()[:2] == [12.0, 1.0]
    runs = pd.read_csv(io.StringIO(partial.to_csv(runs=True)))
    assert len(rows) == 3
    assert len(runs) == 6
    (tmp_path / "rows.parquet").write_bytes(partial.to_parquet())
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "rows.parquet"), partial.frame)
    (tmp_path / "runs.parquet").write_bytes(partial.to_parquet(runs=True))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "runs.parquet"), partial.runs)


def test_a_metric_that_a_row_lacks_is_an_empty_cell(plan, store):
    """As a long context that an encoding does not reach: the row is complete all the same."""
    for row in plan.rows:
        for run in row.runs:
            metrics = {"in_dist/token_error": 10.0}
            finish(store, run, metrics if row is plan.rows[1] else metrics | {"dense/loss": 0.5})
    drawn = table(plan, store)
    assert drawn.complete
    assert drawn.frame["dense/loss.n"].tolist() == [2, 0, 2]
    assert drawn.frame["dense/loss.best"].tolist() == [True, False, True]
    assert drawn.to_json()["rows"][1]["metrics"]["dense/loss"]["mean"] is None


def test_stopped_and_damaged_runs_enter_no_mean(plan, store):
    cope, other, _ = plan.rows
    finish(store, cope.runs[0], {"in_dist/token_error": 10.0})
    stop(store, cope.runs[1])
    finish(store, other.runs[0], {"in_dist/token_error": 30.0})
    (store.run(other.runs[0].run_id).path / "result.json").write_text("{")
    end(store, store.run(other.runs[0].run_id))
    drawn = table(plan, store)
    rows = drawn.to_json()["rows"]
    assert [row["metrics"]["in_dist/token_error"]["mean"] for row in rows] == [10.0, None, None]
    assert [(row["counts"]["stopped"], row["counts"]["damaged"]) for row in rows] == [(1, 0), (0, 1), (0, 0)]
    assert drawn.to_json()["stopped"] == 1
    assert rows[0]["runs"][1]["message"] == "stopped at step 3 by asha"
    assert "result.json: not valid JSON" in rows[1]["runs"][0]["message"]
    for text in (drawn.to_markdown(), drawn.to_html(), drawn.to_latex()):
        assert "1 run was stopped early" in text


class CountingStore(Store):
    """A store that counts how often the folder of a run was asked for."""

    asked = 0

    def run(self, run_id):
        self.asked += 1
        return super().run(run_id)


def test_no_folder_is_read(tmp_path):
    plan = plan_of(grid={"model.position": {"CoPE": ["cope"], "None": []}}, seeds=list(range(500)))
    store = CountingStore(tmp_path / "store", create=True)
    finish(store, plan.runs[0], {"in_dist/token_error": 10.0})
    store.asked = 0
    whole = table(plan, store)
    assert whole.frame["pending"].tolist() == [499, 500]
    assert len(whole.to_json()["rows"][1]["runs"]) == len(whole.runs) / 2 == 500
    assert store.asked == 0


def test_results_under_a_former_metric_name_are_shown(store):
    plan = plan_of(
        base=COUNTING, grid={"model.position": {"CoPE": ["cope"]}}, metrics=[{"name": "in_dist/commonest_error"}],
        published=[{"match": {"model.position": "CoPE"}, "values": {"in_dist/commonest_error": 78.0}}],
    )  # fmt: skip
    finish(store, plan.runs[0], {"in_dist/commonest_error": 70.0})
    finish(store, plan.runs[1], {"in_dist/majority_baseline_error": 80.0})
    row = table(plan, store).frame.iloc[0]
    assert row["in_dist/majority_baseline_error.mean"] == 75.0
    assert row["in_dist/majority_baseline_error.n"] == 2
    assert row["in_dist/majority_baseline_error.published"] == 78.0


def test_the_seeds_that_learned_the_task_are_counted(store):
    metrics = [
        {"name": "in_dist/token_error", "label": "In-dist.", "unit": "%", "learned": 1.0},
        {"name": "dense/loss", "goal": "max", "learned": 0.5},
    ]
    plan = plan_of(seeds=[0, 1, 2, 3, 4], metrics=metrics)
    for run, error in zip(plan.rows[0].runs, (0.0, 1.0, 1.01, 0.2, 60.0), strict=True):
        finish(store, run, {"in_dist/token_error": error, "dense/loss": error / 2})
    drawn = table(plan, store)
    assert [header.text for header in layout(drawn.model).headers][2:6] == [
        "In-dist. (%)", "In-dist. ≤ 1", "dense/loss", "dense/loss ≥ 0.5",
    ]  # fmt: skip
    texts = [cell.text for cell in layout(drawn.model).rows[0]]
    assert (texts[3], texts[5]) == ("3/5 (23–88 %)", "3/5 (23–88 %)")
    assert layout(drawn.model).rows[1][3].text == "–"
    found = drawn.to_json()["rows"][0]["metrics"]["in_dist/token_error"]["learned"]
    assert (found["k"], found["n"]) == (3, 5)
    assert found["interval"] == pytest.approx([0.2307, 0.8824], abs=1e-4)
    assert drawn.frame["in_dist/token_error.learned"].tolist()[0] == 3
    assert "seeds that learned the task" in drawn.to_markdown()
