"""What only the Ray executor does: groups, data-parallel workers, deaths, stopped trials, a cluster of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cope_sweep.record import Event, Ledger
from cope_sweep.sweep.executor import ClusterError
from cope_sweep.sweep.local import run_local
from tests.sweep.conftest import ONE_GROUP, Heard, seeds
from tests.sweep.test_executors import LONG, Listener
from tests.tiny import tiny_run

pytestmark = pytest.mark.usefixtures("cluster")


def pid_of(event: Event) -> int:
    return int(event.worker_id.rpartition(":")[2])


def test_auto_is_a_group_for_each_free_cpu_and_none_is_undisturbed_by_a_death(ledger: Ledger, heard: Heard) -> None:
    """Two groups, on two nodes; a worker is killed twice: its run resumes, then fails; the other run never notices."""
    from cope_sweep.sweep.schedule import run_on_ray

    victim, other, after = [tiny_run(seed=seed, **LONG) for seed in range(2)] + [tiny_run(seed=2)]
    killed: list[tuple[int, int, float]] = []
    resumed_s: list[float] = []

    def kill(event: Event) -> None:
        both_train = {e.run_id for e in heard if e.step} >= {victim.run_id, other.run_id}
        if event.run_id == victim.run_id and event.status == "running" and event.step and both_train:
            new = not killed or pid_of(event) != killed[-1][0]
            if new and killed:
                resumed_s.append(time.monotonic() - killed[-1][2])
            if new and ledger.run(victim.run_id).resume.exists():
                os.kill(pid_of(event), signal.SIGKILL)
                killed.append((pid_of(event), event.step, time.monotonic()))
        if event.run_id == after.run_id and event.status == "finished":
            heard.stop.set()

    resources = ONE_GROUP.model_copy(update={"groups": "auto", "max_failures": 1})
    run_on_ray([victim, other, after], ledger, resources, on_event=Listener(heard, kill), stop=heard.stop)

    assert len(killed) == 2
    assert killed[1][1] > killed[0][1] / 2  # from its checkpoint, not from the start
    assert ledger.run(victim.run_id).status == "failed"
    assert "its worker died 2 times" in str(heard.of(victim)[-1].message)
    assert ledger.run(other.run_id).status == "interrupted"
    assert len({pid_of(event) for event in heard.of(other)}) == 1
    assert ledger.run(other.run_id).state["attempt"] == 1
    assert ledger.run(after.run_id).status == "finished"
    assert resumed_s[0] < 30  # 10 s on a machine of two cores with other work


def test_two_workers_train_the_run_of_one(ledger: Ledger, tmp_path: Path, heard: Heard) -> None:
    from cope_sweep.sweep.schedule import run_on_ray

    bad = tiny_run(**{"train.lr": 1e20, "train.steps": 200})
    runs = [tiny_run(seed=1), bad, tiny_run(seed=2)]
    run_on_ray(runs, ledger, ONE_GROUP.model_copy(update={"workers": 2}), on_event=heard, stop=heard.stop)
    alone = Ledger(tmp_path / "alone", create=True)
    run_local([runs[0], runs[2]], alone, ONE_GROUP, on_event=lambda event: None, stop=threading.Event())

    assert [status for _, status in heard.ends()] == ["finished", "failed", "finished"]
    assert "Diverged" in ledger.run(bad.run_id).state["message"]
    for run in (runs[0], runs[2]):
        result = ledger.run(run.run_id).result
        expected = alone.run(run.run_id).result
        assert result is not None
        assert expected is not None
        assert result["facts"]["workers"] == 2
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)


def test_stopping_a_trial_interrupts_its_run(ledger: Ledger, heard: Heard) -> None:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import FIFOScheduler

    from cope_sweep.sweep.schedule import run_on_ray

    stopped, after = tiny_run(seed=0, **LONG), tiny_run(seed=1)

    class StopsFirst(FIFOScheduler):
        def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, object]) -> str:
            return self.STOP if trial.config["run_id"] == stopped.run_id else self.CONTINUE

    run_on_ray([stopped, after], ledger, ONE_GROUP, on_event=heard, stop=heard.stop, scheduler=StopsFirst())
    assert heard.ends() == [(stopped.run_id, "interrupted"), (after.run_id, "finished")]
    assert ledger.run(stopped.run_id).resume.exists()
    assert not heard.stop.is_set()


def test_a_node_without_the_store_is_named(
    ledger: Ledger, heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cope_sweep.sweep import schedule

    @contextlib.contextmanager
    def elsewhere(_: Ledger) -> Iterator[tuple[str, str]]:
        yield str(tmp_path), str(tmp_path / "no such token")

    monkeypatch.setattr(schedule, "_scratch", elsewhere)
    with pytest.raises(ClusterError, match=r"node .* cannot see the store .*: use a folder that all nodes share"):
        schedule.run_on_ray(seeds(1), ledger, ONE_GROUP, on_event=heard, stop=heard.stop)
    assert ledger.run(seeds(1)[0].run_id).status == "pending"


def test_the_brokers_death_ends_the_sweep_and_keeps_what_is_finished(ledger: Ledger, heard: Heard) -> None:
    import ray

    from cope_sweep.sweep.schedule import run_on_ray

    runs = [tiny_run(seed=0), tiny_run(seed=1, **LONG)]

    def kill(event: Event) -> None:
        if event.run_id == runs[1].run_id and event.step:
            (name,) = ray.util.list_named_actors()
            ray.kill(ray.get_actor(name))

    with pytest.raises(ClusterError, match="broker on the cluster died"):
        run_on_ray(runs, ledger, ONE_GROUP, on_event=Listener(heard, kill), stop=heard.stop)
    assert ledger.run(runs[0].run_id).status == "finished"
    assert ledger.run(runs[1].run_id).status == "interrupted"
    assert ledger.run(runs[1].run_id).resume.exists()


OWN_CLUSTER = """
import sys, threading
from functools import partial
from cope_sweep.record import Ledger
from cope_sweep.spec import Resources
from cope_sweep.sweep.schedule import run_on_ray
from tests.sweep.test_executors import LONG
from tests.tiny import tiny_run

def on_event(event):
    print(event.status, event.step, flush=True)

run_on_ray([tiny_run(**LONG)], Ledger(sys.argv[1]), Resources(checkpoint_every_s=0.2), on_event=on_event,
           stop=threading.Event(), cpus=1)
"""


def test_a_killed_driver_takes_its_cluster_along_and_leaves_a_run_to_resume(
    ledger: Ledger, heard: Heard, ray_environment: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in ray_environment.items() if not name.startswith("RAY_AUTH")}
    driver = subprocess.Popen(
        [sys.executable, "-c", OWN_CLUSTER, str(ledger.root)],
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
        if ledger.run(run.run_id).resume.exists():
            break
    # Ray's two agents look for their cluster for another minute.
    family = psutil.Process(driver.pid).children(recursive=True)
    agents = [process for process in family if process.name().endswith("Agent")]
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs([process for process in family if process not in agents], timeout=30)
    for process in [*agents, *alive]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert alive == []
    # Nothing but the events was on the terminal, and authentication was left as it was.
    assert set(lines) == {"running"}
    assert not (home / ".ray").exists()

    def stop(event: Event) -> None:
        if event.step:
            heard.stop.set()

    run_local([run], ledger, ONE_GROUP, on_event=Listener(heard, stop), stop=heard.stop)
    assert next(event.step for event in heard if event.step) > 1
