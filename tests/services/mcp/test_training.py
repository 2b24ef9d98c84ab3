"""Sweeps that an agent starts: really trained, in processes of their own."""

from __future__ import annotations

import pytest
from cope_services.mcp.training import Allowance
from mcp import Client

from tests.helpers.processes import until
from tests.helpers.sample_store import TINY, SampleStore
from tests.services.mcp.agents import agent_server, code, over_http, text, with_client

NEW = TINY.replace("dim: 8", "dim: 4").replace("seeds: [0, 1]", "seeds: [0]")


@pytest.mark.slow
def test_check_plan_run_wait_and_table(own_sample: SampleStore) -> None:
    server = agent_server(own_sample, Allowance(3, 30.0))

    async def search(client: Client) -> None:
        sweep = {"spec": NEW, "name": "narrow"}
        assert "2 to train" in text(await client.call_tool("plan", sweep))
        started = await client.call_tool("run", sweep)
        sweep_id = text(started).split()[1]
        assert "budget left: 1 runs" in text(started)
        assert code(await client.call_tool("run", sweep)) == "too_many_requests"
        ended = text(await client.call_tool("wait", {"sweep_id": sweep_id, "seconds": 240}))
        assert "status: finished" in ended
        assert "counts: finished 2" in ended
        assert "| CoPE |" in text(await client.call_tool("get_table", {"name": "narrow"}))
        server.training.join()
        assert code(await client.call_tool("run", sweep)) == "nothing_left"
        more = {**sweep, "set": ["seeds=[1]"]}
        assert code(await client.call_tool("run", more)) == "beyond_budget"
        assert "| narrow |" in text(await client.call_tool("list_sweeps", {}))
        assert server.training.allowance.max_cpu_minutes - server.training.left.max_cpu_minutes > 0

    with_client(server.server, search)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["stop", "budget", "end of the server"])
def test_a_long_sweep_is_stopped(own_sample: SampleStore, by: str) -> None:
    minutes = 0.1 if by == "budget" else 60.0
    server = agent_server(own_sample, Allowance(2, minutes))

    async def train(client: Client) -> str:
        long = {"spec": NEW, "name": "long", "set": ["train.steps=100000"]}
        if by == "budget":
            server.training.check = lambda runs, least_s: None  # an estimate would refuse it
        sweep_id = text(await client.call_tool("run", long)).split()[1]
        if by == "stop":
            until(lambda: own_sample.store.index.sweep_counts([sweep_id])[sweep_id].get("running"))
            await client.call_tool("stop", {"sweep_id": sweep_id})
        if by != "end of the server":
            await client.call_tool("wait", {"sweep_id": sweep_id, "seconds": 240})
        return sweep_id

    sweep_id = with_client(server.server, train)
    server.training.join()
    summary = own_sample.store.index.sweep(sweep_id)
    assert summary is not None
    assert summary.status in ("interrupted", "failed")  # failed: it was ended before it had begun
    if by != "end of the server":  # which may come before the first look at the process
        assert server.training.left.max_cpu_minutes < minutes


@pytest.mark.slow
def test_a_server_that_is_terminated_ends_its_sweep(own_sample: SampleStore) -> None:
    options = ("--allow-training", "--max-runs", "2", "--max-cpu-minutes", "60", "--no-mlflow")
    long = {"spec": NEW, "name": "long", "set": ["train.steps=1000000"], "max_runs": 1}

    async def train(client: Client) -> str:
        sweep_id = text(await client.call_tool("run", long)).split()[1]
        until(lambda: own_sample.store.index.sweep_counts([sweep_id])[sweep_id].get("running"))
        return sweep_id

    with over_http(own_sample, *options) as address:
        sweep_id = with_client(address, train)
    summary = own_sample.store.index.sweep(sweep_id)
    assert summary is not None
    assert summary.status == "interrupted"
