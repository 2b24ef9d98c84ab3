"""What waits for the cluster's head and for the index, and for how long. Without a cluster."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep import cluster
from cope_sweep.sweep import sweep as sweep_module
from cope_sweep.sweep.cluster import check_head
from cope_sweep.sweep.executor import ClusterLost
from tests.sweep.ports import free_port


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


def test_a_head_that_does_not_is_lost_and_nothing_has_failed(head_at: Any) -> None:
    port = free_port()
    head_at(port)
    with pytest.raises(ClusterLost, match=f"127.0.0.1:{port}.*does not answer any more .*run the same command again"):
        check_head()


def test_the_end_of_a_sweep_waits_for_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module.time, "sleep", lambda duration_s: None)
    assert sweep_module._waiting_for_index(Unavailable(2)) == "an answer"
    monkeypatch.setattr(sweep_module, "INDEX_TIMEOUT_S", -1.0)
    with pytest.raises(IndexUnavailable):
        sweep_module._waiting_for_index(Unavailable(2))
