"""Worker groups on a cluster of two nodes, with a broker and without Tune. test_executor and test_schedule do the rest."""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Store
from cope_sweep.sweep import placement
from cope_sweep.sweep.executor import ClusterError
from cope_sweep.sweep.groups import Groups
from cope_sweep.sweep.messages import Failure, Poll
from cope_sweep.sweep.schedule import BrokerActor
from cope_sweep.sweep.shapes import Shapes
from cope_sweep.sweep.workers import GroupPlan
from tests.sweep.runs import LONG, TIMEOUT_S, seeds

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


class Stage:
    """Groups and a broker to whose queue all runs were added."""

    def __init__(
        self,
        store: Store,
        runs: list[RunSpec],
        limit: int | None = None,
        own: dict[str, Resources] | None = None,
        **changes: Any,
    ) -> None:
        actor = ray.remote(BrokerActor).options(num_cpus=0, max_concurrency=100)
        self.store = store
        self.broker = actor.remote(
            store.location,
            store.index_url,
            f"sweep-{secrets.token_hex(4)}",
            runs,
            max_failures=5,
            shapes=dict.fromkeys(own or {}, 1),
        )
        for run in runs:
            self.broker.start.remote(run.run_id)
        store.files.write("token", b"here")
        values = {
            "broker": self.broker,
            "location": store.location,
            "token": "token",
            "sweep_id": "this-sweep",
            "resources": Resources(groups=1, device="cpu", checkpoint_every_s=0.2),
            "gpus": 0.0,
        }
        self.notes: list[str] = []
        self.left_out: list[int] = []
        self.failures: list[Failure] = []
        plan = GroupPlan(**values | changes)  # type: ignore[arg-type]
        shapes = Shapes(plan.resources, own)
        for run in runs:
            shapes.of(run.run_id)
        self.groups = Groups(
            plan,
            shapes,
            limit,
            on_failed=self._failed,
            on_leave=self.broker.ask_to_leave.remote,
            on_refused=self.broker.refuse.remote,
            on_note=self.notes.append,
            on_left_out=self.left_out.append,
        )

    def _failed(self, group: int, reason: str, failure: Failure) -> bool:
        self.failures.append(failure)
        return bool(ray.get(self.broker.group_failed.remote(group, reason, failure)))

    def poll(self) -> Poll:
        poll: Poll = ray.get(self.broker.poll.remote(0, 0.0))
        return poll

    def update_until(self, condition: Callable[[Poll], bool]) -> Poll:
        until = time.monotonic() + TIMEOUT_S
        while not condition(poll := self.poll()):
            assert time.monotonic() < until
            self.groups.update(poll.to_train, poll.idle, poll.hanging)
            time.sleep(0.1)
        return poll

    def close(self) -> None:
        ray.get(self.broker.close.remote())
        self.groups.close()
        ray.get(self.broker.release.remote())
        ray.kill(self.broker)


@pytest.fixture
def stages(store: Store) -> Iterator[Any]:
    started: list[Stage] = []

    def start(runs: list[RunSpec], **settings: Any) -> Stage:
        started.append(Stage(store, runs, **settings))
        return started[-1]

    yield start
    for stage in started:
        stage.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "no-such-token"}, r"node .* cannot see the store .*: use a folder that all nodes share"),
        ({"plugins": ("no_such_plugin",)}, r"node .*: the plugin no_such_plugin cannot be imported"),
        ({"resources": Resources(device="cuda")}, r"node .*: .*(?i:cuda)"),
    ],
)
def test_when_no_node_can_train_the_sweep_ends_with_the_reasons(
    stages: Any, store: Store, changes: dict[str, Any], message: str
) -> None:
    stage = stages(seeds(3), **changes)
    with pytest.raises(ClusterError, match=f"no node is left that can train: {message}"):
        stage.update_until(lambda poll: poll.ended)
    assert len(stage.groups.quarantined) == len(stage.notes) == 2
    assert all("is left out: node " in note for note in stage.notes)
    assert stage.left_out == [1, 2]
    assert store.index.statuses() == {}


def test_there_are_no_more_groups_than_wanted(stages: Any) -> None:
    stage = stages(seeds(1))
    stage.groups.update({0: 1})
    stage.groups.refreshed_s = 0.0
    stage.groups.update({0: 1})
    assert len(stage.groups.groups) == 1
    stage.update_until(lambda poll: poll.ended)
    stage.update_until(lambda poll: not stage.groups.groups)
    assert stage.failures == []


def test_a_group_leaves_for_another_shape_before_its_own_runs_have_ended(
    stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two CPUs, a group of two workers comes first and has more runs than it may train in its turn."""
    monkeypatch.setattr(placement, "TURN_S", 0.5)
    monkeypatch.setattr(placement, "BLOCKED_S", 0.5)
    small, *large = seeds(200)
    stage = stages([small, *large], own={run.run_id: Resources(device="cpu", workers=2) for run in large})
    shapes: list[int] = []

    def has_small_group(poll: Poll) -> bool:
        shapes.extend(group.shape for group in stage.groups.groups.values() if group.places)
        return 0 in shapes

    poll = stage.update_until(has_small_group)
    assert shapes[0] == 1
    assert 0 < poll.to_train[1] < 199
    assert stage.failures == stage.notes == []


def test_a_shape_that_cannot_fit_fails_alone(stages: Any, store: Store) -> None:
    runs = seeds(3)
    stage = stages(runs, own={runs[1].run_id: Resources(device="cpu", cpus=4)})
    poll = stage.update_until(lambda poll: poll.ended)
    assert {event.run_id: event.status for _, event in poll.events} == {
        runs[0].run_id: "finished", runs[1].run_id: "failed", runs[2].run_id: "finished",
    }  # fmt: skip
    reason = "needs 4 CPUs, the largest node has 1; lower its resources, or use a larger cluster"
    assert store.run(runs[1].run_id).state["message"] == reason
    assert stage.notes == [f"runs that take 4 CPUs fail: {reason}"]


def test_an_error_in_a_worker_is_no_death(stages: Any, store: Store, tmp_path: Any) -> None:
    """No run folder can be made in the worker's store, so that training raises before it can record a failure."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "runs").touch()
    (other / "token").touch()
    stage = stages(seeds(1), location=str(other))
    ((_, event),) = stage.update_until(lambda poll: poll.ended).events
    assert event.status == "failed"
    assert str(event.message).startswith("rank 0:")
    assert "NotADirectoryError" in str(event.message) or "FileExistsError" in str(event.message)
    assert stage.failures == ["error", "error"]
    assert stage.notes == []


def test_a_group_whose_run_hangs_is_ended(stages: Any, store: Store) -> None:
    (only,) = seeds(1, **LONG)
    stage = stages([only])
    stage.update_until(lambda poll: poll.leased == 1)
    (number,) = stage.groups.groups
    stage.groups.update({0: 1}, hanging=[number])
    assert number not in stage.groups.groups
