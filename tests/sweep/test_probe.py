import pytest

from cope_sweep.plan import estimates, expand
from cope_sweep.plan.estimate import shape_of
from cope_sweep.sweep.probe import probe_plan
from tests.spec.ablations import TEXT, load


@pytest.mark.slow
def test_each_distinct_shape_is_probed_once():
    plan = expand(load(TEXT))
    assert len(plan.rows) == 4
    calls = []
    probes = probe_plan(plan, steps=1, on_probe=lambda *call: calls.append(call))
    assert calls == [("CoPE · 0.001", 1, 2), ("none · 0.001", 2, 2)]
    assert list(probes) == [shape_of(plan.rows[0].runs[0]), shape_of(plan.rows[2].runs[0])]
    found = estimates(plan, {}, probes)
    assert {estimate.basis for estimate in found.values()} == {"probed on this machine"}
