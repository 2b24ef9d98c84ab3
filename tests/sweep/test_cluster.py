"""Connecting, and how much a cluster holds."""

import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import ray

from cope_sweep.spec import Resources
from cope_sweep.sweep import cluster
from cope_sweep.sweep.cluster import Capacity, capacity, connected
from cope_sweep.sweep.executor import ClusterError


def nodes(*resources: dict[str, float]) -> list[dict[str, object]]:
    return [{"Alive": True, "Resources": r} for r in resources] + [{"Alive": False, "Resources": {"CPU": 64}}]


@pytest.mark.parametrize(
    ("held", "resources", "expected"),
    [
        ([{"CPU": 2}], Resources(), Capacity(2, 0)),
        ([{"CPU": 2}, {"CPU": 3}], Resources(cpus=2), Capacity(2, 0)),
        ([{"CPU": 2}, {"CPU": 2}], Resources(workers=2), Capacity(2, 0)),
        ([{"CPU": 8, "GPU": 2}], Resources(), Capacity(2, 1)),
        ([{"CPU": 8, "GPU": 2}], Resources(device="cpu"), Capacity(8, 0)),
        ([{"CPU": 8, "GPU": 2}], Resources(gpus=0.5), Capacity(4, 0.5)),
        ([{"memory": 1}, {"CPU": 1}], Resources(), Capacity(1, 0)),
        ([{"CPU": 1}], Resources(groups=3), Capacity(3, 0)),
    ],
)
def test_groups_are_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch, held: list[dict[str, float]], resources: Resources, expected: Capacity
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes(*held))
    assert capacity(resources) == expected


def test_no_room_names_what_is_wanted_and_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes({"CPU": 2}))
    with pytest.raises(
        ClusterError, match=r"1 nodes, 2 CPUs, 0 GPUs.*1 workers with 4 CPUs each: lower resources.cpus"
    ):
        capacity(Resources(cpus=4))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (f"127.0.0.1:{free_port()}", "no Ray cluster answers at 127.0.0.1:.*Connection refused.*ray start --head"),
        ("http://127.0.0.1:8265", "cope-sweep submit"),
        ("ray://127.0.0.1:10001", "cope-sweep submit"),
        ("somewhere", "not the address of a Ray cluster"),
        ("no.such.host.invalid:6379", "no Ray cluster answers at no.such.host.invalid:6379"),
    ],
)
def test_an_address_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, message: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    started = time.monotonic()
    with pytest.raises(ClusterError, match=message), connected(address, tmp_path / "ray.log"):
        pass
    assert time.monotonic() - started < 15


def test_a_port_that_answers_but_is_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.3)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    released = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **_: released.wait(20))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(ClusterError, match=r"did not let us in within .*one of its nodes"),
            connected(address, tmp_path / "ray.log"),
        ):
            pass
    released.set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("AuthenticationError: token missing", "export RAY_AUTH_MODE=token"),
        ("Version mismatch: 3.11 and 3.12", "Version mismatch: 3.11 and 3.12; see `ray status`"),
    ],
)
def test_a_cluster_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, message: str) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError(f"\n{error}\nmore")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match=message), connected(address, tmp_path / "ray.log"):
            pass


def test_rays_log_goes_to_a_file_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    logger = logging.getLogger("ray")
    before = logger.handlers[:], logger.propagate
    with connected(None, tmp_path / "logs" / "ray.log"):
        logging.getLogger("ray.tune.tune").warning("a trial")
        ray._private.worker.print_to_stdstream({"lines": ["a node died"]}, ignore_prefix=False)
    assert (logger.handlers, logger.propagate) == before
    text = (tmp_path / "logs" / "ray.log").read_text()
    assert "a trial" in text
    assert "a node died" in text


def test_a_cluster_of_our_own_leaves_authentication_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    seen: dict[str, str | None] = {}

    def init(**_: object) -> None:
        seen["token"] = os.environ.get("RAY_AUTH_TOKEN")
        os.environ["RAY_AUTH_MODE"] = "token"  # as Ray does

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connected(None, tmp_path / "ray.log", cpus=1):
        pass
    assert len(str(seen["token"])) == 64
    assert "RAY_AUTH_MODE" not in os.environ
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert not (tmp_path / ".ray").exists()
