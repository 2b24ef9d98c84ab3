"""Plans are made off the request path: one of many runs delays neither other ablations nor other routes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cope_services.http import plans

from cope_sweep.read.queries import ablations
from tests.services.sample_store import API, TINY, SampleStore, serving

BIG = "big"


class Gate:
    """Making the plan of the ablation `big` waits until it is opened."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.made = 0

    def wait(self) -> None:
        self.made += 1
        self.reached.set()
        assert self.open.wait(60)


@pytest.fixture
def gate(own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The folder has the ablation `big`."""
    (own_sample.ablations / f"{BIG}.yaml").write_text(TINY)
    gate, expand = Gate(), ablations.expand

    def gated(loaded: Any, **kwargs: Any) -> Any:
        if loaded.name == BIG:
            gate.wait()
        return expand(loaded, **kwargs)

    monkeypatch.setattr(ablations, "expand", gated)
    monkeypatch.setattr(plans, "PATIENCE_S", 0.05)
    yield gate
    gate.open.set()


def test_other_routes_answer_while_a_plan_is_made(own_sample: SampleStore, gate: Gate) -> None:
    # More waiting requests than the server has threads for requests.
    urls = [f"{API}/ablations/{BIG}/table?n={number}" for number in range(30)]
    urls += [f"{API}/runs?ablation={BIG}&offset={number}" for number in range(30)]
    with serving(own_sample.settings()) as client, ThreadPoolExecutor(60) as threads:
        try:
            waiting = [threads.submit(httpx.get, f"{client.base_url}{url}", timeout=120) for url in urls]
            assert gate.reached.wait(60)
            run = f"/runs/{own_sample.ids[0]}"
            for path in ("/ablations/tiny", "/ablations/tiny/table", "/runs", run, "/sweeps"):
                assert client.get(API + path).status_code == 200
            assert client.get(f"{API}/ablations/none").status_code == 404
            assert client.get("/health/ready").status_code == 200
            listed = {each["name"]: each for each in client.get(f"{API}/ablations").json()}
            assert listed[BIG]["loading"] is True
            assert listed["tiny"]["runs"] == 4
            assert not any(each.done() for each in waiting)
        finally:
            gate.open.set()
        assert {each.result().status_code for each in waiting} == {200}
        deadline_s = time.monotonic() + 60
        while any(each["loading"] for each in client.get(f"{API}/ablations").json()):
            assert time.monotonic() < deadline_s
        assert {each["name"]: each["runs"] for each in client.get(f"{API}/ablations").json()}[BIG] == 4
    assert gate.made == 2, "one making of its own size, one of its scale"


def test_a_file_with_too_many_runs_is_shown_with_an_error(own_sample: SampleStore) -> None:
    axes = "".join(f"  train.{key}: {[n * 1e-6 for n in range(1, 1001)]}\n" for key in ("lr", "weight_decay"))
    (own_sample.ablations / f"{BIG}.yaml").write_text(TINY.replace("grid:\n", f"grid:\n{axes}"))  # 4,000,000 runs
    with serving(own_sample.settings(max_plan_runs=1000)) as client:
        answer = client.get(f"{API}/ablations/{BIG}/table")
        assert answer.status_code == 409
        assert answer.json()["code"] == "invalid_ablation"
        assert "more than" in answer.json()["detail"]
        listed = {each["name"]: each for each in client.get(f"{API}/ablations").json()}
        assert "leave out axes" in listed[BIG]["error"]
        assert listed["tiny"]["runs"] == 4
