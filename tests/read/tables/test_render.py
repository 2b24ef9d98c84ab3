import csv
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import get_args

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from cope_sweep.api.tables import GetTable, TableFormat
from cope_sweep.read.tables import FORMATS, Table, read_results, table, table_file
from cope_sweep.read.tables.latex_text import latex_text, unknown_characters
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.render import _latex_table
from cope_sweep.read.tables.row_names import find_rows
from tests.helpers.errors import raises
from tests.helpers.finished_runs import finish, plan_of


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


def test_rich(partial):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(partial.to_rich())
    text = console.export_text()
    assert "Does it copy? 100 % & more" in text
    for line in PARTIAL:
        assert any(all(cell in shown for cell in line) for shown in text.splitlines()), line


def test_nothing_is_cut_in_narrow_terminals(plan, store):
    drawn = table(plan, store)
    for width in range(50, 100, 7):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(drawn.to_rich())
        lines = console.export_text().splitlines()
        assert any("0/2: 2 pending" in line for line in lines), width
        assert max(map(len, lines)) <= width


def test_an_ablation_without_axes_has_one_row(store):
    plan = plan_of(grid={}, seeds=[4])
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 3.0, "dense/loss": 1.0})
    text = table(plan, store).to_markdown()
    assert cells_of_markdown(text) == [
        ["row", "parameters", "In-dist. (%)", "dense/loss"],
        ["base", "1,234", "3.00", "1.000"],
    ]
    assert text.endswith("One seed. Percentages: token error.\n")


def test_a_metric_that_a_row_lacks_is_an_empty_cell(plan, store):
    for row in plan.rows:
        for run in row.runs:
            metrics = {"in_dist/token_error": 10.0}
            finish(store, run, metrics if row is plan.rows[1] else metrics | {"dense/loss": 0.5})
    drawn = table(plan, store)
    assert drawn.complete, "as with a long context that an encoding does not reach"
    assert drawn.to_json()["rows"][1]["metrics"]["dense/loss"]["mean"] is None
    assert cells_of_markdown(drawn.to_markdown())[2][-1] == "–"
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
        r"\textasciicircum{}\textbar{}*`[x](y)"
    )
    # Title, source, the row's label, and two column headings.
    assert text.count(escaped) == 5
    assert r"\label{tab:a-b-c-d}" in text
    unescaped = re.sub(r"\\[\\{}&%$#_~^]", "", text)
    assert unescaped.count("{") == unescaped.count("}")


def test_special_characters_are_shown_in_a_terminal(hostile):
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(hostile.to_rich())
    assert console.export_text().count(HOSTILE) == 5


@pytest.mark.parametrize("file_format", ["terminal", "markdown"])
def test_control_characters_are_shown(store, file_format):
    metrics = [{"name": "in_dist/token_error", "label": "\x1b[2J"}]
    drawn = table(plan_of(title="\x1b[2J", grid={"model.position": {"\x1b[2J": ["cope"]}}, metrics=metrics), store)
    text = FORMATS[file_format].render(drawn).decode()
    assert "\x1b" not in text
    assert "x1b" in text


def test_formats_and_media_types_are_unique():
    assert list(FORMATS) == list(GetTable.MEDIA_TYPES) == list(get_args(TableFormat))
    assert len({*GetTable.MEDIA_TYPES.values()}) == len(FORMATS)
    assert len({each.suffix for each in FORMATS.values()}) == len(FORMATS)
    assert [name for name, each in FORMATS.items() if each.render_runs] == ["csv", "terminal"]


def file(drawn, **options):
    return table_file(Table(drawn.results, GetTable(name="", **options)))


def test_an_option_that_the_format_lacks_is_an_error(partial):
    for options, code in (
        ({"stars": True}, "option_of_latex"),
        ({"notes": False}, "option_of_latex"),
        ({"caption": "", "format": "csv"}, "option_of_latex"),
        ({"runs": True, "format": "latex"}, "format_without_runs"),
        ({"margin": "1", "compare": "CoPE", "format": "csv"}, "no_effect"),
        ({"runs": True, "compare": "CoPE", "format": "csv"}, "no_effect"),
    ):
        with raises(code):
            file(partial, **options)
    with raises("sorted_runs"):
        file(partial, format="csv", runs=True, sort="parameters")
    assert rb"\caption{\emph{Mine}}" in file(partial, format="latex", caption=r"\emph{Mine}")


GRID = {"model.position": {"CoPE": ["cope"], "RoPE": ["rope"]}, "model.layers": [1, 2]}


@pytest.fixture
def two_axes(store):
    """Errors: CoPE 3 and 1 with one layer and two, RoPE 5 and 4."""
    plan = plan_of(grid=GRID, seeds=[0])
    for run, error in zip(plan.runs, (3.0, 1.0, 5.0, 4.0), strict=True):
        finish(store, run, {"in_dist/token_error": error, "dense/loss": error})
    return plan, store


def latex_rows(text):
    """The lines between the rules of the first tabular."""
    return [line.strip() for line in text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()]


def test_latex_marks_what_other_formats_mark(two_axes):
    text = table(*two_axes).to_latex()
    assert latex_rows(text) == [
        r"\multirow[t]{2}{*}{CoPE} & 1 & 1,234 & \textbf{3.00} & 3.000 \\",
        r"& 2 & 1,234 & \textbf{1.00} & 1.000 \\",
        r"\cmidrule{1-5}",
        r"\multirow[t]{2}{*}{RoPE} & 1 & 1,234 & 5.00 & \textbf{5.000} \\",
        r"& 2 & 1,234 & 4.00 & \textbf{4.000} \\",
    ]
    assert r"\item One seed. Percentages: token error. Bold: the best encoding, all else equal." in text
    bold = re.findall(r"\*\*([\d.]+)\*\*", table(*two_axes).to_markdown())
    assert bold == ["3.00", "1.00", "5.000", "4.000"]


def test_latex_marks_the_best_of_each_group_that_is_asked_for(two_axes):
    text = table(*two_axes).to_latex(group="model.position")
    assert latex_rows(text) == [
        r"\multirow[t]{2}{*}{CoPE} & 1 & 1,234 & 3.00 & \textbf{3.000} \\",
        r"& 2 & 1,234 & \textbf{1.00} & 1.000 \\",
        r"\cmidrule{1-5}",
        r"\multirow[t]{2}{*}{RoPE} & 1 & 1,234 & 5.00 & \textbf{5.000} \\",
        r"& 2 & 1,234 & \textbf{4.00} & 4.000 \\",
    ]
    assert r"\caption{Does it copy? 100 \% \& more}" in text
    assert r"\begin{tablenotes}" in text
    assert r"\item One seed. Percentages: token error. Bold: best of its group." in text
    by_layers = table(*two_axes).to_latex(group="layers", caption=r"Ours \cite{cope}", label="tab:mine", notes=False)
    assert latex_rows(by_layers)[0] == r"\multirow[t]{2}{*}{1} & CoPE & 1,234 & \textbf{3.00} & 3.000 \\"
    assert r"\caption{Ours \cite{cope}}" in by_layers
    assert r"\label{tab:mine}" in by_layers
    assert "tablenotes" not in by_layers
    with raises("unknown_axis", axis="width"):
        table(*two_axes).to_latex(group="width")


def test_a_cell_of_comparisons_spans_rows_that_follow_one_another(two_axes):
    published = [{"match": {"model.position": ["CoPE", "RoPE"]}, "values": {"in_dist/token_error": 1, "dense/loss": 1}}]
    plan = plan_of(grid=GRID, seeds=[0], published=published)
    comparisons = table(plan, two_axes[1], compare="paper").to_latex().split(r"\begin{table}")[2]
    spans = re.findall(r"\\multirow\[t\]\{(\d)\}\{\*\}\{(\w+)\}", comparisons)
    assert spans == [("2", "CoPE"), ("2", "RoPE")] * 2, "two rows of each metric"


def test_rows_in_another_order(two_axes):
    def order(column):
        return [row.row for row in Table(read_results(*two_axes), GetTable(name="", sort=column)).model.rows]

    assert order("in_dist/token_error") == order("In-dist.") == ["CoPE · 2", "CoPE · 1", "RoPE · 2", "RoPE · 1"]
    assert order("dense/loss") == ["RoPE · 1", "RoPE · 2", "CoPE · 1", "CoPE · 2"], "its goal is the greatest value"
    assert order("layers") == ["CoPE · 1", "RoPE · 1", "CoPE · 2", "RoPE · 2"]
    with raises("unknown_column", column="in_dist/token_eror"):
        order("in_dist/token_eror")


def test_the_first_rows_of_an_order(two_axes):
    results = read_results(*two_axes)
    best = Table(results, GetTable(name="", sort="in_dist/token_error"))
    first = Table(results, GetTable(name="", sort="in_dist/token_error", top=2))
    assert first.model.rows == best.model.rows[:2]
    shown = [row.row for row in first.model.rows]
    assert {line["row"] for line in csv.DictReader(io.StringIO(first.to_csv(runs=True)))} == set(shown)
    assert Table(results, GetTable(name="", top=99)).model.rows == Table(results, GetTable(name="")).model.rows


def test_rows_that_are_not_shown_are_compared(two_axes):
    results = read_results(*two_axes)
    (reference, *_) = (row.row for row in Table(results, GetTable(name="")).model.rows)
    every = Table(results, GetTable(name="", compare=reference)).model.rows
    some = Table(results, GetTable(name="", compare=reference, top=2)).model.rows
    assert [row.metrics for row in some] == [row.metrics for row in every[:2]]


def test_rows_without_a_value_come_last(partial):
    sorted_rows = Table(partial.results, GetTable(name="", sort="in_dist/token_error")).model.rows
    assert [row.row for row in sorted_rows] == ["a_b <c>", "CoPE", "None"]


def test_a_row_is_compared_with_by_any_of_its_names(two_axes):
    plan, store = two_axes
    labels = ["RoPE · 2", "RoPE · layers 2", "rope 2"]
    for name in (*labels, "RoPE, layers=2", "position=RoPE layers=2", "model.position RoPE/2"):
        compared = table(plan, store, compare=name).model
        assert compared.rows[0].metrics["in_dist/token_error"].comparison.against == "RoPE · 2", name
        assert compared.rows[3].metrics["in_dist/token_error"].comparison is None, name
        assert [row.name for row in find_rows(plan, name)] == ["RoPE · 2"]


def test_a_label_names_all_its_rows(two_axes):
    assert [row.name for row in find_rows(two_axes[0], "layers=2")] == ["CoPE · 2", "RoPE · 2"]
    assert [row.name for row in find_rows(two_axes[0], "rope")] == ["RoPE · 1", "RoPE · 2"]
    assert [row.name for row in find_rows(two_axes[0], "2")] == ["CoPE · 2", "RoPE · 2"]
    with raises("unknown_row", row="3"):
        _ = table(*two_axes, compare="3").model


def test_a_label_of_one_axis_is_compared_with_at_each_value_of_the_others(two_axes):
    of_label, of_axis = (table(*two_axes, compare=text).model for text in ("rope", "model.position=RoPE"))
    assert of_label.rows == of_axis.rows
    assert of_label.answer == of_axis.answer


def test_a_label_that_all_rows_have_names_no_row(store):
    plan = plan_of(grid={"model.layers": [1], "model.position": {"CoPE": ["cope"], "None": []}})
    assert find_rows(plan, "1") == []
    with raises("unknown_row", row="1"):
        _ = table(plan, store, compare="1").model


def test_a_label_of_two_axes_names_no_row(store):
    plan = plan_of(grid={"model.layers": [1, 2], "model.heads": [1, 2]})
    assert find_rows(plan, "2") == []
    with raises("unknown_row", row="2"):
        _ = table(plan, store, compare="2").model


def test_a_name_of_several_rows_is_refused(store):
    plan = plan_of(grid={"model.position": {"CoPE +": ["cope"], "CoPE −": []}})
    with raises("ambiguous_row", row="cope", rows=["CoPE +", "CoPE −"]):
        _ = table(plan, store, compare="cope").model


AWKWARD = ("[8 positions]", "* RoPE", "[*] é", "", "(a) -- ?`b", "α → β ≤ ½ x² — “Ω”", "[", "*")
"""Labels that LaTeX would read as arguments or stars of the command before them, or that pdfLaTeX cannot read."""


@pytest.fixture
def awkward(store):
    """A table with AWKWARD in all texts: title, headings, first cells of rows and groups, and notes."""

    def made(labels=AWKWARD, compare=None):
        metrics = [{"name": "in_dist/token_error", "label": labels[0], "unit": "%"}]
        published = [
            {"match": {"model.position": labels[0]}, "values": {"in_dist/token_error": 1}, "source": labels[1]}
        ]
        positions = {label: [{"kind": "cope", "p_max": index}] for index, label in enumerate(labels, 2) if label}
        grid = {"model.position": positions, "model.layers": [1, 2]}
        plan = plan_of(title=labels[0], metrics=metrics, seeds=[0], grid=grid, published=published)
        for index, run in enumerate(plan.runs):
            finish(store, run, {"in_dist/token_error": float(index)})
        return table(plan, store, compare=compare)

    return made


def test_no_text_is_an_argument_of_the_command_before_it(awkward):
    drawn = awkward()
    for text in (drawn.to_latex(), drawn.to_latex(group="layers")):
        assert not re.search(r"(\\\\|\\(top|mid|bottom)rule|\\item|\\cmidrule\{[^}]*\})\s*[\[*]", text)
    assert r"\multirow[t]{2}{*}{[8 positions]}" in drawn.to_latex()


def test_a_row_that_starts_with_a_bracket_or_a_star():
    cells = [TextCell("[8 positions]"), TextCell("* RoPE")]
    assert latex_rows(_latex_table(Layout((ColumnHeader("*"),), ((cells[0],), (cells[1],))), "", "", ["[a]"])) == [
        r"{}[8 positions] \\",
        r"{}* RoPE \\",
    ]
    assert r"\item {}[a]" in _latex_table(Layout((), ()), "", "", ["[a]"])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("α → β", r"$\alpha$ $\rightarrow$ $\beta$"),
        ("Ω Λ Β ς ο", r"$\Omega$ $\Lambda$ B $\varsigma$ o"),
        ("x² y₁ 1½", r"x$^{2}$ y$_{1}$ 1$\frac{1}{2}$"),
        ("a – b — c … “d”", r"a -- b --- c \ldots{} ``d''"),
        ("--set ?`", r"-{}-set ?{}`"),
        ("cafe\N{COMBINING ACUTE ACCENT}", "café"),
        ("a\N{ZERO WIDTH SPACE}b\x07", "ab"),
        ("位置", "位置"),
    ],
)
def test_characters_have_commands_that_every_engine_has(text, code):
    assert latex_text(text) == code


def test_the_engine_is_named_for_characters_without_a_command(awkward):
    assert "XeLaTeX" not in awkward().to_latex()
    assert "位置ą" in awkward(("位置", "位ą")).to_latex().splitlines()[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("against", [None, "position=CoPE", "paper"])
def test_latex_compiles(store, tmp_path, against):
    """With every character that means something to TeX, warnings, and the rule of a comparison."""
    hostile = 'a "b" <script>&{}\\_%$#~^|*`[x](y) ± × · – … − ≥ ≤ √'
    plan = plan_of(
        title=hostile, seeds=[0, 1, 2],
        grid={"model.position": {"CoPE": ["cope"], hostile: []}, "model.layers": [1, 2]},
        published=[{"match": {"model.position": "CoPE"}, "values": {"in_dist/token_error": 0.004}, "source": hostile}],
    )  # fmt: skip
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            values = {"in_dist/token_error": 10.0 * index + run.seed, "dense/loss": -1.0 * run.seed}
            finish(store, run, values, {"precision": f"fp{index}_x"})
    _compile("pdflatex", table(plan, store, compare=against).to_latex(stars=against is None), tmp_path)


def _compile(engine, table_code, folder):
    packages = r"\usepackage{booktabs,multirow,threeparttable}"
    document = rf"\documentclass{{article}}{packages}\begin{{document}}{{}}{table_code}\end{{document}}"
    (folder / "table.tex").write_text(document)
    done = subprocess.run(
        [engine, "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / "table.pdf").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pdflatex", "xelatex", "lualatex"])
@pytest.mark.parametrize("group", [None, "layers"])
def test_awkward_labels_compile(awkward, tmp_path, engine, group):
    if shutil.which(engine) is None:
        pytest.skip(f"needs {engine}")
    _compile(engine, awkward(compare="paper").to_latex(group=group), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_every_character_with_a_command_compiles(tmp_path):
    """Of all characters of the planes that texts use: those for which no other engine is asked."""
    known = [chr(code) for code in range(0x20, 0x3000) if not unknown_characters(latex_text(chr(code)))]
    assert {*"ωΩ→½é²"} < {*known}
    _compile("pdflatex", "\n\n".join(map(latex_text, known)), tmp_path)
