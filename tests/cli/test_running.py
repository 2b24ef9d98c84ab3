import os
import signal
import socket
import time

import pytest

from tests.cli.conftest import TINY

SLOW = TINY.replace("steps: 6", "steps: 100000").replace("every: 3", "every: 100000")


def test_run_trains_everything_and_prints_the_table(trained):
    sweep, table = trained.first["sweep"], trained.first["table"]
    assert (sweep["trained"], sweep["reused"], sweep["failed"], sweep["exit_code"]) == (4, 0, 0, 0)
    assert [row["row"] for row in table["rows"]] == ["CoPE", "none"]
    for row in table["rows"]:
        assert row["metrics"]["in_dist/token_error"]["n"] == 2


def test_running_again_trains_nothing_and_prints_the_same_table(trained):
    again = trained.json("run", "tiny", "--local")
    assert again["sweep"]["trained"] == 0
    assert again["sweep"]["reused"] == 4
    assert again["table"] == trained.first["table"]
    assert "Nothing to train: all 4 runs" in trained("run", "tiny", "--local")[0]


def test_a_new_seed_trains_only_what_is_missing(trained):
    more = trained.json("run", "tiny", "--local", "--no-mlflow", "--set", "seeds=[0,1,2]")
    assert (more["sweep"]["trained"], more["sweep"]["reused"]) == (2, 4)


def test_two_ablations_share_a_run(shell):
    shell.json("run", "tiny", "--local", "--no-mlflow", "--set", "seeds=[0]")
    shell.write("other", TINY.replace("CoPE: [cope], none: []", "mine: [{kind: cope, p_max: 64}], RoPE: [rope]"))
    other = shell.json("run", "other", "--local", "--no-mlflow", "--set", "seeds=[0]")
    assert (other["sweep"]["trained"], other["sweep"]["reused"]) == (1, 1)


def test_one_run_s_failure_is_its_own(shell):
    shell.write(
        "tiny",
        TINY.replace("none: []", "broken: []")
        + "when: [{if: {model.position: broken}, set: {train.lr: 1e30, train.clip: null}}]\n",
    )
    failed = shell.json("run", "tiny", "--local", "--no-mlflow", code=1)
    assert (failed["sweep"]["trained"], failed["sweep"]["failed"]) == (2, 2)
    runs = shell.json("status", "tiny")["runs"]
    broken = [run for run in runs if run["status"] == "failed"]
    assert len(broken) == 2
    assert "lower train.lr" in broken[0]["message"]
    assert "Traceback" in shell("status", broken[0]["run_id"])[0]
    kept = shell.json("run", "tiny", "--local", "--no-mlflow", "--keep-failed", code=1)
    assert (kept["sweep"]["trained"], kept["sweep"]["failed"]) == (0, 2)


def start_until_it_trains(shell):
    process = shell.start("run", "tiny", "--local", "--no-mlflow", "--set", "seeds=[0]")
    for line in process.stderr:
        if "running" in line and "/100000" in line:
            time.sleep(1.5)
            return process
    raise AssertionError("it ended by itself")


def test_ctrl_c_keeps_what_is_finished_and_goes_on_later(shell):
    shell.write(
        "tiny",
        SLOW.replace("grid:", "zip: [{train.steps: [6, 100000]}]\ngrid:").replace("CoPE: [cope], none: []", "none: []"),
    )
    process = start_until_it_trains(shell)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command goes on" in out
    statuses = {run["steps"]: run["status"] for run in shell.json("status", "tiny", "--set", "seeds=[0]")["runs"]}
    assert statuses == {6: "finished", 100000: "interrupted"}

    process = start_until_it_trains(shell)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    step = next(run["step"] for run in shell.json("status", "tiny", "--set", "seeds=[0]")["runs"] if run["steps"] > 6)
    assert step > 0


def test_plain_lines_where_there_is_no_terminal(shell):
    _, err = shell("run", "tiny", "--local", "--no-mlflow")
    assert "finished     CoPE · seed 0  step 6/6" in err
    assert "\x1b[" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "tiny", "--local", "--set", "model.heads=3"], "model.heads = 3 does not divide model.dim = 8"),
        (["run", "tiyn", "--local"], "no ablation 'tiyn'"),
        (["run", "ablations/none.yaml", "--local"], "ablations/none.yaml: No such file or directory"),
        (["run", "tiny", "--local", "--scale", "huge"], "unknown scale 'huge'"),
        (["run", "tiny", "--local", "--mlflow", "ftp://x"], "ftp"),
        (["run", "tiny", "--local", "--store", "ablations/tiny.yaml/store"], "cannot be written"),
        (["plan", "tiny", "--set", "grid=3"], "no key 'grid'"),
        (["list", "--ablations", "nowhere"], "no ablation files"),
        (["status", "0123456789abcdef"], "no run 0123456789abcdef"),
        (["report", "tiny", "--format", "parquet"], "name a file"),
        (["report", "tiny", "--runs", "--format", "latex"], "--runs goes with --format csv or parquet"),
        (["report", "tiny", "--format", "csv", "--output", "nowhere/x.csv"], "No such file or directory"),
        (["perplexity", "0123456789abcdef", "--tokens", "1 2"], "is pending"),
        (["perplexity", "x", "--tokens", "1 b"], "whole numbers"),
        (["perplexity", "x"], "nothing to score"),
        (["perplexity", "nowhere", "--tokens", "1 2"], "nowhere"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(shell, words, message):
    _, err = shell(*words, code=2)
    assert err.startswith("error: ")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not (shell.folder / "store" / "sweeps").exists() or not os.listdir(shell.folder / "store" / "sweeps")


def test_an_mlflow_that_does_not_answer_is_said_before_anything_starts(shell):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()  # it accepts, and never answers
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        _, err = shell("run", "tiny", "--local", "--mlflow", url, code=2)
    assert url in err
    assert time.monotonic() - began < 30
    assert shell.json("status", "tiny")["runs"][0]["status"] == "pending"


def test_errors_are_json_where_json_is_asked_for(shell):
    assert shell.json("plan", "tiyn", code=2)["error"]["type"] == "UserError"
