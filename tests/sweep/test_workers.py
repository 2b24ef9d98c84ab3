"""Worker groups of Ray Train, with a broker and without Tune."""

import secrets
from pathlib import Path
from typing import Any

import pytest
import ray

from cope_sweep.record import Ledger
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.sweep.broker import Broker, EventBatch
from cope_sweep.sweep.workers import GroupPlan, train_group
from tests.sweep.runs import LONG, seeds
from tests.tiny import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
RESOURCES = Resources(groups=1, device="cpu")


def start_broker(ledger: Ledger, runs: list[RunSpec], max_failures: int = 1) -> Any:
    actor = ray.remote(Broker).options(num_cpus=0, max_concurrency=100)
    return actor.remote(str(ledger.root), runs, max_failures=max_failures, trials=1, ahead=0)


def plan_of(ledger: Ledger, broker: Any, scratch: Path, **changes: Any) -> GroupPlan:
    token = ledger.root / "token"
    token.touch()
    values = {
        "group": 0,
        "broker": broker,
        "root": str(ledger.root),
        "token": str(token),
        "logs": str(ledger.root / "logs"),
        "resources": RESOURCES,
        "gpus": 0.0,
        "scratch": str(scratch / secrets.token_hex(4)),
    }
    return GroupPlan(**values | changes)  # type: ignore[arg-type]


def batch_of(broker: Any) -> EventBatch:
    batch: EventBatch = ray.get(broker.poll_events.remote(0, 0.0))
    return batch


def test_a_group_trains_all_runs_in_the_same_process(ledger: Ledger, tmp_path: Path) -> None:
    bad = tiny_run(**{"train.lr": 1e20, "train.steps": 200})
    runs = [*seeds(2), bad]
    broker = start_broker(ledger, runs)
    train_group(plan_of(ledger, broker, tmp_path))
    batch = batch_of(broker)
    assert batch.ended
    ends = [event for _, event in batch.events if event.status != "running"]
    assert [(event.run_id, event.status) for event in ends] == [
        (runs[0].run_id, "finished"),
        (runs[1].run_id, "finished"),
        (bad.run_id, "failed"),
    ]
    assert len({event.worker_id for event in ends}) == 1
    assert [ledger.run(run.run_id).status for run in runs] == ["finished", "finished", "failed"]
    assert (ledger.root / "logs" / "group-0-rank-0.log").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "/no/such/token"}, r"node .* cannot see the store .*: use a folder that all nodes share"),
        ({"plugins": ("no_such_plugin",)}, r"node .*: the plugin no_such_plugin cannot be imported"),
    ],
)
def test_a_node_that_cannot_train_ends_the_sweep(
    ledger: Ledger, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    import re

    broker = start_broker(ledger, seeds(1))
    train_group(plan_of(ledger, broker, tmp_path, **changes))
    assert re.search(message, str(batch_of(broker).fatal))
    assert ledger.run(seeds(1)[0].run_id).status == "pending"


def test_an_error_in_a_worker_is_no_death(ledger: Ledger, tmp_path: Path) -> None:
    """The store of the worker is a file, so that training raises before it can record a failure."""
    (tmp_path / "file").touch()
    broker = start_broker(ledger, seeds(1), max_failures=5)
    train_group(plan_of(ledger, broker, tmp_path, root=str(tmp_path / "file")))
    ((_, event),) = batch_of(broker).events
    assert event.status == "failed"
    assert str(event.message).startswith("rank 0: NotADirectoryError")


def test_a_closed_broker_interrupts_the_run(ledger: Ledger, tmp_path: Path) -> None:
    (run,) = runs = seeds(1, **LONG)
    broker = start_broker(ledger, runs)

    @ray.remote(num_cpus=0)
    def close_after_first_step(broker: Any) -> None:
        seen = 0
        while True:
            for number, event in ray.get(broker.poll_events.remote(seen, 1.0)).events:
                seen = number
                if event.step:
                    ray.get(broker.close.remote())
                    return

    closing = close_after_first_step.remote(broker)
    train_group(plan_of(ledger, broker, tmp_path))
    ray.get(closing)
    assert ledger.run(run.run_id).status == "interrupted"
    assert ledger.run(run.run_id).resume.exists()
