"""The web page, in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from cope_services.http.access import KeysFile

from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.config.expand import row_of
from cope_sweep.read.queries.claims import with_deciding
from cope_sweep.read.reports.evidence import evidence, write_evidence
from cope_sweep.read.tables import read_results
from cope_sweep.records import SWEEP_ID
from cope_sweep.store import SweepRun, open_store
from cope_sweep.sweep.jobs import job_submission
from tests.helpers.claims import claim_result
from tests.helpers.finished_runs import finish
from tests.helpers.finished_runs import stop as stop_early
from tests.helpers.sample_store import API, SEARCHED, SampleStore, serving
from tests.helpers.scripted_cluster import scripted_cluster
from tests.helpers.sweeps import end_sweep, members, stop, write_sweep
from tests.services.page import page_site
from tests.services.page.page_site import Site, Visitor, accessibility, short_ids

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Route

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(page_site.chromium() is None, reason="there is no Chromium; COPE_SWEEP_CHROMIUM names one"),
]


@pytest.fixture(scope="module")
def site(sample: SampleStore, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return page_site.build(sample, tmp_path_factory.mktemp("site") / "copy")


@pytest.fixture(scope="module")
def origin(site: Site) -> Iterator[str]:
    with serving(site.sample.settings()) as client:
        yield str(client.base_url).rstrip("/")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with page_site.launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light") as context:
        yield context


@pytest.fixture
def visitor(context: BrowserContext, origin: str) -> Iterator[Visitor]:
    visitor = Visitor.of(context, origin)
    yield visitor
    visitor.page.close()
    assert visitor.problems == []


VIEWS = {
    "overview": ("", "ul.ablations"),
    "results": ("ablations/tiny?row=CoPE&row=Absolute&open=CoPE|in_dist/token_error", ".uplot canvas"),
    "invalid": ("ablations/broken", ".error"),
    "planned": ("ablations/tiny?tab=runs", ".dots a"),
    "figures": ("ablations/tiny?tab=figures", ".figures img"),
    "file": ("ablations/tiny?tab=file", "pre.file"),
    "run": ("runs/{cope}", ".uplot canvas"),
    "failure": ("runs/{failed}", ".error pre"),
    "configuration": ("runs/{cope}?tab=configuration", ".groups"),
    "difference": ("runs/{cope}?tab=difference&against={absolute}", ".view-runs h3"),
    "logs": ("runs/{cope}?tab=logs", "pre.file"),
    "checkpoint": ("runs/{cope}?tab=checkpoint", "code"),
    "runs": ("runs?status=finished&sel={both}", ".comparison table"),
    "sweeps": ("sweeps", "table.sweeps"),
    "sweep": ("sweeps/{sweep}", "#members"),
    "playground": ("playground?run={cope}&run={absolute}&ask=1&text=1 _ 0 _ > 1 0", ".matrix canvas"),
    "tried": ("tried?q=model.position=cope,absolute", ".groups table"),
    "nothing": ("nothing/here", ".error"),
}
"""Name of a view → its address, and a selector of what it shows at last."""


SCREENS = ((1400, "light"), (390, "dark"))
"""Widths and colour schemes. Neither depends on the other."""
FEW_VIEWS = ("overview", "results", "run", "runs", "sweep")
"""Those of `make test`; `make test-all` looks at all of them."""


@pytest.mark.parametrize(
    "view", [view if view in FEW_VIEWS else pytest.param(view, marks=pytest.mark.thorough) for view in VIEWS]
)
def test_every_view_on_a_wide_light_and_a_narrow_dark_screen(visitor: Visitor, site: Site, view: str) -> None:
    cope, absolute, failed, _ = site.sample.ids
    address, shown = VIEWS[view]
    names = {
        "cope": cope,
        "absolute": absolute,
        "failed": failed,
        "both": short_ids(cope, absolute),
        "sweep": site.sweep_id,
    }
    page = visitor.open(address.format(**names), shown)
    for width, scheme in SCREENS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        # Plots take their new size after the screen has it.
        page.wait_for_function("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        found = accessibility(page, *(["color-contrast"] if scheme == "dark" else []))
        assert not found, f"{width} px, {scheme}: {found}"


@pytest.mark.thorough
def test_the_documentation_shows_every_operation(visitor: Visitor) -> None:
    """`/docs`, under its Content-Security-Policy, and without a network."""
    page = visitor.page
    paths = page.request.get(f"{visitor.origin}/openapi.json").json()["paths"]
    page.goto(f"{visitor.origin}/docs")
    page.wait_for_selector(".opblock")
    assert page.locator(".opblock").count() == sum(map(len, paths.values()))
    assert page.locator(".errors-wrapper").count() == 0
    page.get_by_text("/api/v1/version", exact=True).click()
    page.get_by_text("Try it out").click()
    page.locator("button.execute").click()
    page.wait_for_selector(".live-responses-table")
    assert '"python"' in page.locator(".live-responses-table").inner_text()


def test_the_address_has_the_state_and_the_back_button_undoes_it(visitor: Visitor) -> None:
    page = visitor.open("ablations/curves", ".uplot canvas")
    page.get_by_label("logarithmic").check()
    page.get_by_role("button", name="In-dist.").click()
    page.get_by_label("Draw the curves of CoPE").check()
    page.wait_for_selector("[aria-sort=ascending]")
    address = page.url.partition("#/")[2]
    assert address == "ablations/curves?log=1&sort=in_dist%2Ftoken_error&row=CoPE"

    page = visitor.open(address, "[aria-sort=ascending]")
    assert page.get_by_label("logarithmic").is_checked()
    assert page.get_by_label("Draw the curves of CoPE").is_checked()
    assert page.locator(".legend button[aria-pressed=true]").all_inner_texts() == ["CoPE"]
    page.get_by_label("logarithmic").uncheck()
    page.wait_for_function("() => !location.hash.includes('log')")
    page.go_back()
    page.wait_for_function("() => location.hash.includes('log=1')")
    page.wait_for_selector("input:checked[data-key=logarithmic]")


def test_the_keyboard_reaches_the_main_controls(visitor: Visitor) -> None:
    page = visitor.open("ablations/tiny", ".uplot canvas")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.dataset.key ?? document.activeElement.textContent.trim()"))
        if page.evaluate("document.activeElement.getAttribute('role') === 'slider'"):
            break
    else:
        pytest.fail(f"the plot was not reached: {reached}")
    assert reached[0] == "Skip to the content"
    wanted = {"Runs", "Playground", "tab figures", "Scale longer", "CSV", "sort in_dist/token_error", "choose CoPE"}
    assert wanted | {"cell CoPE|in_dist/token_error", "metric", "logarithmic", "legend CoPE"} <= set(reached)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("step 5: CoPE ")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("step 10: CoPE ")
    assert page.locator(".readout tr").all_inner_texts()[0].startswith(("CoPE\t", "Absolute\t"))
    page.keyboard.press("+")
    assert page.get_by_role("button", name="Reset zoom").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("button", name="Reset zoom").is_visible()


def test_the_theme_is_the_systems_or_the_chosen_one(browser: Browser, origin: str) -> None:
    with browser.new_context(color_scheme="dark") as context:
        page = Visitor.of(context, origin).open("sweeps", "table.sweeps")
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Light or dark").click()
        light = page.evaluate(ground)
        assert light != dark
        page.reload()
        assert page.evaluate(ground) == light
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate(ground) == dark
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"() => {ground} === '{light}'")


def test_the_skip_link_and_the_dialog_of_the_key_hold_the_focus(visitor: Visitor) -> None:
    page = visitor.open("ablations", "ul.ablations")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("button", name="API key").click()
    assert page.evaluate("document.activeElement.id") == "keys-value"
    assert accessibility(page) == []
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "key"


PIXELS = """([step, from, to, colour]) => {
  const canvas = document.querySelector(".uplot canvas"), over = document.querySelector(".u-over").getBoundingClientRect();
  const ratio = devicePixelRatio, box = canvas.getBoundingClientRect(), x = over.left - box.left + (step - 10) / 30 * over.width;
  const [top, height] = [over.top - box.top + from * over.height, (to - from) * over.height];
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData((x - 4) * ratio, top * ratio, 8 * ratio, height * ratio);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    const near = colour.every((value, k) => Math.abs(data[i + k] - value) < 12);
    if (near && data[i + 3] > 200) found += 1;
  }
  return found;
}"""
COPE, ROPE = (0x3B, 0x63, 0xCF), (0x1F, 0x8A, 0x5F)


def test_a_logarithmic_axis_marks_zeros_and_bridges_no_gap(visitor: Visitor) -> None:
    """CoPE logs 50, 10, 0 and 0 at the steps 10, 20, 30 and 40; RoPE logs one value, at step 10."""
    page = visitor.open("ablations/curves?log=1", ".uplot canvas")
    assert "◆ marks values of 0," in page.locator("[data-zeros='2'] .note").inner_text()

    def pixels(step: float, start: float, end: float, colour: tuple[int, int, int]) -> int:
        return page.evaluate(PIXELS, [step, start, end, colour])

    assert pixels(15, 0, 1, COPE) > 5  # the line from step 10 to step 20
    assert pixels(25, 0, 1, COPE) == 0  # none from step 20 to the zero at step 30
    assert pixels(30, 0.85, 1, COPE) > 20  # the mark of the zero
    assert pixels(35, 0, 1, COPE) == 0
    assert pixels(30, 0, 0.8, COPE) == 0
    assert pixels(10, 0, 0.8, ROPE) > 8  # the run with one point
    page.get_by_label("logarithmic").uncheck()
    page.wait_for_selector("[data-zeros='0']")
    assert pixels(25, 0, 1, COPE) > 5  # a linear axis has a place for 0
    assert pixels(10, 0, 1, ROPE) > 8


def test_curves_are_smoothed_averaged_and_styled_as_by_hand(visitor: Visitor) -> None:
    page = visitor.open("ablations", "ul.ablations")
    smooth, summary, styles, columns, zeros, linear = page.evaluate(
        """async () => {
          const [curves, axes] = [await import("/static/curves.js"), await import("/static/axes.js")];
          const styles = Array.from({ length: 32 }, (_, i) => JSON.stringify(curves.style(i)));
          const columns = curves.columns([[[1, 5], [3, 0], [4, 2]], [[2, 1]]], true);
          return [
            curves.smooth([[0, 1], [1, NaN], [2, 3]], 0.5),
            curves.overSeeds([[[1, 10, 2], [2, 20, 4]], [[1, 14, 4]], []]),
            new Set(styles).size,
            [...columns.map((each) => each.map((value) => (value === undefined ? "absent" : value))), columns.slice(1).map(curves.isolated)],
            axes.logarithmic([0, 0], 300, 1),
            axes.linear([0, 0]),
          ];
        }"""
    )
    assert smooth[0] == [0, 1]
    assert smooth[2] == [2, pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)]
    assert summary == [
        {"x": 12, "mean": 3, "deviation": pytest.approx(2**0.5), "low": 2, "high": 4},
        {"x": 20, "mean": 4, "deviation": 0, "low": 4, "high": 4},  # one of two seeds
    ]
    assert styles == 32
    assert columns == [[1, 2, 3, 4], [5, "absent", None, 2], ["absent", 1, "absent", "absent"], [[0, 3], [1]]]
    assert zeros["ticks"] == []
    assert zeros["min"] < zeros["zeros"][0] < zeros["floor"]
    assert 0 in linear["ticks"]
    assert -0.1 < linear["min"] <= 0


def test_a_cell_opens_its_runs_and_curves_of_chosen_rows_are_drawn(visitor: Visitor, site: Site) -> None:
    page = visitor.open("ablations/tiny", ".uplot canvas")
    assert page.get_by_label("verdicts against").input_value() == "model.position=CoPE"  # as the report does
    page.get_by_label("verdicts against").select_option("Absolute")
    page.wait_for_function("() => location.hash.endsWith('compare=Absolute')")
    # A click that begins before the table is drawn again, and ends after it, is none.
    page.get_by_text("Stuck, as Absolute").wait_for()
    page.locator("[data-key='cell CoPE|in_dist/token_error']").click()
    opened = page.locator(".cellruns a").first
    assert opened.get_attribute("href") == f"#/runs/{site.sample.ids[0]}"
    page.evaluate(  # both before the page has drawn the first choice
        """() => document.querySelectorAll("[aria-label^='Draw the curves of']").forEach((box) => box.click())"""
    )
    page.wait_for_function("() => location.hash.endsWith('row=Absolute&row=CoPE')")
    with page.expect_download() as download:
        page.get_by_role("button", name="LaTeX").click()
    assert download.value.suggested_filename == "tiny.tex"
    assert page.get_by_role("link", name="Compare these runs").get_attribute("href") == (
        f"#/runs?ids={short_ids(site.sample.ids[0])}&sel={short_ids(site.sample.ids[0])}"
    )
    opened.click()
    page.get_by_role("heading", name="CoPE seed 0").wait_for()
    page = visitor.open("ablations/tiny?scale=longer&set=seeds%3D%5B0%5D", "h1")
    page.get_by_role("link", name="Playground", exact=True).click()
    at_hand = "#/playground?ablation=tiny&scale=longer&set=seeds%3D%5B0%5D"
    page.wait_for_function(f"() => location.hash === '{at_hand}'")


def test_a_table_shows_the_texts_of_the_service(visitor: Visitor) -> None:
    """It rounds nothing: the number of decimals is decided in one place."""

    def with_other_texts(route: Route) -> None:
        answer = route.fetch()
        if answer.status == 304:  # asked again, under load
            route.fulfill(response=answer)
            return
        table = answer.json()
        cell = table["rows"][0]["metrics"]["in_dist/token_error"]
        cell["text"], cell["mostly_stuck"] = "-7.125 ± 0.0625", False
        cell["published"] = {"text": "8.0000", "value": 1.0, "std": None, "seeds": None, "source": "Table 1"}
        for value in cell["values"]:
            value["text"] = "-9.03125"
        route.fulfill(response=answer, json=table)

    visitor.page.route("**/ablations/tiny/table?*", with_other_texts)
    page = visitor.open("ablations/tiny?open=CoPE|in_dist/token_error", ".cellruns")
    cell = page.locator("td", has=page.locator("[data-key='cell CoPE|in_dist/token_error']"))
    assert cell.inner_text().split() == ["−7.125", "±", "0.0625", "paper", "8.0000"]
    assert page.locator(".cellruns li .mono").first.inner_text() == "−9.03125"


def test_stuck_rows_are_marked_and_of_many_rows_the_first_are_drawn(visitor: Visitor) -> None:
    def with_stuck_seeds(route: Route) -> None:
        answer = route.fetch()
        table = answer.json()
        for row in table["rows"]:
            for cell in row["metrics"].values():
                cell["mostly_stuck"] = row["row"] == "Absolute"
        route.fulfill(response=answer, json=table)

    def with_many_rows(route: Route) -> None:
        answer = route.fetch()
        curves = answer.json()
        rows = [row | {"row": f"{row['row']} {i}"} for i in range(10) for row in curves["rows"]]
        route.fulfill(response=answer, json=curves | {"rows": rows})

    visitor.page.route("**/ablations/tiny/table?*", with_stuck_seeds)
    visitor.page.route("**/ablations/tiny/curves?*", with_many_rows)
    page = visitor.open("ablations/tiny", ".uplot canvas")
    marked = page.locator(".results tr", has=page.locator(".mark"))
    assert [row.split()[0] for row in marked.all_inner_texts()] == ["Absolute"]
    assert page.get_by_text("Most seeds are stuck").is_visible()
    assert page.locator(".legend button[aria-pressed='true']").count() == 12
    assert page.get_by_text("The first 12 of 20 rows are drawn").is_visible()


@pytest.mark.parametrize("width", [1400, 390])
def test_the_text_of_figures_has_one_size_because_they_are_drawn_for_their_width(
    browser: Browser, origin: str, width: int
) -> None:
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark") as context:
        visitor = Visitor.of(context, origin)
        page = visitor.open("ablations/tiny?tab=figures", ".figures img")
        page.locator("summary", has_text="many rows and columns as numbers").click()
        page.wait_for_selector("details .picture.printed img")
        page.wait_for_function("() => document.querySelectorAll('.figures img').length === 3")
        page.wait_for_function("() => [...document.querySelectorAll('.figures img')].every((each) => each.style.width)")
        scales = page.evaluate(
            "[...document.querySelectorAll('.figures img')].map((each) => each.width / each.naturalWidth)"
        )
        assert len(scales) >= 3
        assert scales == pytest.approx([108 / 96] * len(scales), rel=0.02)
        assert all("size=" in url for url in visitor.requests if "format=svg" in url)
        filters = page.evaluate(
            "[...document.querySelectorAll('.figures img')].map((each) => getComputedStyle(each).filter)"
        )
        assert filters.count("none") == 1, "the colours of the heatmap are values"
        assert visitor.problems == []


def test_a_zoom_is_in_the_address_and_goes_with_the_step_axis(visitor: Visitor) -> None:
    page = visitor.open("ablations/curves", ".uplot canvas")
    chart = page.locator(".chart")
    chart.focus()
    page.keyboard.press("End")
    page.keyboard.press("+")
    page.wait_for_function("() => location.hash.includes('zoom=')")
    address = page.url.partition("#/")[2]
    page = visitor.open(address, ".reset:not([hidden])")
    page.get_by_role("button", name="Reset zoom").click()
    page.wait_for_function("() => !location.hash.includes('zoom=')")
    visitor.open(address, ".reset:not([hidden])").get_by_role("button", name="time").click()
    page.wait_for_function("() => !location.hash.includes('zoom=')")


def test_a_run_shows_the_values_that_filters_find(visitor: Visitor, site: Site) -> None:
    page = visitor.open(f"runs/{site.sample.ids[0]}?tab=configuration", ".groups")
    configuration = page.locator(".groups").inner_text().splitlines()
    assert {"betas\t0.9,0.999", "position\tcope", "seed\t0"} <= set(configuration)
    assert not any("facts" in line for line in configuration)
    page = visitor.open(f"runs/{site.sample.ids[0]}", ".factgrid")
    facts = dict(each.split("\n") for each in page.locator(".factgrid div").all_inner_texts())
    assert {"parameters", "train time", "tokens per second"} <= facts.keys()
    assert re.fullmatch(r"[\d.,]+ [MG]iB", facts["peak memory"])
    page = visitor.open(f"runs?ids={short_ids(site.sample.ids[0])}&col=facts.peak_memory_bytes", "table.runs")
    assert facts["peak memory"] in page.locator("table.runs tbody tr").inner_text()  # in the same unit


def test_metrics_of_a_run_that_has_not_finished_are_called_newest(visitor: Visitor, site: Site) -> None:
    run_id = site.sample.ids[0]
    page = visitor.open(f"runs/{run_id}", ".columns2")
    assert page.get_by_role("heading", name="Final metrics").is_visible()

    def stopped(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"status": "stopped"})

    page.route(f"**/api/v1/runs/{run_id}", stopped)
    visitor.open(f"runs/{run_id}", ".columns2").get_by_role("heading", name="Newest metrics").wait_for()


@pytest.mark.thorough
def test_chosen_runs_are_grouped_by_row(visitor: Visitor, site: Site) -> None:
    ids = [*site.sample.ids[:2], *(row.runs[0].run_id for row in site.curves.rows)]
    page = visitor.open(f"runs?sel={short_ids(*ids)}", ".comparison .uplot canvas")
    legend = page.locator(".comparison .legend button").all_inner_texts()
    assert legend == ["tiny: CoPE", "tiny: Absolute", "curves: CoPE", "curves: Absolute", "curves: RoPE"]
    page = visitor.open(f"runs?sel={short_ids(site.curves.rows[0].runs[0].run_id)}", ".comparison .uplot canvas")
    names = page.locator(".comparison select").first.locator("option").all_inner_texts()
    assert names == ["in_dist/token_error", "train/loss"]  # the run has logged them, and has no final metrics
    page = visitor.open(f"runs?sel={short_ids(site.sample.ids[3])}", ".comparison .empty")
    assert page.locator(".comparison .empty").inner_text() == "No chosen run has logged a metric yet."


def test_values_that_differ_are_listed_by_row_beside_a_link_to_mlflow(visitor: Visitor, site: Site) -> None:
    url = "http://mlflow.example/#/experiments/7"
    visitor.page.route("**/ablations/tiny/mlflow", lambda route: route.fulfill(json={"url": url}))
    ids = [row.runs[i].run_id for row in site.sample.plan.rows for i in range(2)]
    page = visitor.open(f"runs?sel={short_ids(*ids)}", ".comparison table")
    configuration = page.locator(".comparison table")
    assert configuration.locator("thead th").all_inner_texts() == [
        "key",
        "CoPE, 2 runs",
        "Absolute, 1 run",
    ]  # one is pending
    assert configuration.locator("tbody tr").all_inner_texts() == ["model.position\tcope\tabsolute"]  # no seed
    assert page.get_by_role("link", name="Plot tiny in MLflow").get_attribute("href") == url
    page = visitor.open(f"runs?sel={short_ids(site.curves.rows[0].runs[0].run_id)}", ".comparison .uplot canvas")
    assert page.get_by_text("The same in all chosen runs").is_visible()
    assert page.get_by_role("link", name="in MLflow").count() == 0  # this ablation is in no MLflow


def test_keys_of_chosen_runs_are_compared_wherever_they_are(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    """Of another ablation, whose rows have the same names, and of another task than those that are listed."""
    sample = site.sample.copy_to(tmp_path / "copy")
    task = "{kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}"
    (sample.ablations / "recall.yaml").write_text(
        page_site.CURVES.replace(task, "{kind: mqar, pairs: 2, more_pairs: 2, tokens: 16}")
    )
    plan = expand(load_ablation(sample.ablations / "recall.yaml"))
    recall = plan.rows[0].runs[0]
    end_sweep(sample.store, write_sweep(sample.store, plan))
    finish(sample.store, recall, {"in_dist/token_error": 1.0})
    with serving(sample.settings()) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        chosen = short_ids(sample.ids[0], recall.run_id)
        page = visitor.open(f"runs?search=tiny&sel={chosen}", ".comparison tbody")
        assert "task.pairs\t–\t2" in page.locator(".comparison tbody tr").all_inner_texts()
        page.route("**/api/v1/runs/*", lambda route: route.fulfill(status=500, json={"detail": "no"}))
        page = visitor.open(f"runs?search=tiny&sel={chosen}", ".comparison .uplot canvas")
        page.get_by_text("The configuration of the chosen runs is not known yet.").wait_for()
        assert [each for each in visitor.problems if "500" not in each] == []


def test_runs_of_several_answers_stay_whole_when_new_ones_begin(visitor: Visitor) -> None:
    """An answer has at most 100 runs here, to spare the test a thousand."""
    ids = [f"{i:016x}" for i in range(150)]

    def with_small_answers(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace("MOST_RUNS = 1000", "MOST_RUNS = 100"))

    def listed(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        limit, offset = int(query["limit"][0]), int(query.get("offset", ["0"])[0])
        run = {"status": "pending", "ablations": [], "metrics": {}, "step": 0, "seed": 0}
        some = [run | {"run_id": run_id} for run_id in ids[offset : offset + min(limit, 100)]]
        end = offset + len(some)
        route.fulfill(json={"total": len(ids), "next": end if end < len(ids) else None, "runs": some})

    visitor.page.route("**/static/values.js", with_small_answers)
    visitor.page.route("**/api/v1/runs?*", listed)
    page = visitor.open("runs", "table.runs")
    page.get_by_role("button", name="Load 50 more").click()
    page.get_by_text("150 of 150 runs").wait_for()
    ids.insert(0, f"{200:016x}")
    page.evaluate("() => dispatchEvent(new Event('routechange'))")
    page.get_by_text("151 of 151 runs").wait_for()
    assert page.locator("table.runs tbody th a").evaluate_all("(links) => links.map((each) => each.title)") == ids


def test_a_comparison_is_read_again_after_a_failure_and_when_runs_go_on(visitor: Visitor, site: Site) -> None:
    answers = [{"status": 500, "json": {"detail": "no curves"}}]
    visitor.page.route("**/api/v1/curves?*", lambda route: route.fulfill(**answers[0]) if answers else route.fallback())
    steps = [10]

    def with_step(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        for run in content["runs"]:
            run["step"] = steps[-1]
        route.fulfill(response=answer, json=content, headers=answer.headers | {"etag": f'"{steps[-1]}"'})

    visitor.page.route("**/api/v1/runs?*limit=1000*", with_step)
    page = visitor.open(f"runs?sel={short_ids(site.curves.rows[0].runs[0].run_id)}", ".comparison .bad")
    assert "no curves" in page.locator(".comparison .bad").inner_text()
    answers.clear()
    refresh = "() => dispatchEvent(new Event('routechange'))"
    page.evaluate(refresh)
    page.wait_for_selector(".comparison .uplot canvas")
    asked = sum("/curves?" in url for url in visitor.requests)
    page.evaluate(refresh)  # nothing is new
    page.wait_for_timeout(200)
    assert sum("/curves?" in url for url in visitor.requests) == asked
    steps.append(20)
    with page.expect_request("**/api/v1/curves?*"):
        page.evaluate(refresh)
    assert [each for each in visitor.problems if "500" not in each] == []
    visitor.problems.clear()


def test_chosen_metrics_are_panels_with_one_zoom(visitor: Visitor) -> None:
    page = visitor.open("ablations/curves", ".uplot canvas")
    page.get_by_label("beside it").select_option("train/loss")
    page.wait_for_function("() => document.querySelectorAll('.multiples .uplot canvas').length === 2")
    assert page.locator(".multiples figcaption").all_inner_texts() == ["In-dist. (%)\n×", "train/loss\n×"]
    assert page.locator(".legend").count() == 1
    page.locator(".chart").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("+")
    page.wait_for_function("() => document.querySelectorAll('.reset:not([hidden])').length === 2")
    page.get_by_role("button", name="Reset zoom").last.click()
    page.wait_for_function("() => document.querySelectorAll('.reset:not([hidden])').length === 0")
    assert accessibility(page) == []
    page.get_by_role("button", name="Remove In-dist. (%)").click()
    page.wait_for_function("() => document.querySelectorAll('.multiples .uplot canvas').length === 1")
    assert page.url.endswith("?metric=train%2Floss")
    assert visitor.problems == []


def test_curves_have_the_unit_of_the_table(visitor: Visitor) -> None:
    def with_scale(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        content["metrics"][0]["scale"] = 0.01
        route.fulfill(response=answer, json=content)

    def with_seconds(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        for each in content["series"]:
            each["points"] = [[step, step, value] for step, _, value in each["points"]]
        route.fulfill(response=answer, json=content)

    visitor.page.route("**/ablations/curves", with_scale)
    visitor.page.route("**/api/v1/curves?*", with_seconds)
    for axis, place in {"step": "step 10", "time": "10 s"}.items():
        page = visitor.open(f"ablations/curves?x={axis}", ".uplot canvas")
        page.locator(".chart").focus()
        page.keyboard.press("Home")
        text = page.locator("[aria-valuetext]").get_attribute("aria-valuetext")
        assert text == f"{place}: CoPE 0.5; Absolute 0.6; RoPE 0.3"


@pytest.mark.thorough
def test_all_listed_runs_are_chosen_and_their_curves_are_read_in_parts(visitor: Visitor) -> None:
    page = visitor.open("runs?ablation=many", ".runs tbody tr")
    page.get_by_role("button", name="Load 5 more").click()
    page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 105")
    page.get_by_label("Choose all listed runs").check()
    page.get_by_text("105 runs chosen").wait_for()
    page.locator(".comparison .empty").wait_for()  # failed runs have no metrics
    page.locator(".comparison table").wait_for()
    page.goto(f"{page.url}&metric=train%2Floss")
    page.wait_for_selector(".comparison .multiples .empty, .comparison .uplot")
    assert sum("/curves?" in url for url in visitor.requests) == 3
    page.get_by_label("Choose all listed runs").uncheck()
    page.wait_for_function("() => !location.hash.includes('sel=')")


def test_a_claim_of_several_reports_counts_once_as_the_report_says_that_decides(visitor: Visitor) -> None:
    reports = [
        claim_result("shown", headline="CoPE 1, RoPE 2", hardware_follows_rows=True),
        claim_result("not shown", ablation="many", recipe="tuned", headline="CoPE 3, RoPE 4"),
        claim_result("shown", source="Table 7", claim="CoPE learns sooner", task="counting", headline="CoPE 5, RoPE 6"),
        claim_result("shown in part", source="Table 7", texts={"verdict": "shown in part (1 of 2 pairs)"}),
        claim_result("shown", source="", task="flip_flop"),
    ]
    claims = [each.model_dump(mode="json") for each in with_deciding(reports)]
    visitor.page.route("**/claims?committed=true", lambda route: route.fulfill(json=claims))
    page = visitor.open("ablations", ".folded")
    assert page.locator(".folded summary").all_inner_texts() == [
        "Table 2 1 claim: not shownOOD (%): CoPE 3, RoPE 4",
        "Table 7 1 of 2 claims shownOOD (%): CoPE 5, RoPE 6",  # of the first task
        "Beyond the paper 1 of 1 claim shown",
    ]
    page.locator(".folded summary").first.click()
    lines = page.locator(".folded").first.locator(".claims tbody tr")
    assert lines.locator(".verdict").all_inner_texts() == ["not shown", "shown", "shown in part (1 of 2 pairs)"]
    assert [text.split("\n")[1] for text in lines.all_inner_texts()] == [
        "Table 2 · many · tuned, 2 layers of 64",
        "Table 2 · copy · one recipe, 2 layers of 64, hardware follows the row: many decides",
        "Table 7 · copy · one recipe, 2 layers of 64: many decides",
    ]  # fmt: skip


@pytest.mark.thorough
def test_an_empty_store_shows_the_results_that_are_kept_with_the_files(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    def with_a_lost_value(route: Route) -> None:
        answer = route.fetch()
        table = answer.json()
        table["rows"][0]["counts"]["finished"] += 1
        route.fulfill(response=answer, json=table)

    sample = site.sample.copy_to(tmp_path / "sample")
    write_evidence(evidence(read_results(sample.plan, sample.store)), sample.ablations / "results")
    with serving(sample.settings(store=tmp_path / "empty")) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations", ".folded")
        folded = page.locator(".folded summary")
        assert folded.locator("b, span").all_inner_texts() == ["Table 2", "1 claim: not testable"]
        assert folded.locator("small").inner_text() == "In-dist. (%): CoPE 93.75, Absolute 90.62"
        assert page.locator(".welcome").is_visible()  # nothing is trained here yet
        page.locator(".folded summary").click()
        (claim,) = page.locator(".claims tbody tr").all_inner_texts()
        assert claim.split("\t")[0].strip() == (
            "CoPE copies better\nTable 2 · tiny · one recipe, 1 layer of 8 · declared after its runs had started"
        )
        own = page.locator("ul.ablations .what a").all_inner_texts()
        assert own == ["broken", "Curves of few points", "Many runs"]  # they reproduce nothing
        assert page.locator(".library a").all_inner_texts() == ["Selective copy, tiny", "Results of this repository"]
        assert page.locator(".library .tag").inner_text() == "Table 1"
        visitor.page.route("**/ablations/tiny/table?*", with_a_lost_value)
        page = visitor.open("ablations/tiny", "p.committed")
        assert page.locator("p.committed").inner_text() == "Results of this repository; you have not trained this yet."
        assert page.locator(".claims .verdict").inner_text() == "not testable"
        assert "a rule that does not solve the task" in page.locator(".claims .verdict").get_attribute("title")
        assert page.locator(".results tbody .value").count() == 4
        assert page.locator(".results button.value, .choose").count() == 0
        assert set(page.locator(".results tbody sup:not(.mark)").all_inner_texts()) == {"n=1"}
        visitor.page.unroute("**/ablations/tiny/table?*")
        assert accessibility(page) == []
        page = visitor.open("ablations/tiny?tab=figures", ".figures img")
        assert page.locator("p.committed").is_visible()
        drawn = [url for url in visitor.requests if "format=svg" in url]
        assert all("committed=true" in url for url in drawn)
        page.locator("h3:has-text('More figures') ~ details summary").first.click()  # drawn when it is opened
        page.wait_for_selector("details[open] .figures img")
        assert len({url for url in visitor.requests if "format=svg" in url}) == len(set(drawn)) + 1
        page = visitor.open("ablations/curves?tab=figures", ".empty")
        page.get_by_text("There are no figures yet: they are drawn from finished runs.").wait_for()
        page = visitor.open("ablations/tiny", "p.committed")
        assert visitor.problems == []
        (sample.ablations / "results" / "tiny.parquet").write_bytes(b"PAR1")
        page.reload()
        page.get_by_text("The results of this repository cannot be shown: ").wait_for()
        assert page.get_by_role("heading", name="Results", exact=True).is_visible()
        assert page.locator(".results tbody tr").count() > 0


def test_an_ablation_that_was_started_shows_its_own_curves_and_not_the_kept_results(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    sample = site.sample.copy_to(tmp_path / "sample")
    write_evidence(evidence(read_results(sample.plan, sample.store)), sample.ablations / "results")
    stop(open_store(tmp_path / "new", create=True), sample.plan.runs[0])
    with serving(sample.settings(store=tmp_path / "new")) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations/tiny", ".results tbody tr")
        page.wait_for_selector("#curves")
        assert page.locator("p.committed").count() == 0
        assert visitor.problems == []


def test_runs_with_other_values_are_chosen_above_the_table(context: BrowserContext, site: Site, tmp_path: Path) -> None:
    sample = site.sample.copy_to(tmp_path / "copy")
    (sample.ablations / "varied.yaml").write_text(page_site.CURVES)
    sets = ["train.steps=30", "seeds=[0, 7]"]
    plan = expand(with_overrides(load_ablation(sample.ablations / "varied.yaml"), assignments=sets))
    end_sweep(sample.store, write_sweep(sample.store, plan, sets=sets))
    for run in plan.runs:
        finish(sample.store, run, {"in_dist/token_error": 10.0 + run.seed})
    with serving(sample.settings()) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations", "ul.ablations")
        page.click("text=train.steps=30, seeds=[0, 7]")
        page.wait_for_selector("table.results")
        assert "set=train.steps" in page.url
        assert "6 of 6 finished" in page.inner_text(".state .counts")
        assert "13.50" in page.inner_text("table.results")
        # Without an address of its own, the ablation opens with the values that have runs.
        page = visitor.open("ablations/varied", "table.results")
        page.get_by_label("Values").select_option("as in the file")
        page.wait_for_function("() => document.querySelector('.state .counts').innerText.includes('0 of 3 finished')")
        page.get_by_label("Values").select_option("train.steps=30, seeds=[0, 7]")
        page.wait_for_function("() => document.querySelector('.state .counts').innerText.includes('6 of 6 finished')")
        assert visitor.problems == []


GROUPED = """\
title: Two tasks
base:
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: 30, batch: 4}
grid:
  task:
    Copy: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
    Recall: {kind: mqar, pairs: 2, more_pairs: 2, tokens: 16}
  model.position: {CoPE: [cope], Absolute: [absolute], RoPE: [rope], ALiBi: [alibi], T5: [t5]}
seeds: [0, 1, 2, 3, 4]
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%", learned: 1.0}
  - {name: dense/token_error, label: Dense, unit: "%"}
claims:
  - {text: CoPE copies better than RoPE, better: {model.position: CoPE}, than: {model.position: RoPE}}
scales:
  narrow: {set: {model.dim: 4}}
"""


def test_results_are_sorted_grouped_and_filtered_and_home_has_the_best(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    sample = site.sample.copy_to(tmp_path / "copy")
    (sample.ablations / "grouped.yaml").write_text(GROUPED)
    by_dense = GROUPED.replace("Two tasks", "By another metric") + "primary: dense/token_error\n"
    (sample.ablations / "dense.yaml").write_text(by_dense)
    plan = expand(with_overrides(load_ablation(sample.ablations / "grouped.yaml"), scale="narrow"))
    errors = {"CoPE": 0.0, "Absolute": 30.0, "RoPE": 20.0, "ALiBi": 10.0, "T5": 40.0}
    end_sweep(sample.store, write_sweep(sample.store, plan))
    for row in plan.rows:
        for run in row.runs:
            error = errors[row.labels["model.position"]] + run.seed / 10
            dense = {"dense/token_error": 50.0 - error} if row.labels["task"] == "Copy" else {}
            finish(sample.store, run, {"in_dist/token_error": error, **dense})
    with serving(sample.settings()) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations/grouped", ".tables table")
        copied, recalled = (page.get_by_role("region", name=f"Result table: {task}") for task in ("Copy", "Recall"))
        names = "tbody th"
        assert recalled.locator(names).all_inner_texts() == ["CoPE", "ALiBi", "RoPE", "Absolute", "T5"]
        assert "Dense (%)" in copied.inner_text()
        assert "Dense (%)" not in recalled.inner_text()  # no row has it
        assert copied.locator(names).all_inner_texts() == ["CoPE", "ALiBi", "RoPE", "Absolute", "T5"]
        best, *others = recalled.locator("td.number").all()[::2]
        assert "5/5 learned" in best.inner_text()
        assert all("unlearned" in each.get_attribute("class") for each in others)
        assert copied.locator("td.heat4").count() == 2  # the best of each column
        assert "better than CoPE" not in copied.inner_text()
        assert copied.locator("tr", has_text="RoPE").locator(".below").first.inner_text().split("\n")[1:] == [
            "worse than CoPE",
            "[19.75, 20.25]",
        ]
        page.get_by_role("button", name="In-dist. (%)").first.click()
        page.wait_for_selector("[aria-sort=ascending]")
        page.locator("[data-key=rows]").select_option("file")
        page.wait_for_function(
            "() => document.querySelector('.results tbody tr:nth-child(2) th').innerText === 'Absolute'"
        )
        page.get_by_label("Filter rows").fill("copy rope")
        page.wait_for_function("() => document.querySelectorAll('.results tbody tr').length === 1")
        assert page.get_by_text("1 of 10 rows").is_visible()
        assert page.get_by_label("Filter rows").input_value() == "copy rope"
        assert accessibility(page) == []
        page = visitor.open("playground?ablation=dense&scale=narrow&run=none", "legend")
        assert page.locator("legend").inner_text().endswith("by Dense (%) first")
        page = visitor.open("ablations", ".leaders")
        card = page.locator("ul.ablations > li", has_text="Two tasks")
        assert card.locator(".leaders dt").all_inner_texts() == ["In-dist. (%)", "Copy · CoPE", "Recall · CoPE"]
        assert "best of each task" in card.locator(".leaders").inner_text()
        of_one_task = page.locator("ul.ablations > li", has_text="By another metric").locator(".leaders")
        assert of_one_task.locator("dt").all_inner_texts()[1:] == ["Copy · T5", "Copy · Absolute", "Copy · RoPE"]
        assert of_one_task.inner_text().split("\n")[-1] == "29.80 ± 0.16 better than CoPE"
        assert card.locator(".stage").inner_text() == "finished"
        assert "1 of 1 claim shown" in card.locator(".sizes").inner_text()
        assert visitor.problems == []


def test_home_draws_many_points_and_tells_its_own_errors_from_a_lost_server(visitor: Visitor) -> None:
    def running(route: Route) -> None:
        answer = route.fetch()
        listed = [each | {"counts": {"running": 1}} for each in answer.json() if each["name"] == "tiny"]
        route.fulfill(json=listed)

    curves = {"metrics": ["train/loss"], "rows": [{"series": [{"points": [[i, 1 / (i + 1)] for i in range(130_000)]}]}]}
    visitor.page.route("**/api/v1/ablations", running)
    visitor.page.route("**/api/v1/ablations/tiny/curves?*", lambda route: route.fulfill(json=curves))
    page = visitor.open("ablations", "svg.spark path")
    assert page.locator("#live").inner_text().startswith("updated")

    visitor.page.route("**/api/v1/ablations", lambda route: route.fulfill(json={}))
    page = visitor.open("ablations", ".error")
    assert "does not respond" not in page.locator("body").inner_text()
    assert page.locator("#live").inner_text().startswith("An error of this page: ")
    assert any("TypeError" in each for each in visitor.problems)
    visitor.problems.clear()

    visitor.page.route("**/api/v1/ablations", lambda route: route.abort())
    page = visitor.open("ablations", ".error")
    assert page.locator("#live").inner_text() == "The server does not respond. Trying again …"
    assert [each for each in visitor.problems if "ERR_FAILED" not in each] == []
    visitor.problems.clear()


def test_a_view_is_drawn_when_an_error_has_passed(visitor: Visitor) -> None:
    refusals = [429]
    busy = {"detail": "busy"}
    visitor.page.route(
        "**/api/v1/claims?*",
        lambda route: route.fulfill(status=refusals.pop(), json=busy) if refusals else route.fallback(),
    )
    recovered = {"ablations/tiny": "() => dispatchEvent(new Event('routechange'))"}
    recovered["ablations/tiny?metric=old"] = "() => { location.hash = '#/ablations/tiny' }"
    for address, again in recovered.items():
        page = visitor.open(address, ".error")
        assert page.locator("h1:visible").all_inner_texts() == ["This view cannot be shown"]
        page.evaluate(again)
        assert page.wait_for_selector(".uplot canvas").bounding_box()["width"] > 400
        page.locator(".claims").wait_for()
        assert page.locator("h1:visible").all_inner_texts() == ["Selective copy, tiny"]
        assert page.locator(".error").count() == 0
    assert [each for each in visitor.problems if "429" not in each and "422" not in each] == []
    visitor.problems.clear()


def test_an_address_without_a_view_is_not_found(visitor: Visitor) -> None:
    for address in ("runs/%", "%", "constructor"):
        page = visitor.open(address, ".error")
        assert page.locator(".error h1").inner_text() == "Not found"
    visitor.page.close()  # it asks again and again
    assert [each for each in visitor.problems if "404" not in each] == []
    visitor.problems.clear()


def test_rows_with_the_names_of_other_choices_are_compared_with(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    sample = site.sample.copy_to(tmp_path / "copy")
    text = (sample.ablations / "curves.yaml").read_text()
    text = text.replace("CoPE: [cope], Absolute: [absolute], RoPE: [rope]", "CoPE: [cope], none: [], paper: [rope]")
    published = "published: [{match: {model.position: CoPE}, values: {in_dist/token_error: 1.0}, source: Table 9}]\n"
    (sample.ablations / "named.yaml").write_text(text + published)
    with serving(sample.settings()) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations/named", ".tables table")
        choice = page.get_by_label("verdicts against")
        assert choice.locator("option").all_inner_texts() == ["nothing", "CoPE", "none", "paper"]
        for name, compare in (("none", "compare=none"), ("paper", "compare=paper"), ("nothing", None)):
            with page.expect_response("**/table?*") as answer:
                choice.select_option(label=name)
            assert (compare is None) == ("compare" not in answer.value.url)
            assert compare is None or compare in answer.value.url
            page.wait_for_function(
                f"() => document.querySelector('[data-key=\"verdicts against\"]').selectedOptions[0].text === '{name}'"
            )
        assert visitor.problems == []


def test_ablations_are_searched_by_words(visitor: Visitor) -> None:
    page = visitor.open("ablations", "ul.ablations")
    page.get_by_label("Search ablations").fill("tiny table 1")
    page.wait_for_function("() => document.querySelectorAll('ul.ablations > li').length === 1")
    assert page.url.endswith("?q=tiny+table+1")
    page.get_by_label("Search ablations").fill("nothing like it")
    page.get_by_text("No ablation has these words").wait_for()


def test_what_was_tried_is_asked_on_home_and_answered_from_all_ablations(visitor: Visitor, origin: str) -> None:
    page = visitor.open("ablations", "ul.ablations")
    page.get_by_label("What was tried").fill("model.position=absolute,cope train.steps=40")
    page.get_by_role("button", name="What was tried?").click()
    page.locator(".groups table").first.wait_for()
    assert page.url.endswith("#/tried?q=model.position%3Dabsolute%2Ccope+train.steps%3D40")
    asked = {"values": "model.position=absolute,cope", "filter": "train.steps=40"}
    answer = httpx.get(f"{origin}{API}/tried", params=asked).raise_for_status().json()
    shown = page.locator(".groups tbody tr").all_inner_texts()
    texts = [value["text"] for group in answer["groups"] for value in group["values"]]
    assert len(shown) == len(texts) > 1
    assert all(text in line for text, line in zip(texts, shown, strict=True))
    page.locator(".view-tried .ask input").fill("model.position=cope train.steps=7")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="the first 20 of 35 runs").wait_for()
    page.locator(".view-tried .ask input").fill("model.positon=cope")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("similar keys: model.position").wait_for()
    page.locator(".view-tried .ask input").fill("model.position=fox")
    page.keyboard.press("Enter")
    page.get_by_text("No run matches.").wait_for()
    page.evaluate("() => { location.hash = '#/tried'; }")
    page.get_by_text("Ask for a key and its values").wait_for()
    page.go_back()
    page.get_by_text("No run matches.").wait_for()
    assert [each for each in visitor.problems if "422" not in each] == []
    visitor.problems.clear()


def test_runs_are_filtered_searched_and_loaded_page_by_page(visitor: Visitor, site: Site) -> None:
    page = visitor.open("runs", "table.runs")
    rows = page.locator("table.runs tbody tr")
    assert rows.count() == 100
    page.get_by_role("button", name="Load 11 more").click()
    page.wait_for_function("() => document.querySelectorAll('table.runs tbody tr').length === 111")
    page.get_by_label("condition", exact=True).fill("model.position=cope, train.steps=7")
    page.keyboard.press("Enter")
    page.get_by_text("35 of 35 runs").wait_for()
    page.get_by_role("button", name="Remove train.steps=7").click()
    page.get_by_text("38 of 38 runs").wait_for()
    page.get_by_role("button", name="Remove model.position=cope").click()
    page.get_by_label("Search runs").fill("TINY abs")  # that of a sweep
    page.get_by_text("1 of 1 run", exact=True).wait_for()
    assert page.url.endswith("#/runs?search=TINY+abs")
    page.get_by_label("Search runs").fill(f"{site.sample.ids[2][:6]} diverged")  # an id, and a message
    page.wait_for_function("() => document.querySelector('table.runs tbody').textContent.includes('failed')")
    page.get_by_label("Search runs").fill("nothing like it")
    page.get_by_text("No run fits.").wait_for()
    visitor.open("runs?filter=model.layer=1", ".error")
    assert "model.layers" in page.locator(".error").inner_text()
    assert [each for each in visitor.problems if "422" not in each] == []
    visitor.problems.clear()


@pytest.mark.thorough
def test_unchanged_answers_are_not_sent_again_and_a_hidden_tab_asks_nothing(visitor: Visitor) -> None:
    page = visitor.open("ablations/tiny", ".uplot canvas")
    again = "() => dispatchEvent(new Event('routechange'))"
    with page.expect_response(lambda response: "/curves" in response.url and response.status == 304):
        page.evaluate(again)
    page.wait_for_load_state("networkidle")
    page.evaluate("() => Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.evaluate(again)
    before = len(visitor.requests)
    page.wait_for_timeout(300)
    assert len(visitor.requests) == before
    page.evaluate("() => Object.defineProperty(document, 'hidden', { value: false })")
    with page.expect_response(lambda response: response.status == 304):
        page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")


def test_the_playground_shows_the_numbers_of_the_api(visitor: Visitor, site: Site) -> None:
    run_id = site.sample.ids[0]
    text = "1 _ 0 _ > 1 0"
    page = visitor.open(f"playground?run={run_id}", "input:checked")
    page.get_by_role("button", name="Insert an example").click()
    example = page.get_by_label("Text", exact=True).input_value().split()
    marker = example.index(">")  # of a test sequence of its task: data among blanks, and after markers the copy
    assert [each for each in example[:marker] if each != "_"] == [each for each in example[marker:] if each != ">"]
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Measure").click()
    page.locator(".matrix canvas").first.wait_for()
    body = {"models": [run_id], "text": text}
    expected = page.request.post(f"{visitor.origin}{API}/perplexity", data=body).json()["results"][0]["total"]
    shown = float(page.locator("#perplexity ~ * .best, section:has(#perplexity) .best").first.inner_text())
    assert shown == pytest.approx(expected["perplexity"], rel=1e-3)
    assert "".join(page.locator(".tokens .token").all_text_contents()).strip() == text
    first = page.locator(".strip").first
    assert first.locator(".key.query").get_attribute("aria-label").startswith(">: gate ")
    first.locator(".key").nth(2).click()
    page.wait_for_function("() => document.querySelector('.strip .key.query span').textContent === '0'")
    assert page.locator(".strip").first.locator(".key.later").count() == 3


def test_the_playground_keeps_what_is_typed_and_an_empty_choice(visitor: Visitor, site: Site) -> None:
    cope, absolute = site.sample.ids[:2]
    page = visitor.open(f"playground?run={cope}&ask=1&text=1 _ 0 _ > 1 0", ".matrix canvas")
    area = page.get_by_label("Text", exact=True)
    assert area.bounding_box()["width"] > 500
    area.fill("1 _ > 1")
    page.locator(f"[data-key='run {absolute}']").check()
    page.locator(".scored .who").nth(1).wait_for()
    assert area.input_value() == "1 _ > 1"
    page.get_by_role("button", name="Measure").click()
    page.wait_for_function("() => new URLSearchParams(location.hash).get('text') === '1 _ > 1'")
    page.go_back()
    page.wait_for_function("() => document.getElementById('text').value === '1 _ 0 _ > 1 0'")
    page.locator(f"[data-key='run {absolute}']").click()
    page.locator(f"[data-key='run {cope}']").click()
    page.wait_for_function("() => location.hash.includes('run=none')")
    page.wait_for_function("() => !document.querySelector('.checkpoints input:checked')")


def test_the_playground_says_when_an_ablation_has_no_checkpoint(visitor: Visitor) -> None:
    page = visitor.open("playground?ablation=curves&scale=small", ".checkpoints input:checked")
    assert page.get_by_text("curves has no checkpoint here; these are of tiny.").is_visible()
    page.get_by_label("scale").select_option("longer")
    page.get_by_text("No run of this scale is finished.").wait_for()
    assert "ablation=tiny&scale=longer" in page.url


def test_the_playground_tells_its_own_errors_from_a_lost_server(visitor: Visitor, site: Site) -> None:
    address = f"playground?run={site.sample.ids[0]}&ask=1&text=1 _ 0 _ > 1 0"
    visitor.page.route("**/api/v1/perplexity", lambda route: route.fulfill(json={}))
    page = visitor.open(address, ".error")
    assert "does not respond" not in page.locator(".error").inner_text()
    visitor.page.route("**/api/v1/perplexity", lambda route: route.abort())
    page = visitor.open(address, ".error")
    assert page.locator(".error").inner_text() == "The server does not respond."
    assert [each for each in visitor.problems if "ERR_FAILED" not in each] == []
    visitor.problems.clear()


def test_a_sweep_is_followed_until_it_ends_and_a_retry_is_confirmed(visitor: Visitor, site: Site) -> None:
    store = site.sample.store
    record = write_sweep(store, site.sample.plan)
    page = visitor.open(f"sweeps/{record.sweep_id}", ".tiles")
    assert page.locator(".tile dt").all_inner_texts() == [
        "remaining time",
        "steps per second",
        "worker groups",
        "nodes",
    ]
    assert page.locator(".counts").inner_text().startswith("2 of 4 finished")
    waiting = page.locator(".waiting li").all_inner_texts()
    assert sorted(each.split(": ")[0] for each in waiting) == ["1 run", "1 run"]
    assert all(each.split(": ")[1].startswith("waits for the first worker to start") for each in waiting)
    page.wait_for_selector("section:has(#curves) .uplot canvas")
    assert page.get_by_role("button", name="Stop", exact=True).is_visible()
    end_sweep(store, record, "failed")
    page.get_by_role("button", name="Retry 2 runs").click()
    assert page.locator(".tiles").count() == 0
    assert accessibility(page) == []
    page.keyboard.press("Escape")
    assert not [url for url in visitor.requests if "/retry" in url]
    page.get_by_role("button", name="Retry 2 runs").click()
    page.get_by_role("button", name="Retry", exact=True).click()
    page.wait_for_function("() => document.querySelector('p[role=status]').textContent.length > 20")  # why it cannot be
    assert [each for each in visitor.problems if "the server responded with a status of" not in each] == []
    visitor.problems.clear()


def test_counts_go_on_without_live_progress_until_that_is_back(visitor: Visitor, site: Site) -> None:
    record = write_sweep(site.sample.store, site.sample.plan)
    failures, finished = [503], [2]

    def with_finished(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        content["counts"]["finished"] = finished[-1]
        route.fulfill(response=answer, json=content, headers=answer.headers | {"etag": f'"{finished[-1]}"'})

    page = visitor.page
    page.clock.install()
    page.route(f"**/api/v1/sweeps/{record.sweep_id}", with_finished)
    page.route(
        "**/events",
        lambda route: route.fulfill(status=failures.pop(), json={"detail": "no"}) if failures else route.fallback(),
    )
    visitor.open(f"sweeps/{record.sweep_id}", ".note:has-text('There is no live progress')")
    finished.append(3)
    page.evaluate("() => dispatchEvent(new Event('routechange'))")
    page.wait_for_function("() => document.querySelector('.counts').innerText.startsWith('3 of ')")
    page.clock.fast_forward(6000)
    page.wait_for_selector(".tiles")
    end_sweep(site.sample.store, record, "interrupted")
    assert [each for each in visitor.problems if "503" not in each] == []
    visitor.problems.clear()


def test_a_retry_trains_stopped_runs_and_rows_that_the_search_has_not_chosen(
    visitor: Visitor, site: Site, tmp_path: Path
) -> None:
    file = tmp_path / "searched.yaml"
    file.write_text(SEARCHED)
    plan = expand(load_ablation(file))
    row = row_of(plan.ablation, {"train.lr": 0.001})
    stop_early(site.sample.store, row.runs[0])
    member = SweepRun(run_id=row.runs[0].run_id, row=row.name, labels=row.labels, seed=0)
    changes: dict[str, Any] = {"runs": [member], "data": plan.ablation.data, "status": "interrupted"}
    record = write_sweep(site.sample.store, plan, **changes)
    page = visitor.open(f"sweeps/{record.sweep_id}", "#members")
    assert page.locator(".head .badge").inner_text() == "interrupted"
    assert page.get_by_role("button", name="Retry 1 run and 1 row of the search").is_visible()
    assert page.locator(".waiting").inner_text().startswith("1 row not chosen yet")
    record = write_sweep(site.sample.store, plan, **changes, leave_out=["stopped"])  # of a schedule
    page = visitor.open(f"sweeps/{record.sweep_id}", "#members")
    assert page.get_by_role("button", name="Retry 1 row of the search").is_visible()


def test_a_sweep_shows_the_curves_of_the_loss_and_of_the_primary_metric(visitor: Visitor, site: Site) -> None:
    store = site.sample.store
    record = write_sweep(store, site.curves)
    page = visitor.open(f"sweeps/{record.sweep_id}", "section:has(#curves) figure:nth-child(2) .uplot canvas")
    end_sweep(store, record, "interrupted")
    titles = [each.split("\n")[0] for each in page.locator(".multiples figcaption").all_inner_texts()]
    assert titles == ["train/loss", "In-dist. (%)"]
    assert page.locator(".legend button").all_inner_texts() == ["CoPE", "Absolute", "RoPE"]


def test_a_sweep_shows_no_curves_of_other_runs_of_its_rows(visitor: Visitor, site: Site) -> None:
    """The file was changed since: its rows have other runs."""
    cope, absolute, _ = members(site.curves)
    earlier = absolute.model_copy(update={"run_id": "0123456789abcdef"})
    record = end_sweep(site.sample.store, write_sweep(site.sample.store, site.curves, runs=[cope, earlier]))
    page = visitor.open(f"sweeps/{record.sweep_id}", "section:has(#curves) .uplot canvas")
    assert page.locator(".legend button").all_inner_texts() == ["CoPE"]


def test_the_failures_of_a_sweep_are_grouped_by_message(visitor: Visitor, site: Site) -> None:
    many = expand(load_ablation(site.sample.ablations / "many.yaml"))
    record = end_sweep(site.sample.store, write_sweep(site.sample.store, many), "failed")
    page = visitor.open(f"sweeps/{record.sweep_id}", "#members")
    (group,) = page.locator(".failures li").all()
    assert group.locator("p").inner_text() == "Diverged: the training loss is nan at step 3"
    assert group.locator("a").count() == 105
    assert group.locator("a").first.inner_text() == "CoPE, seed 0"
    columns = page.locator("section:has(#members) th[scope=col]").all_text_contents()
    assert columns[:4] == ["row", "seed", "status", "step"]
    assert columns[-1] == "message"
    assert page.locator("table.members tbody tr").count() == 100
    page.get_by_role("button", name="Show all 105 runs").click()
    assert page.locator("table.members tbody tr").count() == 105
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((each) => each.scrollHeight <= each.clientHeight)"
    )


def test_a_sweep_is_submitted_by_a_form(
    context: BrowserContext, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster accepts the job and runs none; test_sweeps_on_ray starts a real one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sample = site.sample.copy_to(tmp_path / "copy")
    shutil.copy(sample.ablations / "tiny.yaml", sample.ablations / "tiny_again.yaml")
    end_sweep(sample.store, write_sweep(sample.store, expand(load_ablation(sample.ablations / "tiny_again.yaml"))))
    with scripted_cluster() as cluster, serving(sample.settings(ray_address=cluster.url)) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations/tiny?tab=train&scale=base", "form.train")
        page.get_by_text(
            "2 of 4 runs would be trained (1 failed); 2 have ended and will not be trained again."
        ).wait_for()
        page.get_by_text("4 runs of the plan are shared with tiny_again.").wait_for()
        for width, scheme in SCREENS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert accessibility(page) == [], (width, scheme)
        page.get_by_label("train at most").fill("1")
        page.get_by_text(
            "1 of 4 runs would be trained (1 failed); 2 have ended and will not be trained again."
        ).wait_for()
        page.get_by_label("train at most").fill("")
        page.get_by_label("Overrides").fill("train.steps=21")
        page.get_by_text("4 of 4 runs would be trained.").wait_for()
        page.get_by_label("Overrides").fill("train.stepz=3")
        page.get_by_role("status").get_by_text("train.stepz").wait_for()
        page.get_by_role("button", name="Train", exact=True).click()
        page.wait_for_selector("form.train [role=alert]:not(:empty)")
        assert "train.stepz" in page.locator("form.train [role=alert]").inner_text()
        assert str(sample.root) not in page.locator("form.train [role=alert]").inner_text()
        assert cluster.submitted == []
        page.locator("form.train select").select_option("longer")
        page.wait_for_function("() => location.hash.includes('scale=longer')")
        assert page.get_by_label("Overrides").input_value() == "train.stepz=3"  # what was typed is kept
        page.wait_for_function("() => document.querySelector('form.train select').value === 'longer'")
        page.get_by_label("Overrides").select_text()
        page.evaluate("history.back()")  # the form is drawn again while somebody types in it
        page.wait_for_function("() => document.querySelector('form.train select').value === 'base'")
        page.keyboard.insert_text("train.lr=0.03")
        assert page.get_by_label("Overrides").input_value() == "train.lr=0.03"  # what was selected is replaced
        page.evaluate("history.forward()")
        page.wait_for_function("() => document.querySelector('form.train select').value === 'longer'")
        page.get_by_label("Overrides").fill("  seeds=[0, 7]\n\ntrain.lr=0.02\n")
        page.get_by_label("train at most").fill("3")
        page.get_by_label("for at most").fill("90")
        with page.expect_response(lambda response: response.request.method == "PUT") as sent:
            page.get_by_role("button", name="Train", exact=True).click()
        assert sent.value.status == 202, sent.value.text()
        assert SWEEP_ID.fullmatch(sent.value.url.rpartition("/")[2])
        page.wait_for_url("**/#/sweeps/*")
        page.wait_for_selector("#members")
        (job,) = cluster.submitted
        assert page.url.endswith(job["submission_id"])
        submission, plan = job_submission(sample.store, job["submission_id"])
        assert (submission.max_runs, submission.time_budget_s, submission.scale) == (3, 5400.0, "longer")
        assert {(run.seed, run.train.lr, run.train.steps) for run in plan.runs} == {(0, 0.02, 20), (7, 0.02, 20)}
        page.close()
    assert [each for each in visitor.problems if "422" not in each] == []


def test_the_form_is_offered_to_those_who_may_submit(context: BrowserContext, site: Site, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    secrets = {True: keys.create("me", may_submit=True), False: keys.create("you")}
    settings = site.sample.settings(keys_file=keys.path, ray_address="http://127.0.0.1:1")
    with serving(settings) as client:
        for may, secret in secrets.items():
            visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
            page = visitor.open("ablations/tiny?tab=train", "dialog[open]")
            page.get_by_label("key", exact=True).fill(secret)
            page.keyboard.press("Enter")
            page.wait_for_selector("form.train" if may else ".uplot canvas")
            assert page.get_by_role("link", name="Train", exact=True).count() == may
            page.evaluate("sessionStorage.clear()")
            page.close()
            assert [each for each in visitor.problems if "401" not in each] == []


def test_the_page_works_below_a_prefix(context: BrowserContext, site: Site, origin: str) -> None:
    cope, absolute = site.sample.ids[:2]
    both = short_ids(cope, absolute)
    with (
        httpx.Client(base_url=origin, timeout=120) as client,
        page_site.behind_proxy(client, "/user/me/proxy/8000") as address,
    ):
        visitor = Visitor.of(context, address)
        visitor.open("ablations/tiny?row=CoPE&open=CoPE|in_dist/token_error", ".uplot canvas")
        visitor.open("ablations/tiny?tab=figures", ".figures img")
        visitor.open(f"runs?sel={both}", ".uplot canvas")
        page = visitor.open(f"runs/{cope}?tab=checkpoint", "main code")
        assert f"curl -C - -O {address}/api/v1/runs/{cope}/checkpoint/" in page.locator("main code").inner_text()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download model.safetensors").click()
        assert download.value.path().stat().st_size > 1000
        visitor.open(f"playground?run={cope}&ask=1&text=1 _ 0 _ > 1 0", ".matrix canvas")
        page.get_by_role("link", name="API", exact=True).click()
        page.get_by_text("/api/v1/version", exact=True).click()
        page.get_by_text("Try it out").click()
        page.locator("button.execute").click()
        page.wait_for_selector(".live-responses-table")
        assert '"python"' in page.locator(".live-responses-table").inner_text()
        page.close()
    assert visitor.problems == []


def test_a_server_with_keys_asks_for_one(context: BrowserContext, site: Site, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    secret = keys.create("me")
    with serving(site.sample.settings(keys_file=keys.path)) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        page = visitor.open("ablations/tiny", "dialog[open]")
        assert "serve --new-key" in page.inner_text("dialog[open]"), "also where the server says why it asks"
        page.get_by_label("key", exact=True).fill(secret + "x")
        page.get_by_role("button", name="Use this key").click()
        page.wait_for_selector("dialog[open]")  # again, because the key is wrong
        page.get_by_label("key", exact=True).fill(secret)
        page.keyboard.press("Enter")
        page.wait_for_selector(".uplot canvas")
        kept = page.evaluate("[...Object.values(sessionStorage), ...Object.values(localStorage), document.cookie]")
        assert kept == [secret, ""]
        with page.expect_download() as download:
            page.get_by_role("button", name="Markdown").click()
        assert download.value.path().read_text().startswith("| position")
        visitor.open(f"playground?run={site.sample.ids[0]}&ask=1&text=1 _ > 1", ".matrix canvas")  # reading, too
        page.close()
    assert [each for each in visitor.problems if "401" not in each] == []
