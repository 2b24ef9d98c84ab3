"""The contract that every tracker fulfils."""

import dataclasses
import secrets

import pytest

from cope_sweep.tracking.translate import Dataset, Model, Point, TrackingError
from tests.tracking.memory import MemoryTracking
from tests.tracking.trackers import artifacts, client_of, history


@pytest.fixture
def name():
    """A name that is unique in a shared tracker."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def run(tracking, name):
    return tracking.create(name, "CoPE · seed 0", tags={"key": name, "other": "1"}, started_ms=1000, note="Why.")


def looked_up(tracking, name):
    found = tracking.find({"key": name})
    assert found is not None
    return found


def test_a_run_is_found_by_all_its_tags_in_any_experiment(tracking, run, name):
    assert tracking.find({"key": name}).id == run.id
    assert tracking.find({"key": name, "other": "1"}).id == run.id
    assert tracking.find({"key": name, "other": "2"}) is None
    assert tracking.find({"key": f"{name}-not"}) is None
    second = tracking.create(f"{name}-2", "x", tags={"key": f"{name}-2"}, started_ms=1)
    assert tracking.find({"key": f"{name}-2"}).id == second.id
    assert second.experiment != run.experiment


def test_the_oldest_of_several_matching_runs_is_found(tracking, run, name):
    tracking.create(name, "x", tags={"key": name}, started_ms=2000)
    first = tracking.create(name, "x", tags={"key": name}, started_ms=500)
    assert tracking.find({"key": name}).id == first.id


def test_logged_entries_can_be_read(tracking, run, name):
    points = [Point("loss", 1.0 / (step + 1), step, 1000 + step) for step in range(3)]
    tracking.log(run, points=points, params={"model.dim": "8"}, tags={"row": "CoPE", "empty": ""})
    tracking.log(run, tags={"row": "RoPE"})
    for seen in (run, looked_up(tracking, name)):
        assert seen.params == {"model.dim": "8"}
        assert seen.tags["row"] == "RoPE"
        assert seen.latest == {"loss": points[-1]}
        assert seen.status == "running"
    assert history(tracking, run, "loss") == points
    assert history(tracking, run, "none") == []


def test_a_metric_name_may_contain_an_at_sign(tracking, run, name):
    point = Point("test/perplexity@2048", 3.5, 6, 1006)
    tracking.log(run, points=[point, Point("facts/tokens_per_s", 120.5, 6, 1006)])
    for seen in (run, looked_up(tracking, name)):
        assert seen.latest["test/perplexity@2048"] == point
    assert history(tracking, run, "test/perplexity@2048") == [point]


def test_logging_again_changes_nothing(tracking, run, name):
    points = [Point("loss", 2.5, 1, 1001), Point("loss", 1.5, 2, 1002), Point("error", 100 / 3, 2, 1002)]
    for _ in range(2):
        tracking.log(run, points=points, params={"seed": "0"}, tags={"row": "CoPE"})
    assert history(tracking, run, "loss") == points[:2]
    assert history(tracking, run, "error") == points[2:]
    assert looked_up(tracking, name).latest == {"loss": points[1], "error": points[2]}


def test_more_entries_than_one_request_holds(tracking, run):
    points = [Point("loss", float(step), step, 1000 + step) for step in range(2300)]
    tracking.log(
        run, points=points, params={f"p.{i}": str(i) for i in range(150)}, tags={f"t.{i}": "x" for i in range(120)}
    )
    assert history(tracking, run, "loss") == points


def test_a_parameter_cannot_change(tracking, run):
    tracking.log(run, params={"seed": "0"})
    with pytest.raises(TrackingError, match="seed"):
        tracking.log(run, params={"seed": "1"})


@pytest.mark.parametrize("status", ["finished", "failed", "killed"])
def test_an_ended_run_can_run_again(tracking, run, name, status):
    tracking.set_status(run, status, 5000)
    assert run.status == looked_up(tracking, name).status == status
    tracking.set_status(run, "running")
    assert run.status == looked_up(tracking, name).status == "running"


def test_artifacts(tracking, run):
    for _ in range(2):
        tracking.put_text(run, "error.txt", "±\n")
        tracking.put_text(run, "tables/a.md", "| a |")
    assert artifacts(tracking, run) == ["error.txt", "tables"]


def test_a_run_is_read_by_its_id(tracking, run, name):
    assert tracking.get(run.id).tags["key"] == name
    assert tracking.get("0" * 32) is None


TRAIN = Dataset("copy/train", "0123456789abcdef", "train", '{"task": {}}')
TEST = Dataset("copy/in_dist", "0123456789abcdef", "in_dist", '{"task": {}}')


def test_datasets(tracking, run, name):
    tracking.log_datasets(run, [TRAIN])
    for _ in range(2):
        tracking.log_datasets(run, [TRAIN, TEST])
    for seen in (run, looked_up(tracking, name)):
        assert sorted(seen.datasets, key=lambda data: data.name) == [TEST, TRAIN]


def test_a_model_with_its_metrics(tracking, run, name, tmp_path):
    folder = tmp_path / "checkpoint"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    (folder / "deep" / "config.json").write_text("{}")
    tracking.log_datasets(run, [TRAIN, TEST])
    points = [Point("in_dist/loss", 0.5, 6, 1006), Point("train/loss", 0.25, 6, 1006), Point("facts/x", 2.0, 6, 1006)]
    tracking.log(run, points=points[:1])
    model = Model("CoPE, 1.5 seed 0", folder, 6, {"model.dim": "8"}, {"row": "CoPE"}, points)
    for _ in range(2):
        tracking.log(run, model=model)
    assert len(run.models) == 1
    assert looked_up(tracking, name).models == run.models
    assert history(tracking, run, "in_dist/loss") == points[:1]
    if isinstance(tracking, MemoryTracking):
        return
    logged = client_of(tracking.uri).get_logged_model(run.models[0])
    assert (logged.status, logged.source_run_id, logged.name) == ("READY", run.id, "CoPE, 1-5 seed 0")
    assert (logged.params, logged.tags["row"], logged.model_type) == ({"model.dim": "8"}, "CoPE", "cope_sweep")
    assert {(each.key, each.value, each.step, each.dataset_name) for each in logged.metrics} == {
        ("in_dist/loss", 0.5, 6, "copy/in_dist"), ("train/loss", 0.25, 6, "copy/train"), ("facts/x", 2.0, 6, None),
    }  # fmt: skip


def test_a_missing_run_is_an_error(tracking, run):
    ghost = dataclasses.replace(run, id="0" * 32)
    with pytest.raises((TrackingError, KeyError)):
        tracking.log(ghost, points=[Point("loss", 1.0, 1, 1)])
