"""What happens to a store under a sweep on Ray: it grows, a state in it is damaged, its disk is full."""

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cope_sweep.config import expand, load_ablation
from cope_sweep.read.tables import table
from cope_sweep.store import Event, Store, StoreError
from cope_sweep.sweep.executor import Workload, run_local
from cope_sweep.sweep.ray_executor import run_on_ray
from cope_sweep.sweep.search import RowSearch
from cope_sweep.sweep.sweep import SweepOutcome, sweep
from tests.read.tables.ablations import plan_of
from tests.sweep.fault_sweeps import LONG, SHORT, attempts, is_training, logged, until, write_ablation
from tests.sweep.runs import ONE_GROUP, EventLog, Listener, Recorded, other_sweep, seeds, train_by
from tests.tiny import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def train(file: Path, store: Store) -> SweepOutcome:
    plan = expand(load_ablation(file))
    resources = plan.ablation.content.resources
    return sweep(plan, store, run_on_ray, resources=resources, executor_name="ray", tracking_uri=None)


def test_an_ablation_grows_while_another_sweep_trains_a_part_of_it(store: Store, tmp_path: Path) -> None:
    """Seeds and rows with more steps are added. What is finished, or trained elsewhere, is not trained again."""
    finished = write_ablation(tmp_path / "grows.yaml", {"Short": SHORT}).runs
    run_local(Workload(finished, store, ONE_GROUP, "first"))
    plan = write_ablation(tmp_path / "grows.yaml", {"Short": SHORT, "More": 3 * SHORT, "Long": 4 * LONG}, seeds=2)
    (elsewhere,) = [run for run in plan.runs if run.train.steps == 4 * LONG and run.seed == 0]
    other = threading.Thread(target=run_local, args=[Workload([elsewhere], store, ONE_GROUP, "second")])
    other.start()
    until(lambda: is_training(store, elsewhere.run_id))
    outcome = train(tmp_path / "grows.yaml", store)
    other.join()
    assert (outcome.trained, outcome.reused, outcome.exit_code) == (4, 2, 0)
    assert attempts(store, plan) == [1] * 6
    assert {max(Counter(logged(store, run.run_id)).values()) for run in plan.runs} == {1}
    (more,) = [run for run in plan.runs if run.train.steps == 3 * SHORT and run.seed == 0]
    record = store.index.records([more.run_id])[more.run_id]
    assert (record.parent_id, record.facts["resumed_from_step"]) == (finished[0].run_id, SHORT)
    assert [row["counts"]["finished"] for row in table(plan, store).to_json()["rows"]] == [2, 2, 2]
    assert train(tmp_path / "grows.yaml", store).sweep_id is None


def test_a_search_ends_although_another_sweep_has_one_of_its_last_runs(store: Store) -> None:
    """The search suggests no more when it knows how the run has ended there."""
    plan = plan_of(search={"kind": "optuna", "samples": 9}, seeds=[0])
    first = RowSearch(plan, {}).next_row()
    assert first is not None
    taken = first.runs[0]
    with other_sweep(store) as other:
        other.acquire(taken)

        def release(event: Event) -> None:
            if Counter(store.index.statuses().values())["finished"] == 2:
                Recorded(store, taken).end("finished", {"in_dist/token_error": 50.0})
                other.end(taken.run_id)

        outcome = sweep(
            plan, store, run_on_ray, resources=ONE_GROUP, executor_name="ray", tracking_uri=None, on_event=release
        )
    assert (outcome.trained, outcome.reused, outcome.not_started, outcome.exit_code) == (2, 1, 0, 0)
    assert outcome.notes == ("the search ended early: every row that it can suggest was trained",)


def test_a_state_that_is_damaged_in_the_middle_of_a_run_is_trained_again(
    store: Store, tmp_path: Path, events: EventLog
) -> None:
    """Its process dies, too. The run starts anew, in place, and has the result of an undisturbed one."""
    run = tiny_run(**{"train.steps": 3000, "evaluate.every": 1000})
    damaged: list[int] = []

    def damage(event: Event) -> None:
        state = store.run(run.run_id).resume
        if event.step and state.exists() and not damaged:
            os.kill(int(event.worker_id.rpartition(":")[2]), signal.SIGKILL)
            state.write_bytes(state.read_bytes()[:-20])
            damaged.append(event.step)

    train_by(run_on_ray, [run], store, ONE_GROUP, on_event=Listener(events, damage), stop=events.stop)
    reference = Store(tmp_path / "reference", create=True)
    train_by(run_local, [run], reference, ONE_GROUP)
    found, expected = store.run(run.run_id).result, reference.run(run.run_id).result
    assert damaged
    assert found is not None
    assert expected is not None
    assert found["metrics"] == expected["metrics"]
    assert store.run(run.run_id).curve() == reference.run(run.run_id).curve()
    assert (store.run(run.run_id).state["attempt"], found["facts"]["resumed_from_step"]) == (2, 0)
    assert "resume.safetensors" in found["facts"]["restarted"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder]).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    ("index", "message"),
    [("", "database or disk is full; mend that"), ("index.db", "cannot be written .No space left")],
)
def test_a_full_disk_ends_the_sweep_and_with_room_it_goes_on(
    small_disk: Path, tmp_path: Path, events: EventLog, index: str, message: str
) -> None:
    """The index is on the same disk, or on another one."""
    store = Store(small_disk / "store", index=f"sqlite:///{tmp_path / index}" if index else None, create=True)
    runs = seeds(2, **{"train.steps": 2000, "evaluate.every": 10})

    def fill(event: Event) -> None:
        if event.step and not (small_disk / "filler").exists():
            with (small_disk / "filler").open("wb") as file, pytest.raises(OSError, match="No space left"):
                while True:
                    os.write(file.fileno(), b"\0" * 4096)

    with pytest.raises(StoreError, match=message):
        train_by(run_on_ray, runs, store, ONE_GROUP, on_event=Listener(events, fill))
    (small_disk / "filler").unlink()
    train_by(run_on_ray, runs, store, ONE_GROUP, sweep_id="next-sweep")
    assert [store.status(run.run_id) for run in runs] == ["finished"] * 2
    for run in runs:
        assert max(Counter(logged(store, run.run_id)).values()) == 1
