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
        (["--status", "done"], "there is no such status; the statuses are pending, running"),
    ],
)
def test_bad_input(stored, words, message):
    _, err = stored("runs", *words, code=2)
    assert message in " ".join(err.split())
