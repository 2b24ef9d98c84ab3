"""What deploy/README.md says about the death of a part: each statement names a test, and one is here."""

import os
import re
import urllib.request
from pathlib import Path

import pytest

from cope_sweep.config import Resources
from cope_sweep.store import Store, StoreError
from cope_sweep.sweep.executor import Workload, run_local
from tests.sweep.ports import free_port
from tests.tiny import tiny_run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "README.md").read_text()


def rows(heading):
    """The rows of the table below a heading, without its header."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


@pytest.mark.parametrize("row", rows("When a part dies"), ids=lambda row: row[0])
def test_the_checks_of_the_runbook_exist(row):
    assert len(row) == 4
    checks = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[3])
    assert checks or "not tested" in row[3], row
    for path, name in checks:
        text = (ROOT / "tests" / path).read_text()
        assert f"\ndef {name}(" in text if name else text, (path, name)


@pytest.mark.parametrize("row", rows("Security"), ids=lambda row: row[0][:50])
def test_every_statement_about_security_names_what_enforces_and_what_checks_it(row):
    assert len(row) == 3
    for path in re.findall(r"`([\w./-]+\.(?:py|yaml|sh|txt))`|`(Caddyfile|Dockerfile)`", row[1]):
        name = next(filter(None, path))
        assert any(ROOT.rglob(Path(name).name)), name
    checks = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[2])
    assert checks or "not tested" in row[2], row
    for path, name in checks:
        text = (ROOT / "tests" / path).read_text()
        assert f"def {name}(" in text if name else text, (path, name)


@pytest.fixture
def object_store(monkeypatch):
    """A function that starts an S3-compatible server, always at one address, and returns it. It keeps its objects."""
    from moto.server import ThreadedMotoServer

    port, started = free_port(), []
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)

    def start():
        started.append(ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False))
        started[-1].start()
        return started[-1]

    yield start
    started[-1].stop()


@pytest.mark.slow
def test_the_object_store_dies_and_comes_back(object_store, tmp_path, monkeypatch):
    """A sweep ends with the reason; the same command continues its run."""
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    server = object_store()
    address = os.environ["AWS_ENDPOINT_URL"]
    urllib.request.urlopen(urllib.request.Request(f"{address}/runbook", method="PUT"))
    store = Store("s3://runbook/store", index=f"sqlite:///{tmp_path / 'index.db'}", create=True)
    run = tiny_run(**{"train.steps": 200})
    resources = Resources(device="cpu")
    seen = []

    def stop_once(event):
        seen.append(event)
        if event.step >= 1 and not any(each.step >= 1 for each in seen[:-1]):
            server.stop()

    with pytest.raises(StoreError, match=r"the store s3://runbook/store: .*NETWORK_CONNECTION"):
        run_local(Workload([run], store, resources, "first", on_event=stop_once))
    assert any(event.step >= 1 for event in seen)

    object_store()
    again = Store("s3://runbook/store", index=f"sqlite:///{tmp_path / 'index.db'}")
    run_local(Workload([run], again, resources, "second", on_event=seen.append))
    assert again.index.statuses() == {run.run_id: "finished"}
    assert store.run(run.run_id).fetch_checkpoint().is_dir()
