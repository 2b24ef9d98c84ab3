"""deploy/slurm/sweep.sbatch in a real Slurm, with a real Ray."""

import json
from collections import Counter
from pathlib import Path

import pytest

from cope_sweep.config import expand, load_ablation
from cope_sweep.store import RunFolder, Store
from cope_sweep.sweep.leases import LEASE_S
from tests.helpers.processes import until
from tests.real.slurm import CORES, Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB = Path(__file__).parents[2] / "deploy" / "slurm" / "sweep.sbatch"
ABLATION = """\
title: Slow
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
  model: {layers: 1, dim: 8, heads: 2, position: [{kind: slow_steps, log: "LOG", step_s: 0.05}]}
  train: {batch: 4, steps: STEPS}
  evaluate: {every: 1000, sequences: 8, final_sequences: 8}
plugins: [slow_steps]
seeds: SEEDS
metrics: [{name: in_dist/token_error, label: In-dist.}]
resources: {device: cpu, cpus: CORES, checkpoint_every_s: 0.5}
"""


class Sweep:
    """An ablation in a folder of its own, which is submitted to Slurm; each run has a node."""

    def __init__(self, slurm: Slurm, folder: Path, *, seeds: int, steps: int) -> None:
        self.slurm, self.folder, self.steps = slurm, folder, steps
        self.log = folder / "steps.log"
        values = {"LOG": self.log, "STEPS": steps, "SEEDS": list(range(seeds)), "CORES": CORES}
        text = ABLATION
        for name, value in values.items():
            text = text.replace(name, str(value))
        (folder / "slow.yaml").write_text(text)
        self.plan = expand(load_ablation(folder / "slow.yaml"))

    def submit(self, *options: str) -> str:
        """Submit the sweep to both nodes, unless options of sbatch say otherwise; the job's number."""
        words = ["--nodes=2", f"--cpus-per-task={CORES}", *options, JOB, "slow.yaml", "--store", "store", "--no-mlflow"]
        return self.slurm.submit(*words, cwd=self.folder)

    def output(self, job: str) -> str:
        """What a job printed, on its first node."""
        file = self.folder / f"slurm-{job}.out"
        return file.read_text() if file.exists() else ""

    def logs(self, job: str) -> str:
        """Everything that a job printed, for messages of tests."""
        return "\n".join(f"-- {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob(f"*{job}*.*")))

    def steps_by_node(self) -> Counter:
        """The number of training steps on each node."""
        return Counter(self.log.read_text().split() if self.log.exists() else [])

    def statuses(self) -> list[str]:
        return [run.status for run in self.runs()]

    def attempts(self) -> list[int]:
        """How often each run was begun."""
        return [run.state["attempt"] if run.status != "planned" else 0 for run in self.runs()]

    def runs(self) -> list[RunFolder]:
        store = Store(self.folder / "store")
        return [store.run(run.run_id) for run in self.plan.runs]

    def status(self) -> list[dict]:
        """`cope-sweep status --json`."""
        return json.loads(
            self.slurm.execute("cope-sweep", "status", "--store", "store", "--json", cwd=self.folder).stdout
        )


@pytest.fixture
def sweep(slurm, tmp_path):
    def make(**sizes):
        return Sweep(slurm, tmp_path, **sizes)

    yield make
    slurm.execute("scancel", "--user=root")
    until(lambda: slurm.idle_nodes() == 2, timeout_s=60)


def ray_processes(slurm):
    """The processes of Ray on all nodes."""
    return "".join(
        slurm.execute("pgrep", "--list-full", "raylet|gcs_server|^ray::", node=node).stdout for node in slurm.nodes
    )


def test_a_sweep_trains_on_two_nodes_and_leaves_them(slurm, sweep):
    sweep = sweep(seeds=2, steps=200)
    job = sweep.submit()
    assert slurm.wait(job) == "COMPLETED", sweep.logs(job)
    until(lambda: slurm.idle_nodes() == 2, timeout_s=15)
    assert ray_processes(slurm) == ""
    assert sweep.statuses() == ["finished", "finished"]
    assert sweep.steps_by_node() == {"n1": 200, "n2": 200}
    output = sweep.output(job)
    assert "In-dist." in output
    assert "error" not in output.lower().replace("token_error", "")
    assert output.count("\n") < 40, output
    for node in (0, 1):
        assert (sweep.folder / f"cope-sweep-{job}-node{node}.log").exists()


def test_a_limit_too_short_to_train_is_refused_before_ray_starts(slurm, sweep):
    sweep = sweep(seeds=2, steps=200)
    job = sweep.submit("--time=10")
    assert slurm.wait(job, timeout_s=20) == "FAILED"
    assert "--time=" in sweep.output(job)
    assert not sweep.steps_by_node()


def test_a_sweep_that_stops_before_the_limit_continues_when_it_is_submitted_again(slurm, sweep):
    sweep = sweep(seeds=4, steps=800)
    job = sweep.submit("--time=12")
    assert slurm.wait(job) == "FAILED", sweep.logs(job)  # as Slurm calls each exit code but 0
    assert "submit the same job again" in sweep.output(job)
    assert "--address" not in sweep.output(job)  # no command for a cluster that is gone
    assert "interrupted" in sweep.statuses(), sweep.logs(job)
    before = list(zip(sweep.statuses(), sweep.attempts(), strict=True))
    job = sweep.submit()
    assert slurm.wait(job) == "COMPLETED", sweep.logs(job)
    assert sweep.statuses() == ["finished"] * 4
    assert sweep.steps_by_node().total() == 4 * 800
    for (status, attempts), attempts_now in zip(before, sweep.attempts(), strict=True):
        assert attempts_now == attempts + (status != "finished")


def test_a_cancelled_job_ends_at_once_and_its_sweep_continues(slurm, sweep):
    sweep = sweep(seeds=2, steps=600)
    job = sweep.submit()
    until(lambda: set(sweep.steps_by_node()) == {"n1", "n2"} and min(sweep.steps_by_node().values()) > 100)
    slurm.execute("scancel", job)
    until(lambda: slurm.idle_nodes() == 2 and not ray_processes(slurm), timeout_s=30)
    assert slurm.state(job) == "CANCELLED"
    until(lambda: sweep.status()[0]["status"] == "interrupted", timeout_s=LEASE_S + 15)
    job = sweep.submit()
    assert slurm.wait(job) == "COMPLETED", sweep.logs(job)
    assert sweep.statuses() == ["finished", "finished"]
    assert 2 * 600 <= sweep.steps_by_node().total() < 2 * 600 + 200  # those after the last checkpoints are repeated


def test_an_array_trains_each_run_once(slurm, sweep):
    sweep = sweep(seeds=4, steps=200)
    array = sweep.submit("--nodes=1", "--array=0-1")
    assert [slurm.wait(f"{array}_{task}") for task in (0, 1)] == ["COMPLETED", "COMPLETED"], sweep.logs(array)
    assert sweep.attempts() == [1, 1, 1, 1]
    assert sweep.steps_by_node().total() == 4 * 200


def test_a_second_job_on_the_same_nodes_is_refused_at_once(slurm, sweep):
    sweep = sweep(seeds=2, steps=400)
    first = sweep.submit("--partition=shared")
    until(lambda: set(sweep.steps_by_node()) == {"n1", "n2"})
    second = sweep.submit("--partition=shared")
    assert slurm.wait(second, timeout_s=20) == "FAILED", sweep.logs(second)
    assert "--exclusive" in sweep.output(second)
    assert slurm.wait(first) == "COMPLETED", sweep.logs(first)


def test_of_two_jobs_that_start_together_on_the_same_nodes_one_trains(slurm, sweep):
    sweep = sweep(seeds=2, steps=200)
    jobs = [sweep.submit("--partition=shared") for _ in range(2)]
    states = [slurm.wait(job) for job in jobs]
    assert sorted(states) == ["COMPLETED", "FAILED"], "".join(map(sweep.logs, jobs))
    assert sweep.attempts() == [1, 1]
    assert "--exclusive" in sweep.output(jobs[states.index("FAILED")])
