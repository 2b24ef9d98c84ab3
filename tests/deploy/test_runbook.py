"""deploy/README.md: the tests that it names exist; and one of them. Commands and links: tests/test_docs.py."""

import re
import threading
from pathlib import Path

import pytest

from cope_sweep.config import Resources
from cope_sweep.store import Store
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.ray_executor import run_on_ray
from tests.helpers import s3
from tests.helpers.errors import raises
from tests.helpers.processes import free_port
from tests.helpers.sweep_runs import train_by
from tests.helpers.tiny import tiny_run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "README.md").read_text()


def rows(heading):
    """The rows of the table below a heading, without its header."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_named_tests_exist():
    names = set(re.findall(r"\btest_\w+\.py", TEXT))
    assert names
    assert names <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT):
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), (path, name)


@pytest.mark.parametrize("row", [*rows("When a part dies"), *rows("Security")], ids=lambda row: row[0][:50])
def test_every_statement_names_what_checks_it(row):
    """The other cells are what happens and what to do, or what enforces it."""
    assert len(row) in (3, 4)
    assert re.search(r"`[\w/]+\.py(::\w+)?`|not tested", row[-1]), row
    if len(row) == 3:
        for name in re.findall(r"`(?:[\w./-]*/)?([\w.-]+\.(?:py|yaml|sh|txt)|Caddyfile|Dockerfile)`", row[1]):
            assert any(ROOT.rglob(name)), name


@pytest.fixture
def object_store(monkeypatch):
    """A function that starts an S3-compatible server, always at one address, and returns it. It keeps its objects."""
    port, started = free_port(), []

    def start():
        started.append(s3.start_server(port))
        s3.set_environment(monkeypatch, started[-1])
        return started[-1]

    yield start
    started[-1].stop()


@pytest.fixture
def train(object_store, tmp_path, monkeypatch):
    """A function that trains a run of a store, whose server dies once, when it trains. Returns store and events.

    pyarrow repeats requests for 6 s: after 8 s, the store may be back when the run ends.
    """
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    server, away = object_store(), []
    url, index = f"s3://{s3.make_bucket()}/store", f"sqlite:///{tmp_path / 'index.db'}"

    def train(executor, sweep_id, away_s):
        store, seen = Store(url, index=index, create=True), []

        def see(event):
            seen.append(event)
            if event.step >= 1 and not away:
                away.append(threading.Timer(away_s, object_store))
                server.stop()
                away[0].start()

        try:
            train_by(executor, [RUN], store, RESOURCES, sweep_id=sweep_id, on_event=see)
        finally:
            assert any(event.step >= 1 for event in seen)
            assert "failed" not in {event.status for event in seen}
            away[0].join()
        return store

    return train


RUN = tiny_run(**{"train.steps": 1000, "evaluate.every": 500})
RESOURCES = Resources(device="cpu", groups=1, checkpoint_every_s=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("executor", [run_local, pytest.param(run_on_ray, marks=pytest.mark.thorough)])
def test_sweeps_wait_for_the_object_store_and_go_on(train, executor, tmp_path, monkeypatch):
    store = train(executor, "first", away_s=8.0)
    assert store.index.statuses() == {RUN.run_id: "finished"}
    assert store.run(RUN.run_id).state["attempt"] == 1
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "another machine"))
    assert Store(store.location).run(RUN.run_id).fetch_checkpoint().is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize(("executor", "away_s"), [(run_local, 20.0), (run_local, 8.0), (run_on_ray, 75.0)])
def test_the_object_store_dies_and_comes_back(train, monkeypatch, executor, away_s):
    """A sweep that has waited for long ends with the reason, and the same command continues its run."""
    if executor is run_local:
        monkeypatch.setattr("cope_sweep.store.store.OUTAGE_S", 0.0)
    with raises("unreachable_store"):
        train(executor, "first", away_s)
    store = train(executor, "second", away_s)
    assert store.index.statuses() == {RUN.run_id: "finished"}
    assert store.run(RUN.run_id).state["attempt"] == 2
    assert store.run(RUN.run_id).fetch_checkpoint().is_dir()
