"""Sweeps over REST, with the service as a process and a real Ray cluster: submitted, followed, stopped and retried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cope_sweep.client import Client
from cope_sweep.store import Store, SweepProgress
from tests.helpers.processes import until
from tests.helpers.ray_heads import started_head
from tests.helpers.sample_store import TINY, ServedFolders, server_process
from tests.sweep.conftest import ray_environment  # noqa: F401 - a fixture

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

TOKEN = "c" * 64
LONG_STEPS = 6000
MINE = {
    "title": "One short and one long run",
    "inherit": "tiny",
    "base": {"train": {"steps": 12}, "evaluate": {"every": 1_000_000}},
    "grid": {"model.position": None, "train.steps": {"Short": 12, "Long": LONG_STEPS}},
    "seeds": [0],
    "resources": {"groups": 1, "device": "cpu", "checkpoint_every_s": 0.2},
}


@pytest.fixture(scope="module")
def service(ray_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:  # noqa: F811
    """The address and the store of a service that has a cluster."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "ablations").mkdir()
    (folder / "ablations" / "tiny.yaml").write_text(TINY)
    with started_head(ray_environment, token=TOKEN) as address:
        served = ServedFolders(folder).environment(
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN, COPE_SWEEP_RAY_ADDRESS=address
        )
        with (folder / "log").open("w") as log, server_process(ray_environment | served, log) as (_, url):
            yield url, folder / "store"
        assert TOKEN not in (folder / "log").read_text()


def test_submitted_followed_stopped_and_retried(service: tuple[str, Path]) -> None:
    url, folder = service
    with Client(url, timeout_s=300) as client:
        sweep = client.submit(name="mine", spec=MINE)
        again = client.submit(name="mine", spec=MINE, sweep_id=sweep.sweep_id)
        assert again.sweep_id == sweep.sweep_id
        seen: list[SweepProgress] = []
        stopped = False
        for progress in client.events(sweep.sweep_id):
            seen.append(progress)
            # The node is known with the run's first heartbeat, which a fast machine does not wait for.
            training = (progress.counts.get("running"), progress.groups) == (1, 1)
            if training and progress.counts.get("finished") == 1 and not stopped:
                stopped = True
                # The long run has been begun: it can write a checkpoint.
                (long,) = [each for each in client.sweep(sweep.sweep_id).members if each.status == "running"]
                until(lambda run_id=long.run_id: bool(Store(folder).run(run_id).curve()))
                assert client.stop(sweep.sweep_id).stop_requested
        assert seen[0].status in ("pending", "running")
        assert stopped, seen
        assert (seen[-1].status, seen[-1].counts) == ("interrupted", {"finished": 1, "interrupted": 1})
        assert client.sweep(sweep.sweep_id).notes == ["stopped: a stop was requested"]
        state = Store(folder).run(long.run_id).state
        assert state["status"] == "interrupted"

        again = client.retry(sweep.sweep_id)
        assert (again.retry_of, again.sweep_id != sweep.sweep_id) == (sweep.sweep_id, True)
        *_, end = client.events(again.sweep_id)
        assert (end.status, end.counts, end.failures) == ("finished", {"finished": 2}, [])
        result = Store(folder).run(long.run_id).result
        assert 0 < result["facts"]["resumed_from_step"] < LONG_STEPS
        members = {each.row: each.status for each in client.sweep(again.sweep_id).members}
        assert members == {"Short": "finished", "Long": "finished"}
