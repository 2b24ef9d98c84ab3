"""What only the Ray executor does: groups, data-parallel workers, deaths of workers, stopped trials, own clusters."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cope_sweep.store import Event, Store
from cope_sweep.sweep.executor import ClusterError
from cope_sweep.sweep.local import run_local
from tests.sweep.runs import LONG, ONE_GROUP, TIMEOUT_S, EventLog, Listener, seeds
from tests.tiny import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def pid_of(event: Event) -> int:
    return int(event.worker_id.rpartition(":")[2])


def test_a_death_disturbs_no_other_group(store: Store, events: EventLog) -> None:
    """Two groups on two nodes. One worker is killed twice: its run resumes, then fails. The other run continues."""
    from cope_sweep.sweep.schedule import run_on_ray

    victim, other, after = [tiny_run(seed=seed, **LONG) for seed in range(2)] + [tiny_run(seed=2)]
    killed: list[tuple[int, int]] = []

    def kill(event: Event) -> None:
        both_train = {e.run_id for e in events if e.step} >= {victim.run_id, other.run_id}
        if event.run_id == victim.run_id and event.status == "running" and event.step and both_train:
            is_new_worker = not killed or pid_of(event) != killed[-1][0]
            if is_new_worker and store.run(victim.run_id).resume.exists():
                os.kill(pid_of(event), signal.SIGKILL)
                killed.append((pid_of(event), event.step))
        if event.run_id == after.run_id and event.status == "finished":
            events.stop.set()

    resources = ONE_GROUP.model_copy(update={"groups": "auto", "max_failures": 1})
    run_on_ray([victim, other, after], store, resources, on_event=Listener(events, kill), stop=events.stop)

    assert len(killed) == 2
    first_worker, second_worker = (pid for pid, _ in killed)
    first_resumed = next(event.step for event in events.of(victim) if event.step and pid_of(event) == second_worker)
    assert first_resumed > 1  # from its checkpoint, not from the start
    assert first_worker != second_worker
    assert store.run(victim.run_id).status == "failed"
    assert "its worker died 2 times" in str(events.of(victim)[-1].message)
    assert store.run(other.run_id).status == "interrupted"
    assert len({pid_of(event) for event in events.of(other)}) == 1
    assert store.run(other.run_id).state["attempt"] == 1
    assert store.run(after.run_id).status == "finished"


def test_two_workers_train_a_run_as_one_worker_does(store: Store, tmp_path: Path, events: EventLog) -> None:
    from cope_sweep.sweep.schedule import run_on_ray

    bad = tiny_run(**{"train.lr": 1e20, "train.steps": 200})
    runs = [tiny_run(seed=1), bad, tiny_run(seed=2)]
    run_on_ray(runs, store, ONE_GROUP.model_copy(update={"workers": 2}), on_event=events, stop=events.stop)
    reference = Store(tmp_path / "reference", create=True)
    run_local([runs[0], runs[2]], reference, ONE_GROUP, on_event=lambda event: None, stop=threading.Event())

    assert [status for _, status in events.ends()] == ["finished", "failed", "finished"]
    assert "Diverged" in store.run(bad.run_id).state["message"]
    for run in (runs[0], runs[2]):
        result = store.run(run.run_id).result
        expected = reference.run(run.run_id).result
        assert result is not None
        assert expected is not None
        assert result["facts"]["workers"] == 2
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)


def test_a_stopped_trial_interrupts_its_run(store: Store, events: EventLog) -> None:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import FIFOScheduler

    from cope_sweep.sweep.schedule import run_on_ray

    stopped, after = tiny_run(seed=0, **LONG), tiny_run(seed=1)

    class StopsFirst(FIFOScheduler):
        def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, object]) -> str:
            return self.STOP if trial.config["run_id"] == stopped.run_id else self.CONTINUE

    run_on_ray([stopped, after], store, ONE_GROUP, on_event=events, stop=events.stop, scheduler=StopsFirst())
    assert events.ends() == [(stopped.run_id, "interrupted"), (after.run_id, "finished")]
    assert store.run(stopped.run_id).resume.exists()
    assert not events.stop.is_set()


def test_the_death_of_the_broker_ends_the_sweep_and_keeps_finished_runs(store: Store, events: EventLog) -> None:
    import ray

    from cope_sweep.sweep.schedule import run_on_ray

    runs = [tiny_run(seed=0), tiny_run(seed=1, **LONG)]

    def kill(event: Event) -> None:
        if event.run_id == runs[1].run_id and event.step:
            (name,) = ray.util.list_named_actors()
            ray.kill(ray.get_actor(name))

    with pytest.raises(ClusterError, match="broker on the cluster died"):
        run_on_ray(runs, store, ONE_GROUP, on_event=Listener(events, kill), stop=events.stop)
    assert store.run(runs[0].run_id).status == "finished"
    assert store.run(runs[1].run_id).status == "interrupted"
    assert store.run(runs[1].run_id).resume.exists()


def test_no_room_for_a_group(store: Store, events: EventLog) -> None:
    from cope_sweep.sweep.schedule import run_on_ray

    resources = ONE_GROUP.model_copy(update={"groups": "auto", "cpus": 64})
    with pytest.raises(ClusterError, match="has no room for a group of 1 workers with 64 CPUs each"):
        run_on_ray(seeds(1), store, resources, on_event=events, stop=events.stop)
    assert not (store.root / "ray").exists()


def test_ray_prints_messages_in_the_thread_that_is_diverted() -> None:
    """The name is Ray's own; a new version of Ray may change it."""
    from cope_sweep.sweep.cluster import RAY_MESSAGES_THREAD

    assert RAY_MESSAGES_THREAD in {thread.name for thread in threading.enumerate()}


OWN_CLUSTER = """
import sys, threading
from functools import partial
from cope_sweep.store import Store
from cope_sweep.spec import Resources
from cope_sweep.sweep.schedule import run_on_ray
from tests.sweep.runs import LONG
from tests.tiny import tiny_run

def on_event(event):
    print(event.status, event.step, flush=True)

run_on_ray([tiny_run(**LONG)], Store(sys.argv[1]), Resources(checkpoint_every_s=0.2), on_event=on_event,
           stop=threading.Event(), cpus=1)
"""


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
    assert driver.stdout is not None
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
