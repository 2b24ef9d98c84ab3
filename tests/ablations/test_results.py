"""The reports in ablations/results: their numbers are those of their runs, and their runs are those of today's files."""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.tables.claims import claim_findings
from cope_sweep.read.tables.frames import plan_frame
from cope_sweep.read.tables.stats import RANDOM_DIVISIONS
from cope_sweep.store import ParquetStore
from cope_sweep.store.index.tables import SECTIONS
from cope_sweep.store.results_file import CURVES, LABEL, file_name, run_files
from tests.ablations.update_readme import (
    ABLATIONS,
    RESULTS,
    ROOT,
    all_results,
    committed,
    our_reports,
    stem_of,
    table_of,
    with_results,
)
from tests.helpers.errors import raises

VALIDATION = "validation/token_error"
MOST_BY_HAND, MOST_ENUMERATED = 20_000, math.comb(20, 10)
"""With at most so many divisions, p is counted in plain Python; and by numpy."""
STEMS = [path.stem for path in run_files(RESULTS)]
SECTIONS_OF_SPECS = tuple(f"{section}." for section in SECTIONS)


def check_best_draws(report, frame, text):
    """The report has a line for each point of the grid, with the least mean of its draws that have all seeds."""
    drawn = list(report.plan.ablation.content.search.space)
    labels = [column for column in frame if column.startswith("label.")]
    fixed = [column for column in labels if column.removeprefix("label.") not in drawn]
    draws = frame[frame["status"] == "finished"].groupby(labels, dropna=False, sort=False)[VALIDATION]
    means = draws.agg(["mean", "count"]).reset_index().rename(columns={"mean": VALIDATION})
    means = means[means["count"] == len(report.plan.ablation.content.row_seeds)]
    best = means.loc[means.groupby(fixed, dropna=False, sort=False)[VALIDATION].idxmin()]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "train.lr=" in line]
    assert len(lines) == len(best) < len(report.plan.rows)
    for cells, (_, line) in zip(lines, best.iterrows(), strict=True):
        assert cells[0].endswith(str(line["label.model.position"]).replace("_", "\\_"))
        best_of_all = next(value for value, draw in itertools.pairwise(cells) if draw.startswith("train.lr="))
        assert float(best_of_all) == pytest.approx(line[VALIDATION], rel=1e-3), cells


def check(report, text):
    """The report has the table of its runs, whose numbers are computed again by other code."""
    table, frame = table_of(report), pd.read_parquet(report.store.root / file_name(report.plan))
    if report.plan.is_drawn:
        check_best_draws(report, frame, text)
    else:
        command = f"cope-sweep report {report.plan.ablation.cli_args} --store ablations/results --out ablations/results"
        assert table.to_markdown() in text, f"run: {command}"
    model, checked = table.model, 0
    finished = frame[frame["status"] == "finished"]
    rows = finished["run_id"].map({run.run_id: row.row for row in model.rows for run, _ in row.runs})
    for column in model.columns:
        # Of all rows at once: selecting the runs of each row takes milliseconds, and a search has thousands of rows.
        values_of_column = _values_of_column(report, finished, column.name)
        values_of_row = dict(iter(values_of_column.groupby(rows)))
        for row in model.rows:
            values = values_of_row.get(row.row, values_of_column[:0])
            summary, published = row.metrics[column.name].summary, row.metrics[column.name].published
            assert summary.n == len(values)
            if summary.n:
                assert summary.mean == pytest.approx(values.mean()), (stem_of(report), row.row)
                checked += 1
            if summary.n > 1:
                assert summary.std == pytest.approx(values.std(), abs=1e-9), (stem_of(report), row.row)
            compared = row.metrics[column.name].comparison
            if compared is not None and compared.against == "paper":
                assert compared.difference.difference == pytest.approx(values.mean() - published.value)
    assert checked
    beginning = text.replace("\\", "").split("## Claims")[0]
    assert model.answer[1:] in beginning
    starts = ("All rows, by", "**Result: ", "Published numbers: ")
    assert any(start in beginning for start in starts) == bool(model.answer)
    for row in model.rows:
        compared = row.metrics[model.primary.name].comparison
        if compared is None or compared.against == "paper":
            continue
        a, b = (each.metrics[model.primary.name].values for each in (row, _reference(model, row, compared)))
        if min(len(a), len(b)) > 1:
            if report.plan.ablation.content.paired:
                expected = exact_paired_p([a[seed] - b[seed] for seed in a if seed in b])
                tolerance = None
            else:
                expected, tolerance = permutation_p(list(a.values()), list(b.values()))
            assert compared.difference.p == pytest.approx(expected, abs=tolerance), row.row


def _values_of_column(report, runs, name):
    """A column of the table, from the files of runs and of curves."""
    prefix, _, metric = name.partition("/")
    if prefix == "steps_until":
        return _steps_until(report, runs, metric)
    limits = [(each.name, each.learned) for each in report.plan.ablation.content.metrics if each.learned is not None]
    if prefix == "share_learned":
        return (_values(runs, metric) <= dict(limits)[metric]) * 100
    if prefix == "of_learned":
        name, limit = limits[0]
        return _values(runs[_values(runs, name) <= limit], metric)
    return _values(runs, name)


def _values(runs, name):
    """A column of the file of runs; of `a_and_b/perplexity`, the geometric mean of the two; of `@A..B`, a quotient."""
    metric, _, contexts = name.partition("@")
    if ".." in contexts:
        start, end = (_values(runs, f"{metric}@{context}") for context in contexts.split(".."))
        return (end / start).dropna()
    splits, _, quantity = name.rpartition("/")
    variant, slash, pair = splits.rpartition("/")
    if "_and_" in pair and quantity.startswith("perplexity"):
        first, second = (runs[f"{variant}{slash}{split}/{quantity}"] for split in pair.split("_and_"))
        return (first * second).map(math.sqrt).dropna()
    return runs[name].dropna() if name in runs else runs["seed"][:0]


def _steps_until(report, runs, name):
    """The first step at which a metric is learned, of each run that has evaluated it, from the file of curves.

    All steps, if it never is.
    """
    curves = pd.read_parquet((report.store.root / file_name(report.plan)).with_suffix(".curves.parquet"))
    (limit,) = (metric.learned for metric in report.plan.ablation.content.metrics if metric.name == name)
    evaluated = curves[curves["metric"] == name]
    learned = evaluated[evaluated["value"] <= limit].groupby("run_id")["step"].min()
    runs = runs[runs["run_id"].isin(evaluated["run_id"])]
    return runs["run_id"].map(learned).fillna(runs["train.steps"].astype(float)).astype(float)


def exact_paired_p(differences):
    """The share of all choices of signs whose sum is at least as far from 0."""
    values = [Fraction(value).limit_denominator(10**9) for value in differences]
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    return sum(each >= sums[0] for each in sums) / len(sums)


def permutation_p(a, b):
    """p, and how far the program's may be from it: it draws divisions at random where there are too many."""
    divisions = math.comb(len(a) + len(b), len(a))
    if divisions <= MOST_BY_HAND:
        return exact_p(a, b), None
    if divisions <= MOST_ENUMERATED:
        return enumerated_p(a, b), None
    draws, random = 50_000, np.random.default_rng(1)
    values = np.array([*a, *b])
    sums = random.permuted(np.tile(values, (draws, 1)), axis=1)[:, : len(a)].sum(axis=1)
    differences = np.abs(sums / len(a) - (values.sum() - sums) / len(b))
    p = float((differences >= abs(np.mean(a) - np.mean(b)) - 1e-9).mean())
    return p, 5 * math.sqrt(p * (1 - p) / RANDOM_DIVISIONS) + 2 / RANDOM_DIVISIONS


@cache
def chosen_runs(n, m):
    """All choices of n of n + m runs."""
    return np.array(list(itertools.combinations(range(n + m), n)))


def enumerated_p(a, b):
    """The share of all divisions whose means differ at least as much."""
    n, m = len(a), len(b)
    values = np.array([*a, *b])
    sums = values[chosen_runs(n, m)].sum(axis=1)
    differences = np.abs(sums / n - (values.sum() - sums) / m)
    return float((differences >= abs(np.mean(a) - np.mean(b)) - 1e-9).mean())


def exact_p(a, b):
    """The share of all divisions whose means differ at least as much, by fractions: scipy's rounded sums lose ties."""
    values = [Fraction(value).limit_denominator(10**9) for value in (*a, *b)]
    denominator = math.lcm(*(value.denominator for value in values))
    whole = [int(value * denominator) for value in values]  # adding fractions takes ten times as long
    total = sum(whole)
    differences = [
        abs(sum(chosen) * len(b) - (total - sum(chosen)) * len(a)) for chosen in itertools.combinations(whole, len(a))
    ]
    return sum(difference >= differences[0] for difference in differences) / len(differences)


def _reference(model, row, comparison):
    """The row that a row was compared with: of a label, the one with the same labels of the other axes."""
    known = {each.row: each for each in model.rows}
    if comparison.against in known:
        return known[comparison.against]
    (found,) = [
        each
        for each in model.rows
        if comparison.against in each.labels.values()
        and all(each.labels.get(key, label) in (label, comparison.against) for key, label in row.labels.items())
    ]
    return found


@pytest.fixture(scope="module")
def reports():
    return {stem_of(report): report for report in our_reports()}


@pytest.mark.parametrize("stem", STEMS)
def test_the_numbers_of_a_report_are_those_of_its_runs(stem, reports):
    report, text = reports[stem], (RESULTS / f"{stem}.md").read_text(encoding="utf-8")
    check(report, text)
    for name in re.findall(r"\]\(([^)]+\.svg)\)", text):
        assert ElementTree.parse(RESULTS / name).getroot().tag.endswith("svg")


@pytest.mark.parametrize("stem", STEMS)
def test_the_files_of_a_report_have_todays_names_and_values(stem, reports):
    """A row that was renamed since, and a field whose key has changed; fields that are newer than a file lack there."""
    report = reports[stem]
    path = RESULTS / file_name(report.plan)
    runs = pd.read_parquet(path).set_index("run_id")
    expected = plan_frame(report.plan, report.records, LABEL).set_index("run_id").loc[runs.index]
    columns = [name for name in runs if name in ("row", "seed") or name.startswith((LABEL, *SECTIONS_OF_SPECS))]
    columns = [name for name in columns if "/" not in name]
    command = f"cope-sweep report {report.plan.ablation.cli_args} --store ablations/results --out ablations/results"
    assert set(columns) <= set(expected), f"run: {command}"
    pd.testing.assert_frame_equal(
        runs[columns], expected[columns], check_dtype=False, obj=f"{path.name}; run: {command}"
    )
    if (curves := path.with_suffix(CURVES)).exists():
        names = pd.read_parquet(curves, columns=["run_id", "row"]).drop_duplicates().set_index("run_id")["row"]
        pd.testing.assert_series_equal(names, expected["row"].loc[names.index], obj=f"{curves.name}; run: {command}")


def compared_twice(report):
    """Pairs of rows that a claim and the table both compare: the claim's pair, the row, the other one, and its cell."""
    model = table_of(report).model
    rows = {row.row: row for row in model.rows}
    for finding in claim_findings(report.plan, model):
        for pair in finding.pairs:
            column = pair.cell.column.name
            for row, other in ((pair.better.row, pair.than.row), (pair.than.row, pair.better.row)):
                cell = rows[row].metrics[column].comparison
                if cell is None or cell.against == "paper" or _reference(model, rows[row], cell).row != other:
                    continue
                if finding.measure != pair.cell.column.title:  # a variant judges the other row: another pair
                    continue
                yield pair, row, other, cell


@pytest.mark.parametrize("stem", STEMS)
def test_a_pair_of_rows_has_one_p_and_one_verdict_in_a_report(stem, reports):
    p_values = {}
    for pair, row, other, cell in compared_twice(reports[stem]):
        is_better = "better" if row == pair.better.row else "worse"
        key = (frozenset((row, other)), pair.cell.column.name)
        assert cell.p_adjusted == pair.comparison.p_adjusted, (row, other)
        assert p_values.setdefault(key, cell.p_adjusted) == cell.p_adjusted
        assert (cell.verdict == is_better) == (pair.comparison.verdict == "better"), (row, other)


def test_many_reports_compare_a_pair_twice(reports):
    assert sum(any(compared_twice(report)) for report in reports.values()) > 10


REPEATED = ("encodings_counting", "encodings_counting.one_machine")
"""A report whose rows come from two kinds of machine, and the one that repeats all of them on one, with fresh seeds.

Together, they would follow the hardware again. Both are shown, and the claims page says which decides.
"""


def test_no_report_leaves_out_seeds_of_its_configurations(reports):
    """A configuration has the same seeds wherever it is reported: none is replaced by others after a look."""
    finished: dict[str, dict[str, set[int]]] = {}
    for stem, report in reports.items():
        for row in report.plan.rows:
            seeds = {run.seed for run in row.runs if report.records[run.run_id].status == "finished"}
            finished.setdefault(configuration(row), {}).setdefault(stem, set()).update(seeds)
    for stem, report in reports.items():
        for row in report.plan.rows:
            others = finished[configuration(row)].items()
            elsewhere = [seeds for other, seeds in others if {stem, other} != set(REPEATED)]
            left_out = set().union(*elsewhere) - {run.seed for run in row.runs}
            assert not left_out, f"{stem}: {row.name} lacks seeds {sorted(left_out)}, which another report has"


def configuration(row):
    """What the runs of a row have in common, as text."""
    identity = row.runs[0].identity
    identity["spec"].pop("seed", None)
    return json.dumps(identity, sort_keys=True)


def test_every_file_belongs_to_a_report():
    for path in RESULTS.iterdir():
        known = path.name in ("README.md", "quickstart.svg") or path.name.startswith(
            tuple(f"{stem}." for stem in STEMS)
        )
        assert known, f"{path.name} belongs to no report; delete it"
        if path.suffix == ".svg" and path.name != "quickstart.svg":
            stem = max((stem for stem in STEMS if path.name.startswith(f"{stem}.")), key=len)
            assert f"({path.name})" in (RESULTS / f"{stem}.md").read_text(encoding="utf-8"), f"delete {path.name}"


def test_the_readmes_have_these_results():
    hint = "run: python -m tests.ablations.update_readme"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == with_results(text), hint
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == all_results(), hint


def test_a_wrong_number_and_a_stale_report_are_found(tmp_path):
    (results := tmp_path / "results").mkdir()
    (ablations := tmp_path / "ablations").mkdir()
    shutil.copy(RESULTS / "quickstart.parquet", results)
    text = (ABLATIONS / "quickstart.yaml").read_text(encoding="utf-8")
    (ablations / "quickstart.yaml").write_text(text)

    def read():
        return list(committed(Queries(ParquetStore(results), AblationFiles(ablations))))

    (report,) = read()
    good = (RESULTS / "quickstart.md").read_text(encoding="utf-8")
    check(report, good)
    with pytest.raises(AssertionError):
        check(report, good.replace("43.46", "43.47", 1))
    run_id = report.plan.rows[1].runs[0].run_id
    record = report.records[run_id]
    wrong = record.model_copy(update={"metrics": dict.fromkeys(record.metrics, 50.0)})
    with pytest.raises(AssertionError):
        check(replace(report, records={**report.records, run_id: wrong}), good)

    (ablations / "quickstart.yaml").write_text(text.replace("steps: 450", "steps: 451"))
    with raises("stale_report", file="quickstart.parquet", ablation="quickstart"):
        read()
    (ablations / "quickstart.yaml").unlink()
    with raises("not_found", name="quickstart"):
        read()


def test_tuned_reports_name_the_search_that_tuned_their_rows(reports):
    searches = {report.plan.name: report.plan for report in reports.values() if report.plan.is_drawn}
    tuned = [report for report in reports.values() if report.plan.ablation.content.tuned]
    assert tuned
    for report in tuned:
        search = searches[report.plan.ablation.content.tuned]
        seeds = set(report.plan.ablation.content.seeds)
        assert not seeds & set(search.ablation.content.seeds), "tuned by the seeds that it reports"
        rows = {row.labels["model.position"] for row in search.rows}
        assert {row.labels["model.position"] for row in report.plan.rows} <= rows
        assert not search.ablation.content.tuned


def test_the_guide_quotes_what_tuning_by_few_seeds_found():
    """Rows that solve MQAR with every tuning seed, and how many of the other seeds do."""
    tuning, reported = (
        pd.read_parquet(RESULTS / f"{stem}.small.parquet") for stem in ("encodings_tuning", "encodings")
    )
    row, draw = "label.model.position", ["label.train.lr", "label.train.weight_decay"]
    tuned, others = (frame[frame["label.task"] == "MQAR"].set_index(row) for frame in (tuning, reported))
    solved = (tuned[VALIDATION] <= 1).groupby([row, *(tuned[key] for key in draw)]).all().groupby(row).any()
    seeds = (others["in_dist/token_error"] <= 1).groupby(row).agg(["sum", "count"])[solved]
    few = seeds[seeds["sum"] < seeds["count"]]
    assert (len(solved), len(few), few["sum"].min(), few["sum"].max()) == (34, 11, 3, 5)
    assert set(seeds["count"]) == {7}
    guide = " ".join((ROOT / "docs" / "how-to" / "search.md").read_text(encoding="utf-8").split())
    assert f"({len(tuning):,} runs at the small scale" in guide
    assert "of its 34 encodings now, eleven solve it with all three tuning seeds, and with only 3 to 5 of 7" in guide
