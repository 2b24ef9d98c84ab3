"""Runs on the web page: one, lists, and comparisons of chosen ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from cope_sweep.config import expand, load_ablation
from tests.helpers.finished_runs import finish
from tests.helpers.sweeps import end_sweep, write_sweep
from tests.services.page import page_site
from tests.services.page.page_site import Site, Visitor, accessibility, short_ids

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Route

pytestmark = page_site.IN_A_BROWSER


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


def test_an_ablation_of_the_filter_opens_at_the_scale_that_has_runs(visitor: Visitor) -> None:
    def only_longer(route: Route) -> None:
        ablations = route.fetch().json()
        tiny = next(each for each in ablations if each["name"] == "tiny")
        tiny["at_scales"]["longer"]["counts"], tiny["counts"] = tiny["counts"], {"pending": 4}
        route.fulfill(json=ablations)

    visitor.page.route("**/api/v1/ablations", only_longer)
    page = visitor.open("runs", "table.runs")
    page.get_by_label("ablation").select_option("tiny")
    page.wait_for_function("() => location.hash === '#/runs?ablation=tiny&scale=longer'")
    page.get_by_label("scale").select_option("base")
    page.wait_for_function("() => location.hash === '#/runs?ablation=tiny'")


def test_a_mistyped_run_can_be_corrected_where_it_was_typed(visitor: Visitor, site: Site) -> None:
    cope, absolute = site.sample.ids[:2]
    page = visitor.open(f"runs/{cope}?tab=difference&against={absolute[:-1]}x", ".bad")
    page.get_by_label("compare with run").fill(absolute)
    page.keyboard.press("Enter")
    page.locator(".view-runs h3").first.wait_for()
    assert [each for each in visitor.problems if "404" not in each and "422" not in each] == []
    visitor.problems.clear()


def test_runs_of_one_ablation_have_a_column_of_its_primary_metric(visitor: Visitor) -> None:
    page = visitor.open("runs?ablation=tiny", "table.runs")
    columns = page.locator("table.runs thead th").all_inner_texts()
    assert columns[6] == "in_dist/token_error"

    def with_other_primary(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | {"primary": "train/loss"})

    page.route("**/api/v1/ablations/tiny", with_other_primary)
    page = visitor.open("runs?ablation=tiny", "table.runs")
    assert page.locator("table.runs thead th").all_inner_texts()[6] == "train/loss"


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
    legend = page.locator(".comparison .legend .entry").all_inner_texts()
    assert page.locator(".comparison .legend button").count() == 0  # only in a legend that chooses rows
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
    with page_site.visiting(context, sample.settings()) as visitor:
        chosen = short_ids(sample.ids[0], recall.run_id)
        page = visitor.open(f"runs?search=tiny&sel={chosen}", ".comparison tbody")
        assert "task.pairs\t–\t2" in page.locator(".comparison tbody tr").all_inner_texts()
        page.route("**/api/v1/runs/*", lambda route: route.fulfill(status=500, json={"detail": "no"}))
        page = visitor.open(f"runs?search=tiny&sel={chosen}", ".comparison .uplot canvas")
        page.get_by_text("The configuration of the chosen runs is not known yet.").wait_for()
        assert [each for each in visitor.problems if "500" not in each] == []
        visitor.problems.clear()


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
    page.get_by_label("condition", exact=True).fill("train.betas=0.9,0.999, model.position=cope")  # one has a comma
    page.keyboard.press("Enter")
    page.get_by_text("38 of 38 runs").wait_for()
    page.get_by_role("button", name="Remove train.betas=0.9,0.999").click()
    page.get_by_role("button", name="Remove model.position=cope").click()
    page.get_by_label("Search runs").fill("TINY abs")  # an ablation, and a row
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
