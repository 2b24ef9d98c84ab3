"""An ablation on the web page: its table, curves and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.read.reports.evidence import evidence, write_evidence
from cope_sweep.read.tables import read_results
from cope_sweep.store import open_store
from tests.helpers.finished_runs import finish
from tests.helpers.sweeps import end_sweep, stop, write_sweep
from tests.services.page import page_site
from tests.services.page.page_site import Site, Visitor, accessibility, short_ids

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Route

pytestmark = page_site.IN_A_BROWSER


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
    smooth, summary, styles, columns, zeros, linear, bands = page.evaluate(
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
            [[0, 8], [-1, 7]].map((values) => {
              const series = values.map((value) => ({ name: "", points: [[1, 1, value]] }));
              return curves.lines([{ name: "", style: {}, series }], { by: "step", smoothing: 0, spread: "deviation" })[0];
            }),
          ];
        }"""
    )
    assert smooth[0] == [0, 1]
    assert smooth[2] == [2, pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)]
    assert summary == [
        {"x": 12, "mean": 3, "deviation": pytest.approx(2**0.5), "low": 2, "high": 4},
        {"x": 20, "mean": 4, "deviation": 0, "low": 4, "high": 4},  # one of two seeds
    ]
    deviation = 32**0.5
    assert [band["low"] for band in bands] == [[[1, 0]], [[1, pytest.approx(3 - deviation)]]]  # errors are not below 0
    assert [band["high"] for band in bands] == [
        [[1, pytest.approx(4 + deviation)]],
        [[1, pytest.approx(3 + deviation)]],
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
    assert "compare=Absolute" in next(url for url in visitor.requests if "format=latex" in url)  # as it is shown
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
            value |= {"text": "-9.03125", "stuck": False}
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
                cell["values"] = [value | {"stuck": True} for value in cell["values"]]
                if row["row"] == "CoPE":
                    cell["values"] += [value | {"stuck": False} for value in cell["values"] * 2]
                    cell["n"] = len(cell["values"])
        route.fulfill(response=answer, json=table)

    def with_many_rows(route: Route) -> None:
        answer = route.fetch()
        curves = answer.json()
        waiting = [curves["rows"][0] | {"row": f"waiting {i}", "series": []} for i in range(4)]
        rows = [row | {"row": f"{row['row']} {i}"} for i in range(10) for row in curves["rows"]]
        route.fulfill(response=answer, json=curves | {"rows": waiting + rows})

    visitor.page.route("**/ablations/tiny/table?*", with_stuck_seeds)
    visitor.page.route("**/ablations/tiny/curves?*", with_many_rows)
    page = visitor.open("ablations/tiny", ".uplot canvas")
    marked = page.locator(".results tr", has=page.locator(".mark"))
    assert [row.split()[0] for row in marked.all_inner_texts()] == ["Absolute"]
    counted = page.locator(".results tr", has_text="1/3 stuck")
    assert [row.split()[0] for row in counted.all_inner_texts()] == ["CoPE"]
    assert page.get_by_text("most seeds are stuck").is_visible()
    drawn = page.locator(".legend button[aria-pressed='true']").all_inner_texts()
    assert len([name for name in drawn if not name.startswith("waiting")]) == len(drawn) == 12
    assert page.get_by_text("The first 12 of 20 rows with curves are drawn").is_visible()


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


def test_curves_of_many_rows_are_drawn_when_somebody_opens_them(visitor: Visitor) -> None:
    def with_many_rows(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        route.fulfill(json=content | {"plan": content["plan"] * 13})

    visitor.page.route("**/ablations/tiny", with_many_rows)
    page = visitor.open("ablations/tiny?tab=figures", ".figures figcaption")
    assert page.locator("details summary", has_text="Learning curves").count() == 1
    assert page.locator("figcaption:visible", has_text="Learning curves").count() == 0


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
    with page_site.visiting(context, sample.settings(store=tmp_path / "empty")) as visitor:
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
        visitor.problems.clear()


def test_an_ablation_that_was_started_shows_its_own_curves_and_not_the_kept_results(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    sample = site.sample.copy_to(tmp_path / "sample")
    write_evidence(evidence(read_results(sample.plan, sample.store)), sample.ablations / "results")
    stop(open_store(tmp_path / "new", create=True), sample.plan.runs[0])
    with page_site.visiting(context, sample.settings(store=tmp_path / "new")) as visitor:
        page = visitor.open("ablations/tiny", ".results tbody tr")
        page.wait_for_selector("#curves")
        assert page.locator("p.committed").count() == 0


def test_runs_with_other_values_are_chosen_above_the_table(context: BrowserContext, site: Site, tmp_path: Path) -> None:
    sample = site.sample.copy_to(tmp_path / "copy")
    (sample.ablations / "varied.yaml").write_text(page_site.CURVES)
    sets = ["train.steps=30", "seeds=[0, 7]"]
    plan = expand(with_overrides(load_ablation(sample.ablations / "varied.yaml"), assignments=sets))
    end_sweep(sample.store, write_sweep(sample.store, plan, sets=sets))
    for run in plan.runs:
        finish(sample.store, run, {"in_dist/token_error": 10.0 + run.seed})
    with page_site.visiting(context, sample.settings()) as visitor:
        page = visitor.open("ablations", "ul.ablations")
        page.click("text=train.steps=30, seeds=[0, 7]")
        page.wait_for_selector("table.results")
        assert "set=train.steps" in page.url
        assert "6 of 6 finished" in page.inner_text(".state .counts")
        assert "13.50" in page.inner_text("table.results")
        assert "than the file without a scale or --set." in page.locator(".notes").inner_text()
        # Without an address of its own, the ablation opens with the values that have runs.
        page = visitor.open("ablations/varied", "table.results")
        page.get_by_label("Values").select_option("as in the file")
        page.wait_for_function("() => document.querySelector('.state .counts').innerText.includes('0 of 3 finished')")
        page.get_by_label("Values").select_option("train.steps=30, seeds=[0, 7]")
        page.wait_for_function("() => document.querySelector('.state .counts').innerText.includes('6 of 6 finished')")


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
    with page_site.visiting(context, sample.settings()) as visitor:
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


def test_rows_with_the_names_of_other_choices_are_compared_with(
    context: BrowserContext, site: Site, tmp_path: Path
) -> None:
    sample = site.sample.copy_to(tmp_path / "copy")
    text = (sample.ablations / "curves.yaml").read_text()
    text = text.replace("CoPE: [cope], Absolute: [absolute], RoPE: [rope]", "CoPE: [cope], none: [], paper: [rope]")
    published = "published: [{match: {model.position: CoPE}, values: {in_dist/token_error: 1.0}, source: Table 9}]\n"
    (sample.ablations / "named.yaml").write_text(text + published)
    with page_site.visiting(context, sample.settings()) as visitor:
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
