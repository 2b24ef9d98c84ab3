"""A Ray cluster whose nodes are all on this machine: a head that trains nothing, and nodes of one CPU each."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EmulatedNodes:
    """A running cluster."""

    cluster: Any

    @property
    def address(self) -> str:
        """The address for `run_on_ray`."""
        return str(self.cluster.address)

    @property
    def head_pid(self) -> int:
        """The process of the head node of which Ray's workers there are children."""
        return int(self.cluster.head_node.all_processes["raylet"][0].process.pid)

    def add(self) -> None:
        """Add a node of one CPU and wait until it has registered."""
        self.cluster.add_node(num_cpus=1, dashboard_agent_listen_port=_free_port())


@contextlib.contextmanager
def emulated_nodes(count: int) -> Iterator[EmulatedNodes]:
    """A head and `count` nodes of one CPU each. Its files are in a folder of its own."""
    from ray.cluster_utils import Cluster

    # Sockets are in this folder, and the path of a socket may have 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="cb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_worker_niceness": "0"}  # Ray gives its workers a niceness of 15
        ports = {"dashboard_port": _free_port(), "dashboard_agent_listen_port": _free_port()}
        nodes = EmulatedNodes(Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **ports}))
        try:
            for _ in range(count):
                nodes.add()
            yield nodes
        finally:
            nodes.cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
