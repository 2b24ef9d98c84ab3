"""A folder of results as a store: its index, its runs, and files that are damaged, old or from strangers."""

import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from cope_sweep.config import expand, load_ablation
from cope_sweep.config.filters import parse_filter
from cope_sweep.store import ParquetStore, RunQuery, Store, open_store
from tests.helpers.errors import raises

ABLATIONS = Path(__file__).parents[2] / "ablations"
RUN = "95199d1142de555d"
"""A run of the quick start: CoPE, seed 0."""


@pytest.fixture(scope="module")
def plan():
    return expand(load_ablation(ABLATIONS / "quickstart.yaml"))


@pytest.fixture
def folder(tmp_path):
    for name in ("quickstart.parquet", "quickstart.curves.parquet", "gates.small.parquet", "gates.small.heads.parquet"):
        shutil.copy(ABLATIONS / "results" / name, tmp_path)
    return tmp_path


@pytest.fixture
def store(folder):
    return ParquetStore(folder)


def changed(folder, **columns):
    """Replace columns of the quick start's runs; None: leave the column out."""
    frame = pd.read_parquet(folder / "quickstart.parquet")
    for name, values in columns.items():
        frame = frame.drop(columns=name) if values is None else frame.assign(**{name: values})
    frame.to_parquet(folder / "quickstart.parquet")


def test_what_opens_as_a_folder_of_results(folder, tmp_path):
    assert isinstance(open_store(folder), ParquetStore)
    with raises("read_only", store=str(folder)):
        open_store(folder, create=True)
    assert type(open_store(tmp_path / "missing")) is Store
    (folder / "runs").mkdir()
    assert type(open_store(folder)) is Store, "run folders, and a report beside them"


def test_the_index_has_all_runs_with_their_values(store):
    index = store.index
    query = RunQuery(filters=(parse_filter("model.position.cope.p_max=64"), parse_filter("tags.ablation=quickstart")))
    cope = index.matching(query)
    assert RUN in cope
    assert len(cope) == 2
    (record,) = index.records([RUN]).values()
    assert (record.status, record.seed, record.step, record.steps) == ("finished", 0, 450, 450)
    assert record.metrics["in_dist/token_error"] == 0.0
    assert record.facts["device"] == "cpu"
    specs = index.specs([RUN])[RUN]
    assert (specs["train.betas"], specs["model.position"]) == ("0.9,0.999", "cope")
    assert index.matching(RunQuery(filters=(parse_filter("model.position.0.kind=cope"),))), "by place, too"
    assert {place.row for place in index.places([RUN])[RUN]} == {"CoPE"}
    with raises("not_writable"):
        index.delete([RUN])


def test_a_run_has_its_files_but_no_checkpoint(store):
    run = store.run(RUN)
    assert (run.status, run.log_text()) == ("finished", "")
    assert run.spec["spec"]["model"]["position"][0]["p_max"] == 64
    assert run.result["facts"]["parameters"] == 105216
    assert run.curve()[0] == {"step": 1, "train/loss": 2.837595224380493, "train/lr": 0.001}
    step, metric, value, time_ms = next(run.logged_values())
    assert (step, metric, value) == (1, "train/loss", 2.837595224380493)
    assert time_ms - run.spec["created_ms"] == 1689
    with raises("no_checkpoint", run_id=RUN):
        run.fetch_checkpoint()
    assert (store.run("0" * 16).status, store.run("0" * 16).curve()) == ("pending", [])
    with raises("invalid_run_id"):
        store.run("../..")


def test_a_sweep_is_known_by_the_lines_of_its_runs(store):
    sweep_id = store.index.records([RUN])[RUN].sweep_id
    sweep = store.sweep(sweep_id)
    assert (sweep.ablation, sweep.command) == ("quickstart", ["cope-sweep", "run", "quickstart"])
    assert sweep.versions["torch"]
    assert RUN in {run.run_id for run in sweep.runs}
    assert store.sweep("20200101-000000-abcd") is None


@pytest.mark.parametrize("was_read", [False, True])
def test_files_that_share_runs_agree_whichever_was_read_first(folder, plan, was_read):
    """In the file of the quick start a run is not finished, and another one is missing; in `restart` all are finished."""
    shutil.copy(folder / "quickstart.parquet", folder / "restart.parquet")
    frame = pd.read_parquet(folder / "quickstart.parquet")
    frame.loc[frame["run_id"] == RUN, "status"] = "interrupted"
    frame[frame["run_id"] != frame["run_id"].iloc[-1]].to_parquet(folder / "quickstart.parquet")
    store = ParquetStore(folder)
    assert not was_read or store.kept(plan).records[RUN].status == "interrupted"
    assert store.run(RUN).status == "finished"
    sweep = store.sweep(store.index.records([RUN])[RUN].sweep_id)
    assert (sweep.ablation, len(sweep.runs)) == ("restart", len(frame))


def test_one_file_is_read_for_a_table(store, plan, folder):
    (folder / "gates.small.parquet").write_bytes(b"PAR1 damaged")
    assert store.records(plan)[RUN].status == "finished"
    assert list(store.run(RUN).logged_values())
    with raises("damaged_report", file=str(folder / "gates.small.parquet")):
        _ = store.index


def test_a_changed_file_is_read_again(store, plan, folder):
    before = store.state()
    assert store.index.records([RUN])[RUN].facts["device"] == "cpu"
    changed(folder, **{"facts.device": "cuda"})
    assert store.state() != before
    assert store.records(plan)[RUN].facts["device"] == "cuda"
    assert store.index.records([RUN])[RUN].facts["device"] == "cuda"
    (folder / "quickstart.parquet").unlink()
    with raises("not_found", ablation="quickstart", scale=None, allowed=[]):
        store.records(plan)


def test_results_that_do_not_belong_to_the_plan_are_stale(store, folder):
    path = folder / "quickstart.yaml"
    text = (ABLATIONS / "quickstart.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("steps: 450", "steps: 451"), encoding="utf-8")
    with raises("stale_report", file="quickstart.parquet", ablation="quickstart"):
        store.records(expand(load_ablation(path)))


def test_files_of_old_versions_lack_columns(store, plan, folder):
    old = ("sweep_id", "created_ms", "ended_ms", "commit", "versions", "cpu", "cores", "system", "command")
    changed(folder, **dict.fromkeys(old))
    record = store.records(plan)[RUN]
    assert (record.sweep_id, record.created_ms, record.metrics["dense/token_error"]) == (None, None, 0.0)
    assert next(store.run(RUN).logged_values())[3] is None
    assert len(store.index.statuses()) > 6


@pytest.mark.parametrize(
    "columns",
    [
        {"run_id": None},
        {"status": None},
        {"seed": None},
        {"run_id": "../../etc"},
        {"status": "done"},
        {"seed": "a"},
        {"dense/loss": "a"},
        {"facts.device": [[1]] * 6},
        {"facts.steps": 2**64 - 1},
        {"command": 1},
        {"model.dim.x": 1},
        {f"model.{'a.' * 110}x": 1},
    ],
    ids=str,
)
def test_a_file_with_other_content_is_an_error_that_names_it(store, plan, folder, columns):
    changed(folder, **columns)
    with raises("damaged_report", file=str(folder / "quickstart.parquet")):
        assert store.records(plan)
        assert store.index


@pytest.mark.parametrize(
    "attributes",
    ['{"declared": {"claim": [Infinity, ""]}}', '{"declared": {"claim": []}}', pytest.param("[" * 100_000, id="deep")],
)
def test_attributes_with_other_content_are_an_error_that_names_the_file(store, plan, folder, attributes):
    path = folder / "quickstart.parquet"
    table = parquet.read_table(path)
    metadata = table.schema.metadata | {b"PANDAS_ATTRS": attributes.encode()}
    parquet.write_table(table.replace_schema_metadata(metadata), path)
    with raises("damaged_report", file=str(path)):
        _ = store.kept(plan).declared


@pytest.mark.parametrize("time_s", [float("nan"), float("-inf"), 1e300])
def test_a_time_that_no_value_can_have_is_an_error_that_names_the_file(store, folder, time_s):
    path = folder / "quickstart.curves.parquet"
    columns = {"run_id": [RUN], "step": [1], "metric": ["train/loss"], "value": [1.0], "time_s": [time_s]}
    parquet.write_table(pa.table(columns), path)
    with raises("damaged_report", file=str(path)):
        store.run(RUN).curve()


def test_a_damaged_file_beside_the_runs_is_an_error_that_names_it(store, folder):
    for content in (b"", b"PAR1 damaged", None):
        path = folder / "quickstart.curves.parquet"
        if content is None:
            parquet.write_table(pa.table({"run_id": [RUN], "step": ["a"], "metric": ["b"], "value": ["c"]}), path)
        else:
            path.write_bytes(content)
        store.state()
        with raises("damaged_report", file=str(path)):
            list(ParquetStore(folder).run(RUN).logged_values())
