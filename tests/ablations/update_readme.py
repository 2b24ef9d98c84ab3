"""Writes the table of the main README from the reports in ablations/results.

    python -m tests.ablations.update_readme

Reports are chosen by `MAIN`, because that README is short; ablations/results/README.md has all of them.
"""

import re
from pathlib import Path

from cope_sweep.read.reports.runs import read_committed, run_files
from cope_sweep.read.tables import Table
from cope_sweep.read.tables.model import reference
from cope_sweep.read.tables.render import layout, markdown_text

ROOT = Path(__file__).parent.parent.parent
ABLATIONS, RESULTS = ROOT / "ablations", ROOT / "ablations" / "results"
MAIN = ("flip_flop.small", "selective_copy.small", "counting.small", "quickstart")
BEGIN, END = "<!-- results: made by tests/ablations/update_readme.py -->", "<!-- end of results -->"
HEADING = "# Results\n\nReports of `cope-sweep report --out`. Each has its provenance and comparisons.\n\n"
MOST_ROWS = 10
"""Rows whose values are listed for a report."""


def committed(results=RESULTS, ablations=ABLATIONS):
    """The reports of a folder by name."""
    for path in run_files(results):
        yield read_committed(path, ablations)


def table_of(report):
    """The table of a report, compared as the report is."""
    report.check()
    return Table(report, reference(report.plan))


def overview(reports, folder):
    """A Markdown table: for each report the values of the primary metric and what they say, with a link into `folder`.

    Of more than `MOST_ROWS` rows, the lowest and the highest value.

    Raises NotFinishedError where a report is stale.
    """
    lines = ["| ablation | scale | mean ± standard deviation over seeds | result |", "| --- | --- | --- | --- |"]
    for each in reports:
        model = table_of(each).model
        drawn = layout(model)
        column = next(i for i, header in enumerate(drawn.headers) if header.text == model.primary.title)
        named = {
            row.row: f"{markdown_text(row.short)} {cells[column].text}"
            for row, cells in zip(model.rows, drawn.rows, strict=True)
        }
        values = ", ".join(named.values())
        found = {row.row: row.metrics[model.primary.name].summary for row in model.rows}
        means = {row: summary.mean for row, summary in found.items() if summary.n}
        if len(named) > MOST_ROWS and means:
            ends = (min(means, key=means.__getitem__), max(means, key=means.__getitem__))
            values = f"{len(named)} rows, from {' to '.join(named[end] for end in ends)}"
        link = f"[{markdown_text(model.title)}]({folder}/{each.path.stem}.md)"
        values = f"{markdown_text(model.primary.title)}: {values}"
        lines.append(f"| {link} | {each.plan.ablation.scale or 'own'} | {values} | {markdown_text(model.answer)} |")
    return "\n".join(lines) + "\n"


def with_results(text):
    """The text of the main README with today's table."""
    reports = [each for each in committed() if each.path.stem in MAIN]
    table = overview(sorted(reports, key=lambda each: MAIN.index(each.path.stem)), "ablations/results")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"README.md has no line {BEGIN}"
    assert end, f"README.md has no line {END}"
    return f"{before}{begin}\n{table}{end}{after}"


def all_results():
    """The text of ablations/results/README.md."""
    return HEADING + re.sub(r"\(\./", "(", overview(committed(), "."))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (RESULTS / "README.md").write_text(all_results(), encoding="utf-8")
