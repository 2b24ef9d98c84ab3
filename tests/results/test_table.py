import io
import json
import math
import time
from html.parser import HTMLParser

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from cope_sweep.record import Ledger
from cope_sweep.results import table
from tests.results.ablations import fail, finish, plan_of

PUBLISHED = [
    {"match": {"model.position": "CoPE"}, "values": {"in_dist/token_error": 4.7}, "std": {"in_dist/token_error": 0.5},
     "source": "Table 1"},
    {"match": {"model.position": "None"}, "values": {"in_dist/token_error": 78.0}, "source": "Table 1"},
]  # fmt: skip


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "store", create=True)


@pytest.fixture
def plan():
    return plan_of(published=PUBLISHED)


@pytest.fixture
def partial(plan, ledger):
    """CoPE complete, the second row with one seed of two (and a better mean!), the third with nothing finished."""
    cope, other, none = plan.rows
    finish(ledger, cope.runs[0], {"in_dist/token_error": 10.0, "dense/loss": 0.25})
    finish(ledger, cope.runs[1], {"in_dist/token_error": 14.0, "dense/loss": 0.75})
    finish(ledger, other.runs[0], {"in_dist/token_error": 1.0, "dense/loss": 9.0})
    fail(ledger, other.runs[1])
    fail(ledger, none.runs[0])
    return table(plan, ledger)


@pytest.fixture
def complete(plan, ledger):
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            finish(ledger, run, {"in_dist/token_error": 10.0 * index + run.seed, "dense/loss": float(index)})
    return table(plan, ledger)


def cells_of_markdown(text):
    tokens = MarkdownIt().enable("table").parse(text)
    rows, row = [], None
    for token in tokens:
        if token.type == "tr_open":
            row = []
            rows.append(row)
        elif token.type == "inline" and row is not None:
            row.append("".join(child.content for child in token.children))
        elif token.type == "table_close":
            row = None
    return rows


class Cells(HTMLParser):
    """The text of every cell of an HTML table, and the attributes of its tag."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.attributes, self._open = [], {}, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.attributes[len(self.rows) - 1, len(self.rows[-1]) - 1] = dict(attrs)
            self._open = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data):
        if self._open:
            self.rows[-1][-1] += data


HEADS = ["position", "parameters", "In-dist. (%)", "In-dist., published", "dense/loss", "runs"]
PARTIAL = [
    ["CoPE", "1,234", "12.00 ± 2.83", "4.70 ± 0.50", "0.500 ± 0.354", "2/2"],
    ["a_b <c>", "1,234", "1.00 (n=1)", "–", "9.000 (n=1)", "1/2: 1 failed"],
    ["None", "–", "–", "78.00", "–", "0/2: 1 failed, 1 pending"],
]


def test_the_frame_by_hand(partial):
    frame = partial.frame
    assert frame["row"].tolist() == ["CoPE", "a_b <c>", "None"]
    assert frame["finished"].tolist() == [2, 1, 0]
    assert frame["failed"].tolist() == [0, 1, 1]
    assert frame["pending"].tolist() == [0, 0, 1]
    assert frame["seeds"].tolist() == [2, 2, 2]
    cope = frame.iloc[0]
    assert cope["in_dist/token_error.mean"] == 12.0
    assert cope["in_dist/token_error.std"] == pytest.approx(math.sqrt(8))
    assert cope["in_dist/token_error.n"] == 2
    assert cope["in_dist/token_error.ci_low"] == pytest.approx(12 - 12.7062047 * 2)
    assert cope["in_dist/token_error.published"] == 4.7
    assert cope["in_dist/token_error.published_std"] == 0.5
    assert frame["in_dist/token_error.n"].tolist() == [2, 1, 0]
    assert frame["in_dist/token_error.std"].isna().tolist() == [False, True, True]
    assert frame["parameters"].tolist() == [1234, 1234, pd.NA]


def test_column_names_are_stable(partial):
    metric = [".mean", ".std", ".n", ".ci_low", ".ci_high", ".published", ".published_std", ".best"]
    assert partial.frame.columns.tolist() == [
        "row", "model.position", "seeds", "finished", "failed", "running", "interrupted", "pending", "parameters",
        *(f"in_dist/token_error{part}" for part in metric),
        *(f"dense/loss{part}" for part in metric),
    ]  # fmt: skip


def test_best_is_among_rows_with_all_their_seeds(partial, complete):
    assert not partial.frame["in_dist/token_error.best"].any()
    assert not partial.complete
    assert complete.frame["in_dist/token_error.best"].tolist() == [True, False, False]
    assert complete.frame["dense/loss.best"].tolist() == [False, False, True]
    assert complete.complete


def test_a_tie_has_two_best(ledger):
    plan = plan_of(seeds=[0])
    for row, value in zip(plan.rows, (1.0, 1.0, 2.0), strict=True):
        finish(ledger, row.runs[0], {"in_dist/token_error": value, "dense/loss": value})
    assert table(plan, ledger).frame["in_dist/token_error.best"].tolist() == [True, True, False]


def test_markdown(partial, complete):
    assert cells_of_markdown(partial.to_markdown()) == [HEADS, *PARTIAL]
    assert "(n=…): the finished ones" in partial.to_markdown()
    text = complete.to_markdown()
    assert cells_of_markdown(text)[0] == HEADS[:-1]
    assert "**0.50 ± 0.71**" in text
    assert text.count("**") == 4
    assert text.splitlines()[-1] == "Mean ± standard deviation over 2 seeds; bold: best; published: Table 1."
    assert len({len(line) for line in text.splitlines()[:5]}) == 1


def test_latex(partial, complete):
    text = partial.to_latex()
    assert r"\caption{Does it copy? 100 \% \& more. " in text
    assert r"a\_b \textless{}c\textgreater{} & 1,234 & 1.00 (n=1) & -- & 9.000 (n=1) & 1/2: 1 failed \\" in text
    assert r"CoPE & 1,234 & 12.00 $\pm$ 2.83 & 4.70 $\pm$ 0.50 & 0.500 $\pm$ 0.354 & 2/2 \\" in text
    assert r"\begin{tabular}{lrrrrl}" in text
    assert r"\label{tab:copying}" in text
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    assert r"\textbf{0.50 $\pm$ 0.71}" in complete.to_latex()
    assert text.isascii()


def test_html(partial, complete):
    cells = Cells(partial.to_html())
    assert cells.rows == [HEADS, *PARTIAL]
    assert "<c>" not in partial.to_html()
    assert cells.attributes[1, 2]["title"] == "n = 2; 95 % interval -13.41 … 37.41"
    best = [place for place, attributes in Cells(complete.to_html()).attributes.items()
            if "best" in (attributes.get("class") or "")]  # fmt: skip
    assert best == [(1, 2), (3, 4)]


def test_rich(partial):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(partial.to_rich())
    text = console.export_text()
    assert "Does it copy? 100 % & more" in text
    for line in PARTIAL:
        assert any(all(cell in shown for cell in line) for shown in text.splitlines()), line


def test_narrow_terminals_do_not_tear_numbers(partial):
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(partial.to_rich())
    assert "12.00 ± 2.83" in console.export_text()


def test_json_is_plain(partial):
    data = json.loads(json.dumps(partial.to_json(), allow_nan=False))
    assert data["ablation"] == "copying"
    assert data["axes"] == {"model.position": "position"}
    assert [metric["goal"] for metric in data["metrics"]] == ["min", "max"]
    cope, other, none = data["rows"]
    assert cope["labels"] == {"model.position": "CoPE"}
    error = cope["metrics"]["in_dist/token_error"]
    assert error["published"] == {"value": 4.7, "std": 0.5, "source": "Table 1"}
    assert (error["mean"], error["n"], error["best"]) == (12.0, 2, False)
    assert error["ci"] == [pytest.approx(-13.4124), pytest.approx(37.4124)]
    assert other["metrics"]["in_dist/token_error"] == {
        "mean": 1.0, "std": None, "n": 1, "ci": None, "published": None, "best": False,
    }  # fmt: skip
    assert none["counts"] == {"finished": 0, "failed": 1, "running": 0, "interrupted": 0, "pending": 1}
    assert none["parameters"] is None
    assert [run["status"] for run in none["runs"]] == ["failed", "pending"]
    assert none["runs"][0]["message"] == "Diverged: the loss is nan"
    assert none["runs"][1]["message"] is None


def test_csv_and_parquet_have_rows_or_every_run(partial, tmp_path):
    rows = pd.read_csv(io.StringIO(partial.to_csv()))
    assert rows["in_dist/token_error.mean"].tolist()[:2] == [12.0, 1.0]
    runs = pd.read_csv(io.StringIO(partial.to_csv(runs=True)))
    assert len(rows) == 3
    assert len(runs) == 6
    partial.to_parquet(tmp_path / "rows.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "rows.parquet"), partial.frame)
    partial.to_parquet(tmp_path / "runs.parquet", runs=True)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "runs.parquet"), partial.runs)


def test_a_metric_that_a_row_lacks_is_an_empty_cell(plan, ledger):
    """As a long context that an encoding does not reach: the row is complete all the same."""
    for row in plan.rows:
        for run in row.runs:
            metrics = {"in_dist/token_error": 10.0}
            finish(ledger, run, metrics if row is plan.rows[1] else metrics | {"dense/loss": 0.5})
    drawn = table(plan, ledger)
    assert drawn.complete
    assert drawn.frame["dense/loss.n"].tolist() == [2, 0, 2]
    assert drawn.frame["dense/loss.best"].tolist() == [True, False, True]
    assert cells_of_markdown(drawn.to_markdown())[2][-1] == "–"
    assert drawn.to_json()["rows"][1]["metrics"]["dense/loss"]["mean"] is None
    assert "–" in drawn.to_html()
    assert drawn.to_latex()


def test_without_published_numbers_or_results_there_are_no_columns_for_them(ledger):
    shown = cells_of_markdown(table(plan_of(), ledger).to_markdown())
    assert shown[0] == ["position", "In-dist. (%)", "dense/loss", "runs"]
    assert shown[1] == ["CoPE", "–", "–", "0/2: 2 pending"]


def test_an_ablation_without_axes_has_one_row(ledger):
    plan = plan_of(grid={}, seeds=[4])
    finish(ledger, plan.rows[0].runs[0], {"in_dist/token_error": 3.0, "dense/loss": 1.0})
    text = table(plan, ledger).to_markdown()
    assert cells_of_markdown(text) == [
        ["row", "parameters", "In-dist. (%)", "dense/loss"],
        ["base", "1,234", "3.00", "1.000"],
    ]
    assert text.endswith("One seed.\n")


def test_thousands_of_runs_are_a_matter_of_seconds(ledger):

    plan = plan_of(grid={"model.position": {"CoPE": ["cope"], "None": []}}, seeds=list(range(500)))
    began = time.perf_counter()
    assert table(plan, ledger).frame["pending"].tolist() == [500, 500]
    assert time.perf_counter() - began < 5
