"""Every kind of figure of an ablation: its files, and what it makes of few, unusual or no runs."""

import io
from concurrent.futures import ThreadPoolExecutor

import matplotlib as mpl
import pandas as pd
import pytest

from cope_sweep.read.figures import FIGURES, FigureError
from tests.read.figures.conftest import METRICS
from tests.read.figures.files import made, png_size, svg_elements, svg_texts
from tests.read.tables.ablations import finish, plan_of

OF_ABLATIONS = [kind.name for kind in FIGURES.values() if kind.needs == "ablation"]
HOSTILE = ["<script>alert(1)</script>", "$x_1$ & $\\frac{a}{b}$", "two\nlines\x00", "_hidden", "x" * 300, "é中"]


def context_plan(**changes):
    metrics = [{"name": f"validation/perplexity@{tokens}", "label": str(tokens)} for tokens in (8, 16)]
    base = {
        "task": {"kind": "wikitext", "corpus": "x", "tokens": 8, "vocabulary": 300},
        "model": {"layers": 1, "dim": 8, "heads": 2},
        "train": {"steps": 6, "batch": 4},
        "evaluate": {"contexts": [8, 16]},
    }
    return plan_of(name="contexts", base=base, metrics=metrics, published=[], **changes)


def plan_for(kind, **changes):
    if kind == "budget":
        changes["search"] = {"kind": "random", "samples": 3, "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}}
    return context_plan(**changes) if kind == "contexts" else plan_of(name="any", metrics=METRICS, **changes)


def fill(plan, store, value=lambda index: 10.0 + index):
    for index, run in enumerate(plan.runs):
        finish(store, run, {metric.name: value(index) for metric in plan.ablation.content.metrics})


@pytest.fixture
def restore_parameters():
    with mpl.rc_context():
        yield


def test_the_kinds_have_what_the_command_line_and_the_service_ask_for():
    kinds = [
        "curves",
        "convergence",
        "values",
        "contexts",
        "summary",
        "heatmap",
        "budget",
        "importance",
        "maps",
    ]
    assert list(FIGURES) == kinds
    assert all(name == kind.name and kind.shows for name, kind in FIGURES.items())
    assert [name for name, kind in FIGURES.items() if kind.needs == "checkpoint"] == ["maps"]


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_the_files_of_each_kind(kind, store, tmp_path):
    plan = plan_for(kind)
    fill(plan, store)
    figure = made(kind, plan, store, title="A <title>")
    width, height = png_size(figure.render("png"))
    assert 400 < width < 3000
    assert 200 < height < 3000
    assert "A <title>" in svg_texts(figure.render("svg"))
    assert figure.render("pdf").startswith(b"%PDF-1.")
    figure.write(tmp_path / "data.csv")
    written = pd.read_csv(tmp_path / "data.csv", keep_default_na=False, na_values=[""])
    assert list(written.columns) == list(figure.frame.columns)
    assert len(written) == len(figure.frame) > 0
    assert not figure.empty


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_hostile_text_is_only_text(kind, store):
    positions = [["cope"], ["rope"], [], ["absolute"], ["alibi"], ["relative"]]
    plan = plan_for(kind, grid={"model.position": dict(zip(HOSTILE, positions, strict=True))}, seeds=[0])
    fill(plan, store)
    content = made(kind, plan, store, title="$t^2$\n</svg><script>").render("svg")
    texts = svg_texts(content)
    assert "script" not in svg_elements(content)
    assert any("$t^2$⏎</svg><script>" in text for text in texts)
    shown = " ".join(texts)
    if kind != "importance":  # it shows axes, and no values of them
        for part in ("<script>alert(1)<", "$x_1$ & $", "two⏎lines�", "_hidden", "xxx…", "é中"):
            assert part in shown, part


@pytest.mark.parametrize("kind", OF_ABLATIONS)
@pytest.mark.parametrize("value", [0.0, 1e12], ids=str)
def test_equal_values(kind, value, store):
    plan = plan_for(kind)
    fill(plan, store, lambda index: value)
    assert svg_texts(made(kind, plan, store, log=True).render("svg"))


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_one_run(kind, store):
    plan = plan_for(kind)
    finish(store, plan.runs[0], {metric.name: 3.0 for metric in plan.ablation.content.metrics})
    figure = made(kind, plan, store)
    assert svg_texts(figure.render("svg"))
    if "n" in figure.frame:
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


@pytest.mark.parametrize("kind", OF_ABLATIONS)
def test_unknown_names_are_errors_that_say_what_exists(kind, store):
    plan = plan_for(kind)
    fill(plan, store)
    with pytest.raises(FigureError, match=r"has no row 'CoPA'; did you mean 'CoPE'\?"):
        made(kind, plan, store, row=("CoPA",))
    name = plan.ablation.content.metrics[0].name
    with pytest.raises(FigureError, match=f"{name[:-1]}.*accepted: .*{name.partition('@')[0]}"):
        made(kind, plan, store, metric=("x" + name,))


def test_the_same_data_gives_the_same_bytes_in_any_thread_and_with_any_settings(
    grid_plan, grid_store, restore_parameters
):
    kinds = ("curves", "summary")
    figures = [made(kind, grid_plan, grid_store) for kind in kinds]
    jobs = [(figure, file_format) for figure in figures for file_format in ("svg", "png", "pdf")]
    expected = [figure.render(file_format) for figure, file_format in jobs]
    mpl.rcParams.update({"font.size": 30, "svg.hashsalt": "x", "axes.grid": True, "text.parse_math": True})
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda job: job[0].render(job[1]), jobs)) == expected
    assert mpl.rcParams["font.size"] == 30  # the user's settings are back
    for content in expected:
        for word in (b"CreationDate", b"dc:date", b"Matplotlib v"):
            assert word not in content


def test_a_suffix_without_format(grid_plan, grid_store, tmp_path):
    figure = made("summary", grid_plan, grid_store)
    with pytest.raises(FigureError, match=r"its suffix names no format; end it with \.png, \.svg, \.pdf, \.csv"):
        figure.write(tmp_path / "figure.jpeg")
    figure.write(str(tmp_path / "figure.jpeg"), "csv")  # a text names a file, too
    assert pd.read_csv(io.BytesIO((tmp_path / "figure.jpeg").read_bytes()))["row"].nunique() == 4
