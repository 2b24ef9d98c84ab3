"""Random sequences of leases, attempts, losses and rebuilds by three processes, against a model of what may happen.

Two processes are of one sweep. Each may be paused at any time, as the others act meanwhile, and the clock jumps. What an
attempt writes has its number in it, so that a file of another attempt is noticed.
"""

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from cope_sweep.store.index.owners import owner_name
from cope_sweep.store.rebuild import check, mark_lost, rebuild
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import Float, literal

from cope_sweep.store import Lease, Refusal, RunFolder, Store
from cope_sweep.store.errors import FencedError
from cope_sweep.store.reading import read_run
from tests.store.index.rows import row
from tests.tiny import tiny_run

OWNERS = ("a@other/machine-1:1:1", "a@other/machine-2:1:1", "b@other/machine-3:1:1")
RUNS = tuple(tiny_run(seed=seed) for seed in range(2))
LEASE_S = 30.0
PHASES = (Phase.generate, Phase.shrink)  # to explain a failure takes minutes


@dataclass
class Attempt:
    """An attempt of a process, until it ends."""

    number: int
    folder: RunFolder | None = None
    """None: it has its lease, and has not begun."""
    step: int = 0
    finished: bool = False


@dataclass
class Expected:
    """What the store has to say about a run."""

    status: str | None = None
    """In the index; None: the run is not there."""
    leases: int = 0
    """The last number that the index has given to an attempt."""
    owner: str | None = None
    expires_s: float = 0.0
    begun: int = 0
    """The last attempt by the run's files."""
    in_files: str | None = None
    result_of: int = 0
    """The attempt that has finished it."""
    curve: tuple = ()
    saved: tuple | None = None
    """The curve of the resume file."""


class Protocol(RuleBasedStateMachine):
    def __init__(self, index):
        super().__init__()
        memory = Path("/dev/shm")
        self.store = Store(tempfile.mkdtemp(dir=memory if memory.is_dir() else None), index=index, create=True)
        self.index, self.now_s = index, 1e9
        index.delete(index.statuses())
        index.mark_built()
        index.database.now_s = lambda: literal(self.now_s, Float)
        self.runs = {run.run_id: Expected() for run in RUNS}
        self.attempts = {}
        self.stopped = set()

    def teardown(self):
        for name in self.stopped:
            self.index.forget_stops(name)
        shutil.rmtree(self.store.root)

    def is_live(self, run):
        return run.owner is not None and run.expires_s > self.now_s

    @invariant()
    def the_store_is_as_expected(self):
        shown = {
            run_id: ("running" if self.is_live(run) else "interrupted") if run.owner else run.status
            for run_id, run in self.runs.items()
            if run.status is not None
        }
        assert self.index.statuses() == shown
        for run_id, run in self.runs.items():
            folder = self.store.run(run_id)
            assert folder.status == (run.in_files or "pending")
            assert tuple(tuple(row.values()) for row in folder.curve()) == run.curve
            if run.in_files == "finished":
                assert folder.result["metrics"] == {"attempt": run.result_of}
                assert (folder.checkpoint / "config.json").read_text() == str(run.result_of)

    # -- processes -----------------------------------------------------------------------------------------------------

    @rule(run=st.sampled_from(RUNS), owner=st.sampled_from(OWNERS))
    def acquire(self, run, owner):
        expected = self.runs[run.run_id]
        if (run, owner) in self.attempts:
            return
        answer = self.index.acquire(row(run, "running"), owner, LEASE_S)
        others = expected.owner is not None and owner_name(expected.owner) != owner_name(owner)
        if owner_name(owner) in self.stopped:
            assert answer == Refusal("stopped")
        elif expected.status == "finished" and expected.owner is None:
            assert answer.reason == "finished"
        elif others and self.is_live(expected):
            assert answer == Refusal("leased")
        else:
            expected.leases += 1
            assert answer == Lease(run.run_id, expected.leases)
            expected.status, expected.owner, expected.expires_s = "running", owner, self.now_s + LEASE_S
            self.attempts[run, owner] = Attempt(expected.leases)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def go_on(self, data):
        """A process begins its attempt, or takes its next step."""
        run, owner = data.draw(st.sampled_from(sorted(self.attempts, key=str)))
        attempt, expected = self.attempts[run, owner], self.runs[run.run_id]
        if attempt.finished:
            return self.end(run, owner)
        may = attempt.number > expected.begun if attempt.folder is None else attempt.number == expected.begun
        what = data.draw(st.sampled_from(["log", "log", "save", "finish"])) if attempt.folder else "begin"
        if may and not (what == "begin" and expected.in_files == "finished"):
            return getattr(self, what)(run, attempt, expected)
        if may:  # it sees the result after it has written its number
            expected.begun = attempt.number
        with pytest.raises(FencedError):
            getattr(self, what)(run, attempt, Expected())
        return self.end(run, owner)

    def begin(self, run, attempt, expected):
        folder = self.store.run(run.run_id).begin(run, "here", attempt.number)
        saved = json.loads(folder.resume.read_text()) if folder.resume.exists() else None
        folder.rewind(saved["step"] if saved else 0, saved["mark"] if saved else None)
        attempt.folder, attempt.step = folder, saved["step"] if saved else 0
        expected.begun, expected.in_files, expected.curve = attempt.number, "running", expected.saved or ()

    def log(self, run, attempt, expected):
        attempt.step += 1
        attempt.folder.log({"step": attempt.step, "attempt": attempt.number})
        expected.curve += ((attempt.step, attempt.number),)

    def save(self, run, attempt, expected):
        with attempt.folder.writing_resume() as path:
            path.write_text(json.dumps({"step": attempt.step, "mark": attempt.folder.curve_mark()}))
        expected.saved = expected.curve if attempt.step else None

    def finish(self, run, attempt, expected):
        with attempt.folder.writing_checkpoint() as path:
            (path / "config.json").write_text(str(attempt.number))
        attempt.folder.finish({"attempt": float(attempt.number)}, {})
        attempt.finished = True
        expected.in_files, expected.result_of, expected.saved = "finished", attempt.number, None

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def end_one(self, data):
        self.end(*data.draw(st.sampled_from(sorted(self.attempts, key=str))))

    def end(self, run, owner):
        """As `LeaseHolder.end` does."""
        del self.attempts[run, owner]
        expected = self.runs[run.run_id]
        files = read_run(self.store.run(run.run_id))
        if files is None:
            self.index.delete([run.run_id], owner=owner)
        else:
            assert self.index.end(files, owner) == (expected.owner == owner)
        if expected.owner == owner:
            self.settle(expected)

    def settle(self, expected):
        """The index learns what the files say."""
        expected.owner = None
        expected.status = "interrupted" if expected.in_files == "running" else expected.in_files
        expected.leases = max(expected.leases, expected.begun) if expected.status else 0

    @rule(owner=st.sampled_from(OWNERS))
    def renew(self, owner):
        held = {run_id for run_id, run in self.runs.items() if run.owner == owner}
        assert self.index.renew(owner, LEASE_S)[0] == held
        for run_id in held:
            self.runs[run_id].expires_s = self.now_s + LEASE_S

    # -- everything else -----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0, 3600.0, -20.0, -3600.0]))
    def the_clock_jumps(self, seconds):
        self.now_s += seconds

    @rule()
    def a_sweep_begins(self):
        ended = {run_id for run_id, run in self.runs.items() if run.owner and run.in_files and not self.is_live(run)}
        assert set(self.store.end_expired()) == ended
        for run_id in ended:
            self.settle(self.runs[run_id])

    @rule(name=st.sampled_from(["a", "b"]), again=st.booleans())
    def stop(self, name, again):
        if again:
            self.index.forget_stops(name)
            self.stopped.discard(name)
        else:
            self.index.request_stop(name)
            self.stopped.add(name)

    @rule()
    def make_the_index_again(self):
        rebuild(self.store)
        for expected in self.runs.values():
            if not self.is_live(expected):
                self.settle(expected)
        assert list(check(self.store, checksums=True)) == []

    @rule(run=st.sampled_from(RUNS))
    def lose_the_checkpoint(self, run):
        expected = self.runs[run.run_id]
        if expected.status == "finished" and expected.owner is None:
            shutil.rmtree(self.store.run(run.run_id).checkpoint)
            assert set(mark_lost(self.store, self.runs)) == {run.run_id}
            expected.in_files = expected.status = "damaged"

    @rule(run=st.sampled_from(RUNS))
    def delete(self, run):
        """As `prune --orphans` does; its processes have ended."""
        expected = self.runs[run.run_id]
        if not self.is_live(expected) and not any(key[0] == run for key in self.attempts):
            shutil.rmtree(self.store.run(run.run_id).path, ignore_errors=True)
            self.index.delete([run.run_id])
            self.runs[run.run_id] = Expected()


@pytest.fixture
def examine(index):
    return functools.partial(run_state_machine_as_test, lambda: Protocol(index))


def test_a_few_sequences(examine):
    examine(settings=settings(max_examples=10, stateful_step_count=25, phases=PHASES))


@pytest.mark.thorough
def test_many_sequences(examine):
    examine(settings=settings(max_examples=150, stateful_step_count=50, phases=PHASES))
