"""The first view of the web page: cards, claims, and what was tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from cope_sweep.read.queries.claims import with_deciding
from tests.helpers.claims import claim_result
from tests.helpers.sample_store import API
from tests.services.page import page_site
from tests.services.page.page_site import Site, Visitor

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Route

pytestmark = page_site.IN_A_BROWSER


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
    assert page.get_by_text("what the reports of 2 ablations say about them").is_visible()
    page.locator(".folded summary").first.click()
    lines = page.locator(".folded").first.locator(".claims tbody tr")
    assert lines.locator(".verdict").all_inner_texts() == ["not shown", "shown", "shown in part (1 of 2 pairs)"]
    assert [text.split("\n")[1] for text in lines.all_inner_texts()] == [
        "Table 2 · many · tuned, 2 layers of 64",
        "Table 2 · copy · one recipe, 2 layers of 64, hardware follows the row: many decides",
        "Table 7 · copy · one recipe, 2 layers of 64: many decides",
    ]  # fmt: skip


def test_a_card_has_its_results_when_it_is_seen(context: BrowserContext, site: Site, tmp_path: Path) -> None:
    sample = site.sample.copy_to(tmp_path / "copy")
    text = (sample.ablations / "tiny.yaml").read_text()
    same = text.replace("scales:\n", "scales:\n  own: {description: The same runs.}\n")
    for number in range(30):
        (sample.ablations / f"z{number:02}.yaml").write_text(same.replace("Selective copy", f"Copy {number}"))
    with page_site.visiting(context, sample.settings()) as visitor:
        page = visitor.open("ablations", ".leaders")
        last = page.locator("ul.ablations > li", has_text="Copy 29,")
        assert last.locator(".leaders").count() == 0
        last.scroll_into_view_if_needed()
        last.locator(".leaders").wait_for()
        assert last.locator(".leaders dt").all_inner_texts()[0] == "In-dist. (%)"
        assert "1 claim" in last.locator(".sizes").inner_text()
        assert last.locator(".sizes a").all_inner_texts() == ["base, own"]  # once, though two scales have these runs


def test_a_claim_is_within_a_narrow_screen(visitor: Visitor) -> None:
    texts = {"difference": "-17.00 [-18.75, -14.85] (CoPE without its gates − RoPE with a quarter of its frequencies)"}
    claim = claim_result(
        "shown",
        difference=-17.0,
        n=8,
        texts=texts | {"n": "8 pairs"},
        headline="CoPE 1, RoPE 18",
        measure="In-dist. (%)",
    )
    visitor.page.route("**/claims?committed=true", lambda route: route.fulfill(json=[claim.model_dump(mode="json")]))
    visitor.page.set_viewport_size({"width": 390, "height": 900})
    page = visitor.open("ablations", ".folded")
    verdict, headline = (page.locator(f".folded summary {each}").bounding_box() for each in ("span", "small"))
    assert verdict is not None
    assert headline is not None
    assert headline["y"] > verdict["y"] + 10, "on a line of its own"
    page.locator(".folded summary").click()
    assert "quarter of its frequencies) n = 8 pairs" in page.locator(".claims td:has(.difference)").inner_text()
    box = page.locator(".claims .difference").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390


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


def test_a_size_waits_only_for_a_sweep_of_its_own(visitor: Visitor) -> None:
    def partly(route: Route) -> None:
        listed = [each for each in route.fetch().json() if each["name"] == "tiny"]
        route.fulfill(json=[each | {"counts": {"finished": 2, "pending": 2}} for each in listed])

    sweep = {
        "sweep_id": "s",
        "status": "running",
        "ablation": "tiny",
        "title": "",
        "sets": [],
        "counts": {"pending": 2},
    }
    visitor.page.route("**/api/v1/ablations", partly)
    listed = [sweep]
    visitor.page.route("**/api/v1/sweeps?*", lambda route: route.fulfill(json={"sweeps": listed}))
    for scale, state in ((None, "waiting"), ("longer", "incomplete")):
        listed[0] = sweep | {"scale": scale}
        assert visitor.open("ablations", ".stage").locator(".stage").first.inner_text() == state


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
    page.locator(".view-tried .ask input").fill("model.position=cope tags.row=CoPE, not here")  # one condition
    page.keyboard.press("Enter")
    page.get_by_text("No run matches.").wait_for()
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
