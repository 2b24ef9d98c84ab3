import pytest
from cope_benchmarks import step_memory
from cope_benchmarks.step_memory import ALTERNATIVES, measure, table

from cope_sweep.families import base
from cope_sweep.model import loss
from cope_sweep.train import Trainer

TINY = {
    "task": {"kind": "selective_copy", "vocabulary": 60, "tokens": 8, "blanks": 0},
    "model": {"layers": 2, "dim": 16, "heads": 2, "position": ["cope"]},
    "train": {"batch": 4, "steps": 100},
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Steps in this process, with a loss in chunks; what an alternative sets is restored."""
    monkeypatch.setattr(step_memory, "RUN", TINY)
    monkeypatch.setitem(loss.CHUNK_LOGITS, "cpu", 300)

    def in_this_process(name, steps, threads):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_backward", Trainer._backward)
            patch.setattr(base, "RECOMPUTED_ELEMENTS", 0)
            return step_memory._steps(name, steps, threads)

    monkeypatch.setattr(step_memory, "_in_a_process", in_this_process)


def test_both_alternatives_train_the_same():
    measured = measure(turns=1, steps=1)
    rows = measured["rows"]
    assert [row["loss"] for row in rows] == list(ALTERNATIVES)
    assert rows[0]["loss_value"] == pytest.approx(rows[1]["loss_value"], rel=1e-6)
    assert all(row["peak_bytes"] > 0 and row["wall_s"] > 0 for row in rows)
    assert table(measured).row_count == 2
