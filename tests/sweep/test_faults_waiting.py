"""What waits for the cluster's head and for the index, and for how long. Without a cluster."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cope_sweep.spec import Resources
from cope_sweep.store import Store
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep import cluster
from cope_sweep.sweep import sweep as sweep_module
from cope_sweep.sweep.broker import Broker
from cope_sweep.sweep.cluster import HeadLost, check_head
from cope_sweep.sweep.groups import Groups
from cope_sweep.sweep.shapes import Shapes
from tests.sweep.ports import free_port
from tests.sweep.runs import TIMEOUT_S


class Unavailable:
    """A call that fails some times because the index does not answer."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __call__(self) -> str:
        self.failures -= 1
        if self.failures >= 0:
            raise IndexUnavailable("the server is away")
        return "an answer"


@pytest.fixture
def head_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the address of the cluster's head, which is given up at once."""

    def set_port(port: int) -> None:
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{port}")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(cluster, "HEAD_TIMEOUT_S", 0.0)

    return set_port


def test_a_head_that_accepts_connections_is_there(head_at: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        head_at(server.getsockname()[1])
        check_head()


def test_without_a_head_groups_neither_start_nor_end(head_at: Any) -> None:
    port = free_port()
    head_at(port)
    plan: Any = SimpleNamespace(resources=None)
    groups = Groups(
        plan, Shapes(Resources()), None, on_failed=lambda *failure: False, on_leave=lambda groups: None,
        on_refused=lambda shape, reason: None, on_note=lambda text: None,
    )  # fmt: skip
    with pytest.raises(HeadLost, match=f"127.0.0.1:{port}.*does not answer any more .*run the same command again"):
        groups.update({0: 1})
    assert groups.head_lost
    groups.update({0: 1})
    groups.close()


def test_the_end_of_a_sweep_waits_for_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module.time, "sleep", lambda duration_s: None)
    assert sweep_module._waiting_for_index(Unavailable(2)) == "an answer"
    monkeypatch.setattr(sweep_module, "INDEX_TIMEOUT_S", -1.0)
    with pytest.raises(IndexUnavailable):
        sweep_module._waiting_for_index(Unavailable(2))


@pytest.mark.parametrize("closed", [False, True])
def test_the_broker_waits_for_the_index_until_the_sweep_is_stopped(
    store: Store, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    monkeypatch.setattr("cope_sweep.sweep.broker_records.INDEX_RETRY_S", 0.01)

    async def scene() -> tuple[str | None, str | None]:
        broker = Broker(store, "a-sweep", [], max_failures=0)
        if closed:
            await broker.close()
        answer = await asyncio.wait_for(broker.records.in_thread(Unavailable(2)), TIMEOUT_S)
        await broker.release()
        return answer, broker.records.problem

    answer, problem = asyncio.run(scene())
    assert answer == (None if closed else "an answer")
    assert problem == ("IndexUnavailable: the server is away" if closed else None)
