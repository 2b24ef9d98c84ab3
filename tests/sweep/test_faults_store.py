"""What happens to a store under a sweep on Ray: it grows, a state in it is damaged, its disk is full."""

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cope_sweep.config import row_of
from cope_sweep.store import Event, Store
from cope_sweep.sweep.executor import Callbacks
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.ray_executor import run_on_ray
from cope_sweep.sweep.sweep import Sweep
from tests.helpers.errors import raises
from tests.helpers.fault_sweeps import logged
from tests.helpers.finished_runs import plan_of
from tests.helpers.sweep_runs import ONE_GROUP, EventLog, Listener, Recorded, other_sweep, seeds, train_by


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
def test_a_search_ends_although_another_sweep_has_one_of_its_last_runs(store: Store) -> None:
    """The search suggests no more when it knows how the run has ended there."""
    plan = plan_of(search={"kind": "optuna", "samples": 9}, seeds=[0])
    taken = row_of(plan.ablation, {"model.position": "None"}).runs[0]
    with other_sweep(store) as other:
        other.acquire(taken)

        def release(event: Event) -> None:
            if Counter(store.index.statuses().values())["finished"] == 2:
                Recorded(store, taken).end("finished", {"in_dist/token_error": 50.0})
                other.end(taken.run_id)

        callbacks = Callbacks(on_event=release)
        sweep = Sweep(plan, store, run_on_ray, executor_name="ray", resources=ONE_GROUP, callbacks=callbacks)
        outcome = sweep.run()
    assert (outcome.trained, outcome.reused, outcome.not_started, outcome.exit_code) == (2, 1, 0, 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder]).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("index", "code"), [("", "unusable_index"), ("index.db", "not_writable")])
def test_a_full_disk_ends_the_sweep_and_with_room_it_goes_on(
    small_disk: Path, tmp_path: Path, events: EventLog, index: str, code: str
) -> None:
    """The index is on the same disk, or on another one."""
    store = Store(small_disk / "store", index=f"sqlite:///{tmp_path / index}" if index else None, create=True)
    runs = seeds(2, **{"train.steps": 2000, "evaluate.every": 10})

    def fill(event: Event) -> None:
        if event.step and not (small_disk / "filler").exists():
            with (small_disk / "filler").open("wb") as file, pytest.raises(OSError) as full:  # noqa: PT011
                while True:
                    os.write(file.fileno(), b"\0" * 4096)
            assert full.value.errno == errno.ENOSPC

    with raises(code):
        train_by(run_on_ray, runs, store, ONE_GROUP, on_event=Listener(events, fill))
    (small_disk / "filler").unlink()
    train_by(run_on_ray, runs, store, ONE_GROUP, sweep_id="next-sweep")
    assert [store.status(run.run_id) for run in runs] == ["finished"] * 2
    for run in runs:
        assert max(Counter(logged(store, run.run_id)).values()) == 1


def test_a_full_disk_is_called_one(small_disk: Path) -> None:
    folder = small_disk / "store"
    Store(folder, create=True)
    with (small_disk / "filler").open("wb") as file, pytest.raises(OSError):  # noqa: PT011
        while True:
            os.write(file.fileno(), b"\0" * 4096)
    with raises("unusable_index", reason=f"the disk of {folder} is full, or your quota on it"):
        Store(folder).index.statuses()


@pytest.mark.thorough
def test_sync_to_a_full_disk_is_one_line_and_its_details_are_in_the_log(small_disk: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=True)
    train_by(run_local, seeds(1, **{"train.steps": 2}), store, ONE_GROUP)
    (small_disk / "filler").write_bytes(b"\0" * (5 << 19))
    done = subprocess.run(
        [sys.executable, "-m", "cope_sweep.cli", "sync", "--store", str(store.root), "--timeout", "0",
         "--mlflow", f"sqlite:///{small_disk}/mlflow.db"],
        capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "COLUMNS"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "full" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
