"""What only the Ray executor does: groups that follow the cluster, several workers, deaths, schedules, own clusters."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.worker import global_worker
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from cope_sweep.config import Resources, Row, RunSpec
from cope_sweep.config.ablation import Median
from cope_sweep.read.queries import recorded_plan
from cope_sweep.registry import load_plugins
from cope_sweep.store import Budget, Event, Store
from cope_sweep.sweep import local_executor, ray_executor
from cope_sweep.sweep.executor import LOOK_INTERVAL_S, Callbacks
from cope_sweep.sweep.sweep import Sweep, SweepOutcome
from tests.helpers.errors import raises
from tests.helpers.finished_runs import plan_of
from tests.helpers.processes import TIMEOUT_S, free_port, until
from tests.helpers.sweep_runs import LONG, ONE_GROUP, EventLog, Listener, seeds, train_by
from tests.helpers.sweeps import begin, end
from tests.helpers.tiny import TINY, tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
run_on_ray = partial(train_by, ray_executor.run_on_ray)
run_local = partial(train_by, local_executor.run_local, sweep_id="another-sweep")


def pid_of(event: Event) -> int:
    return int(event.worker_id.rpartition(":")[2])


def test_a_death_disturbs_no_other_group(store: Store, events: EventLog) -> None:
    """Two groups on two nodes. One worker is killed twice: its run resumes, then fails. The other run continues."""
    load_plugins(["tests.plugins.waits"])
    waiting = LONG | {"model.position": [{"kind": "waits"}]}
    victim, other, after = [tiny_run(seed=seed, **waiting) for seed in range(2)] + [tiny_run(seed=2)]
    killed: list[tuple[int, int]] = []

    def kill(event: Event) -> None:
        both_train = {e.run_id for e in events if e.step} >= {victim.run_id, other.run_id}
        if event.run_id == victim.run_id and event.status == "running" and event.step and both_train:
            is_new_worker = not killed or pid_of(event) != killed[-1][0]
            if is_new_worker and store.run(victim.run_id).resume.exists():
                os.kill(pid_of(event), signal.SIGKILL)
                killed.append((pid_of(event), event.step))
        if set(events.ends()) == {(victim.run_id, "failed"), (after.run_id, "finished")}:
            events.stop.set()

    resources = ONE_GROUP.model_copy(update={"groups": "auto", "max_failures": 1, "attention": "reference"})
    run_on_ray(
        [victim, other, after], store, resources, on_event=Listener(events, kill), stop=events.stop,
        plugins=["tests.plugins.waits"],
    )  # fmt: skip

    assert len(killed) == 2
    first_worker, second_worker = (pid for pid, _ in killed)
    first_resumed = next(event.step for event in events.of(victim) if event.step and pid_of(event) == second_worker)
    assert first_resumed > 1  # from its checkpoint, not from the start
    assert first_worker != second_worker
    assert store.status(victim.run_id) == "failed"
    assert "its process died 2 times" in str(events.of(victim)[-1].message)
    assert store.status(other.run_id) == "interrupted"
    assert store.run(other.run_id).resume.exists()
    assert len({pid_of(event) for event in events.of(other) if event.worker_id}) == 1
    assert store.run(other.run_id).state["attempt"] == 1
    assert store.status(after.run_id) == "finished"


def test_two_workers_train_a_run_as_one_worker_does(store: Store, tmp_path: Path, events: EventLog) -> None:
    (run,) = seeds(1)
    run_on_ray([run], store, ONE_GROUP.model_copy(update={"groups": "auto", "workers": 2}), on_event=events)
    reference = Store(tmp_path / "reference", create=True)
    run_local([run], reference, ONE_GROUP)
    assert events.ends() == [(run.run_id, "finished")]
    result, expected = store.run(run.run_id).result, reference.run(run.run_id).result
    assert result["facts"]["workers"] == 2
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)


@pytest.mark.thorough
def test_a_run_of_two_workers_fails_alone(store: Store, events: EventLog) -> None:
    """The cluster holds one such run at a time."""
    bad, good = tiny_run(**{"train.lr": 1e20, "train.steps": 200}), tiny_run(seed=1)
    resources = ONE_GROUP.model_copy(update={"groups": "auto", "workers": 2})
    run_on_ray([bad, good], store, resources, on_event=events)
    assert sorted(events.ends()) == sorted([(bad.run_id, "failed"), (good.run_id, "finished")])
    assert "Diverged" in store.run(bad.run_id).state["message"]


@pytest.mark.thorough
def test_the_end_of_a_run_is_told_once_to_a_slow_listener(store: Store, events: EventLog) -> None:
    """The second run ends while the listener has the end of the first."""
    runs = [*seeds(2), tiny_run(seed=2, **{"train.steps": 2000})]

    def wait_for_the_second(event: Event) -> None:
        if (event.run_id, event.status) == (runs[0].run_id, "finished"):
            until(lambda: store.run(runs[1].run_id).status == "finished")
            time.sleep(2.0 * LOOK_INTERVAL_S)

    run_on_ray(runs, store, ONE_GROUP, on_event=Listener(events, wait_for_the_second), stop=events.stop)
    assert sorted(events.ends()) == sorted((run.run_id, "finished") for run in runs)


def test_a_search_suggests_runs_and_a_schedule_stops_some(store: Store, events: EventLog) -> None:
    """An interrupted search is continued: no row is drawn again, and what was stopped is not trained again."""
    plan = plan_of(
        # So long that no run has ended before the decision on its first evaluations arrives.
        base=TINY | {"train": {"steps": 400, "batch": 4}, "evaluate": TINY["evaluate"] | {"every": 10}},
        search={"kind": "optuna", "samples": 8, "space": {"train.lr": {"log_uniform": [1e-7, 1e-1]}}},
        schedule={"kind": "asha", "grace": 10, "reduction": 2},
        seeds=[0],
    )
    rows: list[Row] = []

    def run(budget: Budget, groups: int = 2) -> SweepOutcome:
        resources = Resources(groups=groups, device="cpu")
        return Sweep(
            recorded_plan(plan, store), store, ray_executor.run_on_ray, executor_name="ray", resources=resources,
            budget=budget, callbacks=Callbacks(on_event=events, on_row=rows.append),
        ).run()  # fmt: skip

    first = run(Budget(max_runs=3), groups=1)
    assert (len(rows), first.not_started, first.exit_code) == (3, 5, 130)
    second = run(Budget())
    assert (len({row.name for row in rows}), second.not_started, second.exit_code) == (8, 0, 0)
    ends = events.ends()
    assert sorted(run_id for run_id, _ in ends) == sorted(row.runs[0].run_id for row in rows)
    assert {status for _, status in ends} == {"finished", "stopped"}
    assert [row.labels for row in recorded_plan(plan, store).rows] == [row.labels for row in rows]
    assert run(Budget()).sweep_id is None


def test_runs_that_resume_are_compared_by_what_earlier_sweeps_have_logged(store: Store, events: EventLog) -> None:
    """Their curves have losses that no new run can reach."""
    resumed = seeds(3, **{"train.steps": 20, "evaluate.every": 10})
    new = tiny_run(seed=3, **{"train.steps": 400, "evaluate.every": 10})  # not at its end when it is asked to stop
    for run in resumed:
        folder = begin(store, run, {"step": 10, "in_dist/loss": 1e-9})
        folder.set_state("interrupted")
        end(store, folder)
    run_on_ray(
        [*resumed, new], store, ONE_GROUP, on_event=events, stop=events.stop,
        schedule=Median(metric="in_dist/loss", goal="min", grace=10),
    )  # fmt: skip
    assert events.ends() == [(run.run_id, "finished") for run in resumed] + [(new.run_id, "stopped")]


@pytest.mark.thorough
def test_groups_follow_the_cluster(store: Store, events: EventLog, cluster_nodes: Any) -> None:
    """A node is added: it trains. It is removed: its run is continued elsewhere, and that counts as no failure.

    Without a retry budget, the run whose worker is then killed fails, which makes room for the other.
    """
    runs = seeds(3, **LONG)
    resources = ONE_GROUP.model_copy(update={"groups": "auto", "max_failures": 0})
    done: dict[str, Any] = {}

    def trains(run: RunSpec) -> bool:
        return any(event.step for event in events.of(run))

    def act(event: Event) -> None:
        if "added" not in done and trains(runs[0]) and trains(runs[1]):
            done["added"] = cluster_nodes.add_node(num_cpus=1, dashboard_agent_listen_port=free_port())
        elif "removed" not in done and trains(runs[2]) and store.run(runs[2].run_id).resume.exists():
            done["removed"] = pid_of(events.of(runs[2])[-1])
            cluster_nodes.remove_node(done["added"], allow_graceful=False)
        elif "killed" not in done and "removed" in done and sum(node["Alive"] for node in ray.nodes()) == 2:
            done["killed"] = pid_of(events.of(runs[0])[-1])
            os.kill(done["killed"], signal.SIGKILL)
        elif "killed" in done and event.run_id == runs[2].run_id and event.step and pid_of(event) != done["removed"]:
            events.stop.set()

    run_on_ray(runs, store, resources, on_event=Listener(events, act), stop=events.stop)
    assert events.ends()[0] == (runs[0].run_id, "failed")
    assert sorted(events.ends()[1:]) == sorted((run.run_id, "interrupted") for run in runs[1:])
    resumed = next(event.step for event in events.of(runs[2]) if event.step and pid_of(event) != done["removed"])
    assert resumed > 1
    assert store.run(runs[2].run_id).state["attempt"] == 2
    assert store.run(runs[1].run_id).state["attempt"] == 1


@pytest.mark.thorough
def test_a_run_on_a_node_that_is_drained_writes_its_state(store: Store, events: EventLog, cluster_nodes: Any) -> None:
    """As KubeRay's autoscaler, `ray stop` and a pod's SIGTERM drain one."""
    runs = seeds(3, **LONG)
    resources = ONE_GROUP.model_copy(update={"groups": "auto", "checkpoint_every_s": 3600.0})
    node = cluster_nodes.add_node(num_cpus=1, dashboard_agent_listen_port=free_port())
    drained: list[Any] = []
    interrupted: list[RunSpec] = []

    def act(event: Event) -> None:
        if not drained and {each.run_id for each in events if each.step} == {run.run_id for run in runs}:
            reason, deadline_ms = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, int((time.time() + 20) * 1000)
            drained.append(global_worker.gcs_client.drain_node(node.node_id, reason, "", deadline_ms))
        if events.stop.is_set():
            return
        interrupted[:] = [run for run in runs if store.run(run.run_id).status == "interrupted"]
        if interrupted or not all(each["Alive"] for each in ray.nodes() if each["NodeID"] == node.node_id):
            events.stop.set()

    run_on_ray(runs, store, resources, on_event=Listener(events, act), stop=events.stop)
    assert len(interrupted) == 1
    assert store.run(interrupted[0].run_id).resume.exists()


@pytest.mark.thorough
def test_a_node_that_cannot_train_is_left_out_and_the_others_go_on(
    store: Store, events: EventLog, cluster_nodes: Any
) -> None:
    broken = cluster_nodes.add_node(
        num_cpus=1, dashboard_agent_listen_port=free_port(), env_vars={"COPE_SWEEP_TEST_BROKEN_NODE": "import"}
    )
    runs = seeds(3, **LONG)
    notes: list[str] = []

    def act(event: Event) -> None:
        if notes and len({each.run_id for each in events if each.step}) >= 2:
            events.stop.set()

    try:
        run_on_ray(
            runs,
            store,
            ONE_GROUP.model_copy(update={"groups": "auto", "max_failures": 0}),
            on_event=Listener(events, act),
            on_note=notes.append,
            stop=events.stop,
            plugins=["tests.plugins.fails_on_one_node"],
        )
    finally:
        cluster_nodes.remove_node(broken, allow_graceful=False)
    (note,) = notes
    assert "is left out" in note
    assert "the plugin tests.plugins.fails_on_one_node cannot be imported" in note
    assert {status for _, status in events.ends()} == {"interrupted"}
    assert len({pid_of(event) for event in events if event.worker_id}) == 2


@pytest.mark.thorough
def test_a_run_whose_processes_die_before_they_train_fails(store: Store, events: EventLog, cluster_nodes: Any) -> None:
    """Nothing is heard of these processes, so that their node is not known."""
    broken = cluster_nodes.add_node(
        num_cpus=2, dashboard_agent_listen_port=free_port(), env_vars={"COPE_SWEEP_TEST_BROKEN_NODE": "exit"}
    )
    (run,) = seeds(1)
    resources = ONE_GROUP.model_copy(update={"cpus": 2, "max_failures": 1})  # there is room on that node only
    try:
        run_on_ray([run], store, resources, on_event=events, plugins=["tests.plugins.fails_on_one_node"])
    finally:
        cluster_nodes.remove_node(broken, allow_graceful=False)
    assert events.ends() == [(run.run_id, "failed")]
    assert "its process died 2 times" in str(events[-1].message)


@pytest.mark.thorough
def test_a_worker_that_is_told_to_leave_writes_a_checkpoint_and_its_run_goes_on(store: Store, events: EventLog) -> None:
    (run,) = seeds(1, **LONG)
    resources = ONE_GROUP.model_copy(update={"max_failures": 0, "checkpoint_every_s": 3600.0})
    told: list[Event] = []

    def act(event: Event) -> None:
        if event.step >= 20 and not told:
            os.kill(pid_of(event), signal.SIGTERM)
            told.append(event)
        if told and event.step and pid_of(event) != pid_of(told[0]):
            events.stop.set()

    run_on_ray([run], store, resources, on_event=Listener(events, act), stop=events.stop)
    resumed = next(event.step for event in events if event.step and pid_of(event) != pid_of(told[0]))
    assert resumed > told[0].step
    assert events.ends() == [(run.run_id, "interrupted")]


@pytest.mark.thorough
def test_a_run_that_hangs_ends_its_process_and_goes_on(store: Store, events: EventLog, tmp_path: Path) -> None:
    """It hangs in native code, after a state was written."""
    load_plugins(["tests.plugins.hangs_once"])
    hangs = {"kind": "hangs_once", "marker": str(tmp_path / "hung")}
    run = tiny_run(**LONG, **{"model.position": [hangs]})
    resources = ONE_GROUP.model_copy(update={"step_timeout_s": 10.0, "attention": "reference"})

    def act(event: Event) -> None:
        if (tmp_path / "hung").exists() and store.run(run.run_id).state["attempt"] == 2 and event.step:
            events.stop.set()

    run_on_ray(
        [run], store, resources, on_event=Listener(events, act), stop=events.stop, plugins=["tests.plugins.hangs_once"]
    )
    assert events.ends() == [(run.run_id, "interrupted")]
    assert store.run(run.run_id).state["attempt"] == 2
    resumed = store.run(run.run_id).log_text()
    assert "attempt 2" in resumed
    (log,) = [path for path in (store.root / "logs" / "this-sweep").glob("*.log") if "Timeout" in path.read_text()]
    assert "hangs_once.py" in log.read_text()


@pytest.mark.thorough
def test_the_death_of_the_actor_of_stop_requests_is_survived(store: Store, events: EventLog) -> None:
    """Ray starts it again; no run is begun again, and a stop still reaches the next run."""
    runs = [tiny_run(seed=0, **{"train.steps": 2000}), tiny_run(seed=1, **LONG)]
    killed: list[str] = []

    def act(event: Event) -> None:
        if event.run_id == runs[0].run_id and event.step and not killed:
            (name,) = (each for each in ray.util.list_named_actors() if each.startswith("cope-sweep-this-sweep"))
            killed.append(name)
            ray.kill(ray.get_actor(name), no_restart=False)
        if event.run_id == runs[1].run_id and event.step:
            events.stop.set()

    run_on_ray(runs, store, ONE_GROUP, on_event=Listener(events, act), stop=events.stop)
    assert len(killed) == 1
    assert events.ends() == [(runs[0].run_id, "finished"), (runs[1].run_id, "interrupted")]
    assert [store.run(run.run_id).state["attempt"] for run in runs] == [1, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_that_cannot_be_unpickled_is_the_reason_of_the_failure(
    store: Store, events: EventLog, workers: int
) -> None:
    load_plugins(["tests.plugins.raises_oddly"])
    run = tiny_run(**{"model.position": [{"kind": "raises_oddly"}]})
    resources = ONE_GROUP.model_copy(update={"workers": workers, "attention": "reference"})
    run_on_ray([run], store, resources, on_event=events, stop=events.stop, plugins=["tests.plugins.raises_oddly"])
    assert events.ends() == [(run.run_id, "failed")]
    assert store.run(run.run_id).state["message"] == "OddError: this and that"
    assert "Traceback" in store.run(run.run_id).state["traceback"]


@pytest.mark.parametrize("groups", ["auto", 1])
def test_no_room_for_a_run(store: Store, events: EventLog, groups: int | str) -> None:
    """Also with fixed groups: no nodes come to a cluster of the sweep's own."""
    resources = ONE_GROUP.model_copy(update={"groups": groups, "cpus": 64})
    with raises("no_room", cpus=64):
        run_on_ray(seeds(1), store, resources, on_event=events, stop=events.stop)
    assert not (store.root / "ray").exists()


OWN_CLUSTER = """
import sys
from cope_sweep.store import Store
from cope_sweep.config import Resources
from cope_sweep.sweep.ray_executor import run_on_ray
from tests.helpers.sweep_runs import LONG, train_by
from tests.helpers.tiny import TINY, tiny_run

def on_event(event):
    print(event.status, event.step, flush=True)

resources = Resources(checkpoint_every_s=0.2)
train_by(run_on_ray, [tiny_run(**LONG)], Store(sys.argv[1]), resources, sweep_id="killed", on_event=on_event)
"""


@pytest.mark.thorough
def test_a_killed_driver_ends_its_cluster_and_leaves_a_run_to_resume(
    store: Store, events: EventLog, ray_environment: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in ray_environment.items() if not name.startswith("RAY_AUTH")}
    driver = subprocess.Popen(
        [sys.executable, "-c", OWN_CLUSTER, str(store.root)],
        env=environment | {"HOME": str(home)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = tiny_run(**LONG)
    lines = []
    for line in driver.stdout:
        lines.append(line.split()[0])
        if store.run(run.run_id).resume.exists():
            break
    # Ray's two agents end a minute after their cluster.
    family = psutil.Process(driver.pid).children(recursive=True)
    agents = [process for process in family if process.name().endswith("Agent")]
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs([process for process in family if process not in agents], timeout=TIMEOUT_S)
    for process in [*agents, *alive]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert alive == []
    # Nothing else was printed, and no token was written to a file.
    assert set(lines) == {"running"}
    assert not (home / ".ray").exists()

    def stop(event: Event) -> None:
        if event.step:
            events.stop.set()

    run_local([run], store, ONE_GROUP, on_event=Listener(events, stop), stop=events.stop)
    assert next(event.step for event in events if event.step) > 1
