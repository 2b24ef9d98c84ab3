import importlib.metadata
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from cope_sweep.read.tables import Format, find_format, formats, table
from cope_sweep.store import QueryError
from tests.read.tables.ablations import finish, plan_of


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


def test_latex_with_stars(store):
    """The smallest p of 5 against 5 seeds is 2/252; of two comparisons it counts twice: 0.016."""
    plan = plan_of(
        grid={"model.position": {"CoPE": ["cope"], "Far": ["rope"], "Near": ["absolute"]}}, seeds=[0, 1, 2, 3, 4]
    )
    values = {"CoPE": [1, 2, 3, 4, 5], "Far": [11, 12, 13, 14, 15], "Near": [1, 2, 3, 4, 6]}
    for row in plan.rows:
        for run, value in zip(row.runs, values[row.name], strict=True):
            finish(store, run, {"in_dist/token_error": float(value)})
    drawn = table(plan, store, compare="CoPE")
    assert r"Far & 1,234 & 13.00 $\pm$ 1.58$^{*}$ &" in drawn.to_latex(stars=True)
    assert r"Near & 1,234 & 3.20 $\pm$ 1.92 &" in drawn.to_latex(stars=True)
    assert "* p $\\leq$ 0.05, ** p $\\leq$ 0.01" in drawn.to_latex(stars=True)
    assert drawn.to_latex(stars=True).count(r"\begin{tabular}") == 1
    assert drawn.to_latex().count(r"\begin{tabular}") == 2
    assert "^{*}" not in drawn.to_latex() + table(plan, store).to_latex(stars=True)


def test_numbers_in_html_link_to_their_runs(partial):
    first, second = (run.run_id for run in partial.results.plan.rows[0].runs)
    text = partial.to_html()
    assert f'<a href="#run-{first}">12.00 ± 2.83</a>' in text
    assert Cells(text).rows[4] == ["row", "seed", "status", "run", "in_dist/token_error", "dense/loss"]
    assert Cells(text).rows[6] == ["CoPE", "1", "finished", second, "14", "0.75"]
    targets = set(re.findall(r'href="#([^"]+)"', text))
    assert targets <= set(re.findall(r'id="([^"]+)"', text))
    served = partial.to_html(runs_url="/api/v1/runs")
    assert f'<a href="/api/v1/runs?run={first}&amp;run={second}">12.00 ± 2.83</a>' in served
    assert Cells(served).rows == [HEADS, *PARTIAL]


def test_rich(partial):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(partial.to_rich())
    text = console.export_text()
    assert "Does it copy? 100 % & more" in text
    for line in PARTIAL:
        assert any(all(cell in shown for cell in line) for shown in text.splitlines()), line


@pytest.mark.parametrize("width", range(50, 100, 7))
def test_nothing_is_cut_in_narrow_terminals(plan, store, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(plan, store).to_rich())
    lines = console.export_text().splitlines()
    assert any("0/2: 2 pending" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_an_ablation_without_axes_has_one_row(store):
    plan = plan_of(grid={}, seeds=[4])
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 3.0, "dense/loss": 1.0})
    text = table(plan, store).to_markdown()
    assert cells_of_markdown(text) == [
        ["row", "parameters", "In-dist. (%)", "dense/loss"],
        ["base", "1,234", "3.00", "1.000"],
    ]
    assert text.endswith("One seed; (%): token error.\n")


def test_a_metric_that_a_row_lacks_is_an_empty_cell(plan, store):
    for row in plan.rows:
        for run in row.runs:
            metrics = {"in_dist/token_error": 10.0}
            finish(store, run, metrics if row is plan.rows[1] else metrics | {"dense/loss": 0.5})
    drawn = table(plan, store)
    assert drawn.complete, "as with a long context that an encoding does not reach"
    assert drawn.to_json()["rows"][1]["metrics"]["dense/loss"]["mean"] is None
    assert cells_of_markdown(drawn.to_markdown())[2][-1] == "–"
    assert Cells(drawn.to_html()).rows[2][-1] == "–"
    assert " & -- \\\\" in drawn.to_latex()


HOSTILE = 'a "b" <script>&{}\\_%$#~^|*`[x](y)'


@pytest.fixture
def hostile(store):
    """A table with characters in every text that mean something in some format."""
    published = [{"match": {"model.position": HOSTILE}, "values": {"in_dist/token_error": 1.0}, "source": HOSTILE}]
    metrics = [{"name": "in_dist/token_error", "label": HOSTILE, "unit": "%"}]
    plan = plan_of(
        "a{b}_c d", title=HOSTILE, grid={"model.position": {HOSTILE: ["cope"]}}, metrics=metrics, published=published
    )
    finish(store, plan.runs[0], {"in_dist/token_error": 2.0})
    return table(plan, store)


def test_braces_and_other_special_characters_are_escaped_in_latex(hostile):
    text = hostile.to_latex()
    escaped = (
        r'a "b" \textless{}script\textgreater{}\&\{\}\textbackslash{}\_\%\$\#\textasciitilde{}'
        r"\textasciicircum{}|*`[x](y)"
    )
    # Title and source in the caption, the row's label, and two column headings.
    assert text.count(escaped) == 5
    assert r"\label{tab:a-b-c-d}" in text
    unescaped = re.sub(r"\\[\\{}&%$#_~^]", "", text)
    assert unescaped.count("{") == unescaped.count("}")


def test_special_characters_are_escaped_in_html(hostile):
    text = hostile.to_html()
    cells = Cells(text)
    assert cells.rows[1][0] == HOSTILE
    assert cells.rows[0][2:4] == [f"{HOSTILE} (%)", f"{HOSTILE}, published"]
    assert cells.attributes[1, 3]["title"] == HOSTILE
    assert set(re.findall(r"<(\w+)", text)) == {"table", "caption", "thead", "tbody", "tr", "th", "td", "a"}


def test_special_characters_are_shown_in_a_terminal(hostile):
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(hostile.to_rich())
    assert console.export_text().count(HOSTILE) == 5


TITLES = Format("titles", "text/x-title", ".title", lambda table, _: table.model.title.encode())
NO_FORMAT = "text"


@pytest.fixture
def installed(monkeypatch):
    """Makes entry points of a group visible, as those of an installed package."""
    original = importlib.metadata.entry_points

    def declare(*names):
        points = [
            importlib.metadata.EntryPoint(name, f"tests.read.tables.test_render:{name}", "cope_sweep.formats")
            for name in names
        ]
        monkeypatch.setattr(
            importlib.metadata, "entry_points",
            lambda **wanted: points if wanted == {"group": "cope_sweep.formats"} else original(**wanted),
        )  # fmt: skip
        formats.cache_clear()

    yield declare
    formats.cache_clear()


def test_formats_and_media_types_are_unique():
    assert (
        len({each.media_type for each in formats().values()})
        == len({each.suffix for each in formats().values()})
        == len(formats())
    )
    assert next(iter(formats())) == "json", "what REST answers with by default"
    assert [name for name, each in formats().items() if each.render_runs] == ["csv", "parquet"]


def test_an_installed_package_adds_a_format(installed, partial):
    installed("TITLES")
    assert find_format("titles").render(partial, None) == b"Does it copy? 100 % & more"


@pytest.mark.parametrize("name", ["NO_FORMAT", "missing"])
def test_an_installed_format_that_cannot_be_used_is_named(installed, name):
    installed(name)
    with pytest.raises(QueryError, match=f"the entry point '{name}' .* uninstall its package"):
        formats()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("against", [None, "CoPE", "paper"])
def test_latex_compiles(store, tmp_path, against):
    """With every character that means something to TeX, warnings, and the rule of a comparison."""
    hostile = 'a "b" <script>&{}\\_%$#~^|*`[x](y) ± × · – … − ≥ ≤ √'
    plan = plan_of(
        title=hostile, seeds=[0, 1, 2], grid={"model.position": {"CoPE": ["cope"], hostile: []}},
        published=[{"match": {"model.position": "CoPE"}, "values": {"in_dist/token_error": 0.004}, "source": hostile}],
    )  # fmt: skip
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            values = {"in_dist/token_error": 10.0 * index + run.seed, "dense/loss": -1.0 * run.seed}
            finish(store, run, values, {"precision": f"fp{index}_x"})
    text = table(plan, store, compare=against).to_latex()
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{text}\end{{document}}"
    (tmp_path / "table.tex").write_text(document)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "table.pdf").stat().st_size > 5000
