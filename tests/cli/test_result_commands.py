import pandas as pd
import pytest

pytestmark = pytest.mark.slow  # `trained` trains


def test_status_of_an_ablation(trained):
    runs = trained.json("status", "tiny")["runs"]
    assert {run["status"] for run in runs} == {"finished"}
    out, _ = trained("status", "tiny")
    assert runs[0]["run_id"] in out
    assert "6/6" in out


def test_status_of_a_run(trained):
    run_id = trained.json("status", "tiny")["runs"][0]["run_id"]
    run = trained.json("status", run_id)
    assert run["status"] == "finished"
    assert run["spec"]["model"]["position"][0]["kind"] == "cope"
    assert '"in_dist/token_error"' in trained("status", run_id)[0]


def test_status_of_the_store(trained):
    sweep = trained.json("status")[0]
    assert (sweep["ablation"], sweep["status"], sweep["executor"]) == ("tiny", "finished", "local")
    assert sweep["sweep_id"] in trained("status")[0]


def test_status_of_an_empty_store_says_how_to_start(shell):
    assert shell.json("status") == []
    assert "cope-sweep run quickstart" in shell("status")[0]


def test_status_shows_the_traceback_of_a_failed_run(shell):
    shell("run", "tiny", "--local", "--no-mlflow", "--set", "train.lr=1e30", "--set", "train.clip=null", code=1)
    sets = ("--set", "train.lr=1e30", "--set", "train.clip=null")
    run = shell.json("status", "tiny", *sets)["runs"][0]
    assert run["status"] == "failed"
    assert run["message"].split()[0] in shell("status", "tiny", *sets)[0]
    out, _ = shell("status", run["run_id"])
    assert "Traceback" in out
    assert '"traceback"' not in out
    assert "Traceback" in shell.json("status", run["run_id"])["state"]["traceback"]


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
def test_report_formats(trained, output_format, text):
    out, _ = trained("report", "tiny", "--format", output_format)
    assert text in out
    assert "CoPE" in out


def test_report_writes_a_file(trained):
    assert trained("report", "tiny", "--output", "table.md") == ("", "")
    assert (trained.folder / "table.md").read_text() == trained("report", "tiny", "--format", "markdown")[0]
    assert trained.json("report", "tiny")["rows"][0]["row"] == "CoPE"


def test_report_exports_every_run(trained):
    trained("report", "tiny", "--runs", "--format", "parquet", "--output", "runs.parquet")
    frame = pd.read_parquet(trained.folder / "runs.parquet")
    assert len(frame) == 4
    assert set(frame["seed"]) == {0, 1}
    assert frame["in_dist/token_error"].notna().all()
    trained("report", "tiny", "--runs", "--format", "csv", "--output", "runs.csv")
    assert len(pd.read_csv(trained.folder / "runs.csv")) == 4
    trained("report", "tiny", "--format", "parquet", "--output", "rows.parquet")
    assert list(pd.read_parquet(trained.folder / "rows.parquet")["row"]) == ["CoPE", "none"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "0123456789abcdef"], "no run 0123456789abcdef"),
        (["report", "tiny", "--format", "parquet"], "name a file"),
        (["report", "tiny", "--runs", "--format", "latex"], "--runs needs --format csv or parquet"),
        (["report", "tiny", "--runs"], "--runs needs --format csv or parquet, not terminal"),
        (
            ["report", "tiny", "--format", "csv", "--output", "nowhere/x.csv"],
            "nowhere/x.csv: No such file or directory",
        ),
        (
            ["report", "tiny", "--format", "parquet", "--output", "nowhere/x.parquet"],
            "nowhere/x.parquet: Cannot save file into a non-existent directory",
        ),
    ],
)
def test_bad_input(shell, words, message):
    _, err = shell(*words, code=2)
    assert err.startswith("error: ")
    assert message in " ".join(err.split())
