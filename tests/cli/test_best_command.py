"""The command `best`."""

import pytest
import yaml

from cope_sweep.config import expand, load_ablation
from cope_sweep.store import Store
from tests.cli.conftest import TINY
from tests.read.tables.ablations import finish

SEARCH = "search: {kind: random, samples: 3, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}\n"


@pytest.fixture
def searched(shell):
    """Three draws for each of two rows; the later a draw the better."""
    shell.write("searched", TINY + SEARCH)
    shell.plan = expand(load_ablation(shell.folder / "ablations" / "searched.yaml"))
    store = Store(shell.folder / "store", create=True)
    for number, row in enumerate(shell.plan.rows):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 50.0 - number})
    return shell


def test_the_table_has_a_line_for_each_row_of_the_grid(searched):
    out, _ = searched("best", "searched")
    lines = out.splitlines()
    assert lines[0].split()[:7] == ["row", "of", "1", "of", "2", "of", "3"]
    assert lines[1].split()[:4] == ["CoPE", "50", "49", "48"]
    assert lines[2].split()[:4] == ["none", "47", "46", "45"]
    assert "in_dist/token_error, mean over seeds [0, 1], min is best" in out


def test_the_best_values_as_json_and_as_conditions(searched):
    answer = searched.json("best", "searched")
    lr = [row.runs[0].train.lr for row in searched.plan.rows]
    assert answer["rows"][0]["best"] == {"values": {"train.lr": lr[2]}, "score": 48.0}
    assert len(answer["rows"][0]["draws"]) == 3
    out, _ = searched("best", "searched", "--yaml")
    assert yaml.safe_load(out)["when"][1] == {"if": {"model.position": "none"}, "set": {"train.lr": lr[5]}}


def test_what_cannot_be_answered_is_an_error(searched):
    assert "only search: random" in searched("best", "tiny", code=2)[1]
    assert "has no such metric" in searched("best", "searched", "--metric", "x", code=2)[1]
    assert "leave one out" in searched.json("best", "searched", "--yaml", code=2)["error"]["message"]
