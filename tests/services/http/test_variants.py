"""Runs that were trained with other values: `?set=` wherever a command has `--set`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cope_sweep.client import Client
from cope_sweep.config import Plan, expand, load_ablation, with_overrides
from tests.helpers.finished_runs import finish
from tests.helpers.sample_store import API, SampleStore, serving
from tests.helpers.sweeps import end_sweep, write_sweep

SETS = ["train.steps=5", "seeds=[0, 7]"]


@pytest.fixture(scope="module")
def varied(sample: SampleStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[SampleStore, Plan]:
    """A copy of the sample store, in which a sweep has trained its ablation with other values."""
    copy = sample.copy_to(tmp_path_factory.mktemp("varied") / "copy")
    loaded = load_ablation(copy.ablations / f"{copy.plan.name}.yaml")
    plan = expand(with_overrides(loaded, assignments=[*SETS, "resources.cpus=1"]))
    end_sweep(copy.store, write_sweep(copy.store, plan, sets=[*SETS, "resources.cpus=1"]))
    for run in plan.runs:
        finish(copy.store, run, {metric.name: 10.0 for metric in plan.ablation.content.metrics})
    return copy, plan


@pytest.fixture(scope="module")
def client(varied: tuple[SampleStore, Plan]) -> Iterator[httpx.Client]:
    with serving(varied[0].settings()) as client:
        yield client


def test_an_ablation_lists_its_variants(client: httpx.Client, varied: tuple[SampleStore, Plan]) -> None:
    _, plan = varied
    (entry,) = [each for each in client.get(f"{API}/ablations").json() if each["name"] == plan.name]
    (variant,) = entry["variants"]
    assert (variant["scale"], variant["sets"]) == (None, SETS)
    assert variant["runs"] == variant["finished"] == len(plan.runs)
    assert client.get(f"{API}/ablations/{plan.name}").json()["variants"] == entry["variants"]


@pytest.mark.parametrize("path", ["", "/table", "/plan", "/curves", "/figures", "/report", "/figures/summary"])
def test_set_chooses_them(path: str, client: httpx.Client, varied: tuple[SampleStore, Plan]) -> None:
    _, plan = varied
    url = f"{API}/ablations/{plan.name}{path}"
    chosen = client.get(url, params={"set": SETS})
    assert chosen.status_code == 200
    plain = client.get(url)
    if path != "/plan":  # it has no ETag
        assert chosen.headers["etag"] != plain.headers["etag"]
    assert chosen.content != plain.content
    for sets in (
        ["trian.steps=5"],
        ["train.steps"],
        ["seeds=[0"],
        ["x" * 10_001],
        ["seeds=1"] * 101,
        ["a=" + "[" * 5000],
    ):
        assert client.get(url, params={"set": sets}).status_code == 422


def test_the_runs_are_those_of_the_values(client: httpx.Client, varied: tuple[SampleStore, Plan]) -> None:
    _, plan = varied
    page = client.get(f"{API}/runs", params={"ablation": plan.name, "set": SETS}).json()
    assert [run["run_id"] for run in page["runs"]] == [run.run_id for run in plan.runs]
    assert {run["status"] for run in page["runs"]} == {"finished"}
    plain = client.get(f"{API}/runs", params={"ablation": plan.name}).json()
    assert plain["runs"] != page["runs"]
    refused = client.get(f"{API}/runs", params={"set": SETS})
    assert (refused.status_code, refused.json()["code"]) == (422, "set_of_no_ablation")


@pytest.mark.parametrize(
    "value", ["task={kind: text, files: [/etc/passwd]}", "task={kind: language, tokenizer: /etc/passwd}"]
)
def test_a_client_names_no_path(
    value: str, client: httpx.Client, varied: tuple[SampleStore, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    own_open = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **more: (opened.append(str(path)), own_open(path, *rest, **more))[1]
    )
    name = varied[1].name
    for path in ("", "/table", "/plan"):
        assert client.get(f"{API}/ablations/{name}{path}", params={"set": [value]}).status_code == 422
    assert client.get(f"{API}/runs", params={"ablation": name, "set": [value]}).status_code == 422
    assert "/etc/passwd" not in opened


def test_a_folder_of_results_has_no_other_values(client: httpx.Client, varied: tuple[SampleStore, Plan]) -> None:
    answer = client.get(f"{API}/ablations/{varied[1].name}/table", params={"set": SETS, "committed": True})
    assert (answer.status_code, answer.json()["code"]) == (422, "conflicting_options")


def test_differences_of_rows(client: httpx.Client, varied: tuple[SampleStore, Plan]) -> None:
    _, plan = varied
    first, second = (f"{plan.name}/{row.name}" for row in plan.rows[:2])
    ids = [{run.run_id for run in row.runs} for row in plan.rows[:2]]
    answer = client.get(f"{API}/diff", params={"left": first, "right": second, "set": SETS})
    assert answer.status_code == 200
    assert answer.json()["left"] in ids[0]
    assert answer.json()["right"] in ids[1]
    with Client(str(client.base_url)) as own:
        assert own.diff(first, second, set=SETS).model_dump(mode="json") == answer.json()
    refused = client.get(
        f"{API}/diff", params={"left": answer.json()["left"], "right": answer.json()["right"], "set": SETS}
    )
    assert (refused.status_code, refused.json()["code"]) == (422, "set_of_no_ablation")
    assert client.get(f"{API}/diff", params={"left": first, "right": second, "set": "trian.steps=5"}).status_code == 422
