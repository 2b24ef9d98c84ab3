import csv
import json

import pyarrow.parquet as pq
import pytest


def test_runs_are_filtered_by_any_value(stored):
    cope = [stored.runs[0].run_id, stored.runs[1].run_id]
    found = stored.json("runs", "--filter", "model.position=cope", "--sort", "seed")
    assert [run["run_id"] for run in found["runs"]] == cope
    assert (found["total"], found["limit"], found["offset"]) == (2, 100, 0)
    assert found["runs"][0]["values"] == {"model.position": "cope", "seed": 0}
    assert (found["runs"][0]["ablations"], found["runs"][0]["row"]) == (["tiny"], "CoPE")
    best = stored.json("runs", "--filter", "in_dist/token_error<20", "--filter", "facts.parameters>1000")
    assert [run["run_id"] for run in best["runs"]] == cope[:1]
    statuses = stored.json("runs", "--status", "stopped", "--status", "damaged", "--sweep", stored.sweep_id)
    assert {run["status"] for run in statuses["runs"]} == {"stopped", "damaged"}


def test_the_table_shows_the_values_and_what_is_left_out(stored):
    out, _ = stored("runs", "--sort", "in_dist/token_error", "--limit", "2")
    assert "in_dist/token_error" in out
    assert "12.5" in out
    assert "runs 1 to 2 of 4" in out
    assert "stopped at step 3 by asha" in stored("runs", "--status", "stopped")[0]


def test_an_empty_store_has_no_runs(shell):
    assert shell.json("runs")["total"] == 0
    assert not (shell.folder / "store").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--filter", "model.layer>=4"], "no run of this store has 'model.layer'; near ones: model.layers"),
        (["--filter", "model.layers"], "is no condition; write KEY"),
        (["--sort", "in_dist/tokenerror"], "near ones: in_dist/token_error"),
        (["--sweep", "20260101-000000-abcd"], "no sweep '20260101-000000-abcd' in the store"),
        (["--sweep", "20260101-000000-abcd", "-o", "x.csv"], "no sweep '20260101-000000-abcd' in the store"),
        (["-o", "runs.txt"], "its suffix is no format of runs; the formats are parquet, csv, json"),
        (["--format", "exe"], "--format exe is no format of runs"),
        (["--format", "parquet"], "parquet is binary; name a file"),
        (["--curves"], "--curves exports; name a file"),
        (["-o", "nowhere/runs.csv"], "nowhere/runs.csv: No such file or directory"),
        (["--filter", "model.layer=1", "-o", "runs.csv"], "near ones: model.layers"),
        (["--status", "done"], "'done' is not one of 'pending', 'running'"),
    ],
)
def test_bad_input(stored, words, message):
    _, err = stored("runs", *words, code=2)
    assert message in " ".join(err.split())


def test_runs_are_exported_with_all_their_values(stored):
    out, _ = stored("runs", "--filter", "model.position=cope", "-o", "runs.parquet")
    assert "all matching runs are in runs.parquet" in out
    table = pq.read_table(stored.folder / "runs.parquet")
    cope = [stored.runs[0].run_id, stored.runs[1].run_id]
    assert table.column("run_id").to_pylist() == sorted(cope)
    assert set(table.column("model.position").to_pylist()) == {"cope"}
    assert table.column("train.steps").to_pylist() == [6, 6]
    stored("runs", "--sort", "seed", "--limit", "1", "--format", "csv", "-o", "runs.txt")
    lines = list(csv.DictReader((stored.folder / "runs.txt").open()))
    assert len(lines) == 4, "--limit is that of lists"
    assert [line["seed"] for line in lines] == ["0", "0", "1", "1"]
    finished = next(line for line in lines if line["status"] == "finished")
    assert (finished["in_dist/token_error"], finished["sweeps"]) == ("12.5", stored.sweep_id)
    assert [path.name for path in stored.folder.glob(".runs*")] == []


def test_curves_are_exported(stored):
    stored("runs", "--status", "finished", "--curves", "-o", "curves.json")
    lines = json.loads((stored.folder / "curves.json").read_text())
    assert {(line["run_id"], line["row"]) for line in lines} == {(stored.runs[0].run_id, "CoPE")}
    assert {"step": 6, "metric": "in_dist/token_error", "value": 12.5}.items() <= lines[-1].items()


@pytest.mark.slow
def test_an_export_can_be_piped(stored):
    process = stored.start("runs", "--format", "json", "--sort", "seed")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert [line["seed"] for line in json.loads(out)] == [0, 0, 1, 1]


def test_a_failed_export_leaves_the_file(stored):
    (stored.folder / "runs.csv").write_text("before")
    stored("runs", "--filter", "model.layer=1", "-o", "runs.csv", code=2)
    assert (stored.folder / "runs.csv").read_text() == "before"
