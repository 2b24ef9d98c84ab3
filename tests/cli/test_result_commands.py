import os
from collections import Counter

import pandas as pd
import pytest
from sqlalchemy import update

from cope_sweep.store import Store
from cope_sweep.store.index.tables import runs
from tests.read.tables.ablations import finish


def test_status_of_an_ablation(stored):
    status = stored.json("status", "tiny")
    assert status["counts"] == {"finished": 1, "failed": 1, "stopped": 1, "damaged": 1}
    runs = {run["run_id"]: run for run in status["runs"]}
    finished, failed, stopped, damaged = (runs[run.run_id] for run in stored.runs)
    assert (finished["status"], finished["step"], finished["steps"], finished["worker_id"]) == (
        "finished",
        6,
        6,
        "here",
    )
    assert failed["message"] == "Diverged: the loss is nan"
    assert stopped["message"] == "stopped at step 3 by asha"
    assert "result.json: not valid JSON" in damaged["message"]
    out, _ = stored("status", "tiny")
    for run in stored.runs:
        assert run.run_id in out
    assert "6/6" in out
    assert "stopped at step 3 by asha" in " ".join(out.split())


def test_status_of_a_run(stored):
    run = stored.json("status", stored.runs[0].run_id)
    assert (run["status"], run["state"]["attempt"], run["sweeps"]) == ("finished", 1, [stored.sweep_id])
    assert run["spec"]["model"]["position"][0]["kind"] == "cope"
    assert run["result"]["metrics"]["in_dist/token_error"] == 12.5
    assert '"in_dist/token_error"' in stored("status", stored.runs[0].run_id)[0]


def test_status_of_the_store(stored):
    (sweep,) = stored.json("status")
    assert (sweep["sweep_id"], sweep["ablation"], sweep["status"], sweep["executor"]) == (
        stored.sweep_id, "tiny", "failed", "local",
    )  # fmt: skip
    assert (sweep["started_ms"], sweep["ended_ms"]) == (1000, 2000)
    assert sweep["counts"] == {"finished": 1, "failed": 1, "stopped": 1, "damaged": 1}
    out, _ = stored("status")
    assert stored.sweep_id in out
    assert "1 stopped" in out


def test_status_of_a_sweep(stored):
    sweep = stored.json("status", stored.sweep_id)
    assert [member["status"] for member in sweep["members"]] == ["finished", "failed", "stopped", "damaged"]
    out, _ = stored("status", stored.sweep_id)
    assert f"{stored.sweep_id}: tiny, failed, " in out
    assert "node-3 was left out: no GPU" in out
    assert stored.runs[2].run_id in out


def test_status_of_an_empty_store_says_how_to_start(shell):
    assert shell.json("status") == []
    assert "cope-sweep run quickstart" in shell("status")[0]


def test_status_shows_the_traceback_of_a_failed_run(stored):
    failed = stored.runs[1].run_id
    out, _ = stored("status", failed)
    assert "Traceback (most recent call last)" in out
    assert '"traceback"' not in out
    assert "Traceback" in stored.json("status", failed)["state"]["traceback"]


def test_report_says_what_was_stopped(stored):
    out, _ = stored("table", "tiny", "--format", "markdown")
    assert "1 run was stopped early and not averaged" in out.replace("\n", " ")
    assert "1/2: 1 failed" in out
    assert "0/2: 1 stopped, 1 damaged" in out
    assert "12.50 (n=1)" in out.replace("\\", "")


def test_the_index_may_be_in_another_database(stored, tmp_path):
    other = f"sqlite:///{tmp_path / 'other.db'}"
    assert stored.json("status", "tiny", "--index", other)["counts"]["finished"] == 1
    os.remove(stored.folder / "store" / "index.db")
    stored.environment["COPE_SWEEP_INDEX"] = other
    assert stored.json("status", "tiny")["counts"]["stopped"] == 1
    assert not (stored.folder / "store" / "index.db").exists()
    assert Counter(Store(stored.folder / "store", index=other).index.statuses().values()) == {
        "finished": 1, "failed": 1, "stopped": 1, "damaged": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("output_format", "text"),
    [
        ("terminal", "A tiny copy"),
        ("markdown", "| position"),
        ("latex", r"\toprule"),
        ("csv", "in_dist/token_error"),
        ("html", "<table"),
        ("json", '"title": "A tiny copy"'),
    ],
)
def test_report_formats(stored, output_format, text):
    out, _ = stored("table", "tiny", "--format", output_format)
    assert text in out
    assert "CoPE" in out


def test_report_writes_a_file(stored):
    assert stored("table", "tiny", "--output", "table.md") == ("", "")
    assert (stored.folder / "table.md").read_text() == stored("table", "tiny", "--format", "markdown")[0]
    assert stored.json("table", "tiny")["rows"][0]["row"] == "CoPE"


def test_report_exports_every_run(stored):
    for run in stored.runs:
        finish(stored.store, run, {"in_dist/token_error": 1.0})
    stored("table", "tiny", "--runs", "--format", "parquet", "--output", "runs.parquet")
    frame = pd.read_parquet(stored.folder / "runs.parquet")
    assert len(frame) == 4
    assert set(frame["seed"]) == {0, 1}
    assert frame["in_dist/token_error"].notna().all()
    stored("table", "tiny", "--runs", "--format", "csv", "--output", "runs.csv")
    assert len(pd.read_csv(stored.folder / "runs.csv")) == 4
    stored("table", "tiny", "--format", "parquet", "--output", "rows.parquet")
    assert list(pd.read_parquet(stored.folder / "rows.parquet")["row"]) == ["CoPE", "none"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "0123456789abcdef"], "no run '0123456789abcdef'"),
        (["status", "20260101-000000-abcd"], "no sweep '20260101-000000-abcd'"),
        (["status", "--index", "mysql://x"], "is no index; accepted: sqlite:///PATH and postgresql://"),
        (["table", "tiny", "--format", "parquet"], "name a file"),
        (
            ["table", "tiny", "--runs", "--format", "latex"],
            "latex has no lines for single runs: choose the format csv or parquet",
        ),
        (["table", "tiny", "--format", "exe"], "no format 'exe'; the formats are: json, csv, markdown"),
        (["table", "tiny", "--compare", "CoPe"], "no row 'CoPe'; did you mean 'CoPE'?"),
        (["table", "tiny", "--compare", "paper"], "tiny has no published numbers"),
        (["table", "tiny", "--runs"], "terminal has no lines for single runs"),
        (
            ["table", "tiny", "--format", "csv", "--output", "nowhere/x.csv"],
            "nowhere/x.csv: No such file or directory",
        ),
        (
            ["table", "tiny", "--format", "parquet", "--output", "nowhere/x.parquet"],
            "nowhere/x.parquet: No such file or directory",
        ),
    ],
)
def test_bad_input(shell, words, message):
    _, err = shell(*words, code=2)
    assert err.startswith("error: ")
    assert message in " ".join(err.split())


def test_diff_of_two_runs(stored):
    left, right = stored.runs[0], stored.runs[2]
    finish(stored.store, right, {"in_dist/token_error": 20.0}, {"parameters": 7})
    out, _ = stored("diff", left.run_id, right.run_id)
    assert "1 of 1 runs finished" in out
    assert "model.position" in out
    assert "in_dist/token_error" in out
    assert "+7.5" in out
    found = stored.json("diff", left.run_id, right.run_id)
    assert (found["metrics"][0]["left"], found["metrics"][0]["right"]) == (12.5, 20.0)
    assert stored.json("diff", stored.sweep_id, stored.sweep_id)["spec"] == []
    _, err = stored("diff", left.run_id, stored.sweep_id, code=2)
    assert "a run and a sweep cannot be compared" in " ".join(err.split())


def test_report_compares_rows(stored):
    for run in stored.runs:
        finish(stored.store, run, {"in_dist/token_error": 1.0 + run.seed})
    out, _ = stored("table", "tiny", "--compare", "CoPE")
    assert "Difference of In-dist.: row minus CoPE" in " ".join(out.split())
    assert (
        "With 2 runs a row and 1 comparison the corrected p of an exact permutation test is at least 0.333"
        in " ".join(out.split())
    )
    assert stored.json("table", "tiny", "--compare", "none")["rows"][0]["metrics"]["in_dist/token_error"]["comparison"][
        "n"
    ] == [2, 2]


def test_a_run_is_named_by_its_first_digits(stored):
    first, second = stored.runs[0].run_id, stored.runs[1].run_id
    assert stored.json("status", first[:6])["run_id"] == first
    assert stored.json("logs", first[:6])["run_id"] == first
    assert stored.json("diff", first[:6], second[:7])["left"] == first
    assert "no ablation" in stored("status", first[:5] + "0" if first[5] != "0" else first[:5] + "1", code=2)[1]
    assert "no ablation 'abc'" in stored("status", "abc", code=2)[1], "three digits are not enough"
    twin = first[:8] + "00000000"
    with stored.store.index.database.writing() as connection:
        connection.execute(update(runs).where(runs.c.run_id == second).values(run_id=twin))
    err = " ".join(stored("status", first[:8], code=2)[1].split())
    assert f"{first[:8]}: the ids of several runs begin so" in err
    stored.write(first[:6], (stored.folder / "ablations" / "tiny.yaml").read_text())
    assert stored.json("status", first[:6])["ablation"] == first[:6], "an ablation has this name"
