import pytest
from cope_benchmarks import step
from cope_benchmarks.keep import keep, markdown
from cope_benchmarks.step import MODELS, SDPA, WAYS, measure, table

TINY = {
    "task": {"kind": "flip_flop", "pairs": 20, "loss": "all"},
    "model": {"layers": 2, "dim": 32, "heads": 2},
    "train": {"batch": 4},
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(step, "MODELS", {"tiny": TINY})


def test_every_way_is_right_and_timed(tmp_path):
    measured = measure(repetitions=2)
    rows = measured["models"][0]["rows"]
    assert [row["attention"] for row in rows] == list(WAYS)
    assert not [row for row in rows if "failed" in row]
    assert next(row for row in rows if row["attention"] == SDPA)["of_sdpa"] == 1
    keep(tmp_path, "step", measured, table(measured))
    assert (tmp_path / "step.md").read_text() == markdown(table(measured))
    assert (tmp_path / "step.json").exists()


def test_what_is_wrong_has_no_speed(monkeypatch):
    position, compute, answer = WAYS["CoPE, native"]
    wrong = (position, lambda *asked: compute(*asked) * 1.2, answer)
    monkeypatch.setattr(step, "WAYS", {SDPA: WAYS[SDPA], "wrong": wrong})
    rows = measure(repetitions=2)["models"][0]["rows"]
    assert "off by" in rows[1]["failed"]
    assert "step" not in rows[1]


def test_the_models_are_those_of_the_paper_s_sizes():
    dims = [(rest["model"]["layers"], rest["model"]["dim"]) for rest in MODELS.values()]
    assert dims == [(4, 256), (1, 768)]
