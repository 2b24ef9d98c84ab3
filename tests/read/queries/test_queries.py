"""What the command line and REST ask, against a store with runs of every kind."""

import json
import shutil
from pathlib import Path

import pytest

from cope_sweep.api.ablations import GetAblation, GetCurves, GetPlan, ListAblations
from cope_sweep.api.figures import ListFigures
from cope_sweep.api.runs import ExportRuns, GetRun, ListRuns
from cope_sweep.api.sweeps import GetSweep, ListSweeps
from cope_sweep.config import SpecError, expand, load_ablation, with_overrides
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.queries.recorded import RecordedAblations
from cope_sweep.store import ParquetStore, Store
from cope_sweep.sweep.sweep import initial_record
from tests.config.test_expand import BASE
from tests.helpers.errors import raises
from tests.helpers.finished_runs import begin, fail, finish, stop
from tests.helpers.sweeps import end, members, sweep_record
from tests.helpers.texts import write_corpus
from tests.helpers.tiny import tiny_run

ABLATIONS = Path(__file__).parents[3] / "ablations"
SWEEP = "20260730-120000-abcd"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ablations").mkdir()
    (tmp_path / "ablations" / "good.yaml").write_text(BASE + "grid: {model.layers: [1, 2, 3]}\nseeds: [0, 1]\n")
    (tmp_path / "ablations" / "bad.yaml").write_text("title: [\n")
    return tmp_path / "ablations"


@pytest.fixture
def queries(folder, tmp_path):
    return Queries(Store(tmp_path / "store", create=True), AblationFiles(folder))


@pytest.fixture
def plan(queries):
    return queries.files.load("good")


@pytest.fixture
def used(queries, plan):
    """One layer: finished, failed. Two layers: stopped, damaged. Three layers: pending. All but the last are in a sweep."""
    store, runs = queries.store, [run for row in plan.rows for run in row.runs]
    finish(store, runs[0], {"in_dist/token_error": 10.0}, {"device": "cpu"})
    fail(store, runs[1])
    stop(store, runs[2])
    finish(store, runs[3], {"in_dist/token_error": 20.0})
    (store.run(runs[3].run_id).path / "result.json").write_text("{")
    end(store, store.run(runs[3].run_id))
    store.write_sweep(sweep_of(plan, runs[:5]))
    return queries


def sweep_of(plan, runs, sweep_id=SWEEP, **changes):
    """The record of an ended sweep of some runs of a plan, of which the first was finished before."""
    fields = {"ablation": plan.name, "started_ms": 5, "versions": {"torch": "2"}, "reused": [runs[0].run_id]}
    return sweep_record(sweep_id, members(plan, runs), **fields | changes)


def ids(plan):
    return [run.run_id for row in plan.rows for run in row.runs]


def test_the_runs_of_each_scale_are_counted(used, folder):
    text = (folder / "good.yaml").read_text()
    scales = "scales: {first: {seeds: [0]}, deep: {grid: {model.layers: [9]}}, own: {description: The same.}}\n"
    (folder / "good.yaml").write_text(text + scales)
    _, good = used.ask(ListAblations())
    assert {scale: (each.runs, each.finished, each.same_runs) for scale, each in good.at_scales.items()} == {
        "first": (3, 1, False),
        "deep": (2, 0, False),
        "own": (6, 1, True),
    }
    (folder / "good.yaml").write_text(text + "scales: {broken: {set: {model.dims: 3}}}\n")
    _, faulty = used.ask(ListAblations())
    assert "dims" in faulty.error


def test_a_page_of_runs_has_their_values_and_places(used, plan):
    page = used.ask(ListRuns(filter=("model.layers>=2",), sort="seed", descending=True))
    assert [run.run_id for run in page.runs] == [ids(plan)[3], ids(plan)[2]]
    assert [run.values for run in page.runs] == [{"model.layers": 2, "seed": 1}, {"model.layers": 2, "seed": 0}]
    assert {run.row for run in page.runs} == {"2"}
    assert page.runs[0].ablations == ["good"]
    assert (page.runs[0].status, page.runs[1].message) == ("interrupted", "stopped at step 3 by asha")
    (found,) = used.ask(ListRuns(filter=("in_dist/token_error<15",))).runs
    assert (found.metrics["in_dist/token_error"], found.values) == (10.0, {"in_dist/token_error": 10.0})


def test_without_ablation_files_the_sweeps_know_where_a_run_is(used, plan):
    run = Queries(used.store).ask(ListRuns(status=("finished",))).runs[0]
    assert (run.ablations, run.row) == (["good"], "1")


def test_runs_of_an_ablation_are_in_plan_order_with_pending_ones(used, plan):
    page = used.ask(ListRuns(limit=4, offset=1, ablation="good"))
    assert page.total == 6
    assert [run.run_id for run in page.runs] == [run.run_id for run in plan.runs][1:5]
    assert used.ask(ListRuns(status=("pending",), ablation="good")).total == 2
    begun = used.ask(ListRuns(sort="model.layers", descending=True, ablation="good"))
    assert begun.total == 4, "runs that were not begun have no values"
    assert [run.values["model.layers"] for run in begun.runs] == [2, 2, 1, 1]


def test_chosen_runs_of_an_ablation_are_in_the_order_chosen_also_in_an_export(used, plan):
    first, second, *_, last = order = [run.run_id for run in plan.runs]
    begun = [run_id for run_id in order if run_id in ids(plan)[:4]]

    def listed(**query):
        return [run.run_id for run in used.ask(ListRuns(**query)).runs]

    def exported(**query):
        return [run["run_id"] for run in json.loads(used.ask(ExportRuns(format="json", **query)))]

    chosen = {"run": [last, second, first[:8]]}
    assert listed(ablation="good", **chosen) == listed(**chosen) == [last, second, first]
    assert exported(**chosen) == [run_id for run_id in (second, first) if run_id in begun], "of those that have started"
    assert listed(ablation="good", run=["0" * 16]) == []
    assert exported(ablation="good") == begun
    assert listed(ablation="good", descending=True) == order[::-1]
    assert listed(ablation="good", sort="run_id") == sorted(begun), "pending ones have no values"
    for question in (ListRuns, ExportRuns):
        with raises("not_found", run_id="zz"):
            used.ask(question(run=["zz"]))


def test_a_run_in_every_state(used, plan):
    finished, failed, stopped, damaged, planned, _ = (used.ask(GetRun(run_id=run_id)) for run_id in ids(plan))
    assert finished.result["metrics"] == finished.metrics
    assert finished.facts == {"device": "cpu"}
    assert [row["step"] for row in finished.curve] == [1, 6, 6]
    assert failed.state["traceback"].startswith("Traceback")
    assert (stopped.step, stopped.metrics) == (3, {})
    assert (damaged.status, damaged.result) == ("interrupted", None)
    assert "result.json" in damaged.message
    assert damaged.spec == finished.spec | {"seed": 1, "model": finished.spec["model"] | {"layers": 2}}
    assert (planned.status, planned.sweeps) == ("pending", [SWEEP])
    assert planned.spec["model"]["layers"] == 3
    with raises("not_found", run_id="../x"):
        used.ask(GetRun(run_id="../x"))
    with raises("not_found", run_id="0123456789abcdef"):
        used.ask(GetRun(run_id="0123456789abcdef"))


def test_to_ask_for_a_run_on_a_text_does_not_tokenise_it(queries, tmp_path, monkeypatch):
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    folder = write_corpus(tmp_path / "text")
    run = tiny_run(task={"kind": "wikitext", "corpus": "x", "folder": str(folder), "tokens": 16, "vocabulary": 300})
    finish(queries.store, run, {"test/loss": 1.0})
    assert queries.ask(GetRun(run_id=run.run_id)).example is None
    assert not (tmp_path / "cache").exists()


def test_sweeps_have_the_present_status_of_their_runs(used, plan):
    runs = [run for row in plan.rows for run in row.runs]
    used.store.write_sweep(sweep_of(plan, runs[:1], "20260731-120000-abcd", started_ms=7, ablation="other"))
    page = used.ask(ListSweeps())
    assert [sweep.sweep_id for sweep in page.sweeps] == ["20260731-120000-abcd", SWEEP]
    assert page.sweeps[1].counts == {"finished": 1, "failed": 1, "stopped": 1, "interrupted": 1, "pending": 1}
    finish(used.store, runs[4], {})
    assert used.ask(ListSweeps(ablation="good")).sweeps[0].counts["finished"] == 2
    assert (used.ask(ListSweeps(limit=1)).total, len(used.ask(ListSweeps(limit=1)).sweeps)) == (2, 1)
    sweep = used.ask(GetSweep(sweep_id=SWEEP))
    assert (sweep.runs, sweep.reused, sweep.versions, sweep.error) == (5, 1, {"torch": "2"}, None)
    assert [(run.status, run.reused) for run in sweep.members[:2]] == [("finished", True), ("failed", False)]


def test_a_running_search_has_the_runs_that_it_has_suggested_so_far(used, plan):
    """Its record gets them at its end."""
    runs = [run for row in plan.rows for run in row.runs]
    record = sweep_of(plan, runs[:1], "20260731-120000-abcd", status="running", ended_ms=None)
    used.store.write_sweep(record)
    added = [each.model_dump() | {"reused": False} for each in members(plan, runs[1:3])]
    used.store.index.append_members(record.sweep_id, added)
    found = used.ask(GetSweep(sweep_id=record.sweep_id))
    assert [(each.run_id, each.status) for each in found.members] == [
        (runs[0].run_id, "finished"),
        (runs[1].run_id, "failed"),
        (runs[2].run_id, "stopped"),
    ]
    assert found.runs == 3


def test_a_sweep_whose_record_is_damaged_has_its_summary(used):
    (used.store.root / "sweeps" / f"{SWEEP}.json").write_text("{}")
    sweep = used.ask(GetSweep(sweep_id=SWEEP))
    assert f"{SWEEP}.json" in sweep.error
    assert (sweep.counts["finished"], sweep.members) == (1, [])
    with raises("not_found", sweep_id="x"):
        used.ask(GetSweep(sweep_id="x"))


def test_the_version_changes_with_the_store_and_with_the_file(used, plan, folder):
    version = used.state
    before = version()
    assert version() == before
    end(used.store, begin(used.store, plan.rows[2].runs[0]))
    changed = version()
    assert changed != before
    (folder / "good.yaml").write_text((folder / "good.yaml").read_text() + "\n# more\n")
    assert version() != changed


def test_a_file_is_read_again_when_one_that_it_inherits_from_changes(folder):
    files = AblationFiles(folder)
    (folder / "heir.yaml").write_text("title: Heir\ninherit: good\n")
    before = files.load("heir")
    assert files.load("heir") is before
    text = (folder / "good.yaml").read_text()
    (folder / "good.yaml").write_text(text.replace("[1, 2, 3]", "[1, 2, 3, 4]"))
    assert len(files.load("heir").rows) == 4
    (folder / "good.yaml").write_text("title: [\n")
    with raises("invalid_yaml", heir=f"{folder / 'heir.yaml'}:2"):
        files.load("heir")
    (folder / "good.yaml").write_text(text)
    assert len(files.load("heir").rows) == 3
    (folder / "good.yaml").unlink()
    with raises("no_such_file", file=str(folder / "good.yaml")):
        files.load("heir")


def test_a_store_that_appears_later_is_found(queries, plan, tmp_path):
    later = Queries(Store(tmp_path / "later"), queries.files)
    assert later.ask(ListRuns()).total == 0
    store = Store(tmp_path / "later", create=True)
    finish(store, plan.runs[0], {})
    assert later.ask(ListRuns()).total == 1


def test_the_error_of_a_faulty_file_is_a_new_one_each_time(tmp_path):
    """Threads that raise the same object would add their frames and contexts to it."""
    (tmp_path / "faulty.yaml").write_text("title: 1, 2\ngrid: 3\n")
    files = AblationFiles(tmp_path)
    raised = []
    for _ in range(2):
        with pytest.raises(SpecError) as error:
            files.load("faulty")
        raised.append(error.value)
    assert raised[0] is not raised[1]
    assert str(raised[0]) == str(raised[1])
    assert (raised[0].code, raised[0].data) == (raised[1].code, raised[1].data)


def test_a_store_knows_the_ablations_of_its_sweeps(used, folder, plan):
    (folder / "parent.yaml").write_text((folder / "good.yaml").read_text())
    (folder / "child.yaml").write_text("title: A child\ninherit: parent\nscales: {small: {seeds: [7]}}\n")
    child = load_ablation(folder / "child.yaml")
    files, text = [folder / f"{name}.yaml" for name in ("child", "parent")], "its file"
    record = initial_record(
        expand(with_overrides(child, scale="small", assignments=["train.steps=9"])), [], "ray", text
    )
    used.store.write_sweep(record.model_copy(update={"status": "finished", "runs": [], "ablation": "elsewhere"}))
    for file in files:
        file.unlink()

    assert used.load("elsewhere").runs == expand(child).runs, "the ablation's own size, without --set"
    assert [run.seed for run in used.load("elsewhere", "small").runs] == [7, 7, 7]
    detail = used.ask(GetAblation(name="elsewhere"))
    assert (detail.text, detail.recorded_by, detail.finished) == (text, record.sweep_id, 1)
    assert detail.primary == detail.metrics[0].name == "in_dist/token_error"
    names = {each.name: (each.recorded_by, each.error) for each in used.ask(ListAblations()) if each.name != "bad"}
    assert names == {"good": (None, None), "elsewhere": (record.sweep_id, None)}
    assert used.ask(ListRuns(ablation="elsewhere")).total == len(plan.runs)
    with raises("unknown_scale", ablation="elsewhere", scale="big"):
        used.load("elsewhere", "big")
    (folder / "elsewhere.yaml").write_text(BASE)
    assert [run.seed for run in used.load("elsewhere").runs] == [0], "a file comes first"
    assert used.ask(GetAblation(name="elsewhere")).recorded_by is None


def test_a_service_imports_no_plugin_that_a_store_names(used, folder):
    child = load_ablation(folder / "good.yaml")
    record = initial_record(expand(child), [], "ray", "").model_copy(update={"ablation": "elsewhere", "runs": []})
    record = record.model_copy(update={"data": {**record.data, "plugins": ["no_such_module"]}})
    used.store.write_sweep(record)
    assert used.load("elsewhere").runs == expand(child).runs
    with raises("plugin_not_loaded", plugin="no_such_module"):
        RecordedAblations(may_import=True).find(used.store, "elsewhere")


def test_a_run_is_named_by_the_row_whose_best_it_is(used, plan):
    best = plan.rows[0].runs[1]
    finish(used.store, best, {"in_dist/token_error": 5.0})
    assert used.run_id("good/1") == used.run_id("good/layers=1") == best.run_id
    assert used.ask(GetRun(run_id="good/1")).run_id == best.run_id
    with raises("not_found", ablation="good", row="9", allowed=["1", "2", "3"]):
        used.run_id("good/9")
    with raises("not_finished", ablation="good", row="3"):
        used.run_id("good/3")


def test_without_a_scale_every_question_is_about_the_only_scale_of_a_folder_of_results(tmp_path):
    (ablations := tmp_path / "ablations").mkdir()
    shutil.copy(ABLATIONS / "selective_copy.yaml", ablations)
    (results := tmp_path / "results").mkdir()
    for path in (ABLATIONS / "results").glob("selective_copy.small.*"):
        shutil.copy(path, results)
    queries = Queries(ParquetStore(results), AblationFiles(ablations))
    for question in (GetAblation, GetCurves, GetPlan, ListFigures):
        answers = [queries.ask(question(name="selective_copy", scale=scale)) for scale in (None, "small")]
        assert answers[0] == answers[1], question
    runs = queries.ask(ListRuns(ablation="selective_copy")).runs
    assert {run.status for run in runs} == {"finished"}
    assert queries.run_id("selective_copy/CoPE") in {run.run_id for run in runs}
    (listed,) = queries.ask(ListAblations())
    assert (listed.finished, listed.at_scales["small"].finished) == (0, len(runs)), "the list counts each scale"
