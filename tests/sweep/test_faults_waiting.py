"""How long a sweep waits for the cluster's head. Without a cluster."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cope_sweep.sweep import cluster
from cope_sweep.sweep.cluster import Node, check_cluster
from cope_sweep.sweep.executor import ClusterLost
from tests.sweep.ports import free_port


@pytest.fixture
def head_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the address of the cluster's head, which is given up at once."""

    def set_port(port: int) -> None:
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{port}")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(cluster, "HEAD_TIMEOUT_S", 0.0)

    return set_port


def test_a_head_that_accepts_connections_is_there(head_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"this node": Node("127.0.0.1", {"CPU": 2})}
    monkeypatch.setattr(cluster, "nodes", lambda: there)
    with socket.create_server(("127.0.0.1", 0)) as server:
        head_at(server.getsockname()[1])
        assert check_cluster("this node") == there
        with pytest.raises(ClusterLost, match="raylet, has died; finished runs are kept; run the same command again"):
            check_cluster("another node")


def test_a_head_that_does_not_is_lost_and_nothing_has_failed(head_at: Any) -> None:
    port = free_port()
    head_at(port)
    with pytest.raises(ClusterLost, match=f"127.0.0.1:{port}.*does not answer any more .*run the same command again"):
        check_cluster("this node")
