"""The composition of deploy/compose.yaml, run without containers: a sweep through all of its parts, a restart, a backup."""

import hashlib
import json
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cope_sweep.config import expand, load_ablation
from cope_sweep.store.index import Index
from tests.deploy.composition import BUCKET, TOKEN, Composition
from tests.sweep.runs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TINY = """\
title: Tiny
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: 6, batch: 4}
  evaluate: {every: 3, sequences: 8, final_sequences: 8}
grid:
  model.position: {CoPE: [cope], none: []}
metrics: [{name: in_dist/token_error, label: In-dist.}]
resources: {groups: 1, device: cpu}
"""


@pytest.fixture(scope="module")
def composition(tmp_path_factory):
    ablations = tmp_path_factory.mktemp("ablations")
    (ablations / "tiny.yaml").write_text(TINY)
    # Ray's sockets are below this folder, and the path of a socket may have 107 bytes at most.
    made = Composition(Path(tempfile.mkdtemp(prefix="cd", dir="/tmp")), ablations)
    try:
        made.start()
        yield made
    finally:
        made.remove()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120) as response:
        return response.read()


def post(url, body, **headers):
    headers = {"Content-Type": "application/json"} | headers
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def state(composition):
    """What the parts hold: the table and checkpoints over REST, MLflow's runs, the objects of the store."""
    api, mlflow = composition.url("service:8000") + "/api/v1", composition.url("mlflow:5000") + "/api/2.0/mlflow"
    experiments = post(f"{mlflow}/experiments/search", {"max_results": 100})["experiments"]
    runs = post(f"{mlflow}/runs/search", {"experiment_ids": [each["experiment_id"] for each in experiments]})["runs"]
    checkpoints, key = {}, {"Authorization": f"Bearer {composition.key}"}
    for run_id in run_ids(composition):
        files = json.loads(get(f"{api}/runs/{run_id}/checkpoint", **key))["files"]
        for each in files:
            content = get(f"{api}/runs/{run_id}/checkpoint/{each['name']}", **key)
            assert hashlib.sha256(content).hexdigest() == each["sha256"]
            checkpoints[run_id, each["name"]] = content
    return {
        "table": json.loads(get(f"{api}/ablations/tiny/table?format=json", **key)),
        "checkpoints": checkpoints,
        "mlflow": sorted((each["info"]["run_name"], each["info"]["status"]) for each in runs),
        "objects": {
            each["Key"]: each["Size"]
            for each in composition.client().list_objects_v2(Bucket=BUCKET, Prefix="store/runs/")["Contents"]
        },
    }


def run_ids(composition):
    return [run.run_id for run in expand(load_ablation(composition.ablations / "tiny.yaml")).runs]


@pytest.fixture(scope="module")
def swept(composition):
    """The state after a sweep, submitted from outside as a Ray job."""
    output = composition.submit_job(["cope-sweep", "run", "tiny"])
    assert "succeeded" in output.lower()
    return state(composition)


def test_a_job_leaves_its_results_in_every_part(composition, swept):
    ids = run_ids(composition)
    rows = [(row["row"], row["runs"][0]["run_id"], row["runs"][0]["status"]) for row in swept["table"]["rows"]]
    assert rows == [("CoPE", ids[0], "finished"), ("none", ids[1], "finished")]
    for run_id in ids:
        weights = swept["checkpoints"][run_id, "model.safetensors"]
        stored = composition.client().get_object(Bucket=BUCKET, Key=f"store/runs/{run_id}/checkpoint/model.safetensors")
        assert stored["Body"].read() == weights
    # a run for the sweep, and one for each training
    assert [status for _, status in swept["mlflow"]] == ["FINISHED"] * (1 + len(ids))


def test_ray_refuses_requests_without_the_token(composition, swept):
    version = composition.url("ray-head:8265") + "/api/jobs/"
    assert json.loads(get(version, Authorization=f"Bearer {TOKEN}"))
    for headers in ({}, {"Authorization": f"Bearer {'b' * 64}"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(version, **headers)
        assert refused.value.code in (401, 403)


def test_the_service_refuses_requests_without_a_key(composition):
    metrics = composition.url("service:8000") + "/metrics"
    assert b"# HELP" in get(metrics, Authorization=f"Bearer {composition.key}")
    for headers in ({}, {"Authorization": "Bearer cope_wrong"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(metrics, **headers)
        assert refused.value.code == 401


def test_no_secret_is_in_a_command_line(composition, swept):
    import psutil

    from tests.deploy.composition import PASSWORD

    lines = []
    for process in composition.processes.values():
        parent = psutil.Process(process.pid)
        lines += [" ".join(each.cmdline()) for each in [parent, *parent.children(recursive=True)]]
    assert any("mlflow" in line for line in lines)
    assert not [line for line in lines if PASSWORD in line or TOKEN in line or composition.key in line]


def test_the_index_is_dumped_restored_and_rebuilt(composition, swept, tmp_path):
    def index(database):
        opened = Index(composition.postgres_url(database))
        try:
            return opened.records(run_ids(composition))
        finally:
            opened.close()

    before = index("cope_sweep")
    assert before.keys() == set(run_ids(composition))
    dump = tmp_path / "index.dump"
    composition.psql("pg_dump", "--format=custom", f"--file={dump}", composition.postgres_url("cope_sweep"))
    for name in ("restored", "rebuilt"):
        composition.psql("psql", composition.postgres_url("postgres"), "-q", "-c", f"CREATE DATABASE {name}")
    composition.psql("pg_restore", "--exit-on-error", f"--dbname={composition.postgres_url('restored')}", str(dump))
    assert index("restored") == before
    rebuilt = composition.postgres_url("rebuilt")
    composition.run("service", ["cope-sweep", "store", "rebuild", "--index", rebuilt])
    composition.run("service", ["cope-sweep", "store", "check", "--checksums", "--index", rebuilt])
    assert index("rebuilt").keys() == before.keys()


def test_everything_is_there_after_a_restart(composition, swept):
    composition.stop()
    assert not composition.processes
    composition.start()
    assert state(composition) == swept

    # And it works: the service submits a sweep to Ray. One of the two seeds is finished already.
    api, key = composition.url("service:8000") + "/api/v1", {"Authorization": f"Bearer {composition.key}"}
    sweep = post(f"{api}/sweeps", {"ablation": "tiny", "set": ["train.steps=6", "seeds=[0,1]"]}, **key)

    def ended():
        return json.loads(get(f"{api}/sweeps/{sweep['sweep_id']}", **key))["status"] not in ("pending", "running")

    wait_until(ended)
    found = json.loads(get(f"{api}/sweeps/{sweep['sweep_id']}", **key))
    assert found["status"] == "finished", composition.log("ray-head")[-2000:]
    assert len(json.loads(get(f"{api}/runs?status=finished", **key))["runs"]) == 4
