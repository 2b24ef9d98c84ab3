"""Writes the table of the main README from the reports in ablations/results.

    python -m tests.ablations.update_readme

Reports are chosen by `MAIN`, because that README is short; ablations/results/README.md has all of them.
"""

import re
from pathlib import Path

from cope_sweep.read.reports.runs import overview, read_committed

ROOT = Path(__file__).parent.parent.parent
ABLATIONS, RESULTS = ROOT / "ablations", ROOT / "ablations" / "results"
MAIN = ("flip_flop.small", "selective_copy.small", "counting.small", "quickstart")
BEGIN, END = "<!-- results: made by tests/ablations/update_readme.py -->", "<!-- end of results -->"
HEADING = "# Results\n\nReports of `cope-sweep report --out`. Each has its provenance and comparisons.\n\n"


def with_results(text):
    """The text of the main README with today's table."""
    reports = [each for each in read_committed(RESULTS, ABLATIONS) if each.path.stem in MAIN]
    table = overview(sorted(reports, key=lambda each: MAIN.index(each.path.stem)), "ablations/results")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"README.md has no line {BEGIN}"
    assert end, f"README.md has no line {END}"
    return f"{before}{begin}\n{table}{end}{after}"


def all_results():
    """The text of ablations/results/README.md."""
    return HEADING + re.sub(r"\(\./", "(", overview(read_committed(RESULTS, ABLATIONS), "."))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (RESULTS / "README.md").write_text(all_results(), encoding="utf-8")
