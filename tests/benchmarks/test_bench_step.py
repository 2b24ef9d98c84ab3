import pytest
from cope_benchmarks import step
from cope_benchmarks.save import markdown, save_measurement
from cope_benchmarks.step import ALTERNATIVES, MODELS, SDPA, measure, table

pytestmark = pytest.mark.slow

TINY = {
    "task": {"kind": "flip_flop", "pairs": 20, "loss": "all"},
    "model": {"layers": 2, "dim": 32, "heads": 2},
    "train": {"batch": 4},
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(step, "MODELS", {"tiny": TINY})


def test_every_alternative_is_correct_and_timed(tmp_path):
    measured = measure(repetitions=2)
    rows = measured["models"][0]["rows"]
    assert [row["attention"] for row in rows] == list(ALTERNATIVES)
    assert not [row for row in rows if "failed" in row]
    assert next(row for row in rows if row["attention"] == SDPA)["of_sdpa"] == 1
    save_measurement(tmp_path, "step", measured, table(measured))
    assert (tmp_path / "step.md").read_text() == markdown(table(measured))
    assert (tmp_path / "step.json").exists()


def test_an_alternative_with_wrong_gradients_is_not_timed(monkeypatch):
    position, compute, expected_from = ALTERNATIVES["CoPE, native"]
    wrong = (position, lambda *arguments: compute(*arguments) * 1.2, expected_from)
    monkeypatch.setattr(step, "ALTERNATIVES", {SDPA: ALTERNATIVES[SDPA], "wrong": wrong})
    rows = measure(repetitions=2)["models"][0]["rows"]
    assert "off by" in rows[1]["failed"]
    assert "step" not in rows[1]


def test_the_models_have_the_paper_s_sizes():
    dims = [(rest["model"]["layers"], rest["model"]["dim"]) for rest in MODELS.values()]
    assert dims == [(4, 256), (1, 768)]
