"""The evidence of an ablation: its files, their content, and what is missing."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pandas as pd
import pytest

from cope_sweep.config import expand, with_overrides
from cope_sweep.read.queries import recorded_plan
from cope_sweep.read.reports import evidence, write_evidence
from cope_sweep.read.reports import files as files_module
from cope_sweep.read.reports.files import copy_runs, results_anywhere, run_frame
from cope_sweep.read.tables import read_results
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.store import ParquetStore, Store
from cope_sweep.train import Runtime, train_run
from tests.helpers.errors import raises
from tests.helpers.figure_files import svg_texts
from tests.helpers.finished_runs import CONTENT, fail, finish, plan_of
from tests.helpers.tiny import TINY

FIGURES = [
    {
        "kind": "curves",
        "metrics": ["in_dist/token_error"],
        "rows": {"model.position": ["CoPE", "None"]},
        "title": "Two",
    },
    {"kind": "maps", "rows": {"model.position": "CoPE"}, "seed": 1},
]
FACTS = {"parameters": 7, "wall_s": 30.5, "device": "cpu", "threads": 2, "torch": "2.1", "host": "secret-host",
         "worker_id": "secret-host:1"}  # fmt: skip


def finished_runs(plan, store, facts=FACTS):
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 10.0 * index + run.seed, "dense/loss": 0.1 + index}, facts)


def test_a_figure_measures_the_heads_of_its_own_row(store, monkeypatch):
    monkeypatch.setattr("cope_sweep.read.figures.marks.TOKENS", 100)
    figure = {"kind": "maps", "show": "gates", "mark": "data", "claim": "Gates open at data"}
    figures = [figure | {"rows": {"model.position": "CoPE"}, "split": split} for split in ("in_dist", "dense")]
    figures.append(figure | {"rows": {"model.position": "other"}})
    grid = {"model.position": {"CoPE": ["cope"], "other": [{"kind": "cope", "p_max": 3}]}}
    plan = plan_of(grid=grid, seeds=[0], figures=figures)
    for run in plan.runs:
        assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    report = evidence(read_results(plan, store))
    cope, other = (row.runs[0].run_id for row in plan.rows)
    runs = report.heads.groupby("figure")["run_id"].unique()
    assert {name: list(run_ids) for name, run_ids in runs.items()} == {
        "maps-1": [cope], "maps-2": [cope], "maps-3": [other]
    }  # fmt: skip
    pairs = report.heads.groupby("figure")["without"].max()
    assert pairs["maps-1"] != pairs["maps-2"], "sequences of different splits"
    chosen = report.heads[report.heads["chosen"] & (report.heads["figure"] == "maps-1")].iloc[0]
    texts = " ".join(svg_texts(report.figures[0].svg()))
    assert f"Layer {chosen['layer']} · head {chosen['head']}" in texts
    assert f"Seed 0: AUC {chosen['auc']:.2f} for data" in texts, "the measure of the claim, not means of these tokens"
    assert "mean gate" not in texts
    assert report.missing == ()


@pytest.mark.parametrize("compare", ["model.position=CoPE", "position = CoPE", "CoPE", "cope"])
def test_scores_are_compared_with_the_label_however_it_is_written(store, compare):
    task = {"Short": TINY["task"], "Long": TINY["task"] | {"sparse_blanks": 5}}
    base = {key: value for key, value in TINY.items() if key != "task"}
    grid = {"task": task, "model.position": {"CoPE": ["cope"], "RoPE": ["rope"]}}
    plan = plan_of(base=base, grid=grid, metrics=[{"name": "in_dist/token_error", "unit": "%"}], published=[])
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 10.0 + run.seed}, FACTS)
    headers = evidence(read_results(plan, store), compare=compare).aggregates.headers
    assert [header.text for header in headers] == ["row", "interquartile mean", "P(better than CoPE)"]


def test_runs_of_two_stores_are_copied_to_the_same_results(tmp_path):
    """They make the files of one store with all runs."""
    plan = plan_of(figures=FIGURES[:1])
    stores = {name: Store(tmp_path / name, create=True) for name in ("all", "first", "second")}
    for index, run in enumerate(plan.runs):
        for name in ("all", "first" if index in (1, 3) else "second"):
            finish(stores[name], run, {"in_dist/token_error": 1.0 + index, "dense/loss": 0.1}, FACTS)
    expected, target = evidence(read_results(plan, stores["all"])), ParquetStore(tmp_path / "out")
    first = copy_runs(read_results(plan, stores["first"]), target)
    assert (first.copied, first.finished, first.planned) == (2, 2, 6)
    assert {path.name for path in first.files} == {"copying.parquet", "copying.curves.parquet"}
    second = copy_runs(read_results(plan, stores["second"]), target)
    assert (second.copied, second.finished) == (4, 6)
    added = read_results(plan, target)
    times = ["created_ms", "ended_ms"]
    pd.testing.assert_frame_equal(evidence(added).runs.drop(columns=times), expected.runs.drop(columns=times))
    pd.testing.assert_frame_equal(added.curves.drop(columns="time_s"), expected.results.curves.drop(columns="time_s"))
    assert added.curves["time_s"].notna().all()
    assert evidence(added).table.to_markdown() == expected.table.to_markdown()

    before = {path.name: path.read_bytes() for path in target.root.iterdir()}
    for store in (stores["all"], target):
        again = copy_runs(read_results(plan, store), target)
        assert (again.files, again.copied, again.finished) == ((), 0, 6)
    assert {path.name: path.read_bytes() for path in target.root.iterdir()} == before


def test_seeds_of_one_configuration_are_brought_together_in_a_folder(tmp_path):
    """Two ablations have the same rows with other seeds: the first one is widened to all of them."""
    store, folder = Store(tmp_path / "store", create=True), ParquetStore(tmp_path / "results")
    first, other = plan_of(), plan_of("other", seeds=[2, 3], grid={"model.position": {"CoPE": ["cope"]}})
    for plan in (first, other):
        for index, run in enumerate(plan.runs):
            finish(store, run, {"in_dist/token_error": 1 / (3.0 + index), "dense/loss": 0.1}, FACTS)
        copy_runs(results_anywhere(plan, store), folder)
    before = {(line.run_id, line.in_dist, line.created_ms) for line in _lines(folder, "copying", "other")}
    wider = plan_of(seeds=[0, 1, 2, 3])
    with raises("stale_report"):
        read_results(wider, folder)
    done = copy_runs(results_anywhere(wider, folder), folder)
    assert (done.copied, done.finished, done.planned) == (2, 8, 12)
    records = read_results(wider, folder).records
    assert [row.row for row in evidence(read_results(wider, folder)).table.model.rows if row.counts["pending"]] == [
        "a_b <c>", "None"
    ]  # fmt: skip
    assert sum(record.status == "pending" for record in records.values()) == 4
    assert {(line.run_id, line.in_dist, line.created_ms) for line in _lines(folder, "copying")} == before
    curves = read_results(wider, folder).curves
    assert set(curves["run_id"]) == {run_id for run_id, record in records.items() if record.status == "finished"}


def _lines(folder, *names):
    frame = pd.concat(pd.read_parquet(folder.root / f"{name}.parquet") for name in names)
    finished = frame[frame["status"] == "finished"].rename(columns={"in_dist/token_error": "in_dist"})
    return finished[["run_id", "in_dist", "created_ms"]].itertuples()


def test_copies_at_the_same_time_lose_no_run(tmp_path, monkeypatch):
    plan = plan_of(seeds=[0])
    for run in plan.runs:
        finish(Store(tmp_path / run.run_id, create=True), run, {"in_dist/token_error": 1.0, "dense/loss": 0.1}, FACTS)
    results = [read_results(plan, Store(tmp_path / run.run_id)) for run in plan.runs]
    written = files_module.write_files

    def write_late(*arguments):
        time.sleep(0.2)  # whoever reads meanwhile does not see these runs
        return written(*arguments)

    monkeypatch.setattr(files_module, "write_files", write_late)
    with ThreadPoolExecutor(len(results)) as pool:
        copies = list(pool.map(lambda each: copy_runs(each, ParquetStore(tmp_path / "out")), results))
    assert sorted(copy.finished for copy in copies) == list(range(1, len(results) + 1))
    records = read_results(plan, ParquetStore(tmp_path / "out")).records.values()
    assert {record.status for record in records} == {"finished"}


def test_measures_of_heads_are_copied_with_their_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("cope_sweep.read.figures.marks.TOKENS", 100)
    figure = {"kind": "maps", "show": "gates", "mark": "data", "claim": "Gates open at data", "split": "in_dist"}
    plan = plan_of(grid={"model.position": {"CoPE": ["cope"]}}, seeds=[0, 1], figures=[figure])
    target, expected = ParquetStore(tmp_path / "out"), []
    for run in plan.runs:
        store = Store(tmp_path / f"seed-{run.seed}", create=True)
        assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
        expected.append(evidence(read_results(plan, store)).heads)
        copy_runs(read_results(plan, store), target)
    heads = target.kept(plan).heads.to_pandas()
    pd.testing.assert_frame_equal(heads, pd.concat(expected, ignore_index=True))
    report = evidence(read_results(plan, target))
    assert report.findings
    (missing,) = report.missing
    assert missing.startswith("maps: "), "no checkpoint to draw them, and no picture was kept"
    shutil.rmtree(store.run(run.run_id).path / "checkpoint")
    one_seed = expand(with_overrides(plan.ablation, assignments=["seeds=[1]"]))
    with raises("lost_runs", file="copying.parquet", ablation="copying", runs=1):  # its heads cannot be measured again
        write_evidence(evidence(read_results(one_seed, store)), target.root)


def test_a_copy_adds_runs_and_loses_none(tmp_path):
    """More seeds in the ablation file are new runs; fewer would lose finished ones."""
    store, target = Store(tmp_path / "store", create=True), ParquetStore(tmp_path / "out")
    plan, more, fewer = (plan_of(seeds=list(range(seeds)), figures=FIGURES[:1]) for seeds in (2, 3, 1))
    with raises("not_finished", ablation="copying"):
        copy_runs(read_results(plan, store), target)
    assert not target.root.exists()
    finished_runs(plan, store)
    copy_runs(read_results(plan, store), target)
    finished_runs(more, store)
    assert copy_runs(read_results(more, store), target).finished == 9
    before = (target.root / "copying.parquet").read_bytes()
    with raises("stale_report", file="copying.parquet", ablation="copying"):
        copy_runs(read_results(fewer, store), target)
    assert (target.root / "copying.parquet").read_bytes() == before


def test_a_report_replaces_no_finished_run_that_its_store_lacks(tmp_path):
    plan, fewer = (plan_of(seeds=list(range(seeds))) for seeds in (2, 1))
    whole, part = (Store(tmp_path / name, create=True) for name in ("whole", "part"))
    finished_runs(plan, whole)
    finished_runs(fewer, part)
    paths = write_evidence(evidence(read_results(plan, whole)), tmp_path / "out")
    before = [path.read_bytes() for path in paths]
    with raises("lost_runs", file="copying.parquet", ablation="copying", runs=3):
        write_evidence(evidence(read_results(plan, part)), tmp_path / "out")
    assert [path.read_bytes() for path in paths] == before
    write_evidence(evidence(read_results(fewer, part)), tmp_path / "out")  # runs that are no longer planned
    assert len(ParquetStore(tmp_path / "out").kept(fewer).records) == 3
    (tmp_path / "out" / "copying.parquet").write_bytes(b"damaged")
    write_evidence(evidence(read_results(plan, whole)), tmp_path / "out")
    assert len(ParquetStore(tmp_path / "out").kept(plan).records) == 6


def test_files(store, tmp_path):
    plan = plan_of(figures=FIGURES[:1])
    finished_runs(plan, store)
    found = evidence(read_results(plan, store))
    paths = write_evidence(found, tmp_path / "new" / "out")
    assert sorted(path.name for path in paths) == [
        "copying.curves.parquet",
        "copying.curves.svg",
        "copying.md",
        "copying.parquet",
    ]
    assert [path.read_bytes() for path in paths] == list(
        evidence(read_results(plan, Store(store.root))).files().values()
    )
    text = (tmp_path / "new/out/copying.md").read_text()
    assert text.startswith("# Does it copy? 100 % & more\n")
    assert "![Two](copying.curves.svg)" in text
    assert " 10.50 ± 0.71 |" in text
    assert "**Result: By In-dist. (%). Too few seeds for a test against CoPE: a\\_b \\<c\\>, None.**" in text
    assert "Difference of In-dist.: row minus the row with position = CoPE" in text
    assert "Exploratory" not in text
    assert "## Missing" not in text
    texts = svg_texts((tmp_path / "new/out/copying.curves.svg").read_bytes())
    assert {"Two", "CoPE, n = 2", "None, n = 2"} <= set(texts)
    assert "secret-host" not in text + str(pd.read_parquet(paths[0]).to_dict())


def test_the_runs_come_back_from_their_file(store, tmp_path):
    plan = plan_of()
    finished_runs(plan, store)
    found = evidence(read_results(plan, store))
    write_evidence(found, tmp_path)
    kept = read_results(plan, ParquetStore(tmp_path))
    back = kept.records
    assert back.keys() == {run.run_id for run in plan.runs}
    for run_id, record in found.results.records.items():
        assert (back[run_id].status, back[run_id].seed, back[run_id].metrics) == (
            record.status, record.seed, record.metrics,
        )  # fmt: skip
        assert back[run_id].facts["wall_s"] == 30.5
    assert evidence(kept).files() == found.files()
    frame = run_frame(plan, found.results.records, store)
    assert frame["model.position"].tolist() == ["cope", "cope", "absolute", "absolute", "none", "none"]
    assert frame["label.model.position"].unique().tolist() == ["CoPE", "a_b <c>", "None"]
    assert frame["model.dim"].tolist() == [8] * 6


def test_a_report_with_set_comes_back_with_it(store, tmp_path):
    plan = plan_of()
    changed = expand(with_overrides(plan.ablation, assignments=["seeds=[0,1,2]", "train.batch=3"]))
    finished_runs(changed, store)
    found = evidence(read_results(changed, store))
    write_evidence(found, tmp_path)
    command = "cope-sweep report copying --set 'seeds=[0,1,2]' --set train.batch=3"
    assert f"\n{command} --compare model.position=CoPE\n```" in (tmp_path / "copying.md").read_text()
    kept = ParquetStore(tmp_path)
    assert recorded_plan(plan, kept).runs == changed.runs
    assert evidence(read_results(recorded_plan(plan, kept), kept)).files() == found.files()
    # A key that the ablation has no longer: the report is stale, and no error.
    file = pd.read_parquet(tmp_path / "copying.parquet")
    file.attrs["set"] = ["train.lost=1"]
    file.to_parquet(tmp_path / "copying.parquet")
    with raises("stale_report", file="copying.parquet"):
        read_results(recorded_plan(plan, kept), kept)
    for damaged in ("seeds=[0]", [1]):
        file.attrs["set"] = damaged
        file.to_parquet(tmp_path / "copying.parquet")
        with raises("damaged_report", file=str(tmp_path / "copying.parquet")):
            recorded_plan(plan, kept)


def test_what_is_missing(store):
    plan = plan_of(figures=FIGURES)
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 5.0, "dense/loss": 0.5})
    fail(store, plan.rows[1].runs[0])
    found = evidence(read_results(plan, store))
    runs, maps = found.missing
    assert runs == "5 of 6 runs: 1 failed, 4 pending"
    assert maps.startswith("maps: maps of copying shows the checkpoint of run ")
    assert maps.endswith("(CoPE, seed 1), which is pending; train it with: cope-sweep run copying")
    assert str(store.root) not in found.to_markdown({})


def test_a_report_of_many_rows_has_the_best_ones_and_says_where_all_are(store, monkeypatch):
    rates = {"train.lr": {f"rate {index}": 0.001 * (index + 1) for index in range(6)}}
    plan = plan_of(grid=rates, seeds=[0, 1])
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 60.0 - 10 * index + run.seed, "dense/loss": 0.1}, FACTS)
    whole = evidence(read_results(plan, store))
    assert [row.short for row in whole.shown.rows] == [f"rate {index}" for index in range(6)]
    assert whole.missing == ()
    assert "table?format=csv" not in whole.to_markdown({})
    monkeypatch.setattr(import_module("cope_sweep.read.reports.evidence"), "MAX_ROWS", 4)
    report = evidence(read_results(plan, store))
    assert [row.short for row in report.shown.rows] == ["rate 5", "rate 4", "rate 3", "rate 2"]
    text = report.to_markdown(report.pictures)
    assert "| rate 2" in text
    assert "| rate 1" not in text
    assert f"`cope-sweep table {plan.ablation.cli_args} --format csv`" in text
    assert f"`/api/v1/ablations/{plan.name}/table?format=csv`" in text
    assert report.pictures == {}
    (missing,) = report.missing
    assert missing.startswith("summary: ")
    assert len(report.runs) == 12  # the file of runs has all


def test_the_reference():
    published = [{"match": {"model.position": "None"}, "values": {"in_dist/token_error": 1.0}}]
    assert reference(plan_of()) == "model.position=CoPE"
    assert reference(plan_of(published=published)) == "paper"
    none_first = {"model.position": {"None": [], "CoPE": ["cope"]}, "model.dim": [8, 16]}
    assert reference(plan_of(grid=none_first)) == "model.position=CoPE"
    assert reference(plan_of(grid={"model.dim": [8, 16]})) == "8"
    assert reference(plan_of(grid={})) is None
    tasks = {"task": {"A": {"kind": "flip_flop", "pairs": 4}, "B": {"kind": "flip_flop", "pairs": 8}}}
    base = {key: values for key, values in CONTENT["base"].items() if key != "task"}
    one, two = {"model.dim": [8, 16]}, {"model.dim": [8, 16], "train.steps": [1, 2]}
    assert reference(plan_of(base=base, grid=tasks | one)) == "model.dim=8", "tasks are not compared"
    assert reference(plan_of(base=base, grid=tasks | two)) == "A · 8 · 1"


def test_a_report_begins_with_the_verdicts_of_its_claims(store):
    claim = {"text": "CoPE errs less", "better": {"model.position": "CoPE"}, "than": {"model.position": "None"}}
    base = {key: values for key, values in CONTENT["base"].items() if key != "task"}
    tasks = {"Short": {"kind": "flip_flop", "pairs": 4}, "Long": {"kind": "flip_flop", "pairs": 8}}
    claims = [
        claim | {"better": claim["better"] | {"task": name}, "than": claim["than"] | {"task": name}} for name in tasks
    ]
    claims.append(claim | {"text": "CoPE errs less on Long", "better": claims[1]["better"], "than": claims[1]["than"]})
    grid = {"task": tasks, "model.position": {"CoPE": ["cope"], "None": []}}
    plan = plan_of(base=base, grid=grid, claims=claims, seeds=list(range(5)))
    for row in plan.rows:
        is_worse = row.name == "Short · None"
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 10.0 * is_worse + run.seed, "dense/loss": 0.5})
    text = evidence(read_results(plan, store)).to_markdown({})
    assert text.split("\n\n")[1:4] == [
        "**Result**",
        "- **shown**: CoPE errs less (Short)\n"
        "- **not shown**: CoPE errs less (Long)\n"
        "- **not shown**: CoPE errs less on Long",
        "All rows, by In-dist. (%). Short: worse than CoPE: None. Long: no significant difference from CoPE: None.",
    ]


def test_a_row_without_finished_reference_is_not_compared(store):
    plan = plan_of()
    finish(store, plan.rows[1].runs[0], {"in_dist/token_error": 5.0, "dense/loss": 0.5})
    found = evidence(read_results(plan, store))
    assert found.answer == ""
    assert "+nan" not in found.to_markdown({})


def test_each_row_is_compared_with_the_one_of_the_same_width(store):
    plan = plan_of(grid=CONTENT["grid"] | {"model.dim": [8, 16]})
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 10.0 * index + run.seed, "dense/loss": 0.5})
    rows = {row.row: row.metrics["in_dist/token_error"] for row in evidence(read_results(plan, store)).table.model.rows}
    assert rows["CoPE · 8"].comparison is None
    assert rows["CoPE · 16"].comparison is None
    assert rows["None · 8"].comparison.difference.difference == 40.0  # row 4 minus row 0
    assert rows["None · 16"].comparison.difference.difference == 40.0  # row 5 minus row 1
