"""Failures of worker groups of Ray Train, with a broker and without Tune. test_executor and test_schedule do the rest."""

import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import ray

from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Store
from cope_sweep.sweep.broker import Broker, EventBatch
from cope_sweep.sweep.workers import GroupPlan, train_group
from tests.sweep.runs import seeds

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
RESOURCES = Resources(groups=1, device="cpu")


def start_broker(store: Store, runs: list[RunSpec], max_failures: int = 1) -> Any:
    actor = ray.remote(Broker).options(num_cpus=0, max_concurrency=100)
    return actor.remote(str(store.root), runs, max_failures=max_failures, trials=1, ahead=0)


def plan_of(store: Store, broker: Any, scratch: Path, **changes: Any) -> GroupPlan:
    token = store.root / "token"
    token.touch()
    values = {
        "group": 0,
        "broker": broker,
        "root": str(store.root),
        "token": str(token),
        "logs": str(store.root / "logs"),
        "resources": RESOURCES,
        "gpus": 0.0,
        "scratch": str(scratch / secrets.token_hex(4)),
    }
    return GroupPlan(**values | changes)  # type: ignore[arg-type]


def batch_of(broker: Any) -> EventBatch:
    batch: EventBatch = ray.get(broker.poll_events.remote(0, 0.0))
    return batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "/no/such/token"}, r"node .* cannot see the store .*: use a folder that all nodes share"),
        ({"plugins": ("no_such_plugin",)}, r"node .*: the plugin no_such_plugin cannot be imported"),
    ],
)
def test_a_node_that_cannot_train_ends_the_sweep(
    store: Store, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    broker = start_broker(store, seeds(1))
    train_group(plan_of(store, broker, tmp_path, **changes))
    assert re.search(message, str(batch_of(broker).fatal))
    assert store.run(seeds(1)[0].run_id).status == "pending"


def test_an_error_in_a_worker_is_no_death(store: Store, tmp_path: Path) -> None:
    """The store of the worker is a file, so that training raises before it can record a failure."""
    (tmp_path / "file").touch()
    broker = start_broker(store, seeds(1), max_failures=5)
    train_group(plan_of(store, broker, tmp_path, root=str(tmp_path / "file")))
    ((_, event),) = batch_of(broker).events
    assert event.status == "failed"
    assert str(event.message).startswith("rank 0: NotADirectoryError")
