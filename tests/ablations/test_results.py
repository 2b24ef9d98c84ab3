"""The reports in ablations/results: their numbers are those of their runs, and their runs are those of today's files."""

import itertools
import re
import shutil
from fractions import Fraction
from xml.etree import ElementTree

import pandas as pd
import pytest

from cope_sweep.errors import UserError
from cope_sweep.read.reports.runs import overview, read_committed, run_files
from cope_sweep.read.tables.render import markdown_text
from cope_sweep.read.tables.stats import summarise
from cope_sweep.store import Store
from tests.ablations.update_readme import ABLATIONS, RESULTS, ROOT, all_results, with_results

PAPER_SIZE = RESULTS / "paper_size"
STEMS = [path.stem for path in run_files(RESULTS)]
VALUE = re.compile(r"(?P<mean>-?\d+\.\d+)(?: ± (?P<std>\d+\.\d+))?(?: \(n=(?P<n>\d+)\))?")


def table_lines(text, number=0):
    """The cells of a table of the results: headings, then rows."""
    results = text.partition("\n## Results\n")[2].partition("\n## Provenance\n")[0]
    block = re.findall(r"(?:^\|.*\n)+", results, re.MULTILINE)[number]
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
    cells = [[re.sub(r"\\(.)", r"\1", cell.strip().strip("*")) for cell in line] for line in split]
    return cells[0], cells[2:]


def check_numbers(report, text):
    """Compare every mean, deviation and count of a report with the statistics of the runs in its frame."""
    frame = pd.read_parquet(report.path)
    headings, rows = table_lines(text)
    assert len(rows) == len(report.plan.rows)
    checked = 0
    for metric in report.plan.ablation.content.metrics:
        column = headings.index(metric.title)
        for row, cells in zip(report.plan.rows, rows, strict=True):
            own = frame[frame["run_id"].isin([run.run_id for run in row.runs]) & (frame["status"] == "finished")]
            found = summarise(own[metric.name].dropna() if metric.name in own else [])
            if found.n == 0:
                assert cells[column] == "–"
                continue
            shown = VALUE.fullmatch(cells[column])
            assert shown, cells[column]
            half_unit = 0.5000001 * 10.0 ** -len(shown["mean"].partition(".")[2])
            assert float(shown["mean"]) == pytest.approx(found.mean * metric.scale, abs=half_unit), (
                report.path.stem,
                row.name,
            )
            assert int(shown["n"] or len(row.runs)) == found.n
            if shown["std"] is None:  # one value, or a number that every seed has, as that of parameters
                assert found.n == 1 or found.std == 0
            else:
                deviation = pytest.approx(found.std * metric.scale, abs=half_unit)
                assert float(shown["std"]) == deviation, (report.path.stem, row.name)
            checked += 1
    assert checked > 0


def check_verdicts(report, text):
    """Compare the verdicts of a report with those that follow from its runs."""
    model = report.table.model
    if any(row.published for row in report.plan.rows):
        check_published(report, text)
        return
    due = [row.metrics[model.primary.name].comparison for row in model.rows]
    due = [each for each in due if each]
    if not due:
        assert "**Result" not in text
        return
    headings, rows = table_lines(text, 1)
    assert [cells[headings.index("verdict")] for cells in rows] == [each.verdict for each in due]
    assert f"**Result: {markdown_text(model.answer)}**\n" in text
    for each in due:  # by other code
        a, b = (row.metrics[model.primary.name].values for row in (_row_of(model, each), _reference(model, each)))
        if min(len(a), len(b)) > 1:
            assert each.difference.p == pytest.approx(exact_p(list(a.values()), list(b.values()))), each


def exact_p(a, b):
    """The share of all divisions whose means differ at least as much, by fractions: scipy's rounded sums lose ties."""
    values = [Fraction(value).limit_denominator(10**9) for value in (*a, *b)]
    total = sum(values)

    def difference(chosen):
        own = sum(chosen)
        return abs(own / len(a) - (total - own) / len(b))

    divisions = [difference(chosen) for chosen in itertools.combinations(values, len(a))]
    return sum(each >= divisions[0] for each in divisions) / len(divisions)


def check_published(report, text):
    """Compare the differences from published numbers with the runs in the report's frame."""
    frame = pd.read_parquet(report.path)
    expected = []
    for name in (metric.name for metric in report.plan.ablation.content.metrics):
        for row in report.plan.rows:
            values = frame[frame["run_id"].isin([run.run_id for run in row.runs])][name]
            published = row.published.values.get(name) if row.published else None
            if published is not None and values.notna().any():
                expected.append(values.mean() - published)
    headings, rows = table_lines(text, 1)
    assert [float(cells[headings.index("difference")]) for cells in rows] == pytest.approx(expected, abs=0.00501)


def _row_of(model, comparison):
    return next(row for row in model.rows if row.metrics[model.primary.name].comparison is comparison)


def _reference(model, comparison):
    """The row that a row was compared with: of a label, the one with the same labels of the other axes."""
    row = _row_of(model, comparison)
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
    return {each.path.stem: each for each in read_committed(RESULTS, ABLATIONS)}


@pytest.mark.parametrize("stem", STEMS)
def test_the_numbers_of_a_report_are_those_of_its_runs(stem, reports):
    report, text = reports[stem], (RESULTS / f"{stem}.md").read_text(encoding="utf-8")
    assert not report.stale, report.stale
    check_numbers(report, text)
    check_verdicts(report, text)
    for name in re.findall(r"\]\(([^)]+\.svg)\)", text):
        assert ElementTree.parse(RESULTS / name).getroot().tag.endswith("svg")


def test_every_file_belongs_to_a_report():
    for path in RESULTS.iterdir():
        known = path.name in ("README.md", "quickstart.svg", PAPER_SIZE.name) or path.name.startswith(
            tuple(f"{stem}." for stem in STEMS)
        )
        assert known, f"{path.name} belongs to no report; delete it"


def test_the_report_of_the_paper_s_size_is_that_of_its_store(tmp_path, reports):
    """The runs whose folders are kept are the finished ones of the report, with the same numbers."""
    folder = tmp_path / "store"
    shutil.copytree(PAPER_SIZE, folder)
    store = Store(folder)  # without an index, which is made of the folders
    report = reports["flip_flop_architectures.two_cores"]
    finished = {run_id: each for run_id, each in report.records.items() if each.status == "finished"}
    kept = store.index.records(finished)
    assert finished
    assert finished.keys() == {path.name for path in (PAPER_SIZE / "runs").iterdir()}
    for run_id, each in finished.items():
        assert kept[run_id].metrics == pytest.approx(each.metrics)


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
    (report,) = read_committed(results, ablations)
    good = (RESULTS / "quickstart.md").read_text(encoding="utf-8")
    check_numbers(report, good)
    shown = re.search(r" (\d+)(\.\d+ ± )", good)
    with pytest.raises(AssertionError):
        check_numbers(report, good.replace(shown[0], f" {int(shown[1]) + 1}{shown[2]}", 1))
    with pytest.raises(AssertionError):
        check_verdicts(report, good.replace("| descriptive", "| better", 1))

    (ablations / "quickstart.yaml").write_text(text.replace("steps: 450", "steps: 451"))
    (report,) = read_committed(results, ablations)
    assert report.stale.startswith("quickstart.parquet is stale: 6 of its runs are not in the plan of quickstart today")
    with pytest.raises(UserError, match="is stale"):
        overview([report], "results")
    (ablations / "quickstart.yaml").unlink()
    with pytest.raises(UserError, match="there is no ablation 'quickstart'"):
        list(read_committed(results, ablations))
