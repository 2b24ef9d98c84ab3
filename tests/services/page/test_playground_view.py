"""The playground of the web page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.sample_store import API
from tests.services.page import page_site
from tests.services.page.page_site import Site, Visitor

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytestmark = page_site.IN_A_BROWSER


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
    assert page.locator(".tokens").first.inner_text().strip() == text
    assert page.locator(".tokens .token").all_text_contents() == text.split()
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


def test_the_playground_chooses_checkpoints_of_one_task_and_its_help_is_of_that_task(
    visitor: Visitor, site: Site
) -> None:
    def of_two_tasks(route: Route) -> None:
        answer = route.fetch()
        table = answer.json()
        for number, row in enumerate(table["rows"]):
            row["labels"]["task"] = f"task {number}"
        route.fulfill(json=table)

    visitor.page.route("**/ablations/tiny/table?*", of_two_tasks)
    page = visitor.open("playground?ablation=tiny", ".matrix canvas")
    assert page.locator(".checkpoints .checkrow").count() == 2
    assert page.locator(".checkpoints input:checked").count() == 1
    assert "> stands in its place" in page.locator("#text-help").inner_text()
    page.get_by_role("button", name="Choose none").click()
    page.wait_for_function("() => !document.getElementById('text-help').innerText.includes('>')")


def test_the_playground_drops_answers_to_older_choices(visitor: Visitor, site: Site) -> None:
    cope, absolute = site.sample.ids[:2]
    page = visitor.open(f"playground?run={cope}&run={absolute}&ask=1&text=1 _ 0 _ > 1 0", ".matrix canvas")
    checkpoint = page.locator("select[data-key=checkpoint]")
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    def answer() -> None:
        """Let the page have the held answer, and draw it."""
        with page.expect_response(held[-1].request.url):
            held[-1].continue_()
        page.wait_for_timeout(200)

    page.route(f"**/runs/{absolute}/probe", hold)
    with page.expect_request(f"**/runs/{absolute}/probe"):
        checkpoint.select_option(absolute)
    checkpoint.select_option(cope)
    answer()
    assert checkpoint.input_value() == cope
    assert page.locator(".strip .key.query").first.get_attribute("aria-label").startswith(">: gate ")

    page.route("**/ablations/tiny/table?*", hold)
    with page.expect_request("**/ablations/tiny/table?*"):
        page.goto("about:blank")
        page.goto(f"{visitor.origin}/#/playground?ablation=tiny")
    page.evaluate("() => { location.hash = '#/sweeps'; }")
    page.locator(".view-sweeps table").wait_for()
    answer()
    assert page.url.endswith("#/sweeps")


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
