"""The interleavings of sweeps that train the same runs: the real code of index, leases and run folders, step by step.

Each process is a greenlet. It pauses before each transaction of the index, and with `files` also before it reads the number
of the attempt or the result, before it renames or deletes a file, and between the files of a checkpoint. Then any process
goes on, one is killed, the leases expire, or the machine loses power: all processes die, and of what was written since a
file's last fsync only the half is there afterwards. Each reachable state is visited once. Two states are the same if the index, the files, and the positions and variables of all
processes are. Processes cannot be copied, so a state is reached by repeating the choices that lead to it.

What is not the real code is the training itself (`Loop`), which writes the number of its attempt, not numbers.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

from cope_sweep.store.leases import LEASE_S
from cope_sweep.store.rebuild import check
from greenlet import getcurrent, greenlet
from sqlalchemy import Float, literal

from cope_sweep.store import Lease, LeaseHolder, Refusal, RunFolder, Store
from cope_sweep.store import artifacts as store_artifacts
from cope_sweep.store import files as store_files
from cope_sweep.store.index import Index
from cope_sweep.store.index.database import Database
from cope_sweep.store.index.tables import metadata
from cope_sweep.sweep.executor import refused, train_leased
from cope_sweep.train import Runtime, train_run
from tests.tiny import tiny_run

STEPS = 2
PLAIN = (int, str, bytes, dict, tuple, list, set, frozenset, Path, Lease, Refusal, RunFolder, type(None))
"""Types of variables that make a difference. Others are the same in all states, or hold only these."""


class Violation(Exception):
    """The protocol does what it must not do; the message says what, and after which choices."""


class Process(greenlet):
    """A process of a sweep, which trains all runs, one after another."""

    def __init__(self, world, sweep, number):
        super().__init__(functools.partial(world.train_all, self))
        self.sweep, self.number, self.killed = sweep, number, False
        self.run_id, self.attempt, self.expires_s = "", 0, 0.0
        """What it trains, and until when it has the lease."""

    def position(self):
        """Where it is, and with which values of variables: equal for processes that will act alike."""
        frames, frame = [], self.gr_frame
        while frame is not None:
            values = ((name, value) for name, value in frame.f_locals.items() if isinstance(value, PLAIN))
            simple = frozenset((name, text) for name, value in values if " at 0x" not in (text := repr(value)))
            frames.append((frame.f_code.co_name, frame.f_lasti, simple))
            frame = frame.f_back
        lease = self.run_id, self.attempt, self.expires_s
        return self.sweep, self.number, self.dead, self.killed, lease, tuple(frames)


def pause():
    """Let others go on, if this is a process."""
    process = getcurrent()
    if isinstance(process, Process):
        process.parent.switch()


def pausing(call, matters=lambda *arguments: True):
    def paused(*arguments, **options):
        if matters(*arguments):
            pause()
        return call(*arguments, **options)

    return paused


class Loop:
    """Training: some rows of the curve, a resume file after the first, then checkpoint and result, or what was asked."""

    def __init__(self, spec, folder, runtime, reporter):
        self.folder, self.step = folder, 0
        saved = json.loads(folder.resume.read_text()) if folder.resume.exists() else None
        if saved:
            folder.check_curve(saved["mark"])  # the real loop begins again without it: what was trained is lost
            self.step = saved["step"]
        elif folder.run_id in World.current.saved:
            raise Violation(
                f"attempt {folder.attempt} begins again: the training state of run {folder.run_id} was lost"
            )
        folder.rewind(self.step, saved and saved["mark"])
        World.current.has_begun(folder)

    def run(self, should_stop):
        while self.step < STEPS:
            self.step += 1
            self.folder.log({"step": self.step, "attempt": self.folder.attempt})
            request = should_stop() if self.step < STEPS else None
            if self.step == 1:
                with self.folder.writing_resume() as path:
                    path.write_text(json.dumps({"step": 1, "mark": self.folder.curve_mark()}))
                World.current.saved.add(self.folder.run_id)
            if request:
                self.folder.set_state(request)
                return request
        with self.folder.writing_checkpoint() as path:
            (path / "config.json").write_text(str(self.folder.attempt))
            if World.current.explorer.pauses_at_files:
                pause()
            (path / "weights").write_text("the weights")
        self.folder.finish({"attempt": float(self.folder.attempt)}, {})
        return "finished"


class World:
    """A store and the processes of its sweeps, from their start."""

    current = None

    def __init__(self, explorer):
        World.current = self
        self.explorer, self.index, self.store, self.runs = explorer, explorer.index, explorer.store, explorer.runs
        explorer.reset()
        self.now_s, self.begun, self.saved, self.synced = 1e9, Counter(), set(), {}
        """The time; run → the newest attempt that has begun; the runs with training states; file → bytes on the disk."""
        self.index.database.now_s = lambda: literal(self.now_s, Float)
        self.left = dict(explorer.events)
        self.processes = [Process(self, name, 1) for name in explorer.sweeps]

    def train_all(self, process):
        """A process of a sweep: what its trials do."""
        leases = LeaseHolder(self.store, process.sweep)
        leases.owner = f"{process.sweep}@other/machine:{process.number}:1"
        for run in self.runs:
            lease = leases.acquire(run)
            if isinstance(lease, Refusal):
                refused(run, self.store, lease)
                continue
            process.run_id, process.attempt = run.run_id, lease.attempt
            self.check_lease(process)

            def renewed(process=process, run=run):
                leases.refresh()  # as its thread does
                if not leases.is_lost(run.run_id):
                    process.expires_s = self.now_s + LEASE_S

            train_leased(
                run, self.store, Runtime(), leases, lease,
                on_event=lambda event: None, should_stop=renewed,
            )  # fmt: skip
            process.run_id, process.attempt = "", 0

    def check_lease(self, process):
        """No other sweep has a lease of the run that it may still believe in."""
        for each in self.processes:
            if each.run_id == process.run_id and each.sweep != process.sweep and each.expires_s > self.now_s:
                raise Violation(f"attempts {each.attempt} and {process.attempt} of a run have leases that hold")
        process.expires_s = self.now_s + LEASE_S

    def live_attempts(self):
        rows = self.explorer.rows()
        return {(run_id, attempt) for run_id, status, attempt, owner, live in rows if owner and live}

    def has_begun(self, folder):
        """From here on, no older attempt may change the files."""
        self.begun[folder.run_id] = max(self.begun[folder.run_id], folder.attempt)

    # -- choices -------------------------------------------------------------------------------------------------

    def choices(self):
        alive = [n for n, process in enumerate(self.processes) if not (process.dead or process.killed)]
        found = [("step", n) for n in alive]
        if alive and self.left.get("kill"):
            found += [("kill", n) for n in alive if self.processes[n].run_id]
        if alive and self.left.get("crash"):
            found.append(("crash", 0))
        if alive and self.left.get("expire") and self.live_attempts():
            found.append(("expire", 0))
        return found

    def take(self, choice, *, again=False):
        """`again`: what follows was checked before."""
        what, n = choice
        process = self.processes[n]
        if what == "step":
            if again:
                process.switch()
                return
            before, live, own = self.files(), self.live_attempts(), process.attempt
            process.switch()
            self.check_files(process, before)
            for run_id, attempt in live - self.live_attempts():
                if attempt > max(own, process.attempt):
                    raise Violation(f"attempt {own} has ended the lease of attempt {attempt} of run {run_id}")
            return
        self.left[what] -= 1
        if what == "expire":
            self.now_s += LEASE_S + 1
            return
        if what == "crash":
            self.lose_power()
        for each in self.processes[:] if what == "crash" else [process]:
            if not (each.dead or each.killed):
                # It runs no `finally`, so it is kept. The same command starts another one.
                each.killed = True
                self.processes.append(Process(self, each.sweep, each.number + 1))

    def lose_power(self):
        """Cut every file to what is on the disk: what its last fsync has written, and a half of what came later."""
        before = self.files()
        for name, content in before.items():
            path = self.store.root / "runs" / name
            on_disk = self.synced.get(path.stat().st_ino, 0)
            os.truncate(path, (on_disk + len(content)) // 2)
        self.check_results(before, self.files())

    def files(self):
        """Path → content of the files that readers see."""
        root = self.store.root / "runs"
        paths = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}

    def check_files(self, process, before):
        after = self.files()
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        newest = self.begun[process.run_id]  # set once that attempt has deleted the temporary files of older ones
        shown = [name for name in changed if not name.partition("/")[2].startswith(".")]
        if shown and process.attempt < newest:
            raise Violation(f"attempt {process.attempt} has changed {shown} of attempt {newest}")
        self.check_results(before, after)

    def check_results(self, before, after):
        for run in self.runs:
            result = after.get(f"{run.run_id}/result.json")
            if before.get(f"{run.run_id}/result.json") not in (None, result):
                raise Violation(f"the result of run {run.run_id} was lost, or the run was trained again")
            checkpoint = after.get(f"{run.run_id}/checkpoint/config.json", b"none").decode()
            if result and f'"attempt": {checkpoint}.0' not in result.decode():
                raise Violation(f"run {run.run_id} has another checkpoint than that of its result: {checkpoint}")

    def state(self):
        files = frozenset(self.files().items())
        processes = tuple(process.position() for process in self.processes)
        synced = frozenset(self.synced.get(path.stat().st_ino, 0) for path in self.store.root.rglob("*.jsonl"))
        known = tuple(self.left.values()), frozenset(self.begun.items()), frozenset(self.saved), synced
        return hash((files, tuple(self.explorer.rows()), processes, known))

    def check_end(self):
        """Once the leases of dead processes have expired, another sweep finishes what is left, and nothing is damaged."""
        self.now_s += 10 * LEASE_S
        self.store.end_expired()
        last = Process(self, "last", 1)
        while not last.dead:
            last.switch()
        statuses = [self.index.statuses().get(run.run_id) for run in self.runs]
        problems = list(check(self.store, checksums=True))
        curves = [[row["step"] for row in self.store.run(run.run_id).curve()] for run in self.runs]
        if set(statuses) != {"finished"} or problems or any(steps != [1, STEPS] for steps in curves):
            raise Violation(f"at the end: {statuses}, {problems}, curves {curves}")


class Explorer:
    """Visits the states of all worlds with these runs and events."""

    def __init__(self, sweeps, runs, events, *, files):
        self.sweeps = sweeps
        self.runs, self.events, self.pauses_at_files = [tiny_run(seed=seed) for seed in range(runs)], events, files
        self.visited, self.worlds, self.ends = set(), 0, 0

    def explore(self, limit=None):
        """Visit all states, or `limit` of them, in random order. Raises Violation."""
        order = random.Random(0)
        with self._prepared():
            paths = [()]
            while paths and len(self.visited) < (limit or float("inf")):
                path, world = paths.pop(order.randrange(len(paths))), World(self)
                self.worlds += 1
                try:
                    for choice in path[:-1]:
                        world.take(choice, again=True)
                    for choice in path[-1:]:
                        world.take(choice)
                    while (state := world.state()) not in self.visited:
                        self.visited.add(state)
                        choices = world.choices()
                        if not choices:
                            self.ends += 1
                            world.check_end()
                            break
                        paths += [(*path, choice) for choice in choices[1:]]
                        path = (*path, choices[0])
                        world.take(choices[0])
                except Exception as error:
                    raise Violation(f"{error} (after {path})") from error

    def rows(self):
        query = "SELECT run_id, status, attempt, owner, expires_s > ? FROM runs ORDER BY run_id"
        return self.connection.execute(query, (World.current.now_s,)).fetchall()

    def reset(self):
        for table in self.tables:
            self.connection.execute(f"DELETE FROM {table}")
        shutil.rmtree(self.store.root / "runs")
        (self.store.root / "runs").mkdir()

    @contextlib.contextmanager
    def _prepared(self):
        memory = Path("/dev/shm")
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None))
            self.index = Index("sqlite://")
            self.index.mark_built()
            self.store = Store(Path(folder) / "store", index=self.index, create=True)
            self.connection = self.index.database.engine.raw_connection().driver_connection  # the only one
            self.tables = [table.name for table in reversed(metadata.sorted_tables) if table.name != "counters"]
            patch = lambda target, name, new: stack.enter_context(mock.patch.object(target, name, new))  # noqa: E731
            patch(train_run_module(), "TrainingLoop", Loop)
            patch(threading.Thread, "start", lambda self: None)  # `renewed` stands for the thread of a LeaseHolder
            for clock in ("time", "monotonic"):
                patch(time, clock, lambda: 1.0)
            patch(store_artifacts, "CHECK_FENCE_EVERY_S", 0.0)
            patch(tempfile, "_get_candidate_names", lambda: map(str, range(100)))
            patch(store_files.os, "fsync", fsync)
            for name in ("reading", "writing"):
                patch(Database, name, pausing(getattr(Database, name)))
            if self.pauses_at_files:
                read = pausing(store_files.open_regular, lambda path: path.name in ("state.json", "result.json"))
                patch(store_files, "open_regular", read)
                patch(shutil, "rmtree", pausing(shutil.rmtree, lambda path: Path(path).exists()))
                patch(os, "listdir", pausing(os.listdir, lambda path=".": isinstance(path, int)))
                for name in ("replace", "unlink", "rmdir"):
                    patch(Path, name, pausing(getattr(Path, name), lambda path, *_: path.exists()))
            yield


def fsync(descriptor):
    status = os.fstat(descriptor)
    World.current.synced[status.st_ino] = status.st_size


def train_run_module():
    return sys.modules[train_run.__module__]


def main(words):
    """Explore, and print the numbers of states and of ends: `SWEEPS RUNS EVENTS FILES LIMIT` as JSON."""
    sweeps, runs, events, files, limit = (json.loads(word) for word in words)
    explorer = Explorer(sweeps, runs, events, files=files)
    explorer.explore(limit)
    print(json.dumps([len(explorer.visited), explorer.ends]))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
