import json
import socket

import pandas as pd
import pytest


def test_list(trained):
    (entry,) = trained.json("list")
    assert (entry["name"], entry["runs"], entry["finished"]) == ("tiny", 4, 4)
    assert "A tiny copy" in trained("list")[0]


def test_plan(trained):
    plan = trained.json("plan", "tiny", "--set", "seeds=[0,7]")
    assert (plan["finished"], plan["to_do"]) == (2, 2)
    assert {run["parameters"] for run in plan["runs"]} == {936, 936 + 64 * 4}
    assert plan["estimated_s"] > 0
    text = trained("plan", "tiny", "--set", "seeds=[0,7]")[0]
    assert "2 done, 2 to do" in text


def test_status_of_an_ablation_a_run_and_the_store(trained):
    runs = trained.json("status", "tiny")["runs"]
    assert {run["status"] for run in runs} == {"finished"}
    run = trained.json("status", runs[0]["run_id"])
    assert run["status"] == "finished"
    assert run["spec"]["model"]["position"][0]["kind"] == "cope"
    sweeps = trained.json("status")
    assert sweeps[0]["ablation"] == "tiny"
    assert sweeps[0]["status"] == "finished"


@pytest.mark.parametrize(
    ("form", "mark"), [("markdown", "|"), ("latex", r"\toprule"), ("csv", "in_dist/token_error"), ("html", "<table")]
)
def test_report_formats(trained, form, mark):
    out, _ = trained("report", "tiny", "--format", form)
    assert mark in out
    assert "CoPE" in out


def test_report_exports_every_run(trained):
    path = trained.folder / "runs.parquet"
    trained("report", "tiny", "--runs", "--format", "parquet", "--output", str(path))
    frame = pd.read_parquet(path)
    assert len(frame) == 4
    assert set(frame["seed"]) == {0, 1}
    assert frame["in_dist/token_error"].notna().all()


def test_perplexity(trained):
    run_id = trained.json("status", "tiny")["runs"][0]["run_id"]
    measured = trained.json("perplexity", run_id, "--tokens", "0 1 2 3", "--tokens", "4 5")
    assert measured["perplexity"] > 1
    (trained.folder / "ids.json").write_text(json.dumps([[0, 1, 2, 3], [4, 5]]))
    assert trained.json("perplexity", run_id, "--file", "ids.json") == measured
    _, err = trained("perplexity", run_id, "--tokens", "0 99", code=2)
    assert "99" in err
    assert "6" in err


def test_a_checkpoint_cut_short_is_said(trained):
    run_id = trained.json("status", "tiny")["runs"][1]["run_id"]
    path = trained.folder / "store" / "runs" / run_id / "checkpoint" / "model.safetensors"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: len(whole) // 2])
        _, err = trained("perplexity", run_id, "--tokens", "0 1", code=2)
    finally:
        path.write_bytes(whole)
    assert "model.safetensors" in err


def test_a_busy_port_is_said(trained):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = trained.start("serve", "--port", port)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    assert port in err
    assert "Traceback" not in err
