import pytest
import torch
from cope_benchmarks import attention
from cope_benchmarks.attention import LISTING, NATIVE, SDPA, Shape, measure, table
from cope_benchmarks.save import markdown

pytestmark = pytest.mark.slow

TINY = Shape("tiny", 2, 2, 70, 16, 9)


@pytest.fixture(scope="module")
def measured():
    return measure((TINY,), repetitions=2, compiled=False, densities=False)


def test_every_alternative_is_correct_and_timed(measured):
    rows = {row["attention"]: row for row in measured["shapes"][0]["rows"]}
    assert {NATIVE, LISTING, SDPA} <= rows.keys()
    assert not [name for name, row in rows.items() if "failed" in row]
    for row in rows.values():
        assert 0 < row["forward"]["least_ms"] <= row["forward"]["median_ms"]
        assert row["extra_mb"] >= 0
    ratio = rows[NATIVE]["forward_backward"]["median_ms"] / rows[SDPA]["forward_backward"]["median_ms"]
    assert rows[NATIVE]["of_sdpa"] == pytest.approx(ratio, abs=1e-3)


def test_the_table_has_a_row_for_each_alternative(measured):
    lines = markdown(table(measured)).splitlines()
    assert len(lines) == 2 + len(measured["shapes"][0]["rows"])
    assert f"| tiny | {NATIVE} |" in "\n".join(lines)


def test_an_alternative_with_wrong_outputs_is_not_timed(monkeypatch):
    correct = attention.peers.listing
    monkeypatch.setattr(attention.peers, "listing", lambda x: correct(x) * 1.2)
    rows = measure((TINY,), repetitions=2, compiled=False, densities=False)["shapes"][0]["rows"]
    failed = {row["attention"]: row for row in rows if "failed" in row}
    assert "output is off by" in failed[LISTING]["failed"]
    assert "forward" not in failed[LISTING]
    # There are no ratios to an alternative that was not timed.
    assert not any("times_faster_than_listing" in row for row in rows)


def test_a_missing_gradient_is_detected(monkeypatch):
    correct = attention.peers.sdpa
    monkeypatch.setattr(attention.peers, "sdpa", lambda x: correct({**x, "v": x["v"].detach()}))
    rows = measure((TINY,), repetitions=2, compiled=False, densities=False)["shapes"][0]["rows"]
    assert {row["attention"]: row for row in rows}[SDPA]["failed"] == "no gradient of v"


def test_gates_have_the_mean_that_was_asked_for():
    mean_gate = 0.25
    leaves, _ = attention.inputs_with_gates(Shape("one", 1, 2, 64, 32, 16), mean_gate)
    logits = leaves["q"] @ leaves["k"].transpose(-1, -2) / 32**0.5
    assert torch.sigmoid(logits).mean().item() == pytest.approx(mean_gate, abs=0.03)
