"""The evidence of an ablation: its files, their content, and what is missing."""

import itertools
import math
import statistics
from dataclasses import replace

import pandas as pd
import pytest

from cope_sweep.config import expand, with_overrides
from cope_sweep.errors import NotFinishedError
from cope_sweep.read.reports import evidence, write_evidence
from cope_sweep.read.reports.evidence import SEQUENCES, bootstrap_median, duration, provenance
from cope_sweep.read.reports.runs import extend_report, read_report, run_frame
from cope_sweep.read.tables import read_results
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.store import Store
from cope_sweep.train import Runtime, train_run
from tests.read.figures.files import svg_texts
from tests.read.tables.ablations import CONTENT, begin, fail, finish, plan_of
from tests.store.sweeps import end, members, sweep_record
from tests.tiny import TINY

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
    assert report.missing == ()


def test_runs_of_another_store_are_added_to_a_report(tmp_path):
    """Two stores with other runs, one after the other, make the report of one store with all."""
    plan = plan_of(figures=FIGURES[:1])
    stores = {name: Store(tmp_path / name, create=True) for name in ("all", "first", "second")}
    for index, run in enumerate(plan.runs):
        for name in ("all", "first" if index in (1, 3) else "second"):
            finish(stores[name], run, {"in_dist/token_error": 1.0 + index, "dense/loss": 0.1}, FACTS)
    expected = evidence(read_results(plan, stores["all"]))
    write_evidence(evidence(read_results(plan, stores["first"])), tmp_path / "out")
    kept = read_report(plan, tmp_path / "out" / "copying.parquet")
    write_evidence(evidence(extend_report(read_results(plan, stores["second"]), kept)), tmp_path / "out")
    added = read_report(plan, tmp_path / "out" / "copying.parquet")
    times = ["created_ms", "ended_ms"]
    pd.testing.assert_frame_equal(added.file.drop(columns=times), expected.runs.drop(columns=times))
    pd.testing.assert_frame_equal(
        added.curves.drop(columns="time_s"), expected.results.curves.drop(columns="time_s"), check_dtype=False
    )
    assert added.curves["time_s"].notna().all()
    assert evidence(added).table.to_markdown() == expected.table.to_markdown()

    other = plan_of(seeds=[0], figures=FIGURES[:1])
    with pytest.raises(NotFinishedError):
        extend_report(read_results(other, stores["all"]), added)


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
    assert "**Result: By In-dist. (%): a\\_b \\<c\\> and None were not tested against CoPE: too few seeds.**" in text
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
    kept = read_report(plan, tmp_path / "copying.parquet")
    back = kept.records
    assert back.keys() == {run.run_id for run in plan.runs}
    for run_id, record in found.results.records.items():
        assert (back[run_id].status, back[run_id].seed, back[run_id].metrics) == (
            record.status, record.seed, record.metrics,
        )  # fmt: skip
        assert back[run_id].facts["wall_s"] == 30.5
    assert evidence(kept).files() == found.files()
    frame = run_frame(found.results)
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
    assert f"`{command} --compare" in (tmp_path / "copying.md").read_text()
    kept = read_report(plan, tmp_path / "copying.parquet")
    assert (kept.stale, kept.plan.runs) == ("", changed.runs)
    assert evidence(kept).files() == found.files()
    # A key that the ablation has no longer: the report is stale, and no error.
    file = pd.read_parquet(tmp_path / "copying.parquet")
    file.attrs["set"] = ["train.lost=1"]
    file.to_parquet(tmp_path / "copying.parquet")
    assert "is stale" in read_report(plan, tmp_path / "copying.parquet").stale


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


def test_the_reference():
    published = [{"match": {"model.position": "None"}, "values": {"in_dist/token_error": 1.0}}]
    assert reference(plan_of()) == "model.position=CoPE"
    assert reference(plan_of(published=published)) == "paper"
    none_first = {"model.position": {"None": [], "CoPE": ["cope"]}, "model.dim": [8, 16]}
    assert reference(plan_of(grid=none_first)) == "model.position=CoPE"
    assert reference(plan_of(grid={"model.dim": [8, 16]})) == "8"
    assert reference(plan_of(grid={})) is None


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


def test_provenance_is_that_of_the_sweeps(store):
    plan = plan_of()
    finished_runs(plan, store)
    command = [
        "/x/__main__.py",
        "run",
        "/x/copying.yaml",
        "--store",
        "/x/store",
        "--index=postgresql://u:p@h/n",
        "--local",
    ]
    sweep = sweep_record(
        runs=members(plan), command=command, git_commit="abc", versions={"numpy": "1", "torch": "1.0"},
        machine={"host": "secret-host", "cpu": "A processor", "cpus": 4, "system": "Linux"},
    )  # fmt: skip
    store.write_sweep(sweep)
    results = read_results(plan, store)
    records = {i: each.model_copy(update={"sweep_id": sweep.sweep_id}) for i, each in results.records.items()}
    frame = run_frame(replace(results, records=records))
    found = provenance([frame, frame])
    assert found.commits == ("abc",)
    assert found.versions == ("numpy 1", "torch 2.1")  # the run's own
    assert found.machines == ("cpu, 2 threads; A processor, 4 cores; Linux",)
    assert found.commands == ("cope-sweep run copying --local",)
    assert found.compute_s == 6 * 30.5
    assert found.runs == 6
    assert dict(found.lines)["Compute"].startswith("3 min ")


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (600, "10 min"), (3600 * 3 + 300, "3 h 05 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


COUNTING_CONTENT = {
    "base": TINY | {"task": {"kind": "counting", "variables": 2, "operations": 12, "max_tokens": 40}},
    "metrics": [
        {"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"},
        {"name": "longer/token_error", "label": "Longer", "unit": "%"},
        {"name": "in_dist/loss"},
    ],
    "seeds": [0, 1, 2],
}


def test_rows_that_score_like_a_shortcut_are_named(store):
    plan = plan_of(**COUNTING_CONTENT)
    rule = plan.runs[0].task.shortcut_errors("in_dist", SEQUENCES)
    near = rule["its increments, without resets"]
    for row, errors in zip(plan.rows, ([0.0, 0.1, near], [near, 1.1 * near, 0.0], [2 * near] * 3), strict=True):
        for run, error in zip(row.runs, errors, strict=True):
            finish(store, run, {"in_dist/token_error": error, "longer/token_error": 99.0, "in_dist/loss": 1.0})
    found = evidence(read_results(plan, store)).shortcuts
    assert [header.text for header in found.layout.headers] == ["rule", "In-dist. (%)", "Longer (%)"]
    assert len(found.layout.rows) == 5
    assert found.layout.rows[0][0].text == "the most frequent answer"
    assert [text for text in found.rows_like_rules if "without resets" in text] == [
        f"In-dist. like “its increments, without resets” ({near:.2f} %): a_b <c> ({near:.2f})"
    ]
    assert "### Shortcuts" in evidence(read_results(plan, store)).to_markdown({})


def test_a_seed_that_does_no_better_than_a_rule_is_stuck_and_has_not_learned(store):
    metrics = [{"name": ERROR, "label": "In-dist.", "unit": "%", "learned": 5.0}]
    plan = plan_of(**COUNTING_CONTENT | {"metrics": metrics})
    best = min(plan.runs[0].task.shortcut_errors("in_dist", SEQUENCES).values())  # about 1 %
    for row, errors in zip(plan.rows, ([0.0, 0.8 * best, 0.9 * best], [best, 4.9, 0.0], [0.0] * 3), strict=True):
        for run, error in zip(row.runs, errors, strict=True):
            finish(store, run, {ERROR: error})
    table = evidence(read_results(plan, store)).table
    some, most, none = (row.metrics[ERROR] for row in table.model.rows)
    assert (some.stuck, most.stuck, none.stuck) == ((2,), (0, 1), ())
    assert [cell.learned.k for cell in (some, most, none)] == [2, 1, 3]
    text = table.to_markdown()
    assert text.count("†") == 2, "in the cell, and in the note"
    assert "stuck: 1 of 3 seeds of CoPE (In-dist.)" in text


ERROR = "in_dist/token_error"
CURVES = {0: {2: 50.0, 4: 3.0, 6: 0.5}, 1: {2: 4.0, 4: 60.0, 6: 1.0}, 2: {2: 70.0, 4: 60.0, 6: 50.0}}
"""Seed → step → error: learned at 4, at 2 (and lost again), and never."""


def finished(runs, store, curves):
    for run in runs:
        folder = begin(store, run)
        for step, error in curves[run.seed].items():
            folder.log({"step": step, ERROR: error})
        folder.finish({ERROR: curves[run.seed][6]}, {"steps": 6})
        end(store, folder)


def plan_with(**metric):
    return plan_of(
        grid={"model.position": {"CoPE": ["cope"]}},
        metrics=[{"name": ERROR, "label": "In-dist.", "unit": "%", **metric}],
        seeds=[0, 1, 2],
        published=[],
    )


def test_median_and_interval_by_hand(store):
    plan = plan_with(learned=5.0)
    finished(plan.runs, store, CURVES)
    found = evidence(read_results(plan, store))
    batch = plan.runs[0].train.batch
    assert [[cell.text for cell in line] for line in found.thresholds.rows] == [
        ["CoPE", "2/3", "4 [2, > 6]", f"{4 * batch} [{2 * batch}, > {6 * batch}]"]
    ]
    text = found.to_markdown({})
    assert "### Until the task is learned" in text
    assert "the first evaluation with In-dist. ≤ 5 %: the median over seeds" in text


def test_runs_that_have_not_finished_are_left_out(store):
    plan = plan_with(learned=5.0)
    finished(plan.runs[:2], store, CURVES)
    begin(store, plan.runs[2]).log({"step": 2, ERROR: 70.0})  # in training, or killed
    ((_, seeds, *_),) = evidence(read_results(plan, store)).thresholds.rows
    assert seeds.text == "2/2"


def test_no_table_where_no_seed_learns_or_nothing_is_to_be_learned(store):
    never, nothing = plan_with(learned=0.1), plan_with()
    finished(never.runs, store, CURVES)
    assert evidence(read_results(never, store)).thresholds is None
    assert evidence(read_results(nothing, store)).thresholds is None


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0, 9.0, 30.0], [3.0, 4.0, math.inf, math.inf], [7.0, 7.0]])
def test_the_interval_is_that_of_all_resamples(values):
    medians = sorted(map(statistics.median, itertools.product(values, repeat=len(values))))
    middle, low, high = bootstrap_median(values)
    assert middle == statistics.median(values)
    assert low == medians[math.ceil(0.025 * len(medians)) - 1]
    assert high == medians[math.ceil(0.975 * len(medians)) - 1]
