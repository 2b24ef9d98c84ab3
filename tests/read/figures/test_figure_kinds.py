"""Every kind of figure of an ablation: its files, and what it makes of few, unusual or no runs."""

import functools
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.text import Text

from cope_sweep.figures import FigureRegistry, FigureSpec
from cope_sweep.read.figures import FIGURES, canvas
from cope_sweep.store import Store
from tests.helpers.errors import raises
from tests.helpers.figure_files import made, png_size, svg_elements, svg_texts
from tests.helpers.finished_runs import begin, finish, plan_of
from tests.helpers.sweeps import end
from tests.read.figures.conftest import METRICS

OF_ABLATIONS = [name for name, kind in FIGURES.items() if not kind.NEEDS_CHECKPOINT]
HOSTILE = ["<script>alert(1)</script>", "$x_1$ & $\\frac{a}{b}$", "two\nlines\x00", "_hidden", "x" * 300, "é中"]


def context_plan(measure="perplexity", **changes):
    metrics = [{"name": f"validation/{measure}@{tokens}", "label": str(tokens)} for tokens in (16, 32)]
    base = {
        "task": {"kind": "wikitext", "corpus": "x", "tokens": 8, "vocabulary": 300},
        "model": {"layers": 1, "dim": 8, "heads": 2},
        "train": {"steps": 6, "batch": 4},
        "evaluate": {"contexts": [16, 32], "positions": 32},
    }
    return plan_of(name="contexts", base=base, metrics=metrics, published=[], **changes)


def plan_for(kind, **changes):
    if kind == "budget":
        changes["search"] = {"kind": "random", "samples": 3, "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}}
    if kind == "contexts":
        return context_plan(**changes)
    return plan_of(name="any", metrics=METRICS, **changes)


def fill(plan, store, value=lambda index: 10.0 + index):
    for index, run in enumerate(plan.runs):
        finish(store, run, {metric.name: value(index) for metric in plan.ablation.content.metrics})


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Kind → the plan for it, and a store with all its runs. Tests only read it."""

    @functools.cache
    def made_once(kind):
        plan, store = plan_for(kind), Store(tmp_path_factory.mktemp(kind) / "store", create=True)
        fill(plan, store)
        return plan, store

    return made_once


@pytest.fixture
def restore_parameters():
    with mpl.rc_context():
        yield


def test_the_kinds_have_what_the_command_line_and_the_service_ask_for():
    assert [name for name in FIGURES if FIGURES[name].ORDER < 100] == [
        "summary", "curves", "values", "contexts", "heatmap", "budget", "maps"
    ]  # fmt: skip
    assert all(kind.SHOWS and kind.__doc__ for kind in FIGURES.values())
    assert FIGURES["maps"].NEEDS_CHECKPOINT


def test_an_installation_from_before_there_were_kinds_says_what_to_do():
    with raises("plugin_not_loaded", plugin="cope_sweep.none"):
        FigureRegistry("figure", FigureSpec, (), entry_points="cope_sweep.none").validate({"kind": "curves"})


def few(*kinds):
    """These kinds, and in `make test-all` also all others."""
    return [kind if kind in kinds else pytest.param(kind, marks=pytest.mark.thorough) for kind in OF_ABLATIONS]


@pytest.mark.parametrize("kind", few("curves", "heatmap"))
def test_the_image_formats(kind, filled):
    figure = made(kind, *filled(kind))
    width, height = png_size(figure.render("png"))
    assert 400 < width < 3000
    assert 200 < height < 3000
    assert figure.render("pdf").startswith(b"%PDF-1.")


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_the_files_of_each_kind(kind, filled, tmp_path):
    figure = replace(made(kind, *filled(kind)), title="A <title>")
    assert "A <title>" in svg_texts(figure.render("svg"))
    figure.write(tmp_path / "data.csv")
    written = pd.read_csv(tmp_path / "data.csv", keep_default_na=False, na_values=[""])
    assert list(written.columns) == list(figure.frame.columns)
    assert len(written) == len(figure.frame) > 0
    assert not figure.empty


@pytest.mark.parametrize("kind", few("curves", "values", "heatmap"))
def test_hostile_text_is_only_text(kind, store):
    positions = [["cope"], ["rope"], [], ["absolute"], ["alibi"], ["relative"]]
    plan = plan_for(kind, grid={"model.position": dict(zip(HOSTILE, positions, strict=True))}, seeds=[0])
    fill(plan, store)
    content = replace(made(kind, plan, store), title="$t^2$\n</svg><script>").render("svg")
    texts = svg_texts(content)
    assert "script" not in svg_elements(content)
    assert any("$t^2$⏎</svg><script>" in text for text in texts)
    shown = " ".join(texts)
    for part in ("<script>alert(1)<", "$x_1$ & $", "two⏎lines�", "_hidden", "xxx…", "é中"):
        assert part in shown, part


@pytest.mark.parametrize("kind", few("curves", "values", "contexts"))
@pytest.mark.parametrize("value", [0.0, pytest.param(1e12, marks=pytest.mark.thorough)], ids=str)
def test_equal_values(kind, value, store):
    plan = plan_for(kind)
    fill(plan, store, lambda index: value)
    assert svg_texts(made(kind, plan, store, **({"log": True} if "log" in FIGURES[kind].TAKES else {})).render("svg"))


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_one_run(kind, store):
    plan = plan_for(kind)
    finish(store, plan.runs[0], {metric.name: 3.0 for metric in plan.ablation.content.metrics})
    figure = made(kind, plan, store)
    assert svg_texts(figure.render("svg"))
    if "n" in figure.frame and kind != "budget":  # which also counts rows that are not finished
        assert (figure.frame["n"] == 1).all()
    if "low" in figure.frame:
        assert figure.frame["low"].isna().all()


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_no_run(kind, store):
    figure = made(kind, plan_for(kind), store)
    assert figure.empty
    texts = svg_texts(figure.render("svg"))
    said = {text for text in texts if text in ("no finished run", "no learning curve", "not logged")}
    assert len(said) == 1, "one text in each panel"


OPTIONS = {"x": "model.layers", "panels": "model.dim", "log": True}


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_options_that_a_kind_does_not_take_are_errors(kind, filled):
    for name in OPTIONS.keys() - set(FIGURES[kind].TAKES):
        with raises("no_effect", option=name, figure=kind):
            made(kind, *filled(kind), **{name: OPTIONS[name]})


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_unknown_names_are_errors_that_say_what_exists(kind, filled):
    plan, store = filled(kind)
    with raises("unknown_row", row="CoPA"):
        made(kind, plan, store, row=("CoPA",))
    name = plan.ablation.content.metrics[0].name
    with raises("unknown_metric") as error:
        made(kind, plan, store, metric=("x" + name,))
    assert name.partition("@")[0] in " ".join(error.value.data["allowed"])


def test_the_same_data_gives_the_same_bytes_in_any_thread_and_with_any_settings(
    grid_plan, grid_store, restore_parameters
):
    figure = made("summary", grid_plan, grid_store)
    formats = ("svg", "png", "pdf")
    expected = [figure.render(file_format) for file_format in formats]
    mpl.rcParams.update({"font.size": 30, "svg.hashsalt": "x", "axes.grid": True, "text.parse_math": True})
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(figure.render, formats)) == expected
    assert mpl.rcParams["font.size"] == 30  # the user's settings are back
    for content in expected:
        for word in (b"CreationDate", b"dc:date", b"Matplotlib v"):
            assert word not in content


def test_a_suffix_without_format(grid_plan, grid_store, tmp_path):
    figure = made("summary", grid_plan, grid_store)
    with raises("unknown_format", file=str(tmp_path / "figure.jpeg"), allowed=["png", "svg", "pdf", "csv"]):
        figure.write(tmp_path / "figure.jpeg")
    figure.write(str(tmp_path / "figure.jpeg"), "csv")  # a text names a file, too
    assert pd.read_csv(io.BytesIO((tmp_path / "figure.jpeg").read_bytes()))["row"].nunique() == 4


LONG = "A title of many words, which is much wider than a column of a paper and so needs several lines"


def texts_beyond(drawing):
    """The texts of a drawing that are not whole on its canvas."""
    drawing.draw_without_rendering()
    width, height = drawing.bbox.size
    hidden = set()
    for axes in drawing.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [each for each in axis.get_major_ticks() if not (axes.axison and low <= each.get_loc() <= high)]
            hidden |= {label for each in ticks for label in (each.label1, each.label2)}
    found = []
    for each in drawing.findobj(Text):
        if each.get_visible() and each.get_text().strip() and each not in hidden:
            box = each.get_window_extent()
            if min(box.x0, box.y0) < -1 or box.x1 > width + 1 or box.y1 > height + 1:
                found.append((each.get_text(), box.extents.tolist()))
    return found


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(None, marks=pytest.mark.thorough),
        (3.25, 3.0),
        pytest.param((5.5, 4.0), marks=pytest.mark.thorough),
        (6.5, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", few("curves", "values", "heatmap", "summary", "box"))
def test_no_text_is_beyond_the_canvas(kind, size, store):
    grid = {"model.dim": [8, 16], "model.position": {"Stick-breaking, not rotated": ["cope"], "None": []}}
    plan = plan_for(kind, grid=grid, seeds=[0])
    fill(plan, store)
    figure = replace(made(kind, plan, store), title=LONG, size=size)
    with canvas.styled():
        drawing = canvas.fitted(figure.draw(), size)
        assert texts_beyond(drawing) == []
    svg = ElementTree.fromstring(figure.render("svg"))
    if size is not None:
        width, height = (float(svg.get(name).removesuffix("pt")) / 72 for name in ("width", "height"))
        if size[1] is not None:
            assert (width, height) == pytest.approx(size)
        else:
            assert width == pytest.approx(size[0]) or (kind == "heatmap" and width < size[0])


def test_text_has_one_size_in_figures_of_a_width(grid_plan, grid_store):
    """On a page, figures of the same width have texts of the same size, whatever they show."""

    def text_sizes(kind, size):
        with canvas.styled():
            drawing = canvas.fitted(made(kind, grid_plan, grid_store).data.draw("", size), size)
            return {round(float(tick.get_fontsize()), 2) for axes in drawing.axes for tick in axes.get_xticklabels()}

    for size in ((3.25, None), (6.5, None), None):
        assert text_sizes("curves", size) == text_sizes("values", size) == {8.0}


STYLE_SHEET = """\
font.family: monospace
font.size: 5
lines.linewidth: 3.5
axes.prop_cycle: cycler("color", ["#112233", "445566"])
"""


def test_a_style_sheet_sets_fonts_colours_and_line_widths(filled, tmp_path, restore_parameters):
    (tmp_path / "paper.mplstyle").write_text(STYLE_SHEET)
    figure = made("curves", *filled("curves"))
    plain = figure.render("svg")
    content = replace(figure, style=str(tmp_path / "paper.mplstyle")).render("svg").decode()
    for part in ("#112233", "#445566", "stroke-width: 3.5", "font-size: 5px; font-family: 'DejaVu Sans Mono'"):
        assert part in content, part
        assert part not in plain.decode(), part
    assert replace(figure, style="ggplot").render("svg") not in (plain, content)
    assert figure.render("svg") == plain
    for unknown in (str(tmp_path / "none.mplstyle"), "no such style"):
        with raises("invalid_option", option="--style", value=unknown):
            replace(figure, style=unknown).render("svg")


def test_the_y_axis_fits_curves_after_their_beginning(store):
    plan = plan_of(seeds=[0])
    for run in plan.runs:
        folder = begin(store, run)
        for step in range(1, 101):
            folder.log({"step": step, "train/loss": 1.0 + (9.0 if step < 3 else 0.001 * step)})
        folder.finish({"in_dist/token_error": 95.0, "dense/loss": 0.5}, {})
        end(store, folder)
    drawn = made("curves", plan, store, metric=("train/loss",)).draw()
    low, high = drawn.axes[0].get_ylim()
    assert 1 < low < 1.02
    assert 1.1 <= high < 1.2


def test_many_rows_and_metrics_have_a_panel_for_each_metric(store):
    names = [f"{split}/token_error" for split in ("in_dist", "dense", "sparse")]
    grid = {"model.dim": [8 * (index + 1) for index in range(10)]}
    plan = plan_of(grid=grid, seeds=[0], metrics=[{"name": name} for name in names])
    for run in plan.runs:
        folder = begin(store, run)
        for step in (1, 2):
            folder.log({"step": step, **dict.fromkeys(names, 1.0 + step)})
        folder.finish(dict.fromkeys(names, 3.0), {})
        end(store, folder)
    assert len(made("curves", plan, store).draw().axes) == 3
