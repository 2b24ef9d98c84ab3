"""Names that look the same are the same, whether an `é` is one character (NFC) or two (NFD, as macOS writes files)."""

import unicodedata

import pytest

from cope_sweep.api.ablations import ListAblations
from cope_sweep.api.runs import ListRuns
from cope_sweep.api.sweeps import ListSweeps
from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.config.loading import find_ablation
from cope_sweep.config.rows import only_rows
from cope_sweep.read.queries import Queries
from cope_sweep.read.queries.ablations import AblationFiles
from cope_sweep.read.tables.row_names import find_rows
from cope_sweep.store import ParquetStore, Store
from tests.config.test_expand import BASE
from tests.helpers.ablation_texts import error_of
from tests.helpers.errors import raises
from tests.helpers.finished_runs import finish
from tests.helpers.sweeps import write_sweep

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
BOTH = pytest.mark.parametrize(("written", "typed"), [(NFC, NFD), (NFD, NFC)])
TEXT = BASE + "seeds: [0]\ngrid: {model.position: {%s: [cope], other: [rope]}}\n"


@pytest.fixture
def plan(tmp_path, written):
    (tmp_path / f"{written}.yaml").write_text(TEXT % written)
    return expand(load_ablation(tmp_path / f"{written}.yaml"))


@BOTH
def test_an_ablation_is_found(tmp_path, written, typed, plan):
    files = AblationFiles(tmp_path)
    queries = Queries(Store(tmp_path / "store", create=True), files)
    assert queries.planned(typed).name == plan.name == written
    assert find_ablation(typed, tmp_path, "") == find_ablation(tmp_path / f"{typed}.yaml", tmp_path, "")
    assert find_ablation(typed, tmp_path, "").stem == written


@BOTH
def test_a_row_is_found(written, typed, plan):
    for text in (typed, f"position={typed}"):
        assert [row.name for row in find_rows(plan, text)] == [written]
    for text in (typed, f"model.position={typed}"):
        assert [row.name for row in only_rows(plan, [text]).rows] == [written]


@BOTH
def test_a_condition_of_the_file_is_about_the_row(tmp_path, written, typed):
    (tmp_path / "a.yaml").write_text(TEXT % written + f"exclude: [{{model.position: {typed}}}]\n")
    assert [row.name for row in expand(load_ablation(tmp_path / "a.yaml")).rows] == ["other"]


@BOTH
def test_a_scale_is_found(tmp_path, written, typed):
    (tmp_path / "a.yaml").write_text(TEXT % written + f"scales: {{{written}: {{set: {{model.dim: 16}}}}}}\n")
    scaled = with_overrides(load_ablation(tmp_path / "a.yaml"), scale=typed)
    assert (scaled.scale, {run.model.dim for run in expand(scaled).runs}) == (written, {16})


def test_labels_that_look_the_same_are_refused():
    text = BASE + f"seeds: [0]\ngrid: {{model.position: {{{NFC}: [cope], {NFD}: [rope]}}}}\n"
    assert error_of(text).code == "duplicate_key"


def test_the_id_of_a_run_does_not_depend_on_its_label(tmp_path):
    ids = []
    for label in (NFC, NFD):
        (tmp_path / "a.yaml").write_text(TEXT % label)
        ids.append([run.run_id for run in expand(load_ablation(tmp_path / "a.yaml")).runs])
    assert ids[0] == ids[1]


def test_an_unknown_name_is_still_refused(tmp_path):
    (tmp_path / f"{NFD}.yaml").write_text(TEXT % NFD)
    with raises("not_found", name="cafe"):
        AblationFiles(tmp_path).file("cafe")


@BOTH
def test_runs_sweeps_and_files_of_results_are_found(tmp_path, written, typed, plan):
    store = Store(tmp_path / "store", create=True)
    finish(store, plan.runs[0], {})
    record = write_sweep(store, plan)
    queries = Queries(store, AblationFiles(tmp_path))
    assert [run.run_id for run in queries.ask(ListRuns(filter=[f"tags.row={typed}"])).runs] == [plan.runs[0].run_id]
    assert [run.row for run in queries.ask(ListRuns(ablation=typed)).runs] == [written, "other"]
    assert [sweep.sweep_id for sweep in queries.ask(ListSweeps(ablation=typed)).sweeps] == [record.sweep_id]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / f"{typed}.parquet").touch()
    assert ParquetStore(tmp_path / "results").kept(plan) is not None


@BOTH
def test_an_ablation_is_listed_once(tmp_path, written, typed, plan):
    store = Store(tmp_path / "store", create=True)
    write_sweep(store, plan, ablation=typed, sets=["seeds=[7]"])
    (listed,) = Queries(store, AblationFiles(tmp_path)).ask(ListAblations())
    assert listed.name == written
    assert [variant.sets for variant in listed.variants] == [["seeds=[7]"]]
