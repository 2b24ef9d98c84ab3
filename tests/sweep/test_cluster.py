"""Connection to a cluster, and what it has room for. Without a cluster; test_ray_executor has one."""

import logging
import pickle
import socket
import sys
import threading
from pathlib import Path
from typing import Literal

import pytest
import ray
from ray import cloudpickle
from ray._private import worker
from ray.exceptions import AuthenticationError, RayTaskError

from cope_sweep.config import Resources
from cope_sweep.errors import NotFoundError
from cope_sweep.sweep import cluster
from cope_sweep.sweep.cluster import Needs, Node, connected, may_wait, needs_of
from tests.helpers.errors import raises
from tests.helpers.processes import free_port


@pytest.fixture(autouse=True)
def disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is connected to no cluster, also where other tests have connected it."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)


def nodes(*resources: dict[str, float]) -> list[dict[str, object]]:
    alive = [
        {"NodeID": f"id-{number}", "NodeManagerAddress": f"10.0.0.{number}", "Alive": True, "Resources": each}
        for number, each in enumerate(resources)
    ]
    return [*alive, {"NodeID": "dead", "NodeManagerAddress": "10.0.1.1", "Alive": False, "Resources": {"CPU": 64}}]


@pytest.mark.parametrize(
    ("held", "resources", "gpus"),
    [
        ([{"CPU": 2}], Resources(), 0),
        ([{"CPU": 8, "GPU": 2}], Resources(), 1),
        ([{"CPU": 8, "GPU": 2}], Resources(device="cpu"), 0),
        ([{"CPU": 8, "GPU": 2}], Resources(gpus=0.5), 0.5),
        ([{"memory": 1}, {"CPU": 1}], Resources(), 0),
        ([], Resources(groups=3), 0),
    ],
)
def test_a_run_takes_a_gpu_if_the_cluster_has_any(
    monkeypatch: pytest.MonkeyPatch, held: list[dict[str, float]], resources: Resources, gpus: float
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes(*held))
    assert needs_of(resources, cluster.nodes()) == Needs(resources.workers, resources.cpus, gpus)


@pytest.mark.parametrize(
    ("needs", "held", "workers"),
    [
        (Needs(1, 1, 0), {"CPU": 2}, 2),
        (Needs(1, 2, 0), {"CPU": 3}, 1),
        (Needs(1, 1, 0), {}, 0),
        (Needs(1, 1, 1), {"CPU": 8, "GPU": 2}, 2),
        (Needs(1, 1, 2), {"CPU": 8, "GPU": 3}, 1),
        (Needs(1, 1, 0.5), {"CPU": 8, "GPU": 2}, 4),
        (Needs(1, 1, 0.4), {"CPU": 8, "GPU": 2}, 4),
        (Needs(1, 1, 0.25), {"CPU": 8, "GPU": 1}, 4),
        (Needs(1, 1, 0.1), {"CPU": 32, "GPU": 1}, 10),
    ],
)
def test_workers_share_a_gpu_and_none_has_parts_of_two(needs: Needs, held: dict[str, float], workers: int) -> None:
    assert needs.workers_on(held) == workers


@pytest.mark.parametrize(
    ("needs", "nodes", "reason"),
    [
        (Needs(2, 1, 0), [{"CPU": 1}, {"CPU": 1}], None),
        (Needs(1, 1, 4), [{"CPU": 8, "GPU": 2}, {"CPU": 8}], "needs 4 GPUs, the largest node has 2"),
        (Needs(1, 4, 1), [{"CPU": 1, "GPU": 1}], "needs 4 CPUs, the largest node has 1"),
        (Needs(1, 1, 1), [{"CPU": 8}], "needs 1 GPU, the largest node has 0"),
        (Needs(3, 2, 0), [{"CPU": 3}, {"CPU": 2}], "needs 3 workers with 2 CPUs each, the nodes have room for 2"),
        (Needs(1, 1, 0), [], "needs 1 CPU, the largest node has 0"),
    ],
)
def test_why_a_run_never_fits(needs: Needs, nodes: list[dict[str, float]], reason: str | None) -> None:
    assert needs.misfit(nodes) == reason


@pytest.mark.parametrize(
    ("groups", "nodes", "waits"),
    [
        ("auto", [{"memory": 8}], True),
        ("auto", [{"CPU": 0}], True),
        ("auto", [{"CPU": 0}, {"CPU": 1}], False),
        (2, [{"CPU": 1}], True),
    ],
)
def test_a_sweep_waits_for_the_first_nodes_that_train(
    groups: int | Literal["auto"], nodes: list[dict[str, float]], waits: bool
) -> None:
    assert may_wait(Resources(groups=groups), [Node("", resources) for resources in nodes]) is waits


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("127.0.0.1:FREE", "no_cluster"),
        ("http://127.0.0.1:8265", "invalid_address"),
        ("ray://127.0.0.1:10001", "invalid_address"),
        ("somewhere", "invalid_address"),
        ("no.such.host.invalid:6379", "no_cluster"),
    ],
)
def test_an_address_without_a_cluster(tmp_path: Path, address: str, code: str) -> None:
    address = address.replace("FREE", str(free_port()))
    with raises(code, address=address), connected(address, tmp_path / "ray.log"):
        pass


def test_a_port_that_answers_but_is_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 0.3)
    released = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **_: released.wait(60))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            raises("not_connected", address=address),
            connected(address, tmp_path / "ray.log"),
        ):
            pass
    released.set()


@pytest.mark.parametrize(
    ("elsewhere", "error", "code", "reason"),
    [
        (True, AuthenticationError("token missing"), "not_connected", "token missing"),
        (
            True,
            RuntimeError("\nVersion mismatch: 3.11 and 3.12\nmore"),
            "not_connected",
            "Version mismatch: 3.11 and 3.12",
        ),
        (False, OSError("no space left"), "ray_not_started", "no space left"),
    ],
)
def test_a_cluster_that_refuses_or_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, elsewhere: bool, error: Exception, code: str, reason: str
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}" if elsewhere else None
        with raises(code) as caught, connected(address, tmp_path / "ray.log"):
            pass
        assert str(caught.value.data["reason"]).startswith(reason)


def test_what_ray_logs_and_prints_goes_to_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    logger = logging.getLogger("ray")
    before = logger.handlers[:], logger.propagate
    with connected(None, tmp_path / "logs" / "ray.log"):
        logging.getLogger("ray.tune.tune").warning("a trial")
        # As Ray prints the messages of a cluster: its own function, in its own thread.
        message = {"lines": ["a node died"], "pid": "raylet", "is_err": False}
        printing = threading.Thread(
            target=worker.print_to_stdstream, args=(message,), kwargs={"ignore_prefix": False},
            name="ray_listen_error_messages",
        )  # fmt: skip
        printing.start()
        printing.join()
        sys.stdout.write("a table\n")
    assert (logger.handlers, logger.propagate) == before
    text = (tmp_path / "logs" / "ray.log").read_text()
    assert "a trial" in text
    assert "a node died" in text
    assert capsys.readouterr().out == "a table\n"


def test_a_user_error_keeps_its_code_and_data_across_ray() -> None:
    """Ray raises it as an instance of a class that it makes of the error's and its own."""
    sent = RayTaskError("train", "Traceback", NotFoundError("no corpus 'mine'", code="no_corpus", corpus="mine"))
    received = pickle.loads(cloudpickle.dumps(sent)).as_instanceof_cause()
    assert isinstance(received, NotFoundError)
    assert (received.code, received.data) == ("no_corpus", {"corpus": "mine"})
